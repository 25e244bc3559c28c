"""Training under faults as a state machine: seeded sequences of faults, and what must hold after each of them.

A sequence is a few attempts at one run. Between attempts files of the run are damaged or deleted, the disk is filled
and the number of workers changes; within an attempt ranks or the driver are killed, stopped or asked to end, and the
wall clock jumps. What must hold:

    an attempt     ends, is killed, or refuses with one line; a traceback is a fault
    a refusal      has a reason: a full or failing disk, damage outside of the checkpoints, or in all of them
    after it       the newest whole checkpoint is at least as new as before; with the damage undone, the run goes on
    each start     begins at the step of the newest whole checkpoint
    the end        has the weights of an undisturbed run: byte for byte if the number of workers never changed
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from corpora import planted_corpus
from file_changes import BYTES
from safetensors.numpy import load_file
from training_attempt import Injection, Outcome, attempt

from xmcray.errors import StorageError
from xmcray.storage.artifact import open_artifact
from xmcray.training import checkpoint as checkpoints
from xmcray.training import launch
from xmcray.training.run_config import RunConfig

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
ROWS = (
    "method.classifier.kind=adagrad",
    "method.classifier.lr=0.05",
    "method.classifier.weight_decay=0.001",
)
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
        sequence = Sequence(self, seed)
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


class Sequence:
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
            has_reason = is_full or is_failing or self._is_damaged_for_good(before)
            assert has_reason, f"refused without a reason: {outcome.text}"
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

    def _is_damaged_for_good(self, whole_step: int) -> bool:
        """Whether damage keeps the run from going on: in some checkpoints it does not."""
        for path in self.backups:
            if path.relative_to(self.out).parts[0] != "checkpoints":
                return True
        return bool(self.backups) and whole_step == 0

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
            _, manifest = open_artifact(path, checkpoints.KIND)
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
