"""What all readers share: the row they give, the lines they read, the limits they keep, the filter files.

A mistake in one row is a `BadRow`: reported, and the row is left out. A mistake of a whole file is a `DataError`.
Nothing here keeps more than one block of a file in memory.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from xmcray.errors import DataError
from xmcray.types import Int64Array

MAX_TEXT = 1_000_000  # characters of one text
MAX_LINE = 64 << 20  # bytes of one line, unpacked
FREE_BYTES = 256 << 20  # a file may unpack to this much whatever its packed size
MAX_RATIO = 1000  # beyond that, unpacked bytes per packed byte
BLOCK = 1 << 18
_MAX_FLOAT32 = float(np.finfo(np.float32).max)

FILTER_NAMES = {  # the spellings found in the wild (NGAME, DEXML, Renée, ECLARE, and the typo of NGAME's README)
    "train": "filter_labels_train.txt|filter_labels_trn.txt|trn_filter_labels.txt",
    "test": "filter_labels_test.txt|filter_labels_tst.txt|tst_filter_labels.txt|filter_labels_text.txt"
    "|filter_labels.txt",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A query or a label, validated.

    Attributes:
        label_ids: rows of the label file, ascending, each once; empty for a label.
        relevance: one finite number per label id, or None where all are 1.
        row: position in the raw file, from 0, rejected rows counted: filter pairs and label ids refer to it.
    """

    uid: str
    text: str
    label_ids: tuple[int, ...] = ()
    relevance: tuple[float, ...] | None = None
    row: int = 0


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that was left out: file, line (from 1; for Parquet and Arrow the row within the file) and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


OnBad = Callable[[BadRow], None]


class BadValue(Exception):  # noqa: N818 - a signal between a parser and its loop, never seen outside
    """Why a row cannot be used."""


class Format(Protocol):
    """One layout of raw files."""

    @property
    def train(self) -> tuple[str, ...]:
        """Patterns, as `find` takes them, of the files that must be there."""
        ...

    @property
    def test(self) -> tuple[str, ...]:
        """Patterns of the files that make a test split."""
        ...

    def labels(self, folder: Path, on_bad: OnBad) -> Iterator[Row]:
        """All labels in file order."""
        ...

    def queries(self, folder: Path, split: str, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
        """All queries of a split in file order."""
        ...

    def shape(self, folder: Path, split: str) -> tuple[int, int]:
        """Rows of the split's file and rows of the label file, bad ones included."""
        ...


def find(folder: Path, pattern: str) -> list[Path]:
    """Files for the first alternative of "a|b" that exists, as it is or with .gz; `*` may match several, sorted."""
    for name in pattern.split("|"):
        for candidate in (name, f"{name}.gz"):
            if files := [path for path in sorted(folder.glob(candidate)) if path.is_file()]:
                return files
    return []


def find_one(folder: Path, pattern: str) -> Path:
    """Like `find`, for a file that must be there.

    Raises:
        DataError: it is not.
    """
    if files := find(folder, pattern):
        return files[0]
    raise DataError(
        f"{folder} has no {pattern.replace('|', ' or ')} (also looked for .gz); add the file"
    )


def read_lines(path: Path) -> Iterator[bytes]:
    r"""Lines of a plain or gzip file without their "\n"; a last line may lack it.

    Raises:
        DataError: missing, unreadable, truncated, a line above 64 MB, or a decompression bomb.
    """
    packed = path.suffix == ".gz"
    try:
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            limit = max(FREE_BYTES, MAX_RATIO * path.stat().st_size) if packed else None
            yield from _split(file.read, path, limit)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} is not a complete gzip file ({error}); copy or download it again"
        ) from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}); check the path and its rights"
        ) from None


