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
from xmcray.ray_adapter.cluster import alive_nodes
from xmcray.training.loop import Loop, build
from xmcray.training.placement import Nodes, place
from xmcray.training.run import Run
from xmcray.training.run_config import ClusterConfig, RunConfig


@contextmanager
def run_with_pool(folder: Path, config: RunConfig, corpus: Corpus) -> Iterator[Run]:
    """A new run whose pool, of one shard, lives as long as the block."""
    # As on a machine whose GPUs are all of trainers. Here is none, so the actor searches on the CPU.
    alive = {node.node_id: {"GPU": 1.0} for node in alive_nodes()}
    cluster = ClusterConfig(workers=1, cpus_per_worker=0, device="gpu")
    placement = place(cluster, Nodes(alive, [], autoscaled=False), 1)
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
        shared_gpus=placement.shared_gpus,
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
