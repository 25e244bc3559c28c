"""Joins the arrays of finished shards into files of many shards.

A process that reads a split maps every array file of it, and an operating system limits the number of
mappings of a process. Shards are small, because they are the units of work of `prepare`. So the arrays
of many shards become one file.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from xmcray.data.checked_files import array_header, read_array
from xmcray.data.shards import (
    ARRAY_SUFFIXES,
    OFFSET_SUFFIXES,
    VALUE_SUFFIXES,
    VALUE_TYPES,
    VECTOR_SUFFIX,
    VECTOR_TYPES,
    shard_stem,
)

_PARTS = "parts"


class ArrayFiles:
    """Writes the array files of one split from shards, which may be added in any order.

    The arrays of a shard wait in a folder of their own until all shards of their file have been added.

    Args:
        folder: of the split.
        shards_per_file: shards whose arrays become one file.
    """

    def __init__(self, folder: Path, shards_per_file: int) -> None:
        self._folder = folder
        self._parts = folder / _PARTS
        self._shards_per_file = shards_per_file
        # The shards that wait for others of their file, by the number of the file.
        self._waiting: dict[int, list[int]] = {}

    def add(self, shard: int, arrays: Mapping[str, bytes]) -> None:
        """Adds the arrays of one shard, by the names that `pack` gives to their files."""
        self._parts.mkdir(parents=True, exist_ok=True)
        for name, content in arrays.items():
            (self._parts / name).write_bytes(content)
        number = shard // self._shards_per_file
        shards = self._waiting.setdefault(number, [])
        shards.append(shard)
        if len(shards) == self._shards_per_file:
            self._join(number)

    def keep(self, folder: Path, num_shards: int, shard_rows: int) -> None:
        """Begins with the first shards of another split.

        Array files that these shards fill completely are not written. The caller can link them. The
        rows of the file that the shards fill in part are copied from the other split.

        Args:
            folder: of the other split.
            num_shards: full shards to take.
            shard_rows: rows of each.
        """
        number = num_shards // self._shards_per_file
        first_shard = number * self._shards_per_file
        num_rows = (num_shards - first_shard) * shard_rows
        if num_rows == 0:
            return
        self._parts.mkdir(parents=True, exist_ok=True)
        for value_suffix, offset_suffix in zip(VALUE_SUFFIXES, OFFSET_SUFFIXES, strict=True):
            value_path = folder / f"{shard_stem(number)}.{value_suffix}.npy"
            # Label texts have no labels.
            if not value_path.is_file():
                continue
            offset_path = folder / f"{shard_stem(number)}.{offset_suffix}.npy"
            all_offsets = read_array(offset_path, np.int64, mapped=True)
            offsets = all_offsets[: num_rows + 1]
            dtype = array_header(value_path, VALUE_TYPES).dtype
            all_values = read_array(value_path, dtype, mapped=True)
            values = all_values[: offsets[-1]]
            stem = shard_stem(first_shard)
            np.save(self._parts / f"{stem}.{offset_suffix}.npy", offsets)
            np.save(self._parts / f"{stem}.{value_suffix}.npy", values)
        # The copied shards wait as one part. So `add` never counts enough parts to join this file.
        # `finish` joins it.
        self._waiting[number] = [first_shard]

    def finish(self) -> None:
        """Writes the remaining files, such as the last of the split, which may have fewer shards."""
        for number in sorted(self._waiting):
            self._join(number)
        if self._parts.is_dir():
            self._parts.rmdir()

    def _join(self, number: int) -> None:
        shards = sorted(self._waiting.pop(number))
        for suffix in ARRAY_SUFFIXES:
            names = [f"{shard_stem(shard)}.{suffix}.npy" for shard in shards]
            parts = [self._parts / name for name in names]
            # Label texts have no labels, and most corpora no side vectors.
            if not parts[0].is_file():
                continue
            out = self._folder / f"{shard_stem(number)}.{suffix}.npy"
            if suffix in OFFSET_SUFFIXES:
                _join_offsets(parts, out)
            elif suffix == VECTOR_SUFFIX:
                _join_values(parts, out, VECTOR_TYPES, ndim=2)
            else:
                _join_values(parts, out, VALUE_TYPES, ndim=1)
            for part in parts:
                part.unlink()


def _join_values(
    parts: list[Path], out: Path, dtypes: tuple[npt.DTypeLike, ...], ndim: int
) -> None:
    """Concatenates the values of all parts."""
    headers = [array_header(part, dtypes, ndim) for part in parts]
    num_values = sum(header.shape[0] for header in headers)
    # Vectors have a second axis, their width, which is the same in all parts.
    _, *other_axes = headers[0].shape
    with out.open("wb") as file:
        _write_header(file, headers[0].dtype, (num_values, *other_axes))
        for part, header in zip(parts, headers, strict=True):
            with part.open("rb") as source:
                source.seek(header.start)
                shutil.copyfileobj(source, file)


def _join_offsets(parts: list[Path], out: Path) -> None:
    """Concatenates the offsets of all parts. Those of a part count from its own first value."""
    num_rows = 0
    for part in parts:
        num_offsets = array_header(part, (np.int64,)).shape[0]
        num_rows += num_offsets - 1
    with out.open("wb") as file:
        _write_header(file, np.dtype(np.int64), (num_rows + 1,))
        first_offset = np.zeros(1, np.int64)
        file.write(first_offset.tobytes())
        num_values = 0
        for part in parts:
            # The first offset of a part is left out. It is the end of the part before.
            ends = read_array(part, np.int64)[1:] + num_values
            file.write(ends.tobytes())
            num_values = int(ends[-1])


def _write_header(file: BinaryIO, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Writes the header of an .npy file, as `pack` does."""
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(file, header)
