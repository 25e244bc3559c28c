"""Every touch of Ray's private parts. Nothing else in the package may make one; a test checks that.

Each function was checked with Ray 2.60.0 and says what to do when a later version breaks it. All of
them are exercised by tests/on_ray/test_ray_private.py, which is the first test to run after an
upgrade of Ray. The private modules are imported inside the functions, so that a module that Ray has
moved breaks one function instead of the whole package.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xmcray.errors import XmcrayError, one_line

# A resource that only the head of a cluster has. Checked with Ray 2.60.0.
# If it breaks: compare ray.nodes() of a cluster of two nodes. Ray keeps the name in
# HEAD_NODE_RESOURCE_NAME of ray._private.ray_constants.
HEAD_RESOURCE = "node:__internal_head__"

_STATE_ALIVE = 0  # of a node in the GCS: GcsNodeInfo.ALIVE


@contextlib.contextmanager
def loopback_address() -> Iterator[dict[str, Any]]:
    """Lets `ray.init` keep 127.0.0.1, and yields the arguments that put all its ports there.

    Ray replaces the loopback address with the machine's address, on which every port is then open
    to others. `ray start --node-ip-address=127.0.0.1` keeps it if
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 is set. That variable is read when ray is imported, which is
    too late here.

    Checked with Ray 2.60.0. If it breaks: look for the function that `ray.init` applies to
    `_node_ip_address` (`resolve_ip_for_localhost` in ray/_private/services.py) and replace it with
    the identity.
    """
    from ray._private import services

    original = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield {"_node_ip_address": "127.0.0.1", "dashboard_host": "127.0.0.1"}
    finally:
        services.resolve_ip_for_localhost = original


def started_here() -> bool:
    """Tells whether this process has started the cluster that it is connected to.

    Checked with Ray 2.60.0. If it breaks: return False. Trainings on a local cluster then start an
    actor that watches its only node, which takes two seconds of CPU time.
    """
    from ray._private import worker

    node: Any = worker._global_node
    return node is not None and bool(node.head)


def is_task_or_actor() -> bool:
    """Whether Ray has started this process to run tasks or an actor.

    Checked with Ray 2.60.0. If it breaks: the public `get_task_id()` of the context says so too, but
    warns in every other process.
    """
    import ray

    if not ray.is_initialized():
        return False
    context: Any = ray.get_runtime_context()
    return bool(context.worker.mode == ray.WORKER_MODE)


def alive_actor_names() -> list[str]:
    """Lists the actors of the cluster by name, or by class if they have no name. Used in messages.

    Checked with Ray 2.60.0. If it breaks: `ray.util.state.list_actors` has the same facts, but
    needs the dashboard.
    """
    from ray._private import state

    actors = state.actors(actor_state_name="ALIVE").values()
    return [actor["Name"] or actor["ActorClassName"] for actor in actors]


def nodes_of_head(address: str) -> list[dict[str, Any]]:
    """Asks a Ray head for its living nodes without joining its cluster.

    Args:
        address: HOST:PORT of the head's GCS.
    Returns:
        For each node its address, whether it is the head, and its resources.

    Checked with Ray 2.60.0. If it breaks: `ray.nodes()` says the same after
    `ray.init(address=...)`, which however starts a driver in the cluster.
    """
    from ray import _raylet

    raylet: Any = _raylet  # compiled, without types
    infos = raylet.GcsClient(address=address).get_all_node_info(timeout=10).values()
    return [
        {
            "address": info.node_manager_address,
            "head": bool(info.is_head_node),
            "resources": dict(info.resources_total),
        }
        for info in infos
        if info.state == _STATE_ALIVE
    ]


def remove_placement_groups_of_this_job() -> None:
    """Removes the placement groups that trainings of this job left behind; other jobs keep theirs.

    Ray Tune kills the actor of a trial that it stops, and then the workers that this actor had
    started lose their driver but not always their placement group.

    Checked with Ray 2.60.0. If it breaks: PlacementGroupID moved out of ray._raylet, or an id no
    longer ends with the id of its job. Without this function the CPUs of stopped trials stay
    reserved until the driver ends.
    """
    import ray
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import (
        PlacementGroup,
        placement_group_table,
        remove_placement_group,
    )

    job = ray.get_runtime_context().get_job_id()
    for group_id, group in placement_group_table().items():
        # An id ends with that of its job.
        if group_id.endswith(job) and group["state"] != "REMOVED":
            binary_id = PlacementGroupID(bytes.fromhex(group_id))
            remove_placement_group(PlacementGroup(binary_id))


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """Why Ray Train gave up a worker.

    Attributes:
        rank: of the worker.
        kind: "stalled" without an answer to Ray's polls, "died" without its process, or "failed"
            by an exception.
        process: its host and process id, or "" where Ray does not say.
        reason: the exception in one line.
        mistake: the exception itself, if it is a mistake that the user can repair.
    """

    rank: int
    kind: Literal["stalled", "died", "failed"]
    process: str
    reason: str
    mistake: XmcrayError | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the process stopped or ended, which is no mistake in the code that it ran."""
        return self.kind != "failed"

    def text(self, stall_s: float) -> str:
        """The failure in words."""
        name = f"rank {self.rank}{self.process and f' ({self.process})'}"
        if self.kind == "stalled":
            return f"{name} gave no sign of life for {stall_s:g} s"
        if self.kind == "died":
            return f"{name} died"
        return f"{name} failed ({self.reason})"


