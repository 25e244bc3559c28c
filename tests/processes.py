"""Finds and kills processes that a test itself started."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def descendants(pid: int) -> dict[int, str]:
    """Command lines of all processes below `pid`."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found: dict[int, str] = {}
    for child in parents:
        above = child
        while above in parents and above != pid:
            above = parents[above]
        if above == pid and child != pid:
            try:
                found[child] = (
                    (Path("/proc") / str(child) / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode()
                )
            except FileNotFoundError:
                continue
    return found


def train_workers() -> list[int]:
    """Processes of the Ray Train workers below this process."""
    return sorted(
        pid for pid, command in descendants(os.getpid()).items() if "RayTrainWorker" in command
    )


def last_step(run: Path) -> int:
    """Step of the last whole record of a run; 0 before the first."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:
            continue
    return 0


class When(threading.Thread):
    """Does something once, as soon as a condition holds; `done` tells whether it came to that."""

    def __init__(self, condition: Callable[[], bool], action: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.condition, self.action = condition, action
        self.done, self.stop = False, threading.Event()
        self.start()

    def run(self) -> None:
        while not self.stop.wait(0.002):
            if self.condition():
                self.action()
                self.done = True
                return

    def close(self) -> None:
        self.stop.set()
        self.join()


def wait_until(
    condition: Callable[[], bool], seconds: float, told: Callable[[], str], every: float = 0.1
) -> None:
    """Returns once a condition of another process holds; raises RuntimeError with what is told if it never does.

    Args:
        every: seconds between two looks, of which each costs the other process something.
    """
    pause, deadline = threading.Event(), time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(told())
        pause.wait(every)


def kill(pids: list[int]) -> None:
    """SIGKILL."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
