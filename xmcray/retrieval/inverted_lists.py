"""Rows by inverted list, for searches of many queries at once (list_scan.py).

Rows clearly longer than others have large inner products with queries anywhere (labels of the head
of the distribution). They are in lists of their own, which every query visits. If all lengths are
about equal there are none.

Letters of axes here, in addition to those in types.py:

    N  all rows
    A  all lists, C of them of rows that are not long
    R  rows of all lists, each list filled up to whole groups
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xmcray.retrieval.exact import GROUP, as_tensor, row_slots
from xmcray.types import Float32Array, Int64Array


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is computed at once. Small amounts fit a processor's caches, large ones keep a GPU busy.

    Attributes:
        queries: Queries of one chunk. More make the matrix products larger.
        visits: Pairs of query and list that are sorted.
        scores: Scores and elements of gathered vectors.
        hits: Kept until they are merged.
        keys: Best keys so far and new ones, while they are merged.
    """

    queries: int
    visits: int
    scores: int
    hits: int
    keys: int


CPU = Limits(queries=1 << 16, visits=1 << 25, scores=1 << 20, hits=1 << 23, keys=1 << 18)
EQUAL_LENGTHS = 1.001  # ratio of the longest to the shortest of equally long rows
LONG_ROWS = 512  # in a list of long rows, or as many as in an average list if that is more


def gpu_limits(num_rows: int, dim: int) -> Limits:
    """Limits on a GPU, by what the rows take there."""
    half_of_vectors = num_rows * dim // 2
    scores = min(max(half_of_vectors, 1 << 26), 1 << 29)
    return Limits(
        queries=1 << 19,
        visits=scores // 4,
        scores=scores,
        hits=scores // 64,
        keys=scores // 16,
    )


def limits_of(vector_ND: Tensor) -> Limits:
    """Limits on the device of the rows."""
    return gpu_limits(*vector_ND.shape) if vector_ND.device.type == "cuda" else CPU


def device_bytes(num_rows: int, dim: int) -> int:
    """Bytes of a GPU that lists take at their largest, without CUDA's own.

    Args:
        num_rows: rows in lists, float32 [n, D].
        dim: D.
    """
    limits = gpu_limits(num_rows, dim)
    # Vectors, and eight numbers of a row while rows are sorted by list.
    num_bytes = num_rows * (4 * dim + 8 * 8)
    # Scores, their groups, and what is selected from a quarter of them in the first round.
    num_bytes += 10 * limits.scores
    # List, place and query of a visit, and what sorting takes.
    num_bytes += 32 * limits.visits
    # Query, row and score of a hit before and after they are joined and sorted.
    num_bytes += 2 * 2 * 24 * limits.hits
    return num_bytes + limits.queries * 4 * dim + 3 * 8 * limits.keys


@dataclass(frozen=True)
class InvertedLists:
    """Rows by list. Lists with a centroid come first, the shortest first.

    Lists of long rows follow, the longest rows first.

    Attributes:
        vector_ND: float32, all N rows by position.
        centroid_CD: float32, one centroid per list of rows that are not long: the mean of the list's
            sampled rows, or a unit vector if all rows are equally long.
        size_A: int64, rows of each list.
        row_ids: int64, positions of all rows, list after list. The last row of a list is repeated
            until the list has whole groups.
        offset_A: int64, where each list begins in `row_ids`.
    """

    vector_ND: Tensor
    centroid_CD: Tensor
    size_A: Tensor
    row_ids: Tensor
    offset_A: Tensor

    @classmethod
    def of(
        cls,
        vector_ND: Tensor,
        centroid_CD: Tensor,
        row_ids: Tensor,
        list_ids: Tensor,
        long_ids: Int64Array,
    ) -> InvertedLists:
        """Builds the lists from the list of each row.

        Args:
            vector_ND: float32, all N rows by position.
            centroid_CD: float32.
            row_ids: int64, positions of the rows in lists with a centroid.
            list_ids: int64, the list of each of these rows.
            long_ids: int64, positions of all other rows, ascending.
        """
        num_lists = len(centroid_CD)
        long_row_ids = as_tensor(long_ids, np.int64).to(vector_ND.device)
        # The longest first: they raise the bar for the others.
        by_length = vector_ND[long_row_ids].norm(dim=1).argsort(descending=True, stable=True)
        long_lists = torch.arange(len(long_row_ids), device=vector_ND.device)
        long_lists //= max(LONG_ROWS, len(row_ids) // num_lists)
        # Lists of about one size become neighbours, which are scored together.
        by_size = torch.bincount(list_ids, minlength=num_lists).argsort(stable=True)
        # The inverse of a permutation is its argsort: here the new number of each list.
        new_number_C = by_size.argsort()
        all_list_ids = torch.cat([new_number_C[list_ids], num_lists + long_lists])
        all_row_ids = torch.cat([row_ids, long_row_ids[by_length]])
        sorted_row_ids = all_row_ids[all_list_ids.argsort(stable=True)]
        size_A = torch.bincount(all_list_ids, minlength=num_lists)
        start_A = size_A.cumsum(0) - size_A
        # Lists are filled up to whole groups: the slots after a list's last row repeat that row.
        padded_A = GROUP * num_groups(size_A)
        list_R = torch.repeat_interleave(padded_A)
        last_slot_R = size_A[list_R] - 1
        slot_R = torch.minimum(row_slots(list_R, len(size_A)), last_slot_R)
        place_R = start_A[list_R] + slot_R
        return cls(
            vector_ND=vector_ND,
            centroid_CD=centroid_CD[by_size],
            size_A=size_A,
            row_ids=sorted_row_ids[place_R],
            offset_A=padded_A.cumsum(0) - padded_A,
        )

    @functools.cached_property
    def offsets(self) -> list[int]:
        """`offset_A` and the end."""
        return [*self.offset_A.tolist(), len(self.row_ids)]

    @property
    def num_long(self) -> int:
        """Lists that every query visits."""
        return len(self.size_A) - len(self.centroid_CD)

    @property
    def limits(self) -> Limits:
        """How much the device computes at once."""
        return limits_of(self.vector_ND)


def num_groups(num_rows: Tensor) -> Tensor:
    """Whole groups that hold so many rows."""
    return (num_rows + GROUP - 1) // GROUP


def are_equally_long(lengths: Float32Array) -> bool:
    """Whether all rows have the same length, up to 0.1 %. Rows of length 0 (texts without words) are ignored.

    The nearest unit centroid of a row then has the largest inner product with it, too. So a query
    that equals a row visits that row's list first.
    """
    lengths = lengths[lengths != 0]
    return bool(lengths.max(initial=0) <= EQUAL_LENGTHS * lengths.min(initial=np.inf))


def long_rows(vectors: Float32Array, share: float, ratio: float) -> Int64Array:
    """Positions of the rows that are clearly longer than others, ascending.

    A very long row can be an answer to queries that visit other lists. Such rows get lists that every
    query visits. If all rows have about the same length, none is treated as long.

    Args:
        vectors: float32 [n, D].
        share: at most this share of the rows, the longest.
        ratio: only rows longer than this many times the median length.
    """
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    most = int(share * len(vectors))
    # A stable sort keeps rows of equal length in their order.
    longest = np.argsort(-lengths, kind="stable")[:most]
    if not len(longest):
        return longest
    is_long = lengths[longest] > ratio * np.median(lengths)
    return np.sort(longest[is_long])
