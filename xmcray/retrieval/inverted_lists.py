"""Many queries against inverted lists: each list is multiplied with the queries that visit it.

A search one query at a time reads a list once for each query and scores its rows one by one. Here a
list meets its queries in one matrix product. Scanning then costs per row what an exhaustive search
costs, but on a small share of the rows, and every score is exact. The hard negatives of a whole
epoch are such a search.

Rows clearly longer than others have large inner products with queries anywhere (labels of the head
of the distribution). They are in no list and are compared with every query. If all lengths are
about equal there are none.

Letters of axes here, in addition to those in types.py:

    Q  queries in one product          R  rows in one product
    C  lists                           V  lists that a query visits in a round
    P  hits: pairs of query and row whose score reaches the query's bar
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xmcray.retrieval.answerable import AnswerableRows
from xmcray.retrieval.exact import (
    GROUP,
    Hits,
    as_tensor,
    empty_keys,
    promising_groups,
    row_slots,
    scores_in,
    scores_of,
    to_keys,
    with_new_keys,
)
from xmcray.types import Float32Array, Int64Array, spans

# Queries at once: the more, the larger the products. Their numbers have 16 bits, because those sort
# fastest.
CHUNK = 1 << 16
# Lists visited, and long rows compared, by the end of each round but the last. The K-th best score
# after a round is the bar that scores of the next round have to reach.
_LIST_ROUNDS = (1, 8)
_LONG_ROUNDS = (512, 4096)
_BLOCK = 1024  # long rows in one product, and queries whose nearest lists are found at once


@dataclass(frozen=True)
class InvertedLists:
    """Rows by list.

    Attributes:
        vector_ND: float32, all N rows by position.
        centroid_CD: float32, one centroid per list.
        row_ids: int64, positions of the rows that are in lists, list after list.
        offsets: where each list begins in `row_ids`, and the end; C + 1 numbers.
        long_ids: int64, positions of the rows that are in no list, longest first.
    """

    vector_ND: Tensor
    centroid_CD: Tensor
    row_ids: Tensor
    offsets: list[int]
    long_ids: Tensor

    def rows_of(self, number: int) -> Tensor:
        """int64, positions of the rows in one list."""
        return self.row_ids[self.offsets[number] : self.offsets[number + 1]]

    def search(self, query_QD: Tensor, k: int, num_lists: int, rows: AnswerableRows) -> Tensor:
        """Sort keys int64 [Q, k] (see exact.py) of the best rows in each query's nearest lists.

        Args:
            query_QD: float32.
            k: answers per query.
            num_lists: lists that each query visits.
            rows: ids and hidden positions of all rows.
        """
        keys = [torch.empty((0, k), dtype=torch.int64)]
        for span in spans(len(query_QD), CHUNK):
            query_BD = query_QD[span]
            chunk_rows = rows.for_queries(span.start, span.stop)
            keys.append(_ChunkSearch(self, query_BD, k, chunk_rows).run(num_lists))
        return torch.cat(keys)


class _ChunkSearch:
    """One chunk of queries: the best keys so far, and the hits of the present round."""

    def __init__(
        self, lists: InvertedLists, query_BD: Tensor, k: int, rows: AnswerableRows
    ) -> None:
        self.lists = lists
        self.query_BD = query_BD
        self.id_N = as_tensor(rows.ids, np.int64)
        self.some_no_answer = bool((self.id_N < 0).any())
        self.best_BK = empty_keys(len(query_BD), k).clone()
        self.hits: list[Hits] = []
        self.buffer = query_BD.new_empty(0)
        # One number per hidden pair of query and row, ascending.
        hidden = rows.hidden
        pairs = hidden.row_ids * len(lists.vector_ND) + hidden.values
        self.hidden_pairs: Int64Array = np.unique(pairs)

    def run(self, num_lists: int) -> Tensor:
        """Keys int64 [B, k] after rounds of more and more lists and long rows."""
        # Good answers are likely in the nearest lists and among the longest rows. Visiting a few of
        # both first raises the bar, so that the large last round has few hits.
        nearest_BV = self._nearest_lists(num_lists)
        long_rounds = list(torch.tensor_split(self.lists.long_ids, _LONG_ROUNDS))
        ends = [end for end in _LIST_ROUNDS if end < num_lists]
        start = 0
        for end in [*ends, num_lists]:
            self._visit_lists(nearest_BV[:, start:end], is_first=start == 0)
            self._merge_hits()
            start = end
            self._visit_long_rows(long_rounds.pop(0))
            self._merge_hits()
        for row_ids in long_rounds:
            self._visit_long_rows(row_ids)
            self._merge_hits()
        return self.best_BK

    def _nearest_lists(self, num_lists: int) -> Tensor:
        """int64 [B, num_lists], lists by inner product with their centroids, best first."""
        nearest = []
        for query_QD in self.query_BD.split(_BLOCK):
            score_QC = query_QD @ self.lists.centroid_CD.T
            nearest.append(score_QC.topk(num_lists, dim=1).indices)
        return torch.cat(nearest)

    def _visit_lists(self, list_BV: Tensor, is_first: bool) -> None:
        """Scores the rows of each list for all queries that visit it.

        Args:
            list_BV: int64 [B, V], the lists that each query visits in this round.
            is_first: nothing was scored before this round.
        """
        width = list_BV.shape[1]
        # A query that visits one list, and has no keys yet, takes the best rows of that list.
        take_at_once = is_first and width == 1 and not len(self.hidden_pairs)
        # Sorted by list, the visits of one list lie next to each other. visit // width is the query.
        visited_list = list_BV.reshape(-1)
        visits = torch.argsort(visited_list, stable=True)
        visits_per_list = torch.bincount(visited_list, minlength=len(self.lists.centroid_CD))
        bar_B = self._bar()
        start = 0
        for number, num_visits in enumerate(visits_per_list.tolist()):
            queries = visits[start : start + num_visits] // width
            start += num_visits
            row_ids = self.lists.rows_of(number)
            if not num_visits or not len(row_ids):
                continue
            if take_at_once:
                self._take_best(queries, row_ids)
            else:
                self._score(queries, row_ids, bar_B)

    def _bar(self) -> Tensor:
        """float32 [B], each query's K-th best score so far."""
        return scores_of(self.best_BK[:, -1])

    def _take_best(self, queries: Tensor, row_ids: Tensor) -> None:
        """The first list of a query: there is no bar yet, so its best rows are taken at once."""
        # index_select is faster than indexing with a tensor.
        query_QD = self.query_BD.index_select(0, queries)
        score_QR = query_QD @ self.lists.vector_ND.index_select(0, row_ids).T
        id_R = self.id_N[row_ids]
        if self.some_no_answer:
            score_QR.masked_fill_(id_R < 0, -torch.inf)
        best, place = score_QR.topk(min(self.best_BK.shape[1], len(row_ids)), dim=1)
        self.best_BK[queries, : best.shape[1]] = to_keys(best, id_R[place])

    def _visit_long_rows(self, row_ids: Tensor) -> None:
        if not len(row_ids):
            return
        bar_B = self._bar()
        for queries in torch.arange(len(self.query_BD)).split(_BLOCK):
            for rows in row_ids.split(_BLOCK):
                self._score(queries, rows, bar_B)

    def _score(self, queries: Tensor, row_ids: Tensor, bar_B: Tensor) -> None:
        """Keeps the hits among some rows for some queries."""
        # Whole groups: the last row is repeated, and its copies get the score -inf.
        padding = row_ids[-1:].expand(-len(row_ids) % GROUP)
        padded = torch.cat([row_ids, padding])
        # One buffer for all products: fresh memory costs as much as the product that fills it.
        size = len(queries) * len(padded)
        if size > len(self.buffer):
            self.buffer = self.query_BD.new_empty(2 * size)
        score_QR = self.buffer[:size].view(len(queries), len(padded))
        query_QD = self.query_BD.index_select(0, queries)
        torch.mm(query_QD, self.lists.vector_ND.index_select(0, padded).T, out=score_QR)
        score_QR[:, len(row_ids) :] = -torch.inf
        bar_Q = bar_B.index_select(0, queries)
        groups = promising_groups(score_QR, bar_Q)
        if len(groups):
            hits = scores_in(groups, score_QR, bar_Q)
            self.hits.append(Hits(queries[hits.query_P], padded[hits.row_P], hits.score_P))

    def _merge_hits(self) -> None:
        """Merges the hits of a round into the best keys, a block of queries at a time."""
        if not self.hits:
            return
        all_hits = Hits(
            torch.cat([hits.query_P for hits in self.hits]),
            torch.cat([hits.row_P for hits in self.hits]),
            torch.cat([hits.score_P for hits in self.hits]),
        )
        self.hits.clear()
        hits = self._visible(all_hits)
        # By query. Numbers of 16 bits are sorted by a radix sort.
        query_numbers = hits.query_P.numpy().astype(np.uint16)
        hits = hits.take(torch.from_numpy(np.argsort(query_numbers, kind="stable")))
        key_P = to_keys(hits.score_P, self.id_N[hits.row_P])
        num_queries = len(self.best_BK)
        slot_P = row_slots(hits.query_P, num_queries)
        low = 0
        for span in spans(num_queries, _BLOCK):
            # low .. high are the hits of the queries of the span: hits are sorted by query.
            high = int(torch.searchsorted(hits.query_P, span.stop))
            self.best_BK[span] = with_new_keys(
                self.best_BK[span],
                key_P[low:high],
                hits.query_P[low:high] - span.start,
                slot_P[low:high],
            )
            low = high

    def _visible(self, hits: Hits) -> Hits:
        """The hits without the pairs that must not be answered."""
        if not len(self.hidden_pairs):
            return hits
        pairs = hits.query_P * len(self.lists.vector_ND) + hits.row_P
        is_hidden = np.isin(pairs.numpy(), self.hidden_pairs)
        return hits.take(torch.from_numpy(np.flatnonzero(~is_hidden)))


def long_rows(vectors: Float32Array, share: float, ratio: float) -> Int64Array:
    """Positions of the rows that are clearly longer than others, ascending.

    A list finds a row by its direction alone. A query's answers are in the nearest lists as long as
    no other row makes up for its direction by its length. Rows of about one length are therefore
    best left to the lists, all of them.

    Args:
        vectors: float32 [n, D].
        share: at most this share of the rows, the longest.
        ratio: only rows longer than this many times the median length.
    """
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    # Longest first, of equal ones the first.
    longest = np.lexsort((np.arange(len(lengths)), -lengths))[: int(share * len(vectors))]
    if not len(longest):
        return longest
    return np.sort(longest[lengths[longest] > ratio * np.median(lengths)])
