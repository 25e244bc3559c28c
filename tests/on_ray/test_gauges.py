"""What Prometheus reads from a node where a run trains, and that the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import ray
from corpora import planted_corpus
from pools import run_with_pool, train_with_pool
from processes import wait_until
from prometheus_client.parser import text_string_to_metric_families

from xmcray.ray_adapter.gauges import POOL, TRAINING, Gauges, exported
from xmcray.training.run_config import RunConfig

DASHBOARD = Path(__file__).parents[2] / "cluster" / "grafana_training.json"
NAMES = {exported(name) for name in TRAINING.keys() | POOL.keys()}
SETTINGS = [
    "encoder.dim=8",
    "optim.batch_size=64",
    "optim.epochs=4",
    "negatives.uniform=8",
    "negatives.hard=4",
]
SETTINGS += ["negatives.start_epoch=2", "negatives.refresh_every=1", "log.every=1"]


def scraped(run_id: str) -> dict[str, float]:
    """Gauges of a run on the only node, by name."""
    (port,) = {node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    return {sample.name: sample.value for sample in samples if sample.labels.get("run") == run_id}


@pytest.mark.usefixtures("cluster")
def test_a_node_tells_about_the_run_and_its_pool(tmp_path: Path) -> None:
    corpus = planted_corpus(tmp_path, num_queries=200, num_labels=40)
    config = RunConfig.resolve("astra", {}, SETTINGS)
    shown: dict[str, Any] = {}
    values: dict[str, float] = {}
    with run_with_pool(tmp_path / "run", config, corpus) as run:
        gauges = Gauges(run.id, TRAINING)

        def on_record(record: dict[str, Any]) -> None:
            shown.update(record)
            gauges.show(record)

        train_with_pool(run, corpus, on_record)
        last = {
            exported("step"): shown["step"],
            exported("pool_queue"): 0,
            exported("pool_version"): 1,
        }

        def complete() -> bool:
            values.update(scraped(run.id))
            return not last.items() - values.items() and values.keys() == NAMES

        def missing() -> str:
            return f"missing: {sorted(NAMES - values.keys())}, {last.items() - values.items()}"

        # Each process exports in its own time. The page has over a megabyte, and a node that is
        # asked for it without a pause gets no new values.
        wait_until(complete, 60, missing, every=1.0)
    for name in ("loss", "queries_per_s", "negatives_age", "memory_mb", "P@1"):
        assert values[exported(name)] == pytest.approx(shown[name]), name
    assert values[exported("index_recall")] == 1.0, "so few rows are searched exactly"


def test_the_dashboard_asks_for_what_is_exported() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [variable["query"] for variable in board["templating"]["list"]]
    names = {
        name for expression in asked for name in re.findall(r"\b(?:ray_)?xmcray_\w+", expression)
    }
    assert names <= NAMES
    assert NAMES - names == {exported("epoch")}, "a gauge that no panel shows"
