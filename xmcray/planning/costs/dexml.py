"""DEXML: softmax over the texts of all labels, of those of a batch, or of cached vectors."""

from __future__ import annotations

from typing import ClassVar

from xmcray.nn.row_table import RowOptimConfig
from xmcray.planning.costs.base import Costs, Met, block
from xmcray.planning.costs.parts import all_labels, softmax
from xmcray.planning.data_size import DataSize, distinct_labels, union
from xmcray.planning.step import VALUE, Shard, Step, Workload, row_table

BISECTIONS = 60  # of SoftTop-k


class DexmlCosts(Costs):
    """Its label vectors are made of texts; with `columns=cache` they are kept."""

    encoder_alone: ClassVar[bool] = True

    @property
    def hard_per_query(self) -> int:
        """Drawn only where the columns are those of a batch with hard negatives."""
        return super().hard_per_query if self.method.columns == "hard" else 0

    def met(self, data: DataSize, queries: int, positives: float) -> Met:
        """All labels, or positives with hard negatives, or with the hardest of the cache."""
        if self.method.columns == "all":
            return Met(columns=float(data.num_labels), by_text=True, hard=self.hard_per_query)
        if self.method.columns != "cache":
            return super().met(data, queries, positives)
        drawn = min(positives, queries * self.num_positives) if self.num_positives else positives
        columns = union(data.num_labels, distinct_labels(data, drawn), self.method.cache_hard)
        return Met(columns=columns, by_text=True, hard=0)

    def label_rows(self, dim: int, shard: Shard) -> int:
        """The cache."""
        if self.method.columns != "cache":
            return 0
        return row_table(shard.labels, dim, RowOptimConfig(momentum=0.0), shard.value)

    def score_blocks(self, load: Workload, shard: Shard, dim: int) -> tuple[float, float]:
        """The cache is read whole."""
        blocks, rows = super().score_blocks(load, shard, dim)
        return blocks, rows + (3 * shard.labels * dim if self.method.columns == "cache" else 0)

    def loss(self, step: Step) -> float:
        """Of the labels of the step; before that of all cached vectors."""
        heads = step.rates.move((step.load.per_rank + step.columns) * step.shape.dim * VALUE, 20)
        found = self._over(step, step.columns)
        if self.method.columns == "cache":
            cached = step.shard.labels
            found += self._over(step, cached) + step.rates.move(cached * step.shape.dim * VALUE, 3)
        return heads + found + 250 * step.rates.call_s

    def _over(self, step: Step, columns: float) -> float:
        rates, dim = step.rates, step.shape.dim
        if self.method.loss == "bce":
            return all_labels(step, columns)
        if self.method.loss != "soft_top_k":
            return softmax(step, columns, dim)
        grid = step.load.queries * columns
        passes = grid / block(grid) * rates.move(block(grid) * VALUE, 6)
        return 4 * rates.product(step.load.queries, columns, dim) + (BISECTIONS + 2) * (
            grid * rates.exp_s + passes
        )
