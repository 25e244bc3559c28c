"""Ranks that stop: how they are noticed and named, and where the user reads it.

    process stopped or frozen   answers no question of Ray for `cluster.stall_s`: the workers are
                                started again from the newest checkpoint
    thread hangs                `StallAlarm` names its rank and the line; the collective in which the
                                other ranks wait times out, and the workers are started again

Both add a record to RUN/interruptions.jsonl. The driver follows this file and logs each of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Self

from xmcray.parallel import collectives
from xmcray.ray_adapter.private import WorkerFailure
from xmcray.training.preemption import newest_step
from xmcray.training.records import Record, tailing

FILE = "interruptions.jsonl"
_PACKAGE = "xmcray"
# Those in which a rank waits for others. With NCCL a collective returns at once, and the host waits
# where it reads the result.
_WAITING = ("torch.distributed", collectives.__name__)
logger = logging.getLogger(__name__)


class Interruptions:
    """RUN/interruptions.jsonl: one record for each stall and each restart of the workers.

    Args:
        run: folder of the run.
        stall_s: `cluster.stall_s`, for the messages.
    """

    def __init__(self, run: Path, stall_s: float) -> None:
        self._path = run / FILE
        self._stall_s = stall_s
        self._run = run

    def note(self, text: str) -> None:
        """Adds a record; on a full disk it is lost."""
        record = {"step": newest_step(self._run), "time": round(time.time(), 3), "text": text}
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def note_failures(self, failures: Mapping[int, WorkerFailure]) -> None:
        """Adds a record for each rank because of which the workers are started again."""
        for failure in culprits(failures):
            self.note(f"{failure.text(self._stall_s)}; the workers are started again")

    @contextlib.contextmanager
    def logged(self, has_mistake: Callable[[], bool]) -> Iterator[None]:
        """Logs, in a thread, each record that is added while the block runs.

        Args:
            has_mistake: whether a rank has noted the user's mistake. The restart after it is no
                news, because the mistake itself is about to be the last line.
        """

        def warn(record: Record) -> None:
            if not has_mistake():
                text = record.get("text")
                logger.warning("%s (newest checkpoint: step %s)", text, record["step"])

        with tailing(self._path, warn):
            yield


def culprits(failures: Mapping[int, WorkerFailure]) -> list[WorkerFailure]:
    """The failures that caused the others.

    When one process is lost, collectives of all other ranks fail with errors of their own.
    """
    lost = [failure for failure in failures.values() if failure.is_lost]
    return lost or list(failures.values())


class StallAlarm:
    """Says once for each place in the code that this rank stays there and keeps others waiting.

    A rank that only waits for others in a collective says nothing. Waits for hard negatives, a slow
    disk or a long validation are named too, because the reader can tell them from a fault. On a GPU
    a rank may wait for a collective wherever it next needs a number of the device, and is then named
    too.

    Args:
        rank: of this process.
        stall_s: seconds without a new step before the alarm.
        say: gets the sentence, in a thread of the alarm.
    """

    def __init__(self, rank: int, stall_s: float, say: Callable[[str], None]) -> None:
        self._rank = rank
        self._stall_s = stall_s
        self._say = say
        self._step = 0
        self._since = time.monotonic()
        self._named: set[str] = set()
        self._closing = threading.Event()
        # The thread that trains; Ray runs it next to the main thread.
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="stall-alarm", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def beat(self, step: int) -> None:
        """The rank is about to take this step."""
        self._step = step
        self._since = time.monotonic()

    def _run(self) -> None:
        while not self._closing.wait(self._stall_s / 4):
            waited_s = time.monotonic() - self._since
            if waited_s < self._stall_s:
                continue
            place = place_of(sys._current_frames().get(self._watched))
            is_leaving = self._closing.is_set()
            if place is None or place in self._named or is_leaving:
                continue
            self._named.add(place)
            self._say(
                f"rank {self._rank} has been at step {self._step:,} for {waited_s:.0f} s, in {place}"
            )


def place_of(frame: FrameType | None) -> str | None:
    """Where in this package a thread is, or None if it waits for other ranks there.

    Args:
        frame: the innermost frame of the thread.
    """
    outermost = frame
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_WAITING):
            return None
        if module.partition(".")[0] == _PACKAGE:
            return f"{module}.{frame.f_code.co_name}, line {frame.f_lineno}"
        frame = frame.f_back
    if outermost is None:
        return None
    return f"{outermost.f_code.co_filename}, line {outermost.f_lineno}"
