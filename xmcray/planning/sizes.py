"""Bytes of what is around the steps: mapped files, an index actor, the ledger, Ray's object store."""

from __future__ import annotations

import math
import re

from xmcray.negatives.plan import NegativesConfig
from xmcray.permutations import MAX_STORED_SIZE
from xmcray.planning.data_size import DataSize
from xmcray.retrieval.ann_create import TRAIN_ROWS_PER_LIST
from xmcray.retrieval.index_spec import num_lists, resolve_factory

ID = 8  # bytes of an int64
VALUE = 4  # bytes of a float32 or an int32
_TOKENIZER_BYTES = 1500  # of a token in the tokenizer's tables
_SHARD_TEXTS = 16_384  # of the corpus' files
_CLUSTERED_BYTES = 200  # of a query's places, order and preference while it is clustered


def corpus_bytes(data: DataSize, num_query_ids: int, in_clusters: bool) -> int:
    """The corpus as a worker maps it, and its orders of labels and of the queries it samples.

    Args:
        data: The data set in numbers.
        num_query_ids: Queries and label texts that are sampled.
        in_clusters: Whether batches are made of clusters of queries.
    """
    token_bytes = 2 if data.vocab_size <= 1 << 16 else 4
    query_tokens = data.num_train * data.tokens_per_query
    label_tokens = data.num_labels * data.tokens_per_label
    num_bytes = token_bytes * (query_tokens + label_tokens)
    # Offsets of the tokens and of the positives of each query, and of the tokens of each label.
    num_bytes += ID * (2 * data.num_train + data.num_labels)
    # Label ids of the positives.
    num_bytes += VALUE * data.num_train * data.positives_per_query
    # label_order, label_rank and train_counts.
    num_bytes += 3 * ID * data.num_labels
    # The order of an epoch while the next is made. That of many queries is computed and takes no
    # memory, unless they are sorted by cluster.
    if in_clusters or num_query_ids <= MAX_STORED_SIZE:
        num_bytes += 2 * ID * num_query_ids
    num_bytes += _TOKENIZER_BYTES * data.vocab_size
    num_bytes += VALUE * data.side_width * (data.num_train + data.num_labels)
    return int(num_bytes)


def object_store_bytes(threads: int, data: DataSize) -> int:
    """Ray's shared memory while `prepare` has some shards of the corpus on their way."""
    # About six bytes of text for a token. A text travels raw and tokenised, with its ids.
    text_bytes = 6 * max(data.tokens_per_query, data.tokens_per_label)
    shard_bytes = _SHARD_TEXTS * (2 * text_bytes + 100)
    shards_on_their_way = 3 * (threads + 1)
    return int(shards_on_their_way * shard_bytes)


def shortlist_bytes(config: NegativesConfig, num_query_ids: int) -> int:
    """The shortlist in use, mapped from its file, and the clusters of queries."""
    if not config.refreshed:
        return 0
    values_per_query = config.hard
    if config.cluster_size:
        values_per_query += 2  # the smallest clusters, and those of the epoch
    return num_query_ids * values_per_query * VALUE


def num_found(config: NegativesConfig, positives: float) -> int:
    """Labels that a shard finds for an average query, as `negatives/refresh.py` asks for them.

    Args:
        config: Section `negatives`.
        positives: Positives of an average query, which may be among the nearest labels.
    """
    extra = 1 << math.ceil(math.log2(max(4.0, positives)))
    # Those that are left out as probable right answers have as many that take their places.
    left_out = config.hard if config.max_relative_score else 0
    return config.hard + extra + left_out


def ledger_bytes(
    config: NegativesConfig, labels: int, queries: int, dim: int, workers: int, found: int
) -> int:
    """Files of one version at its largest, and of the one in use.

    Args:
        config: Section `negatives`.
        labels: L.
        queries: Queries of an epoch.
        dim: Width of the vectors.
        workers: Number of workers, each with a shard of the labels.
        found: As `num_found` returns it.
    """
    if not config.refreshed:
        return 0
    vector_bytes = dim * VALUE
    # The vector of each query, its id, and the number of labels that are no negatives of it.
    num_bytes = queries * (vector_bytes + 2 * ID)
    if config.hard:
        num_bytes += labels * vector_bytes
        # Every shard keeps ids and scores of what it finds until all are merged.
        num_bytes += queries * workers * found * (ID + VALUE)
        # What is merged, with the id of each query and the number of labels that were left out.
        num_bytes += queries * (config.hard * VALUE + 2 * ID)
    num_bytes += 2 * shortlist_bytes(config, queries)
    return num_bytes


def cluster_bytes(queries: int, dim: int) -> int:
    """The coordinator of the negatives while it clusters the queries of an epoch.

    Args:
        queries: Queries of an epoch.
        dim: Width of their vectors.
    """
    # The vectors, those of length 1, and those of the clusters that are split: at first, of all queries.
    vector_bytes = 3 * dim * VALUE
    return queries * (vector_bytes + _CLUSTERED_BYTES)


def index_actor_bytes(factory: str, rows: int, dim: int) -> int:
    """An index actor while it builds: its rows, a copy without the longest, index, k-means' sample.

    Rows are read in blocks and joined, so that they exist twice before the index does.

    Args:
        factory: FAISS factory string, or "auto".
        rows: Labels of a shard.
        dim: Width of the vectors.
    """
    sample_rows = min(rows, TRAIN_ROWS_PER_LIST * num_lists(factory, rows))
    num_vectors = 2 * rows + sample_rows
    return num_vectors * dim * VALUE + index_bytes(factory, rows, dim)


def index_bytes(factory: str, rows: int, dim: int) -> int:
    """A FAISS index besides its vectors: codes, ids and centroids; nothing if it is exhaustive."""
    factory = resolve_factory(factory, rows, dim)
    if factory == "Flat":
        return 0
    code_bytes = dim * VALUE
    quick_codes = re.search(r"PQ(\d+)x4fs", factory)
    if quick_codes:
        # Two codes of 4 bits to a byte.
        code_bytes = (int(quick_codes[1]) + 1) // 2
    elif "fp16" in factory:
        code_bytes = 2 * dim
    elif "SQ8" in factory:
        code_bytes = dim
    num_bytes = rows * (code_bytes + ID)
    # Centroids of the lists.
    num_bytes += num_lists(factory, rows) * dim * VALUE
    return num_bytes
