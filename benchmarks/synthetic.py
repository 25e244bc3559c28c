"""Corpora of any size within minutes: token ids are drawn, texts are written from them, shard by shard, without Ray.

What `prepare` would make of the same texts, but for two things: the vocabulary is given instead of trained, and no raw
files are read. Token t is the word "wT", so a text is its tokens, and every reader finds what it expects. Here words are
drawn by Zipf's law, and the labels of a query at random; negatives_by_labels.py draws what can be learned.
"""

from __future__ import annotations

import fcntl
import functools
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import data_sets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer, models, pre_tokenizers

from xmcray.data.chunks import PackedShard
from xmcray.data.corpus import KIND, Corpus
from xmcray.data.formats import RawFiles
from xmcray.data.shards import pack
from xmcray.data.tokens import PAD, UNKNOWN, TextTokenizer
from xmcray.data.writer import CorpusWriter, PrepareConfig
from xmcray.storage.artifact import new_artifact
from xmcray.types import Int64Array, Ragged, offsets_of

SHARD_ROWS = 65_536
TEST_QUERIES = 256


def corpus(
    num_labels: int,
    num_queries: int,
    tokens_per_text: int = 8,
    positives: int = 2,
    vocab_size: int = 30_000,
) -> Corpus:
    """The corpus of these sizes, from the cache if it was made before."""
    name = f"synthetic-{num_labels}-{num_queries}-{tokens_per_text}-{positives}-{vocab_size}"

    def shards() -> Iterator[PackedShard]:
        generator = np.random.default_rng(0)
        for split, rows, labels_per_row in (
            ("labels", num_labels, 0),
            ("train", num_queries, positives),
            ("test", TEST_QUERIES, positives),
        ):
            for number, start in enumerate(range(0, rows, SHARD_ROWS)):
                size = min(SHARD_ROWS, rows - start)
                values = zipf_tokens(generator, size * tokens_per_text, vocab_size)
                tokens = Ragged(values, np.arange(size + 1) * tokens_per_text)
                labels = None
                if labels_per_row:
                    ids = generator.integers(num_labels, size=(size, labels_per_row))
                    labels = _distinct(np.sort(ids, axis=1))
                yield packed_shard(split, number, tokens, labels, vocab_size)

    needed = 3 * (num_labels + num_queries) * tokens_per_text * 8
    return kept(name, needed, word_tokenizer(vocab_size, tokens_per_text), shards)


def kept(
    name: str,
    needed_bytes: int,
    tokenizer: TextTokenizer,
    shards: Callable[[], Iterable[PackedShard]],
) -> Corpus:
    """A corpus of shards, from the cache if it was made before."""
    target = data_sets.CACHE / "corpora" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            if shutil.disk_usage(target.parent).free < needed_bytes:
                raise SystemExit(
                    f"error: {needed_bytes / 1e9:.0f} GB of disk are needed for {name}; free some space"
                )
            made_by = {"made_by": "benchmarks/synthetic.py", "name": name}
            with new_artifact(target, KIND, made_by) as folder:
                source = RawFiles("synthetic", Path("synthetic"), ("train", "test"))
                config = PrepareConfig(shard_rows=SHARD_ROWS)
                writer = CorpusWriter(folder, source, config, name, "none")
                for shard in shards():
                    writer.add(shard)
                writer.finish(tokenizer)
    return Corpus.open(target, verify=False)


def words_of(vocab_size: int) -> list[str]:
    """The words of a vocabulary; token t is the word "wt"."""
    return [PAD, UNKNOWN, *(f"w{i}" for i in range(2, vocab_size))]


def word_tokenizer(vocab_size: int, tokens_per_text: int) -> TextTokenizer:
    """A tokenizer that knows these words alone."""
    word_ids = {word: i for i, word in enumerate(words_of(vocab_size))}
    backend = Tokenizer(models.WordPiece(word_ids, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextTokenizer(
        {"tokenizer.json": backend.to_str()},
        kind="wordpiece",
        pad_id=0,
        max_len=4 * tokens_per_text,
    )


def zipf_tokens(generator: np.random.Generator, number: int, vocab_size: int) -> Int64Array:
    """Token ids by Zipf's law."""
    mass_V = np.cumsum(1 / (np.arange(2, vocab_size) + 0.7))
    drawn: Int64Array = np.searchsorted(mass_V, generator.random(number) * mass_V[-1])
    return 2 + drawn


def packed_shard(
    split: str, number: int, tokens: Ragged, labels: Ragged | None, vocab_size: int
) -> PackedShard:
    """Some rows of a split.

    Args:
        split: "labels", "train" or "test".
        number: of the shard; those before it have SHARD_ROWS rows each.
        tokens: of the rows.
        labels: positives of each row; None for a split without.
        vocab_size: of the tokens.
    """
    size = len(tokens)
    word_V = _word_array(vocab_size)
    lists = pa.ListArray.from_arrays(
        pa.array(tokens.offsets, pa.int32()), word_V.take(pa.array(tokens.values))
    )
    row_ids = pa.array(number * SHARD_ROWS + np.arange(size)).cast(pa.string())
    uids = pc.binary_join_element_wise(split, row_ids, "")
    texts = pa.table(
        {
            "uid": uids.cast(pa.large_string()),
            "text": pc.binary_join(lists, " ").cast(pa.large_string()),
        }
    )
    files = pack(number, texts, tokens, vocab_size, labels)
    shard = PackedShard(split, number, files, size, len(tokens.values), [], Counter(), {})
    if labels is not None:
        shard.label_ids = labels.values
    return shard


@functools.cache
def _word_array(vocab_size: int) -> pa.StringArray:
    return pa.array(words_of(vocab_size))


def _distinct(sorted_ids: Int64Array) -> Ragged:
    """Rows of ascending ids without repetitions."""
    kept = np.ones(sorted_ids.shape, bool)
    kept[:, 1:] = np.diff(sorted_ids, axis=1) > 0
    return Ragged(sorted_ids[kept], offsets_of(kept.sum(axis=1)))
