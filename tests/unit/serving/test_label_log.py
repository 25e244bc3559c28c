"""What the log acknowledged is there after any crash, once; damage is named and never passed over."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import sqlite3
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from operations import (
    ALL,
    BATCHES,
    COMMITS,
    Files,
    add,
    database_files,
    delete,
    flipped,
    interrupted,
    kill_writers,
    opened,
    operations_after,
    written,
)

from xmcray.errors import StorageError
from xmcray.serving import log_database
from xmcray.serving.label_log import LabelLog
from xmcray.serving.log_place import LogPlace
from xmcray.serving.schema import Operation

DATABASE = "label_log.sqlite"
WAL = f"{DATABASE}-wal"


def test_what_was_appended_is_read_by_number(tmp_path: Path) -> None:
    written(tmp_path)
    for _ in range(2):  # also after nothing was done
        with LabelLog(tmp_path, "m") as log:
            assert log.last == 6
            for number in range(7):
                assert operations_after(log, number) == ALL[number:]
            assert operations_after(log, 0, max_bytes=1) == ALL[:2], "no batch is torn"
            assert operations_after(log, 1, max_bytes=1) == ALL[1:2]
            assert operations_after(log, 2, max_bytes=1) == ALL[2:3]
            with pytest.raises(
                StorageError, match=r"label log of model 'm' ends with operation 6, not yet 7"
            ):
                operations_after(log, 7)
            assert log.copy_lag_s() == 0.0
    for use in (partial(log.append, BATCHES[0]), partial(log.commits_after, 0)):
        with pytest.raises(StorageError, match="is closed; open it again"):
            use()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Files:
    files = interrupted(tmp_path_factory.mktemp("killed"))
    assert sorted(files) == [DATABASE, WAL]
    return files


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Files:
    files = written(tmp_path_factory.mktemp("closed"))
    assert sorted(files) == [DATABASE]
    return files


def test_a_torn_tail_of_any_length_is_dropped(killed: Files, tmp_path: Path) -> None:
    wal = killed[WAL]
    frame = 24 + 4096
    borders = [32 + frame * i + byte for i in range(len(wal) // frame) for byte in (-1, 0, 1)]
    for stop in {*range(0, len(wal), 997), *borders}:  # soak_serving.py cuts at every byte
        assert opened(tmp_path / "log", {**killed, WAL: wal[:stop]}) in COMMITS
        zeros = bytes(len(wal) - stop)  # blocks that the file has, and that hold nothing yet
        with_zeros = opened(tmp_path / "log", {**killed, WAL: wal[:stop] + zeros})
        assert with_zeros in COMMITS or "the machine lost power" in with_zeros
    assert opened(tmp_path / "log", {**killed, WAL: wal + wal[32 : 32 + frame][:500]}) == ALL


def test_after_a_loss_of_power_the_advice_of_the_message_helps(
    killed: Files, tmp_path: Path
) -> None:
    wal = killed[WAL]
    torn = wal[:-3000] + bytes(3000)
    message = opened(tmp_path, {**killed, WAL: torn})
    assert isinstance(message, str)
    command = message.split("`")[1].split()
    assert command[:2] == ["truncate", "-s"]
    os.truncate(command[3], int(command[2]))
    with LabelLog(tmp_path, "m") as log:
        assert operations_after(log, 0) == ALL[:3]
        assert log.append(BATCHES[2]) == 6


@pytest.mark.parametrize(
    ("state", "name"), [("killed", WAL), ("killed", DATABASE), ("closed", DATABASE)]
)
def test_a_flipped_bit_is_named_or_harmless(
    state: str, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    files: Files = request.getfixturevalue(state)
    draw = random.Random(0)
    for _ in range(60):
        result = opened(tmp_path, flipped(files, name, draw.randrange(8 * len(files[name]))))
        if name == WAL:
            assert f"{WAL}" in result
            assert "is damaged" in result
        elif isinstance(result, str):
            assert f"{DATABASE}" in result
        else:
            assert result == ALL


@pytest.mark.parametrize("state", ["killed", "closed"])
def test_a_shortened_database_is_named_or_harmless(
    state: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    files: Files = request.getfixturevalue(state)
    for stop in range(0, len(files[DATABASE]), 499):
        result = opened(tmp_path, {**files, DATABASE: files[DATABASE][:stop]})
        assert result == ALL or f"{DATABASE}" in result
    for stop in (0, 1, 99):
        assert "is damaged" in opened(tmp_path, {**files, DATABASE: files[DATABASE][:stop]})
    assert "is missing; restore it" in opened(tmp_path, {WAL: files.get(WAL, b"frames")})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("DELETE FROM commits WHERE last = 6", "it ends with operation 3, expected 6"),
        ("DELETE FROM commits WHERE last = 3", "found operation 4, expected 3"),
        ("DELETE FROM commits WHERE last = 2", "found operation 3, expected 1"),
        ("DELETE FROM commits WHERE last = 0", "its first line is missing"),
        ("DELETE FROM commits", "its first line is missing"),
        ("UPDATE commits SET last = 5 WHERE last = 6", "found operation 6, expected 5"),
        ("UPDATE commits SET line = 7 WHERE last = 6", "operation 6: the line is damaged"),
        (
            "UPDATE commits SET line = CAST(replace(CAST(line AS TEXT), 'B', 'C') AS BLOB)",
            "operation 2: the line is damaged (its hash differs)",
        ),
        ("PRAGMA user_version = 7", "it ends with operation 6, expected 7"),
        ("DROP TABLE commits", "no such table: commits"),
    ],
)
def test_rows_that_are_lost_or_changed_are_named(change: str, message: str, tmp_path: Path) -> None:
    written(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        connection.execute(change)
        connection.commit()
    with pytest.raises(StorageError) as caught:
        LabelLog(tmp_path, "m")
    assert message in str(caught.value)
    assert "restore the file" in str(caught.value)


def test_who_may_open_it(tmp_path: Path) -> None:
    with LabelLog(tmp_path, "m") as log:
        with pytest.raises(
            StorageError, match="expected one server for each state folder; stop that server"
        ):
            LabelLog(tmp_path, "m")
        log.append([add("a")])
    with pytest.raises(
        StorageError, match="of the label log of model 'm', expected 'n'; give each model its own"
    ):
        LabelLog(tmp_path, "n")
    with pytest.raises(
        StorageError, match="ends with operation 1, the bundle holds 5 of model 'm'"
    ):
        LabelLog(tmp_path, "m", start_after=LogPlace(5))
    with LabelLog(tmp_path, "m", start_after=LogPlace(1)) as log:
        assert log.append([add("b")]) == 2


def test_a_reader_outside_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator looks into the database with SQLite's own tools while it is written."""
    monkeypatch.setattr(log_database, "CHECKPOINT_BYTES", 0)
    with LabelLog(tmp_path, "m") as log:
        with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as other:
            log.append(BATCHES[0])
            other.execute("BEGIN")
            assert other.execute("SELECT count(*) FROM commits").fetchone() == (2,)
            log.append(BATCHES[1])
            assert (tmp_path / WAL).stat().st_size > 0, "not emptied while it is read"
        assert log.append(BATCHES[2]) == 6
        files = database_files(tmp_path)
    assert opened(tmp_path / "copy", files) == ALL


