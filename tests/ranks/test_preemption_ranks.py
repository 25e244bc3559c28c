"""Asked to stop while queries are collected, all ranks stop at one step; resumed, they end byte for byte alike."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from corpora import planted_corpus
from loops import final_weights
from ranks import on_ranks

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher
from xmcray.parallel import collectives
from xmcray.training.loop import Loop, build
from xmcray.training.preemption import StopFlag
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig
from xmcray.training.watch import Watch

SETTINGS = [
    "encoder.dim=16",
    "optim.batch_size=64",
    "optim.epochs=6",
    "method.classifier.kind=adagrad",
    "method.classifier.lr=0.05",
    "method.classifier.weight_decay=0.001",
    "negatives.uniform=20",
    "negatives.hard=5",
    "negatives.cluster_size=4",
    "negatives.start_epoch=2",
    "negatives.refresh_every=1",
    "log.validate_every=0",
]


def trained_on_rank(corpus: Path, folder: Path, stop_at: int | None) -> int:
    """Trains until the flag stops it; the last rank hoists the flag after a step. Returns the step saved last."""
    config, opened = RunConfig.resolve("astra", {}, SETTINGS), Corpus.open(corpus, verify=False)
    data = TrainingData(opened, config.data)
    refresher = ThreadRefresher(
        data, RefreshSpec(collectives.num_ranks(), config.negatives, config.optim.seed)
    )
    flag = StopFlag(folder)

    def hoist(step: int) -> None:
        if step == stop_at and collectives.rank() == collectives.num_ranks() - 1:
            flag.hoist()

    watch = Watch(flag)
    watch.every_s = 0
    setup = build(config, data, torch.device("cpu"))
    loop = Loop(
        Run(folder, "run", config, opened.origin, opened.sha256), setup, refresher, hoist, watch
    )
    finished = loop.train()
    assert bool(finished) == (stop_at is None)
    refresher.close()
    return loop.saved_step


def versions(run: Path) -> list[dict[str, object]]:
    """Hash, recall and number of query blocks of the versions that are left."""
    return [
        json.loads(path.read_text()) for path in sorted((run / "negatives").glob("*/complete.json"))
    ]


def test_all_ranks_stop_at_one_step_and_resume_exactly(tmp_path: Path) -> None:
    corpus = planted_corpus(tmp_path / "data", num_queries=600, num_labels=80).path
    runs = tmp_path / "undisturbed", tmp_path / "stopped"
    for run in runs:
        run.mkdir()
    last = on_ranks(trained_on_rank, 2, corpus, runs[0], None)
    for stop_at in (13, 32):  # 9 steps an epoch; from the first on, each collects queries
        first, second = on_ranks(trained_on_rank, 2, corpus, runs[1], stop_at)
        assert first == second
        assert stop_at <= first <= stop_at + 1  # rank 0 may have looked just before
        StopFlag(runs[1]).path.unlink()
    assert on_ranks(trained_on_rank, 2, corpus, runs[1], None) == last
    assert final_weights(runs[1]) == final_weights(runs[0])
    assert versions(runs[1]) == versions(runs[0]), (
        "an approximate index answers by blocks: they must be the same"
    )
