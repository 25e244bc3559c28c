"""The nodes of the cluster that this process is connected to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ray

from xmcray.ray_adapter.private import HEAD_RESOURCE

# `ray up` leaves the configuration of the cluster under this name in the home folder of the head.
_BOOTSTRAP = "ray_bootstrap_config.yaml"
# KubeRay sets this variable in its pods.
_IN_KUBERAY = "RAY_USAGE_STATS_KUBERAY_IN_USE"


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive.

    Attributes:
        node_id: Ray's id of the node.
        address: IP address under which other nodes reach it.
        resources: amounts by resource, such as "CPU" and "GPU".
    """

    node_id: str
    address: str
    resources: Mapping[str, float]

    @property
    def is_head(self) -> bool:
        """Whether the cluster was started on this node."""
        return HEAD_RESOURCE in self.resources


def alive_nodes() -> list[Node]:
    """Lists the nodes that are alive."""
    nodes = []
    for entry in ray.nodes():
        if entry["Alive"]:
            node = Node(entry["NodeID"], entry["NodeManagerAddress"], entry["Resources"])
            nodes.append(node)
    return nodes


def autoscaler_file() -> Path | None:
    """The configuration that the autoscaler of this head follows; None if there is none here."""
    path = Path.home() / _BOOTSTRAP
    return path if path.is_file() else None


def is_autoscaled() -> bool:
    """Whether an autoscaler starts nodes when processes wait for them."""
    return autoscaler_file() is not None or os.environ.get(_IN_KUBERAY) == "1"


def started_cpu(timeout_s: float) -> bool:
    """Asks for a node with a CPU and waits for it; whether there is one in time."""
    probe = ray.remote(num_cpus=0.01)(_nothing).remote()
    ready, _ = ray.wait([probe], timeout=timeout_s)
    if not ready:
        ray.cancel(probe)
    return bool(ready)


def _nothing() -> None: ...


def free_cpus() -> float:
    """Returns the number of logical CPUs that nothing has reserved."""
    return float(ray.available_resources().get("CPU", 0.0))


def ray_version() -> str:
    """Returns the version of the installed Ray."""
    return str(ray.__version__)
