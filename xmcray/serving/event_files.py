"""The files of an event log: databases that follow each other (log_database.py).

    STATE_DIR/MODEL/events/BEGIN-SECONDS.sqlite   the events after number BEGIN; SECONDS: the Unix
                                                  time at which the file was begun

The newest file is written. The oldest ones are removed, so the numbers that are left have no gap.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xmcray.errors import StorageError
from xmcray.serving.log_database import LogReader, create_database
from xmcray.serving.log_lines import Line, first_line
from xmcray.storage.artifact import is_locked

READ_BYTES = 4 << 20  # lines that are read at once
_NAME = re.compile(r"([0-9]{12})-([0-9]{10,})\.sqlite")


@dataclass(frozen=True, slots=True, order=True)
class EventFile:
    """One file of an event log.

    Attributes:
        begin: number of the event before its first one.
        at: Unix time at which it was begun, seconds.
        path: the database.
    """

    begin: int
    at: int
    path: Path

    @property
    def num_bytes(self) -> int:
        """Size, with the write-ahead log."""
        total = 0
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def remove(self) -> None:
        """Removes the database, and what SQLite keeps next to it."""
        for path in self._paths():
            path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        # The database comes last: without it the others would stay for ever.
        return [Path(f"{self.path}{ending}") for ending in ("-wal", "-shm", "")]


def event_files(folder: Path) -> list[EventFile]:
    """The files of an event log, oldest first."""
    files = []
    for path in folder.glob("*.sqlite"):
        match = _NAME.fullmatch(path.name)
        if match:
            files.append(EventFile(int(match[1]), int(match[2]), path))
    return sorted(files)


def new_event_file(folder: Path, model: str, begin: int, at: float) -> EventFile:
    """Begins a file.

    Args:
        folder: of the log.
        model: name of the model.
        begin: number of the last event so far.
        at: Unix time, seconds.
    """
    seconds = int(at)
    file = EventFile(begin, seconds, folder / f"{begin:012}-{seconds:010}.sqlite")
    # A file that no event was written to may have the same name.
    if not file.path.exists():
        create_database(file.path, [first_line(model, begin)])
    return file


def read_lines(folder: Path, model: str) -> Iterator[Line]:
    """All lines of an event log with events, in order; a server may be writing it.

    Args:
        folder: of the log.
        model: name of the model.
    Raises:
        StorageError: there is no log, or a file is damaged, missing, or of another model.
    """
    files = event_files(folder)
    if not files:
        raise StorageError(
            f"{folder} has no event log, expected the files of a server with --collect-events"
        )
    has_writer = is_locked(folder)
    last = files[0].begin
    for file in files:
        if file.begin != last:
            raise StorageError(
                f"{file.path} begins after event {file.begin}, expected {last}: a file is missing;"
                " restore it, or move all older files away"
            )
        for line in file_lines(file, model, has_writer):
            last = line.last
            yield line


def file_lines(file: EventFile, model: str, has_writer: bool) -> Iterator[Line]:
    """The lines of one file with events; see `read_lines`."""
    try:
        reader = LogReader(file.path, model, has_writer=has_writer)
    except FileNotFoundError:
        raise StorageError(f"{file.path} was just removed, as it is too old; try again") from None
    with contextlib.closing(reader):
        number = reader.begin
        while lines := reader.lines_after(number, READ_BYTES):
            yield from lines
            number = lines[-1].last
