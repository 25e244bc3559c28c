"""Ascending ids without some, computed instead of stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from xmcray.types import Int64Array


class KeptIds:
    """The ids 0 .. num_ids - 1 without some, ascending, as an array that takes no memory for them.

    Args:
        num_ids: kept and left-out ids.
        left_out: int64, ids that are not among them, ascending and distinct.
    """

    def __init__(self, num_ids: int, left_out: Int64Array) -> None:
        self._num_kept = num_ids - len(left_out)
        # The number of kept ids below each left-out id: those in the gaps before it.
        self._kept_below = left_out - np.arange(len(left_out))

    def __len__(self) -> int:
        return self._num_kept

    def __getitem__(self, positions: Any) -> Int64Array:
        """The ids at some positions.

        Args:
            positions: a slice, an array of positions from 0, or one position.
        Raises:
            IndexError: a position is out of range.
        """
        if isinstance(positions, slice):
            positions = np.arange(*positions.indices(self._num_kept))
        positions = np.asarray(positions, np.int64)
        is_inside = (positions >= 0) & (positions < self._num_kept)
        if not is_inside.all():
            raise IndexError(f"a position is out of range, expected 0 to {self._num_kept - 1}")
        # An id follows the left-out ids that have no more kept ids below them than it has.
        num_left_out = np.searchsorted(self._kept_below, positions, side="right")
        ids: Int64Array = positions + num_left_out
        return ids

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Int64Array:
        """All ids, for NumPy's functions."""
        return np.asarray(self[:], dtype)
