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
        dim, columns = shape.dim, load.columns / shard.workers
        network = columns * self._kept(dim)
        kept = 6 * shard.queries * load.columns + 3 * columns * load.queries
        drawn = (
            shard.queries * self.num_positives * min(self.method.num_negatives or 100, load.columns)
        )
        numbers = network + kept + 20 * drawn + 6 * load.columns * dim
        return int(gathered(shape, load, shard) + numbers * shard.value)

    def started_bytes(self, num_labels: int, dim: int, shard: Shard) -> int:
        """Clusters of all label vectors on one worker: the vectors, normalised ones, and those that are split."""
        return max(4 * num_labels, 2 * shard.labels) * dim * 4

    def dropped(self, step: Step) -> float:
        """Dropout of the network."""
        return step.columns * (9 + 6 * step.shape.dim + 3 * int(self.method.feed_forward))

    def tensors(self) -> int:
        """Weights and biases of four maps and two normalisations."""
        return 12

    def loss(self, step: Step) -> float:
        """The network, and three triplet losses with a regulariser over the labels of the batch."""
        load, rates, dim = step.load, step.rates, step.shape.dim
        own, width = step.columns, dim * VALUE
        # what the network keeps for its backward pass is larger than the caches: nothing is there when it is read again
        kept = self._kept(dim) * own * VALUE
        total = self._network(step, kept) + rates.move((load.per_rank + own) * width, 30, kept)
        hardest, grids = (
            int(self.method.num_negatives),
            [(load.per_rank, load.columns)] * 2 + [(own, load.queries)],
        )
        for anchors, columns in [
            *grids,
            grids[0],
        ]:  # the regulariser sorts the scores with prototypes once more
            # scores without what is no negative, zeros that gradients of listed entries are put into, and their sums
            total += rates.move(anchors * columns * VALUE, 22, kept)
            if 0 < hardest < columns:
                total += rates.top(anchors, columns, hardest)
            best = min(hardest or columns, columns)
            listed = (
                load.per_rank if anchors == load.per_rank else load.queries / step.shard.workers
            ) * (self.num_positives)
            total += rates.move(listed * best * VALUE, 80) + listed * best * 2 * rates.exp_s
        total += sum(3 * rates.product(anchors, columns, dim) for anchors, columns in grids)
        return total + 400 * rates.call_s

    def _kept(self, dim: int) -> int:
        """Numbers that the network keeps of a label: dropout's factors, and tensors of its three tokens."""
        wide = int(self.method.feed_forward)
        return 9 + 2 * 3 * (3 * dim + wide) + 3 * (12 * dim + 3 * wide)

    def _network(self, step: Step, kept: float) -> float:
        """Attention among a label's three tokens and two maps, forward and backward, with dropout between them."""
        rates, dim, wide, cells = (
            step.rates,
            step.shape.dim,
            int(self.method.feed_forward),
            3 * step.columns,
        )
        maps = rates.product(cells, 4 * dim, dim) + 2 * rates.product(cells, wide, dim)
        # forward 34 arrays of the tokens' size are read or made, backward 58; of the inner width two masks, a bias
        passes = rates.move(cells * dim * VALUE, 92, kept) + rates.move(
            cells * wide * VALUE, 18, kept
        )
        gelu = cells * wide * 2 * rates.exp_s
        # two products of 3 x 3 tokens for each label and four for their gradients go row by row
        attention = rates.read_rows(6 * 6 * step.columns, dim * VALUE, kept)
        return 3 * maps + passes + gelu + attention

    def exchange(self, step: Step) -> float:
        """Vectors and prototypes of the labels that are met."""
        rates, ranks = step.rates, step.shard.workers
        own = step.columns * 2 * step.shape.dim * VALUE
        return 4 * rates.exchange_s + 3 * rates.exchange(own, ranks)
