"""The durable log of live labels, which one process writes: an operation that was acknowledged is never lost.

    STATE_DIR/label_log/NNNNNNNNNNNN.log          lines (log_lines.py); the name is the first operation's number
    STATE_DIR/label_log/archive/NNNNNNNNNNNN.log  operations that a compacted bundle holds; for another bundle
    URL/label_log/...                             a second copy, behind by some seconds (log_copy.py)

Operations of a model are numbered 1, 2, 3 ... for ever, whatever bundle they are applied to (`fold`). One line is one
commit: the batches of all threads that waited for the disk together; so it is all of a batch or nothing.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from types import TracebackType

from xmcray import storage
from xmcray.errors import StorageError
from xmcray.serving.log_copy import ARCHIVE, FOLDER, LogCopy, Segment
from xmcray.serving.log_lines import (
    DELETED,
    Deleted,
    Label,
    Line,
    State,
    check_operations,
    decode,
    encode,
    fold,
    number_in,
    scan,
)
from xmcray.serving.schema import Operation

__all__ = [
    "DELETED", "Deleted", "Label", "LabelLog", "Lag", "State", "check_operations", "fold", "number_in",
]  # fmt: skip

_NAME = re.compile(r"[0-9]{12,}")
_LONGEST_WAIT_S = 60.0
_CLOSING_S = 10.0  # for the last upload


@dataclass(frozen=True, slots=True)
class Lag:
    """How far the copy is behind: in operations, in seconds since the oldest of them, and why ("" if it goes well)."""

    operations: int = 0
    seconds: float = 0.0
    problem: str = ""


@dataclass(slots=True)
class _Waiting:
    """A batch that is on its way to the disk; `last` is its last number once it is there."""

    operations: Sequence[Operation]
    last: int = 0
    failure: str = ""


class LabelLog:
    """The log of one model, open for writing. Everything may be called by any thread.

    Attributes:
        model: name of the model.
        begin: operations up to this number are archived.
        last: number of the last operation, `begin` if there is none.
    """

    def __init__(
        self,
        state_dir: str | Path,
        model: str,
        *,
        start_after: int = 0,
        upload_url: str | None = None,
        upload_every_s: float = 5.0,
        segment_bytes: int = 8 << 20,
    ) -> None:
        """Opens the log, or begins one. A folder without a log takes the copy at the URL, if there is one.

        Args:
            state_dir: local folder of this log alone; locked until `close`.
            start_after: number of the last operation that the bundle holds (`number_in`).
            upload_url: folder or fsspec URL of the copy; none if not given.
            upload_every_s: what is not uploaded yet waits no longer, as far as it is for this process.
            segment_bytes: a file of more is closed, and uploaded at once.
        Raises:
            StorageError: another process writes this log; it is damaged (naming file and byte), of another model, or
                older than the bundle or the copy; the disk is full; a copy is needed and cannot be read.
        """
        self.model, self.begin, self.last = model, start_after, start_after
        self._every_s, self._segment_bytes = upload_every_s, segment_bytes
        self._state = Path(state_dir)
        self._folder = self._state / FOLDER
        self._lines: list[Line] = []  # grows, or is replaced, so that readers need no lock
        self._queue: deque[_Waiting] = deque()
        self._writing, self._uploading, self._archiving = threading.Lock(), threading.Lock(), threading.Lock()
        self._file, self._path, self._size, self._broken = -1, self._folder, 0, ""
        self._uploaded: int | None = None  # None: what the copy holds is not known yet
        self._archived, self._problem = 0, ""
        self._wake, self._closing = threading.Event(), threading.Event()
        self._uploader: threading.Thread | None = None
        with contextlib.ExitStack() as stack, storage.disk_errors(self._state):
            new = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
            self._state.mkdir(parents=True, exist_ok=True)
            stack.enter_context(storage.exclusive(self._state))
            self._copy = LogCopy(upload_url) if upload_url else None
            for unfinished in self._state.glob(f".{FOLDER}.*"):
                shutil.rmtree(unfinished)
            if not self._files():
                if self._folder.is_dir() and any(self._folder.iterdir()):
                    raise StorageError(f"{self._folder} has files but no log; restore it, or move it away")
                if self._copy:
                    self._fetch(self._copy)
            self._recover(start_after)
            for path in new:
                storage.fsync(path.parent)
            stack.callback(self._close_file)
            if self._copy:
                self._try_upload(only_compare=True)
                if self._broken:
                    raise StorageError(self._broken)
                self._uploader = threading.Thread(target=self._keep_uploading, name=f"label-log-{model}", daemon=True)
                self._uploader.start()
            self._stack = stack.pop_all()

    def __enter__(self) -> LabelLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Uploads what is left, if that takes no longer than some seconds, and lets others open the log."""
        self._closing.set()
        self._wake.set()
        if self._uploader:
            self._uploader.join(_CLOSING_S)
        with self._writing:
            self._broken = self._broken or f"the log in {self._folder} is closed; open it again"
            self._stack.close()

    def append(self, operations: Sequence[Operation]) -> int:
        """Makes a batch durable, all of it or nothing, and returns the number of its last operation.

        The operations were checked (`check_operations`); batches of several threads share one write.

        Raises:
            StorageError: the disk is full or fails; nothing was written, or nobody may write any more.
        """
        if not operations:
            return self.last
        waiting = _Waiting(list(operations))
        self._queue.append(waiting)
        with self._writing:  # whoever gets it first writes for all who wait
            if not (waiting.last or waiting.failure):
                self._commit([self._queue.popleft() for _ in range(len(self._queue))])
        if waiting.failure:
            raise StorageError(waiting.failure)
        return waiting.last

    def since(self, number: int, limit: int | None = None) -> list[tuple[int, Operation]]:
        """Operations after `number`, with their numbers; all of them are durable.

        Args:
            limit: no more than so many if possible; a batch is never torn.
        Raises:
            StorageError: there is no such number yet, a file is damaged, or some of them are archived and not here.
        """
        while True:
            lines, begin, last = self._lines, self.begin, self.last
            if number > last:
                raise StorageError(
                    f"the label log of model {self.model!r} ends with operation {last}, not yet {number}"
                )
            try:
                known = lines if number >= begin else [*self._archived_lines(number, begin), *lines]
                chosen = known[_index(known, number) :]
                if limit is not None:
                    enough = number + max(limit, 1)
                    chosen = [line for i, line in enumerate(chosen) if i == 0 or line.last <= enough]
                found = (operation for line, data in self._read(chosen) for operation in decode(data, line))
                return [operation for operation in found if operation[0] > number]
            except FileNotFoundError as error:
                if self._lines is lines:  # if not, it was archived meanwhile
                    raise StorageError(f"{error.filename} is missing; restore the file") from None

    def trim(self, up_to: int) -> int:
        """Archives whole files of operations up to `up_to`, which the bundle in use holds; returns the new `begin`.

        Operations that have yet to be uploaded stay.
        """
        with self._writing:
            self._check_broken()
            limit = min(up_to, self.last if self._copy is None else self._uploaded or 0)
            if self._size and limit == self.last:
                self._rotate()
            files = self._files()
            done = [file for file, after in pairwise(files) if int(after.stem) <= limit + 1]
            if not done:
                return self.begin
            with storage.disk_errors(self._folder), self._archiving:
                (self._folder / ARCHIVE).mkdir(exist_ok=True)
                begin = int(files[len(done)].stem) - 1
                self.begin = begin  # first: a reader that sees the shorter list must see this too
                self._lines = self._lines[_index(self._lines, begin) :]
                for file in done:  # the oldest first: what a crash leaves has no gap
                    file.rename(self._folder / ARCHIVE / file.name)
                storage.fsync(self._folder / ARCHIVE)
                storage.fsync(self._folder)
        self._wake.set()
        return begin

    def upload(self) -> int:
        """Uploads now, and before it returns, what the copy lacks; returns the last number that it has.

        Raises:
            StorageError: the URL cannot be used, or its log is another one.
        """
        if self._copy is None:
            raise StorageError(f"the log of model {self.model!r} has no URL to be uploaded to; give it one")
        with self._uploading:
            if self._uploaded is None:
                self._uploaded = self._compare(self._copy)
            while lines := self._not_uploaded(self._uploaded):
                data = b"".join(data for _, data in self._read(lines))
                self._copy.put(Segment.of(lines[0].first, lines[-1].last, data), data)
                self._uploaded = lines[-1].last
            if self.begin > self._archived:
                begin = self.begin
                self._copy.archive(begin)
                self._archived = begin
            return self._uploaded

    def lag(self) -> Lag:
        """How far the copy is behind; of a log without a copy, nothing."""
        if self._copy is None:
            return Lag()
        lines, uploaded = self._lines, self._uploaded or self.begin
        waiting = lines[_index(lines, uploaded) :]
        if not waiting:
            return Lag(problem=self._problem)
        return Lag(waiting[-1].last - uploaded, max(0.0, time.time() - waiting[0].at), self._problem)

    def _commit(self, batches: Sequence[_Waiting]) -> None:
        """Writes batches as one line and tells each of them how it went."""
        operations = [operation for waiting in batches for operation in waiting.operations]
        try:
            self._check_broken()
            if self._size >= self._segment_bytes:
                self._rotate()
                self._wake.set()
            first, at = self.last + 1, round(time.time(), 3)
            data = encode(self.model, first, at, operations)
            line = Line(str(self._path), self._size, len(data), first, self.last + len(operations), at)
            self._write(data)
        except BaseException as error:
            for waiting in batches:
                waiting.failure = " ".join(str(error).split()) or type(error).__name__
            if not isinstance(error, Exception):
                self._broken = f"a write to {self._path} was interrupted; restart the writer"
                raise
            return
        self._lines.append(line)
        self.last = line.last
        for waiting in batches:
            waiting.last = first + len(waiting.operations) - 1
            first = waiting.last + 1

    def _write(self, data: bytes) -> None:
        """Appends to the open file, and returns when it is on the disk; takes back what it wrote if that fails."""
        with storage.disk_errors(self._path):
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except BaseException:
                with self._breaking():
                    os.ftruncate(self._file, self._size)
                raise
            with self._breaking():  # after a failure nobody knows which pages are on the disk, and none is retried
                os.fsync(self._file)
            self._size += len(data)

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._broken = f"{self._path} could not be written ({error}); see to the disk and restart the writer"
            raise

    def _check_broken(self) -> None:
        if self._broken:
            raise StorageError(self._broken)

    def _rotate(self) -> None:
        """Begins a new file; the one before has reached the disk."""
        path = self._folder / f"{self.last + 1:012}.log"
        with storage.disk_errors(path):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            storage.fsync(self._folder)
        self._close_file()
        self._file, self._path, self._size = file, path, 0

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _files(self) -> list[Path]:
        """Files of operations that are not archived, in order."""
        return _in_order(self._folder)

    def _recover(self, start_after: int) -> None:
        """Reads every line and cuts off what an interrupted write left."""
        self._folder.mkdir(exist_ok=True)
        files = self._files()
        if files:
            self.begin = self.last = int(files[0].stem) - 1
        for path in files:
            if int(path.stem) != self.last + 1:
                raise StorageError(
                    f"{path} begins with operation {int(path.stem)}, expected {self.last + 1}: a file is missing;"
                    " restore it"
                )
            data = path.read_bytes()
            lines, self._size = scan(data, str(path), self.model, self.last + 1, unfinished=path == files[-1])
            self._lines += lines
            self.last = lines[-1].last if lines else self.last
        if self.last < start_after:
            raise StorageError(
                f"{self._folder} ends with operation {self.last}, the bundle holds {start_after} of model"
                f" {self.model!r}: an old copy, or the log of another one; restore the newest"
            )
        if not files:
            self._rotate()
            return
        self._path = files[-1]
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)  # a killed process may have written what it had no time to sync; now it counts
        storage.fsync(self._folder)

    def _archived_lines(self, number: int, begin: int) -> list[Line]:
        """Lines up to `begin` from the archive, with those after `number`."""
        with self._archiving:
            paths = [path for path in _in_order(self._folder / ARCHIVE) if int(path.stem) <= begin]
        earlier = sum(int(path.stem) <= number + 1 for path in paths)
        lines: list[Line] = []
        for path in paths[max(earlier - 1, 0) :]:
            lines += scan(path.read_bytes(), str(path), self.model, int(path.stem))[0]
        whole = bool(lines) and lines[0].first <= number + 1 and lines[-1].last == begin
        if not whole or any(before.last + 1 != line.first for before, line in pairwise(lines)):
            raise StorageError(
                f"operations {number + 1} to {begin} of model {self.model!r} are archived and not in"
                f" {self._folder / ARCHIVE}; use a bundle that holds them"
            )
        return lines

    def _read(self, lines: Sequence[Line]) -> Iterator[tuple[Line, bytes]]:
        """Lines with their bytes."""
        for source, group in groupby(lines, key=lambda line: line.source):
            with Path(source).open("rb") as file:
                for line in group:
                    file.seek(line.offset)
                    yield line, file.read(line.size)

    def _fetch(self, copy: LogCopy) -> None:
        """Makes the folder from the copy, whole or not at all; leaves it alone if there is no copy."""
        archived, segments = copy.segments()
        if not (archived or segments):
            return
        staged = storage.aside(self._folder)
        staged.mkdir()
        path, size = staged / f"{archived + 1:012}.log", 0
        path.touch()
        for line, data in copy.lines(self.model, archived, segments):
            if size >= self._segment_bytes:
                path, size = staged / f"{line.first:012}.log", 0
            with path.open("ab") as file:
                file.write(data)
            size += len(data)
        for path in [*staged.iterdir(), staged]:
            storage.fsync(path)
        storage.publish(staged, self._folder)

    def _compare(self, copy: LogCopy) -> int:
        """The last number of the copy, which must be one of this log.

        Raises:
            StorageError: it is not, and so nobody may write any more; or the URL cannot be read.
        """
        archived, segments = copy.segments()
        last = max([archived, *(segment.last for segment in segments)])
        newest = next((segment for segment in segments if segment.last == last), None)
        if last < self.begin:
            if last:
                raise StorageError(
                    f"{copy.url} ends with operation {last}, the log in {self._folder} begins after {self.begin};"
                    " choose an empty URL"
                )
            copy.begin_after(self.begin)
            last = self.begin
        differs = last > self.last
        if newest and newest.first > self.begin and not differs:
            lines = self._lines[_index(self._lines, newest.first - 1) : _index(self._lines, newest.last)]
            data = b"".join(data for _, data in self._read(lines))
            differs = Segment.of(newest.first, newest.last, data) != newest
        if differs:
            self._broken = (
                f"{copy.url} holds operations up to {last} that the log in {self._folder}, which ends with {self.last},"
                " lacks: an old copy of that folder, or the URL of another one; move it away to start from the URL"
            )
            raise StorageError(self._broken)
        return last

    def _not_uploaded(self, uploaded: int) -> list[Line]:
        """The next lines to upload together."""
        lines, size = list[Line](), 0
        for line in self._lines[_index(self._lines, uploaded) :]:
            if size >= self._segment_bytes:
                break
            lines.append(line)
            size += line.size
        return lines

    def _try_upload(self, only_compare: bool = False) -> bool:
        """Uploads, or only looks what the copy holds; whether that went well is in `lag` too."""
        try:
            if only_compare:
                assert self._copy is not None
                self._uploaded = self._compare(self._copy)
            else:
                self.upload()
        except Exception as error:  # whatever it is, appends go on
            self._problem = " ".join(str(error).split()) or type(error).__name__
            return False
        self._problem = ""
        return True

    def _keep_uploading(self) -> None:
        failures, wait_s, closing = 0, self._every_s, False
        while not closing:
            self._wake.wait(wait_s)
            self._wake.clear()
            closing = self._closing.is_set()  # asked before the upload, which is then the last
            failures = 0 if self._try_upload() else failures + 1
            wait_s = self._every_s
            if failures:  # apart from other writers that wait for the same server
                wait_s = min(_LONGEST_WAIT_S, self._every_s * 2**failures) * random.uniform(0.5, 1.0)


def _in_order(folder: Path) -> list[Path]:
    """Files of operations in a folder, by their first numbers."""
    found = [path for path in folder.glob("*.log") if _NAME.fullmatch(path.stem)]
    return sorted(found, key=lambda path: int(path.stem))


def _index(lines: Sequence[Line], number: int) -> int:
    """Of the first line with an operation after `number`."""
    return bisect_left(lines, number + 1, key=lambda line: line.last)
