"""From a batch and its hard negatives to the label rows that this rank must score."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmcray import draws
from xmcray.parallel.partition import LabelPartition
from xmcray.types import Batch, Int64Array, Ragged

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Labels of this rank that a global batch meets; indices into `rows` name them.

    Attributes:
        row_ids: int64 [U], distinct local label ids, ascending.
        pair_query, pair_row: int64 [P], listed pairs (positives and hard negatives), query ascending.
        pair_is_positive: bool [P].
        pair_weight: float [P], |P_i| / cap where positives were capped, or None when all are 1.
        pool_rows: int64 [C], this rank's part of the uniform pool.
        skip_query, skip_column: entries (query, pool column) that are positive, hard or the query itself.
    """

    row_ids: Tensor
    pair_query: Tensor
    pair_row: Tensor
    pair_is_positive: Tensor
    pair_weight: Tensor | None
    pool_rows: Tensor
    skip_query: Tensor
    skip_column: Tensor

    def to(self, device: torch.device) -> Candidates:
        """The same on another device."""
        if device.type == "cpu":
            return self
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            name: None if t is None else t.to(device) for name, t in tensors.items()
        }
        return Candidates(**moved)


def gather_candidates(
    batch: Batch,
    hard: Ragged,
    pool: Int64Array,
    positives: Ragged,
    weight_G: Float64Array | None,
    part: LabelPartition,
) -> Candidates:
    """Candidates of one step on one rank; every rank knows the global batch, so nothing is exchanged.

    Args:
        hard: internal label ids of the hard negatives of all G queries, disjoint from their positives.
        pool: distinct internal label ids, ascending.
        positives: the positives that are scored (a sample of batch.positives where capped).
        weight_G: float [G], weight of each query's positives, or None for 1.
        part: who owns which label.
    """
    listed = np.concatenate([positives.values, hard.values])
    query = np.concatenate([positives.row_ids, hard.row_ids])
    is_positive = np.arange(len(listed)) < len(positives.values)
    own = np.flatnonzero(part.owns(listed))
    own = own[np.argsort(query[own], kind="stable")]
    own_pool = pool[part.owns(pool)]
    row_ids, index = np.unique(
        np.concatenate([part.to_local(listed[own]), part.to_local(own_pool)]), return_inverse=True
    )
    skip_query, skip_column = _skipped(own_pool, [batch.positives, hard, batch.excluded])
    weights = (
        None
        if weight_G is None
        else torch.from_numpy(np.where(is_positive, weight_G[query], 1.0)[own])
    )
    return Candidates(
        row_ids=torch.from_numpy(row_ids),
        pair_query=torch.from_numpy(query[own]),
        pair_row=torch.from_numpy(index[: len(own)]),
        pair_is_positive=torch.from_numpy(is_positive[own]),
        pair_weight=weights,
        pool_rows=torch.from_numpy(index[len(own) :]),
        skip_query=torch.from_numpy(skip_query),
        skip_column=torch.from_numpy(skip_column),
    )


def capped_positives(
    batch: Batch, cap: int, seed: int, unbiased: bool
) -> tuple[Ragged, Float64Array | None]:
    """At most `cap` positives of each query, drawn uniformly, and the weight |P_i| / cap that keeps the sum unbiased.

    Args:
        cap: 0 keeps all. seed: of the draws, keyed by the step.
        unbiased: whether the drawn positives are weighted.
    Returns:
        The positives, and float64 [G] weights or None when all are 1.
    """
    lengths = batch.positives.lengths
    if not cap or lengths.max(initial=0) <= cap:
        return batch.positives, None
    weight = np.where(lengths > cap, lengths / cap, 1.0) if unbiased else None
    return draw_from_rows(
        batch.positives, cap, draws.generator(seed, "positives", batch.step)
    ), weight


def draw_from_rows(
    rows: Ragged, count: int, generator: np.random.Generator, weight_T: Float64Array | None = None
) -> Ragged:
    """At most `count` values of each row, drawn without replacement, in their old order.

    Args:
        weight_T: float [T] > 0; a value is drawn next with probability proportional to its weight, uniformly if not
            given.
    """
    waits = generator.exponential(
        size=len(rows.values)
    )  # of a race: the first `count` to arrive are drawn
    arrival = waits if weight_T is None else waits / weight_T
    order = np.lexsort((arrival, rows.row_ids))
    place = np.arange(len(order)) - np.repeat(rows.offsets[:-1], rows.lengths)
    drawn = np.sort(order[place < count])
    return Ragged(
        rows.values[drawn], np.concatenate([[0], np.cumsum(np.minimum(rows.lengths, count))])
    )


def _skipped(pool: Int64Array, lists: list[Ragged]) -> tuple[Int64Array, Int64Array]:
    """(query, column) of every listed label that is in the pool; `pool` ascending."""
    label = np.concatenate([part.values for part in lists])
    query = np.concatenate([part.row_ids for part in lists])
    if not len(pool):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    column = np.minimum(np.searchsorted(pool, label), len(pool) - 1)
    hit = pool[column] == label
    return query[hit], column[hit]
