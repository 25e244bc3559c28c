"""Sends what a run records to its trackers. The driver does it; loop and workers are not involved.

RUN/trackers/positions.json holds step and kind of the last record that each tracker got, so that a later
process sends what is missing, and nothing twice.

A tracker that fails causes a warning. It is tried again from time to time, and when the run is
resumed or measured.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from xmcray.credentials import mask
from xmcray.storage.whole_files import write_json
from xmcray.training import trackers
from xmcray.training.records import Record, following, read_records
from xmcray.training.run import Run

logger = logging.getLogger(__name__)

_RETRY_S = 60.0
_FINISH_S = 30.0  # how long the end of a training waits for trackers
_INTERRUPTED_S = 5.0  # how long an interrupted one does
_NO_METRICS = ("step", "last_step", "epoch", "time", "queries", "left_out", "A", "B")


class Kind(enum.IntEnum):
    """What a record is about. At one step records come in this order."""

    TRAIN = 0
    VALIDATION = 1
    TEST = 2


class Position(NamedTuple):
    """Place of a record in the order in which trackers get them."""

    step: int
    kind: Kind


_START = Position(0, Kind.TRAIN)


@contextlib.contextmanager
def tracked(run: Run) -> Iterator[None]:
    """Sends to the trackers of `log.track` what the run records while the block runs."""
    senders = [_Sender(name, run) for name in run.config.log.track]

    def notify(_: Record) -> None:
        for sender in senders:
            sender.notify()

    wait_s = _INTERRUPTED_S
    records = following(run.path / "metrics.jsonl", notify) if senders else contextlib.nullcontext()
    try:
        with records:
            yield
        wait_s = _FINISH_S
    finally:
        _finish(senders, wait_s)


def catch_up(run: Run) -> None:
    """Sends to the trackers of a run what they lack, including the test metrics."""
    # run.json keeps the first settings. A tracker may have been added when the run was resumed.
    names = dict.fromkeys([*run.config.log.track, *_read_positions(run)])
    _finish([_Sender(name, run) for name in names], _FINISH_S)


def _finish(senders: list[_Sender], wait_s: float) -> None:
    # All are asked to end before the first is waited for, so that they finish at the same time.
    for sender in senders:
        sender.end()
    for sender in senders:
        sender.join(wait_s)


class _Sender:
    """Sends to one tracker in a thread of its own, which may wait for a server as long as it
    likes.
    """

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self.run = run
        self._sent = _START
        self._tracker: trackers.Tracker | None = None
        self._retry_at = 0.0
        self._has_warned = False
        self._ended = False
        self._wake = threading.Event()
        self._wake.set()  # a resumed run may have records that were never sent
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Makes the thread look for new records."""
        self._wake.set()

    def end(self) -> None:
        """Makes the thread end once it has sent all records."""
        self._ended = True
        self._wake.set()

    def join(self, wait_s: float) -> None:
        """Waits for the end of the thread, but not for ever."""
        self._thread.join(wait_s)
        if self._thread.is_alive():
            self._warn(f"no answer within {wait_s:.0f} s")

    def _run(self) -> None:
        with _BUSY[self.run.id, self.name]:
            self._sent = _read_positions(self.run).get(self.name, _START)
            ended = False
            while not ended:
                self._wake.wait()
                self._wake.clear()
                ended = self._ended  # read first: what comes with the end is sent below
                try:
                    self._update(ended)
                # Any kind: a tracker's failure must not end the training.
                except Exception as error:
                    self._tracker = None
                    self._retry_at = time.monotonic() + _RETRY_S
                    self._warn(f"{type(error).__name__}: {error}")

    def _update(self, ended: bool) -> None:
        if ended or time.monotonic() >= self._retry_at:
            self._send()
        if ended and self._tracker is not None:
            self._tracker.close(finished=self.run.result() is not None)

    def _send(self) -> None:
        before = self._sent
        try:
            for position, record in _records(self.run):
                if position <= self._sent:  # a run that lost a worker repeats steps
                    continue
                if self._tracker is None:
                    self._tracker = trackers.connect(self.name, self.run, self._sent.step)
                metrics = _metrics(record, position.kind)
                # Grows with every record: by step, and within a step by kind.
                order = len(Kind) * position.step + position.kind
                recorded_at = record.get("time", time.time())
                self._tracker.log(metrics, position.step, order, recorded_at)
                self._sent = position
        finally:
            # Also after a failure, so that the next attempt repeats nothing.
            if self._sent != before:
                _write_position(self.run, self.name, self._sent)

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            one_line = " ".join(mask(reason).split())[:300]
            logger.warning(
                "%s gets no records of the run (%s); the training goes on without it",
                self.name,
                one_line,
            )


def _records(run: Run) -> Iterator[tuple[Position, Record]]:
    """Yields all records that a tracker should have, in an order that never changes."""
    for record in read_records(run.path / "metrics.jsonl"):
        kind = Kind.TRAIN if "loss" in record else Kind.VALIDATION
        yield Position(record["step"], kind), record
    result = run.result()
    test_metrics = run.path / "metrics.json"
    if result is not None and test_metrics.is_file():
        position = Position(result["steps"], Kind.TEST)
        yield position, json.loads(test_metrics.read_text(encoding="utf-8"))


def _metrics(record: Record, kind: Kind) -> dict[str, float]:
    """Returns the metrics of a record under names such as "train/loss" and "validation/P@1"."""
    metrics = {}
    for name, value in record.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name not in _NO_METRICS:
            metrics[f"{kind.name.lower()}/{name}"] = float(value)
    return metrics


_FILE = threading.Lock()  # several senders write positions.json
# By run and tracker. A sender that was too slow for its training may still run when the next one
# starts.
_BUSY: defaultdict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)


def _read_positions(run: Run) -> dict[str, Position]:
    path = trackers.folder_of(run) / "positions.json"
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        positions = {}
        for name, (step, kind) in body.items():
            positions[name] = Position(int(step), Kind(kind))
        return positions
    # Without the file a tracker gets all records once more, which is better than no training.
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}


def _write_position(run: Run, name: str, position: Position) -> None:
    folder = trackers.folder_of(run)
    # Read and write under one lock, or a sender could overwrite the position of another one.
    with _FILE:
        folder.mkdir(exist_ok=True)
        positions = _read_positions(run)
        positions[name] = position
        write_json(folder / "positions.json", positions)
