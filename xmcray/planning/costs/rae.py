"""RAE-XMC: a contrastive loss over labels and queries of the batch."""

from __future__ import annotations

from typing import ClassVar

from xmcray.planning.costs.base import Costs
from xmcray.planning.costs.parts import softmax
from xmcray.planning.step import VALUE, Step


class RaeCosts(Costs):
    """One positive per query; queries are columns too."""

    encoder_alone: ClassVar[bool] = True

    @property
    def num_positives(self) -> int:
        """One."""
        return 1

    def loss(self, step: Step) -> float:
        """Labels that are met and own queries, as columns."""
        dim, load = step.shape.dim, step.load
        heads = step.rates.move((load.per_rank + step.columns) * dim * VALUE, 20)
        return heads + softmax(step, step.columns + load.per_rank, dim) + 250 * step.rates.call_s
