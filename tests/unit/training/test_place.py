"""What a run asks of a cluster: where it goes, and what is refused before anything starts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from xmcray.errors import ConfigError, ResourceError
from xmcray.ray_adapter.cluster import Node
from xmcray.ray_adapter.private import HEAD_RESOURCE
from xmcray.training import placement
from xmcray.training.launch import refresh_here
from xmcray.training.placement import Nodes, place
from xmcray.training.run_config import ClusterConfig, RunConfig

HEAD: dict[str, float] = {HEAD_RESOURCE: 1}
GPU: dict[str, float] = {"CPU": 8, "GPU": 4}
CPU: dict[str, float] = {"CPU": 8}


def fixed(**alive: dict[str, float]) -> Nodes:
    return Nodes(alive, [], autoscaled=False)


def config(**settings: Any) -> ClusterConfig:
    return ClusterConfig(**{"workers": 4, **settings})


def test_index_actors_avoid_gpus_and_nodes_without_cpus() -> None:
    nodes = fixed(h=HEAD, g=GPU, c=CPU)
    where = place(config(index_resource="CPU"), nodes, 4)
    assert where.use_gpu
    assert not where.shared_gpus
    assert where.index_options == {
        "label_selector": {"ray.io/node-id": "!in(h,g)"},
        "fallback_strategy": [
            {"label_selector": {"ray.io/node-id": "!in(h)"}},
            {"label_selector": {"ray.io/node-id": "!none"}},
        ],
        "scheduling_strategy": "SPREAD",
    }
    assert place(config(), fixed(h={**HEAD, **CPU}), 4).index_options == {
        "scheduling_strategy": "SPREAD"
    }


def test_a_resource_that_marks_nodes_decides() -> None:
    marked = fixed(h=HEAD, g=GPU, c={**CPU, "index": 3})
    with pytest.raises(
        ResourceError, match="4 index actors ask for one 'index' each, the cluster has 3"
    ):
        place(config(), marked, 4)
    assert place(config(workers=3), marked, 3).index_options == {
        "resources": {"index": 1.0},
        "scheduling_strategy": "SPREAD",
    }
    assert "resources" not in place(config(index_resource=""), marked, 4).index_options


def test_gpus_that_are_left_build_indexes() -> None:
    assert place(config(workers=2), fixed(g=GPU), 2).index_gpu == 0
    assert place(config(workers=3), fixed(g=GPU), 3).index_gpu is None


def test_an_index_that_no_gpu_can_search_takes_none() -> None:
    left = place(config(workers=2), fixed(g=GPU), 2, index_suits_gpu=False)
    assert left.use_gpu
    assert left.index_gpu is None
    assert not place(config(), fixed(g=GPU), 4, index_suits_gpu=False).shared_gpus


def test_index_actors_share_the_gpus_of_trainers_that_take_all_and_reserve_nothing() -> None:
    nodes = fixed(a=GPU, c=CPU, b={"CPU": 8, "GPU": 2})
    shared = place(config(workers=6), nodes, 6).shared_gpus
    places = [(options["label_selector"]["ray.io/node-id"], gpu) for options, gpu in shared]
    assert places == [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0), ("b", 1)]
    options = shared[5][0]
    fallbacks = [selector["label_selector"] for selector in options["fallback_strategy"]]
    assert fallbacks == [{"ray.io/node-id": "in(a,b)"}, {"ray.io/node-id": "!none"}]
    assert options.keys() == {"label_selector", "fallback_strategy"}, "a part of a GPU is reserved"
    assert len(place(config(workers=8, min_workers=6), nodes, 8).shared_gpus) == 8
    for settings in ({"workers": 5}, {"workers": 6, "device": "cpu"}):
        assert not place(config(**settings), nodes, 5).shared_gpus
    marked = fixed(a=GPU, c={**CPU, "index": 4})
    assert not place(config(), marked, 4).shared_gpus


def test_workers_without_gpus_next_to_gpus_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not place(config(workers=5), fixed(g=GPU), 0).use_gpu
    assert "GPUs for 4 of 5 workers, so they train on CPUs; --workers 4 takes GPUs" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        place(config(device="cpu"), fixed(g=GPU), 0)
        place(config(), fixed(g=GPU), 0)
        place(config(), fixed(c=CPU), 0)
    assert not caplog.text


def test_what_is_lacking_is_one_line() -> None:
    for settings, nodes, message in (
        (
            {"device": "gpu"},
            fixed(c=CPU),
            "4 workers ask for a GPU each, the cluster has 0; lower --workers or set",
        ),
        (
            {"cpus_per_worker": 3},
            fixed(a=CPU, b={"CPU": 4}),
            "3 CPUs each, the cluster's nodes have 8, 4; lower",
        ),
        (
            {"device": "gpu", "cpus_per_worker": 4},
            fixed(g=GPU, c=CPU),
            r"4 CPUs and a GPU each, .* nodes have 8; lower",
        ),
    ):
        with pytest.raises(ResourceError, match=message):
            place(config(**settings), nodes, 0)
    assert place(config(cpus_per_worker=0.1, workers=3), fixed(c={"CPU": 0.3}), 0)
    assert place(config(cpus_per_worker=3, min_workers=3), fixed(a=CPU, b={"CPU": 4}), 0), (
        "fewer may start"
    )
    with pytest.raises(
        ConfigError, match=r"cluster\.min_workers is 5, expected at least 0 and at most 4"
    ):
        config(min_workers=5)


def test_an_autoscaler_is_waited_for_within_its_limits(caplog: pytest.LogCaptureFixture) -> None:
    may_grow = Nodes({"h": HEAD}, [(HEAD, 1), (GPU, 2), ({**CPU, "index": 2}, 8)], autoscaled=True)
    with caplog.at_level(logging.WARNING):
        where = place(config(workers=8), may_grow, 8)
    assert where.use_gpu
    assert where.index_options["resources"] == {"index": 1.0}
    assert (
        "room for 0 of 8 workers; the run waits for nodes that its autoscaler starts" in caplog.text
    )
    with pytest.raises(
        ResourceError, match=r"ask for 1 CPU and 1 GPU each, .* autoscaler have room for 8; lower"
    ):
        place(config(workers=9, device="gpu"), may_grow, 9)
    assert place(config(workers=9), may_grow, 0).use_gpu is False, "auto takes what there can be"
    unknown = Nodes({"h": HEAD}, None, autoscaled=True)
    assert place(config(device="gpu"), unknown, 4).use_gpu


def test_threads_on_nodes_that_an_autoscaler_has_yet_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    settings = config(cpus_per_worker=6)
    assert place(settings, fixed(a={"CPU": 32}, b=CPU), 4).threads == 6
    for alive in ({"h": HEAD}, {"h": HEAD, "c": CPU}):
        for possible in (None, [(CPU, 4)]):
            assert place(settings, Nodes(alive, possible, autoscaled=True), 4).threads == 6
    # All workers have room on the one machine that is there.
    alone = Nodes({"h": {**HEAD, **CPU}}, None, autoscaled=True)
    assert place(config(workers=2), alone, 2).threads == 2


def test_the_configuration_on_a_head_says_what_may_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    nodes = [
        Node("h", "10.0.0.1", HEAD),
        Node("g", "10.0.0.2", GPU),
    ]
    monkeypatch.setattr(placement, "alive_nodes", lambda: nodes)
    assert Nodes.of_cluster() == Nodes({"h": HEAD, "g": GPU}, [], autoscaled=False)
    types = {
        "gpu": {"resources": GPU, "max_workers": 9},
        "head": {"resources": HEAD, "max_workers": 0},
    }
    cluster = {"max_workers": 3, "head_node_type": "head", "available_node_types": types}
    (tmp_path / "ray_bootstrap_config.yaml").write_text(json.dumps(cluster))
    assert Nodes.of_cluster() == Nodes(
        {"h": HEAD, "g": GPU}, [(HEAD, 1), (GPU, 3)], autoscaled=True
    )


@pytest.mark.parametrize(
    ("device", "settings", "gpu"),
    [
        ("cuda", [], 0),
        ("cuda", ["negatives.index=Flat"], 0),
        ("cpu", [], None),
        ("cuda", ["negatives.hard=0"], None),
        ("cuda", ["negatives.index=HNSW32"], None),  # needs a FAISS for GPUs
        ("cuda", ["cluster.index_resource=CPU"], None),
    ],
)
def test_a_run_in_one_process_searches_on_the_device_of_its_steps(
    device: str, settings: list[str], gpu: int | None
) -> None:
    run_config = RunConfig.resolve("astra", {}, ["optim.matmul=bf16", *settings])
    spec = refresh_here(run_config, torch.device(device), threads=1)
    assert (spec.gpu, spec.shares_gpu) == (gpu, gpu is not None)
    assert spec.matmul == "bf16"
