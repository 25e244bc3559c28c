"""metrics.jsonl of a run: rank 0 appends to it; progress bars, trackers and sweeps follow it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xmcray.storage.path_errors import disk_errors
from xmcray.storage.whole_files import open_without_waiting, write_text

Record = dict[str, Any]
_POLL_S = 0.3
_MAX_STEP = 1 << 53  # larger whole numbers are no exact floats


class Records:
    """The file as rank 0 writes it: appended to, and cut back to the checkpoint on resume.

    Args:
        path: Path of metrics.jsonl.
        on_record: Called with each record after it was written.
    """

    def __init__(self, path: Path, on_record: Callable[[Record], None] | None = None) -> None:
        self.path = path
        self.on_record = on_record

    def add(self, record: Mapping[str, Any]) -> None:
        """Appends one record, with the time (seconds since 1970).

        Raises:
            StorageError: the disk is full or the file cannot be written.
        """
        timed = {**record, "time": round(time.time(), 3)}
        with (
            disk_errors(self.path),
            open(self.path, "a", encoding="utf-8", opener=open_without_waiting) as file,
        ):
            file.write(json.dumps(timed) + "\n")
        if self.on_record:
            self.on_record(timed)

    def truncate(self, step: int) -> None:
        """Removes the records after `step`.

        Raises:
            StorageError: the disk is full; the file is as it was.
        """
        if not self.path.is_file():
            return
        kept = [record for record in read_records(self.path) if record["step"] <= step]
        lines = [json.dumps(record) + "\n" for record in kept]
        write_text(self.path, "".join(lines))


def read_records(path: Path) -> list[Record]:
    """The records of a metrics.jsonl; a last line cut by a kill is left out."""
    return _parsed(path.read_bytes()) if path.is_file() else []


def _parsed(content: bytes) -> list[Record]:
    """The records of some lines, up to one that is damaged."""
    records = []
    for line in content.decode("utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        # Something else than a record of a step is damage, as a cut line is.
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(step, int) or not 0 <= step <= _MAX_STEP:
            break
        records.append(record)
    return records


@contextlib.contextmanager
def following(path: Path, on_record: Callable[[Record], None]) -> Iterator[None]:
    """Calls `on_record`, in a thread, for each record that is written while the block runs.

    Records of the block's last moment are included. What the file holds when the block begins is
    skipped, also where a resumed run repeats it. If workers are lost within the block, the records
    that training repeats from its checkpoint come again.

    Args:
        path: Path of metrics.jsonl; it need not exist yet.
        on_record: Called with each new record.
    """
    old = read_records(path)
    last_old_place = _place(old[-1]) if old else (0, False)

    def forward(record: Record) -> None:
        if _place(record) > last_old_place:
            on_record(record)

    with tailing(path, forward, num_seen=0):
        yield


def _place(record: Record) -> tuple[int, bool]:
    """Step and kind: at one step, the validation follows the record of training, which has a loss.

    A run that was killed between the two still owes the validation.
    """
    return int(record["step"]), "loss" not in record


@contextlib.contextmanager
def tailing(
    path: Path,
    on_record: Callable[[Record], None],
    num_seen: int | None = None,
) -> Iterator[None]:
    """Calls `on_record`, in a thread, for each record that is added while the block runs.

    Args:
        path: Path of a file of records; it need not exist yet.
        on_record: Called with each new record.
        num_seen: Records at the start of the file to skip; all that are there if not given.
    """
    if num_seen is None:
        num_seen = len(read_records(path))
    stop = threading.Event()
    thread = threading.Thread(target=_tail, args=(path, on_record, num_seen, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=5)


def _tail(
    path: Path,
    on_record: Callable[[Record], None],
    num_seen: int,
    stop: threading.Event,
) -> None:
    """Calls `on_record` for each record after the first ones, until `stop`, and then once more."""
    position = 0  # bytes that were read
    num_read = 0  # records in them
    inode = None
    stopped = False
    while not stopped:
        # Read after the last wait: what was written before `stop` is not missed.
        stopped = stop.wait(_POLL_S)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            continue
        with file:
            # A resumed run cuts the file back, by putting another one in its place.
            if os.fstat(file.fileno()).st_ino != inode:
                inode = os.fstat(file.fileno()).st_ino
                position = 0
                num_read = 0
            # Long runs have millions of records, so only new ones are read.
            file.seek(position)
            content = file.read()
        lines = content[: content.rfind(b"\n") + 1]
        records = _parsed(lines)
        # What is left of a file that was cut back has been seen.
        for record in records[max(0, num_seen - num_read) :]:
            on_record(record)
        position += len(lines)
        num_read += len(records)
        num_seen = num_read
