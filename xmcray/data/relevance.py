"""Graded relevance: how much each positive of a training query counts.

A raw file may have a number for each positive, such as clicks, or grades of events. As a weight it
is divided by the mean over all positives of the split, so that a loss keeps its size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xmcray.data.corpus import Split
from xmcray.errors import DataError
from xmcray.types import Float32Array, Float64Array, Int64Array, Ragged, offsets_of


@dataclass(frozen=True, eq=False)
class Relevance:
    """The relevance of all positives of a split, in memory: four bytes each.

    Attributes:
        values: float32 [T], one query after another.
        offsets: int64 [N + 1], where each query's positives begin.
        mean: of the values.
    """

    values: Float32Array
    offsets: Int64Array
    mean: float

    @classmethod
    def read(cls, split: Split) -> Relevance | None:
        """The relevance of a split, or None if the raw files have none."""
        values = split.relevance()
        if values is None:
            return None
        mean = float(values.mean(dtype=np.float64)) if len(values) else 0.0
        return cls(values, offsets_of(split.num_positives()), mean)

    @property
    def is_graded(self) -> bool:
        """Whether the numbers can be weights and gains: none is negative, and one is positive."""
        return bool(self.values.min(initial=0) >= 0 and self.mean > 0)

    def check(self) -> None:
        """Raises DataError unless the numbers can be weights."""
        if not self.is_graded:
            # Without any value both are the mean, which is 0.
            low = self.values.min(initial=self.mean)
            high = self.values.max(initial=self.mean)
            raise DataError(
                f"relevance goes from {low:g} to {high:g}, expected"
                " numbers of at least 0, not all of them 0; set data.relevance=ignore, or correct"
                " the raw files"
            )

    def grades(self, rows: Int64Array) -> Float64Array:
        """float64, the relevance of the positives of some queries, ascending by source label id."""
        return self.values[self.positions(rows).values].astype(np.float64)

    def positions(self, rows: Int64Array) -> Ragged:
        """Places in `values` of the positives of some queries, ascending by source label id."""
        # Positions depend on the offsets alone, so any values will do.
        lists = Ragged(np.empty(0, np.int64), self.offsets)
        index, offsets = lists.positions(rows)
        return Ragged(index, offsets)

    def weights(self, positions: Int64Array) -> Float64Array:
        """float64, relevance / mean relevance at some positions; 1 at position -1."""
        # A label text that is a query of its own label has no relevance.
        weights = self.values[positions].astype(np.float64) / self.mean
        return np.where(positions < 0, 1.0, weights)


def largest_of_rows(weights: Float64Array, lists: Ragged) -> Float64Array:
    """float64 [T], for each value the largest weight of its row."""
    largest = np.zeros(len(lists))
    np.maximum.at(largest, lists.row_ids, weights)
    return largest[lists.row_ids]
