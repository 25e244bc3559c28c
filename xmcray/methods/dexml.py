"""DEXML: a dual encoder for extreme classification, with losses in which positives do not compete.

    paper                  here                      meaning
    Eq. 5, decoupled       losses.softmax            each positive against all negatives
    Eq. 3, softmax         losses.softmax            the compared loss
    Eq. 6, SoftTop-k       losses.softmax            for the metrics at k
    App. B.5               training.step.Embedder    all labels with a graph that lives for one micro-batch
    App. C.3               EmbeddingCache            fresh hard negatives without encoding all labels

What is particular: a label's vector is its text's, made by the encoder that makes the queries', in the same step. With
negatives "all" a rank encodes all labels it owns; scores exist in blocks only, so neither B x L nor the graphs of L
texts ever do. The other settings restrict the columns to a pool: positives of the batch ("in_batch"), and besides them
hard negatives from a stale index ("hard", ANCE) or from a cache of all label vectors ("cache").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xmcray import draws
from xmcray.config import check_choices, check_range
from xmcray.errors import ConfigError
from xmcray.losses.bce import full_bce
from xmcray.losses.softmax import decoupled_softmax, soft_top_k, softmax
from xmcray.methods.base import BundleSpec, Parts
from xmcray.methods.label_pool import LabelPool
from xmcray.negatives.sampler import draw_from_rows
from xmcray.nn.heads import Head, NormalisedHead
from xmcray.nn.row_table import RowOptimConfig, RowTable
from xmcray.parallel import collectives
from xmcray.parallel.collectives import gather_rows
from xmcray.parallel.partition import LabelPartition
from xmcray.types import Batch, Int64Array, LossTerms, Ragged, Shortlist


@dataclass(frozen=True, kw_only=True)
class DexmlConfig:
    """Section `method` of DEXML.

    Attributes:
        loss: "decoupled" (Eq. 5), "softmax" (Eq. 3), "soft_top_k" (Eq. 6) or "bce".
        columns: labels that a batch is scored against: "all", "hard" (positives and hard negatives of the batch),
            "in_batch" (positives of the batch) or "cache" (positives, and the hardest of all labels by a cache).
        hard_per_query: m, drawn from the `negatives.hard` labels of a query's shortlist; for columns "hard".
        cache_hard: K, labels of a batch that are taken for the cache's sake; for columns "cache".
        num_positives: of a query, drawn uniformly in every step; 0 for all.
        temperature: tau; scores are divided by it.
        normalised: vectors have length 1. The released configurations of the two largest sets have neither that nor a
            temperature.
        top_k, alpha: k and steepness of SoftTop-k.
    """

    loss: Literal["decoupled", "softmax", "soft_top_k", "bce"] = "decoupled"
    columns: Literal["all", "hard", "in_batch", "cache"] = "all"
    hard_per_query: int = 10
    cache_hard: int = 512
    num_positives: int = 0
    temperature: float = 0.05
    normalised: bool = True
    top_k: int = 5
    alpha: float = 2.0

    def __post_init__(self) -> None:
        check_choices(self, "method")
        check_range("method.hard_per_query", self.hard_per_query, low=1)
        check_range("method.cache_hard", self.cache_hard, low=1)
        check_range("method.num_positives", self.num_positives, low=0)
        check_range("method.temperature", self.temperature, low=1e-4)
        check_range("method.top_k", self.top_k, low=1)
        check_range("method.alpha", self.alpha, low=1e-3)


class Dexml:
    """Fulfils `methods.base.Method`."""

    def __init__(self, config: DexmlConfig, parts: Parts) -> None:
        parts.check_label_texts("dexml")
        if config.columns == "hard" and not parts.negatives.hard:
            raise ConfigError(
                "method.columns is hard, but negatives.hard is 0; say how many the index is to find"
            )
        self.config, self.parts = config, parts
        self.modules: Mapping[str, nn.Module] = {}
        self.lr_factors: Mapping[str, float] = {}
        self.bundle_spec = BundleSpec()
        self.head: Head = (NormalisedHead if config.normalised else Head)(parts.dim)
        self.cache = (
            EmbeddingCache(parts.partition, self.answer_rows())
            if config.columns == "cache"
            else None
        )
        self.tables: Mapping[str, RowTable] = {"cache": self.cache.table} if self.cache else {}

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> LossTerms:
        """The loss of the batch over all columns (Eq. 3, 5 or 6)."""
        positives = self._drawn(batch)
        if self.cache is not None:
            return self._loss_by_cache(batch, positives, self.cache)
        pool = self._pool(batch, positives, shortlist)
        data = self.parts.data
        tokens = Ragged.concatenate([batch.tokens, data.tokens(data.num_train + pool.own)])
        vectors = self.head(self.parts.encode(tokens))
        query_BD, column_UD = vectors.split([len(batch.tokens), len(pool.own)])
        query_GD = gather_rows(query_BD, len(batch.query_ids))
        total = self._total(query_GD, column_UD, batch, positives, pool)
        return LossTerms(total, len(batch.query_ids), query_BD.detach())

    def _loss_by_cache(self, batch: Batch, positives: Ragged, cache: EmbeddingCache) -> LossTerms:
        """The loss over positives and the labels whose cached vectors have the largest gradients (App. C.3)."""
        part, data = self.parts.partition, self.parts.data
        query_BD = self.head(self.parts.encode(batch.tokens))
        query_GD = gather_rows(query_BD, len(batch.query_ids))
        cached_SD = cache.table.weight_SD.detach().requires_grad_()
        stale = self._total(
            query_GD.detach(), cached_SD, batch, positives, LabelPool.everything(part)
        )
        (gradient_SD,) = torch.autograd.grad(stale, cached_SD)
        hardest = cache.hardest(gradient_SD, np.unique(positives.values), self.config.cache_hard)
        pool = LabelPool.of(part, positives, Ragged.from_rows([hardest]))
        column_UD = self.head(self.parts.encode(data.tokens(data.num_train + pool.own)))
        total = self._total(query_GD, column_UD, batch, positives, pool)
        cache.refresh(pool.own, column_UD)
        return LossTerms(total, len(batch.query_ids), query_BD.detach())

    def index_rows(self) -> Tensor:
        """Vectors of this rank's label texts."""
        return self.answer_rows()

    def answer_rows(self) -> Tensor:
        """Vectors of this rank's label texts."""
        label_SD: Tensor = self.head(self.parts.label_vectors())
        return label_SD

    def _drawn(self, batch: Batch) -> Ragged:
        if not self.config.num_positives:
            return batch.positives
        generator = draws.generator(self.parts.seed, "positives", batch.step)
        return draw_from_rows(batch.positives, self.config.num_positives, generator)

    def _pool(self, batch: Batch, positives: Ragged, shortlist: Shortlist | None) -> LabelPool:
        if self.config.columns == "all":
            return LabelPool.everything(self.parts.partition)
        if self.config.columns != "hard":
            return LabelPool.of(self.parts.partition, positives)
        hard = self.parts.drawn_hard(batch, shortlist, self.config.hard_per_query)
        return LabelPool.of(self.parts.partition, positives, hard)

    def _total(
        self, query_GD: Tensor, column_UD: Tensor, batch: Batch, positives: Ragged, pool: LabelPool
    ) -> Tensor:
        scale, device = 1 / self.config.temperature, query_GD.device
        drawn = pool.pairs(positives, device=device)
        if self.config.loss == "decoupled":
            not_negatives = pool.pairs(batch.positives, batch.excluded, device=device)
            return decoupled_softmax(query_GD, column_UD, drawn, not_negatives, scale)
        # positives that were not drawn are neither positive nor negative
        skipped = pool.pairs(batch.positives, batch.excluded, without=positives, device=device)
        if self.config.loss == "softmax":
            return softmax(query_GD, column_UD, drawn, skipped, scale)
        if self.config.loss == "bce":
            pairs = drawn.rows, drawn.columns, skipped.rows, skipped.columns
            return full_bce(query_GD * scale, column_UD, *pairs).total
        return soft_top_k(
            query_GD, column_UD, drawn, skipped, self._top_k(batch, pool), self.config.alpha, scale
        )

    def _top_k(self, batch: Batch, pool: LabelPool) -> float:
        """k, and less where a pool has fewer columns that count: some must be able to stay outside."""
        skipped = (batch.positives.lengths + batch.excluded.lengths).max(initial=0)
        return float(max(min(self.config.top_k, len(pool.ids) - skipped - 1), 0.5))


