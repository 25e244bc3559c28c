"""What the log acknowledged is there after any crash, once; what is damaged is named and never passed over."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xmcray.errors import DataError, StorageError
from xmcray.serving.label_log import DELETED, Label, LabelLog, Lag, check_operations, fold, number_in
from xmcray.serving.schema import Operation


def add(uid: str, text: str = "text", **attributes: Any) -> Operation:
    return Operation(op="add", uid=uid, text=text, attributes=attributes or None)


def update(uid: str, text: str, **attributes: Any) -> Operation:
    return Operation(op="update", uid=uid, text=text, attributes=attributes or None)


def delete(uid: str) -> Operation:
    return Operation(op="delete", uid=uid)


BATCHES = [
    [add("a", "naïve\nline \x00\u2028", price=1.5, year=2**53 + 1, new=True), add("b", "B")],
    [delete("a")],
    [update("b", "x" * 50, tag="é"), add("a"), add("c")],
]
ALL = list(enumerate([operation for batch in BATCHES for operation in batch], 1))


def files(state: Path) -> list[Path]:
    return sorted((state / "label_log").glob("*.log"))


def written(state: Path, **options: Any) -> bytes:
    """Writes the batches; returns the bytes of the only file."""
    with LabelLog(state, "m", **options) as log:
        assert [log.append(batch) for batch in BATCHES] == [2, 3, 6]
    (file,) = files(state)
    return file.read_bytes()


def test_what_was_appended_is_read_by_number(tmp_path: Path) -> None:
    written(tmp_path)
    for _ in range(2):  # also after nothing was done
        with LabelLog(tmp_path, "m") as log:
            assert (log.begin, log.last) == (0, 6)
            assert [log.since(number) for number in range(7)] == [ALL[number:] for number in range(7)]
            assert [log.since(0, limit)[-1][0] for limit in (1, 2, 3, 5, 6, 9)] == [2, 2, 3, 3, 6, 6]
            assert log.since(1, 1) == ALL[1:2]
            with pytest.raises(StorageError, match=r"label log of model 'm' ends with operation 6, not yet 7"):
                log.since(7)
            assert log.append([]) == 6
            assert log.lag() == Lag()
    with pytest.raises(StorageError, match="is closed; open it again"):
        log.append(BATCHES[0])


def test_a_torn_tail_of_any_length_is_cut_off(tmp_path: Path) -> None:
    data = written(tmp_path / "whole")
    start = data.rindex(b"\n", 0, -1) + 1
    state = tmp_path / "torn"
    (state / "label_log").mkdir(parents=True)
    file = state / "label_log" / "000000000001.log"
    for stop in range(start, len(data)):
        for unwritten in (0, 1, len(data) - stop):  # blocks that the file has, and that hold nothing yet
            file.write_bytes(data[:stop] + bytes(unwritten))
            with LabelLog(state, "m") as log:
                assert log.since(0) == ALL[:3]
                if stop % 16 == 0:
                    assert log.append(BATCHES[2]) == 6
                    assert log.since(0) == ALL
            assert file.read_bytes()[:start] == data[:start]
            assert stop % 16 == 0 or file.stat().st_size == start


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    state = tmp_path_factory.mktemp("damage")
    return state, written(state)


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
@example(place=-1, bit=6)  # the end of the last line
@example(place=33, bit=0)  # its length
def test_a_flipped_bit_anywhere_is_named(place: int, bit: int, whole: tuple[Path, bytes]) -> None:
    state, data = whole
    place %= len(data)
    damaged = bytearray(data)
    damaged[place] ^= 1 << bit
    (file,) = files(state)
    file.write_bytes(damaged)
    start = data.rfind(b"\n", 0, place) + 1
    with pytest.raises(StorageError, match=r"000000000001\.log, byte (\d+): the line is damaged") as caught:
        LabelLog(state, "m")
    assert f"byte {start}:" in str(caught.value)
    assert file.read_bytes() == damaged, "nothing is cut off"


def rotated(state: Path) -> list[Path]:
    written_ = [[add(f"u{i}")] for i in range(4)]
    with LabelLog(state, "m", segment_bytes=1) as log:
        assert [log.append(batch) for batch in written_] == [1, 2, 3, 4]
    return files(state)


def cut(paths: list[Path]) -> None:
    paths[1].write_bytes(paths[1].read_bytes()[:-5])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda paths: paths[1].unlink(), r"0003\.log begins with operation 3, expected 2: a file is missing"),
        (cut, r"0002\.log, byte 0: the line is damaged"),
        (lambda paths: paths[1].write_bytes(b""), r"0003\.log begins with operation 3, expected 2"),
        (lambda paths: paths[1].write_bytes(paths[1].read_bytes() + b"\0"), r"0002\.log, byte \d+: the line is dam"),
        (lambda paths: paths[1].write_bytes(paths[2].read_bytes()), r"found operation 3, expected 2"),
        (lambda paths: paths[3].rename(paths[3].with_name("000000000009.log")), "begins with operation 9, expected 4"),
    ],
)
def test_a_gap_is_named(harm: Callable[[list[Path]], None], message: str, tmp_path: Path) -> None:
    paths = rotated(tmp_path)
    assert [path.name for path in paths] == [f"00000000000{i}.log" for i in (1, 2, 3, 4)]
    harm(paths)
    with pytest.raises(StorageError, match=message):
        LabelLog(tmp_path, "m")


def test_who_may_open_it(tmp_path: Path) -> None:
    with LabelLog(tmp_path, "m") as log:
        with pytest.raises(StorageError, match="is being changed by another process"):
            LabelLog(tmp_path, "m")
        log.append([add("a")])
    with pytest.raises(StorageError, match="is the label log of model 'm', expected 'n'; give each its own folder"):
        LabelLog(tmp_path, "n")
    with pytest.raises(StorageError, match="ends with operation 1, the bundle holds 5 of model 'm'"):
        LabelLog(tmp_path, "m", start_after=5)
    with LabelLog(tmp_path, "m", start_after=1) as log:
        assert log.append([add("b")]) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_refuses_and_leaves_no_trace(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, room = os.write, [20]

    def write(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(number, os.strerror(number))
        count = real(file, data[: room[0]])
        room[0] -= count
        return count

    with LabelLog(tmp_path, "m") as log:
        log.append(BATCHES[0])
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(StorageError, match=r"no space left while writing .*0001\.log: the disk is full"):
            log.append(BATCHES[1])
        assert (log.last, log.since(0)) == (2, ALL[:2])
        monkeypatch.undo()
        assert log.append(BATCHES[1]) == 3
    with LabelLog(tmp_path, "m") as log:
        assert log.since(0) == ALL[:3]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ("fsync", OSError(errno.EIO, "Input/output error"), "could not be written .*; see to the disk and restart"),
        ("write", KeyboardInterrupt(), "a write to .* was interrupted; restart the writer"),
    ],
)
def test_after_a_failure_that_nobody_understands_nobody_writes(
    call: str, error: BaseException, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    with LabelLog(tmp_path, "m") as log:
        log.append(BATCHES[0])
        monkeypatch.setattr(os, call, fail)
        with pytest.raises((StorageError, KeyboardInterrupt), match=r"Input/output error|^$"):
            log.append(BATCHES[1])
        monkeypatch.undo()
        with pytest.raises(StorageError, match=message):
            log.append(BATCHES[1])
        assert log.since(0) == ALL[:2]


def test_a_first_append_syncs_the_file_and_every_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, synced = os.fsync, list[str]()

    def fsync(file: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{file}").readlink()))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    state = tmp_path / "new" / "state"
    with LabelLog(state, "m", segment_bytes=1) as log:
        assert {str(path) for path in (tmp_path, state.parent, state, state / "label_log")} <= set(synced)
        for batch in BATCHES[:2]:
            synced.clear()
            log.append(batch)
            assert synced[-1] == str(files(state)[-1])
        assert synced[0] == str(state / "label_log"), "a new file"


class Queue(deque[Any]):
    """Tells when so many wait."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.full = room, threading.Event()

    def append(self, item: Any) -> None:
        super().append(item)
        if len(self) == self.room:
            self.full.set()


