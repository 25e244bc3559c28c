r"""The lines of a log: one for each commit, in the database and in the segments of its copy.

SHA JSON\n    32 hex digits of the JSON's SHA-256, and {"at", "first", "model", "operations"}

The first line of a log has no operations. It says of which model the log is and where it begins.
That of a label log also has "log", its random identity, and "base": the commit after which it
begins, if a bundle named one. Label logs of earlier versions have neither.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from xmcray.errors import StorageError
from xmcray.serving.schema import Operation

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Line:
    """One commit: the operations first, first + 1 ... last.

    Attributes:
        data: the line's bytes, with the newline.
        first: number of its first operation.
        at: Unix time of the commit, seconds.
        operations: the operations as JSON objects.
        log: identity of the log, if this is its first line.
        base: hash of the commit after which the log begins, if this is its first line.
    """

    data: bytes
    first: int
    at: float
    operations: Sequence[dict[str, Any]]
    log: str = ""
    base: str = ""

    @property
    def last(self) -> int:
        """Number of its last operation; `first` - 1 if it has none."""
        return self.first + len(self.operations) - 1

    @property
    def digest(self) -> bytes:
        """The hash in the line."""
        return self.data[:_DIGEST_BYTES]

    def after(self, number: int) -> list[Operation]:
        """The operations after `number`."""
        num_before = max(0, number + 1 - self.first)
        return [Operation.model_validate(values) for values in self.operations[num_before:]]


def encode_line(
    model: str,
    first: int,
    at: float,
    operations: Sequence[BaseModel],
    log: str = "",
    base: str = "",
) -> Line:
    """The line of a commit.

    Args:
        model: name of the model.
        first: number of the first operation.
        at: Unix time of the commit, seconds.
        operations: label operations or events; none in the first line of a log.
        log: see `Line`.
        base: see `Line`.
    """
    values = [operation.model_dump(exclude_none=True) for operation in operations]
    body: dict[str, Any] = {"at": at, "first": first, "model": model, "operations": values}
    if log:
        body["log"] = log
    if base:
        body["base"] = base
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    # JSON escapes newlines in strings: a line has exactly one, at its end.
    return Line(_digest(text) + b" " + text + b"\n", first, at, values, log, base)


def first_line(model: str, begin: int, log: str = "", base: str = "") -> Line:
    """The first line of a log.

    Args:
        model: name of the model.
        begin: number of the operation after which the log begins.
        log: see `Line`.
        base: see `Line`.
    """
    return encode_line(model, begin + 1, 0.0, [], log, base)


def parse_line(data: bytes, source: str, model: str) -> Line:
    """Reads one line.

    Args:
        data: the line's bytes, with the newline.
        source: place of the line, for messages.
        model: name of the model that the line must have.
    Raises:
        StorageError: the line is damaged or incomplete, or of another model.
    """
    digest, _, text = data.removesuffix(b"\n").partition(b" ")
    if not data.endswith(b"\n") or digest != _digest(text):
        raise StorageError(f"{source}: the line is damaged (its hash differs); restore the file")
    body = json.loads(text)
    if body["model"] != model:
        raise StorageError(
            f"{source} is of the label log of model {body['model']!r}, expected {model!r};"
            " give each model its own folder"
        )
    return Line(
        data,
        body["first"],
        body["at"],
        body["operations"],
        body.get("log", ""),
        body.get("base", ""),
    )


def split_lines(data: bytes, source: str, model: str) -> Iterator[Line]:
    """All lines of a file.

    Args:
        data: the file's bytes.
        source: name of the file, for messages.
        model: name of the model that the lines must have.
    Raises:
        StorageError: as `parse_line`; names the byte at which the line begins.
    """
    offset = 0
    # Splits at \n only, unlike bytes.splitlines.
    for line in io.BytesIO(data):
        yield parse_line(line, f"{source}, byte {offset}", model)
        offset += len(line)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:_DIGEST_BYTES].encode()
