"""Seconds of a step, a validation and a checkpoint: one function for each part, from the operations that the code does.

A worker's step is the sum of its parts, for its operations run one after another. `arrays` counts how often an array
of the named size is read or written; sums of products, rows read at random places, sorting and exponentials have rates
of their own (rates.py).
"""

from __future__ import annotations

import math
from functools import cached_property

from xmcray.nn.row_table import BLOCK, RowOptimConfig
from xmcray.planning import sizes
from xmcray.planning.costs import costs_of
from xmcray.planning.costs.base import Costs
from xmcray.planning.step import VALUE, Shard, Step, row_states

SHARD_ROWS = 16_384  # of the corpus' files
# Arrays of a block's size that one update reads or writes, by optimiser, without copies out of and into the table. Of
# one that is made anew the memory is read as well before it is written.
UPDATE_ARRAYS = {"sgd": 8, "adagrad": 13, "adam": 27}
FILE_ENTRIES = (
    60  # elements whose sorting takes as long as looking into one more file of the corpus
)
ADAM_CALLS = 11  # operations of AdamW on each parameter
HOST_CALLS = 40  # small operations on the host in every step: ids, positives, records


class StepTime(Step):
    """Seconds of one step on one worker, by part."""

    @cached_property
    def costs(self) -> Costs:
        """What depends on the method."""
        return costs_of(self.config)

    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        return {
            "batch": self.batch(),
            "encoder": self.encoder(),
            "exchange": self.exchange(),
            "scores and loss": self.costs.loss(self),
            "label rows": self.label_rows(),
            "encoder's optimiser": self.optimiser(),
        }

    @cached_property
    def seconds(self) -> float:
        """All parts."""
        return sum(self.parts().values())

    # -- texts ---------------------------------------------------------------------------------------------------------

    def batch(self) -> float:
        """Ids, tokens, positives, shortlists and draws: files that are looked into, some sorts, and dropout masks."""
        load, rates = self.load, self.rates
        files = self.data.num_train / SHARD_ROWS + 1
        label_files = self.data.num_labels / SHARD_ROWS + 1
        # tokens of own queries and labels, positives of all queries: each file that is met is looked into once
        met = min(files, load.per_rank) + min(files, load.queries)
        met += min(label_files, load.label_texts / self.shard.workers)
        listed = load.positives + load.queries * load.hard
        entries = (
            3 * load.queries
            + 4 * load.positives
            + 2 * listed
            + 2 * load.tokens
            + load.columns
            + load.uniform
        )
        entries += FILE_ENTRIES * met
        # bits are drawn, turned into numbers, and these are divided: six arrays
        dropped = self.costs.dropped(self)
        masks = dropped * rates.random_s + rates.move(dropped * VALUE, 6, 2 * dropped * VALUE)
        return HOST_CALLS * rates.call_s + entries * rates.sort_s + masks

    def encoder(self) -> float:
        """Forward and backward; with micro-batches another forward before."""
        texts = self.load.per_rank + self.load.label_texts / self.shard.workers
        chunked = 0 < self.config.optim.micro_batch < texts
        rate = self.rates.encoders.get(self.shape.key)
        if rate is not None:
            calls = math.ceil(texts / self.config.optim.micro_batch) if chunked else 1
            again = rate.plain(texts, self.load.tokens) if chunked else 0.0
            return rate.train(texts, self.load.tokens, calls) + again
        if self.shape.is_static:
            return self._static()
        passes = 4 if chunked else 3  # a backward pass is two forward ones
        return self.load.tokens * passes * self.shape.flop_per_token / self.rates.transformer_flop_s

    def _static(self) -> float:
        """Rows of the table are read forward, summed by row backward; the residual network has two square maps."""
        dim, entries = (
            self.shape.dim,
            self.load.tokens * (2 if self.config.encoder.bigram_buckets else 1),
        )
        table = self.shape.table_rows * dim * VALUE
        texts = self.load.per_rank + self.load.label_texts / self.shard.workers
        read = 2 * self.rates.read_rows(entries, dim * VALUE, table) + entries * self.rates.sort_s
        return (
            read
            + 6 * self.rates.product(texts, dim, dim) * bool(self.shape.dense)
            + 60 * self.rates.call_s
        )

    def optimiser(self) -> float:
        """AdamW on dense parameters; the rows of sparse tables that any rank touched, on every rank."""
        rates, load = self.rates, self.load
        dense, sparse, _ = self.costs.modules(self.shape.dim, self.data.num_labels)
        dense += self.shape.dense
        tensors = (
            1 if rates.on_gpu else self.shape.tensors + self.costs.tensors()
        )  # on a GPU all at once
        total = rates.move(dense * VALUE, 14) + ADAM_CALLS * tensors * rates.call_s
        if self.shape.is_static:
            total += self._rows(
                load.all_token_rows,
                self.shape.dim,
                self.shape.table_rows,
                RowOptimConfig(kind="adam"),
            )
            if self.shard.workers > 1:  # rows of all ranks are sorted and summed
                entries = load.token_rows * self.shard.workers
                total += entries * rates.sort_s
                total += rates.read_rows(
                    entries, self.shape.dim * VALUE, entries * self.shape.dim * VALUE
                )
                total += self.rates.move(entries * self.shape.dim * VALUE, 2)
        if sparse:
            bank = sparse // self.shape.dim
            met = bank * -math.expm1(-load.columns / bank)
            total += self._rows(met, self.shape.dim, bank, RowOptimConfig(kind="adam"))
        return total

    # -- labels --------------------------------------------------------------------------------------------------------

    def label_rows(self) -> float:
        """Rows of the classifier: read, updated, written back. All of them where the loss meets all."""
        width = self.costs.classifier_width(self.shape.dim)
        if not width:
            return 0.0
        settings, met = self.config.method.classifier, self.columns
        if met >= self.shard.labels:
            arrays, table = UPDATE_ARRAYS[settings.kind], self.shard.labels * width * VALUE
            arrays += 2 if settings.weight_decay else 0
            return self.rates.move(table, 3 + 2 * row_states(settings)) + self._blocks(
                table, arrays
            )
        return self._rows(met, width, self.shard.labels, settings)

    def _rows(self, met: float, dim: int, table_rows: float, settings: RowOptimConfig) -> float:
        """`nn.row_table.RowTable`: `rows`, then `update`."""
        rates, row = self.rates, dim * VALUE
        states = row_states(settings)
        arrays = UPDATE_ARRAYS[settings.kind] if states else 3
        arrays += 4 if settings.weight_decay else 0
        if settings.storage == "bfloat16":  # a hash of every element decides how it is rounded
            arrays += 24
        table = (1 + states) * table_rows * row
        calls = 10 + 8 * states
        copies = (1 + states) * (
            rates.read_rows(met, row, table) + rates.write_rows(met, row, table)
        )
        blocks = max(1.0, met * row / self._block_bytes)
        return (
            copies
            + rates.move(met * row, 1)
            + self._blocks(met * row, arrays)
            + blocks * calls * rates.call_s
        )

    @property
    def _block_bytes(self) -> int:
        return BLOCK["cuda" if self.rates.on_gpu else "cpu"] * VALUE

    def _blocks(self, total: float, arrays: float) -> float:
        """Arrays of so many bytes in all, a block of some of them at a time."""
        block = min(total, self._block_bytes)
        return self.rates.move(block, arrays * total / block, 4 * block) if total else 0.0

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def exchange(self) -> float:
        """Query vectors to all ranks and their gradients back; gradients of the encoder; one number per query."""
        ranks, rates, load = self.shard.workers, self.rates, self.load
        if ranks == 1:
            return 0.0
        dim = self.shape.dim
        vectors = load.per_rank * self.costs.exchanged_width(dim) * VALUE
        dense = self.costs.modules(dim, self.data.num_labels)[0] + self.shape.dense
        total = 2 * rates.exchange(vectors, ranks)
        total += (
            2 * rates.exchange(dense * VALUE / ranks, ranks) if dense else 0.0
        )  # in rings: scatter, then gather
        if self.shape.is_static:  # sizes and row numbers, then rows
            total += 2 * rates.exchange_s + rates.exchange(
                load.token_rows * (dim * VALUE + 8), ranks
            )
        return total + self.costs.exchange(self)


