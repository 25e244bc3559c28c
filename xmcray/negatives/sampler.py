"""From a batch and its hard negatives to the label rows that this rank must score.

U  distinct labels    P  (query, label) pairs
C  uniform candidates    T  values of a ragged array
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from xmcray import draws
from xmcray.parallel.partition import LabelPartition
from xmcray.parallel.transfers import to_device
from xmcray.types import Batch, Float64Array, Int64Array, Ragged, find_sorted, offsets_of


@dataclass(frozen=True, slots=True)
class Candidates:
    """Labels of this rank that a global batch is scored against. All rows but `row_ids` are
    positions in `row_ids`.

    Attributes:
        row_ids: int64 [U], distinct local label ids, ascending.
        pair_query: int64 [P], query of each listed pair (positives and hard negatives), ascending.
        pair_row: int64 [P], row of each listed pair.
        pair_is_positive: bool [P].
        pair_weight: float [P], |P_i| / cap if positives were capped, times relevance, or None if all
            weights are 1.
        pool_rows: int64 [C], this rank's part of the uniform candidates.
        skip_query: int64, query of each entry (query, uniform candidate) that is no negative,
            because the candidate is positive, hard or the query itself.
        skip_column: int64, position in `pool_rows` of each such entry.
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
        """Returns the same candidates on another device."""
        if device.type == "cpu":
            return self
        tensors: dict[str, Tensor] = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None:
                tensors[field.name] = tensor
        moved = to_device(list(tensors.values()), device)
        return replace(self, **dict(zip(tensors, moved, strict=True)))


def gather_candidates(
    batch: Batch,
    hard: Ragged,
    pool: Int64Array,
    positives: Ragged,
    weight_G: Float64Array | None,
    part: LabelPartition,
) -> Candidates:
    """Returns the candidates of one step on one rank. Every rank knows the global batch, so nothing
    is exchanged.

    Args:
        batch: the global batch.
        hard: internal label ids of the hard negatives of all G queries, disjoint from their
            positives.
        pool: int64, distinct internal label ids of the uniform candidates, ascending.
        positives: the positives that are scored (a sample of batch.positives if they are capped).
        weight_G: float [G], weight of each query's positives, or None for 1.
        part: the labels of this rank.
    """
    label = np.concatenate([positives.values, hard.values])
    query = np.concatenate([positives.row_ids, hard.row_ids])
    is_positive = np.arange(len(label)) < len(positives.values)
    # Pairs of this rank by query; a stable sort keeps a query's positives before its hard
    # negatives.
    own = np.flatnonzero(part.owns(label))
    by_query = np.argsort(query[own], kind="stable")
    own = own[by_query]
    own_pool = pool[part.owns(pool)]
    # A label may be in many pairs and in the pool; its row is read once.
    local_ids = part.to_local(np.concatenate([label[own], own_pool]))
    row_ids, row_of = np.unique(local_ids, return_inverse=True)
    skip_query, skip_column = _skipped(own_pool, [batch.positives, hard, batch.excluded])
    relevance = batch.weights_of(positives.row_ids, positives.values)
    pair_weight = None
    if weight_G is not None or relevance is not None:
        weight = np.ones(len(label))
        if weight_G is not None:
            weight[is_positive] *= weight_G[positives.row_ids]
        if relevance is not None:
            weight[is_positive] *= relevance
        pair_weight = torch.from_numpy(weight[own])
    return Candidates(
        row_ids=torch.from_numpy(row_ids),
        pair_query=torch.from_numpy(query[own]),
        pair_row=torch.from_numpy(row_of[: len(own)]),
        pair_is_positive=torch.from_numpy(is_positive[own]),
        pair_weight=pair_weight,
        pool_rows=torch.from_numpy(row_of[len(own) :]),
        skip_query=torch.from_numpy(skip_query),
        skip_column=torch.from_numpy(skip_column),
    )


def capped_positives(
    batch: Batch,
    cap: int,
    seed: int,
    unbiased: bool,
) -> tuple[Ragged, Float64Array | None]:
    """Draws at most `cap` positives of each query uniformly.

    Args:
        batch: the global batch.
        cap: most positives of a query; 0 keeps all.
        seed: of the draws, keyed by the step.
        unbiased: whether drawn positives get the weight |P_i| / cap, which keeps the expected sum
            as it was.
    Returns:
        The positives, and float64 [G] weights or None if all are 1.
    """
    lengths = batch.positives.lengths
    if not cap or lengths.max(initial=0) <= cap:
        return batch.positives, None
    weight_G = np.where(lengths > cap, lengths / cap, 1.0) if unbiased else None
    generator = draws.generator(seed, "positives", batch.step)
    return draw_from_rows(batch.positives, cap, generator), weight_G


def draw_from_rows(
    rows: Ragged,
    count: int,
    generator: np.random.Generator,
    weight_T: Float64Array | None = None,
) -> Ragged:
    """Draws at most `count` values of each row without replacement, and keeps them in their old
    order.

    Args:
        rows: the values to draw from.
        count: most values of a row.
        generator: source of randomness.
        weight_T: float [T] > 0; a value is drawn next with probability proportional to its weight,
            uniformly if not given.
    """
    # An exponential race: each value arrives after a random time, and the first `count` of a row
    # are drawn.
    arrival_T = generator.exponential(size=len(rows.values))
    if weight_T is not None:
        arrival_T = arrival_T / weight_T
    order = np.lexsort((arrival_T, rows.row_ids))  # by row, then by arrival
    # Rows stay where they are in this order, so the place in the row is the rank of the arrival.
    drawn = np.sort(order[rows.places < count])
    num_drawn = np.minimum(rows.lengths, count)
    return Ragged(rows.values[drawn], offsets_of(num_drawn))


def _skipped(pool: Int64Array, lists: list[Ragged]) -> tuple[Int64Array, Int64Array]:
    """Finds the listed labels that are in the pool; returns their queries and their positions in
    the pool.

    Args:
        pool: int64, ascending label ids.
        lists: labels of each query.
    """
    label = np.concatenate([labels.values for labels in lists])
    query = np.concatenate([labels.row_ids for labels in lists])
    column, is_in_pool = find_sorted(pool, label)
    return query[is_in_pool], column[is_in_pool]
