"""When the ranks of a run check whether they should stop: before the same steps on all of them.

A check costs one broadcast of a number, which also says before which step the ranks meet for the
next one. Rank 0 chooses it two seconds ahead by the time that steps have taken. In between, ranks
wait for each other no more than training does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from xmcray.parallel import collectives
from xmcray.training.preemption import StopFlag

Order = Literal["go on", "save", "stop"]
_STOP = -1  # broadcast instead of the next step


class Watch:
    """Says before each step whether to go on.

    Args:
        flag: Stops the run; only rank 0 reads it.
        leaving: Whether a node of this run is about to be taken away; called by all ranks, with
            the same answer.
        beat: Called with each step before it is taken.
    """

    every_s = 2.0  # between two checks

    def __init__(
        self,
        flag: StopFlag,
        leaving: Callable[[], bool] | None = None,
        beat: Callable[[int], None] | None = None,
    ) -> None:
        self._flag = flag
        self._leaving = leaving
        self._beat = beat
        self._next_step = 0
        self._last_step = 0
        self._last_time: float | None = None
        self._saved = False

    def look(self, step: int) -> Order:
        """What to do before step `step`, counted from 0; collective.

        "save" comes once, when a node will leave.
        """
        if self._beat is not None:
            self._beat(step)
        if step < self._next_step:
            return "go on"
        stop = collectives.rank() == 0 and self._flag.raised
        self._next_step = collectives.broadcast_int(_STOP if stop else self._choose_next(step))
        if self._next_step == _STOP:
            return "stop"
        if self._leaving is not None and not self._saved and self._leaving():
            self._saved = True
            return "save"
        return "go on"

    def _choose_next(self, step: int) -> int:
        """The step of the next check: `every_s` ahead, but at most twice as far as the last one."""
        now = time.perf_counter()
        ahead = 1
        if self._last_time is not None:
            num_steps = step - self._last_step
            seconds = max(now - self._last_time, 1e-9)
            ahead = min(2 * num_steps, int(self.every_s * num_steps / seconds))
        self._last_step = step
        self._last_time = now
        return step + max(1, ahead)
