"""metrics.jsonl of a run: rank 0 appends to it; a progress bar, a tracker or a sweep follows it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xmcray import storage

Record = dict[str, Any]


class Records:
    """The file as rank 0 writes it: appended to, and cut back to the checkpoint on resume.

    Args:
        path: of metrics.jsonl. on_record: is told each record after it was written.
    """

    def __init__(self, path: Path, on_record: Callable[[Record], None] | None = None) -> None:
        self.path, self.on_record = path, on_record

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
        """Drops what was recorded after `step`."""
        if self.path.is_file():
            kept = [record for record in read_records(self.path) if record["step"] <= step]
            aside = self.path.with_name(f".metrics.{os.getpid()}")
            aside.write_text(
                "".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8"
            )
            aside.replace(self.path)


def read_records(path: Path) -> list[Record]:
    """The records of a metrics.jsonl; a last line cut by a kill is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


@contextlib.contextmanager
def following(path: Path, on_record: Callable[[Record], None]) -> Iterator[None]:
    """Calls `on_record`, in a thread, for each record that comes while the block runs, those of its last moment too.

    Args:
        path: of metrics.jsonl; need not exist yet. What it holds when the block begins was told before and is skipped,
            also where a resumed run repeats it.
    """
    old = read_records(path)
    first = int(old[-1]["step"]) if old else 0
    stop = threading.Event()

    def show(record: Record) -> None:
        if record["step"] > first:
            on_record(record)

    thread = threading.Thread(target=_tail, args=(path, show, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=5)


def _tail(path: Path, on_record: Callable[[Record], None], stop: threading.Event) -> None:
    """Calls `on_record` for each record of a metrics.jsonl, old and new, until `stop`; at its end once more."""
    seen, size = 0, -1
    while True:
        ended = stop.wait(0.3)
        if size == (size := path.stat().st_size if path.exists() else -1) and not ended:
            continue
        records = read_records(path)
        for record in records[min(seen, len(records)) :]:
            on_record(record)
        seen = len(records)
        if ended:
            return
