"""Renée: the exact one-vs-all baseline, binary cross-entropy over all labels (Jain et al., MLSys 2023).

    paper                       here                          meaning
    logits, loss skipping       losses.bce.full_bce           the gradient of a score is sigmoid(score) - y
    bottleneck                  encoder.dim                   width of the rows, less than the encoder's for large L
    NGAME M1 start              encoder.name                  a run, bundle or folder whose encoder is the start
    low-precision classifier    classifier.storage            bfloat16 rows with stochastic rounding (ELMO)

Every label is scored for every query, in label chunks, and no score is kept: memory is O(B x chunk)
besides the rows, but the time of a step grows with L. The gradients with respect to rows and
queries are computed in the forward pass. Sampled methods are measured by its accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

from xmcray.methods.base import MethodContext, MethodEntry
from xmcray.methods.one_vs_all import ExactInputs, OneVsAll, OneVsAllConfig
from xmcray.parallel.collectives import gather_rows
from xmcray.types import Batch, Shortlist, StepOutput


@dataclass(frozen=True, kw_only=True)
class ReneeConfig(OneVsAllConfig):
    """Section `method` of Renée: the settings of all one-vs-all methods."""


class Renee(OneVsAll):
    """Implements `methods.base.Method`."""

    def __init__(self, config: ReneeConfig, context: MethodContext) -> None:
        super().__init__(config, context)
        if config.logit_prior == "prior":
            self.logit_prior = self.prior(context.data.num_labels)

    def prepare(self, batch: Batch, shortlist: Shortlist | None) -> ExactInputs:
        """Dropout mask and pairs."""
        return self.exact_inputs(batch)

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> StepOutput:
        """Binary cross-entropy of the batch over all labels."""
        inputs: ExactInputs = self.inputs(batch, shortlist)
        query_BD = self.context.encode(batch.tokens)
        query_GD = gather_rows(self.drop(query_BD, inputs.keep_BD), len(batch.query_ids))
        return StepOutput(self.exact_loss(query_GD, inputs), len(query_GD), query_BD.detach())


ENTRY = MethodEntry(
    ReneeConfig,
    Renee,
    {"negatives": {"uniform": 0, "hard": 0}},
    has_prefixes=lambda config: True,
    uses_hard=lambda config: False,
)
