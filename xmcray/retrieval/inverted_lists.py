"""Many queries against inverted lists at once: each list is multiplied with all queries that visit it.

A search one query at a time reads a list once for each query and scores its rows one by one; here a list meets its
queries in one matrix product, so that scanning costs what an exhaustive search costs per row, on a small share of the
rows, and every score is exact. The hard negatives of a whole epoch are such a search.

Rows clearly longer than others have large inner products with queries anywhere (labels of the head of the
distribution); they are in no list, and every query meets them. Where lengths are about equal there are none.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xmcray.retrieval.exact import nothing, scores_of, to_keys
from xmcray.types import Int64Array, Ragged

CHUNK = (
    1 << 16
)  # queries at once: the more, the larger the products; numbers of 16 bits sort fastest
# Lists visited before the next, and long rows in turn with them: the K-th best so far is the bar of the next round.
_ROUNDS = (1, 8)
_LONG_ROUNDS = (512, 4096)
_GROUP = 32
_PIECE = 1024  # rows of long rows, and queries, at once


@dataclass(frozen=True)
class InvertedLists:
    """Rows by list.

    Attributes:
        vector_ND: all rows, by position.
        centroid_CD: one per list.
        row_ids: int64 [n], positions list after list. offsets: int64 [C + 1].
        long_ids: int64 [H], positions of the rows that are in no list, longest first.
    """

    vector_ND: Tensor
    centroid_CD: Tensor
    row_ids: Tensor
    offsets: list[int]
    long_ids: Tensor

    def search(
        self, query_QD: Tensor, k: int, num_lists: int, name_N: Tensor, hidden: Ragged | None
    ) -> Tensor:
        """Keys int64 [Q, k] (exact.to_keys) of the best rows in each query's `num_lists` nearest lists.

        Args:
            name_N: int64 [N], what rows are called in the keys, negative for those that are no answers.
            hidden: positions that each query must not get.
        """
        parts = [torch.empty((0, k), dtype=torch.int64)]
        for start in range(0, len(query_QD), CHUNK):
            chunk = query_QD[start : start + CHUNK]
            hide = None if hidden is None else hidden.slice(start, start + len(chunk))
            parts.append(_Search(self, chunk, k, name_N, hide).run(num_lists))
        return torch.cat(parts)


class _Search:
    """One chunk of queries: the best keys so far, and the hits of the present round."""

    def __init__(
        self, lists: InvertedLists, query_BD: Tensor, k: int, name_N: Tensor, hidden: Ragged | None
    ) -> None:
        self.lists, self.query_BD, self.name_N = lists, query_BD, name_N
        self.some_nameless = bool((name_N < 0).any())
        self.best_BK = nothing(len(query_BD), k).clone()
        rows = len(lists.vector_ND)
        self.hidden = (
            np.unique(hidden.row_ids * rows + hidden.values)
            if hidden and len(hidden.values)
            else None
        )
        self.hits: list[tuple[Tensor, Tensor, Tensor]] = []
        self.buffer = query_BD.new_empty(0)

    def run(self, num_lists: int) -> Tensor:
        nearest_BV = self._nearest(num_lists)
        edges = [0, *(edge for edge in _ROUNDS if edge < num_lists), num_lists]
        long_rows = iter(torch.tensor_split(self.lists.long_ids, _LONG_ROUNDS))
        for first, last in itertools.pairwise(edges):
            self._visit(nearest_BV[:, first:last])
            self._merge()
            for rows in itertools.islice(long_rows, None if last == num_lists else 1):
                self._visit_rows(rows)
                self._merge()
        return self.best_BK

    def _nearest(self, num_lists: int) -> Tensor:
        """int64 [B, num_lists], lists by inner product with their centroids, best first."""
        pieces = self.query_BD.split(_PIECE)
        return torch.cat(
            [(piece @ self.lists.centroid_CD.T).topk(num_lists, dim=1).indices for piece in pieces]
        )

    def _visit(self, list_BV: Tensor) -> None:
        width = list_BV.shape[1]
        order = torch.argsort(list_BV.reshape(-1), stable=True)
        counts = torch.bincount(list_BV.reshape(-1), minlength=len(self.lists.centroid_CD)).tolist()
        bar_B, offsets, place = scores_of(self.best_BK[:, -1]), self.lists.offsets, 0
        score = self._begin if width == 1 and self.hidden is None else self._score
        for number, count in enumerate(counts):
            who = order[place : place + count] // width
            place += count
            if count and offsets[number] < offsets[number + 1]:
                score(who, self.lists.row_ids[offsets[number] : offsets[number + 1]], bar_B)

    def _begin(self, who: Tensor, rows: Tensor, _: Tensor) -> None:
        """The first list of a query: nothing to compare with yet, so its best rows are taken at once."""
        score = self.query_BD.index_select(0, who) @ self.lists.vector_ND.index_select(0, rows).T
        names = self.name_N[rows]
        if self.some_nameless:
            score.masked_fill_(names < 0, -torch.inf)
        best, place = score.topk(min(self.best_BK.shape[1], len(rows)), dim=1)
        self.best_BK[who, : best.shape[1]] = to_keys(best, names[place])

    def _visit_rows(self, row_ids: Tensor) -> None:
        bar_B = scores_of(self.best_BK[:, -1])
        for who in torch.arange(len(self.query_BD)).split(_PIECE):
            for rows in row_ids.split(_PIECE) if len(row_ids) else ():
                self._score(who, rows, bar_B)

    def _score(self, who: Tensor, rows: Tensor, bar_B: Tensor) -> None:
        padded = torch.cat([rows, rows[-1:].expand(-len(rows) % _GROUP)])
        # One buffer for all products: fresh memory costs as much as the product that fills it.
        size = len(who) * len(padded)
        if size > len(self.buffer):
            self.buffer = self.query_BD.new_empty(2 * size)
        score = self.buffer[:size].view(len(who), len(padded))
        torch.mm(
            self.query_BD.index_select(0, who),
            self.lists.vector_ND.index_select(0, padded).T,
            out=score,
        )
        score[:, len(rows) :] = -torch.inf
        bar = bar_B.index_select(0, who)
        # Few scores reach the bar. Maxima of groups find them in one pass, twice as fast as comparing every score.
        group_HR = score.view(len(who), -1, _GROUP)
        at_H, group_H = (group_HR.amax(dim=2) >= bar[:, None]).nonzero(as_tuple=True)
        if not len(at_H):
            return
        score_HR = group_HR[at_H, group_H]
        hit_P, place_P = (score_HR >= bar[at_H, None]).nonzero(as_tuple=True)
        self.hits.append(
            (who[at_H[hit_P]], padded[group_H[hit_P] * _GROUP + place_P], score_HR[hit_P, place_P])
        )

    def _merge(self) -> None:
        """The best of what was known and of the hits, a few queries at a time."""
        if not self.hits:
            return
        query_P, row_P, score_P = (torch.cat(parts) for parts in zip(*self.hits, strict=True))
        self.hits.clear()
        if self.hidden is not None:
            seen = np.isin((query_P * len(self.lists.vector_ND) + row_P).numpy(), self.hidden)
            kept = torch.from_numpy(np.flatnonzero(~seen))
            query_P, row_P, score_P = query_P[kept], row_P[kept], score_P[kept]
        order = torch.from_numpy(
            np.argsort(query_P.numpy().astype(np.uint16), kind="stable")
        )  # a radix sort
        query_P, key_P = query_P[order], to_keys(score_P[order], self.name_N[row_P[order]])
        count_B = torch.bincount(query_P, minlength=len(self.best_BK))
        end_B = count_B.cumsum(0)
        slot_P = torch.arange(len(query_P)) - (end_B - count_B)[query_P]
        for start in range(0, len(self.best_BK), _PIECE):
            piece = slice(start, min(start + _PIECE, len(self.best_BK)))
            low, high = int(end_B[start] - count_B[start]), int(end_B[piece.stop - 1])
            new_BW = nothing(piece.stop - start, int(count_B[piece].max())).clone()
            new_BW[query_P[low:high] - start, slot_P[low:high]] = key_P[low:high]
            best = torch.cat([self.best_BK[piece], new_BW], dim=1)
            self.best_BK[piece] = best.topk(self.best_BK.shape[1], dim=1).values


def long_rows(
    vectors: np.ndarray[tuple[int, ...], np.dtype[np.float32]], share: float, ratio: float
) -> Int64Array:
    """int64, ascending: positions of the rows longer than `ratio` times the median length, the longest `share` at most.

    A list hides a row by its direction alone, and a query's answers are in the nearest lists as long as no other row
    makes up for its direction by its length. Rows of about one length are best left to the lists, all of them.
    """
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    longest = np.lexsort((np.arange(len(lengths)), -lengths))[: int(share * len(vectors))]
    return (
        np.sort(longest[lengths[longest] > ratio * np.median(lengths)]) if len(longest) else longest
    )