def test_a_writer_outside_puts_off_a_write_alone(tmp_path: Path) -> None:
    with LabelLog(tmp_path, "m") as log:
        with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StorageError, match="another process writes to"):
                log.append(BATCHES[0])
            other.rollback()
        log.append(BATCHES[0])


class Connection(sqlite3.Connection):
    """A connection whose commits can be watched, held up and made to fail.

    Attributes:
        opened: all connections that write, of all tests.
        before_commit: called before each commit.
    """

    opened: ClassVar[list[Connection]] = []
    before_commit: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    def __init__(self, database: str, *args: Any, **options: Any) -> None:
        super().__init__(database, *args, **options)
        if database.endswith("mode=rw"):
            Connection.opened.append(self)

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql == "COMMIT":
            Connection.before_commit()
        return super().execute(sql, *args)


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """Writing connections of the logs that a test opens, the newest last."""
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Connection))
    monkeypatch.setattr(Connection, "opened", [])
    return Connection.opened


def test_a_full_disk_refuses_and_leaves_no_trace(
    tmp_path: Path, connections: list[Connection]
) -> None:
    with LabelLog(tmp_path, "m") as log:
        log.append(BATCHES[0])
        (connection,) = connections
        connection.execute("PRAGMA max_page_count=2")  # SQLite then fails as on a full disk
        for _ in range(2):
            with pytest.raises(
                StorageError, match=r"no space left while writing .*sqlite: the disk is full"
            ):
                log.append([add("large", "x" * 50_000)])
            assert (log.last, operations_after(log, 0)) == (2, ALL[:2])
        assert log.append(BATCHES[1]) == 3, "there is room for it"
        connection.execute("PRAGMA max_page_count=1000")
        assert log.append(BATCHES[2]) == 6
        files = database_files(tmp_path)
    assert opened(tmp_path / "copy", files) == ALL


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The system itself refuses to write more into a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_after_a_disk_error_nothing_more_is_written(tmp_path: Path) -> None:
    with LabelLog(tmp_path, "m") as log:
        log.append(BATCHES[0])
        with (
            largest_file((tmp_path / WAL).stat().st_size + 5000),
            pytest.raises(StorageError, match=r"could not be written .*; see to the disk and rest"),
        ):
            log.append([add("large", "x" * 50_000)])
        with pytest.raises(StorageError, match="could not be written"):
            log.append(BATCHES[1])
        assert operations_after(log, 0) == ALL[:2]
        files = database_files(tmp_path)
    assert opened(tmp_path / "copy", files) == ALL[:2]


