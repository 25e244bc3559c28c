"""DEXML: a dual encoder for extreme classification, with losses in which positives do not compete.

    paper                  here                      meaning
    Eq. 5, decoupled       losses.softmax            each positive against all negatives
    Eq. 3, softmax         losses.softmax            the compared loss
    Eq. 6, SoftTop-k       losses.softmax            for the metrics at k
    App. B.2               Dexml._dropped            dropout on the embeddings
    App. B.5               training.step.Embedder    all labels, with a graph for one micro-batch
    App. C.3               EmbeddingCache            hard negatives without encoding all labels

A label's vector is that of its text, made by the query encoder in the same step. With columns "all"
a rank encodes all labels it owns; scores exist in blocks only, so neither B x L scores nor the
graphs of L texts are ever in memory. The other settings restrict the columns to a pool: the
positives of the batch ("in_batch"), and in addition hard negatives from a stale index ("hard",
ANCE) or from a cache of all label vectors ("cache").
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmcray.config import check_choices, check_ranges
from xmcray.errors import ConfigError
from xmcray.losses.bce import full_bce
from xmcray.losses.pairs import Pairs
from xmcray.losses.softmax import decoupled_softmax, soft_top_k, softmax
from xmcray.methods.base import MethodContext, MethodEntry, dual_encoder_defaults
from xmcray.methods.dual_encoder import DualEncoder
from xmcray.methods.label_pool import LabelPool
from xmcray.methods.log_q import BatchProbability, check_log_q
from xmcray.negatives.plan import NegativesConfig
from xmcray.nn.heads import Head, NormalisedHead
from xmcray.parallel import collectives
from xmcray.parallel.collectives import gather_rows
from xmcray.parallel.partition import LabelPartition
from xmcray.parallel.transfers import to_device
from xmcray.types import Batch, Int64Array, Ragged, Shortlist, StepOutput


@dataclass(frozen=True, kw_only=True)
class DexmlConfig:
    """Section `method` of DEXML.

    Attributes:
        loss: "decoupled" (Eq. 5), "softmax" (Eq. 3), "soft_top_k" (Eq. 6) or "bce".
        columns: labels that a batch is scored against: "all", "hard" (positives and hard negatives
            of the batch), "in_batch" (positives of the batch) or "cache" (positives, and the
            hardest of all labels by a cache).
        hard_per_query: m, drawn from the `negatives.hard` labels of a query's shortlist; for
            columns "hard".
        cache_hard: K, labels that the cache adds to a batch; for columns "cache".
        num_positives: of a query, drawn uniformly in every step; 0 for all.
        temperature: tau; scores are divided by it.
        log_q: divide a negative's term in the denominator by the probability that its label is in a
            random batch (logQ correction), by which frequent labels are no longer pushed down; for
            columns "in_batch" and the decoupled loss.
        dropout: on the embeddings of queries and label texts, after pooling (App. B.2). The rates
            inside a transformer are its own, or `encoder.dropout`.
        normalised: vectors have length 1. The released configurations of the two largest sets have
            neither that nor a temperature.
        top_k: k of SoftTop-k.
        alpha: steepness of SoftTop-k.
    """

    loss: Literal["decoupled", "softmax", "soft_top_k", "bce"] = "decoupled"
    columns: Literal["all", "hard", "in_batch", "cache"] = "all"
    hard_per_query: int = 10
    cache_hard: int = 512
    num_positives: int = 0
    temperature: float = 0.05
    log_q: bool = False
    dropout: float = 0.0
    normalised: bool = True
    top_k: int = 5
    alpha: float = 2.0

    def __post_init__(self) -> None:
        check_choices(self, "method")
        check_ranges(
            self,
            "method",
            hard_per_query=1,
            cache_hard=1,
            num_positives=0,
            temperature=1e-4,
            dropout=(0, 0.99),
            top_k=1,
            alpha=1e-3,
        )
        if self.log_q and (self.columns != "in_batch" or self.loss != "decoupled"):
            raise ConfigError(
                f"method.log_q is on, and needs columns=in_batch and loss=decoupled (found"
                f" columns={self.columns} and loss={self.loss}); leave it out or set those"
            )


@dataclass(frozen=True, slots=True)
class ScoredPool:
    """The labels of a pool as columns of the loss, on the host.

    Attributes:
        pool: The labels.
        positives: Drawn positives.
        skipped: Pairs that are neither positive nor negative; with the decoupled loss, all that are
            no negatives.
        k_G: k of SoftTop-k for each query; None with another loss.
        keep_UD: Dropout mask of this rank's labels; None without dropout.
        log_q_U: Log of the probability that each of this rank's labels is in a batch; None if it
            does not count.
    """

    pool: LabelPool
    positives: Pairs
    skipped: Pairs
    k_G: Tensor | None
    keep_UD: Tensor | None
    log_q_U: Tensor | None


@dataclass(frozen=True, slots=True)
class DexmlInputs:
    """What the loss needs of a batch, on the host.

    Attributes:
        positives: Drawn positives of all queries.
        pool: Labels that are scored; with a cache, those to which mined ones are added.
        label_tokens: Token ids of this rank's labels of the pool.
        scored: Pairs of the pool and dropout of its labels; None with a cache.
        keep_BD: Dropout mask of this rank's queries; None without dropout.
    """

    positives: Ragged
    pool: LabelPool
    label_tokens: Ragged
    scored: ScoredPool | None
    keep_BD: Tensor | None


@dataclass(frozen=True, slots=True)
class CacheOutput(StepOutput):
    """Output of a step with the cache, with the vectors that refresh it.

    Attributes:
        label_ids: int64 [U], labels of this rank that were encoded.
        label_vectors: [U, D], their vectors, without a graph.
    """

    label_ids: Int64Array
    label_vectors: Tensor


class Dexml(DualEncoder):
    """Implements `methods.base.Method`."""

    def __init__(self, config: DexmlConfig, context: MethodContext) -> None:
        head_type = NormalisedHead if config.normalised else Head
        super().__init__("dexml", context, head_type(context.dim))
        self.config = config
        self.cache: EmbeddingCache | None = None
        if config.columns == "cache":
            self.cache = EmbeddingCache(context)

    @functools.cached_property
    def in_batch(self) -> BatchProbability:
        """For `log_q`; read by the first batch, because an export needs none."""
        return BatchProbability.of(self.context.data, self.config.num_positives)

    def start(self) -> None:
        """Fills the cache with the vectors of all labels."""
        if self.cache is not None:
            self.cache.vector_SD.copy_(self.answer_rows())

    def prepare(self, batch: Batch, shortlist: Shortlist | None) -> DexmlInputs:
        """Draws positives, and collects columns and pairs, as far as they do not have to be mined."""
        positives = self.context.draw_positives(batch, self.config.num_positives)
        pool = self._pool(batch, positives, shortlist)
        scored = None if self.cache is not None else self._scored(batch, positives, pool)
        keep_BD = self._keep_mask("queries", batch.step, batch.start, batch.stop)
        return DexmlInputs(positives, pool, self.context.label_tokens(pool.own), scored, keep_BD)

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> StepOutput:
        """The loss of the batch over all columns (Eq. 3, 5 or 6)."""
        inputs: DexmlInputs = self.inputs(batch, shortlist)
        if self.cache is not None:
            return self._loss_with_cache(batch, inputs, self.cache)
        assert inputs.scored is not None
        query_BD, label_UD = self.context.encode_with_labels(
            batch, inputs.pool.own, inputs.label_tokens
        )
        total = self._dropped_total(query_BD, label_UD, batch, inputs.keep_BD, inputs.scored)
        return StepOutput(total, len(batch.query_ids), self.head(query_BD.detach()))

    def after_step(self, batch: Batch, output: StepOutput) -> None:
        """Puts the vectors that the step encoded into the cache."""
        if self.cache is not None:
            assert isinstance(output, CacheOutput)
            self.cache.refresh(output.label_ids, output.label_vectors)

    def state_tensors(self) -> Mapping[str, Tensor]:
        """The cached vectors, if there is a cache."""
        if self.cache is None:
            return {}
        return {"cache": self.cache.vector_SD}

    def _loss_with_cache(
        self,
        batch: Batch,
        inputs: DexmlInputs,
        cache: EmbeddingCache,
    ) -> CacheOutput:
        """Loss over the positives and the labels whose cached vectors have the largest gradients.

        The vectors of the batch's labels are refreshed first, then the others are mined (DEXML,
        App. C.3).
        """
        context = self.context
        positives = inputs.positives
        batch_pool = inputs.pool
        query_BD, positive_UD = context.encode_with_labels(
            batch, batch_pool.own, inputs.label_tokens
        )
        hardest = self._mine(query_BD, positive_UD, batch, positives, batch_pool, cache)

        pool = LabelPool.of(context.partition, positives, Ragged.from_rows([hardest]))
        own_hardest = hardest[context.partition.owns(hardest)]
        hard_UD = context.encode(context.label_tokens(own_hardest))
        # Columns ascend by label, so the vectors of positives and mined labels are interleaved.
        encoded_ids = np.concatenate([batch_pool.own, own_hardest])
        order = torch.from_numpy(np.argsort(encoded_ids))
        (order_U,) = to_device([order], context.device)
        label_UD = torch.cat([positive_UD, hard_UD]).index_select(0, order_U)

        scored = self._scored(batch, positives, pool)
        total = self._dropped_total(query_BD, label_UD, batch, inputs.keep_BD, scored)
        return CacheOutput(
            total,
            len(batch.query_ids),
            self.head(query_BD.detach()),
            pool.own,
            self.head(label_UD.detach()),
        )

    def _mine(
        self,
        query_BD: Tensor,
        positive_UD: Tensor,
        batch: Batch,
        positives: Ragged,
        batch_pool: LabelPool,
        cache: EmbeddingCache,
    ) -> Int64Array:
        """The labels that the loss over all labels would move most, by their cached vectors.

        Without dropout and without a graph to the encoder, because this loss only ranks labels.

        Args:
            query_BD: The encoder's vectors of this rank's queries.
            positive_UD: The encoder's vectors of this rank's labels of `batch_pool`.
            batch: Global batch.
            positives: Drawn positives of all queries.
            batch_pool: The labels of `positives`.
            cache: Vectors of all labels.
        """
        query_GD = gather_rows(self.head(query_BD.detach()), len(batch.query_ids))
        # A copy, because a loss changes nothing: the cache itself is refreshed after the step.
        label_SD = cache.refreshed(batch_pool.own, self.head(positive_UD.detach()))
        label_SD.requires_grad_()
        all_labels = LabelPool.everything(self.context.partition)
        scored = self._scored(batch, positives, all_labels, with_dropout=False)
        total = self._total(query_GD, label_SD, batch, scored)
        (gradient_SD,) = torch.autograd.grad(total, label_SD)
        return cache.hardest(gradient_SD, batch_pool.ids, self.config.cache_hard)

    def _dropped_total(
        self,
        query_BD: Tensor,
        label_UD: Tensor,
        batch: Batch,
        keep_BD: Tensor | None,
        scored: ScoredPool,
    ) -> Tensor:
        """This rank's sum of the configured loss, with dropout on the embeddings.

        Args:
            query_BD: The encoder's vectors of this rank's queries.
            label_UD: The encoder's vectors of this rank's labels of the pool.
            batch: Global batch.
            keep_BD: Dropout mask of the queries; None without dropout.
            scored: Labels that are scored.
        """
        query_BD = self.head(self._dropped(query_BD, keep_BD))
        column_UD = self.head(self._dropped(label_UD, scored.keep_UD))
        query_GD = gather_rows(query_BD, len(batch.query_ids))
        return self._total(query_GD, column_UD, batch, scored)

    def _keep_mask(self, purpose: str, step: int, start: int, stop: int) -> Tensor | None:
        """Dropout mask by position in the global batch or in the pool (App. B.2)."""
        return self.context.keep_mask(
            f"dropout {purpose}", step, start, stop, self.context.dim, self.config.dropout
        )

    def _dropped(self, vector_BD: Tensor, mask: Tensor | None) -> Tensor:
        """Vectors with the dropout of a mask."""
        keep_BD = self.context.keep_factors(mask, self.config.dropout)
        return vector_BD if keep_BD is None else vector_BD * keep_BD

    def _pool(self, batch: Batch, positives: Ragged, shortlist: Shortlist | None) -> LabelPool:
        partition = self.context.partition
        if self.config.columns == "all":
            return LabelPool.everything(partition)
        # A cache adds mined labels to these.
        if self.config.columns in ("in_batch", "cache"):
            return LabelPool.of(partition, positives)
        hard = self.context.draw_hard_negatives(batch, shortlist, self.config.hard_per_query)
        return LabelPool.of(partition, positives, hard)

    def _scored(
        self, batch: Batch, positives: Ragged, pool: LabelPool, *, with_dropout: bool = True
    ) -> ScoredPool:
        """The pairs of a pool, and the dropout of its labels.

        Args:
            batch: Global batch.
            positives: Drawn positives of all queries.
            pool: Labels that are scored.
            with_dropout: Whether the labels have dropout.
        """
        positives = batch.counting(positives)
        if self.config.loss == "decoupled":
            skipped = pool.pairs(batch.positives, batch.excluded)
        else:
            # Positives that were not drawn, or count 0, are neither positive nor negative.
            skipped = pool.pairs(batch.positives, batch.excluded, without=positives)
        k_G = None
        if self.config.loss == "soft_top_k":
            k_G = self._top_k(batch, positives, pool)
        keep_UD = None
        if with_dropout:
            stop = pool.first + pool.num_columns
            keep_UD = self._keep_mask("labels", batch.step, pool.first, stop)
        log_q_U = None
        if self.config.log_q:
            log_q_U = self.in_batch.log_of_labels(pool.own, len(batch.query_ids))
        return ScoredPool(pool, pool.positives(positives, batch), skipped, k_G, keep_UD, log_q_U)

    def _total(
        self,
        query_GD: Tensor,
        column_UD: Tensor,
        batch: Batch,
        scored: ScoredPool,
    ) -> Tensor:
        """This rank's sum of the configured loss over its columns.

        Args:
            query_GD: Vectors of all queries.
            column_UD: Vectors of this rank's labels of the pool.
            batch: Global batch.
            scored: Labels that are scored.
        """
        scale = 1 / self.config.temperature
        drawn = scored.positives
        skipped = scored.skipped
        if self.config.loss == "decoupled":
            return decoupled_softmax(query_GD, column_UD, drawn, skipped, scale, scored.log_q_U)
        if self.config.loss == "softmax":
            return softmax(query_GD, column_UD, drawn, skipped, scale)
        if self.config.loss == "bce":
            return full_bce(query_GD * scale, column_UD, drawn, skipped)
        assert scored.k_G is not None
        return soft_top_k(
            query_GD,
            column_UD,
            drawn,
            skipped,
            scored.k_G,
            self.config.alpha,
            scale,
            widest=scored.pool.most_columns,
        )

    def _top_k(self, batch: Batch, positives: Ragged, pool: LabelPool) -> Tensor:
        """[G], k of each query, or less if its columns are too few to leave one outside the top k.

        Args:
            batch: Global batch.
            positives: Positives of all queries that were drawn and count.
            pool: Labels that are scored.
        """
        # These positives count. The other positives and the query's own label do not, and no label
        # is both.
        num_undrawn_G = pool.count(batch.positives) - pool.count(positives)
        num_counted_G = pool.num_labels - num_undrawn_G - pool.count(batch.excluded)
        k_G = np.minimum(self.config.top_k, num_counted_G - 1)
        # The threshold exists for any k above 0, so a query with one column gets half a label.
        return torch.from_numpy(np.maximum(k_G, 0.5))


class EmbeddingCache:
    """Vectors of this rank's labels from when they were last encoded.

    (Lindgren et al. 2021; DEXML, App. C.3.)

    Attributes:
        vector_SD: The cached vectors; zero until `Dexml.start` or a restore.
    """

    def __init__(self, context: MethodContext) -> None:
        self.partition: LabelPartition = context.partition
        self.vector_SD = torch.zeros(
            self.partition.size,
            context.dim,
            dtype=context.dtype,
            device=context.device,
        )

    def hardest(self, gradient_SD: Tensor, exclude: Int64Array, count: int) -> Int64Array:
        """The labels of all ranks that the loss would move most; collective.

        Args:
            gradient_SD: Gradient of the loss with respect to the cached vectors.
            exclude: Labels that are left out.
            count: Largest number of labels.

        Returns:
            int64, label ids, ascending, the same on every rank. Of labels with equal gradients the
            lower ids come first.
        """
        # In float32, labels with equal texts stay equal when more ranks add up their gradients in
        # another order.
        norm_S = gradient_SD.norm(dim=1).float().cpu().numpy()
        partition = self.partition
        own_excluded = exclude[partition.owns(exclude)]
        norm_S[partition.to_local(own_excluded)] = -1  # `_largest` passes over negative values
        own_ids = np.arange(partition.start, partition.stop)
        best_own = _largest(norm_S, own_ids, count)
        if collectives.num_ranks() == 1:
            return np.sort(best_own)

        # Every rank sends its best labels with their norms, in one array of integers. The bits of
        # floats that are not negative have the order of the floats.
        best_norms = norm_S[partition.to_local(best_own)]
        candidates = np.stack([best_norms.view(np.int32), best_own], axis=1, dtype=np.int64)
        (own_candidates,) = to_device([torch.from_numpy(candidates)], gradient_SD.device)
        gathered = collectives.gather_ragged(own_candidates)
        norm_bits_K, id_K = torch.cat(gathered).cpu().numpy().T
        # The ranks of a plan, which exist on paper only, all send the same labels.
        return np.unique(_largest(norm_bits_K, id_K, count))

    def refreshed(self, label_ids: Int64Array, vector_UD: Tensor) -> Tensor:
        """[S, D], a copy in which some of this rank's labels have other vectors."""
        local_ids = torch.from_numpy(self.partition.to_local(label_ids))
        (local_U,) = to_device([local_ids], vector_UD.device)
        return self.vector_SD.index_copy(0, local_U, vector_UD)

    def refresh(self, label_ids: Int64Array, vector_UD: Tensor) -> None:
        """Replaces the vectors of some of this rank's labels."""
        local_ids = torch.from_numpy(self.partition.to_local(label_ids))
        (local_U,) = to_device([local_ids], vector_UD.device)
        self.vector_SD.index_copy_(0, local_U, vector_UD)


