"""A memory for any encoder, without training: as a bundle, and on the validation split to choose its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from xmcray import storage
from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.data.tokens import TextTokenizer, from_transformer
from xmcray.errors import ConfigError, DataError
from xmcray.evaluation.evaluate import SEARCH_K
from xmcray.evaluation.metrics import Metrics
from xmcray.nn.encoder import SETTINGS, Encoder, load_encoder
from xmcray.nn.heads import Head, load_head
from xmcray.retrieval import bundle as bundles
from xmcray.retrieval.exact import exact_search
from xmcray.retrieval.index import Index, IndexSpec
from xmcray.retrieval.memory import VOTERS, Memory, MemoryConfig, Neighbours, remember, sweep
from xmcray.retrieval.retriever import CHUNK, embed
from xmcray.retrieval.shards import Shard
from xmcray.training.outcome import bundle_of
from xmcray.training.run import Run
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

_BLOCK = 65_536  # labels whose texts are read at once
Encode = Callable[[Ragged], Float32Array]


def memory_bundle(
    encoder: str,
    corpus: Corpus,
    out: str | Path,
    config: MemoryConfig | None = None,
    *,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a bundle whose answers are votes of the corpus' training queries and label texts; trains nothing.

    Args:
        encoder: a run, a bundle, a folder of an encoder, or a hub id. Its head is kept; vectors get length 1.
        config: how they vote where a request does not say otherwise.
        threads: of building an index. progress: called with the number of texts encoded so far.
    Raises:
        ConfigError: no such encoder. DataError: it needs other tokens than the corpus has.
        StorageError: `out` is not empty, or the disk is full.
    """
    storage.refuse_existing(out)
    model, head = open_encoder(encoder, corpus)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, head = model.to(device), head.to(device)
    encode, order, num_labels = (
        encoder_of(model, head, progress),
        corpus.label_order,
        corpus.card.num_labels,
    )
    blocks = [
        np.arange(i, min(i + _BLOCK, num_labels), dtype=np.int64)
        for i in range(0, num_labels, _BLOCK)
    ]
    spec = IndexSpec()
    train = corpus.split("train")
    sample = np.random.default_rng(0).choice(len(train), min(256, len(train)), replace=False)
    bundles.write_bundle(
        out,
        model,
        head,
        corpus.tokenizer(),
        (uid for block in blocks for uid in corpus.label_uids(block)),
        (text for block in blocks for text in corpus.label_texts(block)),
        order,
        (encode(corpus.label_tokens(order[block])) for block in blocks),
        spec,
        about={"encoder": encoder, "corpus": corpus.card.name, "corpus_sha256": corpus.sha256},
        method="memory",
        queries=encode(train.tokens(np.sort(sample))),
        predictor=remember(train, encode, config or MemoryConfig(), spec, threads),
        threads=threads,
    )


def open_encoder(path: str, corpus: Corpus) -> tuple[Encoder, Head]:
    """Encoder and head of a run, a bundle, an encoder's folder or a hub id, for the tokens of a corpus.

    Raises:
        ConfigError: no such encoder. DataError: it needs other tokens than the corpus has.
    """
    folder = Path(path)
    if (folder / "run.json").is_file():
        run = Run.open(folder)
        path = bundle_of(run, corpus if run.corpus_sha256 == corpus.sha256 else None)
    if "://" in path or (Path(path) / storage.MANIFEST).is_file():
        folder, _ = storage.open_artifact(path, bundles.KIND)
        encoder, head = load_encoder(folder / "encoder"), load_head(folder / "head")
        fits = TextTokenizer.load(folder / "tokenizer").to_files() == corpus.tokenizer().to_files()
    else:
        if not folder.is_dir():
            from xmcray.nn.transformer import find  # its library takes seconds to import

            folder = find(path)
        encoder = load_encoder(folder)
        head = Head(encoder.dim)
        fits = _fits(folder, encoder, corpus.tokenizer())
    if not fits:
        raise DataError(
            f"corpus {corpus.path} has other tokens than encoder {path}; prepare it with that encoder's tokenizer"
        )
    return encoder.eval(), head.eval()


