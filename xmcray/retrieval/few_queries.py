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
from xmcray.types import Float32Array, Int64Array

# Up to so many queries are scored one by one. At 8 queries a matrix product is as fast
# (benchmarks/one_query.py).
MOST_QUERIES = 4
# Floats of vectors that keep a thread busy for about a millisecond.
THREAD_FLOATS = 1 << 22
LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class BestRows:
    """The rows with the best scores, in any order.

    Attributes:
        ids: int64 [P], not negative.
        scores: float32 [P], finite or inf.
    """

    ids: Int64Array
    scores: Float32Array


def is_faster(vector_ND: Tensor, num_queries: int) -> bool:
    """Whether these queries should be scored one by one, by FAISS."""
    few = 0 < num_queries <= MOST_QUERIES and len(vector_ND) > 0
    plain = vector_ND.dtype == torch.float32 and not vector_ND.is_cuda
    return few and plain and vector_ND.is_contiguous() and ann.is_installed()


def best_rows(
    vector_ND: Tensor, query_D: Tensor, k: int, ids: Int64Array, hidden: Int64Array
) -> BestRows:
    """The k best rows of one query, and further rows whose score equals the k-th best.

    Args:
        vector_ND: float32, contiguous, on the CPU.
        query_D: float32.
        k: wanted rows; there are less if fewer rows can be answers.
        ids: int64 [n], id of each row; a row with a negative id is no answer.
        hidden: int64, positions of rows that are no answers to this query.
    """
    scores = _scores(vector_ND.numpy(), query_D.numpy())
    scores[hidden] = -np.inf
    rows = _reaching_kth(scores, k)
    if len(rows) < min(k, len(scores)) or ids[rows].min(initial=0) < 0:
        # Some of the best rows are no answers. Looking at all ids only then costs nothing usually.
        scores[np.isnan(scores) | (ids < 0)] = -np.inf
        rows = _reaching_kth(scores, k)
    return BestRows(ids[rows], scores[rows])


def _reaching_kth(scores: Float32Array, k: int) -> Int64Array:
    """Positions of the scores above -inf that reach the k-th best one.

    There are less than k of them if some of the best scores are NaN or -inf.
    """
    # torch selects from 10^5 scores in half the time that NumPy takes. NaN counts as the best.
    best = torch.from_numpy(scores).topk(min(k, len(scores))).values
    kth_best = max(float(best[-1]), LOWEST)
    return np.flatnonzero(scores >= kth_best)


def _scores(vectors: Float32Array, query: Float32Array) -> Float32Array:
    """float32 [n], the inner products of all rows, computed by torch's number of threads."""
    num_parts = min(torch.get_num_threads(), math.ceil(vectors.size / THREAD_FLOATS))
    if num_parts == 1:
        return ann.inner_products(vectors, query)
    parts = np.array_split(vectors, num_parts)
    # FAISS releases Python's lock while it computes.
    scores = _pool(num_parts).map(lambda rows: ann.inner_products(rows, query), parts)
    return np.concatenate(list(scores))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="xmcray-scores")
