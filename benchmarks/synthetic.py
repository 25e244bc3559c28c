"""Corpora of any size within minutes: token ids are drawn, texts are written from them, shard by shard, without Ray.

What `prepare` would make of the same texts, but for two things: the vocabulary is given instead of trained, and no raw
files are read. Token t is the word "wT", so a text is its tokens, and every reader finds what it expects. Words are
drawn by Zipf's law; a label is named by some words, and a query holds words of its labels, which are drawn alike.
"""

from __future__ import annotations

import fcntl
import shutil
from collections import Counter
from collections.abc import Iterator
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
    target = data_sets.CACHE / "corpora" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            needed = 3 * (num_labels + num_queries) * tokens_per_text * 8
            if shutil.disk_usage(target.parent).free < needed:
                raise SystemExit(
                    f"error: {needed / 1e9:.0f} GB of disk are needed for {name}; free some space"
                )
            with new_artifact(
                target, KIND, {"made_by": "benchmarks/synthetic.py", "name": name}
            ) as folder:
                _write(
                    folder, name, num_labels, num_queries, tokens_per_text, positives, vocab_size
                )
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


def _write(
    folder: Path,
    name: str,
    num_labels: int,
    num_queries: int,
    tokens_per_text: int,
    positives: int,
    vocab_size: int,
) -> None:
    tokenizer = word_tokenizer(vocab_size, tokens_per_text)
    word_V = pa.array(words_of(vocab_size))
    generator = np.random.default_rng(0)
    mass_V = np.cumsum(1 / (np.arange(2, vocab_size) + 0.7))

    def drawn(number: int) -> Int64Array:
        """Token ids by Zipf's law."""
        return 2 + np.searchsorted(mass_V, generator.random(number) * mass_V[-1]).astype(np.int64)

    def shards(split: str, rows: int, labels_per_row: int) -> Iterator[PackedShard]:
        for number, start in enumerate(range(0, rows, SHARD_ROWS)):
            size = min(SHARD_ROWS, rows - start)
            tokens = Ragged(drawn(size * tokens_per_text), np.arange(size + 1) * tokens_per_text)
            ids = (
                np.sort(generator.integers(num_labels, size=(size, labels_per_row)), axis=1)
                if labels_per_row
                else None
            )
            labels = None if ids is None else _distinct(ids)
            lists = pa.ListArray.from_arrays(
                pa.array(tokens.offsets, pa.int32()), word_V.take(pa.array(tokens.values))
            )
            uids = pc.binary_join_element_wise(
                split, pa.array(np.arange(start, start + size)).cast(pa.string()), ""
            )
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
            yield shard

    source = RawFiles("synthetic", Path("synthetic"), ("train", "test"))
    config = PrepareConfig(shard_rows=SHARD_ROWS)
    writer = CorpusWriter(folder, source, config, name, "none")
    for split, rows, number in (
        ("labels", num_labels, 0),
        ("train", num_queries, positives),
        ("test", TEST_QUERIES, positives),
    ):
        for shard in shards(split, rows, number):
            writer.add(shard)
    writer.finish(tokenizer)


def _distinct(sorted_ids: Int64Array) -> Ragged:
    """Rows of ascending ids without repetitions."""
    kept = np.ones(sorted_ids.shape, bool)
    kept[:, 1:] = np.diff(sorted_ids, axis=1) > 0
    return Ragged(sorted_ids[kept], offsets_of(kept.sum(axis=1)))
