"""Small corpora for tests, written by the parts of `prepare` without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planted import write_planted

from xmcray.data.chunks import NO_PAIRS, pack_chunk, read_chunks, survey
from xmcray.data.corpus import KIND, Corpus
from xmcray.data.formats import detect
from xmcray.data.tokens import train_wordpiece
from xmcray.data.writer import CorpusWriter, PrepareConfig, sorted_pairs
from xmcray.storage import new_artifact


def planted_corpus(
    folder: Path, num_queries: int = 101, num_labels: int = 23, seed: int = 0, **planted: Any
) -> Corpus:
    """A corpus of planted data in folder/corpus; its raw files are in folder/raw."""
    write_planted(folder / "raw", num_queries, num_labels, seed, **planted)
    return corpus_of(folder / "raw", folder / "corpus", vocab_size=2000)


def corpus_of(raw: Path, out: Path, **settings: Any) -> Corpus:
    """The corpus of some raw files."""
    source = detect(raw)
    config = PrepareConfig(**settings)
    with new_artifact(out, KIND, {"made_by": "tests"}) as folder:
        # The last result of the survey is the sample of texts.
        *_, (_, texts) = survey(source, cap=100_000, seed=0, skip=False, block_rows=1000)
        tokenizer = train_wordpiece(texts, config.vocab_size, config.max_len)
        writer = CorpusWriter(folder, source, config, "planted", "none")
        for split in ("labels", *source.splits):
            pairs = NO_PAIRS if split == "labels" else sorted_pairs(source.filters(split))
            num_labels = writer.num_rows["labels"]
            for chunk in read_chunks(source, split, num_labels, config.shard_rows, skip=False):
                shard = pack_chunk(chunk, tokenizer, pairs, num_labels, config.shard_rows)
                writer.add(shard)
        writer.finish(tokenizer)
    return Corpus.open(out)