def _largest(values: npt.NDArray[np.number[Any]], ids: Int64Array, count: int) -> Int64Array:
    """Ids of the `count` largest values that are not negative; of equal values the lower ids."""
    if count < len(values):
        # A partial sort finds the count-th largest value; only what reaches it needs sorting.
        place = len(values) - count
        threshold = np.partition(values, place)[place]
        reaches = values >= threshold
        values = values[reaches]
        ids = ids[reaches]
    is_candidate = values >= 0
    ids = ids[is_candidate]
    values = values[is_candidate]
    # lexsort orders by its last key first: by falling value, then by rising id.
    order = np.lexsort((ids, -values))
    return ids[order[:count]]


def _check_negatives(config: DexmlConfig, negatives: NegativesConfig) -> None:
    if config.columns == "hard" and not negatives.hard:
        raise ConfigError(
            "method.columns is hard, but negatives.hard is 0;"
            " set negatives.hard to the number of labels that the index finds for a query"
        )
    if config.log_q:
        check_log_q(negatives)


ENTRY = MethodEntry(
    DexmlConfig,
    Dexml,
    defaults=dual_encoder_defaults(),
    label_counts=("hard_per_query", "cache_hard", "top_k"),
    uses_label_texts=True,
    # The cache holds whole vectors, whose prefixes have other lengths.
    has_prefixes=lambda config: config.columns != "cache",
    needs_batch=lambda config: config.columns in ("hard", "in_batch"),
    uses_hard=lambda config: config.columns == "hard",
    check_negatives=_check_negatives,
)