class EmbeddingCache:
    """Vectors of this rank's labels as they were when last encoded (Lindgren et al. 2021; DEXML, App. C.3).

    Args:
        part: who owns which label. start_SD: vectors to start with.
    """

    def __init__(self, part: LabelPartition, start_SD: Tensor) -> None:
        self.part = part
        self.table = RowTable(
            start_SD, RowOptimConfig(kind="sgd", lr=0.0, momentum=0.0)
        )  # for checkpoints only

    def hardest(self, gradient_SD: Tensor, known: Int64Array, count: int) -> Int64Array:
        """The labels of all ranks that the loss would move most, the same on every rank.

        Args:
            gradient_SD: of the loss with respect to the cached vectors. known: labels that are left out.
        Returns:
            int64, at most `count` label ids, ascending; of equal ones the lower.
        """
        # in float32: labels with equal texts stay equal when other ranks add up their gradients in another order
        norm_S = gradient_SD.norm(dim=1).float().cpu().numpy()
        norm_S[self.part.to_local(known[self.part.owns(known)])] = -1
        own = _largest(norm_S, np.arange(self.part.start, self.part.stop), count)
        found = torch.from_numpy(
            np.stack([norm_S[own - self.part.start], own], axis=1, dtype=np.float64)
        )
        norm_K, id_K = (
            torch.cat(collectives.gather_ragged(found.to(gradient_SD.device))).cpu().numpy().T
        )
        return np.sort(_largest(norm_K, id_K.astype(np.int64), count))

    def refresh(self, labels: Int64Array, vector_UD: Tensor) -> None:
        """Keeps new vectors of some of this rank's labels."""
        local_U = torch.from_numpy(self.part.to_local(labels)).to(vector_UD.device)
        self.table.weight_SD.index_copy_(0, local_U, vector_UD.detach())


def _largest(value_S: npt.NDArray[np.floating[Any]], ids: Int64Array, count: int) -> Int64Array:
    """The ids of the `count` largest values that are not negative; of equal ones the lower ids."""
    if count < len(value_S):
        least = np.partition(value_S, len(value_S) - count)[len(value_S) - count]
        value_S, ids = value_S[value_S >= least], ids[value_S >= least]
    value_S, ids = value_S[value_S >= 0], ids[value_S >= 0]
    return ids[np.lexsort((ids, -value_S))[:count]]
