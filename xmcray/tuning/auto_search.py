"""The first step of `xmcray auto`: trains candidates in order, until its time is over.

The first trial of a method is trained to its end. A later one is compared with it after a third of
the epochs, and ended if it is behind: successive halving, as many trials at a time as there are
lanes. The ledgers of the sweeps say what is done, so a restart asks nothing else.
"""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from xmcray.errors import ResourceError, StorageError, XmcrayError
from xmcray.tuning.lanes import Lanes
from xmcray.tuning.pacing import Limits, Pacer, score_at_rung
from xmcray.tuning.portfolio import Candidate
from xmcray.tuning.study import SHORTER, Attempt, Budget, Study, is_finished, minutes
from xmcray.tuning.sweep import State, Sweep

# Of the budget: a trial that is more than half done may go on for so long after the search.
GRACE_SHARE = 0.1
# Of the time that is left for the search: what the first trial of a method may take.
TRIAL_SHARE = 0.75
# Mistakes that every other trial would make too.
_FATAL = (ResourceError, StorageError)
Say = Callable[[str], None]


@dataclass(frozen=True)
class CandidateSearch:
    """Runs trials until the time of the search is over.

    Attributes:
        study: its folder.
        budget: its time.
        lanes: where trials are trained.
        say: called with a line when a trial has ended.
    """

    study: Study
    budget: Budget
    lanes: Lanes
    say: Say
    # Held by the lane that reads and writes ledgers.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def run(self) -> list[tuple[Candidate, str]]:
        """Tries the candidates in order; returns those that were not begun, and why."""
        candidates = self.study.candidates
        reasons = self.lanes.map(self._try, range(len(candidates)))
        return [
            (candidate, reason)
            for candidate, reason in zip(candidates, reasons, strict=True)
            if reason
        ]

    @property
    def left_s(self) -> float:
        """Seconds that are left for the search."""
        return self.budget.search_s - self.study.clock.spent_s

    def _try(self, place: int) -> str:
        """Runs one candidate, also with fewer epochs; returns why it was not begun, if so."""
        candidate = self.study.candidates[place]
        number = place
        with self._lock:
            sweep = self.study.sweep(candidate.method)
            if number not in _states(sweep):
                reason = self._objection(candidate)
                if reason:
                    return reason
                sweep.draw(number, candidate.values)
        # A trial that is too slow is followed by one with fewer epochs.
        while number in _states(sweep):
            if _states(sweep)[number] == "unfinished" and self.left_s > 0:
                self._run(sweep, number)
            number += SHORTER
        return ""

    def _objection(self, candidate: Candidate) -> str:
        """Why a candidate is not begun; empty if it is."""
        if self.left_s <= 0:
            return "the time was over"
        expected_s = self._expected_s(candidate)
        if expected_s > self.left_s:
            return f"it needs about {minutes(expected_s)}"
        return ""

    def _expected_s(self, candidate: Candidate) -> float:
        """Seconds of a training, by the epochs of its method so far; 0 if there are none."""
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
        pacer = Pacer(self.study.clock, attempt.name, attempt.config.optim.num_epochs, limits)
        failure = ""
        try:
            self.lanes.train(
                self.study.corpus.origin,
                attempt.run_path,
                attempt.config,
                refit=False,
                watch=pacer.watch,
            )
        except _FATAL:
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
        """What a trial may take, and which score it has to pass."""
        is_first = not self._has_finished(attempt) and attempt.trial.number < SHORTER
        # A method that was never finished leaves time for others.
        share = TRIAL_SHARE if is_first else 1.0
        return Limits(
            end_s=self.budget.search_s,
            grace_s=GRACE_SHARE * self.budget.seconds,
            allowed_s=attempt.seconds + share * self.left_s,
            rival=lambda: self._rival_score(attempt),
        )

    def _has_finished(self, attempt: Attempt) -> bool:
        """Whether another trial of its method has finished."""
        others = self.study.attempts(attempt.candidate.method)
        return any(other.trial.state == "finished" for other in others)

    def _rival_score(self, attempt: Attempt) -> float:
        """What the best other trial of its method had reached after a third of its epochs."""
        best = -math.inf
        with self._lock:
            for other in self.study.attempts(attempt.candidate.method):
                is_rival = other.trial.state in ("finished", "unfinished")
                if is_rival and other.name != attempt.name:
                    best = max(best, score_at_rung(other.trial, other.config.optim.num_epochs))
        return best

    def _end(self, attempt: Attempt, pacer: Pacer) -> None:
        """Records how a training ended that did not fail."""
        sweep = attempt.sweep
        number = attempt.trial.number
        # A short training may be done before it sees that it is to end.
        if pacer.reason == "behind":
            sweep.end(number, "stopped", "behind after a third of the epochs")
        elif is_finished(attempt.run_path):
            sweep.end(number, "finished")
        elif pacer.reason == "too slow" and not self._has_finished(attempt):
            self._shorten(attempt, pacer.epoch_s)
        self._remove_checkpoints(attempt.candidate.method)

    def _remove_checkpoints(self, method: str) -> None:
        """Removes the checkpoints of trials that nothing will be made of.

        What was out of time or too slow stays unfinished: a larger budget continues it.
        """
        best = [attempt.name for attempt in self.study.best_of_methods()]
        for attempt in self.study.attempts(method):
            is_over = attempt.trial.state != "unfinished"
            if is_over and attempt.name not in best:
                shutil.rmtree(attempt.run_path / "checkpoints", ignore_errors=True)
                shutil.rmtree(attempt.run_path / "bundle", ignore_errors=True)

    def _shorten(self, attempt: Attempt, epoch_s: float) -> None:
        """Draws a trial with as many epochs as there is time for."""
        number = attempt.trial.number + SHORTER
        optim = attempt.config.optim
        epochs = min(int(TRIAL_SHARE * self.left_s / epoch_s), optim.num_epochs - 1)
        drawn = [trial.number for trial in attempt.sweep.trials()]
        if number in drawn or epochs < 1:
            return
        values = {
            **attempt.trial.values,
            "optim.epochs": epochs,
            "optim.stop_epoch": 0,
            "optim.warmup_steps": optim.warmup_steps * epochs // optim.epochs,
        }
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
