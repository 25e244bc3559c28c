"""Decides which rank owns which labels. This is the only place where such arithmetic is done."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xmcray.errors import PartitionError
from xmcray.types import Int64Array


def share(total: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Returns the positions [start, stop) of `total` that belong to a rank.

    The shares differ by at most one position; some may be empty.
    """
    # Rounding down both ends with the same rule lets each share begin where the last one ends.
    start = rank * total // num_ranks
    stop = (rank + 1) * total // num_ranks
    return start, stop


@dataclass(frozen=True, slots=True)
class LabelPartition:
    """The labels of one rank: rank r owns the contiguous labels [start, stop) of [0, num_labels).

    Shares are not padded; a rank may own no label.

    Attributes:
        num_labels: L.
        num_ranks: number of ranks that share the labels.
        rank: the rank whose labels these are.
    """

    num_labels: int
    num_ranks: int
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise PartitionError(f"rank {self.rank} is not one of {self.num_ranks} ranks")

    @property
    def start(self) -> int:
        """First label of this rank."""
        return share(self.num_labels, self.rank, self.num_ranks)[0]

    @property
    def stop(self) -> int:
        """One past the last label of this rank."""
        return share(self.num_labels, self.rank, self.num_ranks)[1]

    @property
    def size(self) -> int:
        """S, the number of labels of this rank."""
        return self.stop - self.start

    def owns(self, label_ids: Int64Array) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Returns which of the global ids belong to this rank, bool of the same shape."""
        return (label_ids >= self.start) & (label_ids < self.stop)

    def to_local(self, label_ids: Int64Array) -> Int64Array:
        """Turns global ids, all of which belong to this rank, into local ones."""
        local_ids = label_ids - self.start
        # A label of another rank would silently read a row from the wrong end of the shard.
        assert self.owns(label_ids).all(), "label of another rank"
        return local_ids

    def to_global(self, local_label_ids: Int64Array) -> Int64Array:
        """Turns local ids into global ones."""
        return local_label_ids + self.start
