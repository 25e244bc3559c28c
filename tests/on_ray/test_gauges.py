"""What Prometheus reads from a node where a run trains, and that the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from corpora import planted_corpus
from processes import wait_until
from prometheus_client.parser import text_string_to_metric_families

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.data.node_copy import CorpusSource
from xmcray.negatives.pool import NegativePool, PoolRefresher
from xmcray.negatives.refresh import RefreshSpec
from xmcray.ray_adapter.gauges import POOL, TRAINING, Gauges, exported
from xmcray.training.loop import Loop, build
from xmcray.training.run import Run, RunConfig

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
    corpus, config = (
        planted_corpus(tmp_path, num_queries=200, num_labels=40),
        RunConfig.resolve("astra", {}, SETTINGS),
    )
    run = Run(tmp_path / "run", "gauges-test", config, corpus.origin, corpus.sha256)
    run.path.mkdir()

    class Trainer:
        """The loop as a worker of one rank runs it; its process stays, so that there is time to look."""

        def train(self, run: Run) -> dict[str, Any]:
            data = TrainingData(Corpus.open(run.corpus, verify=False), run.config.data)
            setup = build(run.config, data, torch.device("cpu"))
            self.gauges, shown = Gauges(run.id, TRAINING), dict[str, Any]()
            loop = Loop(
                run,
                setup,
                PoolRefresher(run.id),
                on_record=lambda r: (shown.update(r), self.gauges.show(r)),
            )  # type: ignore[func-returns-value]
            loop.train()
            return shown

    source, spec = CorpusSource(corpus.origin, corpus.sha256), RefreshSpec(1, config.negatives, 0)
    pool = NegativePool(
        run_id=run.id,
        corpus=source,
        data=config.data,
        num_labels=40,
        spec=spec,
        nice=0,
        index_options={},
        coordinator_options={},
    )
    trainer = ray.remote(num_cpus=0)(Trainer).remote()
    try:
        shown = ray.get(trainer.train.remote(run))
        values: dict[str, float] = {}
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

        # Each process exports in its own time. The page has over a megabyte, and a node that is asked for it without
        # a pause gets no new values.
        wait_until(complete, 60, missing, every=1.0)
    finally:
        ray.kill(trainer)
        pool.close()
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
