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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from operations import ALL, BATCHES, add, delete, files, written

from xmcray.errors import StorageError
from xmcray.serving.label_log import LabelLog, Lag
from xmcray.serving.log_lines import scan


def test_what_was_appended_is_read_by_number(tmp_path: Path) -> None:
    written(tmp_path)
    for _ in range(2):  # also after nothing was done
        with LabelLog(tmp_path, "m") as log:
            assert (log.begin, log.last) == (0, 6)
            assert [log.since(number) for number in range(7)] == [
                ALL[number:] for number in range(7)
            ]
            assert [log.since(0, limit)[-1][0] for limit in (1, 2, 3, 5, 6, 9)] == [
                2,
                2,
                3,
                3,
                6,
                6,
            ]
            assert log.since(1, 1) == ALL[1:2]
            with pytest.raises(
                StorageError, match=r"label log of model 'm' ends with operation 6, not yet 7"
            ):
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
        unwritten = (0, 1, len(data) - stop)[
            stop % 3
        ]  # blocks that the file has, and that hold nothing yet
        for zeros in {0, unwritten}:
            assert scan(data[:stop] + bytes(zeros), "a log", "m", 1, unfinished=True)[1] == start
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
    with pytest.raises(
        StorageError, match=r"000000000001\.log, byte (\d+): the line is damaged"
    ) as caught:
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
        (
            lambda paths: paths[1].unlink(),
            r"0003\.log begins with operation 3, expected 2: a file is missing",
        ),
        (cut, r"0002\.log, byte 0: the line is damaged"),
        (lambda paths: paths[1].write_bytes(b""), r"0003\.log begins with operation 3, expected 2"),
        (
            lambda paths: paths[1].write_bytes(paths[1].read_bytes() + b"\0"),
            r"0002\.log, byte \d+: the line is dam",
        ),
        (
            lambda paths: paths[1].write_bytes(paths[2].read_bytes()),
            r"found operation 3, expected 2",
        ),
        (
            lambda paths: paths[3].rename(paths[3].with_name("000000000009.log")),
            "begins with operation 9, expected 4",
        ),
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
    with pytest.raises(
        StorageError, match="is the label log of model 'm', expected 'n'; give each its own folder"
    ):
        LabelLog(tmp_path, "n")
    with pytest.raises(
        StorageError, match="ends with operation 1, the bundle holds 5 of model 'm'"
    ):
        LabelLog(tmp_path, "m", start_after=5)
    with LabelLog(tmp_path, "m", start_after=1) as log:
        assert log.append([add("b")]) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_refuses_and_leaves_no_trace(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        with pytest.raises(
            StorageError, match=r"no space left while writing .*0001\.log: the disk is full"
        ):
            log.append(BATCHES[1])
        assert (log.last, log.since(0)) == (2, ALL[:2])
        monkeypatch.undo()
        assert log.append(BATCHES[1]) == 3
    with LabelLog(tmp_path, "m") as log:
        assert log.since(0) == ALL[:3]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            "fsync",
            OSError(errno.EIO, "Input/output error"),
            "could not be written .*; see to the disk and restart",
        ),
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


def test_a_first_append_syncs_the_file_and_every_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, synced = os.fsync, list[str]()

    def fsync(file: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{file}").readlink()))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    state = tmp_path / "new" / "state"
    with LabelLog(state, "m", segment_bytes=1) as log:
        assert {str(path) for path in (tmp_path, state.parent, state, state / "label_log")} <= set(
            synced
        )
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
        assert all(
            (found[n - 1].uid, found[n].uid) == (f"u{i}", f"u{i}") for i, n in numbers.items()
        )
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
        with pytest.raises(
            StorageError,
            match=r"operations 3 to 6 of model 'm' are archived and not in .*; use a bun",
        ):
            log.since(2)
        with pytest.raises(StorageError, match="operations 1 to 6"):
            log.since(0)
        shutil.rmtree(archive)
        with pytest.raises(StorageError, match="operations 6 to 6"):
            log.since(5)


WRITER = """
import json, random, sys
from xmcray.serving.label_log import LabelLog
from xmcray.serving.schema import Operation

state, url, seed = sys.argv[1:]
draw = random.Random(int(seed))
log = LabelLog(state, "m", upload_url=url, upload_every_s=0.001, segment_bytes=2000)
last = {operation.uid: operation.op for _, operation in log.since(0)}
there = {uid for uid, op in last.items() if op != "delete"}
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
            [sys.executable, "-c", WRITER, str(state), url, str(kills)],
            stdout=subprocess.PIPE,
            text=True,
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
                    asked.wait(
                        draw.choice([0, draw.random() * 0.003])
                    )  # somewhere in the next operation
                    writer.kill()
            assert writer.wait() == -9
        kills += 1
    assert kills >= 3
    with LabelLog(state, "m", upload_url=url) as log:
        assert log.last >= acknowledged
        found = log.since(0)
        assert [(n, op.model_dump(exclude_none=True)) for n, op in found] == [
            (n, sent[n]) for n in range(1, log.last + 1)
        ]
    shutil.rmtree(state)
    with LabelLog(state, "m", upload_url=url) as log:
        assert log.since(0) == found
