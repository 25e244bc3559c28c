"""The durable log of label operations. One process writes it; an acknowledged operation is never
lost.

    STATE_DIR/label_log.sqlite  the operations, and label_log.sqlite-wal (log_database.py)
    URL/label_log/              a second copy, some seconds behind (log_segments.py)

Operations of a model are numbered 1, 2, 3 ... without end, whatever bundle they are applied to. A
batch of operations is durable as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from xmcray.errors import StorageError
from xmcray.serving.log_database import LogDatabase, LogReader, create_database
from xmcray.serving.log_lines import Line, encode_line, first_line
from xmcray.serving.log_place import BEGINNING, Commit, LogPlace
from xmcray.serving.log_segments import SegmentStore
from xmcray.serving.log_upload import Uploader
from xmcray.serving.schema import Operation
from xmcray.storage.artifact import exclusive, is_locked
from xmcray.storage.path_errors import disk_errors
from xmcray.storage.whole_files import make_folder

DATABASE = "label_log.sqlite"
READ_BYTES = 4 << 20  # that `commits_after` reads at once


def removed_labels(state_dir: Path, model: str) -> set[str]:
    """Uids of the labels that a label log removed last; a server may be writing it.

    Args:
        state_dir: folder of the log; nothing is removed if there is none.
        model: name of the model.
    Raises:
        StorageError: the log is damaged.
    """
    path = state_dir / DATABASE
    removed: set[str] = set()
    if not path.exists():
        return removed
    has_writer = is_locked(state_dir)
    with contextlib.closing(LogReader(path, model, has_writer=has_writer)) as reader:
        for line in reader.lines_after(reader.begin):
            for operation in line.operations:
                change = removed.add if operation["op"] == "delete" else removed.discard
                change(operation["uid"])
    return removed


class LabelLog:
    """The log of one model, open for writing. All methods may be called by any thread.

    Attributes:
        model: name of the model.
        uploader: keeps the copy; None without a URL.
    """

    def __init__(
        self,
        state_dir: str | Path,
        model: str,
        *,
        start_after: LogPlace = BEGINNING,
        upload_url: str | None = None,
        upload_every_s: float = 5.0,
    ) -> None:
        """Opens the log, or begins one.

        A folder without a log takes the copy at the URL, if there is one.

        Args:
            state_dir: local folder of this log alone; locked until `close`.
            model: name of the model.
            start_after: the place that the bundle records (`place_in`); a new log begins there.
            upload_url: folder or fsspec URL of the copy; no copy if None.
            upload_every_s: seconds between uploads.
        Raises:
            StorageError: another process writes this log; it is damaged, of another model, or older
                than the bundle or the copy; the disk is full; a copy is needed and cannot be read.
        """
        self.model = model
        self.uploader: Uploader | None = None
        self._state = Path(state_dir)
        self._newest: LogPlace | None = None  # after the last append of this process
        self._writing = threading.Lock()
        with contextlib.ExitStack() as stack, disk_errors(self._state):
            make_folder(self._state)
            try:
                # The system ends this lock when the process dies.
                stack.enter_context(exclusive(self._state))
            except StorageError:
                raise StorageError(
                    f"{self._state} is in use by another server, expected one server for each state"
                    " folder; stop that server or choose another --state-dir"
                ) from None
            copy = SegmentStore(upload_url) if upload_url else None
            self._create_if_missing(start_after, copy)
            self._database = LogDatabase(self._state / DATABASE, model)
            stack.callback(self._database.close)
            self.resume_place(start_after)  # refuses a bundle that is ahead of the log
            if copy:
                uploader = Uploader(self._database, copy, upload_every_s)
                self._database.check_writable()  # the uploader may have found another log's copy
                uploader.start()
                self.uploader = uploader
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def last(self) -> int:
        """Number of the last operation; that before the first one if there is none."""
        return self._database.last

    def close(self) -> None:
        """Uploads the rest, if that takes no longer than some seconds, and lets others open the
        log.
        """
        if self.uploader:
            self.uploader.close()
        with self._writing:
            self._stack.close()

    def append(self, operations: Sequence[Operation]) -> int:
        """Makes a batch durable, all of it or nothing.

        Args:
            operations: at least one; checked before (`check_operations`).
        Returns:
            Number of the last operation.
        Raises:
            StorageError: the disk is full or fails; nothing was written, or all later appends are
                refused.
        """
        with self._writing:
            now = round(time.time(), 3)
            line = encode_line(self.model, self.last + 1, now, operations)
            self._database.append(line)
            self._newest = self._place_after(line)
        return line.last

    def commits_after(self, number: int, max_bytes: int = READ_BYTES) -> list[Commit]:
        """The next operations after `number`; all of them are durable.

        Args:
            number: number of an operation.
            max_bytes: no more than so much, except for the first batch; a batch is never torn.
        Raises:
            StorageError: there is no such number yet, or no longer; or the log is damaged.
        """
        if number > self.last:
            raise StorageError(
                f"the label log of model {self.model!r} ends with operation {self.last}, not yet {number}"
            )
        if number < self._database.begin:
            raise StorageError(
                f"operations {number + 1} to {self._database.begin} of model {self.model!r} are not in"
                f" {self._database.path}, which began later; use a bundle that holds them"
            )
        lines = self._database.lines_after(number, max_bytes)
        return [Commit(line.after(number), self._place_after(line)) for line in lines]

    def place(self, number: int) -> LogPlace:
        """The place after the commit that ends with an operation, or before the first one."""
        # Known without reading: nothing may fail between an append and its use.
        newest = self._newest
        if newest is not None and number == newest.number:
            return newest
        line = self._database.line_ending_with(number)
        if line is None:
            return LogPlace(number, log=self._database.first_line.log)
        return self._place_after(line)

    def _place_after(self, line: Line) -> LogPlace:
        return LogPlace(line.last, line.digest.decode(), self._database.first_line.log)

    def holds(self, place: LogPlace) -> bool:
        """Whether this log has just the operations that lead to a place of a replica."""
        return place == self.place(place.number)

    def resume_place(self, held: LogPlace) -> LogPlace:
        """This log's place after the operations that a bundle holds already.

        Args:
            held: the place that the bundle records (`place_in`); what it does not know matches
                anything.
        Returns:
            The place with the bundle's number. Or the place before all operations, if the bundle
            holds operations of another log, or some whose numbers this log has given to others since
            it was restored. An operation sets its label whatever the bundle says of it, so all of
            them can be applied. From there `commits_after` raises StorageError if the log began
            later.
        Raises:
            StorageError: the bundle's number is beyond the end of this log, which is then an old
                copy.
        """
        start = self._database.first_line
        # This log was begun after this bundle, whose operations are of an earlier log. So this comes
        # before the logs are compared.
        begins_here = held.number == start.last and held.commit in ("", start.base)
        if begins_here:
            return self.place(held.number)
        if held.log and start.log and held.log != start.log:
            return self.place(0)
        if held.number > self.last:
            raise StorageError(
                f"{self._state} ends with operation {self.last}, the bundle holds {held.number} of model"
                f" {self.model!r}: an old copy, or the log of another one; restore the newest"
            )
        place = self.place(held.number)
        if place.commit and held.commit in ("", place.commit):
            return place
        # No commit of this log ends there, or another one does.
        return self.place(0)

    def copy_lag_s(self) -> float:
        """Seconds by which the copy is behind; 0 for a log without a copy."""
        return self.uploader.lag_s() if self.uploader else 0.0

    def _create_if_missing(self, start_after: LogPlace, copy: SegmentStore | None) -> None:
        """Makes the database from the copy; or an empty one if there is none."""
        path = self._state / DATABASE
        # Left by a process that was killed here.
        for unfinished in self._state.glob(f".{DATABASE}.*"):
            unfinished.unlink()
        if path.exists():
            return
        if Path(f"{path}-wal").exists():
            raise StorageError(f"{path} is missing; restore it, or move {self._state} away")
        if any(self._state.glob("label_log/*.log")):
            raise StorageError(
                f"{self._state} has the label log of an earlier version; compact it into a bundle with"
                " that version, or move it away and start from the copy at its upload URL"
            )
        identity = secrets.token_hex(8)
        start = first_line(self.model, start_after.number, identity, start_after.commit)
        lines: Iterable[Line] = [start]
        segments = copy.segments() if copy else []
        if copy and segments:
            lines = copy.lines(self.model, segments)
        create_database(path, lines)
