"""Seconds of a step, of an epoch and of an index: one function for each part, from the operations that the code does.

A worker's step is the sum of its parts, for its operations run one after another. `arrays` counts how often an array
of the named size is read or written; sums of products, rows read at random places, sorting and exponentials have rates
of their own (rates.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from xmcray.nn.row_table import RowOptimConfig
from xmcray.planning import sizes
from xmcray.planning.encoders import EncoderShape
from xmcray.planning.rates import Rates
from xmcray.planning.sizes import Shard
from xmcray.planning.workload import DataSize, Workload
from xmcray.retrieval.ann import TRAIN_ROWS_PER_LIST
from xmcray.retrieval.index import resolve_factory
from xmcray.training.run import RunConfig

VALUE = 4  # bytes of a float32
SHARD_ROWS = 16_384  # of the corpus' files
LISTS_VISITED = 0.04  # share of an index' lists that a search visits once labels are well apart
KMEANS_ROUNDS = 8
# Arrays of the rows' size that one update reads or writes, by optimiser, without copies out of and into the table. Of
# one that is made anew the memory is read as well before it is written.
UPDATE_ARRAYS = {"sgd": 8, "adagrad": 13, "adam": 27}
BISECTIONS = 60  # of SoftTop-k
FILE_ENTRIES = 60  # elements whose sorting takes as long as looking into one more file of the corpus
HOST_CALLS = 40  # small operations on the host in every step: ids, positives, records


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step on one worker, as the methods of this class see it.

    Attributes:
        config, shape, data, load, shard: what is trained. rates: of the machine.
    """

    config: RunConfig
    shape: EncoderShape
    data: DataSize
    load: Workload
    shard: Shard
    rates: Rates

    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        return {
            "batch": self.batch(),
            "encoder": self.encoder(),
            "exchange": self.exchange(),
            "scores and loss": self.scores(),
            "label rows": self.label_rows(),
            "encoder's optimiser": self.optimiser(),
        }

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
        entries = 3 * load.queries + 4 * load.positives + 2 * listed + 2 * load.tokens + load.columns + load.uniform
        masks = load.per_rank * self.shape.dim if getattr(self.config.method, "dropout", 0) else 0
        if self.config.method_name == "prime":
            wide = self.config.method.feed_forward
            masks = load.columns / self.shard.workers * (9 + 6 * self.shape.dim + 3 * wide)
        entries += FILE_ENTRIES * met
        return HOST_CALLS * rates.call_s + entries * rates.sort_s + masks * rates.random_s

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
        dim, entries = self.shape.dim, self.load.tokens * (2 if self.config.encoder.pairs else 1)
        table = self.shape.table_rows * dim * VALUE
        texts = self.load.per_rank + self.load.label_texts / self.shard.workers
        read = 2 * self.rates.read_rows(entries, dim * VALUE, table) + entries * self.rates.sort_s
        return read + 6 * self.rates.product(texts, dim, dim) * bool(self.shape.dense) + 60 * self.rates.call_s

    def optimiser(self) -> float:
        """AdamW on dense parameters; the rows of sparse tables that any rank touched, on every rank."""
        config, rates, load = self.config, self.rates, self.load
        dense, sparse, _ = sizes.modules(config, self.shape.dim, self.data.num_labels)
        dense += self.shape.dense
        total = self.rates.move(dense * VALUE, 14) + 20 * rates.call_s
        if self.shape.is_static:
            total += self._rows(load.all_token_rows, self.shape.dim, self.shape.table_rows, RowOptimConfig(kind="adam"))
            if self.shard.workers > 1:  # rows of all ranks are sorted and summed
                entries = load.token_rows * self.shard.workers
                total += entries * rates.sort_s
                total += rates.read_rows(entries, self.shape.dim * VALUE, entries * self.shape.dim * VALUE)
                total += self.rates.move(entries * self.shape.dim * VALUE, 3)
        if sparse:
            bank = sparse // self.shape.dim
            met = bank * -math.expm1(-load.columns / bank)
            total += self._rows(met, self.shape.dim, bank, RowOptimConfig(kind="adam"))
        return total

    # -- labels --------------------------------------------------------------------------------------------------------

    def label_rows(self) -> float:
        """Rows of the classifier: read, updated, written back. All of them where the loss meets all."""
        width = sizes.classifier_width(self.config, self.shape.dim)
        if not width:
            return 0.0
        settings, met = self.config.method.classifier, self.load.columns / self.shard.workers
        if met >= self.shard.labels:
            arrays = UPDATE_ARRAYS[settings.kind] + (2 if settings.weight_decay else 0)
            return self.rates.move(self.shard.labels * width * VALUE, arrays)
        return self._rows(met, width, self.shard.labels, settings)

    def _rows(self, met: float, dim: int, table_rows: float, settings: RowOptimConfig) -> float:
        """`nn.row_table.RowTable`: `rows`, then `update`."""
        rates, row = self.rates, dim * VALUE
        states = 0 if settings.kind == "sgd" and settings.momentum == 0 else sizes.STATE_TENSORS[settings.kind]
        arrays = UPDATE_ARRAYS[settings.kind] if states else 3
        arrays += 4 if settings.weight_decay else 0
        if settings.storage == "bfloat16":  # a hash of every element decides how it is rounded
            arrays += 24
        table = (1 + states) * table_rows * row
        copies = (1 + states) * (rates.read_rows(met, row, table) + rates.write_rows(met, row, table))
        return copies + self.rates.move(met * row, arrays) + (10 + 8 * states) * rates.call_s

    def scores(self) -> float:
        """Scores, the loss and both their gradients."""
        name, method = self.config.method_name, self.config.method
        if name == "renee" or (name == "astra" and method.exact):
            return self._all_labels(self.shard.labels)
        if name == "astra":
            return self._sampled()
        if name == "prime":
            return self._prime()
        columns = self.load.columns / self.shard.workers
        if name == "unidec":
            width = int(method.head_dim or self.shape.dim)
            sides = int(method.balance > 0) + int(method.balance < 1)
            texts = 2 * self.load.per_rank + (columns if method.balance > 0 else 0)
            heads = 3 * self.rates.product(texts, width, self.shape.dim) + self.rates.move(texts * width * VALUE, 30)
            anchors = min(self.load.positives, self.load.columns) / self.shard.workers
            both = self._softmax(columns, width) + self._to_queries(anchors, width)
            return heads + sides * both + 400 * self.rates.call_s
        texts = self.load.per_rank + columns
        heads = self.rates.move(texts * self.shape.dim * VALUE, 20)
        if name == "rae":
            return heads + self._softmax(columns + self.load.per_rank, self.shape.dim) + 250 * self.rates.call_s
        found = self._dexml(columns)
        if method.columns == "cache":  # first against all cached vectors
            found += self._dexml(self.shard.labels) + self.rates.move(self.shard.labels * self.shape.dim * VALUE, 3)
        return heads + found + 250 * self.rates.call_s

    def _sampled(self) -> float:
        """ASTRA: listed pairs one by one, the pool as a product (`losses.bce.sampled_bce`)."""
        load, rates, dim = self.load, self.rates, self.shape.dim
        columns, pool = load.columns / self.shard.workers, load.uniform / self.shard.workers
        pairs = (load.positives + load.queries * load.hard) / self.shard.workers
        row, met = dim * VALUE, columns * dim * VALUE
        # forward both vectors of a pair are copied and multiplied; backward each is read once more, with a weight
        listed = 2 * (rates.read_rows(pairs, row, met) + rates.read_rows(pairs, row, load.queries * row))
        listed += self.rates.move(pairs * row, 3) + 2 * pairs * rates.sort_s
        dense = 3 * rates.product(load.queries, pool, dim) + 2 * rates.read_rows(pool, row, met)
        grid = load.queries * pool
        dense += grid * (rates.softplus_s + rates.exp_s) + self.rates.move(grid * VALUE, 10)
        gradients = self.rates.move(met, 6)  # two gradients of the rows are filled with zeros, made and added
        return listed + dense + gradients + self.rates.move(load.queries * row, 10) + 120 * rates.call_s

    def _all_labels(self, columns: float) -> float:
        """`losses.bce.full_bce`: three products, softplus and sigmoid of all scores, the gradient of all rows."""
        load, rates, dim = self.load, self.rates, self.shape.dim
        chunk = min(self.config.method.chunk_labels, columns) if hasattr(self.config.method, "chunk_labels") else 8192
        grid, chunks = load.queries * columns, math.ceil(columns / chunk)
        products = 3 * rates.product(load.queries, columns, dim)
        passes = grid / max(1, chunk * load.queries) * self.rates.move(chunk * load.queries * VALUE, 5)
        listed = chunks * (12 * rates.call_s + load.positives / self.shard.workers * rates.call_s / 500)
        return (
            products
            + grid * (rates.softplus_s + rates.exp_s)
            + passes
            + self.rates.move(columns * dim * VALUE, 4)
            + listed
        )

    def _softmax(self, columns: float, dim: int) -> float:
        """`losses.columns.log_sum_exp` and listed pairs: two products forward and backward, then two for gradients."""
        load, rates = self.load, self.rates
        grid = load.queries * columns
        block = min(grid, 1 << 23)
        passes = grid / max(1.0, block) * self.rates.move(block * VALUE, 14)
        pairs = load.positives / self.shard.workers
        row = dim * VALUE
        listed = 3 * rates.read_rows(pairs, row, columns * row) + self.rates.move(pairs * row, 4)
        return 4 * rates.product(load.queries, columns, dim) + 2 * grid * rates.exp_s + passes + listed

    def _to_queries(self, anchors: float, dim: int) -> float:
        """UniDEC from labels to queries: a matrix of those with a positive, with its gradient."""
        load, rates = self.load, self.rates
        grid = load.queries * anchors
        return (
            3 * rates.product(load.queries, anchors, dim) + 2 * grid * rates.exp_s + self.rates.move(grid * VALUE, 14)
        )

    def _dexml(self, columns: float) -> float:
        method, rates = self.config.method, self.rates
        if method.loss == "bce":
            return self._all_labels(columns)
        if method.loss != "soft_top_k":
            return self._softmax(columns, self.shape.dim)
        grid = self.load.queries * columns
        block = min(grid, 1 << 23)
        passes = grid / block * self.rates.move(block * VALUE, 6)
        return 4 * rates.product(self.load.queries, columns, self.shape.dim) + (BISECTIONS + 2) * (
            grid * rates.exp_s + passes
        )

    def _prime(self) -> float:
        """The prototype network, and three triplet losses with a regulariser over the labels of the batch."""
        load, rates, method, dim = self.load, self.rates, self.config.method, self.shape.dim
        own, all_columns = load.columns / self.shard.workers, load.columns
        wide, cells = int(method.feed_forward), 3 * own
        maps = rates.product(cells, 4 * dim, dim) + 2 * rates.product(cells, wide, dim)
        network = 3 * maps + self.rates.move(cells * dim * VALUE, 60) + self.rates.move(cells * wide * VALUE, 18)
        network += cells * wide * 2 * rates.exp_s
        grids = [(load.per_rank, all_columns)] * 2 + [(own, load.queries)]
        total = network + self.rates.move((load.per_rank + own) * dim * VALUE, 30)
        hardest, drawn = int(method.num_negatives) or 1 << 30, int(method.num_positives)
        for anchors, columns in [*grids, grids[0]]:  # the regulariser sorts the scores with prototypes once more
            grid, kept = anchors * columns, min(hardest, columns)
            total += grid * rates.top_s + self.rates.move(grid * VALUE, 10)
            listed = (load.per_rank if anchors == load.per_rank else load.queries / self.shard.workers) * drawn
            total += self.rates.move(listed * kept * VALUE, 80) + listed * kept * 2 * rates.exp_s
        total += sum(3 * rates.product(a, c, dim) for a, c in grids)
        return total + 400 * rates.call_s

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def exchange(self) -> float:
        """Query vectors to all ranks and their gradients back; gradients of the encoder; one number per query."""
        ranks, rates, load = self.shard.workers, self.rates, self.load
        if ranks == 1:
            return 0.0
        dim = self.shape.dim
        width = 2 * (self.config.method.head_dim or dim) if self.config.method_name == "unidec" else dim
        vectors = load.per_rank * width * VALUE
        dense = sizes.modules(self.config, dim, self.data.num_labels)[0] + self.shape.dense
        total = 2 * rates.exchange(vectors, ranks)
        total += 2 * rates.exchange(dense * VALUE / ranks, ranks) if dense else 0.0  # in rings: scatter, then gather
        if self.shape.is_static:  # sizes, row numbers and rows
            total += 3 * rates.exchange_s + rates.exchange(load.token_rows * (dim * VALUE + 8), ranks)
        if self.config.method_name == "prime":
            own = load.columns / ranks * 2 * dim * VALUE
            total += 4 * rates.exchange_s + 3 * rates.exchange(own, ranks)
        elif self.config.method_name not in ("astra", "renee"):
            total += 4 * rates.exchange(load.queries * VALUE, ranks)
        return total


