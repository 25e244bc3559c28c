"""A run with a negative pool on Ray, and with this process as its only worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.data.node_copy import CorpusSource
from xmcray.negatives.pool import NegativePool, PoolRefresher
from xmcray.negatives.refresh import RefreshSpec
from xmcray.training.loop import Loop, build
from xmcray.training.run import Run, RunConfig


@contextmanager
def run_with_pool(folder: Path, config: RunConfig, corpus: Corpus) -> Iterator[Run]:
    """A new run whose pool, of one shard, lives as long as the block."""
    run = Run(folder, f"test-{folder.parent.name}", config, corpus.origin, corpus.sha256)
    run.path.mkdir()
    pool = NegativePool(
        run_id=run.id,
        corpus=CorpusSource(corpus.origin, corpus.sha256),
        data=config.data,
        num_labels=len(corpus.label_order),
        spec=RefreshSpec(1, config.negatives, config.optim.seed),
        nice=0,
        index_options={},
        coordinator_options={},
    )
    try:
        yield run
    finally:
        pool.close()


def train_with_pool(
    run: Run, corpus: Corpus, on_record: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Trains as a worker of one rank does; returns the result of the run."""
    setup = build(run.config, TrainingData(corpus, run.config.data), torch.device("cpu"))
    return Loop(run, setup, PoolRefresher(run.id), on_record=on_record).train()
