"""From a configuration to a trained run: in this process, or on Ray Train workers with a negative
pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from xmcray import credentials, logs
from xmcray.config import check_choice
from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.data.node_copy import CorpusSource
from xmcray.data.side_signal import side_signal
from xmcray.errors import (
    ConfigError,
    ResourceError,
    RunError,
    StorageError,
    XmcrayError,
    memory_errors,
    readable,
)
from xmcray.methods.registry import method_entry
from xmcray.negatives.false_negatives import open_teacher
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.pool import NegativePool
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher
from xmcray.ray_adapter.session import ray_session
from xmcray.ray_adapter.workers import WorkerGroup, run_workers
from xmcray.storage.remote import is_url
from xmcray.storage.work_folder import locked
from xmcray.training import trackers
from xmcray.training.checkpoint import newest as newest_checkpoint
from xmcray.training.loop import Loop, build
from xmcray.training.placement import Nodes, Placement, place
from xmcray.training.preemption import StopFlag, terminated
from xmcray.training.process import configure_this_process, worker_environment
from xmcray.training.records import read_records
from xmcray.training.run import (
    RUN_FOLDER,
    SELECTION,
    Run,
    clear_progress,
    discard,
    forget_mistake,
    noted_mistake,
    open_or_create,
    refuse_contents,
)
from xmcray.training.run_config import RunConfig
from xmcray.training.stalls import Interruptions
from xmcray.training.tracking import tracked
from xmcray.training.waiting import Patience, WorkersMark
from xmcray.training.worker import WorkerSettings, work

logger = logging.getLogger(__name__)

_SELECT_BY = "nDCG@5"  # the validation metric that chooses the number of epochs of a refit
# Time for a collective before the first step. One rank may cluster millions of labels, or restore a
# large checkpoint, while the others wait.
_SETUP_S = 4 * 3600

FitContext = Callable[[Run], contextlib.AbstractContextManager[None]]


def train(
    corpus: str | Path,
    out: str | Path,
    config: RunConfig,
    *,
    resume: str = "auto",
    refit: bool = False,
    restart: bool = False,
    source: Run | None = None,
    watch: FitContext = contextlib.nullcontext,  # type: ignore[assignment]
) -> Run:
    """Trains a run to its end, continuing an interrupted one.

    Args:
        corpus: folder or URL.
        out: folder of the run.
        config: all settings.
        resume: "auto", or "never" to demand an empty folder.
        refit: train with validation first (in out/selection), then once more on all training
            queries for the number of epochs that was best.
        restart: start over if all checkpoints of an interrupted run are damaged.
        source: finished run to go on from, on this corpus.
        watch: context around each training, for a progress bar.
    Raises:
        XmcrayError: the user's mistakes.
        Terminated: SIGTERM came; a checkpoint holds what was trained.
    """
    check_choice("resume", resume, ("auto", "never"))
    _refuse_mistakes(corpus, out, config, refit)
    path = Path(out).absolute()
    opened = Corpus.open(corpus)
    if config.negatives.teacher:
        # It is used late, so a wrong one is refused now.
        open_teacher(config.negatives.teacher, TrainingData(opened, config.data))
    config.negatives.check_index(opened.card.num_labels, max(1, config.cluster.workers))
    if refit:
        TrainingData(opened, config.data).check_held_out()
    num_without_text = len(opened.labels_without_tokens())
    card = opened.card
    for warning in clipped(config, card.num_train, card.num_labels, num_without_text):
        logger.warning(warning)
    unread = config.without_effect()
    if unread:
        logger.warning(
            f"no effect with encoder.name={config.encoder.name} and these settings:"
            f" {', '.join(unread)}"
        )
    if config.encoder.side == "mix" and card.side_width:
        _warn_of_noise(TrainingData(opened, config.data))
    with locked(path, RUN_FOLDER):
        if resume == "never":
            refuse_contents(path)
        _refuse_other_refit(path, refit)
        if refit:
            selection = _train_one(path / SELECTION, config, opened, source, restart, watch)
            config = refit_config(selection)
        # With resume="never" the folder was empty but for the selection.
        run = _train_one(path, config, opened, source, restart, watch)
        run.remove_vectors()  # the selection has used the same folder
    return run


def _warn_of_noise(data: TrainingData) -> None:
    """Warns if the side vectors of a corpus are not mixed in, because they are noise."""
    signal = side_signal(data)
    if signal is not None and signal.is_noise:
        logger.warning(
            "side vectors of the same labels are hardly more alike than others (cosine %+.3f, %.1f"
            " standard errors); they are left out, as with encoder.side=ignore",
            signal.alike,
            signal.standard_errors,
        )


def _refuse_mistakes(corpus: str | Path, out: str | Path, config: RunConfig, refit: bool) -> None:
    """Raises ConfigError for what is known to be wrong before anything is opened."""
    if is_url(out):
        raise ConfigError(
            f"--out {out} is a URL; a run is written to a folder (on a cluster: one that all nodes share)"
        )
    if refit and not config.data.validation:
        raise ConfigError(
            "--refit chooses the number of epochs on held-out queries, but data.validation is 0; raise it"
        )
    every = config.log.validate_every
    num_epochs = config.optim.num_epochs
    if refit and num_epochs > 1 and not 0 < every < num_epochs:
        raise ConfigError(
            f"--refit chooses the number of epochs by validations, but log.validate_every is {every}"
            f" and validates the last of {num_epochs} epochs alone; set log.validate_every=1"
        )
    trackers.check(config.log.track)
    stored_texts = [str(corpus), *credentials.texts(config.to_dict())]
    credentials.refuse(stored_texts, "what the run would keep")


def _refuse_other_refit(path: Path, refit: bool) -> None:
    """Raises RunError if the run in a folder was started with --refit and this one is not, or the
    reverse.
    """
    has_selection = (path / SELECTION / "run.json").is_file()
    if has_selection and not refit:
        raise RunError(
            f"{path} was started with --refit, expected the same; give --refit or choose another --out"
        )
    is_run = (path / "run.json").is_file()
    if refit and is_run and not has_selection:
        raise RunError(
            f"{path} was started without --refit, expected the same; leave --refit out or choose"
            " another --out"
        )


def _train_one(
    path: Path,
    config: RunConfig,
    corpus: Corpus,
    source: Run | None,
    restart: bool,
    watch: FitContext,
) -> Run:
    """Begins or continues a run and trains it to its end.

    A run that fails before its first checkpoint is removed, so that its folder is free again. One
    that an earlier call began from another run stays: its start may be the only copy of what it
    goes on from.
    """
    was_begun = (path / "run.json").is_file()
    run = _begin(path, config, corpus, source)
    if restart:
        _restart_if_damaged(run)
    try:
        _train_to_end(run, corpus, watch)
    except XmcrayError:
        if not was_begun or run.start is None:
            discard(run)
        raise
    return run


def _begin(path: Path, config: RunConfig, corpus: Corpus, source: Run | None) -> Run:
    """A new run, which may go on from another one, or the one that was interrupted."""
    if source is None:
        return open_or_create(path, config, corpus, "auto")
    from xmcray.training import start  # it is built on what exports a run

    write = functools.partial(start.write_start, path, source, config, corpus)
    run = open_or_create(path, config, corpus, "auto", source, write)
    start.check_start(run)
    return run


def clipped(
    config: RunConfig,
    num_train: int,
    num_labels: int,
    num_without_text: int = 0,
) -> Iterator[str]:
    """Yields a warning for each setting that exceeds what the corpus has; training then takes what
    is there.

    Args:
        config: all settings.
        num_train: training queries.
        num_labels: L.
        num_without_text: labels that have no token.
    """
    entry = method_entry(config.method_name)
    negatives = config.negatives
    defaults = entry.config_type()
    for name in entry.label_counts:
        value = getattr(config.method, name)
        # A default means "as many as make sense" and is no mistake of the user.
        if value > num_labels and value != getattr(defaults, name):
            yield f"method.{name} is {value}, clipped to the number of labels, {num_labels}"
    if negatives.hard > num_labels:
        yield f"negatives.hard is {negatives.hard}, clipped to the number of labels, {num_labels}"
    if "hard_per_query" in entry.label_counts:
        drawn = config.method.hard_per_query
        if 0 < negatives.hard < drawn <= num_labels:
            yield f"method.hard_per_query is {drawn}, clipped to negatives.hard, {negatives.hard}"
    if entry.uses_label_texts and 0 < num_without_text < num_labels:
        yield (
            f"{num_without_text} of {num_labels} labels have no text, by which {config.method_name} would find them"
        )
    num_epochs = config.optim.num_epochs
    num_without = negatives.num_epochs_without(num_epochs)
    if entry.needs_negatives(config.method) and num_without:
        yield (
            f"{num_without} of {num_epochs} epochs have no negatives: rows only meet positives; raise"
            " negatives.uniform"
        )
    num_without = sum(not negatives.hard_at(epoch) for epoch in range(num_epochs))
    if entry.needs_batch(config.method) and config.optim.batch_size == 1 and num_without:
        yield (
            f"{num_without} of {num_epochs} epochs have no negatives: optim.batch_size is 1, and"
            f" {config.method_name} takes them from the other queries of a batch; raise it"
        )
    default_hard = entry.defaults.get("negatives", {}).get("hard", NegativesConfig().hard)
    is_wanted = negatives.cluster_size > 0 or negatives.hard not in (0, default_hard)
    if is_wanted and num_epochs <= negatives.start_epoch:
        yield (
            f"hard negatives and clusters begin after {negatives.start_epoch} epochs, of which the run"
            f" has {num_epochs}; lower negatives.start_epoch to use them"
        )
    if config.data.validation and not config.data.num_held_out(num_train):
        num_eligible = config.data.num_eligible(num_train)
        yield (
            f"data.validation={config.data.validation:g} of {num_eligible} training queries is none, so"
            " no epoch is validated; raise it"
        )
    if negatives.cluster_size > num_train:
        size = negatives.cluster_size
        yield f"negatives.cluster_size is {size}, clipped to the number of training queries, {num_train}"


def refit_config(selection: Run) -> RunConfig:
    """Returns the settings of a finished run with nothing held out and the epochs that were best on
    validation.
    """
    config = selection.config
    needs_negatives = method_entry(config.method_name).needs_negatives(config.method)
    best_epoch = config.optim.num_epochs - 1
    best_score = -float("inf")
    path = selection.path / "metrics.jsonl"
    with readable(f"{path} is damaged", f"remove {selection.path.parent} and train anew"):
        for record in read_records(path):
            score = float(record.get(_SELECT_BY, -float("inf")))
            if score <= best_score:
                continue
            num_epochs = int(record["epoch"]) + 1
            # So few epochs would train on positives alone, which is refused.
            has_none = config.negatives.num_epochs_without(num_epochs) == num_epochs
            if needs_negatives and has_none:
                continue
            best_score = score
            best_epoch = num_epochs - 1
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, validation=0.0),
        optim=dataclasses.replace(config.optim, stop_epoch=best_epoch + 1),
    )


def _restart_if_damaged(run: Run) -> None:
    """Removes the progress of an interrupted run of which no checkpoint is whole."""
    if run.result() is not None:
        return
    try:
        newest_checkpoint(run.checkpoints)
    except StorageError:
        logger.warning("no checkpoint of %s is whole; it is trained from the start", run.path)
        clear_progress(run)


def _train_to_end(run: Run, corpus: Corpus, watch: FitContext) -> None:
    """Trains a run unless it is finished."""
    if run.result() is not None:
        return
    stop = StopFlag(run.path)
    workers = WorkersMark(run.path)
    # A driver that was killed may have left it.
    workers.set(False)
    is_here = run.config.cluster.workers == 0
    with watch(run), tracked(run), stop.on_sigterm(lambda: is_here or workers.is_set):
        try:
            with memory_errors():
                if run.config.cluster.workers:
                    _train_on_ray(run, corpus)
                else:
                    train_here(run, corpus)
        finally:
            # Workers may also have failed because their nodes were taken away together with the
            # driver's.
            if stop.raised:
                raise terminated(run.path)


def train_here(
    run: Run,
    corpus: Corpus,
    on_step: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Trains in this process, without Ray; the index is built and searched in a thread."""
    cluster = run.config.cluster
    threads = cluster.threads_on_one_machine(workers=0, num_shards=0)
    configure_this_process(threads)
    has_gpu = torch.cuda.is_available()
    if cluster.device == "gpu" and not has_gpu:
        raise ResourceError(
            "cluster.device is gpu, but this machine has no CUDA device; set cluster.device=cpu"
        )
    device = torch.device("cuda" if has_gpu and cluster.device != "cpu" else "cpu")
    data = TrainingData(corpus, run.config.data)
    refresher = ThreadRefresher(data, refresh_here(run.config, device, threads))
    setup = build(run.config, data, device, vectors=run.vectors)
    try:
        return Loop(run, setup, refresher, on_step).train()
    finally:
        refresher.close()


