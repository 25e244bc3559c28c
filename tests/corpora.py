"""Small corpora for tests, written by the parts of `prepare` without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planted import write_planted

from xmcray.data.chunks import pack_chunk, read_chunks, survey
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
    source, config = detect(str(raw), None), PrepareConfig(**settings)
    with new_artifact(out, KIND, {"made_by": "tests"}) as target:
        *_, (_, texts) = survey(source, 100_000, 0, False, 1000)
        tokenizer = train_wordpiece(iter(texts), config.vocab_size, config.max_len)
        writer = CorpusWriter(target)
        filters = {split: sorted_pairs(source.filters(split)) for split in source.splits}
        for split in ["labels", *source.splits]:
            for chunk in read_chunks(
                source, split, writer.num_rows["labels"], config.shard_rows, False
            ):
                pairs = filters.get(split, sorted_pairs(source.filters("train")[:0]))
                writer.add(
                    pack_chunk(
                        chunk, tokenizer, pairs, writer.num_rows["labels"], config.shard_rows
                    )
                )
        writer.finish(source, config, "planted", "none", tokenizer)
    return Corpus.open(out)
