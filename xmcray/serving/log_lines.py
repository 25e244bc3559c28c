r"""The lines of a label log: one for each commit, with its hash and length, and what they add up to.

    SHA LENGTH JSON\n    32 hex digits of the JSON's SHA-256, its bytes, and {"at", "first", "model", "operations"}

A line is complete or damaged, except the last one of a log that is still written to: a crash leaves its first bytes,
perhaps followed by zeros where the file system had not written yet. That is no line; a complete line that a flipped
bit changed is damage, wherever it is, and no line is ever skipped.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from xmcray.errors import DataError, StorageError
from xmcray.serving.schema import Attributes, Operation

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
    body = _read(data, line.source, line.offset)
    return list(enumerate(map(Operation.model_validate, body["operations"]), body["first"]))


def scan(data: bytes, source: str, model: str, first: int, unfinished: bool = False) -> tuple[list[Line], int]:
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
        body = _read(data[offset : stop or end], source, offset)
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


def _read(data: bytes, source: str, offset: int) -> Mapping[str, Any]:
    match = _LINE.fullmatch(data)
    if not match or len(match[3]) != int(match[2]) or _digest(match[3]) != match[1].decode():
        raise StorageError(f"{source}, byte {offset}: the line is damaged (its hash differs); restore the file")
    body: Mapping[str, Any] = json.loads(match[3])
    return body


def _is_begun(data: bytes) -> bool:
    """Whether these are the first bytes of a line, and not all of them."""
    match = _BEGUN.fullmatch(data)
    return match is not None and (match[1] is None or len(match[2]) <= int(match[1]))


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]


class Deleted(enum.Enum):
    """Tells a label that was deleted from one that no operation names."""

    DELETED = "deleted"


DELETED: Final = Deleted.DELETED


@dataclass(frozen=True, slots=True)
class Label:
    """What operations made of a label; attributes None: those that the bundle gives it, if it has the label."""

    text: str
    attributes: Attributes | None


State = dict[str, Label | Deleted]


def fold(operations: Iterable[tuple[int, Operation]], start_after: int = 0, state: State | None = None) -> State:
    """What numbered operations, in order, come to: the last word on each uid they name, for any bundle.

    To apply it to a bundle that holds some of them already does no harm: a label that the bundle has takes the text
    and the attributes given here, one that it lacks is added, and one that is deleted and not there is no mistake.

    Args:
        start_after: number of the last operation that the bundle holds; those up to it are passed over.
        state: what came before them; it is not changed.
    Raises:
        DataError: an addition or update has no text; `check_operations` keeps such a one out of a log.
    """
    state = dict(state or {})
    for number, operation in operations:
        if number <= start_after:
            continue
        uid, attributes = operation.uid, operation.attributes
        if operation.op == "delete":
            state[uid] = DELETED
            continue
        if operation.text is None:
            raise DataError(f"operation {number}: {operation.op} of label {uid[:80]!r} has no text")
        before = state.get(uid)
        if attributes is None and before is not None:
            attributes = before.attributes if isinstance(before, Label) else {}
        state[uid] = Label(operation.text, attributes)
    return state


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
            raise DataError(f"{what}, which is {'there already; update it' if added else 'not there; add it first'}")
        if operation.op == "delete" and (operation.text is not None or operation.attributes is not None):
            raise DataError(f"{what} has a text or attributes, expected the uid alone")
        if operation.op != "delete" and not (operation.text or "").strip():
            raise DataError(f"{what} has no text, expected some: its vector is made of it")
        changed[uid] = operation.op != "delete"


def number_in(about: Mapping[str, Any], model: str) -> int:
    """Number of the last operation that a bundle holds by its manifest's `about`; 0 if none of this model's log."""
    held = about.get("label_log") or {}
    return int(held["number"]) if held.get("model") == model else 0
