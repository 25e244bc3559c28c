"""The nodes of the cluster that this process is connected to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ray

from xmcray.ray_adapter.private import HEAD_RESOURCE


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


def free_cpus() -> float:
    """Returns the number of logical CPUs that nothing has reserved."""
    return float(ray.available_resources().get("CPU", 0.0))


def ray_version() -> str:
    """Returns the version of the installed Ray."""
    return str(ray.__version__)
