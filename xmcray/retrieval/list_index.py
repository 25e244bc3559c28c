"""Rows in inverted lists that are searched by torch alone, such as on a GPU."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from xmcray.retrieval.answerable import AnswerableRows
from xmcray.retrieval.index import Index
from xmcray.retrieval.inverted_lists import InvertedLists
from xmcray.types import Float32Array


class ListIndex(Index):
    """Rows in inverted lists, searched by torch alone on the device of the rows.

    Hard negatives, for which it is made, are never filtered: `filtered` is a view that compares all
    rows.

    Args:
        lists: the rows.
    """

    nprobe = 1

    def __init__(self, lists: InvertedLists) -> None:
        super().__init__(lists.vector_ND, None)
        self._lists = lists
        self._num_lists = len(lists.centroid_CD)

    @property
    def is_exact(self) -> bool:
        """False: a query visits some lists only."""
        return False

    @property
    def num_lists(self) -> int:
        """Lists of rows near a centroid."""
        return self._num_lists

    def set_nprobe(self, nprobe: int) -> None:
        """Sets the lists visited per query."""
        self.nprobe = nprobe

    def search_keys(
        self, queries: Float32Array, k: int, rows: AnswerableRows, exact: bool = False
    ) -> Tensor:
        """As `Index.search_keys`; the visited lists are scanned for any number of queries."""
        queries = np.ascontiguousarray(queries, np.float32)
        if exact or not len(queries):
            return self._exact_keys(queries, k, rows)
        return self._completed(self.search_lists(queries, k, rows), queries, rows)
