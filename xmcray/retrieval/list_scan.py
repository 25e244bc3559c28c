"""Searches inverted lists with many queries: one matrix product per list.

A search that takes one query at a time reads a list again for each query. Here one matrix product
scores a list for all queries that visit it. A score costs as little as in an exhaustive search, but
only the rows of the visited lists are scored. Every score is exact. The search for the hard
negatives of a whole epoch works this way on a GPU. On a CPU `Index` decides for each search.

The search goes in rounds. In the first rounds a query visits few lists, in the last rounds many. The
k-th best score of a query so far is its *bar*. A *hit* is a score that reaches the bar. Only hits are
kept. From time to time they are merged into the best answers, which raises the bar.

The product of one list is small, and starting an operation on a device takes as long as reading a
thousand rows. So the products of many lists are written one after another into one buffer, and each
later step is one operation on the whole buffer.

Letters of axes here, in addition to those in types.py:

    Q  queries of a search or product   R  rows of one list or of several, each list
    N  all rows                            filled up to whole groups
    A  all lists; C of them have no     V  lists that a query visits in a round
       long rows
    P  visits: pairs of query and list  G  groups of scores, all visits one after another
    J  rows of one group (GROUP)        M  groups of the longest list of a batch
    H  groups that may have a hit       I  hits: pairs of query and row
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
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
    row_slots,
    scores_of,
    to_keys,
    with_new_keys,
)
from xmcray.retrieval.inverted_lists import InvertedLists, num_groups
from xmcray.types import Float32Array, spans

# After each round, a query has visited this many times as many lists as before the round.
ROUND_GROWTH = 16


def scan_lists(
    lists: InvertedLists,
    queries: Float32Array,
    k: int,
    nprobe: int,
    rows: AnswerableRows,
) -> Tensor:
    """Finds the best rows in each query's nearest lists.

    Args:
        lists: all rows.
        queries: float32 [Q, D].
        k: answers per query.
        nprobe: lists that each query visits, besides those of long rows.
        rows: ids and hidden positions of all rows.
    Returns:
        int64 [Q, k], sort keys of the rows, best first (see exact.py).
    """
    id_N = as_tensor(rows.ids, np.int64).to(lists.vector_ND.device)
    most_visits = max(nprobe, lists.num_long)
    limits = lists.limits
    num_queries = max(1, min(limits.queries, limits.visits // most_visits))
    keys = [torch.empty((0, k), dtype=torch.int64)]
    for span in spans(len(queries), num_queries):
        chunk_rows = rows.for_queries(span.start, span.stop)
        scan = _ChunkScan(lists, queries[span], k, chunk_rows, id_N)
        keys.append(scan.run(nprobe).cpu())
    return torch.cat(keys)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Visits of one list that are scored by one matrix product.

    Attributes:
        first_row: where the list begins in `InvertedLists.row_ids`.
        num_rows: rows of the list, in whole groups.
        start: the first of these visits among all visits, which are sorted by list.
        stop: one past the last of them.
    """

    first_row: int
    num_rows: int
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        """Where the rows of the list are in `InvertedLists.row_ids`."""
        return slice(self.first_row, self.first_row + self.num_rows)

    @property
    def num_visits(self) -> int:
        """Number of visits, each by another query."""
        return self.stop - self.start


