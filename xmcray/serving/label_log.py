"""The durable log of live labels, which one process writes: an operation that was acknowledged is never lost.

    STATE_DIR/label_log/NNNNNNNNNNNN.log          lines (log_lines.py); the name is the first operation's number
    STATE_DIR/label_log/archive/NNNNNNNNNNNN.log  operations that a compacted bundle holds; for another bundle
    URL/label_log/...                             a second copy, behind by some seconds (log_copy.py)

Operations of a model are numbered 1, 2, 3 ... for ever, whatever bundle they are applied to. One line is one
commit: the batches of all threads that waited for the disk together; so it is all of a batch or nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from xmcray import storage
from xmcray.errors import StorageError
from xmcray.serving.log_copy import ARCHIVE, FOLDER, LogCopy
from xmcray.serving.log_lines import (
    Line,
    after,
    check_operations,
    decode,
    encode,
    number_in,
    read,
    scan,
)
from xmcray.serving.log_upload import Lag, Uploader
from xmcray.serving.schema import Operation

__all__ = ["LabelLog", "Lag", "check_operations", "number_in"]

_NAME = re.compile(r"[0-9]{12,}")


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
        self._segment_bytes = segment_bytes
        self._state = Path(state_dir)
        self._folder = self._state / FOLDER
        self._lines: list[Line] = []  # grows, or is replaced, so that readers need no lock
        self._queue: deque[_Waiting] = deque()
        self._writing, self._archiving = threading.Lock(), threading.Lock()
        self._file, self._path, self._size, self._broken = -1, self._folder, 0, ""
        self._uploader: Uploader | None = None
        with contextlib.ExitStack() as stack, storage.disk_errors(self._state):
            new = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
            self._state.mkdir(parents=True, exist_ok=True)
            stack.enter_context(storage.exclusive(self._state))
            copy = LogCopy(upload_url) if upload_url else None
            for unfinished in self._state.glob(f".{FOLDER}.*"):
                shutil.rmtree(unfinished)
            if not self._files():
                if self._folder.is_dir() and any(self._folder.iterdir()):
                    raise StorageError(
                        f"{self._folder} has files but no log; restore it, or move it away"
                    )
                if copy:
                    self._fetch(copy)
            self._recover(start_after)
            for path in new:
                storage.fsync(path.parent)
            stack.callback(self._close_file)
            if copy:
                uploader = Uploader(self, copy, upload_every_s, segment_bytes)
                self._check_broken()
                uploader.start()
                self._uploader = uploader
            self._stack = stack.pop_all()

    def __enter__(self) -> LabelLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Uploads what is left, if that takes no longer than some seconds, and lets others open the log."""
        if self._uploader:
            self._uploader.close()
        with self._writing:
            self.refuse(f"the log in {self._folder} is closed; open it again")
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
            (lines, begin), last = self.lines(), self.last
            if number > last:
                raise StorageError(
                    f"the label log of model {self.model!r} ends with operation {last}, not yet {number}"
                )
            try:
                known = lines if number >= begin else [*self._archived_lines(number, begin), *lines]
                chosen = known[after(known, number) :]
                if limit is not None:
                    enough = number + max(limit, 1)
                    chosen = [
                        line for i, line in enumerate(chosen) if i == 0 or line.last <= enough
                    ]
                found = (
                    operation for line, data in read(chosen) for operation in decode(data, line)
                )
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
            limit = min(up_to, self._uploader.uploaded if self._uploader else self.last)
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
                self._lines = self._lines[after(self._lines, begin) :]
                for file in done:  # the oldest first: what a crash leaves has no gap
                    file.rename(self._folder / ARCHIVE / file.name)
                storage.fsync(self._folder / ARCHIVE)
                storage.fsync(self._folder)
        self._hurry()
        return begin

    def upload(self) -> int:
        """Uploads now, and before it returns, what the copy lacks; returns the last number that it has.

        Raises:
            StorageError: the URL cannot be used, or its log is another one.
        """
        if self._uploader is None:
            raise StorageError(
                f"the log of model {self.model!r} has no URL to be uploaded to; give it one"
            )
        return self._uploader.upload()

    def lag(self) -> Lag:
        """How far the copy is behind; of a log without a copy, nothing."""
        return Lag() if self._uploader is None else self._uploader.lag()

    def lines(self) -> tuple[list[Line], int]:
        """What is durable and not archived, and the number after which it begins; the list may grow."""
        lines = self._lines  # before `begin`, which is changed first
        return lines, self.begin

    def refuse(self, reason: str) -> None:
        """From now on nobody appends."""
        self._broken = self._broken or reason

    def _commit(self, batches: Sequence[_Waiting]) -> None:
        """Writes batches as one line and tells each of them how it went."""
        operations = [operation for waiting in batches for operation in waiting.operations]
        try:
            self._check_broken()
            if self._size >= self._segment_bytes:
                self._rotate()
                self._hurry()
            first, at = self.last + 1, round(time.time(), 3)
            data = encode(self.model, first, at, operations)
            line = Line(
                str(self._path), self._size, len(data), first, self.last + len(operations), at
            )
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
            with (
                self._breaking()
            ):  # after a failure nobody knows which pages are on the disk, and none is retried
                os.fsync(self._file)
            self._size += len(data)

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._broken = f"{self._path} could not be written ({error}); see to the disk and restart the writer"
            raise

    def _hurry(self) -> None:
        if self._uploader:
            self._uploader.hurry()

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
            lines, self._size = scan(
                data, str(path), self.model, self.last + 1, unfinished=path == files[-1]
            )
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
        os.fsync(
            self._file
        )  # a killed process may have written what it had no time to sync; now it counts
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


def _in_order(folder: Path) -> list[Path]:
    """Files of operations in a folder, by their first numbers."""
    found = [path for path in folder.glob("*.log") if _NAME.fullmatch(path.stem)]
    return sorted(found, key=lambda path: int(path.stem))