def test_after_an_interrupted_write_nothing_more_is_written(
    tmp_path: Path, connections: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with LabelLog(tmp_path, "m") as log:
        log.append(BATCHES[0])
        monkeypatch.setattr(Connection, "before_commit", staticmethod(interrupt))
        with pytest.raises(KeyboardInterrupt):
            log.append(BATCHES[1])
        monkeypatch.setattr(Connection, "before_commit", staticmethod(lambda: None))
        with pytest.raises(
            StorageError, match=r"a write to .* was interrupted; restart the writer"
        ):
            log.append(BATCHES[1])
        assert operations_after(log, 0) == ALL[:2]


def test_acknowledged_means_synced(
    tmp_path: Path, connections: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    synced: list[str] = []

    def fsync(file: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{file}").readlink()))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    state = tmp_path / "new" / "state"
    with LabelLog(state, "m"):
        assert {str(tmp_path), str(state.parent), str(state)} <= set(synced), "each new name"
        (connection,) = connections
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"


def test_a_long_write_ahead_log_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_database, "CHECKPOINT_BYTES", 50_000)
    sizes = []
    with LabelLog(tmp_path, "m") as log:
        for i in range(30):
            log.append([add(f"u{i}", "x" * 3000)])
            sizes.append((tmp_path / WAL).stat().st_size)
        assert [operation.uid for operation in operations_after(log, 0)] == [
            f"u{i}" for i in range(30)
        ]
    assert max(sizes) <= 50_000
    assert sizes.count(0) >= 2


def test_batches_of_threads_stay_whole(tmp_path: Path) -> None:
    numbers: dict[int, int] = {}
    with LabelLog(tmp_path, "m") as log:

        def act(i: int) -> None:
            numbers[i] = log.append([add(f"u{i}"), delete(f"u{i}")])

        threads = [threading.Thread(target=act, args=(i,)) for i in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(numbers.values()) == list(range(2, 19, 2))
        operations = operations_after(log, 0)
        for i, number in numbers.items():
            assert operations[number - 2 : number] == [add(f"u{i}"), delete(f"u{i}")]


def test_it_is_read_before_a_commit_is_on_the_disk(
    tmp_path: Path, connections: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Operation]] = []
    with LabelLog(tmp_path, "m") as log:
        log.append(BATCHES[0])
        read = staticmethod(lambda: seen.append(operations_after(log, 0)))
        monkeypatch.setattr(Connection, "before_commit", read)
        log.append(BATCHES[1])
        assert seen == [ALL[:2]]
        assert operations_after(log, 0) == ALL[:3]


def test_operations_before_the_log_began_are_not_there(tmp_path: Path) -> None:
    with LabelLog(tmp_path, "m", start_after=LogPlace(6)) as log:
        log.append([add("z")])
        assert operations_after(log, 6) == [add("z")]
        with pytest.raises(
            StorageError,
            match=r"operations 6 to 6 of model 'm' are not in .*sqlite, which began later; use a bun",
        ):
            operations_after(log, 5)


def test_nothing_acknowledged_is_lost_and_nothing_deleted_comes_back(tmp_path: Path) -> None:
    """A writer is killed at five random moments; benchmarks/soak_serving.py does fifty."""
    assert kill_writers(tmp_path, kills=5) > 20


def test_a_log_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "label_log"
    folder.mkdir()
    (folder / "000000000001.log").touch()
    with pytest.raises(StorageError, match="the label log of an earlier version; compact it"):
        LabelLog(tmp_path, "m")
    assert not (tmp_path / DATABASE).exists()


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    with (
        largest_file(5000),
        pytest.raises(StorageError, match="could not be written"),
    ):
        LabelLog(tmp_path / "new", "m")
    with LabelLog(tmp_path / "new", "m") as log:
        assert log.append(BATCHES[0]) == 2
