"""ASTRA: a one-vs-all classifier trained on sampled labels, hard negatives from an index over its own rows.

    paper     here                         meaning
    P_i       batch.positives              labels of query i
    H_i       shortlist.take(...)          hard negatives of query i, from a stale index
    R         draws.uniform_labels(...)    uniform labels, drawn once for the whole global batch
    L / c     pool_weight                  importance weight of a label of R (Lemma 4.1)
    Eq. 2     losses.bce.sampled_bce

What is particular: only the rows of P_i, H_i and R are read, scored and updated, so a step costs the same for 10^4 and
10^7 labels. Two departures from the paper: R is shared by the global batch (the paper draws one for each query; both
are unbiased, the shared one is a dense product), and slots without a label are left out instead of padded.
`exact` replaces the sampled sum by the sum over all labels with the same everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from xmcray import draws
from xmcray.config import check_range
from xmcray.errors import ConfigError
from xmcray.losses.bce import sampled_bce
from xmcray.losses.pairs import pair_scores
from xmcray.methods.base import Parts
from xmcray.methods.one_vs_all import OneVsAll, OneVsAllConfig
from xmcray.negatives.sampler import Candidates, capped_positives, gather_candidates
from xmcray.parallel.collectives import gather_rows
from xmcray.types import Batch, LossTerms, Ragged, Shortlist


@dataclass(frozen=True, kw_only=True)
class AstraConfig(OneVsAllConfig):
    """Section `method` of ASTRA, besides what one-vs-all methods share.

    Attributes:
        importance_weight: of a uniform negative: "unbiased" (L / c), "none" (1), or a number.
        max_positives: positives of a query that are scored, drawn uniformly; 0 for all.
        index_on: hard negatives are nearest "classifier" rows, or nearest "labels" (embeddings of label texts).
        exact: score all labels instead of a sample.
    """

    importance_weight: Literal["unbiased", "none"] | float = "unbiased"
    max_positives: int = 0
    index_on: Literal["classifier", "labels"] = "classifier"
    exact: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.max_positives", self.max_positives, low=0)
        if isinstance(self.importance_weight, float):
            check_range("method.importance_weight", self.importance_weight, low=0)


class Astra(OneVsAll):
    """Fulfils `methods.base.Method`."""

    def __init__(self, config: AstraConfig, parts: Parts) -> None:
        if not (config.exact or parts.negatives.hard or parts.negatives.uniform):
            raise ConfigError(
                "negatives.uniform and negatives.hard are 0: rows would only meet positives; raise one, or set"
                " method.exact=true"
            )
        super().__init__(config, parts)
        self.config = config
        if config.logit_prior == "prior":
            asked = parts.negatives
            sampled = asked.hard + min(asked.uniform, parts.data.num_labels) * self._pool_weight()
            self.logit_prior = self.prior(parts.data.num_labels if config.exact else sampled)

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> LossTerms:
        """Binary cross-entropy of the batch, over sampled labels or over all (Eq. 1, 2)."""
        query_BD = self.parts.encode(batch.tokens)
        query_GD = gather_rows(self.drop(query_BD, batch), len(batch.query_ids))
        terms = (
            self.exact(query_GD, batch)
            if self.config.exact
            else self._sampled(query_GD, batch, shortlist)
        )
        return LossTerms(terms.total, terms.num_queries, query_BD.detach())

    def index_rows(self) -> Tensor:
        """Classifier rows, or embeddings of the label texts."""
        return (
            self.answer_rows()
            if self.config.index_on == "classifier"
            else self.parts.label_vectors()
        )

    def _sampled(self, query_GD: Tensor, batch: Batch, shortlist: Shortlist | None) -> LossTerms:
        found = self._candidates(batch, shortlist)
        row_UD = self.classifier.table.rows(found.row_ids)
        pair_score_P = pair_scores(query_GD, row_UD, found.pair_query, found.pair_row)
        pool_score_GC = query_GD @ row_UD.index_select(0, found.pool_rows).T
        weight_P = None if found.pair_weight is None else found.pair_weight.to(query_GD)
        return sampled_bce(
            pair_score_P + self.logit_prior,
            found.pair_is_positive,
            weight_P,
            pool_score_GC + self.logit_prior,
            found.skip_query,
            found.skip_column,
            self._pool_weight(),
        )

    def _candidates(self, batch: Batch, shortlist: Shortlist | None) -> Candidates:
        data, negatives, seed = self.parts.data, self.parts.negatives, self.parts.seed
        unbiased = self.config.importance_weight == "unbiased"
        positives, weight_G = capped_positives(batch, self.config.max_positives, seed, unbiased)
        width = negatives.hard_at(batch.epoch)
        hard = (
            shortlist.take(batch.query_ids, width)
            if shortlist and width
            else Ragged.empty(len(batch.query_ids))
        )
        pool = draws.uniform_labels(
            seed, batch.step, data.num_labels, negatives.uniform_at(batch.epoch)
        )
        return gather_candidates(batch, hard, pool, positives, weight_G, self.parts.partition).to(
            self.parts.device
        )

    def _pool_weight(self) -> float:
        weight, uniform = self.config.importance_weight, self.parts.negatives.uniform
        if weight == "none" or not uniform:
            return 1.0
        return (
            max(1.0, self.parts.data.num_labels / uniform)
            if weight == "unbiased"
            else float(weight)
        )
