"""UniDEC: a head for texts and one for the classifier, each with a loss in both directions."""

from __future__ import annotations

from xmcray.planning.costs.base import Costs, Met, block
from xmcray.planning.costs.parts import softmax
from xmcray.planning.data_size import DataSize
from xmcray.planning.step import STATE_TENSORS, VALUE, Shard, Step, Workload, row_table


class UnidecCosts(Costs):
    """`method.balance` decides which of its sides exist."""

    @property
    def _by_text(self) -> bool:
        return bool(self.method.balance > 0)

    def _width(self, dim: int) -> int:
        return int(self.method.head_dim or dim)

    def met(self, data: DataSize, queries: int, positives: float) -> Met:
        """Label texts are encoded only by the side of texts."""
        met = super().met(data, queries, positives)
        return Met(columns=met.columns, by_text=self._by_text, hard=met.hard)

    def classifier_width(self, dim: int) -> int:
        """The head's."""
        return self._width(dim) if self.method.balance < 1 else 0

    def label_rows(self, dim: int, shard: Shard) -> int:
        """Classifier rows."""
        width = self.classifier_width(dim)
        return row_table(shard.labels, width, self.method.classifier, shard.value) if width else 0

    def modules(self, dim: int, num_labels: int) -> tuple[int, int, int]:
        """Two linear heads."""
        width = self._width(dim)
        return 2 * (dim * width + width), 0, 0

    def tensors(self) -> int:
        """Weight and bias of both."""
        return 4

    def score_blocks(self, load: Workload, shard: Shard, dim: int) -> tuple[float, float]:
        """Blocks in both directions; rows of both sides."""
        columns, width = load.columns / shard.workers, self._width(dim)
        rows = (4 if self._by_text else 0) * columns * width
        if self.method.balance < 1:
            rows += (6 + STATE_TENSORS[self.method.classifier.kind]) * columns * width
        anchors = min(load.positives, load.columns) / shard.workers
        return 2 * block(load.queries * columns) + 4 * load.queries * anchors, rows

    def published_copies(self) -> int:
        """The head makes its vectors in three steps."""
        return 5

    def dropped(self, step: Step) -> float:
        """Dropout of the query vectors."""
        return step.load.per_rank * step.shape.dim if self.method.dropout else 0

    def loss(self, step: Step) -> float:
        """Heads, and of each side a softmax over labels and one over queries."""
        load, rates, dim = step.load, step.rates, step.shape.dim
        width = self._width(dim)
        sides = int(self._by_text) + int(self.method.balance < 1)
        texts = 2 * load.per_rank + (step.columns if self._by_text else 0)
        heads = 3 * rates.product(texts, width, dim) + rates.move(texts * width * VALUE, 30)
        # from labels to queries: a matrix of those with a positive, with its gradient
        anchors = min(load.positives, load.columns) / step.shard.workers
        grid = load.queries * anchors
        to_queries = 3 * rates.product(load.queries, anchors, width) + 2 * grid * rates.exp_s
        to_queries += rates.move(grid * VALUE, 14)
        return (
            heads + sides * (softmax(step, step.columns, width) + to_queries) + 400 * rates.call_s
        )

    def exchange(self, step: Step) -> float:
        """A softmax of each side."""
        return (int(self._by_text) + int(self.method.balance < 1)) * super().exchange(step)

    def exchanged_width(self, dim: int) -> int:
        """Both heads' vectors."""
        return 2 * self._width(dim)
