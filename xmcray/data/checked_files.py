"""Arrays and texts in files that may be damaged or hostile.

A manifest proves that a file is as it was written. It does not prove that its writer can be trusted. So
a size that a file states is compared with the size of the file before it is used, and nothing is
unpickled.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

TEXTS_AT_ONCE = 1 << 20
Array = npt.NDArray[Any]
_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class ArrayHeader(NamedTuple):
    """The header of an .npy file, verified against the size of the file.

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
    """Reads and verifies the header of an .npy file.

    Raises:
        OSError: the file cannot be read.
        ValueError, EOFError: it is no .npy file, has another type or number of axes, stores its values
            column by column, or has another size than its header says.
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
    # NumPy would read a negative number of rows as "all rows".
    is_negative = min(shape, default=0) < 0
    if is_negative or expected_bytes != num_bytes:
        raise ValueError(f"found {num_bytes} bytes of values, expected {shape} of {dtype}")
    return ArrayHeader(shape, dtype, start)


def check_offsets(offsets: Array, num_rows: int, num_values: int) -> None:
    """Raises ValueError unless the offsets divide `num_values` values among `num_rows` rows."""
    has_all_rows = offsets.shape == (num_rows + 1,)
    has_all_values = has_all_rows and offsets[0] == 0 and offsets[-1] == num_values
    is_ascending = np.all(np.diff(offsets) >= 0)
    if not has_all_values or not is_ascending:
        raise ValueError(f"the offsets are not those of {num_rows} rows of {num_values} values")


def read_texts(path: Path, names: tuple[str, ...], num_rows: int) -> pa.Table:
    """Reads columns of texts from a Parquet file. Other columns are not read.

    Raises:
        OSError, ValueError, KeyError, pa.ArrowException: a column is missing, holds something else
            than UTF-8 or lacks a value, or there is another number of rows.
    """
    with pq.ParquetFile(path, memory_map=True) as file:
        # Types are checked before values are read, because a dictionary could unpack to any size.
        schema = file.schema_arrow
        for name in names:
            kind = schema.field(name).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise ValueError(f"column {name} holds {kind}, expected text")
        if file.metadata.num_rows != num_rows:
            raise ValueError(f"found {file.metadata.num_rows} rows, expected {num_rows}")
        large_texts = pa.schema([(name, pa.large_string()) for name in names])
        # In blocks, because Arrow makes one array of all that it reads at once: twice the time, and
        # gigabytes more while it grows to 10^8 texts.
        batches = file.iter_batches(TEXTS_AT_ONCE, columns=list(names))
        blocks = [batch.cast(large_texts) for batch in batches]
    table = pa.Table.from_batches(blocks, large_texts)
    # Arrow's reader does not check that texts are UTF-8.
    table.validate(full=True)
    has_nulls = any(column.null_count for column in table.columns)
    if has_nulls or table.num_rows != num_rows:
        raise ValueError(f"found nulls or {table.num_rows} rows, expected {num_rows} texts")
    return table
