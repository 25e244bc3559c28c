"""metrics.jsonl of a run: rank 0 appends to it; progress bars, trackers and sweeps follow it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xmcray import storage

Record = dict[str, Any]
_POLL_S = 0.3


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
        with storage.disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
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
        storage.write_text(self.path, "".join(lines))


def read_records(path: Path) -> list[Record]:
    """The records of a metrics.jsonl; a last line cut by a kill is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        # Something else than a record of a step is damage, as a cut line is.
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            break
        records.append(record)
    return records


@contextlib.contextmanager
def following(path: Path, on_record: Callable[[Record], None]) -> Iterator[None]:
    """Calls `on_record`, in a thread, for each record that is written while the block runs.

    Records of the block's last moment are included. What the file holds when the block begins is
    skipped, also where a resumed run repeats it.

    Args:
        path: Path of metrics.jsonl; it need not exist yet.
        on_record: Called with each new record.
    """
    old = read_records(path)
    last_old_step = int(old[-1]["step"]) if old else 0

    def forward(record: Record) -> None:
        if record["step"] > last_old_step:
            on_record(record)

    with tailing(path, forward, num_seen=0):
        yield


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
    last_size = -1
    stopped = False
    while not stopped:
        # Read after the last wait: what was written before `stop` is not missed.
        stopped = stop.wait(_POLL_S)
        size = path.stat().st_size if path.exists() else -1
        if size == last_size and not stopped:
            continue
        last_size = size
        records = read_records(path)
        # A resumed run cuts the file back; what it then repeats has been seen.
        for record in records[num_seen:]:
            on_record(record)
        num_seen = len(records)
