"""Sparse matrices row by row: `rows cols` text files, scipy's npz, and the bag-of-words train.txt.

No pickle is read. The shape that an npz member declares is compared with the member's size before
memory is allocated for it.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.sparse

from xmcray.data.formats.base import (
    FREE_BYTES,
    MAX_RATIO,
    BadValue,
    cannot_read,
    parsed,
    read_lines,
)
from xmcray.errors import DataError, one_line
from xmcray.types import spans

Entries = tuple[list[int], list[float]]  # column ids and values of a row, as the file orders them
_ROWS_AT_ONCE = 4096
# numpy's letters for the types that an array of an npz file may have: integers, or any numbers.
_KINDS = {"indptr.npy": "iu", "indices.npy": "iu", "shape.npy": "iu", "data.npy": "iufb"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A sparse matrix that can be read once.

    Attributes:
        path: its file.
        shape: rows and columns.
        rows: not read yet; a bad row is yielded as the reason.
        first_line: line of row 0 in the file.
    """

    path: Path
    shape: tuple[int, int]
    rows: Iterator[Entries | BadValue]
    first_line: int


def open_matrix(path: Path) -> Matrix:
    """Opens `.npz` (scipy CSR or CSC) or a text matrix with a header "rows cols".

    Raises:
        DataError: unreadable, or not such a matrix.
    """
    if path.suffix == ".npz":
        matrix = load_npz(path)
        return Matrix(path, matrix.shape, _npz_rows(matrix), 1)
    # The iterator goes on after the header: the rows are what is left of the file.
    lines = read_lines(path)
    rows, cols = read_header(path, lines, ("rows", "columns"))
    return Matrix(path, (rows, cols), parsed(lines, parse_entries), 2)


def open_bag(path: Path, part: Literal["features", "labels"]) -> Matrix:
    """One of the two matrices in a bag-of-words file.

    The file has a header "points features labels", then rows "l1,l2 f1:v1 f2:v2".

    Raises:
        DataError: unreadable, or without the header.
    """
    lines = read_lines(path)
    rows, num_features, num_labels = read_header(path, lines, ("points", "features", "labels"))
    if part == "features":
        return Matrix(path, (rows, num_features), parsed(lines, _bag_features), 2)
    return Matrix(path, (rows, num_labels), parsed(lines, _bag_labels), 2)


def _bag_features(line: bytes) -> Entries:
    labels, _, features = line.partition(b" ")
    # Without a label, the blank that stands for it may be missing too.
    return parse_entries(line if b":" in labels else features)


def _bag_labels(line: bytes) -> Entries:
    labels, _, _ = line.partition(b" ")
    if b":" in labels:
        return [], []
    return parse_entries(labels.replace(b",", b" "), default=1.0)


def read_header(path: Path, lines: Iterator[bytes], names: tuple[str, ...]) -> tuple[int, ...]:
    """The whole numbers in the first line.

    Args:
        names: what they stand for, for messages.

    Raises:
        DataError: the line holds something else, or another number of them.
    """
    line = next(lines, b"")
    words = line.split()
    # A number of 19 digits or more may not fit into 64 bits.
    numbers = [int(word) for word in words if word.isdigit() and len(word) < 19]
    if len(words) != len(names) or len(numbers) != len(names):
        start = line[:40].decode(errors="replace")
        raise DataError(
            f"{path}:1: found {start!r}, expected a header of {len(names)} numbers: {' '.join(names)}"
        )
    return tuple(numbers)


def parse_entries(line: bytes, default: float | None = None) -> Entries:
    """`idx:val idx:val ...` as two lists; with a `default` the value may be absent.

    Raises:
        BadValue: an entry is something else.
    """
    ids: list[int] = []
    values: list[float] = []
    for entry in line.split():
        index, colon, value = entry.partition(b":")
        try:
            ids.append(int(index))
            values.append(float(value) if colon or default is None else default)
        except ValueError:
            start = entry[:40].decode(errors="replace")
            raise BadValue(f"found {start!r}, expected index:value") from None
    return ids, values


def _npz_rows(matrix: Any) -> Iterator[Entries | BadValue]:
    # Lists of Python numbers, for some rows at once: slicing them is faster than slicing arrays.
    for span in spans(matrix.shape[0], _ROWS_AT_ONCE):
        rows = matrix[span]
        if rows.dtype == bool:
            rows = rows.astype(np.uint8)
        ids = rows.indices.tolist()
        values = rows.data.tolist()
        for first, stop in pairwise(rows.indptr.tolist()):
            yield ids[first:stop], values[first:stop]


def load_npz(path: Path, source: str | Path | None = None) -> Any:
    """A CSR matrix from scipy's npz, checked: shapes agree, pointers ascend, indices lie inside.

    Args:
        path: the file.
        source: URL that the file is a copy of, for messages.
    Raises:
        DataError: anything else, pickled objects included.
    """
    source = source or path
    try:
        with zipfile.ZipFile(path) as archive:
            # All members together: an array of ones alone may well be packed a thousandfold.
            num_bytes = sum(info.file_size for info in archive.infolist())
            if num_bytes > max(FREE_BYTES, MAX_RATIO * path.stat().st_size):
                raise ValueError(
                    f"unpacks to more than {MAX_RATIO} times its size: a decompression bomb"
                )
            for name in archive.namelist():
                _check_member(archive, name)
        with np.load(path, allow_pickle=False) as arrays:
            kind = str(arrays["format"].astype(str))
        if kind not in ("csr", "csc"):
            raise ValueError(f"format {kind[:20]!r}, expected csr or csc")
        # scipy compares the lengths of the arrays, and the full check looks at every index.
        matrix: Any = scipy.sparse.load_npz(path)
        if matrix.ndim != 2:
            raise ValueError(f"it has the shape {matrix.shape}, expected rows and columns")
        # But it takes a matrix whose last pointer is negative for an empty one, and then writes
        # outside of its arrays.
        if np.any(np.diff(matrix.indptr, prepend=0) < 0):
            raise ValueError("its row pointers do not ascend from 0")
        matrix.check_format(full_check=True)
        return matrix.tocsr()
    except OSError as error:
        raise cannot_read(source, error) from None
    except (
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        NotImplementedError,
        RuntimeError,
        EOFError,
        tokenize.TokenError,
    ) as error:
        raise DataError(
            f"{source} is not a complete npz file of scipy.sparse.save_npz ({error})"
        ) from None
    except (ValueError, TypeError, OverflowError, MemoryError, SyntaxError) as error:
        raise DataError(
            f"{source} is not a sparse matrix of scipy.sparse.save_npz ({one_line(error)}); save it again"
        ) from None


def _check_member(archive: zipfile.ZipFile, name: str) -> None:
    """Compares an array's header with what the archive holds, before memory is allocated for it.

    Raises:
        ValueError: it is larger than its file, or holds something else than numbers.
    """
    info = archive.getinfo(name)
    with archive.open(info) as file:
        if np.lib.format.read_magic(file) == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    size = math.prod(shape) * dtype.itemsize
    if dtype.kind not in _KINDS.get(name, "SUiufb") or size > info.file_size:
        raise ValueError(
            f"{name} holds {dtype} {shape}, expected numbers that fit its {info.file_size} bytes"
        )
