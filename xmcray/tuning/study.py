"""The folder of `xmcray auto`: what may be tried, what was tried, and the time that it took.

DIR/auto.json          the corpus and the candidates (portfolio.py); written once
DIR/sweeps/METHOD/     the trials of a method: a sweep (sweep.py), whose ledger a restart reads
DIR/refits/TRIAL/      the run of a trial once more, on all training queries
DIR/clock.json         seconds that all calls have spent, in all and on each trial
DIR/fused.json         the runs that the bundle was made of
DIR/bundle/            the best bundle so far
DIR/results.json       all results, for programs
DIR/report.html        the same as a page
DIR/lock               held by the process that works
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmcray import config as configs
from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import RunError, readable
from xmcray.storage.whole_files import read_json, write_json
from xmcray.storage.work_folder import FolderKind
from xmcray.training.run import RunConfig
from xmcray.tuning.lanes import threads_of_lane
from xmcray.tuning.portfolio import METHODS, Candidate, candidates
from xmcray.tuning.space import Values, nested
from xmcray.tuning.sweep import Sweep, SweepConfig, Trial

STUDY_FOLDER = FolderKind("study", "auto.json")
METRICS = ("P@1", "P@5", "PSP@5")
METRIC = "+".join(METRICS)  # their mean
# Held-out queries that are wanted, and the shares of the training queries that this may be.
_HELD_OUT = 1000
_SHARES = (0.05, 0.15)
# Added to a trial's number each time that it is repeated with fewer epochs.
SHORTER = 1000
_LOG_EVERY = 5  # steps; slow trials are noticed by their records
# Of the budget: the search ends here.
SEARCH_SHARE = 0.6
# Of the budget: kept for the measurement on the test split.
MEASURE_SHARE = 0.08


@dataclass(frozen=True)
class Budget:
    """How the time is divided.

    Attributes:
        seconds: of all calls together.
    """

    seconds: float

    @property
    def search_s(self) -> float:
        """When the search ends."""
        return SEARCH_SHARE * self.seconds

    @property
    def refit_s(self) -> float:
        """When the last bundle must be finished."""
        return (1 - MEASURE_SHARE) * self.seconds


@dataclass(frozen=True, slots=True)
class Attempt:
    """A candidate that was begun.

    Attributes:
        candidate: what is trained.
        sweep: of its method.
        trial: as far as it has come.
        seconds: that it has taken.
    """

    candidate: Candidate
    sweep: Sweep
    trial: Trial
    seconds: float

    @property
    def name(self) -> str:
        """Its name in messages, and of its refit's folder."""
        return trial_name(self.candidate.method, self.trial.number)

    @property
    def run_path(self) -> Path:
        """Folder of its run."""
        return self.sweep.run_path(self.trial.number)

    @property
    def best_epoch_share(self) -> float:
        """Share of the epochs after which validation was best."""
        best = self.trial.best
        if best is None:
            return 1.0
        return best.epochs / self.config.optim.num_epochs

    @property
    def config(self) -> RunConfig:
        """All its settings."""
        return self.sweep.config.resolve(self.trial.values)

    @property
    def epoch_s(self) -> float | None:
        """Seconds of an epoch, everything included; None before the first validation."""
        if not self.trial.curve:
            return None
        return self.seconds / self.trial.curve[-1].epochs


def is_finished(run: Path) -> bool:
    """Whether the run in a folder was trained to its end."""
    return (run / "result.json").is_file()


def minutes(seconds: float) -> str:
    """Such as "1.5 min"."""
    return f"{seconds / 60:.1f} min"


def trial_name(method: str, number: int) -> str:
    """Such as "astra-0003"."""
    return f"{method}-{number:04d}"