def test_threads_share_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, syncs = os.fsync, []
    entered, proceed = threading.Event(), threading.Event()

    def fsync(file: int) -> None:
        syncs.append(file)
        entered.set()
        assert proceed.wait(10)
        real(file)

    numbers: dict[int, int] = {}
    with LabelLog(tmp_path, "m") as log:
        monkeypatch.setattr(os, "fsync", fsync)

        def act(i: int) -> None:
            numbers[i] = log.append([add(f"u{i}"), delete(f"u{i}")])

        threads = [threading.Thread(target=act, args=(i,)) for i in range(9)]
        threads[0].start()
        assert entered.wait(10)
        log._queue = queue = Queue(8)
        assert log.since(0) == [], "not before it is on the disk"
        for thread in threads[1:]:
            thread.start()
        assert queue.full.wait(10)
        proceed.set()
        for thread in threads:
            thread.join()
        assert len(syncs) == 2
        assert sorted(numbers.values()) == list(range(2, 19, 2))
        found = dict(log.since(0))
        assert all((found[n - 1].uid, found[n].uid) == (f"u{i}", f"u{i}") for i, n in numbers.items())
        assert log.since(0, 3)[-1][0] == 2, "a commit is read as a whole"
        assert len(log.since(2, 3)) == 16


def test_what_is_archived_can_be_read_as_long_as_it_is_there(tmp_path: Path) -> None:
    rotated(tmp_path)
    with LabelLog(tmp_path, "m", segment_bytes=1) as log:
        log.append([add("x"), add("y")])
        whole = [log.since(number) for number in range(7)]
        assert log.trim(0) == 0
        assert log.trim(2) == 2
        assert log.trim(5) == 4, "the last batch is 5 and 6"
        assert [log.since(number) for number in range(7)] == whole
        assert log.since(2, 1) == whole[2][:1]
        assert (log.trim(6), log.since(6)) == (6, [])
        assert [log.since(number) for number in range(7)] == whole
    archive = tmp_path / "label_log" / "archive"
    (archive / "000000000003.log").unlink()
    with LabelLog(tmp_path, "m") as log:
        assert (log.begin, log.append([add("z")])) == (6, 7), "numbers go on"
        assert log.since(3) == [*whole[3], (7, add("z"))]
        with pytest.raises(StorageError, match=r"operations 3 to 6 of model 'm' are archived and not in .*; use a bun"):
            log.since(2)
        with pytest.raises(StorageError, match="operations 1 to 6"):
            log.since(0)
        shutil.rmtree(archive)
        with pytest.raises(StorageError, match="operations 6 to 6"):
            log.since(5)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    root = "/label-log-test" if request.param == "memory" else f"{tmp_path}/copy"
    yield f"{request.param}://{root}"
    fsspec.filesystem("memory").store.clear()


