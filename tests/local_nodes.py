"""Several nodes on one machine, for a process that was started with `environment`: Ray reads it
when it is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import descendants, kill_family, wait_until

_HEAD_ID, _HEAD_TYPE = "f" * 51 + "00000", "ray.head.default"  # as the fake provider names its head
PATIENCE_S = 60
_HERE = Path(__file__).parent
FAST = {  # a lost node is noticed within two seconds instead of twenty
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Variables for a process that starts nodes: a token, and Ray's files in a folder that is
    removed afterwards.
    """
    with tempfile.TemporaryDirectory(
        prefix="xmcray-", ignore_cleanup_errors=True
    ) as folder:  # sockets: a short path
        (Path(folder) / "ray").mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        yield {
            **kept,
            **token,
            "RAY_TMPDIR": folder,
            # Workers get the priority of the test; Ray lets them yield to every other process.
            "RAY_worker_niceness": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{_HERE}:{_HERE / 'ranks'}",
        }


class LocalNodes:
    """A cluster whose head has no CPUs; the driver is this process.

    Args:
        caches: folder for what each node keeps on its disk.
    """

    def __init__(self, caches: Path) -> None:
        import ray
        from ray._private import services
        from ray.cluster_utils import Cluster

        services.resolve_ip_for_localhost = lambda host: (
            host
        )  # else it is replaced by the machine's address
        self._caches, self._ray = caches, ray
        self._nodes: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        self._cluster = Cluster(shutdown_at_exit=True)
        self.add("head", _system_config=FAST, include_dashboard=False)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="fatal")

    def add(self, name: str, cpus: int = 0, gpus: int = 0, **settings: Any) -> None:
        """Starts a node; `resources` are custom ones."""
        # Ray cleans up after a node by signal handlers, which only the main thread may set; others
        # end with the head.
        self._cluster._shutdown_at_exit = threading.current_thread() is threading.main_thread()
        self._nodes[name] = self._cluster.add_node(
            num_cpus=cpus,
            num_gpus=gpus,
            node_ip_address="127.0.0.1",
            object_store_memory=80 << 20,
            env_vars={"XMCRAY_CACHE": str(self._caches / name)},
            **settings,
        )
        self._names[self._nodes[name].node_id] = name

    def lose(self, name: str) -> None:
        """SIGKILL for the node's raylet; its workers end with it."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def carried(self, kind: str) -> list[str]:
        """Nodes that actors of a class are on, or were when they ended."""
        actors = self._ray._private.state.actors().values()
        on = [actor["Address"]["NodeID"] for actor in actors if actor["ActorClassName"] == kind]
        return sorted(
            self._names[node] for node in on if node in self._names
        )  # one that waits for a node is on none

    def close(self) -> None:
        """Ends all nodes."""
        self._ray.shutdown()
        self._cluster.shutdown()


class AutoscaledNodes:
    """A cluster that is a head without CPUs at first, with Ray's autoscaler and its provider of
    fake nodes.

    Args:
        kinds: resources of a node of each type, and how many there may be.
        idle_s: seconds after which a node that does nothing is ended.
    """

    def __init__(self, kinds: Mapping[str, tuple[dict[str, int], int]], idle_s: float) -> None:
        import ray
        from ray._private import services

        services.resolve_ip_for_localhost = lambda host: host
        home = Path(os.environ["RAY_TMPDIR"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._address, self._ray = f"127.0.0.1:{port}", ray
        types = {
            name: {"resources": has, "max_workers": most} for name, (has, most) in kinds.items()
        }
        config = {
            "cluster_name": "local",
            "max_workers": sum(most for _, most in kinds.values()),
            "idle_timeout_minutes": idle_s / 60,
            "provider": {
                "type": "external",  # "fake_multinode" wants a file that the wheel lacks
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "gcs_address": self._address,
                "head_node_id": _HEAD_ID,
                **dict.fromkeys(("launch_multiple", "use_node_id_as_ip"), True),
                **dict.fromkeys(("disable_node_updaters", "disable_launch_config_check"), True),
            },
            "available_node_types": {
                _HEAD_TYPE: {"resources": {}, "max_workers": 0, "node_config": {}},
                **{
                    name: {"min_workers": 0, "node_config": {}, **kind}
                    for name, kind in types.items()
                },
            },
            "head_node_type": _HEAD_TYPE,
            **{
                f"{of}setup_commands": [] for of in ("", "head_", "worker_")
            },  # what `ray up` would add
            **{f"{of}_start_ray_commands": [] for of in ("head", "worker")},
            **{
                "initialization_commands": [],
                "auth": {},
                "file_mounts": {},
                "cluster_synced_files": [],
            },
        }
        os.environ["HOME"] = str(home)  # where `ray up` leaves this file on a head
        path = home / "ray_bootstrap_config.yaml"
        path.write_text(json.dumps(config))
        fake = {
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_enable_autoscaler_v2": "1",
        }
        head = {"RAY_CLOUD_INSTANCE_ID": _HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID}
        ray_start = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--head",
            "--block",
            "--num-cpus=0",
        ]
        ray_start += [f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        ray_start += [
            f"--autoscaling-config={path}",
            f"--object-store-memory={80 << 20}",
            "--num-gpus=0",
        ]
        self._head = subprocess.Popen(
            ray_start,
            env={**os.environ, **fake, **head},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(lambda: listens(port), PATIENCE_S, lambda: f"no head at {self._address}")
        ray.init(address=self._address, log_to_driver=False, logging_level="fatal")

    def demand(self) -> int:
        """Bundles and actors that wait for a node."""
        from ray.autoscaler.v2.sdk import get_cluster_status

        waiting = get_cluster_status(self._address).resource_demands
        kinds = [*waiting.placement_group_demand, *waiting.ray_task_actor_demand]
        return sum(bundle.count for kind in kinds for bundle in kind.bundles_by_count)

    def number(self) -> int:
        """Nodes that are alive, besides the head."""
        return sum(node["Alive"] for node in self._ray.nodes()) - 1

    def close(self) -> None:
        """Ends all nodes."""
        self._ray.shutdown()
        family = descendants(self._head.pid)
        os.killpg(
            self._head.pid, signal.SIGKILL
        )  # SIGTERM waits half a minute for a head that has ended already
        self._head.wait()
        kill_family(family)


@contextmanager
def standing(pids: list[int]) -> Iterator[None]:
    """Processes stand still while the block runs; some may end meanwhile."""
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def slow_until(condition: Callable[[], bool], pids: list[int], over: threading.Event) -> None:
    """Processes go ten times slower until a condition holds, or `over` is set."""
    while not over.wait(0.02) and not condition():
        with standing(pids):
            over.wait(0.2)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def listens(port: int) -> bool:
    """Whether something answers on a port of loopback."""
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
