"""Arrays and texts in files that may be damaged or hostile.

A manifest proves that a file is as it was written, not that its writer can be trusted. So no size
in a file is believed before the file's own size agrees, and nothing is unpickled.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

Array = npt.NDArray[Any]
_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class ArrayHeader(NamedTuple):
    """What an .npy file says of itself, verified against its size.

    Attributes:
        start: the byte at which the values begin.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int


def read_array(path: Path, dtype: npt.DTypeLike, ndim: int = 1, mapped: bool = False) -> Array:
    """An array from an .npy file.

    Args:
        path: the file.
        dtype: the only type that is accepted.
        ndim: the only number of axes that is accepted.
        mapped: leave the values on disk until they are used.
    Raises:
        OSError, ValueError, EOFError: as `array_header`.
    """
    array_header(path, (dtype,), ndim)
    mode: Literal["r"] | None = "r" if mapped else None
    array: Array = np.load(path, mmap_mode=mode, allow_pickle=False)
    return array


def array_header(path: Path, dtypes: tuple[npt.DTypeLike, ...], ndim: int = 1) -> ArrayHeader:
    """The header of an .npy file, whose values lie row by row.

    Raises:
        OSError: the file cannot be read.
        ValueError, EOFError: it is no .npy file, of another type or number of axes, or its size is
            not that of its header and values.
    """
    with path.open("rb") as file:
        read_header = _HEADER_READERS[np.lib.format.read_magic(file)]
        shape, is_fortran, dtype = read_header(file)
        start = file.tell()
    accepted_types = [np.dtype(accepted) for accepted in dtypes]
    if dtype not in accepted_types or len(shape) != ndim or is_fortran:
        expected = " or ".join(map(str, accepted_types))
        order = " column by column" if is_fortran else ""
        raise ValueError(
            f"found {dtype} {shape}{order}, expected {expected} with {ndim} axes, row by row"
        )
    num_bytes = path.stat().st_size - start
    expected_bytes = math.prod(shape) * dtype.itemsize
    # A negative number of rows would be taken for "as many as there are".
    is_negative = min(shape, default=0) < 0
    if is_negative or expected_bytes != num_bytes:
        raise ValueError(f"found {num_bytes} bytes of values, expected {shape} of {dtype}")
    return ArrayHeader(shape, dtype, start)


def check_offsets(offsets: Array, num_rows: int, num_values: int) -> None:
    """Raises ValueError unless `num_rows` rows divide all of `num_values` values among them."""
    has_all_rows = offsets.shape == (num_rows + 1,)
    has_all_values = has_all_rows and offsets[0] == 0 and offsets[-1] == num_values
    is_ascending = np.all(np.diff(offsets) >= 0)
    if not has_all_values or not is_ascending:
        raise ValueError(f"the offsets are not those of {num_rows} rows of {num_values} values")


def read_texts(path: Path, names: tuple[str, ...], num_rows: int) -> pa.Table:
    """Columns of texts from a Parquet file; others are left out.

    Raises:
        OSError, ValueError, KeyError, pa.ArrowException: a column is missing, holds something else
            than UTF-8 or lacks a value, or there is another number of rows.
    """
    with pq.ParquetFile(path, memory_map=True) as file:
        # Types are compared before values are read: a dictionary could unpack to any size.
        schema = file.schema_arrow
        for name in names:
            kind = schema.field(name).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise ValueError(f"column {name} holds {kind}, expected text")
        if file.metadata.num_rows != num_rows:
            raise ValueError(f"found {file.metadata.num_rows} rows, expected {num_rows}")
        table = file.read(columns=list(names))
    large_texts = pa.schema([(name, pa.large_string()) for name in names])
    table = table.cast(large_texts)
    # Arrow's reader does not look at the bytes of a text.
    table.validate(full=True)
    has_nulls = any(column.null_count for column in table.columns)
    if has_nulls or table.num_rows != num_rows:
        raise ValueError(f"found nulls or {table.num_rows} rows, expected {num_rows} texts")
    return table
