"""The first step of `xmcray auto`: trains candidates in order until the time of the search is over.

The first trial of a method is trained to its end. A later one is compared with the best earlier one
after a third of its epochs, and is ended if it is behind (successive halving). As many trials run
at the same time as there are lanes. A restart reads the ledgers of the sweeps and nothing else.
"""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from xmcray.errors import XmcrayError
from xmcray.tuning.lanes import Lanes
from xmcray.tuning.pacing import Limits, Pacer, score_at_rung
from xmcray.tuning.portfolio import Candidate
from xmcray.tuning.space import problem_with
from xmcray.tuning.study import SHORTER, Attempt, Budget, Study, is_finished, minutes
from xmcray.tuning.sweep import FATAL, State, Sweep

# Share of the budget for which a trial that is more than half done goes on after the search.
GRACE_SHARE = 0.1
# Share of the time left for the search that the first trial of a method may take.
TRIAL_SHARE = 0.75
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A candidate that was not begun.

    Attributes:
        candidate: the training.
        reason: why it was not begun.
    """

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class CandidateSearch:
    """Runs trials until the time of the search is over.

    Attributes:
        study: folder of all trials.
        budget: how the time is divided.
        lanes: processes that train.
        say: called with a line when a trial has ended.
    """

    study: Study
    budget: Budget
    lanes: Lanes
    say: Say
    # Held by the lane that reads and writes ledgers.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def run(self) -> list[Skipped]:
        """Tries the candidates in order; returns those that were not begun."""
        candidates = self.study.candidates
        numbers = range(len(candidates))
        reasons = self.lanes.map(self._try, numbers)
        return [
            Skipped(candidate, reason)
            for candidate, reason in zip(candidates, reasons, strict=True)
            if reason
        ]

    @property
    def left_s(self) -> float:
        """Seconds that are left for the search."""
        return self.budget.search_end_s - self.study.clock.spent_s

    def _try(self, number: int) -> str:
        """Runs the trial of a candidate, and its repetitions with fewer epochs.

        Returns:
            Why the trial was not begun; empty if it was.
        """
        candidate = self.study.candidates[number]
        with self._lock:
            sweep = self.study.sweep(candidate.method)
            if number not in _states(sweep):
                reason = self._reason_to_skip(candidate)
                if reason:
                    return reason
                sweep.draw(number, candidate.values)
        states = _states(sweep)
        while number in states:
            if states[number] == "unfinished" and self.left_s > 0:
                self._run(sweep, number)
            # A trial that is too slow has drawn one with fewer epochs.
            number += SHORTER
            states = _states(sweep)
        return ""

    def _reason_to_skip(self, candidate: Candidate) -> str:
        """Why a candidate is not begun; empty if it is."""
        if self.left_s <= 0:
            return "the time was over"
        expected_s = self._expected_s(candidate)
        if expected_s > self.left_s:
            return f"it needs about {minutes(expected_s)}"
        return ""

    def _expected_s(self, candidate: Candidate) -> float:
        """Seconds that a training takes if its epochs are as fast as the fastest of its method; 0
        before the first epoch of a method.
        """
        attempts = self.study.attempts(candidate.method)
        epoch_seconds = [attempt.epoch_s for attempt in attempts if attempt.epoch_s is not None]
        sweep = self.study.sweep(candidate.method)
        epochs = sweep.config.resolve(candidate.values).optim.num_epochs
        return min(epoch_seconds, default=0.0) * epochs

    def _run(self, sweep: Sweep, number: int) -> None:
        """Trains a trial until it ends, or the time is over."""
        with self._lock:
            attempt = self.study.attempt(sweep.config.method, number)
            limits = self._limits(attempt)
        epochs = attempt.config.optim.num_epochs
        pacer = Pacer(self.study.clock, attempt.name, epochs, limits)
        failure = ""
        try:
            self.lanes.train(
                self.study.corpus.origin,
                attempt.run_path,
                attempt.config,
                refit=False,
                watch=pacer.watch,
            )
        except FATAL:
            raise
        except XmcrayError as error:
            failure = str(error)
        with self._lock:
            if failure:
                sweep.end(number, "failed", failure)
            else:
                self._end(attempt, pacer)
            self._report(sweep.config.method, number)

    def _limits(self, attempt: Attempt) -> Limits:
        """When a trial ends early: how long it may take, and which score it has to exceed."""
        is_repetition = attempt.trial.number >= SHORTER
        is_first = not is_repetition and not self._has_finished(attempt)
        # The first trial of a method leaves time for other methods.
        share = TRIAL_SHARE if is_first else 1.0
        return Limits(
            end_s=self.budget.search_end_s,
            grace_s=GRACE_SHARE * self.budget.seconds,
            allowed_s=attempt.seconds + share * self.left_s,
            rival=lambda: self._rival_score(attempt),
        )

    def _has_finished(self, attempt: Attempt) -> bool:
        """Whether another trial of its method has finished."""
        others = self.study.attempts(attempt.candidate.method)
        return any(other.trial.state == "finished" for other in others)

    def _rival_score(self, attempt: Attempt) -> float:
        """Score of the best earlier trial of its method after a third of its epochs.

        A repetition with fewer epochs is not compared with the trial that it repeats.
        """
        place = attempt.trial.number % SHORTER
        best = -math.inf
        with self._lock:
            for other in self.study.attempts(attempt.candidate.method):
                is_earlier = other.trial.number % SHORTER < place
                if is_earlier and other.trial.state in ("finished", "unfinished"):
                    epochs = other.config.optim.num_epochs
                    best = max(best, score_at_rung(other.trial, epochs))
        return best

    def _end(self, attempt: Attempt, pacer: Pacer) -> None:
        """Records the end of a training that did not fail."""
        sweep = attempt.sweep
        number = attempt.trial.number
        if pacer.reason == "behind":
            sweep.end(number, "stopped", "behind after a third of the epochs")
        elif is_finished(attempt.run_path):
            # Whatever the reason: a short training may finish before the signal reaches it.
            sweep.end(number, "finished")
        elif pacer.reason == "too slow" and not self._has_finished(attempt):
            self._shorten(attempt, pacer.epoch_s)
        self._remove_checkpoints(attempt.candidate.method)

    def _remove_checkpoints(self, method: str) -> None:
        """Removes checkpoints and bundles of trials that have ended and are not the best.

        A trial that ran out of time or was too slow stays unfinished: a larger budget continues it.
        """
        best = [attempt.name for attempt in self.study.best_of_methods()]
        for attempt in self.study.attempts(method):
            is_over = attempt.trial.state != "unfinished"
            if is_over and attempt.name not in best:
                shutil.rmtree(attempt.run_path / "checkpoints", ignore_errors=True)
                shutil.rmtree(attempt.run_path / "bundle", ignore_errors=True)

    def _shorten(self, attempt: Attempt, epoch_s: float) -> None:
        """Draws a trial with as many epochs as there is time for, at least one less."""
        number = attempt.trial.number + SHORTER
        optim = attempt.config.optim
        affordable_epochs = int(TRIAL_SHARE * self.left_s / epoch_s)
        epochs = min(affordable_epochs, optim.num_epochs - 1)
        drawn = [trial.number for trial in attempt.sweep.trials()]
        if number in drawn or epochs < 1:
            return
        values = {
            **attempt.trial.values,
            "optim.epochs": epochs,
            "optim.stop_epoch": 0,
            "optim.warmup_steps": optim.warmup_steps * epochs // optim.epochs,
        }
        # So few epochs may leave none for hard negatives, which some settings need.
        if problem_with(values, attempt.sweep.config.resolve) is None:
            attempt.sweep.draw(number, values)

    def _report(self, method: str, number: int) -> None:
        attempt = self.study.attempt(method, number)
        trial = attempt.trial
        message = f" ({trial.message})" if trial.message else ""
        self.say(
            f"{attempt.name} {trial.state}{message}: {trial.score_text} on validation,"
            f" {minutes(attempt.seconds)}"
        )


def _states(sweep: Sweep) -> dict[int, State]:
    """The states of the trials that were drawn, by number."""
    return {trial.number: trial.state for trial in sweep.trials()}
