"""The lines of a label log in an SQLite database.

    commits       one row for each commit: the number of its last operation, and its line
                  (log_lines.py)
    user_version  SQLite's own field for the application: the number of the last operation

Why nothing acknowledged is lost in silence:
- A commit has returned when the write-ahead log (WAL) is on the disk: `synchronous=FULL`.
- Damage in the WAL is found by wal_check.py before SQLite reads it.
- Damage in the database is found by `integrity_check`, by the hash of each line, and by the
  numbers, which must be without a gap and end with `user_version`. A database that lost its last
  rows disagrees with it.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from xmcray.errors import StorageError, one_line
from xmcray.serving.log_lines import Line, parse_line
from xmcray.serving.wal_check import check_wal
from xmcray.storage.path_errors import disk_full
from xmcray.storage.whole_files import aside, fsync

CHECKPOINT_BYTES = 4 << 20  # a longer WAL is copied into the database
_HEADER_BYTES = 100
_NO_LIMIT = 1 << 62
_LARGEST_VERSION = (1 << 31) - 1  # `user_version` keeps the lower 31 bits of the last number


def create_database(path: Path, lines: Iterable[Line]) -> None:
    """Writes a new database, whole or not at all.

    Args:
        path: the file.
        lines: commits, in order.
    """
    unfinished = aside(path)
    with contextlib.closing(_connect(unfinished, "rwc")) as connection:
        try:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("BEGIN")
            connection.execute(
                "CREATE TABLE commits (last INTEGER PRIMARY KEY, line BLOB NOT NULL)"
            )
            for line in lines:
                _insert(connection, line)
            connection.execute("COMMIT")
            # Only now: a WAL would have to be copied into the file before it is renamed.
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.Error as error:
            raise _write_error(path, error) from error
    fsync(unfinished)
    unfinished.rename(path)
    fsync(path.parent)


class LogReader:
    """A database that is read. Another process may be writing it.

    Attributes:
        path: the file; SQLite's own files have its name and `-wal` or `-shm`.
        begin: number of the operation before the first one that is held.
        last: number of the last operation, `begin` if there is none.
        first_line: the line that says where the log begins, and which one it is.
    Args:
        path: the file.
        model: name of the model that the log must have.
        has_writer: whether another process may be writing, so that the end of the WAL may be
            unfinished.
    """

    def __init__(self, path: Path, model: str, *, has_writer: bool) -> None:
        """Verifies everything that is stored.

        Raises:
            StorageError: the database is damaged, or of another model. Its files are left as they
                are.
        """
        self.path = path
        self.begin = 0
        self.last = 0
        self._model = model
        self._wal = Path(f"{path}-wal")
        self._refusal = ""
        self._reading = threading.Lock()
        # SQLite takes a file without a header for a new one, and removes its WAL.
        num_bytes = path.stat().st_size
        if num_bytes < _HEADER_BYTES:
            raise self._damaged(f"{num_bytes} bytes")
        if not has_writer:
            check_wal(self._wal)
        with contextlib.ExitStack() as stack, self._translating_errors():
            # A connection that may only read leaves a damaged file as it is when it is closed.
            self._reader = stack.enter_context(contextlib.closing(_connect(path, "ro")))
            # One transaction: a commit of another process must not come in between.
            self._reader.execute("BEGIN")
            self._verify()
            self._reader.execute("COMMIT")
            stack.pop_all()

    def close(self) -> None:
        """Closes the database."""
        self._refusal = self._refusal or f"the log in {self.path} is closed; open it again"
        with self._reading:
            self._reader.close()

    def check_writable(self) -> None:
        """Raises StorageError if writes are refused."""
        if self._refusal:
            raise StorageError(self._refusal)

    def lines_after(self, number: int, max_bytes: int = _NO_LIMIT) -> list[Line]:
        """Commits with an operation after `number`; all of them are durable.

        Args:
            number: number of an operation.
            max_bytes: no more than so much, except for the first commit.
        """
        lines: list[Line] = []
        num_bytes = 0
        with (
            self._reading,
            self._translating_errors(),
            # An open cursor would keep the WAL from being emptied.
            contextlib.closing(self._stored_lines(number)) as stored_lines,
        ):
            for line in stored_lines:
                num_bytes += len(line.data)
                if lines and num_bytes > max_bytes:
                    break
                lines.append(line)
        return lines

    def line_ending_with(self, number: int) -> Line | None:
        """The commit that ends with an operation, or the first line; None if no commit ends there."""
        query = "SELECT CAST(line AS BLOB) FROM commits WHERE last = ?"
        with self._reading, self._translating_errors():
            row = self._reader.execute(query, (number,)).fetchone()
        if row is None:
            return None
        return parse_line(row[0], f"{self.path}, operation {number}", self._model)

    def _verify(self) -> None:
        (verdict,) = self._reader.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise self._damaged(one_line(verdict))
        with contextlib.closing(self._stored_lines(-1)) as lines:
            start = next(lines, None)
            if start is None or start.operations:
                raise self._damaged("its first line is missing")
            self.first_line = start
            self.begin = start.last
            self.last = start.last
            for line in lines:
                if line.first != self.last + 1:
                    raise self._damaged(f"found operation {line.first}, expected {self.last + 1}")
                self.last = line.last
        (version,) = self._reader.execute("PRAGMA user_version").fetchone()
        if version != self.last & _LARGEST_VERSION:
            raise self._damaged(f"it ends with operation {self.last}, expected {version}")

    def _stored_lines(self, number: int) -> Generator[Line, None, None]:
        """The lines of the commits that end after `number`, in order."""
        query = "SELECT last, CAST(line AS BLOB) FROM commits WHERE last > ? ORDER BY last"
        for last, data in self._reader.execute(query, (number,)):
            line = parse_line(data, f"{self.path}, operation {last}", self._model)
            if line.last != last:
                raise self._damaged(f"found operation {line.last}, expected {last}")
            yield line

    def _damaged(self, reason: str) -> StorageError:
        return StorageError(f"{self.path} is damaged ({reason}); restore the file")

    @contextlib.contextmanager
    def _translating_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:  # the connection is closed
            self.check_writable()
            raise
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter is of SQLite's message
            raise self._damaged(one_line(error)) from None


class LogDatabase(LogReader):
    """An open database of one writer. Only one thread at a time may write, but all may read."""

    def __init__(self, path: Path, model: str) -> None:
        """Verifies everything that is stored, then opens the database for writing.

        Args:
            path: the file.
            model: name of the model that the log must have.
        Raises:
            StorageError: as `LogReader`.
        """
        super().__init__(path, model, has_writer=False)
        self._has_failed_frames = False
        with contextlib.ExitStack() as stack, self._translating_errors():
            stack.enter_context(contextlib.closing(self._reader))
            self._writer = stack.enter_context(contextlib.closing(_connect(path, "rw")))
            self._writer.execute("PRAGMA synchronous=FULL")
            self._writer.execute("PRAGMA wal_autocheckpoint=0")
            # Frames that a killed process wrote may not be on the disk yet. They count from now on.
            if self._wal.exists():
                fsync(self._wal)
            with contextlib.suppress(sqlite3.OperationalError):  # the disk is full: reading goes on
                self._truncate_wal()
            # Closed in reverse order: the writer must be the last one, because it empties the WAL.
            stack.pop_all()

    def close(self) -> None:
        """Closes the database."""
        super().close()
        self._writer.close()

    def refuse(self, reason: str) -> None:
        """Refuses all later writes with this reason, or with an earlier one."""
        self._refusal = self._refusal or reason

    def append(self, line: Line) -> None:
        """Makes a commit durable.

        Raises:
            StorageError: the disk is full, and nothing was written; or it fails, and all later
                writes are refused.
        """
        self.check_writable()
        try:
            # The frames of a failed write would stand behind those of a shorter one, and look like
            # damage.
            if self._has_failed_frames:
                self._truncate_wal()
            if self._has_failed_frames:
                raise StorageError(
                    f"another process reads {self.path}; try again when it has ended"
                )
            self._begin()
            _insert(self._writer, line)
            self._writer.execute("COMMIT")
        except StorageError:
            raise
        except sqlite3.Error as error:
            self._has_failed_frames = True
            with contextlib.suppress(sqlite3.Error):
                self._writer.execute("ROLLBACK")
            failure = _write_error(self.path, error)
            # After a failed sync it is unknown which pages are on the disk, so that no write is
            # tried again. A full disk is no such case: it fails before the sync.
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                self.refuse(str(failure))
            raise failure from error
        except BaseException:
            self.refuse(f"a write to {self.path} was interrupted; restart the writer")
            raise
        self.last = line.last
        if self._wal.stat().st_size > CHECKPOINT_BYTES:
            with contextlib.suppress(sqlite3.Error):  # the commit itself is safe in the WAL
                self._truncate_wal()

    def _begin(self) -> None:
        """Begins a transaction that writes."""
        try:
            self._writer.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            raise StorageError(
                f"another process writes to {self.path}, and nothing else should; try again when it"
                " has ended"
            ) from error

    def _truncate_wal(self) -> None:
        """Copies the WAL into the database, and empties it unless another process is reading."""
        with self._reading:
            (is_busy, _, _) = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if not is_busy:
            self._has_failed_frames = False


def _insert(connection: sqlite3.Connection, line: Line) -> None:
    """Adds a commit to the transaction."""
    connection.execute("INSERT INTO commits VALUES (?, ?)", (line.last, line.data))
    # In the same transaction. A pragma takes no parameters.
    connection.execute(f"PRAGMA user_version = {line.last & _LARGEST_VERSION}")


def _write_error(path: Path, error: sqlite3.Error) -> StorageError:
    if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
        return disk_full(path)
    return StorageError(
        f"{path} could not be written ({error}); see to the disk and restart the writer"
    )


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    """A connection with explicit transactions; `mode` is SQLite's: ro, rw or rwc."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    # A writer does not wait for readers outside: they only put off that the WAL is emptied.
    timeout_s = 5.0 if mode == "ro" else 0.0
    return sqlite3.connect(
        uri,
        uri=True,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )
