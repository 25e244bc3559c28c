"""A method of another package: one encoder, and a softmax over the labels of the batch.

The method keeps how often each label was a positive, only to have state of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from xmcray.config import check_range
from xmcray.losses.softmax import decoupled_softmax
from xmcray.methods.base import Method, MethodContext, MethodEntry, dual_encoder_defaults
from xmcray.methods.label_pool import LabelPool
from xmcray.nn.heads import NormalisedHead
from xmcray.parallel.collectives import gather_rows
from xmcray.types import Batch, Shortlist, StepOutput


@dataclass(frozen=True, kw_only=True)
class SeventhConfig:
    """Section `method` of the seventh method.

    Attributes:
        temperature: scores are divided by it.
        hard_per_query: hard negatives of a query.
    """

    temperature: float = 0.05
    hard_per_query: int = 2

    def __post_init__(self) -> None:
        check_range("method.temperature", self.temperature, low=1e-4)
        check_range("method.hard_per_query", self.hard_per_query, low=0)


class Seventh(Method):
    """Implements `xmcray.methods.base.Method`."""

    def __init__(self, config: SeventhConfig, context: MethodContext) -> None:
        super().__init__(NormalisedHead(context.dim))
        self.config = config
        self.context = context
        self.count_S = torch.zeros(context.partition.size, dtype=torch.int64, device=context.device)

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> StepOutput:
        """Each positive of a query against the labels of the batch."""
        hard = self.context.draw_hard_negatives(batch, shortlist, self.config.hard_per_query)
        pool = LabelPool.of(self.context.partition, batch.positives, hard)
        query_BD, label_UD = self.context.encode_with_labels(batch, pool.own)
        query_BD = self.head(query_BD)
        query_GD = gather_rows(query_BD, len(batch.query_ids))
        total = decoupled_softmax(
            query_GD,
            self.head(label_UD),
            pool.pairs(batch.positives),
            pool.pairs(batch.positives, batch.excluded),
            scale=1 / self.config.temperature,
        )
        return StepOutput(total, len(query_GD), query_BD.detach())

    def after_step(self, batch: Batch, output: StepOutput) -> None:
        """Counts the positives of the batch."""
        partition = self.context.partition
        own = batch.positives.values[partition.owns(batch.positives.values)]
        local = torch.from_numpy(partition.to_local(own)).to(self.count_S.device)
        self.count_S += torch.bincount(local, minlength=partition.size)

    def state_tensors(self) -> Mapping[str, Tensor]:
        """How often each label was a positive."""
        return {"positives": self.count_S}

    def answer_rows(self) -> Tensor:
        """Vectors of the label texts."""
        label_SD: Tensor = self.head(self.context.label_vectors())
        return label_SD


ENTRY = MethodEntry(
    SeventhConfig,
    Seventh,
    defaults=dual_encoder_defaults(hard=5),
    label_counts=("hard_per_query",),
    uses_label_texts=True,
)
