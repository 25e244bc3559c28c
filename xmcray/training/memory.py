"""Bundles whose answers are votes of training queries, made from any encoder without training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from xmcray.data.corpus import Corpus
from xmcray.data.tokens import TextTokenizer, from_transformer
from xmcray.errors import DataError
from xmcray.nn.encoder import SETTINGS, Encoder, load_encoder
from xmcray.nn.heads import Head, load_head
from xmcray.retrieval import bundle as bundles
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.memory import memory_writer
from xmcray.retrieval.query_encoder import CHUNK, QueryEncoder
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ShardBuild
from xmcray.retrieval.votes import MemoryConfig
from xmcray.storage.artifact import open_artifact, refuse_existing
from xmcray.storage.manifest import MANIFEST
from xmcray.storage.remote import is_url
from xmcray.training.export import of_all_labels, sample_rows
from xmcray.training.held_out import relevance_of
from xmcray.training.outcome import bundle_of, check_fits
from xmcray.training.run import Run
from xmcray.types import Float32Array, Ragged, id_blocks, spans


def memory_bundle(
    encoder: str,
    corpus: Corpus,
    out: str | Path,
    config: MemoryConfig | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a bundle in which training queries and label texts vote. Trains nothing.

    Args:
        encoder: a run, a bundle, a folder of an encoder, or a hub id. Its head is kept. Vectors are
            normalised. Attributes of the labels of a bundle of this corpus are kept, too.
        corpus: the corpus whose training queries and labels are encoded.
        out: folder or URL that does not exist yet.
        config: how they vote if a request does not override it.
        progress: called with the number of texts encoded so far.
    Raises:
        ConfigError: no such encoder.
        DataError: the encoder needs other tokens than the corpus has, or labels have joined or left
            the bundle, which the corpus does not know.
        StorageError: `out` is not empty, or the disk is full.
    """
    refuse_existing(out)
    is_of_corpus = _is_bundle_of(encoder, corpus)
    attributes = None
    if is_of_corpus:
        bundle = Retriever.load(encoder)
        check_fits(bundle, corpus)
        # Its labels are those of the corpus, in the same order.
        folder, _ = open_artifact(encoder, bundles.KIND)
        attributes = bundles.read_attributes(folder, bundle.settings, bundle.labels.removed)
    trained_encoder, head = open_encoder(encoder, corpus)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query_encoder = QueryEncoder(
        trained_encoder.to(device),
        head.to(device),
        corpus.tokenizer(),
        normalised=True,
        normalised_labels=True,
    )
    encode = _CountingEncoder(query_encoder, progress)
    train = corpus.split("train")
    spec = IndexSpec()
    held_out = _held_out(encoder, corpus)
    relevance = relevance_of(held_out, corpus)
    about = {
        "encoder": encoder,
        "corpus": corpus.card.name,
        "corpus_licence": corpus.card.licence,
        "corpus_sha256": corpus.sha256,
        **held_out,
    }
    labels = _labels(corpus, encode.labels)
    model = BundleModel(
        encoder=query_encoder.encoder,
        head=query_encoder.head,
        tokenizer=query_encoder.tokenizer,
        method="memory",
    )
    sample = sample_rows(len(train), seed=0)
    build = ShardBuild(spec=spec, queries=encode(train.tokens(sample)))
    predictor = memory_writer(corpus, encode, config or MemoryConfig(), spec, relevance=relevance)
    write_bundle(out, model, labels, build, about=about, predictor=predictor, attributes=attributes)


def _labels(corpus: Corpus, encode: Callable[[Ragged], Float32Array]) -> BundleLabels:
    """The labels of a corpus, with the vectors of their texts.

    The generators read a block at a time while the bundle is written, so memory stays bounded.
    """
    num_labels = corpus.card.num_labels

    def vectors() -> Iterator[Float32Array]:
        for rows in id_blocks(num_labels):
            yield encode(corpus.label_tokens(corpus.label_order[rows]))

    return BundleLabels(
        uids=of_all_labels(corpus.label_uids, num_labels),
        texts=of_all_labels(corpus.label_texts, num_labels),
        order=corpus.label_order,
        vectors=vectors(),
        removed=corpus.removed_labels,
    )


