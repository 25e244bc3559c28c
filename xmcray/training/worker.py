"""What each Ray Train worker runs: the loop of training/loop.py in the process group that Ray Train
has set up.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xmcray import logs
from xmcray.data.batches import TrainingData
from xmcray.data.node_copy import CorpusSource, open_on_node
from xmcray.errors import RunError, XmcrayError, memory_errors
from xmcray.negatives.pool import PoolRefresher
from xmcray.parallel import collectives
from xmcray.ray_adapter.gauges import TRAINING, Gauges
from xmcray.ray_adapter.workers import node_leaves_soon, report
from xmcray.training.loop import Loop, build
from xmcray.training.preemption import StopFlag
from xmcray.training.run import Run, note_mistake, noted_mistake
from xmcray.training.run_config import RunConfig
from xmcray.training.stalls import Interruptions, StallAlarm
from xmcray.training.watch import Watch


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Everything that a worker gets from the driver, as plain values.

    Attributes:
        run: folder of the run, absolute.
        run_id: id of the run, which names the actors of its pool.
        corpus: absolute path or URL.
        corpus_sha256: hash of the corpus.
        config: of `RunConfig.to_dict`.
        use_gpu: whether the worker has a GPU.
        threads: torch threads of the worker.
    """

    run: str
    run_id: str
    corpus: str
    corpus_sha256: str
    config: dict[str, Any]
    use_gpu: bool
    threads: int


def work(values: dict[str, Any]) -> dict[str, Any]:
    """Trains to the end, or until the driver raises the stop flag; in that case the result is
    empty.

    One rank may meet a user's mistake while the others wait for it. That rank notes the mistake in
    the run and fails. Ray then restarts all ranks, which find the note and end, and the driver
    raises it. When Ray says that a node is about to be taken away, a checkpoint is written at once,
    and Ray restarts the ranks when the node is gone.

    Args:
        values: fields of `WorkerSettings`.
    """
    settings = WorkerSettings(**values)
    with logs.on_stderr(), logs.about(settings.run_id):
        return _train(settings)


def _train(settings: WorkerSettings) -> dict[str, Any]:
    torch.set_num_threads(settings.threads)
    # The driver has checked it, perhaps as settings that an earlier release stored.
    config = RunConfig.resolve(settings.config["method_name"], settings.config, is_stored=True)
    run = Run(Path(settings.run), settings.run_id, config, settings.corpus, settings.corpus_sha256)
    _check_folder(run)
    if noted_mistake(run) is not None:
        return {}
    # A worker sees all GPUs of its node, also if it has reserved none of them.
    device = torch.device("cuda" if settings.use_gpu else "cpu")
    stall_s = config.cluster.stall_s
    say = Interruptions(run.path, stall_s).note
    try:
        with memory_errors(), StallAlarm(collectives.rank(), stall_s, say) as alarm:
            source = CorpusSource(run.corpus, run.corpus_sha256, config.cluster.copy_corpus)
            data = TrainingData(open_on_node(source), config.data)
            setup = build(config, data, device, vectors=run.vectors)
            refresher = PoolRefresher(run.id)
            watch = Watch(StopFlag(run.path), leaving=node_leaves_soon, beat=alarm.beat)
            gauges = Gauges(run.id, TRAINING)
            result = Loop(run, setup, refresher, watch=watch, on_record=gauges.show).train()
    except XmcrayError as error:
        note_mistake(run, error)
        raise
    if result:
        report({"step": result["steps"]})
    return result


def _check_folder(run: Run) -> None:
    """Raises RunError if the run's folder is not that of the driver, so that ranks would not meet."""
    try:
        is_shared = Run.open(run.path).id == run.id
    except RunError:
        is_shared = False
    if not is_shared:
        raise RunError(
            f"{run.path} on {socket.gethostname()} is not the folder of the run that the driver sees;"
            " name an --out in a folder that all nodes share"
        )
