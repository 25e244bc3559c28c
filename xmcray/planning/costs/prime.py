"""PRIME: a prototype network over label texts, centroids and free vectors, with triplet losses."""

from __future__ import annotations

from xmcray.nn.row_table import RowOptimConfig
from xmcray.planning.costs.base import Costs, gathered
from xmcray.planning.encoders import EncoderShape
from xmcray.planning.step import ID, VALUE, Shard, Step, Workload, row_table


class PrimeCosts(Costs):
    """Of each label that a step meets the network has three tokens."""

    def label_rows(self, dim: int, shard: Shard) -> int:
        """Centroids."""
        return row_table(shard.labels, dim, RowOptimConfig(momentum=0.0), shard.value)

    def modules(self, dim: int, num_labels: int) -> tuple[int, int, int]:
        """The network, the bank of free vectors, and the vector of each label."""
        wide = self.method.feed_forward
        dense = 4 * dim * (dim + 1) + 2 * dim * wide + wide + dim + 4 * dim
        bank = min(self.method.free_vectors, 1 << num_labels.bit_length() - 1)
        return dense, bank * dim, num_labels * ID

    def score_bytes(self, shape: EncoderShape, load: Workload, shard: Shard) -> int:
        """The network, and scores with prototypes and with texts, each masked and with a gradient.

        Of own queries with all labels and of own labels with all queries; the network keeps some tensors of three
        tokens of each label.
        """
        dim, wide, columns = shape.dim, self.method.feed_forward, load.columns / shard.workers
        network = columns * (9 + 2 * 3 * (3 * dim + wide) + 3 * (12 * dim + 3 * wide))
        kept = 6 * shard.queries * load.columns + 3 * columns * load.queries
        drawn = shard.queries * self.num_positives * min(self.method.num_negatives or 100, load.columns)
        numbers = network + kept + 20 * drawn + 6 * load.columns * dim
        return int(gathered(shape, load, shard) + numbers * shard.value)

    def started_bytes(self, num_labels: int, dim: int, shard: Shard) -> int:
        """Clusters of all label vectors, on one worker."""
        return 7 * num_labels * dim * 4

    def dropped(self, step: Step) -> float:
        """Dropout of the network."""
        return step.columns * (9 + 6 * step.shape.dim + 3 * int(self.method.feed_forward))

    def loss(self, step: Step) -> float:
        """The network, and three triplet losses with a regulariser over the labels of the batch."""
        load, rates, dim, workers = step.load, step.rates, step.shape.dim, step.shard.workers
        own, all_columns = step.columns, load.columns
        wide, cells = int(self.method.feed_forward), 3 * own
        maps = rates.product(cells, 4 * dim, dim) + 2 * rates.product(cells, wide, dim)
        network = 3 * maps + rates.move(cells * dim * VALUE, 60) + rates.move(cells * wide * VALUE, 18)
        network += cells * wide * 2 * rates.exp_s
        grids = [(load.per_rank, all_columns)] * 2 + [(own, load.queries)]
        total = network + rates.move((load.per_rank + own) * dim * VALUE, 30)
        hardest = int(self.method.num_negatives) or 1 << 30
        for anchors, columns in [*grids, grids[0]]:  # the regulariser sorts the scores with prototypes once more
            grid, kept = anchors * columns, min(hardest, columns)
            total += grid * rates.top_s + rates.move(grid * VALUE, 10)
            listed = (load.per_rank if anchors == load.per_rank else load.queries / workers) * self.num_positives
            total += rates.move(listed * kept * VALUE, 80) + listed * kept * 2 * rates.exp_s
        total += sum(3 * rates.product(a, c, dim) for a, c in grids)
        return total + 400 * rates.call_s

    def exchange(self, step: Step) -> float:
        """Vectors and prototypes of the labels that are met."""
        rates, ranks = step.rates, step.shard.workers
        own = step.columns * 2 * step.shape.dim * VALUE
        return 4 * rates.exchange_s + 3 * rates.exchange(own, ranks)
