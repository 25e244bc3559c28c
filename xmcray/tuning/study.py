"""The folder of `xmcray auto`: the candidates, their trials, and the time that was spent.

DIR/auto.json          the corpus and the candidates (portfolio.py); written once
DIR/sweeps/METHOD/     the trials of a method: a sweep (sweep.py), whose ledger a restart reads
DIR/refits/TRIAL/      the run that trains a trial once more, on all training queries
DIR/clock.json         seconds that all calls have spent, in total and on each trial
DIR/fused.json         the runs that were fused to the bundle
DIR/bundle/            the best bundle so far
DIR/results.json       all results, for programs
DIR/report.html        the same as a page
DIR/lock               held by the process that works in the folder
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmcray import config as configs
from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import RunError, readable
from xmcray.storage.whole_files import read_json, write_json
from xmcray.storage.work_folder import FolderKind
from xmcray.training.part_weights import METRICS
from xmcray.training.run_config import RunConfig
from xmcray.tuning.lanes import threads_of_lane
from xmcray.tuning.portfolio import METHODS, Candidate, candidates, with_overrides
from xmcray.tuning.space import Values, nested
from xmcray.tuning.sweep import Sweep, SweepConfig, Trial

STUDY_FOLDER = FolderKind("study", "auto.json")
METRIC = "+".join(METRICS)  # their mean
# Queries to hold out, and the least and the largest share of the training queries for that.
_HELD_OUT = 1000
_MIN_SHARE = 0.05
_MAX_SHARE = 0.15
# Added to a trial's number each time that it is repeated with fewer epochs.
SHORTER = 1000
_LOG_EVERY = 5  # steps between records, by which slow trials are noticed
# Share of the budget at which the search ends.
SEARCH_SHARE = 0.6
# Share of the budget that is kept for the measurement on the test split.
MEASURE_SHARE = 0.08


@dataclass(frozen=True)
class Budget:
    """How the time is divided.

    Attributes:
        seconds: seconds that all calls together may take.
        finished_s: seconds on the clock at which the last call with a smaller budget had finished;
            0 without one.
    """

    seconds: float
    finished_s: float = 0.0

    @property
    def search_end_s(self) -> float:
        """Seconds on the clock at which the search ends."""
        # Of a larger budget, that share of the additional time is for the search.
        return self.finished_s + SEARCH_SHARE * (self.seconds - self.finished_s)

    @property
    def refit_end_s(self) -> float:
        """Seconds on the clock at which the last bundle must be finished."""
        return (1 - MEASURE_SHARE) * self.seconds


@dataclass(frozen=True, slots=True)
class Attempt:
    """A candidate that was begun, or a repetition of it with fewer epochs.

    Attributes:
        candidate: the training.
        sweep: the sweep of its method.
        trial: its trial, as far as it has come.
        seconds: seconds that the trial has taken.
    """

    candidate: Candidate
    sweep: Sweep
    trial: Trial
    seconds: float

    @property
    def name(self) -> str:
        """Its name in messages; its refit's folder has the same name."""
        return trial_name(self.candidate.method, self.trial.number)

    @property
    def run_path(self) -> Path:
        """Folder of its run."""
        return self.sweep.run_path(self.trial.number)

    @property
    def score(self) -> float:
        """Metric of the best validation; 0 without one."""
        return self.trial.score or 0.0

    @property
    def config(self) -> RunConfig:
        """All its settings."""
        return self.sweep.config.resolve(self.trial.values)

    @property
    def epoch_s(self) -> float | None:
        """Seconds per epoch, loading and validation included; None before the first validation."""
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
        path: absolute path.
        corpus: the corpus that everything is trained on.
        candidates: trainings that may be tried, in order.
        clock: counts the time that was spent.
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
            corpus: the corpus that everything is trained on.
            methods: names of the allowed methods.
            overrides: settings of all trials, by dotted name.
        Raises:
            ConfigError: a method does not accept the overrides, or no query is held out.
            RunError: the folder holds another study.
        """
        file = path / "auto.json"
        methods = _in_order(methods)
        arguments = {
            "corpus_sha256": corpus.sha256,
            "methods": methods,
            "overrides": overrides,
        }
        if file.is_file():
            chosen = _stored_candidates(file, arguments)
        else:
            chosen = _checked_candidates(corpus, methods, overrides)
            plain = [dataclasses.asdict(candidate) for candidate in chosen]
            write_json(file, {**arguments, "candidates": plain})
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
        """The attempts of one method or of all, in the order of the candidates."""
        if method is None:
            methods = sorted({candidate.method for candidate in self.candidates})
        else:
            methods = [method]
        attempts = []
        for name in methods:
            # Without this test, `sweep` would begin one.
            if (self.path / "sweeps" / name / "sweep.json").is_file():
                attempts += self._attempts_of(self.sweep(name))
        return sorted(attempts, key=lambda attempt: attempt.trial.number % SHORTER)

    def _attempts_of(self, sweep: Sweep) -> list[Attempt]:
        attempts = []
        for trial in sweep.trials():
            # A repetition with fewer epochs has the number of its candidate plus SHORTER.
            candidate = self.candidates[trial.number % SHORTER]
            seconds = self.clock.seconds_of(trial_name(sweep.config.method, trial.number))
            attempts.append(Attempt(candidate, sweep, trial, seconds))
        return attempts

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
        """The content of fused.json; None before the first bundle."""
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
            best_so_far = best.get(method)
            if best_so_far is None or attempt.score > best_so_far.score:
                best[method] = attempt
        return [best[method] for method in METHODS if method in best]


def _in_order(methods: Sequence[str]) -> list[str]:
    """The methods once each, in the order in which they are tried."""
    return [method for method in METHODS if method in methods]


def _stored_candidates(file: Path, arguments: Mapping[str, Any]) -> list[Candidate]:
    """The candidates in auto.json, which must have been written for the same arguments."""
    with readable(f"{file} is damaged", "choose another --out", RunError):
        body = read_json(file)
        chosen = [Candidate(**values) for values in body.pop("candidates")]
        # Earlier releases wrote the methods as they were given.
        body["methods"] = _in_order(body["methods"])
    difference = next(configs.differences(body, arguments), None)
    if difference is not None:
        raise RunError(
            f"{file.parent} was started with {difference}; use the same command or another --out"
        )
    return chosen


def _checked_candidates(
    corpus: Corpus, methods: Sequence[str], overrides: Values
) -> list[Candidate]:
    """The candidates for a corpus, with overrides that their methods accept."""
    chosen = with_overrides(candidates(corpus, methods), overrides)
    data_configs = set()
    for candidate in chosen:
        # Wrong settings are refused here, before anything is trained.
        settings = configs.overlay(_held_out(corpus), nested(candidate.values))
        data_configs.add(RunConfig.resolve(candidate.method, settings).data)
    for data_config in data_configs:
        TrainingData(corpus, data_config).check_held_out()
    return chosen


def _held_out(corpus: Corpus) -> dict[str, Any]:
    """The setting by which all trials hold the same queries out."""
    share = _HELD_OUT / corpus.card.num_train
    share = min(max(share, _MIN_SHARE), _MAX_SHARE)
    return {"data": {"validation": round(share, 3)}}


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
                for name, seconds in body["seconds"].items():
                    self._seconds[name] = float(seconds)

    @property
    def spent_s(self) -> float:
        """Seconds so far, including those since the last `tick`."""
        with self._lock:
            return self._spent_s + time.monotonic() - self._last

    def seconds_of(self, name: str) -> float:
        """Seconds that were counted for a name."""
        return self._seconds.get(name, 0.0)

    @contextlib.contextmanager
    def counting(self, name: str) -> Iterator[None]:
        """Counts the seconds of the block for a name; blocks may overlap."""
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
        # Several threads call this, each of which watches a training.
        with self._lock:
            now = time.monotonic()
            passed = now - self._last
            self._last = now
            self._spent_s += passed
            for name in self._running:
                self._seconds[name] = self._seconds.get(name, 0.0) + passed
            body = {"spent_s": self._spent_s, "seconds": self._seconds}
            write_json(self._path, body)
