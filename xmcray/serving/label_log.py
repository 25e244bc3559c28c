"""The durable log of label operations. One process writes it; an acknowledged operation is never
lost.

    STATE_DIR/label_log.sqlite  the operations, and label_log.sqlite-wal (log_database.py)
    URL/label_log/              a second copy, some seconds behind (log_segments.py)

Operations of a model are numbered 1, 2, 3 ... without end, whatever bundle they are applied to. A
batch of operations is durable as a whole or not at all. Batches of threads that wait for the disk
at the same time share one commit.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from xmcray import storage
from xmcray.errors import StorageError
from xmcray.serving.log_database import LogDatabase, create_database
from xmcray.serving.log_lines import Line, encode_line
from xmcray.serving.log_segments import SegmentStore
from xmcray.serving.log_upload import Lag, Uploader
from xmcray.serving.schema import Operation

__all__ = ["LabelLog", "Lag"]

DATABASE = "label_log.sqlite"


@dataclass(slots=True)
class _Batch:
    """Operations that wait to be written.

    Attributes:
        last: number of the last operation, when they are on the disk.
        failure: why they were not written.
    """

    operations: Sequence[Operation]
    last: int = 0
    failure: str = ""


class LabelLog:
    """The log of one model, open for writing. All methods may be called by any thread.

    Attributes:
        model: name of the model.
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
        """Opens the log, or begins one.

        A folder without a log takes the copy at the URL, if there is one.

        Args:
            state_dir: local folder of this log alone; locked until `close`.
            model: name of the model.
            start_after: number of the last operation in the bundle (`number_in`).
            upload_url: folder or fsspec URL of the copy; no copy if None.
            upload_every_s: seconds between uploads.
            segment_bytes: size at which operations are uploaded at once, and of the uploaded files.
        Raises:
            StorageError: another process writes this log; it is damaged, of another model, or older
                than the bundle or the copy; the disk is full; a copy is needed and cannot be read.
        """
        self.model = model
        self._state = Path(state_dir)
        self._segment_bytes = segment_bytes
        self._queue: deque[_Batch] = deque()
        self._writing = threading.Lock()
        self._bytes_until_upload = segment_bytes
        self._uploader: Uploader | None = None
        with contextlib.ExitStack() as stack, storage.disk_errors(self._state):
            new_folders = [f for f in (self._state, *self._state.parents) if not f.exists()]
            self._state.mkdir(parents=True, exist_ok=True)
            for folder in new_folders:
                storage.fsync(folder.parent)
            # The system ends this lock when the process dies.
            stack.enter_context(storage.exclusive(self._state))
            copy = SegmentStore(upload_url) if upload_url else None
            self._create_if_missing(start_after, copy)
            self._database = LogDatabase(self._state / DATABASE, model)
            stack.callback(self._database.close)
            if self.last < start_after:
                raise StorageError(
                    f"{self._state} ends with operation {self.last}, the bundle holds {start_after} of model"
                    f" {model!r}: an old copy, or the log of another one; restore the newest"
                )
            if copy:
                uploader = Uploader(self._database, copy, upload_every_s, segment_bytes)
                self._database.check_writable()  # the uploader may have found another log's copy
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

    @property
    def begin(self) -> int:
        """Operations up to this number are archived."""
        return self._database.begin

    @property
    def last(self) -> int:
        """Number of the last operation; `begin` if there is none."""
        return self._database.last

    def close(self) -> None:
        """Uploads the rest, if that takes no longer than some seconds, and lets others open the
        log.
        """
        if self._uploader:
            self._uploader.close()
        with self._writing:
            self._stack.close()

    def append(self, operations: Sequence[Operation]) -> int:
        """Makes a batch durable, all of it or nothing.

        Args:
            operations: checked before (`check_operations`).
        Returns:
            Number of the last operation.
        Raises:
            StorageError: the disk is full or fails; nothing was written, or all later appends are
                refused.
        """
        if not operations:
            return self.last
        batch = _Batch(list(operations))
        self._queue.append(batch)
        # The first thread that gets the lock writes the batches of all threads that wait.
        with self._writing:
            if not (batch.last or batch.failure):
                self._commit([self._queue.popleft() for _ in range(len(self._queue))])
        if batch.failure:
            raise StorageError(batch.failure)
        return batch.last

    def since(self, number: int, limit: int | None = None) -> list[tuple[int, Operation]]:
        """Operations after `number`, with their numbers; all of them are durable.

        Args:
            limit: no more operations than this, if possible; a batch is never torn.
        Raises:
            StorageError: there is no such number yet, or no longer; or the log is damaged.
        """
        last = self.last
        if number > last:
            raise StorageError(
                f"the label log of model {self.model!r} ends with operation {last}, not yet {number}"
            )
        if number < self._database.oldest:
            raise StorageError(
                f"operations {number + 1} to {self._database.oldest} of model {self.model!r} are not in"
                f" {self._database.path}, which began later; use a bundle that holds them"
            )
        # Read once: other threads append meanwhile.
        up_to = last if limit is None else number + max(limit, 1)
        operations = []
        for line in self._database.lines_after(number, up_to=up_to):
            operations += [pair for pair in line.numbered() if pair[0] > number]
        return operations

    def trim(self, up_to: int) -> int:
        """Marks operations up to `up_to` as archived, because the bundle in use holds them.

        They stay here, for going back to an older bundle, but are not replayed or copied any more.
        Operations that are not uploaded yet are not marked.

        Returns:
            The new `begin`.
        """
        with self._writing:
            # The copy must hold all operations that are not in the bundle.
            limit = min(up_to, self._uploader.uploaded if self._uploader else self.last)
            self._database.archive(limit)
        if self._uploader:
            self._uploader.hurry()
        return self.begin

    def upload(self) -> int:
        """Uploads now what the copy lacks.

        Returns:
            Number of the last operation in the copy.
        Raises:
            StorageError: the URL cannot be used, or its log is another one.
        """
        if self._uploader is None:
            raise StorageError(f"the log of model {self.model!r} has no upload URL; give it one")
        return self._uploader.upload()

    def lag(self) -> Lag:
        """How far the copy is behind; zero for a log without a copy."""
        return Lag() if self._uploader is None else self._uploader.lag()

    def _commit(self, batches: Sequence[_Batch]) -> None:
        """Writes batches as one commit, and notes in each of them how it went."""
        operations = [operation for batch in batches for operation in batch.operations]
        first = self.last + 1
        try:
            # One line for all batches: one write and one sync.
            line = encode_line(self.model, first, round(time.time(), 3), operations)
            self._database.append(line)
        # Every waiting thread must learn of it, also of KeyboardInterrupt.
        except BaseException as error:
            for batch in batches:
                batch.failure = " ".join(str(error).split()) or type(error).__name__
            if not isinstance(error, Exception):
                raise
            return
        for batch in batches:
            batch.last = first + len(batch.operations) - 1
            first = batch.last + 1
        self._bytes_until_upload -= len(line.data)
        if self._uploader and self._bytes_until_upload <= 0:
            self._bytes_until_upload = self._segment_bytes
            self._uploader.hurry()

    def _create_if_missing(self, start_after: int, copy: SegmentStore | None) -> None:
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
        begin = start_after
        lines: Iterable[Line] = []
        if copy:
            archived, segments = copy.segments()
            if archived or segments:
                begin = archived
                lines = copy.lines(self.model, begin, segments)
        create_database(path, self.model, begin, lines)
