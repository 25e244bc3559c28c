"""The labels that a global batch meets: every rank knows all of them and encodes those it owns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from xmcray.losses.pairs import Pairs
from xmcray.parallel.partition import LabelPartition
from xmcray.types import Int64Array, Ragged


@dataclass(frozen=True, slots=True)
class LabelPool:
    """Distinct labels as columns of the batch's score matrix, split over ranks by owner.

    Attributes:
        partition: Which labels this rank owns.
        ids: int64 [P], all labels of the pool, ascending.
        own: int64 [U], those of this rank, ascending; label own[c] is column c.
    """

    partition: LabelPartition
    ids: Int64Array
    own: Int64Array

    @classmethod
    def of(cls, partition: LabelPartition, *lists: Ragged) -> LabelPool:
        """The labels that are in any of the lists."""
        ids = np.unique(np.concatenate([labels.values for labels in lists]))
        return cls(partition, ids, ids[partition.owns(ids)])

    @classmethod
    def everything(cls, partition: LabelPartition) -> LabelPool:
        """All L labels."""
        ids = np.arange(partition.num_labels, dtype=np.int64)
        return cls(partition, ids, ids[partition.start : partition.stop])

    @property
    def first(self) -> int:
        """Position of this rank's first column among the columns of all ranks."""
        return int(np.searchsorted(self.ids, self.partition.start))

    def pairs(
        self, *lists: Ragged, without: Ragged | None = None, device: torch.device | str = "cpu"
    ) -> Pairs:
        """Entries of per-query label lists that are columns of this rank, sorted by query.

        Args:
            lists: Label ids of all G queries. An entry of two lists becomes one pair.
            without: Entries of this list are left out.
            device: Of the result.
        """
        # A pair is one number, row * U + column, so that sets of pairs are sets of numbers.
        keys = np.unique(np.concatenate([self._keys(labels) for labels in lists]))
        if without is not None:
            keys = np.setdiff1d(keys, self._keys(without), assume_unique=True)
        rows, columns = np.divmod(keys, max(len(self.own), 1))
        return Pairs(torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device))

    def _keys(self, lists: Ragged) -> Int64Array:
        """row * U + column of each entry that is a column of this rank."""
        columns, is_column = _find(self.own, lists.values)
        keys: Int64Array = lists.row_ids[is_column] * len(self.own) + columns[is_column]
        return keys

    def count(self, lists: Ragged) -> Int64Array:
        """int64 [G], how many labels of each query's list are in the pool, on any rank."""
        _, is_in_pool = _find(self.ids, lists.values)
        return np.bincount(lists.row_ids[is_in_pool], minlength=len(lists))


def _find(
    sorted_ids: Int64Array, ids: Int64Array
) -> tuple[Int64Array, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]:
    """Position of each id in `sorted_ids`, and whether it is there at all."""
    if not len(sorted_ids):
        return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
    # An id above the largest one would be at the end; the last position serves to compare it.
    positions = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
    return positions, sorted_ids[positions] == ids