def _split(read: Callable[[int], bytes], path: Path, limit: int | None) -> Iterator[bytes]:
    total, pending, pending_size = 0, [b""], 0
    while block := read(BLOCK):
        if total == 0:
            block = block.removeprefix(b"\xef\xbb\xbf")
        total += len(block)
        if limit is not None and total > limit:
            raise DataError(
                f"{path} unpacks to more than {MAX_RATIO} times its size: a decompression bomb; "
                "unpack it yourself if you trust it"
            )
        parts = block.split(b"\n")
        if len(parts) > 1:
            pending.append(parts[0])
            parts[0] = b"".join(pending)
            yield from parts[:-1]
            pending, pending_size = [], 0
        pending.append(parts[-1])
        pending_size += len(parts[-1])
        if pending_size > MAX_LINE:
            raise DataError(
                f"{path} has a line of more than {MAX_LINE >> 20} MB; expected one row per line"
            )
    if last := b"".join(pending):
        yield last


def decode(line: bytes) -> str:
    """A line as text.

    Raises:
        BadValue: it is not UTF-8.
    """
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise BadValue(
            f"not UTF-8 (byte {line[error.start]:#04x} at position {error.start})"
        ) from None


def check_text(text: str, what: str = "text") -> str:
    """`text` if it can be stored.

    Raises:
        BadValue: too long, or half of a surrogate pair, which no UTF-8 can hold.
    """
    if len(text) > MAX_TEXT:
        raise BadValue(f"{what} has {len(text):,} characters, the limit is {MAX_TEXT:,}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadValue(
                f"{what} is not UTF-8 (lone surrogate at position {error.start})"
            ) from None
    return text


def check_labels(
    ids: list[int], relevance: Sequence[float] | None, num_labels: int
) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
    """Label ids ascending and each once, with their relevance (the larger of two); None if all are 1.

    Raises:
        BadValue: an id is out of range, a relevance is not a finite float32, or the lengths differ.
    """
    unique = tuple(sorted(set(ids)))
    if unique and not 0 <= unique[0] <= unique[-1] < num_labels:
        wrong = unique[0] if unique[0] < 0 else unique[-1]
        raise BadValue(
            f"label id {wrong} is out of range, there are {num_labels} labels (0 to {num_labels - 1})"
        )
    if relevance is None:
        return unique, None
    if len(relevance) != len(ids):
        raise BadValue(f"{len(relevance)} relevance values for {len(ids)} labels")
    if relevance.count(1.0) == len(relevance):
        return unique, None
    best: dict[int, float] = {}
    for label, value in zip(ids, relevance, strict=True):
        if type(value) not in (int, float) or not -_MAX_FLOAT32 <= value <= _MAX_FLOAT32:
            raise BadValue(f"relevance {str(value)[:40]} of label {label} is not a finite number")
        best[label] = max(float(value), best.get(label, -_MAX_FLOAT32))
    return unique, tuple(best[label] for label in unique)


def read_filters(folder: Path, split: str, shape: Callable[[], tuple[int, int]]) -> Int64Array:
    """Pairs (row, label) of the split's filter file; none if there is no such file.

    Args:
        shape: gives the number of rows of the split and of labels; asked only if there are pairs.

    Returns:
        int64 [pairs, 2].

    Raises:
        DataError: a line is not two integers, or names a row or label that does not exist.
    """
    pairs = array("q")
    rows = labels = -1
    for path in find(folder, FILTER_NAMES[split])[:1]:
        for number, line in enumerate(read_lines(path), 1):
            if not (parts := line.split()):
                continue
            if rows < 0:
                rows, labels = shape()
            try:
                row, label = map(int, parts)
            except ValueError:
                found = line[:40].decode(errors="replace")
                raise DataError(
                    f"{path}:{number}: found {found!r}, expected a row and a label id"
                ) from None
            if not (0 <= row < rows and 0 <= label < labels):
                what, there = (
                    (f"row {row}", rows) if not 0 <= row < rows else (f"label {label}", labels)
                )
                raise DataError(
                    f"{path}:{number}: names {what}, but there are only {there}, counted from 0; "
                    f"is this the filter file of the {split} split?"
                )
            pairs.extend((row, label))
    return np.frombuffer(pairs, np.int64).reshape(-1, 2).copy()