class _ChunkScan:
    """Searches for one chunk of queries.

    Args:
        lists: all rows.
        queries: float32 [B, D].
        k: answers per query.
        rows: ids and hidden positions of all rows, for these queries.
        id_N: int64, `rows.ids` on the device of the rows.
    """

    def __init__(
        self,
        lists: InvertedLists,
        queries: Float32Array,
        k: int,
        rows: AnswerableRows,
        id_N: Tensor,
    ) -> None:
        device = lists.vector_ND.device
        self.lists = lists
        self.query_BD = as_tensor(queries).to(device)
        self.id_N = id_N
        self.has_unanswerable = bool((rows.ids < 0).any())
        self.best_BK = empty_keys(len(queries), k).to(device, copy=True)
        # The k-th best score of each query so far.
        self.bar_B = scores_of(self.best_BK[:, -1])
        # Hits that are not merged into `best_BK` yet.
        self.hits: list[Hits] = []
        self.num_hits = 0
        self.buffer = self.query_BD.new_empty(0)
        # One number per pair of query and row that must not be answered, ascending.
        hidden_pairs = np.unique(rows.hidden.pairs(len(lists.vector_ND)))
        self.hidden_pairs = torch.from_numpy(hidden_pairs).to(device)

    def run(self, nprobe: int) -> Tensor:
        """Visits the nearest lists and all lists of long rows; returns the best keys, int64 [B, k]."""
        num_long = self.lists.num_long
        nearest_BV = self._nearest_lists(nprobe)
        # Lists of long rows come after all other lists, and every query visits all of them.
        long_V = torch.arange(num_long, dtype=torch.int32, device=nearest_BV.device)
        long_V += len(self.lists.centroid_CD)
        long_BV = long_V.expand(len(nearest_BV), -1)
        # Good answers are likely in the nearest lists and among the longest rows. Small rounds over
        # these raise the bar, so that the large last rounds have few hits.
        start = 0
        while start < max(nprobe, num_long):
            stop = max(1, ROUND_GROWTH * start)
            self._visit_lists(nearest_BV[:, start:stop], is_first=start == 0)
            self._visit_lists(long_BV[:, start:stop], is_first=False)
            start = stop
        return self.best_BK

    def _nearest_lists(self, nprobe: int) -> Tensor:
        """int32 [B, nprobe], lists by inner product with their centroids, best first."""
        centroid_CD = self.lists.centroid_CD
        num_queries = max(1, self.lists.limits.scores // len(centroid_CD))
        nearest = []
        for query_QD in self.query_BD.split(num_queries):
            score_QC = query_QD @ centroid_CD.T
            nearest.append(score_QC.topk(nprobe, dim=1).indices.int())
        return torch.cat(nearest)

    def _visit_lists(self, list_BV: Tensor, is_first: bool) -> None:
        """Scores the rows of each list for all queries that visit it, and keeps the best.

        Args:
            list_BV: int32 [B, V], the lists that each query visits in this round.
            is_first: whether this is the first round, in which each query visits one list.
        """
        width = list_BV.shape[1]
        if not width:
            return
        # Sorting by list puts the visits of one list next to each other.
        list_P, place_P = list_BV.reshape(-1).sort(stable=True)
        # The table was flattened row by row, so a place divided by the width is the query.
        query_P = place_P // width
        # `starts` says where the visits of each list begin. Its last entry is the number of visits.
        num_lists = len(self.lists.size_A)
        list_ids = torch.arange(num_lists + 1, dtype=torch.int32, device=list_P.device)
        starts = torch.searchsorted(list_P, list_ids).tolist()
        limit = self.lists.limits.scores
        if is_first:
            # `_list_bar` copies the scores of the first round and selects the best of them, which
            # takes more memory.
            limit //= 4
        for pieces in self._batches(starts, limit):
            batch = slice(pieces[0].start, pieces[-1].stop)
            self._score(pieces, query_P[batch], list_P[batch].long(), is_first)
            if self.num_hits > self.lists.limits.hits:
                self._merge_hits()
        self._merge_hits()

    def _batches(self, starts: Sequence[int], limit: int) -> Iterator[list[_Piece]]:
        """Cuts the visits of each list into pieces, and yields batches of pieces.

        Args:
            starts: where the visits of each list begin, and the number of all visits.
            limit: the most scores and elements of vectors in one batch.
        """
        dim = self.query_BD.shape[1]
        pieces: list[_Piece] = []
        num_elements = 0
        row_ranges = itertools.pairwise(self.lists.offsets)
        visit_ranges = itertools.pairwise(starts)
        for (first_row, end_row), (start, stop) in zip(row_ranges, visit_ranges, strict=True):
            num_rows = end_row - first_row
            # Each visit has its scores and a copy of the query's vector.
            visit_size = num_rows + dim
            most_visits = max(1, limit // visit_size)
            for low in range(start, stop, most_visits):
                piece = _Piece(first_row, num_rows, low, min(low + most_visits, stop))
                size = piece.num_visits * visit_size + num_rows * dim
                # `_list_bar` pads all lists of a batch to the longest, so they must be of similar size.
                is_larger = bool(pieces) and piece.num_rows > 2 * pieces[0].num_rows
                is_full = num_elements + size > limit
                if pieces and (is_larger or is_full):
                    yield pieces
                    pieces = []
                    num_elements = 0
                pieces.append(piece)
                num_elements += size
        if pieces:
            yield pieces

    def _score(
        self, pieces: Sequence[_Piece], query_P: Tensor, list_P: Tensor, is_first: bool
    ) -> None:
        """Scores the visits of a batch and keeps the hits.

        Args:
            pieces: the visits, by list.
            query_P: int64, the query of each visit.
            list_P: int64, the list of each visit.
            is_first: as in `_visit_lists`.
        """
        score_GJ = self._products(pieces, query_P)
        size_P = self.lists.size_A[list_P]
        groups_P = num_groups(size_P)
        # The first group of each visit. The groups of all visits lie one after another.
        first_P = groups_P.cumsum(0) - groups_P
        visits = torch.arange(len(list_P), dtype=torch.int32, device=list_P.device)
        visit_G = torch.repeat_interleave(visits, groups_P, output_size=len(score_GJ))
        bar_P = self.bar_B[query_P]
        # In the first round no query has a bar yet. The k-th best score of its list becomes its bar, but
        # not if rows are hidden: these would raise the bar and are no answers.
        if is_first and not len(self.hidden_pairs):
            most_rows = max(piece.num_rows for piece in pieces)
            bar_P = self._list_bar(score_GJ, visit_G, first_P, size_P, most_rows)
        # With a finite bar, a score of -inf is no hit.
        bar_P = bar_P.clamp(min=torch.finfo(bar_P.dtype).min)

        # Most groups have no hit, so the maximum of a group is compared first. The comparison must be
        # "not below": a group with a NaN has the maximum NaN, and may have a hit too.
        max_G = score_GJ.amax(dim=1)
        is_below_G = max_G < bar_P[visit_G]
        group_H = (~is_below_G).nonzero()[:, 0]
        visit_H = visit_G[group_H]
        score_HJ = score_GJ[group_H]
        # The place of the group's first row in its list.
        slot_H = GROUP * (group_H - first_P[visit_H])
        # Slots beyond the size of a list repeat its last row, and are no hits.
        rows_left_H = size_P[visit_H] - slot_H
        columns = torch.arange(GROUP, device=list_P.device)
        is_hit_HJ = columns < rows_left_H[:, None]
        is_hit_HJ &= score_HJ >= bar_P[visit_H, None]

        group_I, column_I = is_hit_HJ.nonzero(as_tuple=True)
        visit_I = visit_H[group_I]
        # The place of a row in `row_ids`: start of its list, start of its group, place in the group.
        list_start_I = self.lists.offset_A[list_P[visit_I]]
        place_I = list_start_I + slot_H[group_I] + column_I
        row_I = self.lists.row_ids[place_I]
        score_I = score_HJ[group_I, column_I]
        self.hits.append(Hits(query_P[visit_I], row_I, score_I))
        self.num_hits += len(row_I)

    def _products(self, pieces: Sequence[_Piece], query_P: Tensor) -> Tensor:
        """float32 [G, J], the scores of all visits, one after another."""
        query_PD = self.query_BD.index_select(0, query_P)
        row_ids = torch.cat([self.lists.row_ids[piece.rows] for piece in pieces])
        vector_RD = self.lists.vector_ND.index_select(0, row_ids)
        num_scores = sum(piece.num_visits * piece.num_rows for piece in pieces)
        # The buffer is reused, because new memory costs as much as the product that fills it.
        if num_scores > len(self.buffer):
            self.buffer = self.query_BD.new_empty(max(num_scores, self.lists.limits.scores))
        visits = query_PD.split([piece.num_visits for piece in pieces])
        rows = vector_RD.split([piece.num_rows for piece in pieces])
        start = 0
        # This loop only multiplies. Everything that can be done for all lists at once is outside of it.
        for piece, query_QD, list_RD in zip(pieces, visits, rows, strict=True):
            stop = start + len(query_QD) * len(list_RD)
            score_QR = self.buffer[start:stop].view(len(query_QD), len(list_RD))
            torch.mm(query_QD, list_RD.T, out=score_QR)
            if self.has_unanswerable:
                is_unanswerable_R = self.id_N[self.lists.row_ids[piece.rows]] < 0
                score_QR.masked_fill_(is_unanswerable_R, -torch.inf)
            start = stop
        return self.buffer[:num_scores].view(-1, GROUP)

    def _list_bar(
        self, score_GJ: Tensor, visit_G: Tensor, first_P: Tensor, size_P: Tensor, most_rows: int
    ) -> Tensor:
        """float32 [P], the k-th best score of each visit; -inf if its list has fewer than k rows.

        Args:
            score_GJ: float32, the scores of all visits.
            visit_G: int64, the visit of each group.
            first_P: int64, the first group of each visit.
            size_P: int64, rows of the visited list.
            most_rows: rows of the longest list, in whole groups.
        """
        k = self.best_BK.shape[1]
        num_visits = len(first_P)
        if k > most_rows:
            return score_GJ.new_full((num_visits,), -torch.inf)
        # The scores of each visit become a row of a table, as wide as the longest list.
        score_PMJ = score_GJ.new_full((num_visits, most_rows // GROUP, GROUP), -torch.inf)
        groups = torch.arange(len(score_GJ), device=score_GJ.device)
        group_in_list_G = groups - first_P[visit_G]
        score_PMJ[visit_G, group_in_list_G] = score_GJ
        score_PR = score_PMJ.view(num_visits, most_rows)
        slots = torch.arange(most_rows, device=score_GJ.device)
        is_no_row_PR = (slots >= size_P[:, None]) | score_PR.isnan()
        score_PR.masked_fill_(is_no_row_PR, -torch.inf)
        return score_PR.topk(k, dim=1).values[:, -1]

    def _merge_hits(self) -> None:
        """Merges the hits into the best keys, a block of queries at a time."""
        if not self.num_hits:
            return
        query_I = torch.cat([hits.query_P for hits in self.hits])
        row_I = torch.cat([hits.row_P for hits in self.hits])
        score_I = torch.cat([hits.score_P for hits in self.hits])
        self.hits.clear()
        self.num_hits = 0
        visible = self._visible(Hits(query_I, row_I, score_I))
        hits = visible.take(_order(visible.query_P))
        key_I = to_keys(hits.score_P, self.id_N[hits.row_P])
        num_queries, k = self.best_BK.shape
        # The place of each hit among the hits of its query.
        slot_I = row_slots(hits.query_P, num_queries)
        # The keys of a block of queries form a table, whose width is that of the query with most hits.
        most_hits = int(slot_I.max()) + 1 if len(slot_I) else 0
        num_at_once = max(1, self.lists.limits.keys // (k + most_hits))
        start = 0
        for span in spans(num_queries, num_at_once):
            # Hits are sorted by query, so the hits of a span of queries are neighbours.
            stop = int(torch.searchsorted(hits.query_P, span.stop))
            self.best_BK[span] = with_new_keys(
                self.best_BK[span],
                key_I[start:stop],
                hits.query_P[start:stop] - span.start,
                slot_I[start:stop],
            )
            start = stop
        self.bar_B = scores_of(self.best_BK[:, -1])

    def _visible(self, hits: Hits) -> Hits:
        """The hits without those that must not be answered."""
        if not len(self.hidden_pairs):
            return hits
        pairs = hits.query_P * len(self.lists.vector_ND) + hits.row_P
        place = torch.searchsorted(self.hidden_pairs, pairs)
        # A pair that is larger than all hidden pairs has a place after the last one. It is compared with
        # the last one, from which it differs, so it is visible.
        place.clamp_(max=len(self.hidden_pairs) - 1)
        is_visible = self.hidden_pairs[place] != pairs
        return hits.take(is_visible.nonzero()[:, 0])


def _order(query_I: Tensor) -> Tensor:
    """int64 [I], the order that sorts hits by query."""
    if query_I.device.type == "cuda":
        return torch.argsort(query_I, stable=True)
    # A chunk on a CPU has at most 2^16 queries (`inverted_lists.CPU`), so 16 bits hold their numbers.
    # NumPy sorts those by a fast radix sort.
    query_numbers = query_I.numpy().astype(np.uint16)
    return torch.from_numpy(np.argsort(query_numbers, kind="stable"))
