"""Which rank owns which labels. The only place where such arithmetic is done."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xmcray.errors import PartitionError
from xmcray.types import Int64Array


def share(total: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Positions [start, stop) of `total` that belong to `rank`: sizes differ by at most one, some may be empty."""
    return rank * total // num_ranks, (rank + 1) * total // num_ranks


@dataclass(frozen=True, slots=True)
class LabelPartition:
    """Contiguous label rows over ranks: rank r owns labels [start, stop) of [0, num_labels).

    The rows are not padded; a rank may own none.
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
        """bool, same shape: which of the global ids lie on this rank."""
        return (label_ids >= self.start) & (label_ids < self.stop)

    def to_local(self, label_ids: Int64Array) -> Int64Array:
        """Global to local ids; every id must be owned."""
        local = label_ids - self.start
        assert local.size == 0 or (local.min() >= 0 and local.max() < self.size), (
            "label of another rank"
        )
        return local

    def to_global(self, local_label_ids: Int64Array) -> Int64Array:
        """Local to global ids."""
        return local_label_ids + self.start