def worker_failures(error: Any) -> dict[int, WorkerFailure]:
    """Classifies what Ray Train gives as the reasons for which workers failed, by rank.

    Args:
        error: of Ray Train; one that has no failures of workers gives none.

    Checked with Ray 2.60.0. If it breaks: the errors of health checks moved out of
    ray/train/v2/_internal/exceptions.py, or their texts no longer hold the repr of a worker.
    """
    from ray.train.v2._internal import exceptions

    failures = {}
    for rank, failure in getattr(error, "worker_failures", {}).items():
        kind: Literal["stalled", "died", "failed"] = "failed"
        if isinstance(failure, exceptions.WorkerHealthCheckTimeoutError):
            kind = "stalled"
        elif isinstance(failure, exceptions.WorkerHealthCheckFailedError):
            kind = "died"
        host = re.search(r"hostname='([^']+)'", str(failure))
        pid = re.search(r"pid=(\d+)", str(failure))
        process = f"process {pid[1]} on {host[1]}" if pid and host else ""
        # Ray Train wraps what the function of a worker raised; its own text is a traceback.
        cause = getattr(failure, "_base_exc", failure)
        reason = one_line(f"{type(cause).__name__}: {cause}")
        mistake = cause if isinstance(cause, XmcrayError) else None
        failures[rank] = WorkerFailure(rank, kind, process, reason, mistake)
    return failures


def controller_callback(
    after_turn: Callable[[bool, bool], None],
    on_restart: Callable[[Mapping[int, WorkerFailure]], None],
) -> Any:
    """Makes a callback of Ray Train that runs after each turn of the controller's loop.

    Args:
        after_turn: called in the controller's process with two answers: has the run no workers now,
            and is the state the same as in the turn before. What it raises ends the run. It has to
            be picklable.
        on_restart: called there with the failures of workers, by rank, because of which all workers
            are about to be started again. It has to be picklable.

    Checked with Ray 2.60.0. If it breaks: the base class is a DeveloperAPI in a private module; the
    states are listed in ray/train/v2/_internal/execution/controller/state.py. The states below are
    those in which no worker trains and the run has not ended.
    """
    from ray.train.v2._internal.execution.callback import ControllerCallback
    from ray.train.v2._internal.execution.controller import state as states

    without_workers = (
        states.InitializingState,
        states.SchedulingState,
        states.ReschedulingState,
        states.RestartingState,
    )

    class AfterTurn(ControllerCallback):
        def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
            is_new = current_state is not previous_state
            if is_new and isinstance(current_state, states.RestartingState):
                on_restart(worker_failures(current_state.training_failed_error))
            after_turn(isinstance(current_state, without_workers), current_state is previous_state)

    return AfterTurn()