# -- what is no step ---------------------------------------------------------------------------------------------------


def index_build(rates: Rates, factory: str, rows: int, dim: int) -> float:
    """k-means on a sample, then every row to its list; nothing for an exhaustive index."""
    factory = resolve_factory(factory, rows)
    lists = sizes._num_lists(factory)
    if not lists:
        return 0.0
    sample = min(rows, TRAIN_ROWS_PER_LIST * lists)
    return 2.0 * dim * lists * (KMEANS_ROUNDS * sample + rows) / rates.build_flop_s


def index_search(rates: Rates, factory: str, rows: int, dim: int, queries: float) -> float:
    """Centroids, visited lists and the longest rows, for all queries; all rows for an exhaustive index."""
    lists = sizes._num_lists(resolve_factory(factory, rows))
    visited = LISTS_VISITED * rows + lists + 0.05 * rows if lists else float(rows)
    return 2.0 * dim * visited * queries / rates.search_flop_s


def refresh(step: Step) -> float:
    """From published to complete: rows to disk and back, the index of a shard, and its search for all queries."""
    config, rates = step.config, step.rates
    if not config.negatives.refreshed:
        return 0.0
    dim, queries = step.shape.dim, step.load.steps_per_epoch * step.load.queries
    found = queries * (config.negatives.hard + 8) * 12
    written = (
        step.shard.labels * dim * VALUE + found + queries * dim * VALUE / step.shard.workers
    ) / rates.disk_bytes_s
    if not config.negatives.hard:
        return written
    made = index_build(rates, config.negatives.index, step.shard.labels, dim)
    sorts = queries * (config.negatives.hard + 8) * step.shard.workers * 2 * rates.sort_s  # the merge of all shards
    return written + made + index_search(rates, config.negatives.index, step.shard.labels, dim, queries) + sorts


def validation(step: Step) -> float:
    """Held-out queries against all labels; label texts are encoded where answers are made of them."""
    config, data, rates = step.config, step.data, step.rates
    rows = data.num_train * config.data.validation
    if not rows:
        return 0.0
    encoded = rows / step.shard.workers, rows / step.shard.workers * data.tokens_per_query
    if config.method_name not in ("astra", "renee"):
        labels = step.shard.labels
        encoded = encoded[0] + labels, encoded[1] + labels * data.tokens_per_label
    rate = rates.encoders.get(step.shape.key)
    forward = rate.plain(*encoded) if rate else encoded[1] * step.encoder() / 3 / max(step.load.tokens, 1)
    return forward + 2.0 * step.shape.dim * rows * step.shard.labels / rates.search_flop_s


def checkpoint(step: Step) -> float:
    """A worker's share of the label rows; the first worker also writes the encoder."""
    whole = sizes.checkpoint(step.config, step.data, step.shape, step.shard.value)
    table = sizes.label_rows(step.config, step.shape.dim, step.shard)
    every = sizes.label_rows(step.config, step.shape.dim, Shard(workers=1, labels=step.data.num_labels, queries=0))
    return (whole - every + table) / step.rates.disk_bytes_s
