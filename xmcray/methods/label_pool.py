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
        values = [labels.values for labels in lists]
        ids = np.unique(np.concatenate(values))  # np.unique sorts
        is_own = partition.owns(ids)
        return cls(partition, ids, ids[is_own])

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
        # The numbers ascend by query and then by column.
        keys_of_lists = [self._keys(labels) for labels in lists]
        keys = np.unique(np.concatenate(keys_of_lists))
        if without is not None:
            left_out = self._keys(without)
            keys = np.setdiff1d(keys, left_out, assume_unique=True)
        rows, columns = np.divmod(keys, max(len(self.own), 1))
        row_P = torch.from_numpy(rows).to(device)
        column_P = torch.from_numpy(columns).to(device)
        return Pairs(row_P, column_P)

    def _keys(self, lists: Ragged) -> Int64Array:
        """row * U + column of each entry that is a column of this rank."""
        positions, is_column = _find(self.own, lists.values)
        rows = lists.row_ids[is_column]
        columns = positions[is_column]
        keys: Int64Array = rows * len(self.own) + columns
        return keys

    def count(self, lists: Ragged) -> Int64Array:
        """int64 [G], how many labels of each query's list are in the pool, on any rank."""
        _, is_in_pool = _find(self.ids, lists.values)
        rows = lists.row_ids[is_in_pool]
        # A query without a label in the pool counts 0, also at the end of the batch.
        return np.bincount(rows, minlength=len(lists))


def _find(
    sorted_ids: Int64Array, ids: Int64Array
) -> tuple[Int64Array, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]:
    """Position of each id in `sorted_ids`, and whether it is there at all."""
    if not len(sorted_ids):
        return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
    # An id above the largest one would be at the end; the last position serves to compare it.
    last = len(sorted_ids) - 1
    positions = np.minimum(np.searchsorted(sorted_ids, ids), last)
    is_there = sorted_ids[positions] == ids
    return positions, is_there
