"""One Ray cluster for all tests of this folder: starting one takes longer than most of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from processes import descendants, wait_until
from ray.util.placement_group import placement_group_table

from xmcray.ray_adapter.session import start_ray

_LIMIT_S = 600  # for one test, on a machine that is busy with other work
_GONE_S = 60  # what ends by itself after a test has this long
# What stays as long as the cluster or this process: actors of Ray Data, and processes of which Ray
# starts some ahead of need and keeps others for the next task.
_KEPT_ACTORS = {"_StatsActor", "_AutoscalingCoordinatorActor"}
_KEPT_PROCESSES = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", *_KEPT_ACTORS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sets the time limit of the tests in this folder.

    The limit ends the process, because an exception of a signal's handler does not get through a
    call that waits for Ray.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(_LIMIT_S, method="thread"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A quiet local cluster of four logical CPUs, which may be more than the machine has."""
    ray.shutdown()  # a test of another folder may have left a cluster of another size
    for attempts_left in reversed(range(3)):
        try:
            start_ray(num_cpus=4, object_store_bytes=256 << 20)
            break
        except Exception as error:
            # Ray gives a node 30 s, which may be too short on a busy machine.
            if not attempts_left or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
    yield
    ray.shutdown()


@pytest.fixture
def other_driver(cluster: None) -> dict[str, str]:
    """Variables of another process that joins the shared cluster."""
    return {
        **os.environ,
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        # Else Ray replaces the loopback address with the machine's, where nothing listens.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


@pytest.fixture(autouse=True)
def _nothing_is_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of the shared cluster leaves no actor, placement group or process behind."""
    if "cluster" not in request.fixturenames:
        yield
        return
    request.getfixturevalue("cluster")
    before = _running().keys()
    yield
    wait_until(
        lambda: not _running().keys() - before,
        _GONE_S,
        lambda: f"left running: {[_running().get(key) for key in _running().keys() - before]}",
    )


def _running() -> dict[str, str]:
    """What runs in the cluster and below this process: descriptions by id."""
    running = {}
    for actor_id, actor in ray._private.state.actors().items():
        kind = actor["ActorClassName"]
        if actor["State"] != "DEAD" and kind not in _KEPT_ACTORS:
            running[actor_id] = f"actor {kind}"
    for group_id, group in placement_group_table().items():
        if group["state"] != "REMOVED":
            running[group_id] = "placement group"
    for pid, command in descendants(os.getpid()).items():
        is_of_ray = "/ray/" in command or any(name in command for name in _KEPT_PROCESSES)
        if not is_of_ray and "multiprocessing.resource_tracker" not in command:
            running[str(pid)] = f"process {command}"
    return running
