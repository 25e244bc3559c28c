"""Which node carries what, and whether a cluster has the room; asked before anything is started.

    trainers       one GPU each, or CPUs alone. Ray Train puts them in one placement group, packed on few nodes: they
                   exchange vectors in every step
    index actors   a unit of the resource `cluster.index_resource`, where a node has any; else the nodes with CPUs and
                   no GPU, else those with CPUs, else any. Spread: they exchange nothing, and what they need is memory
    coordinator    like index actors, without the resource: it waits, and merges what they found

Ray restarts an actor by the rule it was started with, so what a lost node carried comes up on another one. A head
without CPUs carries neither trainers nor, while there is another node, index actors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import yaml

from xmcray.errors import ResourceError
from xmcray.training.run import ClusterConfig

logger = logging.getLogger(__name__)

Resources = Mapping[str, float]
_HEAD = "node:__internal_head__"  # a resource of the head alone
_BOOTSTRAP = "ray_bootstrap_config.yaml"  # `ray up` leaves the cluster's configuration under this name on the head


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a cluster.

    Attributes:
        alive: resources by node id.
        possible: resources of a node and how many of them there can be, as the autoscaler's configuration says; None
            where an autoscaler does not tell its limits.
        autoscaled: whether nodes may join when they are asked for.
    """

    alive: Mapping[str, Resources]
    possible: Sequence[tuple[Resources, int]] | None
    autoscaled: bool

    @classmethod
    def of_cluster(cls) -> Nodes:
        """The cluster that this process is connected to."""
        alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        bootstrap = Path.home() / _BOOTSTRAP
        if bootstrap.is_file():
            head = [(node, 1) for node in alive.values() if _HEAD in node]
            return cls(
                alive,
                [*head, *_of_types(yaml.safe_load(bootstrap.read_text(encoding="utf-8")))],
                True,
            )
        if (
            os.environ.get("RAY_USAGE_STATS_KUBERAY_IN_USE") == "1"
        ):  # set in KubeRay's pods; the limits are not
            return cls(alive, None, True)
        return cls(alive, [], False)

    def room(self, each: Resources) -> int:
        """How many processes fit that ask for `each`; all of what one asks for is on one node."""
        return _room(((node, 1) for node in self.alive.values()), each)

    def possible_room(self, each: Resources) -> int | None:
        """As `room`, with all nodes that the autoscaler may start; None where nobody knows."""
        return None if self.possible is None else max(self.room(each), _room(self.possible, each))

    def total(self, resource: str) -> float:
        """Of all nodes."""
        return sum(node.get(resource, 0) for node in self.alive.values())


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the processes of a run go.

    Attributes:
        use_gpu: whether workers have a GPU each.
        threads: of each process.
        index, coordinator: options of the actors.
        asked: what the workers ask for, in words. wait_s: seconds without room for them that end the run.
    """

    use_gpu: bool
    threads: int
    index: Mapping[str, Any]
    coordinator: Mapping[str, Any]
    asked: str
    wait_s: float

    @property
    def index_gpu(self) -> int | None:
        """The device of an index actor; None for none."""
        return 0 if self.index.get("num_gpus") else None


def place(cluster: ClusterConfig, nodes: Nodes, num_shards: int) -> Placement:
    """Where a run goes, given the nodes there are and may be.

    Args:
        num_shards: index actors; 0 for a run without a negative pool.
    Raises:
        ResourceError: there is less than what is asked for; without this check the run would wait in vain.
    """
    fewest = cluster.min_workers or cluster.workers
    gpus = nodes.possible_room({"GPU": 1})
    enough = nodes.room({"GPU": 1}) >= fewest or (gpus is not None and gpus >= fewest)
    use_gpu = cluster.device == "gpu" or (cluster.device == "auto" and enough)
    each = {"CPU": cluster.cpus_per_worker, **({"GPU": 1} if use_gpu else {})}
    _require(fewest, each, nodes)
    return Placement(
        use_gpu,
        _threads(cluster, nodes, num_shards),
        _index_options(cluster, nodes, num_shards, use_gpu),
        _on_cpu_nodes(nodes),
        f"{fewest} workers that ask for {_words(each)} each",
        cluster.wait_s
        or (3600 if nodes.autoscaled else 240),  # a machine in the cloud may take long to come
    )


def _require(workers: int, each: Resources, nodes: Nodes) -> None:
    """Refuses what the cluster cannot have room for, and warns of what it has no room for yet."""
    room, possible = nodes.room(each), nodes.possible_room(each)
    if possible is not None and possible < workers:
        raise ResourceError(_lacking(workers, each, nodes, possible))
    if room < workers:
        logger.warning(
            "the cluster has room for %d of %d workers; the run waits for nodes that its autoscaler starts",
            room,
            workers,
        )


def _lacking(workers: int, each: Resources, nodes: Nodes, possible: int) -> str:
    if nodes.autoscaled:
        return (
            f"{workers} workers ask for {_words(each)} each, the cluster and its autoscaler have room for {possible};"
            " lower --workers or raise max_workers of a node type"
        )
    if "GPU" in each and nodes.total("GPU") < workers:
        return (
            f"{workers} workers ask for a GPU each, the cluster has {nodes.total('GPU'):g}; lower --workers or set"
            " cluster.device=cpu"
        )
    with_gpu = " and a GPU" if "GPU" in each else ""
    has = [node.get("CPU", 0) for node in nodes.alive.values() if not with_gpu or node.get("GPU")]
    return (
        f"{workers} workers ask for {each['CPU']:g} CPUs{with_gpu} each, the cluster's nodes have"
        f" {', '.join(f'{cpus:g}' for cpus in has)}; lower --workers or cluster.cpus_per_worker"
    )


def _words(each: Resources) -> str:
    return (
        " and ".join(f"{number:g} {name}" for name, number in each.items() if number) or "nothing"
    )


def _index_options(
    cluster: ClusterConfig, nodes: Nodes, num_shards: int, use_gpu: bool
) -> dict[str, Any]:
    """Options of index actors; where as many GPUs as workers are left, each has one."""
    unit = {cluster.index_resource: 1.0}
    if cluster.index_resource and (nodes.room(unit) or nodes.possible_room(unit)):
        possible = nodes.possible_room(unit)
        if possible is not None and possible < num_shards:
            raise ResourceError(
                f"{num_shards} index actors ask for one {cluster.index_resource!r} each, the cluster has {possible};"
                " give its nodes more of that resource or set cluster.index_resource to another one"
            )
        return {"resources": unit, "scheduling_strategy": "SPREAD"}
    if use_gpu and nodes.total("GPU") >= cluster.workers + num_shards:
        return {"num_gpus": 1, "scheduling_strategy": "SPREAD"}
    return {**_on_cpu_nodes(nodes), "scheduling_strategy": "SPREAD"}


def _on_cpu_nodes(nodes: Nodes) -> dict[str, Any]:
    """Options of an actor that asks for nothing: nodes with CPUs and no GPU, else nodes with CPUs, else any node."""
    idle = [node for node, has in nodes.alive.items() if not has.get("CPU")]
    busy = [node for node, has in nodes.alive.items() if has.get("GPU") and node not in idle]
    excluded = [names for names in ([*idle, *busy], idle) if 0 < len(names) < len(nodes.alive)]
    if not excluded:
        return {}
    selectors = [{"ray.io/node-id": f"!in({','.join(names)})"} for names in excluded]
    others = [
        {"label_selector": selector} for selector in [*selectors[1:], {"ray.io/node-id": "!none"}]
    ]
    return {"label_selector": selectors[0], "fallback_strategy": others}


def _room(nodes: Iterable[tuple[Resources, int]], each: Resources) -> int:
    needs = [(name, number) for name, number in each.items() if number > 0]
    if not needs:
        return 1 << 16
    return sum(
        count
        * min(
            int(has.get(name, 0) / number + 1e-9) for name, number in needs
        )  # 0.3 has room for 0.1 thrice
        for has, count in nodes
    )


def _threads(cluster: ClusterConfig, nodes: Nodes, num_shards: int) -> int:
    """Threads of each process: on one machine, all together do not exceed its cores."""
    if len([node for node in nodes.alive.values() if node.get("CPU")]) > 1:
        return cluster.threads_per_process or max(1, int(cluster.cpus_per_worker))
    return cluster.threads_per_process or max(
        1, (os.cpu_count() or 1) // (cluster.workers + num_shards)
    )


def _of_types(config: Mapping[str, Any]) -> list[tuple[Resources, int]]:
    """Nodes that an autoscaler may start, by node type: at most `max_workers` of it, and of the cluster."""
    most = int(config.get("max_workers", 0))
    types = config.get("available_node_types", {})
    return [
        (kind.get("resources", {}), min(int(kind.get("max_workers", most)), most))
        for name, kind in types.items()
        if name != config.get("head_node_type")
    ]