def refresh_here(config: RunConfig, device: torch.device, threads: int) -> RefreshSpec:
    """Settings of the refreshes of a run in one process, which share the device of its steps."""
    may_use_gpu = config.negatives.suits_gpu and config.cluster.index_may_use_gpu
    on_gpu = device.type == "cuda" and may_use_gpu
    return RefreshSpec(
        num_shards=1,
        negatives=config.negatives,
        seed=config.optim.seed,
        threads=threads,
        gpu=0 if on_gpu else None,
        shares_gpu=on_gpu,
        matmul=config.optim.matmul,
    )


def _train_on_ray(run: Run, corpus: Corpus) -> None:
    """Runs the workers and the pool; raises what a worker noted as the user's mistake."""
    cluster = run.config.cluster
    negatives = run.config.negatives
    num_shards = cluster.workers if negatives.refreshed else 0
    forget_mistake(run)
    try:
        with ray_session():
            placement = place(cluster, Nodes.of_cluster(), num_shards, negatives.suits_gpu)
            patience = Patience(run.path, placement.request, placement.wait_s)
            interruptions = Interruptions(run.path, cluster.stall_s)
            settings = dataclasses.asdict(_worker_settings(run, placement))
            logged = interruptions.logged(lambda: noted_mistake(run) is not None)
            with _pool(run, corpus, placement), logged:
                run_workers(
                    work,
                    settings,
                    _worker_group(run, placement),
                    patience.after_turn,
                    interruptions.note_failures,
                )
    finally:
        mistake = noted_mistake(run)
        forget_mistake(run)
        if mistake is not None:
            raise mistake


