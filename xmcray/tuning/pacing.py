"""Ends a training that is behind, too slow, or not finished when the time is over.

The training gets SIGTERM, saves a checkpoint and ends. The same call continues it.
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

# Share of its epochs after which a trial is compared with its rival.
RUNG = 1 / 3
# Share of the allowed time that passes before the speed of a training is judged.
_PATIENCE = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """When a training ends early.

    Attributes:
        end_s: seconds on the clock at which the time is over.
        allowed_s: seconds that the whole training may take. One that will need more is too slow.
        grace_s: seconds after `end_s` that are left to a training that is more than half done.
        rival: called at the first validation after a third of the epochs; the training ends unless its
            score is higher.
    """

    end_s: float
    allowed_s: float = math.inf
    grace_s: float = 0.0
    rival: Callable[[], float] = lambda: -math.inf


class Pacer:
    """Watches one training.

    Args:
        clock: counts the training's seconds.
        name: name under which the clock counts them.
        epochs: number of epochs of the training.
        limits: when the training ends early.

    Attributes:
        reason: why the training was ended early; empty if it was not.
        epoch_s: seconds per epoch; 0 unless the training is too slow.
    """

    def __init__(self, clock: Clock, name: str, epochs: int, limits: Limits) -> None:
        self.clock = clock
        self.name = name
        self.epochs = epochs
        self.limits = limits
        self.reason = ""
        self.epoch_s = 0.0
        self._best = 0.0
        self._is_compared = False
        self._is_past_half = False
        self._timer = threading.Timer(0, self._end_of_time)
        self._stop: Callable[[], None] = lambda: None
        # Step and seconds of the first record of this process.
        self._start: tuple[int, float] | None = None

    @contextlib.contextmanager
    def watch(self, run: Path, stop: Callable[[], None]) -> Iterator[None]:
        """Judges a training by its records while the block runs.

        Args:
            run: folder of its run.
            stop: asks the training to end.
        """
        self._stop = stop
        # A training that is continued was validated before.
        for record in read_records(run / "metrics.jsonl"):
            score = score_of(record, METRIC)
            if score is not None:
                self._best = max(self._best, score)
                # It was compared then.
                self._is_compared |= int(record["epoch"]) + 1 >= rung(self.epochs)
        self._set_timer(self.limits.end_s - self.clock.spent_s)
        try:
            with self.clock.counting(self.name), following(run / "metrics.jsonl", self.hear):
                yield
        finally:
            self._timer.cancel()

    def _set_timer(self, seconds: float) -> None:
        """Sets when the time is over. A timer, because slow steps may write no record by then."""
        seconds = min(max(0.0, seconds), threading.TIMEOUT_MAX)
        self._timer = threading.Timer(seconds, self._end_of_time)
        self._timer.daemon = True
        self._timer.start()

    def _end_of_time(self) -> None:
        grace_end_s = self.limits.end_s + self.limits.grace_s
        left_s = grace_end_s - self.clock.spent_s
        if self._is_past_half and left_s > 0:
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
        self._compare(epochs_done=int(record["epoch"]) + 1)

    def _compare(self, epochs_done: int) -> None:
        """Ends the training if it is behind at its first validation after a third of the epochs."""
        if self._is_compared or epochs_done < rung(self.epochs):
            return
        self._is_compared = True
        if epochs_done < self.epochs and self._best <= self.limits.rival():
            self._end("behind")

    def _judge_speed(self, step: int, last_step: int) -> None:
        """Ends the training if it will take longer than it may."""
        spent_s = self.clock.seconds_of(self.name)
        if self._start is None:
            # Measured from here on: the corpus has been read and the model built.
            self._start = (step, spent_s)
            return
        start_step, start_s = self._start
        passed_s = spent_s - start_s
        self._is_past_half = 2 * step > last_step
        if self._is_past_half:
            return  # more would be lost than gained
        if step <= start_step or passed_s < _PATIENCE * self.limits.allowed_s:
            return  # too early to tell
        step_s = passed_s / (step - start_step)
        expected_s = spent_s + step_s * (last_step - step)
        if expected_s > self.limits.allowed_s:
            self.epoch_s = step_s * last_step / self.epochs
            self._end("too slow")

    def _end(self, reason: str) -> None:
        """Asks the training to end, once."""
        if not self.reason:
            self.reason = reason
            self._stop()


def rung(epochs: int) -> int:
    """The epoch after which a trial is compared, at its next validation."""
    return math.ceil(epochs * RUNG)


def score_at_rung(trial: Trial, epochs: int) -> float:
    """The best score of a trial up to the validation at which it is compared.

    It is -inf if the trial has not come that far.
    """
    best = -math.inf
    for validation in trial.curve:
        best = max(best, validation.score)
        if validation.epochs >= rung(epochs):
            return best
    return -math.inf
