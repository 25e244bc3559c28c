"""What one call of a soak did, and the time that it has."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Piece:
    """What one call did of one part.

    Attributes:
        part: name of the part.
        done: how much of the goal.
        disturbances: number of kills, swaps and so on.
        seconds: duration.
        wrong: what must not have happened, and how often.
        notes: for the reader.
        about: machine and commit.
    """

    part: str
    done: int = 0
    disturbances: int = 0
    seconds: float = 0.0
    wrong: Counter[str] = field(default_factory=Counter)
    notes: str = ""
    about: str = ""


class Clock:
    """Counts work alone: what servers take to start and to end comes on top.

    Attributes:
        left_s: seconds that are left.
    """

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds

    @contextlib.contextmanager
    def working(self, share: float = 1.0) -> Iterator[float]:
        """Counts the time of the block; yields the moment of time.monotonic() to stop at.

        Args:
            share: of the time that is left.
        """
        began = time.monotonic()
        try:
            yield began + share * self.left_s
        finally:
            self.left_s -= time.monotonic() - began
