"""RAE-XMC: a dual encoder trained to be searched together with its training queries (RAE-XMC, Eq. 8-10).

    paper                    here                          meaning
    tau                      config.temperature            softmax temperature
    Eq. 10                   rae_loss                      labels and in-batch queries as negatives
    m of the top k           hard_per_query, negatives.hard
    Eq. 8, lam, b            config.memory                 how the memory of training queries answers (retrieval/memory)

What is particular: at inference a query meets labels and training queries in one softmax, so in training it competes
with both. The other queries of the global batch are columns beside the labels, except those that share a positive with
it; whether they do is told by all positives, not by the drawn ones. Validation during training is that of lambda = 0,
the labels alone: the memory would have to be encoded anew each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from xmcray import draws
from xmcray.config import check_range
from xmcray.losses.pairs import Pairs
from xmcray.losses.softmax import decoupled_softmax
from xmcray.methods.base import BundleSpec, Parts
from xmcray.methods.label_pool import LabelPool
from xmcray.negatives.sampler import draw_from_rows
from xmcray.nn.heads import Head, NormalisedHead
from xmcray.nn.row_table import RowTable
from xmcray.parallel.collectives import gather_rows
from xmcray.retrieval.votes import MemoryConfig
from xmcray.types import Batch, LossTerms, Ragged, Shortlist


@dataclass(frozen=True, kw_only=True)
class RaeConfig:
    """Section `method` of RAE-XMC.

    Attributes:
        hard_per_query: m, drawn from the `negatives.hard` labels of a query's shortlist.
        query_negatives: in-batch queries without a common positive are negatives too (Eq. 10).
        temperature: tau of the loss; scores are divided by it.
        memory: how the bundle of a finished run answers; every request can choose otherwise.
    """

    hard_per_query: int = 2
    query_negatives: bool = True
    temperature: float = 0.04
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    def __post_init__(self) -> None:
        check_range("method.hard_per_query", self.hard_per_query, low=1)
        check_range("method.temperature", self.temperature, low=1e-4)


class Rae:
    """Fulfils `methods.base.Method`."""

    def __init__(self, config: RaeConfig, parts: Parts) -> None:
        parts.check_label_texts("rae")
        self.config, self.parts = config, parts
        self.tables: Mapping[str, RowTable] = {}
        self.modules: Mapping[str, nn.Module] = {}
        self.lr_factors: Mapping[str, float] = {}
        self.head: Head = NormalisedHead(parts.dim)
        self.bundle_spec = BundleSpec(memory=config.memory)

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> LossTerms:
        """One drawn positive of each query against the labels and the queries of the global batch (Eq. 10)."""
        data, config = self.parts.data, self.config
        drawn = draw_from_rows(
            batch.positives, 1, draws.generator(self.parts.seed, "positives", batch.step)
        )
        hard = self.parts.drawn_hard(batch, shortlist, config.hard_per_query)
        pool = LabelPool.of(self.parts.partition, drawn, hard)
        tokens = Ragged.concatenate([batch.tokens, data.tokens(data.num_train + pool.own)])
        vectors = self.head(self.parts.encode(tokens))
        query_BD, label_UD = vectors.split([len(batch.tokens), len(pool.own)])
        total = rae_loss(
            query_BD, label_UD, batch, drawn, pool, 1 / config.temperature, config.query_negatives
        )
        return LossTerms(total, len(batch.query_ids), query_BD.detach())

    def index_rows(self) -> Tensor:
        """Vectors of this rank's label texts."""
        return self.answer_rows()

    def answer_rows(self) -> Tensor:
        """Vectors of this rank's label texts."""
        label_SD: Tensor = self.head(self.parts.label_vectors())
        return label_SD


def rae_loss(
    query_BD: Tensor,
    label_UD: Tensor,
    batch: Batch,
    drawn: Ragged,
    pool: LabelPool,
    scale: float,
    query_negatives: bool = True,
) -> Tensor:
    """This rank's part of the sum over queries of Eq. 10; the sum over ranks is the loss, the step divides.

    Args:
        query_BD: this rank's queries of the batch. label_UD: the labels of the pool that it owns.
        drawn: the positives that are learned, of all G queries. scale: 1 / tau.
    """
    device = query_BD.device
    query_GD = gather_rows(query_BD, len(batch.query_ids))
    learned = pool.pairs(drawn, device=device)
    not_negatives = pool.pairs(batch.positives, batch.excluded, device=device)
    if not query_negatives:
        return decoupled_softmax(query_GD, label_UD, learned, not_negatives, scale)
    alike = sharing_queries(batch.positives, batch.start, batch.stop)
    alike = Pairs(alike.rows.to(device), alike.columns.to(device) + len(label_UD))
    # as columns the queries are this rank's own rows: their gradient needs no exchange
    column_UD = torch.cat([label_UD, query_BD])
    return decoupled_softmax(query_GD, column_UD, learned, Pairs.union(not_negatives, alike), scale)


def sharing_queries(positives: Ragged, start: int, stop: int) -> Pairs:
    """All queries of the batch (rows) with each of start .. stop - 1 (columns) they share a positive with, or are.

    Every query shares with itself, so none is its own negative.
    """
    by_label = np.argsort(positives.values, kind="stable")
    labels, queries = positives.values[by_label], positives.row_ids[by_label]
    own = positives.slice(start, stop)
    first, last = (
        np.searchsorted(labels, own.values, "left"),
        np.searchsorted(labels, own.values, "right"),
    )
    count = last - first
    place = (
        np.arange(count.sum())
        - np.repeat(np.cumsum(count) - count, count)
        + np.repeat(first, count)
    )
    width = max(stop - start, 1)
    flat = np.unique(queries[place] * width + np.repeat(own.row_ids, count))
    row, column = np.divmod(flat, width)
    return Pairs(torch.from_numpy(row), torch.from_numpy(column))
