"""Training under faults as a state machine: seeded sequences of faults, and what must hold after each of them.

A sequence is a few attempts at one run. Between attempts files of the run are damaged or deleted, the disk is filled
and the number of workers changes; within an attempt ranks or the driver are killed, stopped or asked to end, and the
wall clock jumps. What must hold:

    an attempt     ends, is killed, or refuses with one line; a traceback is a fault
    a refusal      has a reason: without damage and with room on the disk, none is right
    after it       the newest whole checkpoint is at least as new as before; with the damage undone, the run goes on
    each start     begins at the step of the newest whole checkpoint
    the end        has the weights of an undisturbed run: byte for byte if the number of workers never changed

Ranks are bare processes on Gloo here, started and ended as Ray Train does it; benchmarks/soak*.py do the same with Ray.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from corpora import planted_corpus
from damage import BYTES
from safetensors.numpy import load_file

from xmcray import storage
from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import StorageError, XmcrayError
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher
from xmcray.training import checkpoint as checkpoints
from xmcray.training import launch
from xmcray.training.loop import Loop, build
from xmcray.training.preemption import Terminated
from xmcray.training.run import Run, RunConfig, forget_mistake, note_mistake, noted_mistake

SETTINGS = (
    "cluster.device=cpu",
    "cluster.threads_per_process=1",
    "encoder.dim=8",
    "optim.batch_size=32",
    "optim.epochs=4",
    "optim.precision=float64",
    "negatives.start_epoch=2",
    "negatives.refresh_every=1",
    "negatives.wait_s=120",
    "log.every=1",
    "log.checkpoint_every=5",
    "log.validate_every=0",
)
ROWS = ("method.classifier.kind=adagrad", "method.classifier.weight_decay=0.001")
METHODS = {  # each with something to refresh
    "astra": (*ROWS, "negatives.uniform=10", "negatives.hard=4", "negatives.cluster_size=4"),
    "dexml": ("method.columns=hard", "method.hard_per_query=3", "negatives.hard=4"),
    "prime": ("method.free_vectors=8", "method.feed_forward=8", "negatives.cluster_size=4"),
}
WITHIN = {  # with how often each is drawn; most end the attempt, so that another one follows
    "kill the driver": 6,
    "ask to end": 4,
    "kill a rank at a step": 2,
    "kill a rank in a write": 4,
    "stop a rank and continue it": 1,
    "storage is slow and fails": 2,
    "clock jumps": 1,
    "nothing": 1,
}
BETWEEN = ("damage a file", "delete a file", "fill the disk", "change the workers", "nothing")
PATIENCE_S = 120.0  # an attempt takes a second or two on an idle machine
MAX_RESTARTS = 3
_WRITES = ("replace", "rename", "fsync", "link", "unlink")  # of os: where a write can be cut


@dataclass(frozen=True)
class Injection:
    """What happens within an attempt.

    Attributes:
        what: one of `WITHIN`.
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


@dataclass
class Tally:
    """What the sequences did and met; `faults` must stay empty."""

    sequences: int = 0
    attempts: int = 0
    events: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    byte_equal: int = 0
    close: int = 0
    faults: list[str] = field(default_factory=list)


# --- One attempt: a driver and its ranks, in processes of their own ---


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
    deadline = time.monotonic() + PATIENCE_S
    while True:
        ended, status = os.waitpid(pid, os.WUNTRACED | os.WNOHANG)
        if ended and os.WIFSTOPPED(status):
            os.kill(pid, signal.SIGCONT)
        elif ended:
            return
        elif time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        else:
            time.sleep(0.005)


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


# --- The machine ---


