"""Operations on labels, logs of them, and what a crash or a disk can do to these logs. For tests."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from xmcray.errors import StorageError
from xmcray.serving.label_log import LabelLog
from xmcray.serving.schema import Operation


def operations_after(log: LabelLog, number: int, **options: int) -> list[Operation]:
    """The operations of all commits that `LabelLog.commits_after` reads."""
    operations: list[Operation] = []
    for commit in log.commits_after(number, **options):
        operations += commit.operations
    return operations


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
ALL = [operation for batch in BATCHES for operation in batch]
COMMITS = (ALL[:0], ALL[:2], ALL[:3], ALL)  # what there is after each batch
Files = dict[str, bytes]


def written(state: Path) -> Files:
    """Writes the batches and closes the log; returns the database."""
    with LabelLog(state, "m") as log:
        for batch, after in zip(BATCHES, COMMITS[1:], strict=True):
            assert log.append(batch) == len(after)
    return database_files(state)


def interrupted(state: Path) -> Files:
    """Writes the batches; returns the database and its write-ahead log as a kill leaves them."""
    with LabelLog(state, "m") as log:
        for batch in BATCHES:
            log.append(batch)
        return database_files(state)


def database_files(state: Path) -> Files:
    """Contents of the database and, if there is one, of its write-ahead log."""
    names = ("label_log.sqlite", "label_log.sqlite-wal")
    return {name: (state / name).read_bytes() for name in names if (state / name).exists()}


def opened(state: Path, files: Files) -> list[Operation] | str:
    """The operations of a log with these files, or why it is refused; then the files are as they were."""
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir()
    for name, data in files.items():
        (state / name).write_bytes(data)
    try:
        with LabelLog(state, "m") as log:
            return operations_after(log, 0)
    except StorageError as error:
        refusal = str(error)
    kept = {name: (state / name).read_bytes() for name in files}
    assert kept == files, "bad input never loses good data"
    assert "\n" not in refusal
    return refusal


def flipped(files: Files, name: str, bit: int) -> Files:
    """The files with one bit of one file changed."""
    data = bytearray(files[name])
    data[bit // 8] ^= 1 << bit % 8
    return {**files, name: bytes(data)}


WRITER = """
import json, random, sys
from xmcray.serving import log_upload
from xmcray.serving.label_log import LabelLog
from xmcray.serving.schema import Operation

state, url, seed = sys.argv[1:]
draw = random.Random(int(seed))
log_upload.SEGMENT_BYTES = 2000
log = LabelLog(state, "m", upload_url=url, upload_every_s=0.001)
last = {}
for commit in log.commits_after(0):
    last |= {operation.uid: operation.op for operation in commit.operations}
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


def kill_writers(folder: Path, kills: int, seed: int = 0) -> int:
    """Kills writers of one log at random moments, and checks what is on the disk and in the copy.

    Returns:
        The number of acknowledged operations.
    Raises:
        AssertionError: an operation was lost, or one came back that was not acknowledged.
    """
    draw = random.Random(seed)
    state = folder / "state"
    url = f"file://{folder}/copy"
    sent: dict[int, dict[str, Any]] = {}
    acknowledged = 0
    for kill in range(kills):
        command = [sys.executable, "-c", WRITER, str(state), url, str(kill)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            lines_left = draw.randint(1, 60)
            for line in writer.stdout:
                if line.endswith("\n"):
                    message = json.loads(line)
                    if isinstance(message, int):
                        acknowledged = message
                    else:
                        first, batch = message
                        assert first > acknowledged, "an acknowledged number was given again"
                        sent = {number: op for number, op in sent.items() if number < first}
                        sent |= dict(enumerate(batch, first))
                lines_left -= 1
                if lines_left == 0:
                    # Somewhere in the next operation.
                    threading.Event().wait(draw.choice([0, draw.random() * 0.003]))
                    writer.kill()
            assert writer.wait() == -9
    with LabelLog(state, "m", upload_url=url) as log:
        assert log.last >= acknowledged
        operations = operations_after(log, 0)
    expected = [sent[number] for number in range(1, len(operations) + 1)]
    assert [operation.model_dump(exclude_none=True) for operation in operations] == expected
    shutil.rmtree(state)
    with LabelLog(state, "m", upload_url=url) as log:
        assert operations_after(log, 0) == operations, "the copy"
    return acknowledged
