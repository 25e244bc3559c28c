"""Sparse matrices row by row: `rows cols` text files, scipy's npz, and the bag-of-words train.txt.

No pickle is read, and an npz member is compared with its declared size before memory is taken for it.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from xmcray.data.formats.base import FREE_BYTES, MAX_RATIO, BadValue, read_lines
from xmcray.errors import DataError
from xmcray.types import Int64Array

Entries = tuple[list[int], list[float]]  # column ids and values of a row, as the file orders them
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Matrix:
    """A sparse matrix to be read once: its shape is known, its rows are not read yet. A bad row is its reason."""

    path: Path
    shape: tuple[int, int]
    rows: Iterator[Entries | BadValue]
    first_line: int  # line of row 0 in the file


def open_matrix(path: Path) -> Matrix:
    """Opens `.npz` (scipy CSR or CSC) or a text matrix with a header "rows cols".

    Raises:
        DataError: unreadable, or not such a matrix.
    """
    if path.suffix == ".npz":
        matrix = load_npz(path)
        return Matrix(path, matrix.shape, _npz_rows(matrix), 1)
    lines = read_lines(path)
    rows, cols = read_header(path, lines, ("rows", "columns"))
    return Matrix(path, (rows, cols), _text_rows(lines), 2)


def read_header(path: Path, lines: Iterator[bytes], names: tuple[str, ...]) -> tuple[int, ...]:
    """The whole numbers in the first line.

    Raises:
        DataError: there are others, or not as many.
    """
    first = next(lines, b"")
    numbers = first.split()
    if len(numbers) != len(names) or not all(
        number.isdigit() and len(number) < 19 for number in numbers
    ):
        found = first[:40].decode(errors="replace")
        raise DataError(
            f"{path}:1: found {found!r}, expected a header of {len(names)} numbers: {' '.join(names)}"
        )
    return tuple(map(int, numbers))


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
            raise BadValue(
                f"found {entry[:40].decode(errors='replace')!r}, expected index:value"
            ) from None
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
    for start in range(0, matrix.shape[0], _ROWS_AT_ONCE):
        bounds = matrix.indptr[start : start + _ROWS_AT_ONCE + 1].tolist()
        ids = matrix.indices[bounds[0] : bounds[-1]].tolist()
        values = matrix.data[bounds[0] : bounds[-1]].tolist()
        for first, last in pairwise(bounds):
            row = slice(first - bounds[0], last - bounds[0])
            yield ids[row], values[row]


def load_npz(path: Path) -> Any:
    """A CSR matrix from scipy's npz, checked: shapes agree, pointers ascend, indices lie inside.

    Raises:
        DataError: anything else, pickled objects included.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            parts = {
                name: _read_member(archive, f"{name}.npy")
                for name in ("indptr", "indices", "data", "shape")
            }
            kind = _read_member(archive, "format.npy").item()
        name = (kind.decode("ascii", "replace") if isinstance(kind, bytes) else str(kind)).lower()
        return _checked(name, **parts)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}); check the path and its rights"
        ) from None
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
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{path} is not a sparse matrix of scipy.sparse.save_npz ({reason}); save it again"
        ) from None


def _read_member(archive: zipfile.ZipFile, name: str) -> Any:
    info = archive.getinfo(name)
    if info.file_size > max(FREE_BYTES, MAX_RATIO * info.compress_size):
        raise ValueError(
            f"{name} unpacks to more than {MAX_RATIO} times its size: a decompression bomb"
        )
    with archive.open(
        info
    ) as file:  # the header alone: numpy would take memory for whatever shape it names
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(file)
    size = dtype.itemsize
    for length in shape:
        size *= int(length)
    if dtype.hasobject or size > info.file_size:
        raise ValueError(
            f"{name} holds {dtype} {shape}, expected numbers that fit its {info.file_size} bytes"
        )
    with archive.open(info) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _checked(kind: str, indptr: Any, indices: Any, data: Any, shape: Any) -> Any:
    if kind not in ("csr", "csc"):
        raise ValueError(f"format {kind[:20]!r}, expected csr or csc")
    if (
        any(array.ndim != 1 or array.dtype.kind not in "iu" for array in (indptr, indices, shape))
        or len(shape) != 2
    ):
        raise ValueError("indptr, indices or shape are not lists of integers")
    if data.shape != indices.shape or data.dtype.kind not in "iufb":
        raise ValueError(f"{data.size} values of type {data.dtype} for {indices.size} indices")
    rows, cols = (int(size) for size in shape)
    major, minor = (rows, cols) if kind == "csr" else (cols, rows)
    pointers: Int64Array = indptr.astype(np.int64)
    if (
        len(pointers) != major + 1
        or pointers[0] != 0
        or pointers[-1] != len(indices)
        or (np.diff(pointers) < 0).any()
    ):
        raise ValueError(f"row pointers do not fit {major} rows and {len(indices)} entries")
    if indices.size and not (int(indices.min()) >= 0 and int(indices.max()) < minor):
        raise ValueError(f"an index is out of range, expected 0 to {minor - 1}")
    if kind == "csr":
        return scipy.sparse.csr_matrix((data, indices, pointers), shape=(rows, cols))
    return scipy.sparse.csc_matrix((data, indices, pointers), shape=(rows, cols)).tocsr()
