"""The labels that a global batch meets. Every rank knows all of them and encodes or reads those it owns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from xmcray.losses.pairs import Pairs
from xmcray.parallel.partition import LabelPartition
from xmcray.types import Int64Array, Ragged


@dataclass(frozen=True, slots=True)
class LabelPool:
    """Distinct labels as columns of the batch's score matrix, split over ranks by who owns them.

    Attributes:
        part: who owns which label.
        ids: int64 [P], all labels of the pool, ascending. own: int64 [U], those of this rank: its columns, in order.
    """

    part: LabelPartition
    ids: Int64Array
    own: Int64Array

    @classmethod
    def of(cls, part: LabelPartition, *lists: Ragged) -> LabelPool:
        """The labels that are in any of the lists."""
        ids = np.unique(np.concatenate([values.values for values in lists]))
        return cls(part, ids, ids[part.owns(ids)])

    @classmethod
    def everything(cls, part: LabelPartition) -> LabelPool:
        """All L labels."""
        ids = np.arange(part.num_labels, dtype=np.int64)
        return cls(part, ids, ids[part.start : part.stop])

    def pairs(
        self, *lists: Ragged, without: Ragged | None = None, device: torch.device | str = "cpu"
    ) -> Pairs:
        """The entries of per-query lists that are columns of this rank, by query; an entry of two lists comes once.

        Args:
            without: entries of these lists are left out.
        """
        flat = np.unique(np.concatenate([self._flat(part) for part in lists]))
        if without is not None:
            flat = np.setdiff1d(flat, self._flat(without), assume_unique=True)
        row, column = np.divmod(flat, max(len(self.own), 1))
        return Pairs(torch.from_numpy(row).to(device), torch.from_numpy(column).to(device))

    def _flat(self, lists: Ragged) -> Int64Array:
        """Query times U plus column of each entry that is a column of this rank."""
        if not len(self.own):
            return np.empty(0, np.int64)
        columns = np.minimum(np.searchsorted(self.own, lists.values), len(self.own) - 1)
        hit = self.own[columns] == lists.values
        flat: Int64Array = lists.row_ids[hit] * len(self.own) + columns[hit]
        return flat

    def count(self, lists: Ragged) -> Int64Array:
        """int64 [G], how many labels of each query's list are in the pool, on whatever rank."""
        if not len(self.ids):
            return np.zeros(len(lists), np.int64)
        at = np.minimum(np.searchsorted(self.ids, lists.values), len(self.ids) - 1)
        return np.bincount(lists.row_ids[self.ids[at] == lists.values], minlength=len(lists))
