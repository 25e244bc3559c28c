"""Stopping in good order: SIGTERM raises a flag in the run's folder, and a checkpoint is saved.

    driver      SIGTERM  ->  RUN/stop has text in it; the driver ends at once if no rank runs
    rank 0      reads RUN/stop every two seconds, whatever a step takes (watch.py)
    all ranks   stop before the same step, save, and end; the driver says so and exits with code 143

RUN/stop exists while a run trains and is opened anew for each check. Network file systems promise
that a file opened after it was closed elsewhere shows what was written, but they may hide a new
name for a minute.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM
_AGAIN_S = 0.1  # until a signal is sent again


class Terminated(KeyboardInterrupt):
    """SIGTERM asked the process to end. The message is its last line; the exit code is 143.

    A call that waits for Ray runs the handlers of signals, but of their exceptions it heeds only
    KeyboardInterrupt and SystemExit, and it raises a plain KeyboardInterrupt in place of this one.
    """


class StopFlag:
    """RUN/stop, which asks the ranks of a run to stop: empty while it is down.

    Args:
        run: folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "stop"

    def hoist(self) -> None:
        """Raises the flag, at which all ranks stop."""
        self.path.write_bytes(b"SIGTERM\n")

    @property
    def raised(self) -> bool:
        """Whether ranks should stop; false if there is no file."""
        try:
            return bool(self.path.read_bytes())
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def on_sigterm(self, training: Callable[[], bool]) -> Iterator[None]:
        """SIGTERM raises the flag while the block runs; it is down before and gone afterwards.

        Args:
            training: whether ranks run, which see the flag and save a checkpoint. If none do, the
                block ends at once with `Terminated`.
        """

        def stop(*_: object) -> None:
            self.hoist()
            if not training():
                raise terminated(self.path.parent)

        self.path.write_bytes(b"")
        try:
            with handling(signal.SIGTERM, stop):
                yield
        finally:
            self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def handling(number: signal.Signals, handler: Callable[..., Any]) -> Iterator[None]:
    """A signal has this handler while the block runs; outside a main thread, where none can be set,
    nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before or signal.SIG_DFL)


@contextlib.contextmanager
def signals_are_kept() -> Iterator[None]:
    """Sends SIGINT or SIGTERM again if Python drops the exception of its handler.

    A handler runs wherever the main thread is. In a callback, such as that of an import's lock, its
    exception has no caller: Python reports it as unraisable and goes on.
    """
    report = sys.unraisablehook

    def send_again(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            report(dropped)
            return
        number = signal.SIGTERM if issubclass(dropped.exc_type, Terminated) else signal.SIGINT
        # Later, because here the callback still runs.
        threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = report


def terminated(run: Path) -> Terminated:
    """What to say when the flag of a run has stopped it."""
    step = newest_step(run)
    kept = f"at step {step:,}, which is saved" if step else "before its first step"
    return Terminated(f"terminated: {run} stopped {kept}; the same command continues it")


def newest_step(run: Path) -> int:
    """Step of the newest checkpoint of a run; 0 if it has none."""
    numbers = [path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*")]
    # A user may have put a copy next to a checkpoint, such as step-00000340-copy.
    return max((int(number) for number in numbers if number.isdecimal()), default=0)
