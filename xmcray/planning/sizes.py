"""Bytes of a worker, of an index actor, in the object store and on disk: one function for each part.

What lives as long as the run is exact: it is the sum of the sizes of the tensors that the code makes. What comes and
goes within a step is what is alive at its largest moment, counted from the code.
"""

from __future__ import annotations

from xmcray.negatives.plan import NegativesConfig
from xmcray.planning.costs import costs_of
from xmcray.planning.data_size import DataSize
from xmcray.planning.encoders import EncoderShape
from xmcray.planning.step import ID, Shard, Workload
from xmcray.retrieval.ann import TRAIN_ROWS_PER_LIST
from xmcray.retrieval.index import resolve_factory
from xmcray.training.checkpoint import ROW_BLOCK_BYTES
from xmcray.training.run import RunConfig

LAYER_WIDTHS = (
    9  # tensors of the hidden width that a layer keeps for its backward pass, a token each
)
TOKENIZER_BYTES = 1500  # of a token in the tokenizer's tables


def shard_of(config: RunConfig, data: DataSize, load: Workload, workers: int) -> Shard:
    """The largest shard of any worker."""
    value = 8 if config.optim.precision == "float64" else 4
    return Shard(
        workers=workers, labels=-(-data.num_labels // workers), queries=load.per_rank, value=value
    )


def label_rows(config: RunConfig, dim: int, shard: Shard) -> int:
    """What a worker keeps for each of its labels: classifier rows, PRIME's centroids, DEXML's cache."""
    return costs_of(config).label_rows(dim, shard)


def encoder(shape: EncoderShape, value: int = 4) -> int:
    """Weights of the encoder, trained or not."""
    return (shape.table_rows * shape.dim + shape.dense + shape.frozen + shape.buffer) * value


def method_modules(config: RunConfig, shape: EncoderShape, num_labels: int, value: int = 4) -> int:
    """Weights and buffers of a method's own modules."""
    dense, sparse, buffers = costs_of(config).modules(shape.dim, num_labels)
    return (dense + sparse) * value + buffers


def optimiser(config: RunConfig, shape: EncoderShape, num_labels: int, value: int = 4) -> int:
    """Gradients of dense parameters, Adam's two moments of all, and two int32 for each row of a sparse table."""
    dense, sparse, _ = costs_of(config).modules(shape.dim, num_labels)
    rows = shape.table_rows + sparse // shape.dim
    return 3 * (dense + shape.dense) * value + 2 * rows * shape.dim * value + 8 * rows


def activations(
    config: RunConfig, shape: EncoderShape, load: Workload, shard: Shard, half: bool
) -> int:
    """What encoding a worker's texts keeps until the backward pass, and the gradient of what it read.

    Args:
        half: transformers compute in bfloat16 and keep a copy of their weights in it.
    """
    texts = load.per_rank + load.label_texts / shard.workers
    chunk = min(1.0, config.optim.micro_batch / texts) if config.optim.micro_batch else 1.0
    vectors = texts * shape.dim * shard.value
    if config.encoder.frozen:
        return int(2 * vectors + texts * shape.hidden * shard.value)
    if shape.is_static:
        # Indices (about eight int64 a table row met, twice as many with pairs), the bag with three tensors of the
        # residual network and their gradients; the sparse gradient of the rows, padded to be sent, what all ranks sent,
        # and its sum; what came in one step leaves a hole that is a little too small in the next. Adam works on blocks.
        entries = load.tokens * (2 if config.encoder.bigram_buckets else 1)
        kept = (12 if shape.dense else 5) * vectors
        copies = load.token_rows
        if shard.workers > 1:
            copies += load.token_rows * (1 + 2 * shard.workers) + load.all_token_rows
        return int(chunk * (8 * ID * entries + kept) + vectors + copies * shape.dim * shard.value)
    number = 2 if half else shard.value
    kept = shape.layers * (LAYER_WIDTHS * shape.hidden + 2 * shape.feed_forward) * number
    embedded = 4 * shape.hidden * shard.value  # looked up, normalised, and the gradients of both
    casts = 2 * shape.dense if half else 0
    return int(chunk * load.tokens * (kept + embedded) + 2 * vectors + casts)


def holes(shape: EncoderShape, frozen: bool, activations_bytes: int, value: int = 4) -> int:
    """Heap of a process that trains a transformer, given back by one part of a step and of no use to the next.

    Activations take the place of the gradients of the step before, so that the next ones are put elsewhere; AdamW's two
    temporaries of the largest parameter find no place among activations and gradients. A GPU's allocator keeps large
    blocks apart from small ones.
    """
    if shape.is_static or frozen:
        return 0
    return min(shape.dense * value, activations_bytes) + 2 * shape.words * value


def scores(config: RunConfig, shape: EncoderShape, load: Workload, shard: Shard) -> int:
    """Scores of a step with what is made of them, and the rows that are read for them with their gradients."""
    return costs_of(config).score_bytes(shape, load, shard)


def tokens(data: DataSize, load: Workload) -> int:
    """The corpus as a worker maps it: token ids, offsets and label ids; orders of labels and queries (int64)."""
    wide = 2 if data.vocab_size <= 1 << 16 else 4
    texts = data.num_train * data.tokens_per_query + data.num_labels * data.tokens_per_label
    mapped = (
        wide * texts
        + ID * (2 * data.num_train + data.num_labels)
        + 4 * data.num_train * data.positives_per_query
    )
    # label_order, label_rank and train_counts; the ids that are sampled, their order, and the next epoch's
    ids = 3 * ID * data.num_labels + 3 * ID * load.num_query_ids
    return int(mapped + ids + TOKENIZER_BYTES * data.vocab_size)


def negatives(config: NegativesConfig, load: Workload) -> int:
    """The shortlist in use, mapped from its file, and the clusters of queries (int32 each)."""
    if not config.refreshed:
        return 0
    return load.num_query_ids * 4 * (config.hard + (2 if config.cluster_size else 0))


def published(config: RunConfig, dim: int, shard: Shard) -> int:
    """The copy of all label vectors while a version is written; before that, what made them of texts."""
    if not config.negatives.hard:
        return 0
    costs = costs_of(config)
    return costs.published_copies() * shard.labels * (costs.classifier_width(dim) or dim) * 4


def validated(config: RunConfig, dim: int, shard: Shard) -> int:
    """Label vectors that are made for validation, of methods whose answers are no trained rows."""
    costs = costs_of(config)
    if costs.rows_answer or not config.data.validation:
        return 0
    return 2 * shard.labels * (dim + costs.classifier_width(dim)) * 4


def started(config: RunConfig, data: DataSize, dim: int, shard: Shard) -> int:
    """What start values take for a moment: label texts' vectors, and PRIME's clusters of all of them on one worker."""
    return costs_of(config).started_bytes(data.num_labels, dim, shard)


def index_actor(
    config: RunConfig, data: DataSize, dim: int, num_shards: int, on_gpu: bool = False
) -> int:
    """An index actor while it builds: its rows, a copy without the longest, the index, and k-means' sample.

    Rows are read in blocks and joined, so that they exist twice before the index does.
    """
    if not config.negatives.hard:
        return 0
    rows = -(-data.num_labels // num_shards)
    whole = rows * dim * 4
    factory = "Flat" if on_gpu else resolve_factory(config.negatives.index, rows)
    lists = num_lists(factory)
    sample = min(rows, TRAIN_ROWS_PER_LIST * lists) * dim * 4
    inside = 0 if factory == "Flat" else whole + index(config.negatives.index, rows, dim) + sample
    return whole + max(whole, inside)


def index(factory: str, rows: int, dim: int) -> int:
    """A FAISS index beside its vectors: codes and ids of the rows, and centroids; nothing for an exhaustive one."""
    factory = resolve_factory(factory, rows)
    if factory == "Flat":
        return 0
    code = dim * (2 if "fp16" in factory else 1 if "SQ8" in factory else 4)
    return rows * (code + ID) + num_lists(factory) * dim * 4


def object_store(threads: int, data: DataSize) -> int:
    """Ray's shared memory: training sends settings alone; `prepare` has some shards of 16,384 texts on their way."""
    text = 6 * max(data.tokens_per_query, data.tokens_per_label)  # bytes of a text
    return int(3 * (threads + 1) * 16_384 * (2 * text + 100))


def ledger(config: RunConfig, data: DataSize, load: Workload, dim: int, workers: int) -> int:
    """Files of one version at its largest, and of the one in use: query vectors, label vectors, what shards found.

    Every shard keeps hard + some candidates of each query (int64 ids, float32 scores) until they are merged.
    """
    if not config.negatives.refreshed:
        return 0
    queries = load.steps_per_epoch * load.queries
    vectors = queries * (dim * 4 + 2 * ID)
    rows = data.num_labels * dim * 4 if config.negatives.hard else 0
    found = queries * workers * (config.negatives.hard + 8) * 12 if config.negatives.hard else 0
    return vectors + rows + found + 2 * negatives(config.negatives, load)


def checkpoint(config: RunConfig, data: DataSize, shape: EncoderShape, value: int = 4) -> int:
    """One checkpoint: encoder and modules, Adam's moments of both, label rows with their state."""
    dense, sparse, buffers = costs_of(config).modules(shape.dim, data.num_labels)
    weights = encoder(shape, value) + (dense + sparse) * value + buffers
    rows = shape.table_rows + sparse // shape.dim
    moments = 2 * (dense + shape.dense + rows * shape.dim) * value + 4 * rows
    whole = Shard(workers=1, labels=data.num_labels, queries=0, value=value)
    table = label_rows(config, shape.dim, whole)
    return (
        weights + moments + (table - 4 * data.num_labels if table else 0)
    )  # the last steps are not kept


def writing(config: RunConfig, shape: EncoderShape, shard: Shard, on_gpu: bool) -> int:
    """Copies while a checkpoint is written: none, safetensors writes tensors from where they are.

    From a GPU they come to the process first: a block of rows, or the moments of the encoder.
    """
    if not on_gpu:
        return 0
    moments = 2 * (shape.dense + shape.table_rows * shape.dim) * shard.value
    return max(min(label_rows(config, shape.dim, shard), ROW_BLOCK_BYTES), moments)


def num_lists(factory: str) -> int:
    """Lists of a factory string; 0 without."""
    head = factory.split(",")[0]
    return int(head[3:]) if head.startswith("IVF") and head[3:].isdigit() else 0
