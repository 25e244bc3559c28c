"""Each touch of Ray's private parts, so that an upgrade of Ray shows at once what it has broken."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from unittest.mock import ANY

import cloudpickle
import psutil
import pytest
import ray
import ray.train.torch
from clusters import cloud, cluster_of, ray_manifests
from processes import with_variable
from ray.util.placement_group import placement_group, placement_group_table

from xmcray.errors import ResourceError, StorageError
from xmcray.ray_adapter import private
from xmcray.ray_adapter.cluster import alive_nodes
from xmcray.ray_adapter.session import start_ray


@pytest.mark.usefixtures("cluster")
def test_a_local_cluster_is_on_loopback() -> None:
    assert [node.address for node in alive_nodes()] == ["127.0.0.1"]


def test_the_loopback_address_is_kept_for_the_block_only() -> None:
    from ray._private import services

    original = services.resolve_ip_for_localhost
    with private.loopback_address() as addresses:
        assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
        assert set(addresses.values()) == {"127.0.0.1"}
    assert services.resolve_ip_for_localhost is original


def test_a_local_cluster_says_nothing_of_its_token() -> None:
    # Without CPUs, Ray starts no workers ahead of need.
    code = "from xmcray.ray_adapter.session import start_ray; start_ray(num_cpus=0)"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    assert "token" not in done.stdout + done.stderr


INTERRUPTED = """
import signal, threading, time
import psutil
from xmcray.ray_adapter.session import start_ray

def has_agent():
    raylets = [child for child in psutil.Process().children() if child.name() == "raylet"]
    return any(raylet.children() for raylet in raylets)

def interrupt():
    # No event says that the raylet has started its agents, which Ray would leave.
    while not has_agent():
        time.sleep(0.01)
    signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=interrupt, daemon=True).start()
try:
    start_ray(num_cpus=0)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupted_start_of_ray_leaves_no_process() -> None:
    token = secrets.token_hex(8)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        env={**variables, "XMCRAY_TEST": token},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "interrupted\n"
    assert not with_variable(f"XMCRAY_TEST={token}")


def test_a_failed_start_of_ray_kills_what_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself ends most of its processes, which would hide that the others are killed."""
    shell = "sleep 600 & echo $!; wait"
    started: list[psutil.Process] = []

    def start_and_fail(**_: object) -> None:
        child = subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        pids = (child.pid, int(child.stdout.readline()))
        started.extend(map(psutil.Process, pids))
        raise RuntimeError("no room")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", start_and_fail)
    # The tests' own cluster goes on.
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(ResourceError, match=r"Ray did not start \(no room\)"):
        start_ray()
    assert len(started) == 2
    assert not any(map(is_alive, started))


def is_alive(process: psutil.Process) -> bool:
    """Whether a process may go on; a dead one may wait for its parent."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.usefixtures("cluster")
def test_only_the_process_that_started_a_cluster_says_so() -> None:
    elsewhere = ray.remote(num_cpus=0)(private.started_here)
    assert private.started_here()
    assert not ray.get(elsewhere.remote())


@pytest.mark.usefixtures("cluster")
def test_a_task_is_none_of_the_driver() -> None:
    assert not private.is_task_or_actor()
    elsewhere = ray.remote(num_cpus=0)(private.is_task_or_actor)
    assert ray.get(elsewhere.remote())


@pytest.mark.usefixtures("cluster")
def test_the_head_has_its_own_resource() -> None:
    assert [node.is_head for node in alive_nodes()] == [True]


@pytest.mark.usefixtures("cluster")
def test_living_actors_are_listed_by_name_or_class() -> None:
    @ray.remote(num_cpus=0)
    class Sleeper:
        def ready(self) -> None: ...

    sleepers = [Sleeper.remote(), Sleeper.options(name="named-sleeper").remote()]
    ray.get([sleeper.ready.remote() for sleeper in sleepers])
    names = private.alive_actor_names()
    assert "named-sleeper" in names
    assert any(name.endswith("Sleeper") for name in names)
    for sleeper in sleepers:
        ray.kill(sleeper)


@pytest.mark.usefixtures("cluster")
def test_a_head_lists_its_nodes() -> None:
    (node,) = private.nodes_of_head(ray.get_runtime_context().gcs_address)
    assert node["address"] == "127.0.0.1"
    assert node["head"]
    assert node["resources"]["CPU"] == 4