class TrainingMachine:
    """A corpus, the weights of undisturbed runs, and sequences of faults.

    Args:
        folder: for everything that is written.
        disk: a folder on a small file system of its own for the runs, which can be filled; without
            one no disk is filled.
    """

    def __init__(self, folder: Path, disk: Path | None = None) -> None:
        self.folder = folder
        self.disk = disk
        self.corpus = planted_corpus(folder / "data", num_queries=220, num_labels=40).path
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.tally = Tally()
        self._expected: dict[tuple[str, int], Path] = {}
        # What training imports at its first step is imported once, before any fork.
        launch.train(self.corpus, folder / "warm", self.config("astra", 0))

    def config(self, method: str, workers: int) -> RunConfig:
        settings = [*SETTINGS, *METHODS[method], f"cluster.workers={workers}"]
        return RunConfig.resolve(method, {}, settings)

    def expected(self, method: str, workers: int) -> Path:
        """The newest checkpoint of an undisturbed run."""
        key = method, workers
        if key not in self._expected:
            out = self.folder / f"undisturbed-{method}-{workers}"
            outcome = self._attempt(out, self.config(method, workers))
            assert outcome.kind == "done", outcome
            self._expected[key] = newest_step_folder(out)
        return self._expected[key]

    def _attempt(self, out: Path, config: RunConfig, injection: Injection | None = None) -> Outcome:
        return attempt(self.corpus, out, config, injection or Injection(), self.notes)

    def run_sequence(self, seed: int) -> None:
        """Plays one sequence; faults are added to the tally with the seed that repeats them."""
        sequence = _Sequence(self, seed)
        try:
            sequence.play()
        except AssertionError as error:
            history = "; ".join(sequence.history)
            self.tally.faults.append(f"seed {seed}, {sequence.method}: {history}: {error}")
            kept = self.folder / f"fault-{seed}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(sequence.out, kept, ignore_dangling_symlinks=True)
        finally:
            shutil.rmtree(sequence.out, ignore_errors=True)
            self.tally.sequences += 1


