"""Small corpora for tests, written by the parts of `prepare` without Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from planted import WORDS_PER_LABEL, write_planted, write_side_vectors

from xmcray.data.append import appended_files, settings_of
from xmcray.data.appended_labels import match_labels
from xmcray.data.chunks import NO_PAIRS, pack_chunk, read_chunks, survey, test_keys
from xmcray.data.continued_writer import continued_writer, files_to_write
from xmcray.data.corpus import KIND, Corpus
from xmcray.data.formats import RawFiles, detect
from xmcray.data.text_keys import NO_KEYS
from xmcray.data.tokens import TextTokenizer, from_transformer, train_wordpiece
from xmcray.data.writer import CorpusWriter, PrepareConfig, sorted_pairs
from xmcray.storage.artifact import link_files, new_artifact, open_artifact
from xmcray.storage.manifest import FileEntry


def planted_corpus(
    folder: Path,
    num_queries: int = 101,
    num_labels: int = 23,
    seed: int = 0,
    side_width: int = 0,
    **planted: Any,
) -> Corpus:
    """A corpus of planted data in folder/corpus; its raw files are in folder/raw.

    Args:
        side_width: of side vectors; 0 for none.
    """
    write_planted(folder / "raw", num_queries, num_labels, seed, **planted)
    if side_width:
        write_side_vectors(folder / "raw", side_width)
    return corpus_of(folder / "raw", folder / "corpus", vocab_size=2000)


def planted_decoder(
    folder: Path, num_queries: int = 131, num_labels: int = 23
) -> tuple[Corpus, Path]:
    """A corpus of planted data in folder/corpus, and the decoder that reads it in folder/qwen3."""
    from models import write_family  # here, because transformers is slow to import

    write_planted(folder / "raw", num_queries, num_labels)
    words = [f"w{label}x{n}" for label in range(num_labels) for n in range(WORDS_PER_LABEL)]
    model = write_family(folder / "qwen3", words, "qwen3")
    return corpus_of(folder / "raw", folder / "corpus", str(model)), model


def corpus_of(
    raw: Path,
    out: Path,
    tokenizer: TextTokenizer | str | None = None,
    licence: str = "none",
    **settings: Any,
) -> Corpus:
    """The corpus of some raw files.

    Args:
        tokenizer: or the name of a transformer that has one; without it, a vocabulary is trained.
    """
    source = detect(raw)
    config = PrepareConfig(**settings)
    with new_artifact(out, KIND, {"made_by": "tests"}) as folder:
        if isinstance(tokenizer, str):
            tokenizer = from_transformer(tokenizer, config.max_len)
        tokenizer = tokenizer or vocabulary_of(source, config)
        writer = CorpusWriter(folder, source, config, "planted", licence)
        write_rows(writer, source, tokenizer)
    return Corpus.open(out)


def vocabulary_of(source: RawFiles, config: PrepareConfig) -> TextTokenizer:
    """A vocabulary trained on some raw files."""
    # The last result of the survey is the sample of texts.
    skip = config.on_error == "skip"
    *_, (_, texts) = survey(source, cap=100_000, seed=0, skip=skip, block_rows=1000)
    return train_wordpiece(texts, config.vocab_size, config.max_len)


def appended(
    corpus: Corpus, raw: Path, out: Path, on_error: Literal["fail", "skip"] = "fail"
) -> Corpus:
    """`corpus` with the rows of new raw files, as `prepare --append` writes it."""
    _, manifest = open_artifact(corpus.path, KIND)
    new = detect(raw)
    source = appended_files(corpus, new, match_labels(corpus, new, on_error == "skip"))
    config = settings_of(corpus.card, on_error)
    tokenizer = corpus.tokenizer()
    linked: dict[str, FileEntry] = {}
    with new_artifact(out, KIND, {"made_by": "tests"}, linked) as folder:
        changed = files_to_write(manifest.files, source, config)
        linked.update(link_files(corpus.path, manifest, folder, changed))
        writer = continued_writer(folder, corpus, source, config)
        write_rows(writer, source, tokenizer)
    return Corpus.open(out)


def grown_corpora(folder: Path, num_old: int) -> tuple[Corpus, Corpus]:
    """A corpus of the first labels of planted data, and one with all labels and queries.

    The second one alone has a test split.
    """
    write_planted(folder / "all", 150, 23, only_in_test=0, filtered=0)
    rows = {}
    for name in ("labels", "train", "test"):
        lines = (folder / "all" / f"{name}.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line) for line in lines]
    for query in (*rows["train"], *rows["test"]):
        query["labels"] = [f"label{label}" for label in query["labels"]]
    is_old = [all(int(x[5:]) < num_old for x in query["labels"]) for query in rows["train"]]
    old = {**rows, "labels": rows["labels"][:num_old]}
    old["train"] = [query for query, keep in zip(rows["train"], is_old, strict=True) if keep]
    del old["test"]
    new = {**rows}
    new["train"] = [query for query, keep in zip(rows["train"], is_old, strict=True) if not keep]
    for name, files in (("old", old), ("new", new)):
        (folder / name).mkdir()
        for split, queries in files.items():
            text = "".join(json.dumps(query) + "\n" for query in queries)
            (folder / name / f"{split}.jsonl").write_text(text)
    first = corpus_of(folder / "old", folder / "first")
    return first, appended(first, folder / "new", folder / "second")


def write_rows(writer: CorpusWriter, source: RawFiles, tokenizer: TextTokenizer) -> None:
    """Packs and writes all rows, and finishes the corpus."""
    shard_rows = writer.config.shard_rows
    for split in ("labels", *source.splits):
        pairs = NO_PAIRS if split == "labels" else sorted_pairs(source.filters(split))
        num_labels = writer.num_rows["labels"]
        leaks = NO_KEYS
        skip = writer.config.on_error == "skip"
        if split == "train" and writer.config.on_leak == "drop":
            leaks = np.concatenate(list(test_keys(source, num_labels, skip, shard_rows)))
        for chunk in read_chunks(source, split, num_labels, shard_rows, skip, leaks):
            writer.add(pack_chunk(chunk, tokenizer, pairs, num_labels, shard_rows))
    writer.finish(tokenizer)
