"""RAE-XMC: a dual encoder trained to be searched together with its training queries (Eq. 8-10).

    paper                    here                          meaning
    tau                      config.temperature            softmax temperature
    P-hat, 1 positive        config.num_positives          positives of a query in a step
    Eq. 10                   rae_loss                      labels and in-batch queries as negatives
    m of the top k           hard_per_query, negatives.hard
    Eq. 8, lam, b            section `memory`              how the memory of training queries answers

At inference a query meets labels and training queries in one softmax, so in training it competes
with both: the other queries of the global batch are columns as well, except those that share a
positive with it. All positives decide that, not only the drawn ones. Validation during
training uses the labels alone (lambda = 0), because the memory would have to be encoded each time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from xmcray.config import check_ranges
from xmcray.losses.pairs import Pairs
from xmcray.losses.softmax import decoupled_softmax
from xmcray.methods.base import (
    MethodContext,
    MethodEntry,
    dual_encoder_defaults,
)
from xmcray.methods.dual_encoder import DualEncoder
from xmcray.methods.label_pool import LabelPool
from xmcray.methods.log_q import BatchProbability, check_log_q
from xmcray.negatives.plan import NegativesConfig
from xmcray.nn.heads import NormalisedHead
from xmcray.parallel.collectives import gather_rows
from xmcray.types import Batch, Ragged, Shortlist, StepOutput


@dataclass(frozen=True, kw_only=True)
class RaeConfig:
    """Section `method` of RAE-XMC.

    Attributes:
        num_positives: of a query, drawn uniformly in every step (RAE-XMC: 1); 0 for all.
        hard_per_query: m, drawn from the `negatives.hard` labels of a query's shortlist.
        query_negatives: in-batch queries without a common positive are negatives too (Eq. 10).
        temperature: tau of the loss; scores are divided by it.
        log_q: divide a negative's term in the denominator by the probability that its label or its
            query is in a random batch (logQ correction), by which frequent labels are no longer
            pushed down. Without hard negatives.
    """

    # Former place of a setting: `method.memory` is the section `memory` of the run.
    MOVED: ClassVar = {"memory": "memory"}

    num_positives: int = 1
    hard_per_query: int = 2
    query_negatives: bool = True
    temperature: float = 0.04
    log_q: bool = False

    def __post_init__(self) -> None:
        check_ranges(
            self,
            "method",
            num_positives=0,
            hard_per_query=1,
            temperature=1e-4,
        )


@dataclass(frozen=True, slots=True)
class RaePairs:
    """Pairs of a query of the global batch and a column of this rank (Eq. 10).

    Attributes:
        positives: Drawn positives.
        not_negatives: All positives, excluded labels, and queries that share a positive.
    """

    positives: Pairs
    not_negatives: Pairs


@dataclass(frozen=True, slots=True)
class RaeInputs:
    """What the loss needs of a batch, on the host.

    Attributes:
        pool: Labels that are scored.
        label_tokens: Token ids of this rank's labels of the pool.
        pairs: Of queries and columns.
        log_q_U: Log of the probability that each of this rank's columns, labels and then queries, is
            in a batch; None if it does not count.
    """

    pool: LabelPool
    label_tokens: Ragged
    pairs: RaePairs
    log_q_U: Tensor | None


class Rae(DualEncoder):
    """Implements `methods.base.Method`."""

    def __init__(self, config: RaeConfig, context: MethodContext) -> None:
        super().__init__("rae", context, NormalisedHead(context.dim))
        self.config = config

    @functools.cached_property
    def in_batch(self) -> BatchProbability:
        """For `log_q`; read by the first batch, because an export needs none."""
        return BatchProbability.of(self.context.data, self.config.num_positives)

    def prepare(self, batch: Batch, shortlist: Shortlist | None) -> RaeInputs:
        """Draws positives, and collects columns and pairs."""
        drawn = self.context.draw_positives(batch, self.config.num_positives)
        hard = self.context.draw_hard_negatives(batch, shortlist, self.config.hard_per_query)
        pool = LabelPool.of(self.context.partition, drawn, hard)
        pairs = rae_pairs(batch, drawn, pool, self.config.query_negatives)
        label_tokens = self.context.label_tokens(pool.own)
        return RaeInputs(pool, label_tokens, pairs, self._log_q(batch, pool))

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> StepOutput:
        """Drawn positives against labels and queries of the global batch (Eq. 10)."""
        inputs: RaeInputs = self.inputs(batch, shortlist)
        query_BD, label_UD = self.encode(batch, inputs.pool.own, inputs.label_tokens)
        total = rae_loss(
            query_BD,
            label_UD,
            inputs.pairs,
            num_queries=len(batch.query_ids),
            scale=1 / self.config.temperature,
            query_negatives=self.config.query_negatives,
            log_q_U=inputs.log_q_U,
        )
        return StepOutput(total, len(batch.query_ids), query_BD.detach())

    def _log_q(self, batch: Batch, pool: LabelPool) -> Tensor | None:
        """`log_q_U` of `RaeInputs`."""
        if not self.config.log_q:
            return None
        batch_size = len(batch.query_ids)
        log_q_U = self.in_batch.log_of_labels(pool.own, batch_size)
        if not self.config.query_negatives:
            return log_q_U
        log_of_query = self.in_batch.log_of_query(batch_size)
        return torch.cat([log_q_U, log_q_U.new_full((batch.stop - batch.start,), log_of_query)])


def rae_pairs(
    batch: Batch, drawn: Ragged, pool: LabelPool, query_negatives: bool = True
) -> RaePairs:
    """The pairs of a batch for `rae_loss`.

    Args:
        batch: Global batch.
        drawn: Positives that are learned, of all G queries.
        pool: Labels that are scored.
        query_negatives: Other queries are negatives too.
    """
    positives = pool.positives(drawn, batch)
    not_negatives = pool.pairs(batch.positives, batch.excluded)
    if query_negatives:
        shared = sharing_queries(batch.positives, batch.start, batch.stop)
        sharing_pairs = Pairs(shared.rows, shared.columns + pool.num_columns)
        not_negatives = Pairs.union(not_negatives, sharing_pairs)
    return RaePairs(positives, not_negatives)


def rae_loss(
    query_BD: Tensor,
    label_UD: Tensor,
    pairs: RaePairs,
    num_queries: int,
    scale: float,
    query_negatives: bool = True,
    log_q_U: Tensor | None = None,
) -> Tensor:
    """This rank's part of the sum over queries of Eq. 10.

    Args:
        query_BD: Vectors of this rank's queries.
        label_UD: Vectors of this rank's labels of the pool.
        pairs: Of `rae_pairs`.
        num_queries: G, queries of the global batch.
        scale: 1 / tau.
        query_negatives: Other queries are negatives too.
        log_q_U: As in `RaeInputs`.
    """
    query_GD = gather_rows(query_BD, num_queries)
    column_UD = label_UD
    if query_negatives:
        # Each rank adds its own queries as columns behind its labels. As columns they belong to
        # this rank, so the gradient of the columns needs no exchange.
        column_UD = torch.cat([label_UD, query_BD])
    return decoupled_softmax(
        query_GD, column_UD, pairs.positives, pairs.not_negatives, scale, log_q_U
    )


def sharing_queries(positives: Ragged, start: int, stop: int) -> Pairs:
    """Pairs of queries that share a positive; a query shares with itself.

    Args:
        positives: Labels of all G queries.
        start: First query that is a column.
        stop: One past the last one.

    Returns:
        Rows are queries 0 .. G - 1, columns are counted from `start`. Sorted by row.
    """
    # Entries of equal labels lie next to each other, so each label of a column query
    # finds the queries that have it as one span.
    by_label = np.argsort(positives.values, kind="stable")
    labels = positives.values[by_label]
    queries = positives.row_ids[by_label]
    own = positives.slice(start, stop)
    span_start = np.searchsorted(labels, own.values, "left")
    span_stop = np.searchsorted(labels, own.values, "right")
    length = span_stop - span_start

    # The positions of all spans, one span after another.
    first_output = np.cumsum(length) - length
    within_span = np.arange(length.sum()) - np.repeat(first_output, length)
    positions = np.repeat(span_start, length) + within_span

    # Queries that share several labels must give one pair: a pair is one number.
    width = max(stop - start, 1)
    column_queries = np.repeat(own.row_ids, length)
    keys = np.unique(queries[positions] * width + column_queries)
    rows, columns = np.divmod(keys, width)
    return Pairs(torch.from_numpy(rows), torch.from_numpy(columns))


def _check_negatives(config: RaeConfig, negatives: NegativesConfig) -> None:
    if config.log_q:
        check_log_q(negatives)


ENTRY = MethodEntry(
    RaeConfig,
    Rae,
    defaults=dual_encoder_defaults(hard=50),
    label_counts=("hard_per_query",),
    uses_label_texts=True,
    needs_batch=lambda config: True,
    check_negatives=_check_negatives,
    sections=("memory",),
)
