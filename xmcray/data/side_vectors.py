"""Side vectors of raw files: what is known of a row besides its text, such as its image.

A raw folder holds them next to its files, one row of numbers for each row of the file, in order:

    train.vectors.npy, test.vectors.npy, labels.vectors.npy    float32 or float16 [rows, W]

A row of zeros has no vector. The corpus keeps the vectors of the rows that it keeps (shards.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmcray.data.checked_files import Array, array_header
from xmcray.data.shards import VECTOR_TYPES
from xmcray.errors import DataError, readable
from xmcray.types import Int64Array

MAX_WIDTH = 1 << 16


@dataclass(frozen=True, slots=True)
class RawVectors:
    """The side vectors of one raw file.

    Attributes:
        path: of the .npy file.
        array: float32 or float16 [rows, W], mapped.
    """

    path: Path
    array: Array

    @classmethod
    def find(cls, folder: Path, split: str) -> RawVectors | None:
        """Those of a split, or of "labels"; None if there is no such file.

        Raises:
            DataError: the file is malformed.
        """
        path = folder / file_name(split)
        if not path.is_file():
            return None
        advice = "write float32 or float16 [rows, width] with numpy.save"
        with readable(f"{path} cannot be read", advice, DataError):
            shape = array_header(path, VECTOR_TYPES, ndim=2).shape
            if not 1 <= shape[1] <= MAX_WIDTH:
                raise ValueError(f"found width {shape[1]}, expected 1 to {MAX_WIDTH}")
            return cls(path, np.load(path, mmap_mode="r", allow_pickle=False))

    @property
    def width(self) -> int:
        """W."""
        return int(self.array.shape[1])

    def take(self, rows: Int64Array) -> Array:
        """[rows, W], the vectors of rows of the raw file; zeros for row -1.

        Raises:
            DataError: there is no such row, or a number is not finite.
        """
        if len(rows) and rows.max() >= len(self.array):
            raise self._wrong_rows(f"at least {rows.max() + 1:,}")
        vectors = np.zeros((len(rows), self.width), self.array.dtype)
        has_row = rows >= 0
        vectors[has_row] = self.array[rows[has_row]]
        is_finite = np.isfinite(vectors).all(axis=1)
        if not is_finite.all():
            row = int(rows[~is_finite][0])
            raise DataError(
                f"{self.path}: row {row} (from 0) holds NaN or infinity, expected finite numbers;"
                " write zeros for a row without a vector"
            )
        return vectors

    def check_num_rows(self, num_rows: int) -> None:
        """Raises DataError unless there is a vector for each row of the raw file."""
        if len(self.array) != num_rows:
            raise self._wrong_rows(f"{num_rows:,}")

    def _wrong_rows(self, expected: str) -> DataError:
        return DataError(
            f"{self.path} has {len(self.array):,} rows, expected {expected}: one for each row of the"
            " file next to it, malformed rows included"
        )


def file_name(split: str) -> str:
    """The name of the file with the side vectors of a split, or of "labels"."""
    return f"{split}.vectors.npy"


def side_width(folder: Path, splits: Sequence[str]) -> int:
    """W, the width of all side vectors of a raw folder; 0 if it has none.

    Args:
        folder: of the raw files.
        splits: of queries.

    Raises:
        DataError: a file is malformed, widths differ, or only some splits of queries have vectors.
    """
    widths: dict[str, int] = {}
    for split in ("labels", *splits):
        vectors = RawVectors.find(folder, split)
        if vectors is not None:
            widths[split] = vectors.width
    if len(set(widths.values())) > 1:
        by_split = ", ".join(f"{split} {width}" for split, width in widths.items())
        raise DataError(f"{folder} has side vectors of several widths ({by_split}), expected one")
    missing = [split for split in splits if split not in widths]
    if missing and len(missing) < len(splits):
        raise DataError(
            f"{folder} has side vectors of some queries, but no {file_name(missing[0])}; add it, with"
            " zeros for rows without a vector"
        )
    return next(iter(widths.values()), 0)
