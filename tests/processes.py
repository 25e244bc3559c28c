"""Finds and kills processes that a test itself started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# What the system says of a process that ended before its files were opened, or before they were read.
GONE = (FileNotFoundError, ProcessLookupError)


def descendants(pid: int) -> dict[int, str]:
    """Command lines of all processes below `pid`."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except GONE:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    commands: dict[int, str] = {}
    for child in parents:
        ancestor = child
        while ancestor in parents and ancestor != pid:
            ancestor = parents[ancestor]
        if ancestor == pid and child != pid:
            with contextlib.suppress(*GONE):
                commands[child] = command_line(child)
    return commands


def command_line(pid: int) -> str:
    """Command line of a process; one of GONE once it has ended."""
    return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def with_variable(setting: str) -> list[int]:
    """Processes whose environment had NAME=VALUE when they started; children inherit it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        # Other users' processes cannot be read, and any process may just have ended.
        with contextlib.suppress(OSError):
            if setting.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def kill_family(commands: dict[int, str]) -> None:
    """SIGKILL for those of `descendants` that still run; another process may have got one of the
    ids.
    """
    for pid, command in commands.items():
        with contextlib.suppress(*GONE):
            if command_line(pid) == command:
                os.kill(pid, signal.SIGKILL)


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
    """Does something once, as soon as a condition holds; `done` says whether it has done it."""

    def __init__(self, condition: Callable[[], bool], action: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.condition = condition
        self.action = action
        self.done = False
        self.stop = threading.Event()
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


def longest_end_s() -> float:
    """Seconds within which a signal has to end a command: 10 on an idle machine.

    Where more processes want to run than there are processors, each takes as much longer.
    """
    load_per_core = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return 10 * max(1.0, load_per_core)


def wait_until(
    condition: Callable[[], bool], seconds: float, message: Callable[[], str], every: float = 0.1
) -> None:
    """Returns once a condition of another process holds; raises RuntimeError with a message if it
    never does.

    Args:
        condition: is checked again and again.
        seconds: after which to give up.
        message: says what is missing.
        every: seconds between two checks, each of which costs the other process something.
    """
    pause = threading.Event()
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(message())
        pause.wait(every)


def kill(pids: list[int]) -> None:
    """SIGKILL."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def kill_here() -> NoReturn:
    """SIGKILL for this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process went on")


def run_killed(function: Callable[[], Any]) -> None:
    """Runs a function, which calls `kill_here`, in a copy of this process."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "it was not killed"
    assert os.WTERMSIG(status) == signal.SIGKILL