def _worker_settings(run: Run, placement: Placement) -> WorkerSettings:
    return WorkerSettings(
        run=str(run.path),
        run_id=run.id,
        corpus=run.corpus,
        corpus_sha256=run.corpus_sha256,
        config=run.config.to_dict(),
        use_gpu=placement.use_gpu,
        threads=placement.threads,
    )


def _worker_group(run: Run, placement: Placement) -> WorkerGroup:
    cluster = run.config.cluster
    storage = run.path / "ray"
    storage.mkdir(exist_ok=True)
    environment = {
        logs.VARIABLE: os.environ.get(logs.VARIABLE, ""),
        **worker_environment(placement.threads),
    }
    return WorkerGroup(
        name=run.id,
        storage=storage,
        num_workers=cluster.workers,
        min_workers=cluster.min_workers,
        use_gpu=placement.use_gpu,
        cpus_per_worker=cluster.cpus_per_worker,
        resize_every_s=cluster.resize_every_s,
        wait_s=placement.wait_s,
        timeout_s=max(_SETUP_S, int(run.config.exchange_limit_s)),
        stall_s=cluster.stall_s,
        max_failures=cluster.max_failures,
        environment=environment,
    )


@contextlib.contextmanager
def _pool(run: Run, corpus: Corpus, placement: Placement) -> Iterator[None]:
    """Keeps the negative pool of a run while it trains, if the method wants hard negatives or
    clusters.

    The pool has a shard for each worker of the full group, even while fewer train, so that the
    versions of negatives do not depend on the number of workers.
    """
    config = run.config
    if not config.negatives.refreshed:
        yield
        return
    spec = RefreshSpec(
        config.cluster.workers,
        config.negatives,
        config.optim.seed,
        placement.threads,
        gpu=placement.index_gpu,
        matmul=config.optim.matmul,
    )
    pool = NegativePool(
        run_id=run.id,
        corpus=CorpusSource(run.corpus, run.corpus_sha256, config.cluster.copy_corpus),
        data=config.data,
        num_labels=len(corpus.label_order),
        spec=spec,
        nice=config.cluster.index_nice,
        index_options=placement.index_options,
        coordinator_options=placement.coordinator_options,
        shared_gpus=placement.shared_gpus,
    )
    try:
        yield
    finally:
        pool.close()