def encoder_of(
    encoder: Encoder, head: Head, progress: Callable[[int], None] | None = None
) -> Encode:
    """Token ids -> float32 vectors of length 1, in bounded memory; `progress` hears how many texts it encoded."""
    done = 0

    def encode(tokens: Ragged) -> Float32Array:
        nonlocal done
        parts = [np.empty((0, head.out_dim), np.float32)]
        for start in range(0, len(tokens), CHUNK):
            chunk = tokens.slice(start, min(start + CHUNK, len(tokens)))
            parts.append(embed(encoder, head, chunk, normalised=True))
            done += len(chunk)
            if progress is not None:
                progress(done)
        return np.concatenate(parts)

    return encode


def sweep_memory(
    encode: Encode, data: TrainingData, grid: Sequence[MemoryConfig]
) -> list[tuple[MemoryConfig, dict[str, float]]]:
    """Metrics of each setting on the validation split, from one search; the memory holds the other training queries.

    Args:
        grid: settings. Those that differ in `weight` alone, between 0 and 1, share all the counting.
    Raises:
        ConfigError: nothing to compare. DataError: nothing is held out.
    """
    if not grid:
        raise ConfigError("the grid of memory settings is empty, expected at least one")
    held_out, corpus = data.validation_rows, data.corpus
    if not len(held_out):
        raise DataError(
            "no training query is held out, expected some to choose by; set data.validation=0.05"
        )
    card, train = corpus.card, corpus.split("train")
    measured = [
        Metrics(
            corpus.train_counts,
            card.num_train,
            card.propensity_a,
            card.propensity_b,
            card.num_labels,
        )
        for _ in grid
    ]
    for rows, answers in _answers(encode, data, grid):
        for metrics, top in zip(measured, answers, strict=True):
            metrics.update(top, train.positives(rows))
    return [(config, metrics.result()) for config, metrics in zip(grid, measured, strict=True)]


def _answers(
    encode: Encode, data: TrainingData, grid: Sequence[MemoryConfig]
) -> Iterator[tuple[Int64Array, list[TopLabels]]]:
    """Some validation rows, and their answers under each setting."""
    corpus, held_out, num_labels = data.corpus, data.validation_rows, data.num_labels
    train = corpus.split("train")
    kept = data.query_ids[data.query_ids < data.num_train]
    key_ND, label_LD = (
        encode(train.tokens(kept)),
        encode(corpus.label_tokens(np.arange(num_labels))),
    )
    widest = dataclasses.replace(grid[0], weight=0.5, keys=max(config.keys for config in grid))
    index = Index(torch.from_numpy(key_ND), None, threads=torch.get_num_threads())
    memory = Memory(
        widest, [Shard(0, len(kept), False, 1)], [index], train.positives(kept), num_labels
    )
    k = min(SEARCH_K, num_labels)
    for start in range(0, len(held_out), VOTERS):
        rows = held_out[start : start + VOTERS]
        query_BD, exclude = encode(train.tokens(rows)), train.filters(rows)
        scores, ids = exact_search(label_LD, query_BD, memory.width(k, widest), hidden=exclude)
        near = Neighbours(memory.search(query_BD, widest), TopLabels(ids, scores))
        yield rows, [top for _, top in sweep(near, memory.positives, grid, k, num_labels, exclude)]


def _fits(folder: Path, encoder: Encoder, tokenizer: TextTokenizer) -> bool:
    """Whether an encoder's folder was made for the tokens of a tokenizer."""
    if (folder / SETTINGS).is_file():
        return len(encoder.state_dict()["weight"]) == tokenizer.vocab_size
    if tokenizer.kind != "transformer":
        return False
    own = from_transformer(str(folder), tokenizer.max_len, tokenizer.label_max_len)
    vocabularies = [
        Tokenizer.from_str(t.to_files()["tokenizer.json"]).get_vocab() for t in (own, tokenizer)
    ]
    return bool(vocabularies[0] == vocabularies[1])
