"""Bytes of what is around the steps: mapped files, an index actor, the ledger, Ray's object store."""

from __future__ import annotations

from xmcray.negatives.plan import NegativesConfig
from xmcray.planning.data_size import DataSize
from xmcray.retrieval.ann import TRAIN_ROWS_PER_LIST
from xmcray.retrieval.index import resolve_factory

ID = 8  # bytes of an int64
VALUE = 4  # bytes of a float32 or an int32
CANDIDATES = 8  # labels that a search finds besides the hard negatives: positives are among them
_TOKENIZER_BYTES = 1500  # of a token in the tokenizer's tables
_SHARD_TEXTS = 16_384  # of the corpus' files


def corpus_bytes(data: DataSize, num_query_ids: int) -> int:
    """The corpus as a worker maps it, and its orders of labels and of the queries it samples."""
    token_bytes = 2 if data.vocab_size <= 1 << 16 else 4
    query_tokens = data.num_train * data.tokens_per_query
    label_tokens = data.num_labels * data.tokens_per_label
    texts = token_bytes * (query_tokens + label_tokens)
    # Offsets of the tokens and of the positives of each query, and of the tokens of each label.
    offsets = ID * (2 * data.num_train + data.num_labels)
    positives = VALUE * data.num_train * data.positives_per_query
    # label_order, label_rank and train_counts; sampled ids, their order, and the next epoch's.
    orders = 3 * ID * (data.num_labels + num_query_ids)
    tokenizer = _TOKENIZER_BYTES * data.vocab_size
    return int(texts + offsets + positives + orders + tokenizer)


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


def ledger_bytes(config: NegativesConfig, labels: int, queries: int, dim: int, workers: int) -> int:
    """Files of one version at its largest, and of the one in use."""
    if not config.refreshed:
        return 0
    vector_bytes = dim * VALUE
    version = queries * (vector_bytes + 2 * ID)
    if config.hard:
        version += labels * vector_bytes
        # Every shard keeps ids and scores of its candidates until they are merged.
        num_candidates = config.hard + CANDIDATES
        version += queries * workers * num_candidates * (ID + VALUE)
    return version + 2 * shortlist_bytes(config, queries)


def index_actor_bytes(factory: str, rows: int, dim: int) -> int:
    """An index actor while it builds: its rows, a copy without the longest, index, k-means' sample.

    Rows are read in blocks and joined, so that they exist twice before the index does.
    """
    sample_rows = min(rows, TRAIN_ROWS_PER_LIST * num_lists(factory, rows))
    vectors = (2 * rows + sample_rows) * dim * VALUE
    return vectors + index_bytes(factory, rows, dim)


def index_bytes(factory: str, rows: int, dim: int) -> int:
    """A FAISS index besides its vectors: codes, ids and centroids; nothing if it is exhaustive."""
    factory = resolve_factory(factory, rows)
    if factory == "Flat":
        return 0
    code_bytes = dim * VALUE
    if "fp16" in factory:
        code_bytes = 2 * dim
    elif "SQ8" in factory:
        code_bytes = dim
    entries = rows * (code_bytes + ID)
    centroids = num_lists(factory, rows) * dim * VALUE
    return entries + centroids


def num_lists(factory: str, rows: int) -> int:
    """Inverted lists of an index; 0 without."""
    coarse, _, _ = resolve_factory(factory, rows).partition(",")
    number = coarse.removeprefix("IVF")
    if coarse == number or not number.isdigit():
        return 0
    return int(number)
