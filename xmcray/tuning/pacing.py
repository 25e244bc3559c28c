"""Ends a training that is behind, too slow, or not done when the time is over.

The training gets SIGTERM, at which it saves a checkpoint. The same call continues it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from xmcray.training.records import Record, following, read_records
from xmcray.tuning.study import METRIC, Clock
from xmcray.tuning.sweep import Trial, score_of

# A trial is compared with its rival after a third of its epochs.
RUNG = 1 / 3
# Of the allowed time, before the speed of a training is judged.
_PATIENCE = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """When a training ends early.

    Attributes:
        end_s: of the clock; the time is over then.
        allowed_s: for the whole training. One that will need more is too slow.
        grace_s: so much later the time is over for a training that is more than half done.
        rival: the score that it must have passed after a third of its epochs, read at that moment.
    """

    end_s: float
    allowed_s: float = math.inf
    grace_s: float = 0.0
    rival: Callable[[], float] = lambda: -math.inf


class Pacer:
    """Watches one training.

    Args:
        clock: counts its time.
        name: for which the clock counts.
        epochs: of the training.
        limits: when it ends early.

    Attributes:
        reason: why it was ended; empty while it was not.
        epoch_s: seconds of an epoch, once a training was too slow.
    """

    def __init__(self, clock: Clock, name: str, epochs: int, limits: Limits) -> None:
        self.clock = clock
        self.name = name
        self.epochs = epochs
        self.limits = limits
        self.reason = ""
        self.epoch_s = 0.0
        self._best = 0.0
        self._is_late = False
        self._timer = threading.Timer(0, self._end_of_time)
        self._stop: Callable[[], None] = lambda: None
        # Step and seconds of the first record that was heard.
        self._start: tuple[int, float] | None = None

    @contextlib.contextmanager
    def watch(self, run: Path, stop: Callable[[], None]) -> Iterator[None]:
        """A context around a training.

        Args:
            run: folder of its run.
            stop: asks it to end.
        """
        self._stop = stop
        # A training that is continued has a past.
        for record in read_records(run / "metrics.jsonl"):
            self._best = max(self._best, score_of(record, METRIC) or 0.0)
        self._set_timer(self.limits.end_s - self.clock.spent_s)
        try:
            with self.clock.counting(self.name), following(run / "metrics.jsonl", self.hear):
                yield
        finally:
            self._timer.cancel()

    def _set_timer(self, seconds: float) -> None:
        """Ends the training later; records may come too late for that if steps are slow."""
        seconds = min(max(0.0, seconds), threading.TIMEOUT_MAX)
        self._timer = threading.Timer(seconds, self._end_of_time)
        self._timer.daemon = True
        self._timer.start()

    def _end_of_time(self) -> None:
        left_s = self.limits.end_s + self.limits.grace_s - self.clock.spent_s
        if self._is_late and left_s > 0:
            self._set_timer(left_s)
        else:
            self._end("out of time")

    def hear(self, record: Record) -> None:
        """Judges the training by a record."""
        self.clock.tick()
        score = score_of(record, METRIC)
        if score is None:
            self._judge_speed(int(record["step"]), int(record["last_step"]))
            return
        self._best = max(self._best, score)
        is_rung = int(record["epoch"]) + 1 == rung(self.epochs)
        if is_rung and self._best <= self.limits.rival():
            self._end("behind")

    def _judge_speed(self, step: int, last_step: int) -> None:
        spent_s = self.clock.seconds_of(self.name)
        if self._start is None:
            # Reading the corpus and building the model are over.
            self._start = (step, spent_s)
            return
        start_step, start_s = self._start
        passed_s = spent_s - start_s
        # Later than half-way, more would be lost than gained.
        self._is_late = 2 * step > last_step
        is_early = step <= start_step or passed_s < _PATIENCE * self.limits.allowed_s
        if self._is_late or is_early:
            return
        step_s = passed_s / (step - start_step)
        if spent_s + step_s * (last_step - step) > self.limits.allowed_s:
            self.epoch_s = step_s * last_step / self.epochs
            self._end("too slow")

    def _end(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            self._stop()


def rung(epochs: int) -> int:
    """The epoch after which a trial is compared."""
    return math.ceil(epochs * RUNG)


def score_at_rung(trial: Trial, epochs: int) -> float:
    """The best score of a trial up to the epoch after which it was compared; -inf before that."""
    if not any(epoch >= rung(epochs) for epoch, _ in trial.curve):
        return -math.inf
    return max(score for epoch, score in trial.curve if epoch <= rung(epochs))
