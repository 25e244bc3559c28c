"""Decides which node carries what, and whether a cluster has the room, before anything is started.

    trainers       One GPU each, or CPUs only. Ray Train packs them on few nodes in one placement
                   group, because they exchange vectors in every step.
    index actors   One unit of the resource `cluster.index_resource`. If no node has the resource,
                   they take GPUs that trainers leave. If trainers take all GPUs, each actor goes to
                   the GPU of a trainer, of which it reserves nothing: a part that it reserved could
                   keep a trainer from starting again. Without GPUs they go to nodes with CPUs and
                   no GPU, then to nodes with CPUs, and else to any node. They are spread over the
                   nodes, because they exchange nothing and what they need is memory.
    coordinator    Like index actors, without the resource: it waits, and merges what they find.

Ray restarts an actor with the options that it was started with, so an actor of a lost node comes up
on another one. A head without CPUs carries neither trainers nor, while there is another node, index
actors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from xmcray.errors import ResourceError
from xmcray.ray_adapter.cluster import alive_nodes, autoscaler_file, is_autoscaled
from xmcray.training.run_config import ClusterConfig

logger = logging.getLogger(__name__)

Resources = Mapping[str, float]
_UNLIMITED = 1 << 16  # processes that reserve nothing
_WAIT_S = 240
_WAIT_FOR_MACHINES_S = 3600  # a machine in the cloud may take long to start
_NODE_ID = "ray.io/node-id"  # a label that Ray gives to each node
_ANY_NODE = {_NODE_ID: "!none"}  # no node has the id "none"


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a cluster.

    Attributes:
        alive: resources by node id.
        possible: resources of each type of node and how many of them there can be, as the
            autoscaler's configuration says; None if the limits of the autoscaler are not known.
        autoscaled: whether an autoscaler starts nodes when processes wait for them.
    """

    alive: Mapping[str, Resources]
    possible: Sequence[tuple[Resources, int]] | None
    autoscaled: bool

    @classmethod
    def of_cluster(cls) -> Nodes:
        """Returns the nodes of the cluster that this process is connected to."""
        nodes = alive_nodes()
        alive = {node.node_id: node.resources for node in nodes}
        path = autoscaler_file()
        if path is not None:
            cluster_file = yaml.safe_load(path.read_text(encoding="utf-8"))
            heads = [(node.resources, 1) for node in nodes if node.is_head]
            return cls(alive, heads + _worker_types(cluster_file), autoscaled=True)
        if is_autoscaled():
            # The limits of KubeRay's autoscaler are nowhere to be read.
            return cls(alive, None, autoscaled=True)
        return cls(alive, [], autoscaled=False)

    def room(self, each: Resources) -> int:
        """Returns how many processes fit that reserve `each`, which has to come from one node."""
        return _room(((node, 1) for node in self.alive.values()), each)

    def possible_room(self, each: Resources) -> int | None:
        """Returns the room with all nodes that the autoscaler may start; None if its limits are not
        known.
        """
        if self.possible is None:
            return None
        return max(self.room(each), _room(self.possible, each))

    def total(self, resource: str) -> float:
        """Returns the amount of a resource in all nodes."""
        return sum(node.get(resource, 0) for node in self.alive.values())


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the processes of a run go.

    Attributes:
        use_gpu: whether each worker has a GPU.
        threads: threads of each process.
        index_options: Ray's options of the index actors.
        coordinator_options: Ray's options of the coordinator.
        request: what the workers ask for, in words.
        wait_s: seconds without room for the workers after which the run ends.
        shared_gpus: for each index actor that searches on a trainer's GPU, its options and the
            number of the GPU on its node.
    """

    use_gpu: bool
    threads: int
    index_options: Mapping[str, Any]
    coordinator_options: Mapping[str, Any]
    request: str
    wait_s: float
    shared_gpus: Sequence[tuple[Mapping[str, Any], int]]

    @property
    def index_gpu(self) -> int | None:
        """The device of an index actor; None if it has no GPU."""
        return 0 if self.index_options.get("num_gpus") else None


def place(
    cluster: ClusterConfig, nodes: Nodes, num_shards: int, index_suits_gpu: bool = True
) -> Placement:
    """Decides where a run goes, given the nodes that are alive and those that may join.

    Args:
        cluster: section `cluster` of the run.
        nodes: nodes of the cluster.
        num_shards: index actors; 0 for a run without a negative pool.
        index_suits_gpu: whether an index actor can search on a GPU at all.
    Raises:
        ResourceError: there can never be room. Without this check the run would wait in vain.
    """
    min_workers = cluster.min_workers or cluster.workers
    use_gpu = _use_gpu(cluster, nodes, min_workers)
    each = {"CPU": cluster.cpus_per_worker}
    if use_gpu:
        each["GPU"] = 1
    _check_room(min_workers, each, nodes)
    index_may_use_gpu = use_gpu and index_suits_gpu
    default_wait_s = _WAIT_FOR_MACHINES_S if nodes.autoscaled else _WAIT_S
    return Placement(
        use_gpu=use_gpu,
        threads=_threads(cluster, nodes, num_shards, each),
        index_options=_index_options(cluster, nodes, num_shards, index_may_use_gpu),
        coordinator_options=_cpu_node_options(nodes),
        request=f"{min_workers} workers that ask for {_words(each)} each",
        wait_s=cluster.wait_s or default_wait_s,
        shared_gpus=_shared_gpus(cluster, nodes, num_shards) if index_may_use_gpu else [],
    )


def _use_gpu(cluster: ClusterConfig, nodes: Nodes, min_workers: int) -> bool:
    if cluster.device != "auto":
        return cluster.device == "gpu"
    one_gpu = {"GPU": 1.0}
    gpus = nodes.possible_room(one_gpu)
    if gpus is None:
        gpus = nodes.room(one_gpu)
    if 0 < gpus < min_workers:
        logger.warning(
            "the cluster has GPUs for %d of %d workers, so they train on CPUs; --workers %d takes GPUs",
            gpus,
            min_workers,
            gpus,
        )
    return gpus >= min_workers


def _check_room(workers: int, each: Resources, nodes: Nodes) -> None:
    """Refuses a run that can never have room, and warns of one that has to wait for nodes."""
    room = nodes.room(each)
    possible = nodes.possible_room(each)
    if possible is not None and possible < workers:
        raise ResourceError(_no_room_message(workers, each, nodes, possible))
    if room < workers:
        logger.warning(
            "the cluster has room for %d of %d workers; the run waits for nodes that its autoscaler starts",
            room,
            workers,
        )


def _no_room_message(workers: int, each: Resources, nodes: Nodes, possible: int) -> str:
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
    candidates = list(nodes.alive.values())
    with_gpu = ""
    if "GPU" in each:
        candidates = [node for node in candidates if node.get("GPU")]
        with_gpu = " and a GPU"
    cpus = ", ".join(f"{node.get('CPU', 0):g}" for node in candidates)
    return (
        f"{workers} workers ask for {each['CPU']:g} CPUs{with_gpu} each, the cluster's nodes have {cpus}; lower"
        " --workers or cluster.cpus_per_worker"
    )


def _words(each: Resources) -> str:
    amounts = [f"{amount:g} {resource}" for resource, amount in each.items() if amount]
    return " and ".join(amounts) or "nothing"


def _index_options(
    cluster: ClusterConfig,
    nodes: Nodes,
    num_shards: int,
    index_may_use_gpu: bool,
) -> dict[str, Any]:
    """Returns the options of index actors. Each has a GPU if the workers leave as many as there are
    actors.
    """
    spread = {"scheduling_strategy": "SPREAD"}
    if _nodes_are_marked(cluster, nodes):
        unit = {cluster.index_resource: 1.0}
        possible = nodes.possible_room(unit)
        if possible is not None and possible < num_shards:
            raise ResourceError(
                f"{num_shards} index actors ask for one {cluster.index_resource!r} each, the cluster has {possible};"
                " give its nodes more of that resource or set cluster.index_resource to another one"
            )
        return {"resources": unit, **spread}
    may_use_gpu = index_may_use_gpu and cluster.index_may_use_gpu
    if may_use_gpu and nodes.total("GPU") >= cluster.workers + num_shards:
        return {"num_gpus": 1, **spread}
    return {**_cpu_node_options(nodes), **spread}


def _shared_gpus(
    cluster: ClusterConfig, nodes: Nodes, num_shards: int
) -> list[tuple[dict[str, Any], int]]:
    """Returns options and a GPU for each index actor if the trainers take all GPUs, otherwise
    nothing.
    """
    if _nodes_are_marked(cluster, nodes) or not cluster.index_may_use_gpu:
        return []
    # A GPU that trainers leave may be that of another job, and actors would not reserve it.
    if nodes.total("GPU") > cluster.workers:
        return []
    with_gpu = [node_id for node_id, resources in nodes.alive.items() if resources.get("GPU")]
    # If its node is lost, an actor goes to another one. There it tries the GPU of the same number,
    # and else searches on the CPU.
    others = [{_NODE_ID: f"in({','.join(with_gpu)})"}, _ANY_NODE]
    gpus = []
    for node_id in with_gpu:
        options = {
            "label_selector": {_NODE_ID: node_id},
            "fallback_strategy": [{"label_selector": selector} for selector in others],
        }
        num_gpus = int(nodes.alive[node_id]["GPU"])
        gpus += [(options, gpu) for gpu in range(num_gpus)]
    if not gpus:
        return []
    return [gpus[shard % len(gpus)] for shard in range(num_shards)]


def _nodes_are_marked(cluster: ClusterConfig, nodes: Nodes) -> bool:
    """Whether a node has the resource of index actors, or an autoscaler may start one that has."""
    # Every node has the resource "CPU", which therefore marks none.
    if not cluster.index_resource or not cluster.index_may_use_gpu:
        return False
    unit = {cluster.index_resource: 1.0}
    return bool(nodes.room(unit) or nodes.possible_room(unit))


def _cpu_node_options(nodes: Nodes) -> dict[str, Any]:
    """Returns options that prefer nodes with CPUs and no GPU, then nodes with CPUs, then any
    node.
    """
    without_cpu = []
    with_gpu = []
    for node_id, resources in nodes.alive.items():
        if not resources.get("CPU"):
            without_cpu.append(node_id)
        elif resources.get("GPU"):
            with_gpu.append(node_id)
    # The strictest exclusion first. One that excludes no node, or every node, would be of no use.
    exclusions = [without_cpu + with_gpu, without_cpu]
    useful = [excluded for excluded in exclusions if 0 < len(excluded) < len(nodes.alive)]
    selectors = [{_NODE_ID: f"!in({','.join(excluded)})"} for excluded in useful]
    if not selectors:
        return {}
    selectors.append(_ANY_NODE)
    first, *others = selectors
    fallbacks = [{"label_selector": selector} for selector in others]
    return {"label_selector": first, "fallback_strategy": fallbacks}


def _room(node_counts: Iterable[tuple[Resources, int]], each: Resources) -> int:
    """How many processes the nodes have room for.

    Args:
        node_counts: resources of a node, and how many nodes have them.
        each: what a process needs.
    """
    needs = {resource: amount for resource, amount in each.items() if amount > 0}
    if not needs:
        return _UNLIMITED
    room = 0
    for has, count in node_counts:
        fits = []
        for resource, amount in needs.items():
            # The small term makes room for three times 0.1 in 0.3, whose quotient is
            # 2.9999999999999996.
            quotient = has.get(resource, 0) / amount
            fits.append(int(quotient + 1e-9))
        # The scarcest resource of a node limits it.
        room += count * min(fits)
    return room


def _threads(cluster: ClusterConfig, nodes: Nodes, num_shards: int, each: Resources) -> int:
    """Returns the threads of each process; on one machine all processes together do not exceed its
    cores.
    """
    if cluster.threads_per_process:
        return cluster.threads_per_process
    nodes_with_cpus = [node for node in nodes.alive.values() if node.get("CPU")]
    # The workers will be on nodes that are not there yet, so this machine's cores say nothing.
    waits_for_nodes = nodes.autoscaled and nodes.room(each) < cluster.workers
    if waits_for_nodes or len(nodes_with_cpus) > 1:
        return max(1, int(cluster.cpus_per_worker))
    return cluster.threads_on_one_machine(cluster.workers, num_shards)


def _worker_types(cluster_file: Mapping[str, Any]) -> list[tuple[Resources, int]]:
    """Returns the nodes that an autoscaler may start: resources and limit of each type but the
    head's.
    """
    cluster_limit = int(cluster_file.get("max_workers", 0))
    types = []
    for name, node_type in cluster_file.get("available_node_types", {}).items():
        if name == cluster_file.get("head_node_type"):
            continue
        limit = min(int(node_type.get("max_workers", cluster_limit)), cluster_limit)
        types.append((node_type.get("resources", {}), limit))
    return types
