"""What all readers share: rows, lines, limits and filter files.

A mistake in one row is a `BadRow`: it is reported, and the row is left out. A mistake of a whole
file is a `DataError`. Nothing here keeps more than one block of a file in memory.
"""

from __future__ import annotations

import bisect
import filecmp
import gzip
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from xmcray.errors import DataError
from xmcray.types import Int64Array

MAX_TEXT = 1_000_000  # characters of one text
MAX_LINE = 64 << 20  # bytes of one line, unpacked
FREE_BYTES = 4 << 20  # a file may unpack to this much whatever its packed size
MAX_RATIO = 200  # beyond that, unpacked bytes per packed byte; texts reach 30
_UTF8_MARK = b"\xef\xbb\xbf"  # the byte order mark that some editors write
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_Raw = TypeVar("_Raw")
_Parsed = TypeVar("_Parsed")

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
        uid: its name; its number in the raw files if they have no name for it.
        label_ids: rows of the label file, ascending, each once; empty for a label.
        relevance: one finite number per label id, or None if all are 1.
        row: position in the raw file, from 0, rejected rows counted: filter pairs and label ids
            refer to it.
        has_uid: whether the raw files have a name for it.
        has_zeros: whether its row of a label matrix stores zeros, which are no positives.
    """

    uid: str
    text: str
    label_ids: tuple[int, ...] = ()
    relevance: tuple[float, ...] | None = None
    row: int = 0
    has_uid: bool = True
    has_zeros: bool = False


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


@dataclass(frozen=True, slots=True)
class FileStart:
    """Where the rows of one file of a split begin.

    Attributes:
        path: the file.
        row: row number of its first record in the split.
        line: line of its first record.
    """

    path: Path
    row: int = 0
    line: int = 1


class Places:
    """Where rows of a split are. Its files are looked at when a row is first asked for.

    Args:
        read_files: gives the files of the split in order.
    """

    def __init__(self, read_files: Callable[[], Iterable[FileStart]]) -> None:
        self._read_files = read_files
        self._files: list[FileStart] = []

    def bad(self, row: int, reason: str) -> BadRow:
        """The report that a row is left out, with its file and line.

        Args:
            row: as in `Row`.
            reason: why.
        """
        self._files = self._files or list(self._read_files())
        # The last file that begins at the row or before it.
        number = bisect.bisect_right(self._files, row, key=lambda file: file.row) - 1
        file = self._files[number]
        return BadRow(str(file.path), file.line + row - file.row, reason)


OnBad = Callable[[BadRow], None]

Labels = tuple[tuple[int, ...], tuple[float, ...] | None]  # label ids and relevance, as in Row


class BadValue(Exception):  # noqa: N818 - a signal between a parser and its loop, never seen outside
    """Why a row cannot be used."""


def parsed(
    raw: Iterable[_Raw | BadValue], parse: Callable[[_Raw], _Parsed]
) -> Iterator[_Parsed | BadValue]:
    """Each item parsed. An item that cannot be parsed becomes the reason, and a reason stays one."""
    for item in raw:
        try:
            yield item if isinstance(item, BadValue) else parse(item)
        except BadValue as error:
            yield error


def rows_of(
    records: Iterable[_Raw | BadValue],
    path: Path,
    parse: Callable[[_Raw, int], Row],
    on_bad: OnBad,
    *,
    first_row: int = 0,
    first_line: int = 1,
) -> Iterator[Row]:
    """The valid rows of a file; `on_bad` gets each other one.

    Args:
        parse: makes a row of a record and its row number; raises BadValue.
        first_row: row number of the file's first record.
        first_line: line of the file's first record.
    """
    for number, record in enumerate(records):
        try:
            if isinstance(record, BadValue):
                raise record
            row = parse(record, first_row + number)
        except BadValue as error:
            on_bad(BadRow(str(path), first_line + number, str(error)))
        else:
            yield row


class Format(Protocol):
    """One layout of raw files."""

    @property
    def train(self) -> tuple[str, ...]:
        """Patterns, as `find` takes them, of the files that must be there."""
        ...

    @property
    def test(self) -> tuple[str, ...]:
        """Patterns of the files that make a test split: all of them are there, or none."""
        ...

    def labels(self, folder: Path, on_bad: OnBad) -> Iterator[Row]:
        """All labels in file order."""
        ...

    def queries(self, folder: Path, split: str, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
        """All queries of a split in file order."""
        ...

    def files(self, folder: Path, split: str) -> Iterable[FileStart]:
        """The files of the queries of a split, in order."""
        ...

    def shape(self, folder: Path, split: str) -> tuple[int, int]:
        """Rows of the split's file and rows of the label file, bad ones included."""
        ...


def folder_name(folder: Path) -> str:
    """The name of a folder; a link has its own one."""
    # "." and ".." are no names.
    return folder.name if folder.name not in ("", "..") else folder.resolve().name


