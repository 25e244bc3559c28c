"""When the ranks of a run look whether they should stop: before the same steps on all of them.

A look costs one broadcast of a number, which also says before which step they meet for the next one: rank 0 chooses it
two seconds ahead by the time that steps have taken. In between nobody waits for anybody more than training does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from xmcray.parallel import collectives
from xmcray.training.preemption import StopFlag

Order = Literal["go on", "save", "stop"]


class Watch:
    """What a rank is told to do before each step.

    Args:
        flag: that stops the run; only rank 0 reads it.
        leaving: whether a node of this run is about to be taken away; called by all ranks, with the same answer.
    """

    every_s = 2.0  # between two looks

    def __init__(self, flag: StopFlag, leaving: Callable[[], bool] | None = None) -> None:
        self._flag, self._leaving = flag, leaving
        self._next, self._last, self._looked_at = 0, 0, 0.0
        self._saved = False

    def look(self, step: int) -> Order:
        """What to do before step `step`, counted from 0; "save" comes once, when a node will leave. Collective."""
        if step < self._next:
            return "go on"
        stop = collectives.rank() == 0 and self._flag.raised
        self._next = collectives.broadcast_int(-1 if stop else self._meet_again(step))
        if self._next < 0:
            return "stop"
        if self._leaving is not None and not self._saved and self._leaving():
            self._saved = True
            return "save"
        return "go on"

    def _meet_again(self, step: int) -> int:
        """The step of the next look: `every_s` ahead, but at most twice as far as the last one was."""
        now = time.perf_counter()
        done, seconds = step - self._last, now - self._looked_at
        ahead = (
            min(2 * done, int(self.every_s * done / max(seconds, 1e-9))) if self._looked_at else 0
        )
        self._last, self._looked_at = step, now
        return step + max(1, ahead)