class _CountingEncoder:
    """Encodes texts and reports how many it has encoded so far.

    Args:
        encoder: encodes in chunks.
        progress: called after each chunk with the number of texts so far.
    """

    def __init__(self, encoder: QueryEncoder, progress: Callable[[int], None] | None) -> None:
        self._encoder = encoder
        self._progress = progress
        self._num_encoded = 0

    def __call__(self, tokens: Ragged) -> Float32Array:
        """float32 [queries, D]."""
        return self._in_chunks(tokens, self._encoder.encode)

    def labels(self, tokens: Ragged) -> Float32Array:
        """float32 [labels, D], as an index has them."""
        return self._in_chunks(tokens, self._encoder.encode_labels)

    def _in_chunks(self, tokens: Ragged, encode: Callable[[Ragged], Float32Array]) -> Float32Array:
        vectors = [np.empty((0, self._encoder.dim), np.float32)]
        for span in spans(len(tokens), CHUNK):
            chunk = encode(tokens.slice(span.start, span.stop))
            vectors.append(chunk)
            self._num_encoded += len(chunk)
            if self._progress is not None:
                self._progress(self._num_encoded)
        return np.concatenate(vectors)


def _held_out(encoder: str, corpus: Corpus) -> dict[str, Any]:
    """The settings that say which training queries the encoder's run held out, for the manifest.

    A sweep over settings of the memory uses these queries. Empty if they are not known: an encoder's
    folder and a hub id count as trained on none of them.
    """
    if (Path(encoder) / "run.json").is_file():
        run = Run.open(encoder)
        data = run.config.to_dict()["data"]
        corpus_sha256 = run.corpus_sha256
    elif _is_bundle(encoder):
        _, manifest = open_artifact(encoder, bundles.KIND, contents=False)
        data = manifest.about.get("config", {}).get("data")
        corpus_sha256 = manifest.about.get("corpus_sha256", corpus.sha256)
    else:
        return {}
    if not data:
        return {}
    if corpus_sha256 != corpus.sha256:
        # The other corpus may have any of these queries, so none is sure to be held out.
        data = {**data, "validation": 0.0}
    return {"config": {"data": data}}


def _is_bundle_of(path: str, corpus: Corpus) -> bool:
    """Whether a path is that of a bundle whose labels are those of a corpus."""
    if not _is_bundle(path):
        return False
    _, manifest = open_artifact(path, bundles.KIND, contents=False)
    return manifest.about.get("corpus_sha256") == corpus.sha256


def _is_bundle(path: str) -> bool:
    """Whether a path must be that of a bundle: a URL, or a folder with a manifest."""
    if is_url(path):
        return True
    folder = Path(path)
    # An encoder that was exported to sentence-transformers has a manifest, too.
    is_exported_encoder = (folder / "modules.json").is_file()
    return (folder / MANIFEST).is_file() and not is_exported_encoder


def open_encoder(path: str, corpus: Corpus) -> tuple[Encoder, Head]:
    """Encoder and head of a run, a bundle, an encoder's folder or a hub id.

    Args:
        path: of one of these.
        corpus: the corpus whose tokens the encoder must read.
    Raises:
        ConfigError: no such encoder.
        DataError: the encoder needs other tokens than the corpus has.
    """
    folder = Path(path)
    if (folder / "run.json").is_file():
        run = Run.open(folder)
        path = bundle_of(run, corpus if run.corpus_sha256 == corpus.sha256 else None)
    if _is_bundle(path):
        folder, _ = open_artifact(path, bundles.KIND)
        encoder = load_encoder(folder / "encoder")
        head = load_head(folder / "head")
        tokenizer = TextTokenizer.load(folder / "tokenizer")
        fits = tokenizer.to_files() == corpus.tokenizer().to_files()
    else:
        if not folder.is_dir():
            # Imported here, because the library behind it takes seconds to import.
            from xmcray.nn.pretrained import find

            folder = find(path)
        encoder = load_encoder(folder)
        head = Head(encoder.dim)
        fits = _fits(folder, encoder, corpus.tokenizer())
    if not fits:
        raise DataError(
            f"corpus {corpus.path} has other tokens than encoder {path}; prepare it with that"
            " encoder's tokenizer"
        )
    return encoder.eval(), head.eval()


def _fits(folder: Path, encoder: Encoder, tokenizer: TextTokenizer) -> bool:
    """Whether an encoder's folder was made for the tokens of a tokenizer."""
    if (folder / SETTINGS).is_file():
        return encoder.num_tokens == tokenizer.vocab_size
    if tokenizer.kind != "transformer":
        return False
    own = from_transformer(str(folder), tokenizer.max_len, tokenizer.label_max_len)
    return _vocabulary(own) == _vocabulary(tokenizer)


def _vocabulary(tokenizer: TextTokenizer) -> dict[str, int]:
    """Token -> id."""
    text = tokenizer.to_files()["tokenizer.json"]
    tokens: dict[str, int] = Tokenizer.from_str(text).get_vocab()
    return tokens