def find(folder: Path, pattern: str) -> list[Path]:
    """Files for the first alternative of "a|b" that exists, as it is or with .gz.

    An alternative with `*` may match several files. They are sorted, numbers by their values: part-2
    comes before part-10.

    Raises:
        DataError: a file is there both as it is and with .gz, or with two of the suffixes that the
            pattern names; their contents may differ.
    """
    files = find_any(folder, pattern)
    for path in files:
        unpacked = path.name.removesuffix(".gz")
        names = {unpacked}
        for alternative in pattern.split("|"):
            if Path(alternative).stem == Path(unpacked).stem:
                names.add(Path(alternative).name)
        candidates = [file for name in sorted(names) for file in (name, f"{name}.gz")]
        for name in candidates:
            if name != path.name and path.with_name(name).is_file():
                raise DataError(
                    f"{folder} has {path.name} and {name}, expected one of them; take the other out"
                    " of the folder"
                )
    return files


def find_any(folder: Path, pattern: str) -> list[Path]:
    """Like `find`, for files that need not belong to the data set."""
    for name in pattern.split("|"):
        for candidate in (name, f"{name}.gz"):
            files = [path for path in folder.glob(candidate) if path.is_file()]
            if files:
                return sorted(files, key=natural_key)
    return []


def natural_key(path: Path) -> tuple[list[str | int], str]:
    """By which files are sorted: by name, and numbers in it by value."""
    # Every second piece is a number, so pieces at equal places are of one type.
    key: list[str | int] = [*re.split("([0-9]+)", path.name)]
    key[1::2] = [int(number) for number in key[1::2]]
    # Numbers may be equal up to zeros before them.
    return key, path.name


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
        DataError: missing, unreadable, truncated, UTF-16, a line above 64 MB, or a decompression bomb.
    """
    try:
        is_packed = path.suffix == ".gz"
        with path.open("rb") as packed, gzip.open(packed) if is_packed else packed as file:
            num_bytes = 0
            start = file.peek(len(_UTF8_MARK))
            if start.startswith(_UTF8_MARK):
                file.read(len(_UTF8_MARK))
            if start.startswith(_UTF16_MARKS):
                # Most of its lines would be valid UTF-8, with a zero after each letter.
                raise DataError(f"{path} is UTF-16, expected UTF-8; save it as UTF-8")
            while line := file.readline(MAX_LINE + 1):
                num_bytes += len(line)
                # Compared with what was read so far: a bomb is stopped where it begins.
                is_large = is_packed and num_bytes > FREE_BYTES
                if is_large and num_bytes > MAX_RATIO * packed.tell():
                    raise DataError(
                        f"{path} unpacks to more than {MAX_RATIO} times its size: a decompression bomb; "
                        "unpack it yourself if you trust it"
                    )
                if len(line) > MAX_LINE:
                    raise DataError(
                        f"{path} has a line of more than {MAX_LINE >> 20} MB; expected one row per line"
                    )
                yield line.removesuffix(b"\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} is not a complete gzip file ({error}); copy or download it again"
        ) from None
    except OSError as error:
        raise cannot_read(path, error) from None


def cannot_read(path: str | Path, error: OSError) -> DataError:
    """The error for a file that the system does not let us read."""
    reason = error.strerror or error
    return DataError(f"{path} cannot be read ({reason}); check the path and its rights")


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


def check_labels(ids: list[int], relevance: Sequence[float] | None, num_labels: int) -> Labels:
    """Label ids ascending and each once, with their relevance; None if all are 1.

    A label that is listed twice has the larger of its relevance values.

    Raises:
        BadValue: an id is out of range, a relevance is not a finite float32, or the lengths differ.
    """
    unique = tuple(sorted(set(ids)))
    # The ids are sorted, so the outermost ones decide.
    for label in (*unique[:1], *unique[-1:]):
        if not 0 <= label < num_labels:
            raise BadValue(
                f"label id {label} is out of range, there are {num_labels} labels in this folder"
                f" (0 to {num_labels - 1})"
            )
    if relevance is None:
        return unique, None
    if len(relevance) != len(ids):
        raise BadValue(f"{len(relevance)} relevance values for {len(ids)} labels")
    if relevance.count(1.0) == len(relevance):
        return unique, None
    # A label that is listed twice has the larger of its numbers.
    best: dict[int, float] = {}
    for label, value in zip(ids, relevance, strict=True):
        is_number = type(value) in (int, float)
        # NaN is in no range.
        if not is_number or not -_MAX_FLOAT32 <= value <= _MAX_FLOAT32:
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
        DataError: a line is not two integers, or names a row or label that does not exist; or there
            are several files, which differ.
    """
    files = find(folder, FILTER_NAMES[split])
    if not files:
        return np.empty((0, 2), np.int64)
    path = files[0]
    for name in FILTER_NAMES[split].split("|"):
        for other in find(folder, name):
            if other != path and not filecmp.cmp(path, other, shallow=False):
                raise DataError(
                    f"{folder} has {path.name} and {other.name}, expected one of them; take the other out"
                    " of the folder"
                )
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
        num_rows, num_labels = sizes
        for what, index, size in (
            ("row", row, num_rows),
            ("label", label, num_labels),
        ):
            if not 0 <= index < size:
                raise DataError(
                    f"{path}:{number}: names {what} {index}, but there are only {size}, counted from 0; "
                    f"is this the filter file of the {split} split?"
                )
        pairs.extend((row, label))
    return np.frombuffer(pairs, np.int64).reshape(-1, 2).copy()