@pytest.mark.usefixtures("cluster")
def test_placement_groups_of_this_job_are_removed() -> None:
    ray.get(placement_group([{"CPU": 1}]).ready())
    private.remove_placement_groups_of_this_job()
    job = ray.get_runtime_context().get_job_id()
    states = {about["state"] for key, about in placement_group_table().items() if key.endswith(job)}
    assert states == {"REMOVED"}


def refuse_to_wait(without_workers: bool, same_state: bool) -> None:
    if without_workers and same_state:
        raise ResourceError("no workers")


def note_failures(failures: Mapping[int, private.WorkerFailure]) -> None: ...


def test_kinds_of_worker_failures_are_distinguished() -> None:
    from ray.train.v2._internal import exceptions
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

    worker = "Worker info: Worker(metadata=ActorMetadata(hostname='a', pid=12,))"
    failures = {
        0: RuntimeError("connection closed\nby peer"),
        1: exceptions.WorkerHealthCheckTimeoutError(f"hanging\n{worker}"),
        2: exceptions.WorkerHealthCheckFailedError(f"failed\n{worker}", RuntimeError()),
    }
    error = ray.train.WorkerGroupError("text", failures)
    assert list(private.worker_failures(error).values()) == [
        private.WorkerFailure(0, "failed", "", "RuntimeError: connection closed by peer"),
        private.WorkerFailure(1, "stalled", "process 12 on a", ANY),
        private.WorkerFailure(2, "died", "process 12 on a", ANY),
    ]
    assert private.worker_failures(RuntimeError()) == {}
    full = UserExceptionWithTraceback(StorageError("no space left"), "Traceback")
    (failure,) = private.worker_failures(ray.train.WorkerGroupError("text", {0: full})).values()
    assert isinstance(failure.mistake, StorageError)
    assert failure.reason == "StorageError: no space left"


def test_a_controller_callback_travels_and_knows_the_states() -> None:
    from ray.train.v2._internal.execution.callback import ControllerCallback
    from ray.train.v2._internal.execution.controller import state as states

    made = private.controller_callback(refuse_to_wait, note_failures)
    callback = cloudpickle.loads(cloudpickle.dumps(made))
    assert isinstance(callback, ControllerCallback)
    assert hasattr(ControllerCallback, "after_controller_state_update")
    running = states.RunningState()
    callback.after_controller_state_update(running, running)
    without_workers = (
        states.InitializingState(),
        states.SchedulingState(None),
        states.ReschedulingState(RuntimeError()),
        states.RestartingState(RuntimeError()),
    )
    for state in without_workers:
        callback.after_controller_state_update(running, state)
        with pytest.raises(ResourceError):
            callback.after_controller_state_update(state, state)


def test_a_trainer_hands_its_controller_over() -> None:
    """That an interrupt ends the controller is tested in test_placement.py."""
    trainer = ray.train.torch.TorchTrainer(lambda: None)
    assert callable(trainer._register_sigint_handler), "fit() calls it with the controller"
    controllers = private.take_over_interrupts(trainer)
    trainer._register_sigint_handler("controller")
    assert controllers == ["controller"]


@pytest.mark.parametrize("in_driver", [False, True])
def test_a_trainer_leaves_out_what_is_of_no_use(in_driver: bool) -> None:
    trainer = ray.train.torch.TorchTrainer(lambda: None)
    all_of_ray = {type(callback).__name__ for callback in trainer._create_default_callbacks()}
    private.leave_out_helpers(trainer, in_driver)
    left = {type(callback).__name__ for callback in trainer._create_default_callbacks()}
    of_drivers = {"PlacementGroupCleanerCallback"} if in_driver else set()
    assert all_of_ray - left == {"DatasetsCallback", *of_drivers}


@pytest.mark.usefixtures("cluster")
def test_a_controller_that_does_not_answer_is_killed() -> None:
    @ray.remote(num_cpus=0)
    class Controller:
        def __init__(self) -> None:
            self.aborted = False

        def abort(self) -> None:
            while True:
                self.aborted = True

        def ready(self) -> None: ...

    controller = Controller.remote()
    ray.get(controller.ready.remote())
    private.abort_controller(controller, timeout_s=0.2)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(controller.ready.remote())


def test_cluster_files_are_checked_by_ray() -> None:
    assert "available_node_types" in private.cluster_file_schema()["properties"]
    private.check_cluster_config(cloud("aws"))
    with pytest.raises(ValueError, match="head_node_type"):
        private.check_cluster_config({**cloud("aws"), "head_node_type": "boss"})


def test_the_autoscaler_reads_a_manifest() -> None:
    cluster = cluster_of(ray_manifests()["raycluster"])
    settings = private.autoscaling_config_of(cluster)
    assert settings["available_node_types"]
