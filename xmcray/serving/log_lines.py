r"""The lines of a label log: one for each commit, with its hash and length, and what they add up to.

    SHA LENGTH JSON\n    32 hex digits of the JSON's SHA-256, its bytes, and {"at", "first", "model", "operations"}

A line is complete or damaged, except the last one of a log that is still written to: a crash leaves its first bytes,
perhaps followed by zeros where the file system had not written yet. That is no line; a complete line that a flipped
bit changed is damage, wherever it is, and no line is ever skipped.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from xmcray.errors import DataError, StorageError
from xmcray.serving.schema import Operation

_LINE = re.compile(rb"([0-9a-f]{32}) ([0-9]+) (.*)\n", re.DOTALL)
_BEGUN = re.compile(rb"[0-9a-f]{0,31}|[0-9a-f]{32}(?: [0-9]*| ([0-9]+) (.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Line:
    """Where a line is, and what it holds: the operations first, first + 1 ... last, accepted at a time (Unix)."""

    source: str
    offset: int
    size: int
    first: int
    last: int
    at: float


def encode(model: str, first: int, at: float, operations: Sequence[Operation]) -> bytes:
    """One line with the operations first, first + 1 ...; at least one."""
    held = [operation.model_dump(exclude_none=True) for operation in operations]
    body = {"at": at, "first": first, "model": model, "operations": held}
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return f"{_digest(text)} {len(text)} ".encode() + text + b"\n"


def decode(data: bytes, line: Line) -> list[tuple[int, Operation]]:
    """The numbered operations of one line; `data` are its bytes.

    Raises:
        StorageError: they are others than when the log was opened.
    """
    body = _parse(data, line.source, line.offset)
    return list(enumerate(map(Operation.model_validate, body["operations"]), body["first"]))


def scan(
    data: bytes, source: str, model: str, first: int, unfinished: bool = False
) -> tuple[list[Line], int]:
    """All lines of a file, and the number of bytes that they fill.

    Args:
        source: what messages call the file.
        first: number of the first operation.
        unfinished: a write may have been interrupted; what it left is not among the bytes counted.
    Raises:
        StorageError: a line is damaged, numbered otherwise, or of another model; naming file and offset.
    """
    lines: list[Line] = []
    # a line ends in \n, so zeros at the end are blocks that were never written
    end, offset = len(data.rstrip(b"\0") if unfinished else data), 0
    while offset < end:
        stop = data.find(b"\n", offset, end) + 1
        if not stop and unfinished and _is_begun(data[offset:end]):
            break
        body = _parse(data[offset : stop or end], source, offset)
        if body["model"] != model:
            raise StorageError(
                f"{source} is the label log of model {body['model']!r}, expected {model!r}; give each its own folder"
            )
        if body["first"] != first:
            raise StorageError(
                f"{source}, byte {offset}: found operation {body['first']}, expected {first}: some are missing;"
                " restore the file"
            )
        last = first + len(body["operations"]) - 1
        lines.append(Line(source, offset, stop - offset, first, last, body["at"]))
        first, offset = last + 1, stop
    return lines, offset


def read(lines: Sequence[Line]) -> Iterator[tuple[Line, bytes]]:
    """Lines of local files with their bytes."""
    for source, group in groupby(lines, key=lambda line: line.source):
        with Path(source).open("rb") as file:
            for line in group:
                file.seek(line.offset)
                yield line, file.read(line.size)


def after(lines: Sequence[Line], number: int) -> int:
    """Place of the first line with an operation after `number`."""
    return bisect_left(lines, number + 1, key=lambda line: line.last)


def _parse(data: bytes, source: str, offset: int) -> Mapping[str, Any]:
    match = _LINE.fullmatch(data)
    if not match or len(match[3]) != int(match[2]) or _digest(match[3]) != match[1].decode():
        raise StorageError(
            f"{source}, byte {offset}: the line is damaged (its hash differs); restore the file"
        )
    body: Mapping[str, Any] = json.loads(match[3])
    return body


def _is_begun(data: bytes) -> bool:
    """Whether these are the first bytes of a line, and not all of them."""
    match = _BEGUN.fullmatch(data)
    return match is not None and (match[1] is None or len(match[2]) <= int(match[1]))


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]


def check_operations(operations: Sequence[Operation], known: Callable[[str], bool]) -> None:
    """Whether operations, one after the other, make sense where the labels are `known`; asked before `append`.

    Raises:
        DataError: a label is added that is there, one is updated or deleted that is not, or there is no text.
    """
    changed: dict[str, bool] = {}
    for place, operation in enumerate(operations, 1):
        uid, added = operation.uid, operation.op == "add"
        what = f"operation {place} of {len(operations)}: {operation.op} of label {uid[:80]!r}"
        if changed.get(uid, known(uid)) == added:
            raise DataError(
                f"{what}, which is {'there already; update it' if added else 'not there; add it first'}"
            )
        if operation.op == "delete" and (
            operation.text is not None or operation.attributes is not None
        ):
            raise DataError(f"{what} has a text or attributes, expected the uid alone")
        only_attributes = (
            operation.op == "update" and operation.text is None and operation.attributes is not None
        )
        if operation.op != "delete" and not only_attributes and not (operation.text or "").strip():
            raise DataError(f"{what} has no text, expected some: its vector is made of it")
        changed[uid] = operation.op != "delete"


def number_in(about: Mapping[str, Any], model: str) -> int:
    """Number of the last operation that a bundle holds by its manifest's `about`; 0 if none of this model's log."""
    held = about.get("label_log") or {}
    return int(held["number"]) if held.get("model") == model else 0
