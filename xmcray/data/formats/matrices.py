"""Sparse matrices row by row: `rows cols` text files, scipy's npz, and the bag-of-words train.txt.

No pickle is read. The shape that an npz member declares is compared with the member's size before
memory is allocated for it.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from xmcray.data.formats.base import FREE_BYTES, MAX_RATIO, BadValue, cannot_read, read_lines
from xmcray.errors import DataError, one_line
from xmcray.types import Int64Array

Entries = tuple[list[int], list[float]]  # column ids and values of a row, as the file orders them
_ROWS_AT_ONCE = 4096


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
    return Matrix(path, (rows, cols), _text_rows(lines), 2)


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


def _text_rows(lines: Iterator[bytes]) -> Iterator[Entries | BadValue]:
    for line in lines:
        try:
            entries = parse_entries(line)
        except BadValue as error:
            yield error
        else:
            yield entries


def _npz_rows(matrix: Any) -> Iterator[Entries | BadValue]:
    # Lists of Python numbers, for some rows at once: slicing them is faster than slicing arrays.
    for start in range(0, matrix.shape[0], _ROWS_AT_ONCE):
        offsets = matrix.indptr[start : start + _ROWS_AT_ONCE + 1]
        ids = matrix.indices[offsets[0] : offsets[-1]].tolist()
        values = matrix.data[offsets[0] : offsets[-1]].tolist()
        for first, stop in pairwise((offsets - offsets[0]).tolist()):
            yield ids[first:stop], values[first:stop]


def load_npz(path: Path) -> Any:
    """A CSR matrix from scipy's npz, checked: shapes agree, pointers ascend, indices lie inside.

    Raises:
        DataError: anything else, pickled objects included.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            kind = _read_member(archive, "format.npy").item()
            # Member by member: np.load would unpack whatever else the archive holds.
            indptr = _read_member(archive, "indptr.npy")
            indices = _read_member(archive, "indices.npy")
            data = _read_member(archive, "data.npy")
            shape = _read_member(archive, "shape.npy")
        # Older scipy wrote the kind as bytes.
        name = kind.decode("ascii", "replace") if isinstance(kind, bytes) else str(kind)
        return _checked(name.lower(), indptr, indices, data, shape)
    except OSError as error:
        raise cannot_read(path, error) from None
    except (
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        NotImplementedError,
        RuntimeError,
        EOFError,
    ) as error:
        raise DataError(
            f"{path} is not a complete npz file of scipy.sparse.save_npz ({error})"
        ) from None
    except (ValueError, TypeError, OverflowError, MemoryError, SyntaxError) as error:
        raise DataError(
            f"{path} is not a sparse matrix of scipy.sparse.save_npz ({one_line(error)}); save it again"
        ) from None


def _read_member(archive: zipfile.ZipFile, name: str) -> Any:
    """An array of the archive.

    Raises:
        ValueError: it would unpack to far more than it takes in the file, or holds Python objects.
    """
    info = archive.getinfo(name)
    if info.file_size > max(FREE_BYTES, MAX_RATIO * info.compress_size):
        raise ValueError(
            f"{name} unpacks to more than {MAX_RATIO} times its size: a decompression bomb"
        )
    # The header is read first: numpy would allocate memory for any shape that it declares.
    with archive.open(info) as file:
        if np.lib.format.read_magic(file) == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    size = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or size > info.file_size:
        raise ValueError(
            f"{name} holds {dtype} {shape}, expected numbers that fit its {info.file_size} bytes"
        )
    with archive.open(info) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _checked(kind: str, indptr: Any, indices: Any, data: Any, shape: Any) -> Any:
    """The arrays of a CSR or CSC matrix as a CSR matrix.

    Raises:
        ValueError: the arrays do not fit each other.
    """
    if kind not in ("csr", "csc"):
        raise ValueError(f"format {kind[:20]!r}, expected csr or csc")
    for array in (indptr, indices, shape):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError("indptr, indices or shape are not lists of integers")
    if len(shape) != 2:
        raise ValueError(f"a shape of {len(shape)} numbers, expected 2")
    if data.shape != indices.shape or data.dtype.kind not in "iufb":
        raise ValueError(f"{data.size} values of type {data.dtype} for {indices.size} indices")
    # The major axis is the one that the pointers cut: rows of a CSR, columns of a CSC matrix.
    size = (int(shape[0]), int(shape[1]))
    if min(size) < 0:
        raise ValueError(f"a shape of {size[0]} x {size[1]}, expected no negative number")
    major, minor = size if kind == "csr" else size[::-1]
    pointers: Int64Array = indptr.astype(np.int64)
    if (
        len(pointers) != major + 1
        or pointers[0] != 0
        or pointers[-1] != len(indices)
        or (np.diff(pointers) < 0).any()
    ):
        axis = "rows" if kind == "csr" else "columns"
        raise ValueError(f"pointers do not fit {major} {axis} and {len(indices)} entries")
    if indices.size and not (int(indices.min()) >= 0 and int(indices.max()) < minor):
        raise ValueError(f"an index is out of range, expected 0 to {minor - 1}")
    if kind == "csr":
        return scipy.sparse.csr_matrix((data, indices, pointers), shape=size)
    return scipy.sparse.csc_matrix((data, indices, pointers), shape=size).tocsr()
