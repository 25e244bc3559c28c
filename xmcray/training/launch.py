"""From a configuration to a trained run: in this process, or on Ray Train workers beside the negative pool."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.exceptions import GetTimeoutError, RayActorError

from xmcray import credentials, logs
from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.data.node_copy import CorpusSource
from xmcray.data.session import ray_session
from xmcray.errors import ConfigError, ResourceError, XmcrayError
from xmcray.methods.base import methods
from xmcray.negatives.pool import NegativePool
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher
from xmcray.storage import is_url
from xmcray.training import trackers
from xmcray.training.loop import Loop, build
from xmcray.training.placement import Nodes, Placement, place
from xmcray.training.preemption import StopFlag, terminated
from xmcray.training.records import read_records
from xmcray.training.rendezvous import torch_config
from xmcray.training.run import (
    SELECTION,
    Run,
    RunConfig,
    discard,
    forget_mistake,
    locked,
    noted_mistake,
    open_or_create,
    refuse_contents,
)
from xmcray.training.tracking import tracked
from xmcray.training.waiting import Patience
from xmcray.training.worker import WorkerSettings, work

logger = logging.getLogger(__name__)

_SELECT_BY = "nDCG@5"
_RAY_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # the controller's poll; 2 s by default, and a report waits for it
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
_START_TIMEOUT = (
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"  # how long a group waits for its nodes, at each try
)
_ABORT_S = 10  # for a controller to end its workers; one that waits for nodes does not hear
_ALLOCATOR = {  # glibc would give large blocks back after every step and fault them in again at the next
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
    "THP_MEM_ALLOC_ENABLE": "1",  # torch: huge pages for large tensors; rows are read at random addresses
}

_train: Any = ray.train  # type checkers see the classes of Train v1 under these names

FitContext = Callable[[Run], contextlib.AbstractContextManager[None]]


def train(
    corpus: str | Path,
    out: str | Path,
    config: RunConfig,
    *,
    resume: str = "auto",
    refit: bool = False,
    watch: FitContext = contextlib.nullcontext,  # type: ignore[assignment]
) -> Run:
    """Trains a run to its end, continuing an interrupted one.

    Args:
        corpus: folder or URL. out: the run's folder.
        resume: "auto", or "never" to demand an empty folder.
        refit: train with validation first (in out/selection), then once more on all training queries for the number
            of epochs that was best.
        watch: context around each training, for a progress bar.
    Raises:
        XmcrayError: the user's mistakes.
        Terminated: SIGTERM came; what was trained is in a checkpoint.
    """
    if is_url(out):
        raise ConfigError(
            f"--out {out} is a URL; a run is written to a folder (on a cluster: one that all nodes share)"
        )
    if refit and not config.data.validation:
        raise ConfigError(
            "--refit chooses the number of epochs on held-out queries, but data.validation is 0; raise it"
        )
    trackers.check(config.log.track)
    credentials.refuse(
        [str(corpus), *credentials.texts(config.to_dict())], "what the run would keep"
    )
    path = Path(out).absolute()
    opened = Corpus.open(corpus)
    without_text = int((opened.num_label_tokens() == 0).sum())
    for line in clipped(config, opened.card.num_train, opened.card.num_labels, without_text):
        logger.warning(line)
    with locked(path):
        if resume == "never":
            refuse_contents(path)
        if refit:
            chosen = open_or_create(path / SELECTION, config, opened, "auto")
            _train_one(chosen, opened, watch)
            config = refit_config(chosen)
        run = open_or_create(path, config, opened, "auto")
        _train_one(run, opened, watch)
        shutil.rmtree(run.vectors, ignore_errors=True)
    return run


def clipped(
    config: RunConfig, num_train: int, num_labels: int, without_text: int = 0
) -> Iterator[str]:
    """Settings that ask for more than there is, as warnings: what is there is taken.

    Args:
        without_text: labels that have no token.
    """
    entry, negatives = methods()[config.method_name], config.negatives
    counts = {f"method.{name}": getattr(config.method, name) for name in entry.at_most_labels}
    usual = {f"method.{name}": getattr(entry.config_type(), name) for name in entry.at_most_labels}
    for name, value in {**counts, "negatives.hard": negatives.hard}.items():
        if value > num_labels and value != usual.get(
            name
        ):  # a default means "as many as make sense"
            yield f"{name} is {value}, clipped to the number of labels, {num_labels}"
    drawn = counts.get("method.hard_per_query", 0)
    if 0 < negatives.hard < drawn <= num_labels:
        yield f"method.hard_per_query is {drawn}, clipped to negatives.hard, {negatives.hard}"
    if entry.by_text and 0 < without_text < num_labels:
        yield f"{without_text} of {num_labels} labels have no text, by which {config.method_name} would find them"
    if negatives.cluster_size > num_train:
        size = negatives.cluster_size
        yield f"negatives.cluster_size is {size}, clipped to the number of training queries, {num_train}"


def refit_config(selection: Run) -> RunConfig:
    """The settings of a finished run with nothing held out and the epochs that were best on its validation split."""
    config = selection.config
    records = [r for r in read_records(selection.path / "metrics.jsonl") if _SELECT_BY in r]
    best = max(
        records, key=lambda r: float(r[_SELECT_BY]), default={"epoch": config.optim.epochs - 1}
    )
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, validation=0.0),
        optim=dataclasses.replace(config.optim, stop_epoch=int(best["epoch"]) + 1),
    )


def _train_one(run: Run, corpus: Corpus, watch: FitContext) -> None:
    if run.result() is not None:
        return
    stop = StopFlag(run.path)
    try:
        with watch(run), tracked(run), stop.on_sigterm():
            try:
                if run.config.cluster.workers:
                    _train_on_ray(run, corpus)
                else:
                    train_here(run, corpus)
            finally:  # also where workers failed because their nodes are taken away too
                if stop.raised:
                    raise terminated(run.path)
    except XmcrayError:
        discard(run)
        raise


def train_here(
    run: Run, corpus: Corpus, on_step: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Trains in this process, without Ray; the index is built in a thread."""
    cluster = run.config.cluster
    threads = cluster.threads_per_process or max(1, (os.cpu_count() or 2) // 2)
    torch.set_num_threads(threads)
    if cluster.device == "gpu" and not torch.cuda.is_available():
        raise ResourceError(
            "cluster.device is gpu, but this machine has no CUDA device; set cluster.device=cpu"
        )
    gpu = cluster.device != "cpu" and torch.cuda.is_available()
    data = TrainingData(corpus, run.config.data)
    refresher = ThreadRefresher(
        data, RefreshSpec(1, run.config.negatives, run.config.optim.seed, threads)
    )
    setup = build(run.config, data, torch.device("cuda" if gpu else "cpu"), vectors=run.vectors)
    try:
        return Loop(run, setup, refresher, on_step).train()
    finally:
        refresher.close()


def _train_on_ray(run: Run, corpus: Corpus) -> None:
    """Runs the workers and the pool; raises what they report as the user's mistake."""
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    forget_mistake(run)
    try:
        with ray_session():
            cluster = run.config.cluster
            where = place(
                cluster,
                Nodes.of_cluster(),
                cluster.workers if run.config.negatives.refreshed else 0,
            )
            with _pool(run, corpus, where):
                _fit(_trainer(run, where))
    finally:
        mistake = noted_mistake(run)
        forget_mistake(run)
        if mistake is not None:
            raise mistake


def _fit(trainer: Any) -> Any:
    """Runs the trainer until it ends or is interrupted.

    Raises:
        ResourceError: there was no room for the workers, or none any more (waiting.py).
    """
    controllers: list[Any] = []
    trainer._register_sigint_handler = (
        controllers.append
    )  # Ray's own makes an interrupt an exit with code 0
    try:
        return trainer.fit()
    except KeyboardInterrupt:
        for controller in controllers:
            try:
                ray.get(controller.abort.remote(), timeout=_ABORT_S)
            except RayActorError:
                continue  # it ends by leaving
            except GetTimeoutError:
                ray.kill(controller)
        raise
    except _train.ControllerError as error:
        if isinstance(error.controller_failure, XmcrayError):
            raise error.controller_failure from None
        raise


def _trainer(run: Run, where: Placement) -> Any:
    cluster, negatives = run.config.cluster, run.config.negatives
    elastic = (cluster.min_workers, cluster.workers) if cluster.min_workers else cluster.workers
    # Ray chooses the size of an elastic group by the nodes it knows of, and may not know yet that one is lost.
    os.environ[_START_TIMEOUT] = "5" if cluster.min_workers else str(min(where.wait_s, 120.0))
    settings = WorkerSettings(
        run=str(run.path),
        run_id=run.id,
        corpus=run.corpus,
        corpus_sha256=run.corpus_sha256,
        config=run.config.to_dict(),
        threads=where.threads,
    )
    storage = run.path / "ray"
    storage.mkdir(exist_ok=True)
    environment = {
        "OMP_NUM_THREADS": str(where.threads),
        "TOKENIZERS_PARALLELISM": "false",
        **_ALLOCATOR,
    }
    environment[logs.VARIABLE] = os.environ.get(logs.VARIABLE, "")
    return _train.torch.TorchTrainer(
        work,
        train_loop_config=dataclasses.asdict(settings),
        torch_config=torch_config(
            "nccl" if where.use_gpu else "gloo",
            int(negatives.wait_s) + 300,
            str(storage / "rendezvous"),
        ),
        scaling_config=_train.ScalingConfig(
            num_workers=elastic,
            use_gpu=where.use_gpu,
            resources_per_worker={"CPU": cluster.cpus_per_worker},
            elastic_resize_monitor_interval_s=cluster.resize_every_s,
        ),
        run_config=_train.RunConfig(
            # Ray resumes a name it has seen without saying so: never reuse one. What counts is our own checkpoint.
            name=f"{run.id}-{secrets.token_hex(3)}",
            storage_path=str(storage),
            # Failed starts of the group are bounded by time, not by number: Ray's count spans the whole run.
            failure_config=_train.FailureConfig(
                max_failures=cluster.max_failures, controller_failure_limit=-1
            ),
            callbacks=[Patience(run.path, where.asked, where.wait_s)],
            logging_config=_train.LoggingConfig(log_level="ERROR"),
            worker_runtime_env={"env_vars": environment},
        ),
    )


@contextlib.contextmanager
def _pool(run: Run, corpus: Corpus, where: Placement) -> Iterator[None]:
    """The negative pool while a run trains; none where the method wants neither hard negatives nor clusters.

    It has a shard for each worker of the full group, also while fewer train: versions do not depend on how many do.
    """
    config = run.config
    if not config.negatives.refreshed:
        yield
        return
    spec = RefreshSpec(
        config.cluster.workers,
        config.negatives,
        config.optim.seed,
        where.threads,
        gpu=where.index_gpu,
        matmul=config.optim.matmul,
    )
    pool = NegativePool(
        run.id,
        CorpusSource(run.corpus, run.corpus_sha256, config.cluster.copy_corpus),
        config.data,
        len(corpus.label_order),
        spec,
        config.cluster.index_nice,
        where.index,
        where.coordinator,
    )
    try:
        yield
    finally:
        pool.close()
