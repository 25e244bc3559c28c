"""One attempt at a training with a fault in it: a driver and its ranks, in processes of their own.

Ranks are bare processes on Gloo here, started and ended as Ray Train does it; benchmarks/soak*.py do the same with Ray.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import random
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import StorageError, XmcrayError
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher
from xmcray.training import launch
from xmcray.training.loop import Loop, build
from xmcray.training.preemption import Terminated
from xmcray.training.run import Run, forget_mistake, note_mistake, noted_mistake
from xmcray.training.run_config import RunConfig

PATIENCE_S = 120.0  # an attempt takes a second or two on an idle machine
MAX_RESTARTS = 3
_WRITES = ("replace", "rename", "fsync", "link", "unlink")  # of os: where a write can be cut


@dataclass(frozen=True)
class Injection:
    """What happens within an attempt.

    Attributes:
        what: one of `WITHIN` of training_machine.py.
        rank: on which rank, if it is of one rank.
        at: after which step, or in which write of the rank.
    """

    what: str = "nothing"
    rank: int = 0
    at: int = 0


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: "done", "refused", "ended", "killed" or "traceback", and the message."""

    kind: str
    text: str = ""


def attempt(
    corpus: Path, out: Path, config: RunConfig, injection: Injection, notes: Path
) -> Outcome:
    """Trains once in a forked process.

    Args:
        corpus: folder of the corpus.
        out: folder of the run.
        config: settings; with 0 workers the driver trains itself.
        injection: what happens meanwhile.
        notes: folder for the outcome and for the first step.
    """
    for path in notes.iterdir():
        path.unlink()
    pid = os.fork()
    if pid == 0:
        _drive(corpus, out, config, injection, notes)
    _wait(pid)
    # What a killed driver leaves behind, Ray ends within seconds.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _wait_for_lock(out)
    if not (notes / "outcome").exists():
        return Outcome("killed")
    return Outcome(**json.loads((notes / "outcome").read_text()))


def _wait(pid: int) -> None:
    """Waits for a process, continues it where it stops itself, and kills it when it hangs."""
    hangs = threading.Timer(PATIENCE_S, os.killpg, (pid, signal.SIGKILL))
    hangs.start()
    _, status = os.waitpid(pid, os.WUNTRACED)
    while os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGCONT)
        _, status = os.waitpid(pid, os.WUNTRACED)
    hangs.cancel()
    # The next attempt is forked from this process, which has no other thread then.
    hangs.join()


