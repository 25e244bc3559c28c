"""Renée: the exact one-vs-all baseline, binary cross-entropy over all labels (Jain et al., MLSys 2023).

    paper                       here                          meaning
    logits, loss skipping       losses.bce.full_bce           the gradient of a score is sigmoid(score) - y
    bottleneck                  encoder.dim                   width of the rows, less than the encoder's for large L
    NGAME M1 start              encoder.name                  a run, a bundle or a folder whose encoder is the start
    low-precision classifier    classifier.storage            bfloat16 rows with stochastic rounding (ELMO)

What is particular: every label is scored for every query, in label chunks, and no score is kept: memory is O(B x chunk)
besides the rows, but a step's time grows with L. The gradient with respect to rows and queries is made in the forward
pass by hand. It is the accuracy that sampled methods are measured by.
"""

from __future__ import annotations

from dataclasses import dataclass

from xmcray.methods.base import Parts
from xmcray.methods.one_vs_all import OneVsAll, OneVsAllConfig
from xmcray.parallel.collectives import gather_rows
from xmcray.types import Batch, LossTerms, Shortlist


@dataclass(frozen=True, kw_only=True)
class ReneeConfig(OneVsAllConfig):
    """Section `method` of Renée: what one-vs-all methods share."""


class Renee(OneVsAll):
    """Fulfils `methods.base.Method`."""

    def __init__(self, config: ReneeConfig, parts: Parts) -> None:
        super().__init__(config, parts)
        if config.logit_prior == "prior":
            self.logit_prior = self.prior(parts.data.num_labels)

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> LossTerms:
        """Binary cross-entropy of the batch over all labels."""
        query_BD = self.parts.encode(batch.tokens)
        terms = self.exact(gather_rows(self.drop(query_BD, batch), len(batch.query_ids)), batch)
        return LossTerms(terms.total, terms.num_queries, query_BD.detach())
