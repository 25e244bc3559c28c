"""What each Ray Train worker runs: the loop of training/loop.py inside the process group that Ray Train set up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import torch

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import XmcrayError
from xmcray.negatives.pool import PoolRefresher
from xmcray.training.loop import Loop, build
from xmcray.training.run import Run, RunConfig, note_mistake, noted_mistake


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
    """Trains to the end.

    A user's mistake may strike one rank while the others wait for it, so the rank notes it in the run and fails. Ray
    then restarts all ranks, which find the note and end; the driver raises it.
    """
    told = WorkerSettings(**settings)
    torch.set_num_threads(told.threads)
    config = RunConfig.resolve(told.config["method_name"], told.config)
    run = Run(Path(told.run), told.run_id, config, told.corpus, told.corpus_sha256)
    if noted_mistake(run) is not None:
        return {}
    device = (
        torch.device("cuda") if torch.cuda.is_available() and config.cluster.device != "cpu" else torch.device("cpu")
    )
    try:
        data = TrainingData(Corpus.open(run.corpus, verify=False), config.data)
        result = Loop(run, build(config, data, device, vectors=run.vectors), PoolRefresher(run.id)).train()
    except XmcrayError as error:
        note_mistake(run, error)
        raise
    ray.train.report({"step": result["steps"]})
    return result
