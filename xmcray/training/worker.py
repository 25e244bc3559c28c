"""What each Ray Train worker runs: the loop of training/loop.py inside the process group that Ray Train set up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import torch

from xmcray import logs
from xmcray.data.batches import TrainingData
from xmcray.data.node_copy import CorpusSource, open_on_node
from xmcray.errors import XmcrayError
from xmcray.gauges import TRAINING, Gauges
from xmcray.negatives.pool import PoolRefresher
from xmcray.training.loop import Loop, build
from xmcray.training.preemption import StopFlag
from xmcray.training.run import Run, RunConfig, note_mistake, noted_mistake
from xmcray.training.watch import Watch


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """All a worker is told; plain values, paths absolute.

    Attributes:
        run: folder. run_id: names the pool. corpus: path or URL. config: of RunConfig.to_dict. threads: of a process.
    """

    run: str
    run_id: str
    corpus: str
    corpus_sha256: str
    config: dict[str, Any]
    threads: int


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains to the end, or until the driver's flag stops it; then the result is empty.

    A user's mistake may strike one rank while the others wait for it, so the rank notes it in the run and fails. Ray
    then restarts all ranks, which find the note and end; the driver raises it. When Ray says that a node is about to be
    taken away, a checkpoint is written at once; Ray restarts the ranks when the node is gone.
    """
    told = WorkerSettings(**settings)
    with logs.on_stderr(), logs.about(told.run_id):
        return _train(told)


def _train(told: WorkerSettings) -> dict[str, Any]:
    torch.set_num_threads(told.threads)
    config = RunConfig.resolve(told.config["method_name"], told.config)
    run = Run(Path(told.run), told.run_id, config, told.corpus, told.corpus_sha256)
    if noted_mistake(run) is not None:
        return {}
    device = (
        torch.device("cuda")
        if torch.cuda.is_available() and config.cluster.device != "cpu"
        else torch.device("cpu")
    )
    try:
        source = CorpusSource(run.corpus, run.corpus_sha256, config.cluster.copy_corpus)
        data = TrainingData(open_on_node(source), config.data)
        setup, refresher = build(config, data, device, vectors=run.vectors), PoolRefresher(run.id)
        watch, gauges = Watch(StopFlag(run.path), leaving=_leaving), Gauges(run.id, TRAINING)
        result = Loop(run, setup, refresher, watch=watch, on_record=gauges.show).train()
    except XmcrayError as error:
        note_mistake(run, error)
        raise
    if result:
        ray.train.report({"step": result["steps"]})
    return result


def _leaving() -> bool:
    train: Any = ray.train
    return train.get_preemption_info() is not None
