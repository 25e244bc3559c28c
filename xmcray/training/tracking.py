"""Tells trackers what a run records. The driver does it, beside the training: loop and workers know nothing of it.

RUN/trackers/told.json    by tracker: the step up to which it was told, and whether that step's validation and the test
                          metrics were; so whoever comes next tells what is lacking, and nothing twice

A tracker that fails is a warning. It is tried again from time to time, and at last when the run is resumed or measured.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from xmcray import storage
from xmcray.credentials import mask
from xmcray.training import trackers
from xmcray.training.records import Record, following, read_records
from xmcray.training.run import Run

logger = logging.getLogger(__name__)

_RETRY_S = 60.0
_PATIENCE_S = 30.0  # how long the end of a training waits for trackers
_STEP, _VALIDATION, _TEST = range(3)  # at one step they are recorded in this order
_KINDS = ("train", "validation", "test")
_NO_VALUES = (
    "step",
    "last_step",
    "epoch",
    "time",
    "queries",
    "left_out",
    "A",
    "B",
)  # where, when and of what


@contextlib.contextmanager
def tracked(run: Run) -> Iterator[None]:
    """Tells the trackers of `log.track` what the run records while the block runs."""
    followers = [_Follower(name, run) for name in run.config.log.track]

    def look(_: Record) -> None:
        for follower in followers:
            follower.look()

    patience_s = 5.0  # of somebody who interrupts
    try:
        with following(run.path / "metrics.jsonl", look) if followers else contextlib.nullcontext():
            yield
        patience_s = _PATIENCE_S
    finally:
        _end(followers, patience_s)


def catch_up(run: Run) -> None:
    """Tells the trackers of `log.track` what they lack, the test metrics too."""
    _end([_Follower(name, run) for name in run.config.log.track], _PATIENCE_S)


def _end(followers: list[_Follower], patience_s: float) -> None:
    for follower in followers:
        follower.end()
    for follower in followers:
        follower.join(patience_s)


class _Follower:
    """One tracker in a thread of its own, which may wait for a server as long as it likes."""

    def __init__(self, name: str, run: Run) -> None:
        self.name, self.run = name, run
        self._told = (0, _STEP)
        self._tracker: trackers.Tracker | None = None
        self._warned, self._ended, self._retry_at = False, False, 0.0
        self._wake = threading.Event()
        self._wake.set()  # a run that is resumed may have more to tell than was told
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def look(self) -> None:
        """There may be something new."""
        self._wake.set()

    def end(self) -> None:
        """Nothing new will come."""
        self._ended = True
        self._wake.set()

    def join(self, patience_s: float) -> None:
        """Waits until everything was told, but not for ever."""
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._warn(f"no answer within {patience_s:.0f} s")

    def _work(self) -> None:
        with _one_at_a_time(self.run, self.name):
            self._told = _read_told(self.run).get(self.name, self._told)
            self._follow()

    def _follow(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            ended = self._ended
            try:
                if ended or time.monotonic() >= self._retry_at:
                    self._tell()
                if ended and self._tracker is not None:
                    self._tracker.close(self.run.result() is not None)
            except (
                Exception
            ) as error:  # whatever a tracker raises: the training does not end for it
                self._tracker, self._retry_at = None, time.monotonic() + _RETRY_S
                self._warn(f"{type(error).__name__}: {error}")
            if ended:
                return

    def _tell(self) -> None:
        before = self._told
        try:
            for at, record in _records(self.run):
                if at <= self._told:  # a run that lost a worker repeats steps
                    continue
                if self._tracker is None:
                    self._tracker = trackers.connect(self.name, self.run, self._told[0])
                step, kind = at
                values, order = _values(record, _KINDS[kind]), len(_KINDS) * step + kind
                self._tracker.tell(values, step, order, record.get("time", time.time()))
                self._told = at
        finally:
            if self._told != before:
                _write_told(self.run, self.name, self._told)

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            what = " ".join(mask(what).split())[:300]
            logger.warning(
                "%s cannot be told about the run (%s); the training goes on without it",
                self.name,
                what,
            )


def _records(run: Run) -> Iterator[tuple[tuple[int, int], Record]]:
    """All there is to tell, each with its step and kind, in an order that does not change."""
    for record in read_records(run.path / "metrics.jsonl"):
        yield (record["step"], _STEP if "loss" in record else _VALIDATION), record
    result, metrics = run.result(), run.path / "metrics.json"
    if result is not None and metrics.is_file():
        yield (result["steps"], _TEST), json.loads(metrics.read_text(encoding="utf-8"))


def _values(record: Record, kind: str) -> dict[str, float]:
    """The numbers of a record, as "train/loss", "validation/P@1", "test/P@1"."""
    numbers = {
        k: v for k, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool)
    }
    return {
        f"{kind}/{name}": float(value) for name, value in numbers.items() if name not in _NO_VALUES
    }


_FILE = threading.Lock()  # several followers write told.json
_BUSY: defaultdict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)


def _one_at_a_time(run: Run, name: str) -> threading.Lock:
    """Held while a tracker is told about a run: one that was too slow to be waited for may still be at it."""
    return _BUSY[run.id, name]


def _read_told(run: Run) -> dict[str, tuple[int, int]]:
    path = trackers.folder_of(run) / "told.json"
    try:
        body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {name: (int(step), int(kind)) for name, (step, kind) in body.items()}
    except (FileNotFoundError, ValueError):
        return {}


def _write_told(run: Run, name: str, at: tuple[int, int]) -> None:
    folder = trackers.folder_of(run)
    with _FILE:
        folder.mkdir(exist_ok=True)
        told = {**_read_told(run), name: at}
        storage.write_json(
            folder / "told.json", {tracker: list(values) for tracker, values in told.items()}
        )
