"""Operations on labels, and logs of them, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xmcray.serving.label_log import LabelLog
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