def objects(url: str, within: str = "label_log") -> dict[str, str]:
    """Paths of the segments by name."""
    filesystem, root = fsspec.core.url_to_fs(url)
    found = filesystem.ls(f"{root}/{within}", detail=False) if filesystem.exists(f"{root}/{within}") else []
    return {path.rsplit("/", 1)[-1]: path for path in found if path.endswith(".log")}


def copied(url: str, state: Path, **options: Any) -> LabelLog:
    """A log that uploads only when it is told to, with three segments at the URL."""
    log = LabelLog(state, "m", upload_url=url, upload_every_s=1000, **options)
    for batch in BATCHES:
        log.append(batch)
        log.upload()
    return log


def test_an_empty_folder_takes_the_copy(url: str, tmp_path: Path) -> None:
    log = copied(url, tmp_path / "one")
    assert [name[:25] for name in sorted(objects(url))] == [
        f"{a:012}-{b:012}" for a, b in ((1, 2), (3, 3), (4, 6))
    ]  # fmt: skip
    assert log.lag() == Lag()
    assert log.append([add("late")]) == 7
    assert log.lag().operations == 1
    log.close()  # uploads the rest
    for segment_bytes in (1, 1 << 20):
        shutil.rmtree(tmp_path / "one")
        (tmp_path / "one" / ".label_log.unfinished").mkdir(parents=True)
        with LabelLog(tmp_path / "one", "m", upload_url=url, segment_bytes=segment_bytes) as log:
            assert log.since(0) == [*ALL, (7, add("late"))]
            assert log.append([delete("late")]) == 8 if segment_bytes > 1 else log.last == 7
        assert len(files(tmp_path / "one")) == (4 if segment_bytes == 1 else 1)
        assert [path.name for path in (tmp_path / "one").iterdir()] == ["label_log"]
    with LabelLog(tmp_path / "one", "m", upload_url=url) as log:
        assert log.upload() == 8