def take_over_interrupts(trainer: Any) -> list[Any]:
    """Keeps a Ray Train trainer from handling SIGINT; Ray's handler ends the process with code 0.

    Returns:
        A list that gets the actor handle of the trainer's controller when `fit` starts it.

    Checked with Ray 2.60.0. If it breaks: `fit` no longer calls
    `_register_sigint_handler(controller)` of ray/train/v2/api/data_parallel_trainer.py. An
    interrupt then ends `xmcray train` with code 0 instead of 130.
    """
    controllers: list[Any] = []
    trainer._register_sigint_handler = controllers.append
    return controllers


def leave_out_helpers(trainer: Any, in_driver: bool) -> None:
    """Keeps a Ray Train trainer from starting actors that are of no use here.

    Each is a process that takes two seconds of CPU time to start. One hands out sets of Ray Data to
    the workers, which have none. Another one removes the placement group of a controller that was
    killed. In a driver `abort_controller` and the end of the job do that, also where there is no
    dashboard, without which the actor would go on for ever.

    Args:
        in_driver: whether this process is a driver, and not an actor that Ray Tune may kill.

    Checked with Ray 2.60.0. If it breaks: look for the callbacks that `fit` gives to the controller
    (ray/train/v2/api/data_parallel_trainer.py), or remove the call.
    """
    unused = {"DatasetsCallback"}
    if in_driver:
        unused.add("PlacementGroupCleanerCallback")
    callbacks_of_ray = trainer._create_default_callbacks

    def create_callbacks() -> list[Any]:
        return [each for each in callbacks_of_ray() if type(each).__name__ not in unused]

    trainer._create_default_callbacks = create_callbacks


def abort_controller(controller: Any, timeout_s: float) -> None:
    """Ends the workers of a training and then its controller, by force if it does not answer.

    Checked with Ray 2.60.0. If it breaks: `abort` of the controller's actor is what Ray's own
    SIGINT handler calls (ray/train/v2/api/data_parallel_trainer.py).
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        ray.get(controller.abort.remote(), timeout=timeout_s)
    except RayActorError:
        return  # the actor ends itself at the end of `abort`
    except GetTimeoutError:
        ray.kill(controller)
        remove_placement_groups_of_this_job()


def cluster_file_schema() -> dict[str, Any]:
    """Reads the JSON schema of cluster files for `ray up`, which is part of Ray's wheel.

    Checked with Ray 2.60.0. If it breaks: find ray-schema.json in the installed package.
    """
    import ray.autoscaler

    path = Path(ray.autoscaler.__file__).parent / "ray-schema.json"
    schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return schema


def check_cluster_config(values: dict[str, Any]) -> None:
    """Merges the provider's defaults into a cluster file and validates it, as `ray up` does first.

    Args:
        values: contents of the file; they are changed.
    Raises:
        NotImplementedError: Ray does not know the provider's type.
        Exception: whatever Ray's code stumbles over.

    Checked with Ray 2.60.0. If it breaks: `_bootstrap_config` of
    ray/autoscaler/_private/commands.py shows the functions that `ray up` calls.
    """
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(values))


def autoscaling_config_of(cluster_spec: Mapping[str, Any]) -> dict[str, Any]:
    """Derives the autoscaler's settings from a RayClusterSpec of KubeRay, as Ray's head does.

    Raises:
        KeyError: a field is missing.
        Exception: whatever Ray's code stumbles over.

    Checked with Ray 2.60.0. If it breaks: ray/autoscaler/_private/kuberay/autoscaling_config.py
    holds the function that turns the Ray custom resource into such settings.
    """
    from ray.autoscaler._private.kuberay import autoscaling_config

    custom_resource = {"metadata": {"name": "-", "namespace": "-"}, "spec": cluster_spec}
    settings: dict[str, Any] = autoscaling_config._derive_autoscaling_config_from_ray_cr(
        custom_resource
    )
    return settings
