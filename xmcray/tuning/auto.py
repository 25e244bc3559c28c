"""`xmcray auto`: trainings, refits and a fused bundle, within a time.

    search   the candidates in order (portfolio.py); a trial that falls behind an earlier one of its
             method after a third of its epochs ends there: successive halving, one trial at a time
    fuse     the best trial of each method; weights and members by held-out queries (fuse.py)
    refit    the members once more on all training queries, as far as the time allows; fused again
    measure  the bundle, its best member alone and a simple baseline on the test split

Every step leaves files (study.py), so that a restart goes on where the last call was.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmcray import storage
from xmcray.data.corpus import Corpus
from xmcray.errors import ResourceError, RunError, StorageError, XmcrayError, readable
from xmcray.evaluation.evaluate import Evaluation, Search, compare, evaluate
from xmcray.retrieval.retriever import Retriever
from xmcray.training.fuse import fuse
from xmcray.training.launch import train
from xmcray.training.outcome import bundle_of, nearest_queries, searcher
from xmcray.training.part_weights import Choice
from xmcray.training.preemption import Terminated
from xmcray.training.run import SELECTION, Run, locked
from xmcray.tuning.pacing import Limits, Pacer, score_at_rung
from xmcray.tuning.portfolio import Candidate
from xmcray.tuning.space import Values
from xmcray.tuning.study import METRICS, SHORTER, Attempt, Study, score_of
from xmcray.tuning.sweep import Sweep

# Of the budget: the search ends here.
SEARCH_SHARE = 0.6
# Of the budget: a trial that is more than half done may go on for so long after the search.
GRACE_SHARE = 0.1
# Of the time that is left for the search: what the first trial of a method may take.
TRIAL_SHARE = 0.75
# Of the budget: kept for the measurement on the test split.
MEASURE_SHARE = 0.08
# Members that are fused; the time to encode queries and to choose weights grows with their number.
MAX_MEMBERS = 4
MAX_MEMBERS_OF_LARGE = 3
LARGE = 100_000  # training queries and labels
FUSE_QUERIES = 1000  # held-out queries by which weights are chosen
MOST_TEST_QUERIES = 5000
BASELINE = "TF-IDF memory"
_FATAL = (ResourceError, StorageError)
Say = Callable[[str], None]


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


def auto(
    corpus: Corpus,
    out: str | Path,
    budget_s: float,
    methods: Sequence[str],
    overrides: Values,
    say: Say,
) -> dict[str, Any]:
    """Finds a good bundle for a corpus within a time; continues what an earlier call began.

    Args:
        corpus: the data, prepared.
        out: folder of the study.
        budget_s: seconds of all calls together.
        methods: that may be tried.
        overrides: settings of all trials, by dotted name.
        say: called with a line whenever something has ended.
    Returns:
        The content of results.json.
    Raises:
        ConfigError: a method does not accept the overrides.
        RunError: the folder holds something else, or no training fits into the time.
        Terminated: SIGTERM came; the same call continues.
    """
    path = Path(out).absolute()
    with locked(path):
        study = Study.open_or_create(path, corpus, methods, overrides)
        budget = Budget(budget_s)
        try:
            left_out = _Searcher(study, budget, say).run()
            _fuse_best(study, budget, say)
            return _measured(study, budget, left_out, say)
        finally:
            study.clock.tick()


@dataclass(frozen=True)
class _Searcher:
    """Runs trials until the time of the search is over.

    Attributes:
        study: its folder.
        budget: its time.
        say: called with a line when a trial has ended.
    """

    study: Study
    budget: Budget
    say: Say

    def run(self) -> list[dict[str, Any]]:
        """Tries the candidates in order; returns those that there was no time for."""
        left_out = []
        for place, candidate in enumerate(self.study.candidates):
            reason = self._try(place, candidate)
            if reason:
                row = {**_described(candidate), "reason": reason}
                left_out.append(row)
        return left_out

    @property
    def left_s(self) -> float:
        """Seconds that are left for the search."""
        return self.budget.search_s - self.study.clock.spent_s

    def _try(self, place: int, candidate: Candidate) -> str:
        """Runs one candidate, also with fewer epochs; returns why it was not begun, if so."""
        sweep = self.study.sweep(candidate.method)
        states = {trial.number: trial.state for trial in sweep.trials()}
        if place not in states:
            reason = self._objection(candidate)
            if reason:
                return reason
            sweep.draw(place, candidate.values)
            states[place] = "unfinished"
        for number in (place, place + SHORTER):
            states = {trial.number: trial.state for trial in sweep.trials()}
            if states.get(number) == "unfinished" and self.left_s > 0:
                self._run(sweep, number)
        return ""

    def _objection(self, candidate: Candidate) -> str:
        """Why a candidate is not begun; empty if it is."""
        if self.left_s <= 0:
            return "the time was over"
        expected_s = self._expected_s(candidate)
        if expected_s > self.left_s:
            return f"it needs about {_minutes(expected_s)}"
        return ""

    def _expected_s(self, candidate: Candidate) -> float:
        """Seconds of a training, by the epochs of its method so far; 0 if there are none."""
        attempts = self.study.attempts(candidate.method)
        epoch_seconds = [attempt.epoch_s for attempt in attempts if attempt.epoch_s is not None]
        sweep = self.study.sweep(candidate.method)
        epochs = sweep.config.resolve(candidate.values).optim.epochs
        return min(epoch_seconds, default=0.0) * epochs

    def _run(self, sweep: Sweep, number: int) -> None:
        """Trains a trial until it ends, or the time is over."""
        attempt = _attempt(self.study, sweep.config.method, number)
        config = attempt.config
        limits = self._limits(attempt)
        pacer = Pacer(self.study.clock, attempt.name, config.optim.epochs, limits)
        self.study.clock.tick()
        try:
            _train(self.study, attempt.run_path, attempt, pacer)
        except _FATAL:
            raise
        except XmcrayError as error:
            sweep.end(number, "failed", str(error))
        else:
            self._end(attempt, pacer)
        self._report(sweep.config.method, number)

    def _limits(self, attempt: Attempt) -> Limits:
        """What a trial may take, and which score it has to pass."""
        rivals = []
        for other in self.study.attempts(attempt.candidate.method):
            if other.trial.state == "finished":
                epochs = other.config.optim.epochs
                rivals.append(score_at_rung(other.trial, epochs))
        left_s = self.left_s
        is_first = not rivals and attempt.trial.number < SHORTER
        # A method that was never finished leaves time for others.
        share = TRIAL_SHARE if is_first else 1.0
        return Limits(
            end_s=self.budget.search_s,
            grace_s=GRACE_SHARE * self.budget.seconds,
            allowed_s=attempt.seconds + share * left_s,
            rival=max(rivals, default=None),
        )

    def _end(self, attempt: Attempt, pacer: Pacer) -> None:
        """Records how a training ended that did not fail."""
        sweep = attempt.sweep
        number = attempt.trial.number
        # A short training may be done before it sees that it is to end.
        if pacer.reason == "behind":
            sweep.end(number, "stopped", "behind after a third of the epochs")
        elif _is_finished(attempt.run_path):
            sweep.end(number, "finished")
        elif pacer.reason == "too slow":
            needed_s = pacer.epoch_s * pacer.epochs
            if pacer.limits.rival is None:
                self._shorten(attempt, pacer.epoch_s)
            sweep.end(number, "stopped", f"it needs about {_minutes(needed_s)}")
        # What the end of the time has stopped stays unfinished: more time continues it.
        for other in sweep.trials():
            if other.state == "stopped":
                shutil.rmtree(sweep.run_path(other.number) / "checkpoints", ignore_errors=True)

    def _shorten(self, attempt: Attempt, epoch_s: float) -> None:
        """Draws a trial with as many epochs as there is time for."""
        number = attempt.trial.number + SHORTER
        optim = attempt.config.optim
        epochs = min(int(TRIAL_SHARE * self.left_s / epoch_s), optim.epochs - 1)
        drawn = [trial.number for trial in attempt.sweep.trials()]
        if attempt.trial.number >= SHORTER or number in drawn or epochs < 1:
            return
        values = {
            **attempt.trial.values,
            "optim.epochs": epochs,
            "optim.warmup_steps": optim.warmup_steps * epochs // optim.epochs,
        }
        attempt.sweep.draw(number, values)

    def _report(self, method: str, number: int) -> None:
        attempt = _attempt(self.study, method, number)
        trial = attempt.trial
        message = f" ({trial.message})" if trial.message else ""
        self.say(
            f"{attempt.name} {trial.state}{message}: {trial.score_text} on validation,"
            f" {_minutes(attempt.seconds)}"
        )


def _attempt(study: Study, method: str, number: int) -> Attempt:
    for attempt in study.attempts(method):
        if attempt.trial.number == number:
            return attempt
    raise AssertionError("a trial that was drawn")


def _train(study: Study, path: Path, attempt: Attempt, pacer: Pacer, refit: bool = False) -> None:
    """Trains a run until it ends or its pacer ends it."""
    try:
        train(study.corpus.origin, path, attempt.config, refit=refit, watch=pacer.watch)
    except Terminated:
        # Without a reason of the pacer it was a real signal.
        if not pacer.reason:
            raise


def _is_finished(run: Path) -> bool:
    return (run / "result.json").is_file()


def _minutes(seconds: float) -> str:
    """Such as "1.5 min"."""
    return f"{seconds / 60:.1f} min"


# --- one bundle


def _fuse_best(study: Study, budget: Budget, say: Say) -> None:
    """Writes DIR/bundle, first from the trials as they are and then, if time allows, from refits."""
    card = study.corpus.card
    is_large = card.num_train + card.num_labels > LARGE
    # Their scores do not rank them: what label vectors reach alone says little of what they add.
    best = study.best_of_methods()[: MAX_MEMBERS_OF_LARGE if is_large else MAX_MEMBERS]
    if not best:
        raise RunError(
            f"no training was finished within {_minutes(budget.search_s)}, the time of the search;"
            " the same command with a larger --budget continues"
        )
    fused = _fused(study)
    if fused is None or fused["trials"] != [attempt.name for attempt in best]:
        fused = _fuse(study, best, None, say)
    members = [attempt for attempt in best if attempt.name in fused["members"]]
    for attempt in members:
        _refit(study, attempt, budget, say)
    refitted = [attempt.name for attempt in members if _is_finished(_refit_path(study, attempt))]
    left_s = budget.seconds - study.clock.spent_s
    if set(refitted) - set(fused["refitted"]) and fused["seconds"] < left_s:
        # The weights stay: they were chosen by the trials, which have not seen the held-out queries.
        _fuse(study, members, fused, say)


def _fuse(
    study: Study, attempts: Sequence[Attempt], before: Mapping[str, Any] | None, say: Say
) -> dict[str, Any]:
    """Writes DIR/bundle and fused.json; returns the content of the latter.

    Args:
        study: the folder.
        attempts: trials that are fused, or their refits where these are finished.
        before: what the last call returned, whose members `attempts` are; their weights stay.
        say: called with a line at the end.
    """
    started = time.monotonic()
    for leftover in study.path.glob(".fusing.*"):
        shutil.rmtree(leftover)
    fresh = study.path / "bundle.new"
    shutil.rmtree(fresh, ignore_errors=True)
    paths = []
    refitted = []
    for attempt in attempts:
        path = attempt.run_path
        if _is_finished(_refit_path(study, attempt)):
            path = _refit_path(study, attempt)
            refitted.append(attempt.name)
        paths.append(str(path))
    choice = fuse(
        paths,
        study.corpus,
        fresh,
        metrics=METRICS,
        most_queries=FUSE_QUERIES,
        choice=None if before is None else Choice.read(before["choice"]),
        threads=len(os.sched_getaffinity(0)),
    )
    members = _members(choice, attempts)
    seconds = time.monotonic() - started
    body = {
        "trials": before["trials"] if before else [attempt.name for attempt in attempts],
        "members": [attempt.name for attempt in members],
        "refitted": refitted,
        "seconds": max(seconds, before["seconds"] if before else 0.0),
        "choice": choice.plain(),
    }
    bundle = study.path / "bundle"
    if bundle.exists():
        storage.exchange(fresh, bundle)
        shutil.rmtree(fresh)
    else:
        storage.publish(fresh, bundle)
    storage.write_json(study.path / "fused.json", body)
    study.clock.tick("fuse")
    mean = np.mean(list(choice.metrics.values()))
    say(f"fused {_joined(body)}: {100 * mean:.2f} on validation, {_minutes(seconds)}")
    return body


def _joined(fused: Mapping[str, Any]) -> str:
    """The members in words."""
    return " + ".join(fused["members"]) or "words alone"


def _fused(study: Study) -> dict[str, Any] | None:
    """What fused.json says; None before the first bundle."""
    file = study.path / "fused.json"
    if not file.is_file() or not (study.path / "bundle").is_dir():
        return None
    with readable(f"{file} is damaged", "remove it", RunError):
        return storage.read_json(file)


def _members(choice: Choice, attempts: Sequence[Attempt]) -> list[Attempt]:
    """The trials of which a part stays in the bundle."""
    used = choice.config.used()
    members = []
    for attempt in attempts:
        # The parts of a single member may have no prefix. Words belong to no member.
        prefixes = [f"{attempt.candidate.method}."]
        if len(attempts) == 1:
            prefixes.append("")
        parts = {prefix + part for prefix in prefixes for part in ("labels", "memory")}
        if parts & set(used):
            members.append(attempt)
    return members


def _refit_path(study: Study, attempt: Attempt) -> Path:
    return study.path / "refits" / attempt.name


def _refit(study: Study, attempt: Attempt, budget: Budget, say: Say) -> None:
    """Trains a member once more, on all training queries, if there is time for it."""
    path = _refit_path(study, attempt)
    if _is_finished(path):
        return
    fused = _fused(study)
    assert fused is not None, "members were chosen by it"
    end_s = budget.refit_s - fused["seconds"]
    spent_before_s = study.clock.seconds_of(f"{attempt.name} refit")
    # As long as the trial took, at most: its best epoch may be an earlier one.
    expected_s = attempt.seconds * _best_share(attempt) - spent_before_s
    if study.clock.spent_s + expected_s > end_s:
        say(f"{attempt.name} is not refitted: it needs about {_minutes(expected_s)}")
        return
    path.mkdir(parents=True, exist_ok=True)
    selection = path / SELECTION
    if not selection.is_symlink():
        # `train` finds the finished trial there, and `fuse` the queries that it held out.
        selection.symlink_to(os.path.relpath(attempt.run_path, path))
    study.clock.tick()
    name = f"{attempt.name} refit"
    pacer = Pacer(study.clock, name, attempt.config.optim.epochs, Limits(end_s))
    _train(study, path, attempt, pacer, refit=True)
    state = "finished" if _is_finished(path) else "out of time"
    say(f"{name} {state}, {_minutes(study.clock.seconds_of(name))}")


def _best_share(attempt: Attempt) -> float:
    """Share of the epochs after which validation was best."""
    best = attempt.trial.best
    epochs = attempt.config.optim.epochs
    return 1.0 if best is None else best[1] / epochs


# --- results


def _measured(
    study: Study, budget: Budget, left_out: Sequence[Mapping[str, Any]], say: Say
) -> dict[str, Any]:
    """Measures the bundle, writes results.json and the page; returns the content of results.json."""
    from xmcray.tuning.auto_report import write_page

    fused = _fused(study)
    assert fused is not None, "a bundle was written"
    attempts = study.attempts()
    file = study.path / "results.json"
    test = None
    if file.is_file():
        with readable(f"{file} is damaged", "remove it", RunError):
            before = storage.read_json(file)
            is_same = before["bundle"] == _plain_bundle(fused)
            test = before["test"] if is_same else None
    if test is None and study.corpus.card.num_test:
        test = _test(study, fused)
    study.clock.tick("measure")
    result = {
        "budget_s": budget.seconds,
        "spent_s": study.clock.spent_s,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "bundle": _plain_bundle(fused),
        "choice": fused["choice"],
        "trials": [_plain(attempt) for attempt in attempts],
        "left_out": list(left_out),
        "test": test,
    }
    storage.write_json(file, result)
    write_page(study.path / "report.html", study.corpus, result)
    say(f"{_minutes(study.clock.spent_s)} of {_minutes(budget.seconds)} spent")
    return result


def _plain_bundle(fused: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fused[name] for name in ("trials", "members", "refitted")}


def _described(candidate: Candidate) -> dict[str, Any]:
    return {
        "method": candidate.method,
        "preset": candidate.preset,
        "encoder": candidate.encoder,
    }


def _plain(attempt: Attempt) -> dict[str, Any]:
    """A trial for results.json."""
    return {
        "name": attempt.name,
        **_described(attempt.candidate),
        "epochs": attempt.config.optim.epochs,
        "seconds": round(attempt.seconds, 1),
        **attempt.trial.plain(),
    }


def _test(study: Study, fused: Mapping[str, Any]) -> dict[str, Any]:
    """What the bundle, its best member alone and the baseline reach on the test split."""
    corpus = study.corpus
    rows = _test_rows(corpus)
    attempts = {attempt.name: attempt for attempt in study.attempts()}
    best = max((attempts[name] for name in fused["trials"]), key=score_of)
    path = best.run_path
    if best.name in fused["refitted"]:
        path = _refit_path(study, best)
    alone = Retriever.load(bundle_of(Run.open(path), corpus))
    searches: dict[str, Search] = {
        "bundle": searcher(Retriever.load(study.path / "bundle"), corpus, "test"),
        f"{best.name} alone": searcher(alone, corpus, "test"),
        BASELINE: nearest_queries(corpus, "test"),
    }
    evaluations = {}
    for name, search in searches.items():
        evaluations[name] = _evaluated(search, corpus, rows)
    results = []
    for name, evaluation in evaluations.items():
        row: dict[str, Any] = {"name": name}
        for metric in METRICS:
            row[metric] = evaluation.metrics[metric]
            row[f"{metric} interval"] = evaluation.intervals[metric]
        if evaluation.calibration is not None:
            row["ECE@5"] = evaluation.calibration["ECE@5"]
        results.append(row)
    comparisons = []
    for name in list(searches)[1:]:
        for comparison in compare(evaluations["bundle"], evaluations[name]):
            row = {"than": name, **dataclasses.asdict(comparison)}
            if comparison.metric in METRICS:
                comparisons.append(row)
    return {"queries": len(rows), "results": results, "comparisons": comparisons}


def _test_rows(corpus: Corpus) -> np.ndarray[Any, Any]:
    """Rows of the test split that are measured: all, or as many as there is time for."""
    num_test = corpus.card.num_test
    count = min(num_test, MOST_TEST_QUERIES)
    # Evenly spread, so that every call measures the same ones.
    return np.unique(np.linspace(0, num_test - 1, count).astype(np.int64))


def _evaluated(search: Search, corpus: Corpus, rows: np.ndarray[Any, Any]) -> Evaluation:
    card = corpus.card
    split = corpus.split("test")
    return evaluate(
        lambda places: search(rows[places]),
        lambda places: split.positives(rows[places]),
        num_queries=len(rows),
        train_counts=corpus.train_counts,
        num_train=card.num_train,
        a=card.propensity_a,
        b=card.propensity_b,
    )