class _Sequence:
    """One run and what has happened to it."""

    def __init__(self, machine: TrainingMachine, seed: int) -> None:
        self.machine = machine
        self.draw = random.Random(seed)
        self.method = self.draw.choice(list(METHODS))
        self.workers = self.draw.choice((0, 2, 2, 3))
        self.counts = {self.workers}
        self.out = (machine.disk or machine.folder) / f"run-{seed}"
        self.backups: dict[Path, bytes] = {}
        self.history: list[str] = []
        reference = machine.expected(self.method, self.workers)
        self.last_step = int(reference.name.removeprefix("step-"))

    def play(self) -> None:
        is_finished = False
        for _ in range(self.draw.randint(1, 5)):
            is_full = self._between()
            outcome = self._try(self._injection(), is_full)
            is_finished = outcome.kind == "done"
            if is_finished:
                break
        if not is_finished:
            outcome = self._try(Injection(), is_full=False)
            if outcome.kind == "refused":
                # The damage has been undone.
                outcome = self._try(Injection(), is_full=False)
            assert outcome.kind == "done", outcome
        self._compare()

    def _between(self) -> bool:
        """Something happens to the run while no one trains; returns whether the disk is full."""
        what = self.draw.choice(BETWEEN)
        if what in ("damage a file", "delete a file") and not self.files():
            what = "nothing"
        if what == "fill the disk" and self.machine.disk is None:
            what = "nothing"
        self._note(what)
        if what in ("damage a file", "delete a file"):
            self._change_file(delete=what == "delete a file")
        if what == "change the workers":
            self.workers = self.draw.choice((0, 2, 3))
            self.counts.add(self.workers)
        return what == "fill the disk"

    def files(self) -> list[Path]:
        """The files of the run that hold something."""
        paths = [path for path in self.out.rglob("*") if path.is_file() and path.name != "lock"]
        return sorted(path for path in paths if path.stat().st_size)

    def _change_file(self, delete: bool) -> None:
        path = self.draw.choice(self.files())
        data = path.read_bytes()
        self.backups.setdefault(path, data)
        # A new file, because several names may lead to the old one.
        path.unlink()
        if not delete:
            path.write_bytes(self.draw.choice(BYTES)(data, self.draw))
        self.history.append(str(path.relative_to(self.out)))

    def _injection(self) -> Injection:
        what = self.draw.choices(list(WITHIN), list(WITHIN.values()))[0]
        rank = self.draw.randrange(max(1, self.workers))
        at = self.draw.randint(1, self.last_step)
        if what == "kill a rank in a write":
            at = self.draw.randint(1, 150)
        self._note(what)
        self.history[-1] += f" ({rank}, {at}, {self.workers} workers)"
        return Injection(what, rank, at)

    def _note(self, what: str) -> None:
        self.history.append(what)
        if what != "nothing":
            self.machine.tally.events[what] += 1

    def _try(self, injection: Injection, is_full: bool) -> Outcome:
        """One attempt, and what must hold after each."""
        before = newest_whole_step(self.out)
        config = self.machine.config(self.method, self.workers)
        with self._full_disk() if is_full else contextlib.nullcontext():
            outcome = self.machine._attempt(self.out, config, injection)
        tally = self.machine.tally
        tally.attempts += 1
        tally.outcomes[outcome.kind] += 1
        self.history.append(f"-> {outcome.kind} {outcome.text}"[:300])
        assert outcome.kind != "traceback", outcome.text
        killers = ("kill the driver", "kill a rank at a step", "kill a rank in a write")
        assert outcome.kind != "killed" or injection.what in killers, "hangs or crashed"
        after = newest_whole_step(self.out)
        if outcome.kind == "refused":
            assert "\n" not in outcome.text
            is_failing = injection.what == "storage is slow and fails"
            assert self.backups or is_full or is_failing, "refused without a reason"
            assert after >= before, f"whole checkpoints up to step {before}, then {after}"
        first = self.machine.notes / "first"
        if first.exists():
            assert int(first.read_text()) == before, f"began at {first.read_text()}, not {before}"
        if outcome.kind == "refused" and self.backups:
            for path, data in self.backups.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                path.write_bytes(data)
            self.history.append("undo")
        if outcome.kind in ("refused", "done", "ended"):
            self.backups.clear()
        return outcome

    @contextlib.contextmanager
    def _full_disk(self) -> Iterator[None]:
        """Leaves a few kilobytes or none for the block."""
        disk = self.machine.disk
        assert disk is not None
        filler = disk / "filler"
        room = shutil.disk_usage(disk).free - self.draw.choice((0, 4096, 50_000, 200_000))
        filler.write_bytes(bytes(max(0, room)))
        try:
            yield
        finally:
            filler.unlink()

    def _compare(self) -> None:
        """The final weights are those of an undisturbed run."""
        newest = newest_step_folder(self.out)
        if len(self.counts) == 1:
            expected = self.machine.expected(self.method, self.workers)
            assert weight_hashes(newest) == weight_hashes(expected), "other weights"
            self.machine.tally.byte_equal += 1
            return
        expected = self.machine.expected(self.method, 2)
        ours, theirs = weights(newest), weights(expected)
        assert ours.keys() == theirs.keys()
        for name, values in ours.items():
            np.testing.assert_allclose(values, theirs[name], rtol=1e-6, atol=1e-9, err_msg=name)
        self.machine.tally.close += 1


# --- What is read of a run, without the code under test where that is possible ---


def newest_step_folder(out: Path) -> Path:
    return max((out / "checkpoints").glob("step-*"))


def newest_whole_step(out: Path) -> int:
    """Step of the newest checkpoint that verifies; 0 if there is none."""
    for path in sorted((out / "checkpoints").glob("step-*"), reverse=True):
        with contextlib.suppress(StorageError):
            _, manifest = storage.open_artifact(path, checkpoints.KIND)
            return int(manifest.about["step"])
    return 0


def weight_hashes(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every tensor file."""
    hashes = {"": checkpoint.name}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        name = path.relative_to(checkpoint).as_posix()
        hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def weights(checkpoint: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors but collected vectors; rows of labels in one piece, however many ranks wrote them."""
    pieces: dict[str, list[np.ndarray[Any, Any]]] = {}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        name = path.relative_to(checkpoint).as_posix()
        if name.startswith("collected-"):
            continue
        table = re.sub(r"-\d{10}\.safetensors$", "", name)
        for key, values in load_file(path).items():
            pieces.setdefault(f"{table}/{key}", []).append(values)
    joined = {}
    for key, values in pieces.items():
        joined[key] = values[0] if values[0].ndim == 0 else np.concatenate(values)
    return joined


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path | None]:
    """A file system of its own that can be filled; None where this process may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
