"""ASTRA: a one-vs-all classifier trained on sampled labels, with hard negatives from an index.

    paper     here                         meaning
    P_i       batch.positives              labels of query i
    H_i       shortlist.take(...)          hard negatives of query i, from a stale index
    R         draws.uniform_labels(...)    uniform labels, drawn once for the whole global batch
    L / c     pool_weight                  importance weight of a label of R (Lemma 4.1)
    Eq. 2     losses.bce.sampled_bce

Only the rows of P_i, H_i and R are read, scored and updated, so a step costs the same for 10^4 and
10^7 labels. Two departures from the paper: R is shared by the global batch (the paper draws one for
each query; both are unbiased, and the shared one is a dense product), and slots without a label are
left out instead of padded. With `exact` the sum runs over all labels, and nothing else changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from xmcray import draws
from xmcray.config import check_range
from xmcray.losses.bce import sampled_bce
from xmcray.losses.pairs import pair_scores
from xmcray.methods.base import MethodContext, MethodEntry
from xmcray.methods.one_vs_all import ExactInputs, OneVsAll, OneVsAllConfig
from xmcray.negatives.sampler import Candidates, capped_positives, gather_candidates
from xmcray.parallel.collectives import gather_rows
from xmcray.types import Batch, Ragged, Shortlist, StepOutput


@dataclass(frozen=True, kw_only=True)
class AstraConfig(OneVsAllConfig):
    """Section `method` of ASTRA, in addition to the settings of all one-vs-all methods.

    Attributes:
        importance_weight: of a uniform negative: "unbiased" (L / c), "none" (1), or a number.
        max_positives: positives of a query that are scored, drawn uniformly; 0 for all.
        index_on: hard negatives are nearest "classifier" rows, or nearest "labels" (embeddings of
            label texts).
        exact: score all labels instead of a sample.
    """

    importance_weight: Literal["unbiased", "none"] | float = "unbiased"
    max_positives: int = 0
    index_on: Literal["classifier", "labels"] = "classifier"
    exact: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.max_positives", self.max_positives, low=0)
        if not isinstance(self.importance_weight, str):
            check_range("method.importance_weight", self.importance_weight, low=0)


@dataclass(frozen=True, slots=True)
class SampledInputs:
    """What the sampled loss needs of a batch, on the host.

    Attributes:
        keep_BD: Dropout mask of this rank's queries; None without dropout.
        candidates: Labels of this rank that the batch is scored against.
    """

    keep_BD: Tensor | None
    candidates: Candidates


class Astra(OneVsAll):
    """Implements `methods.base.Method`."""

    def __init__(self, config: AstraConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        self.config = config
        if config.index_on == "labels" and context.negatives.hard:
            context.check_label_texts("method.index_on=labels", "use method.index_on=classifier")
        if config.logit_prior == "prior":
            num_labels = context.data.num_labels
            negatives = context.negatives
            if config.exact:
                self.logit_prior = self.prior(num_labels)
                return
            # A label of the pool counts as many times as its weight says.
            uniform = min(negatives.uniform, num_labels)
            num_negatives = negatives.hard + uniform * self._pool_weight()
            # With unbiased weights, the positives that are drawn stand for all of a query.
            is_unbiased = config.importance_weight == "unbiased"
            max_positives = 0 if is_unbiased else config.max_positives
            self.logit_prior = self.prior(num_negatives, max_positives)

    def prepare(self, batch: Batch, shortlist: Shortlist | None) -> SampledInputs | ExactInputs:
        """Dropout mask, and candidates (Eq. 2) or the pairs among all labels (Eq. 1)."""
        if self.config.exact:
            return self.exact_inputs(batch)
        return SampledInputs(self.keep_mask(batch), self._candidates(batch, shortlist))

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> StepOutput:
        """Binary cross-entropy of the batch over sampled labels (Eq. 2) or over all (Eq. 1)."""
        inputs: SampledInputs | ExactInputs = self.inputs(batch, shortlist)
        query_BD = self.context.encode(batch.tokens)
        query_GD = gather_rows(self.drop(query_BD, inputs.keep_BD), len(batch.query_ids))
        if isinstance(inputs, ExactInputs):
            total = self.exact_loss(query_GD, inputs)
        else:
            total = self._sampled_loss(query_GD, inputs.candidates.to(self.context.device))
        return StepOutput(total, len(query_GD), query_BD.detach())

    def index_rows(self) -> Tensor:
        """Classifier rows, or embeddings of the label texts."""
        if self.config.index_on == "classifier":
            return self.answer_rows()
        return self.context.label_vectors()

    def _sampled_loss(self, query_GD: Tensor, candidates: Candidates) -> Tensor:
        row_UD = self.classifier.rows(candidates.row_ids)
        pair_score_P = pair_scores(query_GD, row_UD, candidates.pair_query, candidates.pair_row)
        pool_score_GC = query_GD @ row_UD.index_select(0, candidates.pool_rows).T
        pair_weight_P = candidates.pair_weight
        if pair_weight_P is not None:
            pair_weight_P = pair_weight_P.to(query_GD)
        return sampled_bce(
            pair_score_P + self.logit_prior,
            candidates.pair_is_positive,
            pair_weight_P,
            pool_score_GC + self.logit_prior,
            candidates.skip_query,
            candidates.skip_column,
            self._pool_weight(),
        )

    def _candidates(self, batch: Batch, shortlist: Shortlist | None) -> Candidates:
        context = self.context
        negatives = context.negatives
        positives, weight_G = capped_positives(
            batch,
            self.config.max_positives,
            context.seed,
            unbiased=self.config.importance_weight == "unbiased",
        )
        # Unlike the dual encoders, ASTRA scores its whole shortlist and draws nothing from it.
        hard = Ragged.empty(len(batch.query_ids))
        if shortlist is not None:
            hard = shortlist.take(batch.query_ids, negatives.hard_at(batch.epoch))
        pool = draws.uniform_labels(
            context.seed,
            batch.step,
            context.data.num_labels,
            negatives.uniform_at(batch.epoch),
        )
        return gather_candidates(batch, hard, pool, positives, weight_G, context.partition)

    def _pool_weight(self) -> float:
        weight = self.config.importance_weight
        uniform = self.context.negatives.uniform
        if weight == "none" or not uniform:
            return 1.0
        if weight == "unbiased":
            return max(1.0, self.context.data.num_labels / uniform)
        return float(weight)


ENTRY = MethodEntry(
    AstraConfig,
    Astra,
    has_prefixes=lambda config: True,
    needs_negatives=lambda config: not config.exact,
    uses_hard=lambda config: not config.exact,
)
