"""The labels that a global batch meets: every rank knows all of them and encodes those it owns."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch

from xmcray.losses.pairs import Pairs
from xmcray.parallel.partition import LabelPartition, share
from xmcray.types import Batch, BoolArray, Int64Array, Ragged, find_sorted


@dataclass(frozen=True)
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
        """All L labels, without an array of their ids."""
        return _AllLabels(partition)

    @property
    def num_labels(self) -> int:
        """Columns of all ranks."""
        return len(self.ids)

    @property
    def num_columns(self) -> int:
        """U, columns of this rank."""
        return len(self.own)

    @property
    def most_columns(self) -> int:
        """Most columns of any rank, which every rank knows without asking the others."""
        partition = self.partition
        most = 0
        for rank in range(partition.num_ranks):
            start_and_stop = share(partition.num_labels, rank, partition.num_ranks)
            first, end = np.searchsorted(self.ids, start_and_stop)
            most = max(most, int(end - first))
        return most

    @property
    def first(self) -> int:
        """Position of this rank's first column among the columns of all ranks."""
        return int(np.searchsorted(self.ids, self.partition.start))

    def pairs(self, *lists: Ragged, without: Ragged | None = None) -> Pairs:
        """Entries of per-query label lists that are columns of this rank, on the host.

        They are sorted by query, and then by column.

        Args:
            lists: Label ids of all G queries. An entry of two lists becomes one pair.
            without: Entries of this list are left out.
        """
        # A pair is one number, row * U + column, so that sets of pairs are sets of numbers.
        # The numbers ascend by query and then by column.
        keys_of_lists = [self._keys(labels) for labels in lists]
        keys = np.unique(np.concatenate(keys_of_lists))
        if without is not None:
            left_out = self._keys(without)
            keys = np.setdiff1d(keys, left_out, assume_unique=True)
        rows, columns = np.divmod(keys, max(self.num_columns, 1))
        return Pairs(torch.from_numpy(rows), torch.from_numpy(columns))

    def positives(self, drawn: Ragged, batch: Batch, first: int = 0) -> Pairs:
        """Positives that are columns of this rank, as `pairs`, and how much each counts.

        Args:
            drawn: Positives that are learned, all of the batch's or some.
            batch: Global batch.
            first: Place in the global batch of the first query of `drawn`.
        """
        pairs = self.pairs(drawn)
        labels = self._ids_of(pairs.columns.numpy())
        weights = batch.weights_of(first + pairs.rows.numpy(), labels)
        if weights is None:
            return pairs
        return dataclasses.replace(pairs, weights=torch.from_numpy(weights))

    def _ids_of(self, columns: Int64Array) -> Int64Array:
        """Label ids of columns of this rank."""
        return self.own[columns]

    def _keys(self, lists: Ragged) -> Int64Array:
        """row * U + column of each entry that is a column of this rank."""
        positions, is_column = self._own_positions(lists.values)
        rows = lists.row_ids[is_column]
        columns = positions[is_column]
        keys: Int64Array = rows * self.num_columns + columns
        return keys

    def count(self, lists: Ragged) -> Int64Array:
        """int64 [G], how many labels of each query's list are in the pool, on any rank."""
        _, is_in_pool = find_sorted(self.ids, lists.values)
        rows = lists.row_ids[is_in_pool]
        # A query without a label in the pool counts 0, also at the end of the batch.
        return np.bincount(rows, minlength=len(lists))

    def _own_positions(self, ids: Int64Array) -> tuple[Int64Array, BoolArray]:
        """This rank's column of each id, and whether the id is a column of this rank at all."""
        return find_sorted(self.own, ids)


class _AllLabels(LabelPool):
    """All labels: positions follow by subtraction, so a step does no work that grows with L.

    The arrays of ids are made for those who ask for them.
    """

    def __init__(self, partition: LabelPartition) -> None:
        object.__setattr__(self, "partition", partition)  # the base is frozen

    @property
    def ids(self) -> Int64Array:
        return np.arange(self.partition.num_labels)

    @property
    def own(self) -> Int64Array:
        return np.arange(self.partition.start, self.partition.stop)

    @property
    def num_labels(self) -> int:
        return self.partition.num_labels

    @property
    def num_columns(self) -> int:
        return self.partition.size

    @property
    def most_columns(self) -> int:
        # Shares differ by at most one label.
        return math.ceil(self.partition.num_labels / self.partition.num_ranks)

    @property
    def first(self) -> int:
        return self.partition.start

    def count(self, lists: Ragged) -> Int64Array:
        return lists.lengths

    def _ids_of(self, columns: Int64Array) -> Int64Array:
        return columns + self.partition.start

    def _own_positions(self, ids: Int64Array) -> tuple[Int64Array, BoolArray]:
        is_own = self.partition.owns(ids)
        # Positions of labels of other ranks are never read.
        return ids - self.partition.start, is_own
