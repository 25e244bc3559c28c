"""ASTRA and Renée: a row per label, trained and searched."""

from __future__ import annotations

from typing import ClassVar

from xmcray.planning.costs.base import Costs, Met, gathered
from xmcray.planning.costs.parts import all_labels
from xmcray.planning.data_size import DataSize, distinct_labels, union
from xmcray.planning.encoders import EncoderShape
from xmcray.planning.step import ID, VALUE, Shard, Step, Workload, row_table


class ReneeCosts(Costs):
    """All labels in every step."""

    rows_answer: ClassVar[bool] = True

    def met(self, data: DataSize, queries: int, positives: float) -> Met:
        """All labels."""
        return Met(columns=float(data.num_labels), by_text=False, hard=0)

    def classifier_width(self, dim: int) -> int:
        """As the encoder."""
        return dim

    def label_rows(self, dim: int, shard: Shard) -> int:
        """Classifier rows."""
        return row_table(shard.labels, dim, self.method.classifier, shard.value)

    def score_bytes(self, shape: EncoderShape, load: Workload, shard: Shard) -> int:
        """A chunk's scores, twice; the gradient of all rows, and its product with the loss' own gradient.

        Rows that are stored in bfloat16 are widened when they are updated.
        """
        wide = 2 if self.method.classifier.storage == "bfloat16" else 0
        chunks = 3 * load.queries * self.method.chunk_labels
        return int(
            gathered(shape, load, shard)
            + (chunks + (2 + wide) * shard.labels * shape.dim) * shard.value
        )

    def dropped(self, step: Step) -> float:
        """Dropout of the query vectors."""
        return step.load.per_rank * step.shape.dim if self.method.dropout else 0

    def loss(self, step: Step) -> float:
        """In chunks of labels."""
        return all_labels(step, step.shard.labels, self.method.chunk_labels)

    def exchange(self, step: Step) -> float:
        """Losses of ranks are sums: nothing else is told."""
        return 0.0


class AstraCosts(ReneeCosts):
    """Positives, hard negatives and a uniform pool; all labels with `method.exact`."""

    def met(self, data: DataSize, queries: int, positives: float) -> Met:
        """What is listed, and the pool."""
        hard, uniform = (
            self.config.negatives.hard,
            min(self.config.negatives.uniform, data.num_labels),
        )
        columns = float(data.num_labels)
        if not self.method.exact:
            columns = union(
                data.num_labels, distinct_labels(data, positives), queries * hard + uniform
            )
        return Met(columns=columns, by_text=False, hard=hard, uniform=uniform)

    def score_bytes(self, shape: EncoderShape, load: Workload, shard: Shard) -> int:
        """Listed pairs and the pool.

        Both vectors of each pair and their product; scores of the pool: with offset, masked, softplus, sigmoid and its
        gradient; rows: read, two gradients and their sum, and what the optimiser works on.
        """
        if self.method.exact:
            return super().score_bytes(shape, load, shard)
        value, dim, columns = shard.value, shape.dim, load.columns / shard.workers
        pairs = (load.positives + load.queries * load.hard) / shard.workers
        pool = 5 * load.queries * load.uniform / shard.workers
        states = row_table(1, dim, self.method.classifier, value) // (dim * value)
        numbers = 3 * pairs * dim + pool + (5 + states) * columns * dim
        return int(gathered(shape, load, shard) + numbers * value + 12 * ID * pairs)

    def published_copies(self) -> int:
        """Rows are copied once; an index on label texts has those of its encoding too."""
        return 1 if self.method.index_on == "classifier" else super().published_copies()

    def loss(self, step: Step) -> float:
        """Listed pairs one by one, the pool as a product (`losses.bce.sampled_bce`)."""
        if self.method.exact:
            return super().loss(step)
        load, rates, dim, workers = step.load, step.rates, step.shape.dim, step.shard.workers
        pool = load.uniform / workers
        pairs = (load.positives + load.queries * load.hard) / workers
        row, met = dim * VALUE, step.columns * dim * VALUE
        # forward both vectors of a pair are copied and multiplied; backward each is read once more, with a weight
        listed = 2 * (
            rates.read_rows(pairs, row, met) + rates.read_rows(pairs, row, load.queries * row)
        )
        listed += rates.move(pairs * row, 3) + 2 * pairs * rates.sort_s
        dense = 3 * rates.product(load.queries, pool, dim) + 2 * rates.read_rows(pool, row, met)
        grid = load.queries * pool
        dense += grid * (rates.softplus_s + rates.exp_s) + rates.move(grid * VALUE, 10)
        gradients = rates.move(
            met, 6
        )  # two gradients of the rows are filled with zeros, made and added
        return listed + dense + gradients + rates.move(load.queries * row, 10) + 120 * rates.call_s