@dataclass(frozen=True)
class Study:
    """The folder.

    Attributes:
        path: absolute.
        corpus: that everything is trained on.
        candidates: what may be tried, in order.
        clock: the time that was spent.
    """

    path: Path
    corpus: Corpus
    candidates: Sequence[Candidate]
    clock: Clock

    @classmethod
    def open_or_create(
        cls, path: Path, corpus: Corpus, methods: Sequence[str], overrides: Values
    ) -> Study:
        """Opens the study in a folder, or starts one there. The caller holds the lock.

        Args:
            path: the folder.
            corpus: that everything is trained on.
            methods: that are allowed.
            overrides: settings of all trials, by dotted name.
        Raises:
            ConfigError: a method does not accept the overrides, or no query is held out.
            RunError: the folder holds another study.
        """
        file = path / "auto.json"
        wanted = {
            "corpus_sha256": corpus.sha256,
            "methods": list(methods),
            "overrides": overrides,
        }
        if file.is_file():
            with readable(f"{file} is damaged", "choose another --out", RunError):
                body = read_json(file)
                chosen = [Candidate(**values) for values in body.pop("candidates")]
            difference = next(configs.differences(body, wanted), None)
            if difference is not None:
                raise RunError(
                    f"{path} was started with {difference}; use the same command or another --out"
                )
            return cls(path, corpus, chosen, Clock(path / "clock.json"))
        chosen = []
        splits = set()
        for candidate in candidates(corpus, methods):
            values = {**candidate.values, **overrides}
            # Refused here, before anything is trained.
            settings = configs.overlay(_held_out(corpus), nested(values))
            splits.add(RunConfig.resolve(candidate.method, settings).data)
            chosen.append(dataclasses.replace(candidate, values=values))
        for split in splits:
            TrainingData(corpus, split).check_held_out()
        plain = [dataclasses.asdict(candidate) for candidate in chosen]
        write_json(file, {**wanted, "candidates": plain})
        return cls(path, corpus, chosen, Clock(path / "clock.json"))

    def sweep(self, method: str) -> Sweep:
        """The trials of a method."""
        folder = self.path / "sweeps" / method
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            **_held_out(self.corpus),
            "cluster": {"workers": 0, "threads_per_process": threads_of_lane()},
            "log": {"every": _LOG_EVERY, "keep": 1},
        }
        definition = SweepConfig(
            method=method,
            corpus=self.corpus.origin,
            corpus_sha256=self.corpus.sha256,
            settings=RunConfig.resolve(method, settings).to_dict(),
            space={},
            scheduler="none",
            metric=METRIC,
        )
        return Sweep.open_or_create(folder, definition)

    def attempts(self, method: str | None = None) -> list[Attempt]:
        """What was begun, of one method or of all, in the order of the candidates."""
        begun = []
        for candidate_method in sorted({candidate.method for candidate in self.candidates}):
            if method not in (None, candidate_method):
                continue
            if not (self.path / "sweeps" / candidate_method / "sweep.json").is_file():
                continue
            sweep = self.sweep(candidate_method)
            for trial in sweep.trials():
                candidate = self.candidates[trial.number % SHORTER]
                seconds = self.clock.seconds_of(trial_name(candidate_method, trial.number))
                begun.append(Attempt(candidate, sweep, trial, seconds))
        return sorted(begun, key=lambda attempt: attempt.trial.number % SHORTER)

    def attempt(self, method: str, number: int) -> Attempt:
        """A trial that was drawn."""
        for attempt in self.attempts(method):
            if attempt.trial.number == number:
                return attempt
        raise AssertionError(f"{trial_name(method, number)} was never drawn")

    def refit_path(self, attempt: Attempt) -> Path:
        """Folder of the run that trains a trial once more."""
        return self.path / "refits" / attempt.name

    def newest_path(self, attempt: Attempt) -> Path:
        """Folder of a trial's finished refit, or of its own run."""
        refit = self.refit_path(attempt)
        return refit if is_finished(refit) else attempt.run_path

    def fused(self) -> dict[str, Any] | None:
        """What fused.json says; None before the first bundle."""
        file = self.path / "fused.json"
        if not file.is_file() or not (self.path / "bundle").is_dir():
            return None
        with readable(f"{file} is damaged", "remove it", RunError):
            return read_json(file)

    def best_of_methods(self) -> list[Attempt]:
        """The best finished trial of each method, in the order in which methods are tried."""
        best: dict[str, Attempt] = {}
        for attempt in self.attempts():
            if attempt.trial.state != "finished" or attempt.trial.score is None:
                continue
            method = attempt.candidate.method
            rival = best.get(method)
            if rival is None or score_of(attempt) > score_of(rival):
                best[method] = attempt
        return [best[method] for method in METHODS if method in best]


def _held_out(corpus: Corpus) -> dict[str, Any]:
    """The setting by which all trials hold the same queries out."""
    low, high = _SHARES
    share = min(max(_HELD_OUT / corpus.card.num_train, low), high)
    return {"data": {"validation": round(share, 3)}}


def score_of(attempt: Attempt) -> float:
    """Metric of the best validation; 0 without one."""
    return attempt.trial.score or 0.0


class Clock:
    """Counts the seconds that all calls have spent, in a file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._last = time.monotonic()
        self._spent_s = 0.0
        self._seconds: dict[str, float] = {}
        self._running: set[str] = set()
        if path.is_file():
            with readable(f"{path} is damaged", "remove it to count from 0", RunError):
                body = json.loads(path.read_text(encoding="utf-8"))
                self._spent_s = float(body["spent_s"])
                self._seconds = dict(body["seconds"])

    @property
    def spent_s(self) -> float:
        """Seconds so far, those since the last `tick` included."""
        with self._lock:
            return self._spent_s + time.monotonic() - self._last

    def seconds_of(self, name: str) -> float:
        """Seconds that were counted for a name."""
        return self._seconds.get(name, 0.0)

    @contextlib.contextmanager
    def counting(self, name: str) -> Iterator[None]:
        """The seconds of the block are counted for a name; blocks may overlap."""
        with self._lock:
            self.tick()
            self._running.add(name)
        try:
            yield
        finally:
            with self._lock:
                self.tick()
                self._running.remove(name)

    def tick(self) -> None:
        """Counts the seconds since the last call, and writes the file."""
        # Trainings are watched from threads.
        with self._lock:
            now = time.monotonic()
            passed = now - self._last
            self._last = now
            self._spent_s += passed
            for name in self._running:
                self._seconds[name] = self._seconds.get(name, 0.0) + passed
            body = {"spent_s": self._spent_s, "seconds": self._seconds}
            write_json(self._path, body)