def _wait_for_lock(out: Path) -> None:
    """Waits until killed ranks are gone: here they are forks of the driver and hold its lock."""
    if not (out / "lock").exists():
        return
    with (out / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def _drive(corpus: Path, out: Path, config: RunConfig, injection: Injection, notes: Path) -> None:
    """The driver's process; never returns."""
    outcome = Outcome("traceback", "no outcome")
    try:
        os.setpgid(0, 0)
        torch.set_num_threads(1)
        _silence()
        if injection.what == "clock jumps":
            _make_clock_jump()
        if injection.what == "storage is slow and fails":
            _make_storage_fail(injection.at)
        driver = os.getpid()
        on_step = _on_step(injection, 0, driver, notes)
        here = launch.train_here
        launch._train_on_ray = functools.partial(_bare_ranks, injection=injection, notes=notes)
        launch.train_here = functools.partial(_here, here, injection, on_step)
        launch.train(corpus, out, config)
        outcome = Outcome("done")
    except XmcrayError as error:
        outcome = Outcome("refused", str(error))
    except Terminated as error:
        outcome = Outcome("ended", str(error))
    except BaseException:
        outcome = Outcome("traceback", traceback.format_exc())
    finally:
        with contextlib.suppress(BaseException):
            (notes / "outcome").write_text(json.dumps(vars(outcome)))
        os._exit(0)


def _here(
    train_here: Callable[..., Any],
    injection: Injection,
    on_step: Callable[[int], None],
    run: Run,
    corpus: Corpus,
) -> Any:
    _arm_writes(injection, 0)
    return train_here(run, corpus, on_step)


def _bare_ranks(run: Run, corpus: Corpus, injection: Injection, notes: Path) -> None:
    """Runs the workers of a group and starts them again when one is lost, as Ray Train does."""
    forget_mistake(run)
    try:
        for restart in range(MAX_RESTARTS + 1):
            # A fault happens once, not after each restart again.
            current = injection if restart == 0 else Injection()
            if _group_finishes(run, corpus, current, notes):
                return
            if noted_mistake(run) is not None:
                return
        # Where the disk had no room for the note, Ray carries the error of the rank.
        if (notes / "error").exists():
            raise StorageError((notes / "error").read_text())
        tracebacks = [path.read_text() for path in sorted(notes.glob("rank-*"))]
        raise RuntimeError("\n".join(["the workers failed again and again", *tracebacks]))
    finally:
        mistake = noted_mistake(run)
        forget_mistake(run)
        if mistake is not None:
            raise mistake


def _group_finishes(run: Run, corpus: Corpus, injection: Injection, notes: Path) -> bool:
    """Whether all ranks of a group return; the others are killed when one does not."""
    driver = os.getpid()
    num_ranks = run.config.cluster.workers
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        ranks = {}
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                _rank(rank, store, run, corpus, injection, driver, notes)
            ranks[pid] = rank
        while ranks:
            try:
                pid, status = os.waitpid(-1, os.WUNTRACED)
            except InterruptedError:
                continue
            if os.WIFSTOPPED(status):
                # The others come to a halt in their next collective.
                time.sleep(0.05)
                os.kill(pid, signal.SIGCONT)
                continue
            ranks.pop(pid, None)
            if status != 0:
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
                for other in ranks:
                    os.waitpid(other, 0)
                return False
    return True


def _rank(
    rank: int,
    store: Path,
    run: Run,
    corpus: Corpus,
    injection: Injection,
    driver: int,
    notes: Path,
) -> None:
    """A rank's process, as in training/worker.py; never returns."""
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if rank == injection.rank:
            _arm_writes(injection, rank)
        num_ranks = run.config.cluster.workers
        file_store = dist.FileStore(str(store), num_ranks)
        if num_ranks > 1:
            dist.init_process_group("gloo", store=file_store, rank=rank, world_size=num_ranks)
        config = run.config
        data = TrainingData(corpus, config.data)
        setup = build(config, data, torch.device("cpu"), vectors=run.vectors)
        refresher = ThreadRefresher(
            data, RefreshSpec(num_ranks, config.negatives, config.optim.seed)
        )
        on_step = _on_step(injection, rank, driver, notes)
        Loop(run, setup, refresher, on_step).train()
        refresher.close()
        status = 0
    except XmcrayError as error:
        note_mistake(run, error)
        (notes / "error").write_text(str(error))
    except BaseException:
        # Gloo's errors when another rank was lost; a real one repeats itself until restarts end.
        (notes / f"rank-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _on_step(injection: Injection, rank: int, driver: int, notes: Path) -> Callable[[int], None]:
    """Notes the first step and lets the fault happen after its step."""

    def on_step(step: int) -> None:
        if rank == 0 and not (notes / "first").exists():
            (notes / "first").write_text(str(step - 1))
        if step != injection.at or rank != injection.rank:
            return
        if injection.what == "kill a rank at a step":
            os.kill(os.getpid(), signal.SIGKILL)
        if injection.what == "kill the driver":
            os.kill(driver, signal.SIGKILL)
        if injection.what == "stop a rank and continue it":
            os.kill(os.getpid(), signal.SIGSTOP)
        if injection.what == "ask to end":
            os.kill(driver, signal.SIGTERM)

    return on_step


def _arm_writes(injection: Injection, rank: int) -> None:
    """Lets this process be killed before one of its writes."""
    if injection.what != "kill a rank in a write" or rank != injection.rank:
        return
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == injection.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in _WRITES:
        setattr(os, name, counted(getattr(os, name)))


def _make_storage_fail(seed: int) -> None:
    """Each sync takes some milliseconds, and one of twenty fails, as a network file system may."""
    real = os.fsync
    draw = random.Random(seed)

    def fsync(descriptor: int) -> None:
        time.sleep(0.002)
        if draw.random() < 0.05:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    os.fsync = fsync


def _make_clock_jump() -> None:
    """The wall clock of this process and its children jumps by an hour at every reading."""
    real = time.time
    draw = random.Random(0)
    time.time = lambda: real() + draw.choice((-3600.0, 0.0, 3600.0))


def _silence() -> None:
    """Warnings about damaged checkpoints are right; they would fill the screen."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
