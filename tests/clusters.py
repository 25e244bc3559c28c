"""Cluster files and manifests as Ray's autoscaler sees them, for tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import ResourceRequestByCount
from ray.core.generated.common_pb2 import LabelSelectorOperator

from xmcray.cluster_files import PLACEHOLDER
from xmcray.ray_adapter.private import autoscaling_config_of

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "cluster"
CLOUDS = ("aws", "gcp", "azure")
TRAINER, INDEX_ACTOR, DATA_TASK = {"GPU": 1, "CPU": 8}, {"index": 1}, {"CPU": 1}
RAY = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), flags=re.M)[1]  # type: ignore[index]


def cloud(name: str) -> dict[str, Any]:
    """A cluster file as a user has filled it in."""
    text = (CLUSTER / f"{name}.yaml").read_text(encoding="utf-8")
    values: dict[str, Any] = yaml.safe_load(text.replace(PLACEHOLDER, "0a1b2c"))
    return values


def manifests(name: str) -> list[dict[str, Any]]:
    return list(
        yaml.safe_load_all((CLUSTER / "kuberay" / f"{name}.yaml").read_text(encoding="utf-8"))
    )


def cluster_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The RayClusterSpec of a RayCluster, RayJob or RayService."""
    spec = manifest["spec"]
    cluster: dict[str, Any] = spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec
    return cluster


def ray_manifests() -> dict[str, dict[str, Any]]:
    return {name: manifests(name)[0] for name in ("raycluster", "rayjob", "rayservice")}


def node_types(name: str) -> dict[str, dict[str, Any]]:
    """The autoscaler's view of a cluster file or manifest."""
    if name in CLOUDS:
        return cloud(name)["available_node_types"]  # type: ignore[no-any-return]
    settings = autoscaling_config_of(cluster_of(ray_manifests()[name]))
    return settings["available_node_types"]  # type: ignore[no-any-return]


def launched(
    name: str, asked: dict[str, float], count: int, label: tuple[str, str] | None = None
) -> dict[str, int]:
    """How many nodes of which type Ray's autoscaler starts for `count` processes that ask for
    `asked`.
    """
    types = {
        kind: NodeTypeConfig(
            name=kind,
            min_worker_nodes=0,
            max_worker_nodes=values.get("max_workers", 0),
            priority=values.get("priority", 0),
            resources=values["resources"],
            labels=values.get("labels", {}),
        )
        for kind, values in node_types(name).items()
    }
    selectors = (
        [[(label[0], LabelSelectorOperator.LABEL_OPERATOR_IN, [label[1]])]] if label else None
    )
    request = ResourceRequestByCount(
        request=ResourceRequestUtil.make(asked, label_selectors=selectors), count=count
    )
    reply = ResourceDemandScheduler().schedule(
        SchedulingRequest(
            node_type_configs=types,
            max_num_nodes=100,
            resource_requests=[request],
            disable_launch_config_check=True,
        )
    )
    assert not reply.infeasible_resource_requests, f"{name} has no node for {asked}"
    return {launch.instance_type: launch.count for launch in reply.to_launch}