# -- what is no step ---------------------------------------------------------------------------------------------------


def validation(step: StepTime) -> float:
    """Held-out queries against all labels; label texts are encoded where answers are made of them."""
    config, data, rates = step.config, step.data, step.rates
    rows = data.num_train * config.data.validation
    if not rows:
        return 0.0
    encoded = rows / step.shard.workers, rows / step.shard.workers * data.tokens_per_query
    if not step.costs.rows_answer:
        labels = step.shard.labels
        encoded = encoded[0] + labels, encoded[1] + labels * data.tokens_per_label
    rate = rates.encoders.get(step.shape.key)
    forward = (
        rate.plain(*encoded) if rate else encoded[1] * step.encoder() / 3 / max(step.load.tokens, 1)
    )
    return forward + 2.0 * step.shape.dim * rows * step.shard.labels / rates.search_flop_s


def checkpoint(step: StepTime) -> float:
    """A worker's share of the label rows; the first worker also writes the encoder."""
    whole = sizes.checkpoint(step.config, step.data, step.shape, step.shard.value)
    table = sizes.label_rows(step.config, step.shape.dim, step.shard)
    every = sizes.label_rows(
        step.config, step.shape.dim, Shard(workers=1, labels=step.data.num_labels, queries=0)
    )
    return (whole - every + table) / step.rates.disk_bytes_s
