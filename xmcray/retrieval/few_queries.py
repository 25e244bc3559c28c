"""The best rows of few queries, at the speed of FAISS's flat index.

Scoring one query takes as long as reading the rows from memory. FAISS's function reads each row
once and computes its product alone. A score therefore has the same bits whatever rows, queries and
threads there are. Many queries are faster in one matrix product, which reads a row once for all.
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xmcray.retrieval import ann
from xmcray.types import Float32Array, Int64Array, TopLabels

# Up to so many queries are scored one by one. At 8 queries a matrix product is as fast
# (benchmarks/one_query.py).
MOST_QUERIES = 4
# Floats of vectors that keep a thread busy for about a millisecond.
THREAD_FLOATS = 1 << 22
# FAISS keeps up to so many best rows in a heap while it computes scores. For more rows, computing all
# scores first and selecting from them is faster.
MOST_KEPT = 99
GROUP = 32  # scores of which only the maximum is compared at first
LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class BestRows:
    """Rows with the best scores, in any order.

    Attributes:
        ids: int64 [P], not negative.
        scores: float32 [P], finite or inf.
    """

    ids: Int64Array
    scores: Float32Array


def is_faster(vector_ND: Tensor, num_queries: int) -> bool:
    """Whether these queries should be scored one by one, by FAISS."""
    return 0 < num_queries <= MOST_QUERIES and faiss_rows(vector_ND) is not None


def faiss_rows(vector_ND: Tensor) -> Float32Array | None:
    """The same memory, float32 [n, D], if FAISS can search it as it lies; None if it cannot."""
    if vector_ND.dtype != torch.float32 or vector_ND.is_cuda or vector_ND.numel() == 0:
        return None
    return vector_ND.numpy() if vector_ND.is_contiguous() and ann.is_installed() else None


def answer_at_once(
    vectors: Float32Array, queries: Float32Array, k: int, ids: Int64Array
) -> TopLabels | None:
    """The k best rows of one query by a single call of FAISS, best first; None if that is not enough.

    It is not enough if k is too large for FAISS's heap, if several threads should compute, if scores
    are equal, or if one of the best rows is no answer.

    Args:
        vectors: float32 [n, D], from `faiss_rows`.
        queries: float32 [1, D].
        k: answers, at least 1.
        ids: int64 [n], id of each row; a row with a negative id is no answer.
    """
    query = np.ascontiguousarray(queries[0], np.float32)
    best = _best_at_once(vectors, query, k, ids)
    if best is None:
        return None
    best_ids, scores = best
    values = scores.tolist()
    if len(set(values)) < k:
        return None
    if 0.0 in values:
        scores += 0.0  # turns -0.0, which equals 0.0, into 0.0, as in other answers
    return TopLabels(best_ids[None], scores[None])


def best_first(rows: BestRows, k: int) -> TopLabels | None:
    """The answer to one query: the k best rows, equal scores by lower id; None if there are fewer."""
    if len(rows.ids) < k:
        return None
    scores = rows.scores + np.float32(0)  # turns -0.0, which equals 0.0, into 0.0
    # The last key decides first.
    order = np.lexsort((rows.ids, -scores))[:k]
    return TopLabels(rows.ids[order][None], scores[order][None])


def best_rows(
    vectors: Float32Array, query: Float32Array, k: int, ids: Int64Array, hidden: Int64Array
) -> BestRows:
    """The k best rows of one query, all rows with the score of the k-th best, and few others.

    Args:
        vectors: contiguous float32 [n, D].
        query: contiguous float32 [D].
        k: wanted rows; there are fewer if not as many can be answers.
        ids: int64 [n], id of each row; a row with a negative id is no answer.
        hidden: int64, positions of rows that are no answers to this query.
    """
    best = None if len(hidden) else _best_at_once(vectors, query, k, ids)
    if best is not None:
        return BestRows(*best)
    scores = _scores(vectors, query)
    scores[hidden] = -np.inf
    return best_scored(scores, k, ids)


def best_scored(scores: Float32Array, k: int, ids: Int64Array) -> BestRows:
    """The k best of some rows, all that have the score of the k-th best, and few others.

    Args:
        scores: float32 [P], -inf for what is no answer; may change.
        k: wanted rows; there are fewer if not as many can be answers.
        ids: int64 [P], the id of each score's row; a row with a negative id is no answer.
    """
    places = reaching_kth(scores, k)
    best_ids = ids[places]
    has_too_few = len(places) < min(k, len(scores))
    if has_too_few or best_ids.min(initial=0) < 0:
        # Some of the best rows are no answers. All ids are looked at only now, because that is rare.
        scores[np.isnan(scores) | (ids < 0)] = -np.inf
        places = reaching_kth(scores, k)
        best_ids = ids[places]
    return BestRows(best_ids, scores[places])


def _best_at_once(
    vectors: Float32Array, query: Float32Array, k: int, ids: Int64Array
) -> tuple[Int64Array, Float32Array] | None:
    """Ids and scores of the k best rows, best first; None if a single call of FAISS is not enough.

    Scores may be equal, but not that of the last row and that of the next one, which is left out.
    A few numbers are compared as Python's own: a call of NumPy takes microseconds, and the whole
    search should take about ten.
    """
    if k >= min(MOST_KEPT, len(vectors)) or _num_parts(vectors) > 1:
        return None
    # The row after the last one shows whether rows with equal scores compete for the last place.
    scores, rows = ann.best_inner_products(vectors, query, k + 1)
    last_score, next_score = scores[k - 1 :].tolist()
    if rows.item(k) < 0 or next_score == last_score:
        return None
    best_ids = ids.take(rows[:k])
    return None if min(best_ids.tolist()) < 0 else (best_ids, scores[:k])


def reaching_kth(scores: Float32Array, k: int, lowest: float = LOWEST) -> Int64Array:
    """Positions of the k best scores, of all that equal the k-th, and of few others.

    Scores below `lowest` are left out.

    Returns:
        int64, ascending. There may be fewer than k if some of the best scores are NaN or too low.
    """
    # k groups with a maximum that reaches the bar have at least k scores that do. Maxima are found
    # without a branch per score, in a fraction of the time of a selection among all of them.
    num_groups = len(scores) // GROUP
    competing = scores
    if num_groups >= k:
        # Each group is a column, so that whole rows are compared, which lie in order in memory.
        competing = scores[: num_groups * GROUP].reshape(GROUP, num_groups).max(axis=0)
    place = max(0, len(competing) - k)
    # `np.partition` puts NaN last, where the best scores are.
    kth_best = np.partition(competing, place)[place]
    return np.flatnonzero(scores >= max(kth_best, lowest))


def _scores(vectors: Float32Array, query: Float32Array) -> Float32Array:
    """float32 [n], the inner products of all rows, computed by `_num_parts` threads."""
    num_parts = _num_parts(vectors)
    if num_parts == 1:
        return ann.inner_products(vectors, query)
    parts = np.array_split(vectors, num_parts)
    # FAISS releases Python's lock while it computes.
    scores = _pool(num_parts).map(lambda rows: ann.inner_products(rows, query), parts)
    return np.concatenate(list(scores))


def _num_parts(vectors: Float32Array) -> int:
    """Threads that one query is worth."""
    if vectors.size <= THREAD_FLOATS:
        return 1
    return min(torch.get_num_threads(), math.ceil(vectors.size / THREAD_FLOATS))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="xmcray-scores")
