"""What all readers share: rows, lines, limits and filter files.

A mistake in one row is a `BadRow`: it is reported, and the row is left out. A mistake of a whole
file is a `DataError`. Nothing here keeps more than one block of a file in memory.
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

# Spellings of public releases: NGAME, DEXML, Renée, ECLARE, and the typo of NGAME's README.
FILTER_NAMES = {
    "train": "filter_labels_train.txt|filter_labels_trn.txt|trn_filter_labels.txt",
    "test": "filter_labels_test.txt|filter_labels_tst.txt|tst_filter_labels.txt|filter_labels_text.txt"
    "|filter_labels.txt",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A query or a label, validated.

    Attributes:
        label_ids: rows of the label file, ascending, each once; empty for a label.
        relevance: one finite number per label id, or None if all are 1.
        row: position in the raw file, from 0, rejected rows counted: filter pairs and label ids
            refer to it.
    """

    uid: str
    text: str
    label_ids: tuple[int, ...] = ()
    relevance: tuple[float, ...] | None = None
    row: int = 0


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that was left out.

    Attributes:
        file: path of the raw file.
        line: from 1; for Parquet and Arrow the row within the file.
        reason: why.
    """

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
    """Files for the first alternative of "a|b" that exists, as it is or with .gz.

    An alternative with `*` may match several files, which are sorted.
    """
    for name in pattern.split("|"):
        for candidate in (name, f"{name}.gz"):
            if files := [path for path in sorted(folder.glob(candidate)) if path.is_file()]:
                return files
    return []


def find_one(folder: Path, pattern: str) -> Path:
    """Like `find`, for a file that must be there.

    Raises:
        DataError: it is not there.
    """
    if files := find(folder, pattern):
        return files[0]
    raise DataError(
        f"{folder} has no {pattern.replace('|', ' or ')} (also looked for .gz); add the file"
    )


def read_lines(path: Path) -> Iterator[bytes]:
    r"""Lines of a plain or gzip file without their "\n"; the last line may lack it.

    Raises:
        DataError: missing, unreadable, truncated, a line above 64 MB, or a decompression bomb.
    """
    try:
        if path.suffix == ".gz":
            limit = max(FREE_BYTES, MAX_RATIO * path.stat().st_size)
            with gzip.open(path, "rb") as file:
                yield from _split(_limited_blocks(file.read, path, limit), path)
        else:
            with path.open("rb") as file:
                yield from _split(iter(lambda: file.read(BLOCK), b""), path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} is not a complete gzip file ({error}); copy or download it again"
        ) from None
    except OSError as error:
        raise cannot_read(path, error) from None


def cannot_read(path: Path, error: OSError) -> DataError:
    """The error for a file that the system does not let us read."""
    reason = error.strerror or error
    return DataError(f"{path} cannot be read ({reason}); check the path and its rights")


def _limited_blocks(read: Callable[[int], bytes], path: Path, limit: int) -> Iterator[bytes]:
    """Blocks of an unpacked file, unless it unpacks to more than `limit` bytes."""
    total = 0
    while block := read(BLOCK):
        total += len(block)
        if total > limit:
            raise DataError(
                f"{path} unpacks to more than {MAX_RATIO} times its size: a decompression bomb; "
                "unpack it yourself if you trust it"
            )
        yield block


def _split(blocks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """Lines of a file that is read in blocks."""
    # The line that the last block left unfinished, in pieces: joining them once, when the line
    # ends, keeps a long line from being copied with every block.
    pieces: list[bytes] = []
    num_bytes = 0
    is_first = True
    for block in blocks:
        if is_first:
            block = block.removeprefix(b"\xef\xbb\xbf")  # the byte order mark of UTF-8
            is_first = False
        first, *others = block.split(b"\n")
        pieces.append(first)
        num_bytes += len(first)
        if others:
            yield b"".join(pieces)
            unfinished = others.pop()
            yield from others
            pieces = [unfinished]
            num_bytes = len(unfinished)
        if num_bytes > MAX_LINE:
            raise DataError(
                f"{path} has a line of more than {MAX_LINE >> 20} MB; expected one row per line"
            )
    if last := b"".join(pieces):
        yield last


def decode(line: bytes) -> str:
    """A line as text.

    Raises:
        BadValue: it is not UTF-8.
    """
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise BadValue(f"not UTF-8 (byte {byte:#04x} at position {error.start})") from None


def check_text(text: str, what: str = "text") -> str:
    """`text` if it can be stored.

    Raises:
        BadValue: too long, or half of a surrogate pair, which UTF-8 cannot encode.
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
    """Label ids ascending and each once, with their relevance; None if all are 1.

    A label that is listed twice has the larger of its relevance values.

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
        shape: gives the number of rows of the split and of labels; called only if there are pairs.

    Returns:
        int64 [pairs, 2].

    Raises:
        DataError: a line is not two integers, or names a row or label that does not exist.
    """
    files = find(folder, FILTER_NAMES[split])
    if not files:
        return np.empty((0, 2), np.int64)
    path = files[0]
    sizes = None
    pairs = array("q")  # 16 bytes per pair, where a list of tuples would take 120
    for number, line in enumerate(read_lines(path), 1):
        numbers = line.split()
        if not numbers:
            continue
        try:
            row, label = map(int, numbers)
        except ValueError:
            start = line[:40].decode(errors="replace")
            raise DataError(
                f"{path}:{number}: found {start!r}, expected a row and a label id"
            ) from None
        sizes = sizes or shape()
        for what, index, size in (("row", row, sizes[0]), ("label", label, sizes[1])):
            if not 0 <= index < size:
                raise DataError(
                    f"{path}:{number}: names {what} {index}, but there are only {size}, counted from 0; "
                    f"is this the filter file of the {split} split?"
                )
        pairs.extend((row, label))
    return np.frombuffer(pairs, np.int64).reshape(-1, 2).copy()