def without(url: str) -> None:
    filesystem, _ = fsspec.core.url_to_fs(url)
    filesystem.rm(next(path for name, path in objects(url).items() if "3-" in name[:14]))


def flip(url: str) -> None:
    filesystem, _ = fsspec.core.url_to_fs(url)
    path = max(objects(url).values())
    filesystem.pipe_file(path, filesystem.cat_file(path).replace(b"x", b"y"))


def first_gone(url: str) -> None:
    filesystem, _ = fsspec.core.url_to_fs(url)
    filesystem.rm(min(objects(url).values()))


def another_writer(url: str) -> None:
    filesystem, root = fsspec.core.url_to_fs(url)
    with LabelLog(f"{root}-other", "m", upload_url=f"{url}-other") as log:
        log.append([add("q"), add("r")])
        log.upload()
    for name, path in objects(f"{url}-other").items():
        filesystem.pipe_file(f"{root}/label_log/{name}", filesystem.cat_file(path))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (without, "found operation 4, expected 3: a segment is missing"),
        (first_gone, "found operation 3, expected 1: a segment is missing"),
        (flip, "is damaged (its SHA-256 differs from its name)"),
        (another_writer, "two writers used this URL"),
    ],
)
def test_a_copy_that_is_not_whole_is_not_taken(harm: Callable[[str], None], message: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/copy"
    copied(url, tmp_path / "one").close()
    harm(url)
    with pytest.raises(StorageError) as caught:
        LabelLog(tmp_path / "two", "m", upload_url=url)
    assert message in str(caught.value)
    assert "file:///" in str(caught.value)
    assert not (tmp_path / "two" / "label_log").exists(), "the next start asks again"
    LabelLog(tmp_path / "one", "m").close()


def test_an_upload_that_arrived_although_it_failed_does_no_harm(url: str, tmp_path: Path) -> None:
    filesystem, root = fsspec.core.url_to_fs(url)
    with copied(url, tmp_path / "one") as log:
        log._uploaded = 0
        log.upload()  # one segment of what three segments hold too
        assert len(objects(url)) == 4
    with LabelLog(tmp_path / "two", "m", upload_url=url) as log:
        assert log.since(0) == ALL
    name, path = min(objects(url).items())  # archiving it was interrupted, before the other one was removed
    filesystem.makedirs(f"{root}/label_log/archive", exist_ok=True)
    filesystem.pipe_file(f"{root}/label_log/archive/{name}", filesystem.cat_file(path))
    with LabelLog(tmp_path / "three", "m", upload_url=url) as log:
        assert (log.begin, log.since(2)) == (2, ALL[2:])


def test_local_state_wins_but_not_over_a_newer_copy(url: str, tmp_path: Path) -> None:
    with LabelLog(tmp_path / "old", "m") as log:
        log.append(BATCHES[0])
    copied(url, tmp_path / "one").close()
    shutil.copytree(tmp_path / "one", tmp_path / "copied")
    with LabelLog(tmp_path / "one", "m", upload_url=url) as log:
        log.append([add("z")])
    for state in ("old", "copied"):
        with pytest.raises(StorageError, match=r"holds operations up to 7 that the log in .* lacks"):
            LabelLog(tmp_path / state, "m", upload_url=url)
    with LabelLog(tmp_path / "copied", "m") as log:
        log.append([add("another 7")])
    with pytest.raises(StorageError, match="or the URL of another one"):
        LabelLog(tmp_path / "copied", "m", upload_url=url)


def test_archiving_reaches_the_copy(url: str, tmp_path: Path) -> None:
    with LabelLog(tmp_path / "none", "m", upload_url=f"{url}-other", upload_every_s=1000) as log:
        log.append(BATCHES[0])
        assert log.trim(2) == 0, "not uploaded"
    with copied(url, tmp_path / "one", segment_bytes=1) as log:
        assert log.trim(3) == 3
        log.upload()
        assert (len(objects(url)), len(objects(url, "label_log/archive"))) == (1, 2)
    with LabelLog(tmp_path / "two", "m", upload_url=url, upload_every_s=1000) as log:
        assert (log.begin, log.since(3)) == (3, ALL[3:])
        log.trim(6)
        log.upload()
        assert len(objects(url)) == 0
    with LabelLog(tmp_path / "old", "m") as log:
        log.append(BATCHES[0])
    with pytest.raises(StorageError, match="holds operations up to 6 that the log in"):
        LabelLog(tmp_path / "old", "m", upload_url=url)
    with LabelLog(tmp_path / "three", "m", upload_url=url, start_after=6) as log:
        assert (log.begin, log.append([add("z")])) == (6, 7)
    with LabelLog(tmp_path / "three", "m", upload_url=f"{url}-new") as log:  # a log that begins late, and a new URL
        assert log.upload() == 7
    with LabelLog(tmp_path / "four", "m", upload_url=f"{url}-new") as log:
        assert (log.begin, log.since(6)) == (6, [(7, add("z"))])


class Server:
    """Stands in front of the memory file system: down, or stuck, as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.down, self.stuck, self.asked = False, threading.Event(), threading.Event()
        self.stuck.set()
        kind = type(fsspec.filesystem("memory"))
        for name in ("pipe_file", "ls"):
            monkeypatch.setattr(kind, name, self.guarding(getattr(kind, name)))

    def guarding(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **options: Any) -> Any:
            self.asked.set()
            assert self.stuck.wait(10)
            if self.down:
                raise ConnectionError("nobody answers")
            return real(*args, **options)

        return act


def test_a_server_that_is_down_or_slow_stops_no_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, server = "memory://down", Server(monkeypatch)
    server.down = True
    with pytest.raises(StorageError, match=r"memory://down/label_log cannot be used \(ConnectionError: nobody ans"):
        LabelLog(tmp_path, "m", upload_url=url)
    LabelLog(tmp_path, "m").close()
    with LabelLog(tmp_path, "m", upload_url=url, upload_every_s=0.001) as log:  # there is a log: it is enough
        assert log.append(BATCHES[0]) == 2
        for _ in range(3):
            server.asked.clear()
            assert server.asked.wait(10), "it tries again by itself"
        lag = log.lag()
        assert lag.operations == 2
        assert lag.seconds >= 0
        assert "nobody answers" in lag.problem
        server.stuck.clear()
        server.down = False
        server.asked.clear()
        assert server.asked.wait(10)
        assert log.append(BATCHES[1]) == 3, "while an upload hangs"
        server.stuck.set()
    assert log.lag() == Lag()
    with LabelLog(tmp_path / "two", "m", upload_url=url) as log:
        assert log.since(0) == ALL[:3]
    fsspec.filesystem("memory").store.clear()


def test_what_operations_come_to() -> None:
    log = list(
        enumerate(
            [
                add("a", "1", x=1), update("a", "2"), add("b", "1"), delete("c"),
                delete("a"), add("a", "3"), update("d", "1"), update("d", "2", y=2), add("a", "4", z=3), delete("b"),
            ],
            1,
        )
    )  # fmt: skip
    assert fold(log[:4]) == {"a": Label("2", {"x": 1}), "b": Label("1", None), "c": DELETED}
    whole = {"a": Label("4", {"z": 3}), "b": DELETED, "c": DELETED, "d": Label("2", {"y": 2})}
    assert fold(log) == whole
    assert fold(log[:6])["a"] == Label("3", {}), "what it had before it was deleted is gone"
    assert "c" not in fold(log, 4)
    assert fold(log, 5) == {"a": Label("4", {"z": 3}), "d": Label("2", {"y": 2}), "b": DELETED}
    for cut in range(len(log) + 1):  # a replica that tails, and one that begins in the middle of what its bundle holds
        before = fold(log[:cut])
        assert fold(log[cut:], 0, before) == whole
        assert fold(log, 0, before) == whole
    assert number_in({"label_log": {"model": "m", "number": 7}}, "m") == 7
    assert number_in({"label_log": {"model": "m", "number": 7}}, "n") == number_in({}, "m") == 0


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([add("new"), add("old")], "operation 2 of 2: add of label 'old', which is there already; update it"),
        ([update("new", "x")], "operation 1 of 1: update of label 'new', which is not there; add it first"),
        ([delete("old"), delete("old")], "operation 2 of 2: delete of label 'old', which is not there"),
        ([Operation(op="add", uid="new")], "add of label 'new' has no text"),
        ([update("old", " ")], "update of label 'old' has no text"),
        ([Operation(op="delete", uid="old", text="x")], "delete of label 'old' has a text or attributes"),
    ],
)
def test_operations_that_make_no_sense(operations: list[Operation], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_operations(operations, {"old"}.__contains__)


def test_operations_that_follow_from_each_other() -> None:
    batch = [delete("old"), add("old"), update("old", "x"), add("new"), delete("new"), add("new")]
    check_operations(batch, {"old"}.__contains__)


WRITER = """
import json, random, sys
from xmcray.serving.label_log import DELETED, LabelLog, fold
from xmcray.serving.schema import Operation

state, url, seed = sys.argv[1:]
draw = random.Random(int(seed))
log = LabelLog(state, "m", upload_url=url, upload_every_s=0.001, segment_bytes=2000)
there = {uid for uid, label in fold(log.since(0)).items() if label is not DELETED}
while True:
    batch = []
    for _ in range(draw.choice([1, 1, 3])):
        uid = f"u{draw.randrange(8)}"
        op = draw.choice(["update", "delete"]) if uid in there else "add"
        there ^= {uid} if op != "update" else set()
        more = {} if op == "delete" else {"text": f"{seed} {draw.random()}"}
        if more and draw.random() < 0.5:
            more["attributes"] = {"n": draw.randrange(9)}
        batch.append({"op": op, "uid": uid, **more})
    print(json.dumps([log.last + 1, batch]), flush=True)
    print(json.dumps(log.append([Operation(**values) for values in batch])), flush=True)
"""


def test_nothing_acknowledged_is_lost_and_nothing_deleted_comes_back(tmp_path: Path) -> None:
    """A writer is killed at random moments until 100 operations were acknowledged."""
    draw, state, url = random.Random(0), tmp_path / "state", f"file://{tmp_path}/copy"
    sent: dict[int, dict[str, Any]] = {}
    acknowledged = kills = 0
    while acknowledged < 100:
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(state), url, str(kills)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            left, asked = draw.randint(1, 14), threading.Event()
            for line in writer.stdout:
                if line.endswith("\n"):
                    told = json.loads(line)
                    if isinstance(told, int):
                        acknowledged = told
                    else:
                        assert told[0] > acknowledged, "an acknowledged number was given again"
                        sent = {n: values for n, values in sent.items() if n < told[0]}
                        sent |= dict(enumerate(told[1], told[0]))
                left -= 1
                if left == 0:
                    asked.wait(draw.choice([0, draw.random() * 0.003]))  # somewhere in the next operation
                    writer.kill()
            assert writer.wait() == -9
        kills += 1
    assert kills >= 3
    expected: dict[str, tuple[str, dict[str, Any]]] = {}
    with LabelLog(state, "m", upload_url=url) as log:
        assert log.last >= acknowledged
        found = log.since(0)
        assert [(n, op.model_dump(exclude_none=True)) for n, op in found] == [
            (n, sent[n]) for n in range(1, log.last + 1)
        ]
        for values in (sent[n] for n, _ in found):
            uid = values["uid"]
            before = expected.pop(uid, ("", {}))[1]
            if values["op"] != "delete":
                expected[uid] = values["text"], values.get("attributes", before)
        living = {uid: label for uid, label in fold(found).items() if isinstance(label, Label)}
        assert {uid: (label.text, label.attributes or {}) for uid, label in living.items()} == expected
        assert living.keys() | {uid for uid, label in fold(found).items() if label is DELETED} == {
            operation.uid for _, operation in found
        }
    shutil.rmtree(state)
    with LabelLog(state, "m", upload_url=url) as log:
        assert log.since(0) == found
