"""Small bundles for tests: an untrained encoder, and label vectors as each method makes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from corpora import planted_corpus

from xmcray.data.corpus import Corpus
from xmcray.data.tokens import from_transformer, train_wordpiece
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.heads import Head, NormalisedHead, TwoHeads
from xmcray.nn.label_side import LabelSide
from xmcray.nn.prototypes import PrototypeNetwork
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.labels import NewLabel
from xmcray.retrieval.parts import MemberConfig, PartsConfig
from xmcray.retrieval.shards import ShardBuild
from xmcray.retrieval.votes import MemoryConfig
from xmcray.training.fuse import write_parts
from xmcray.training.memory import memory_bundle
from xmcray.types import Float32Array

WORDS = "matrix vector norm solve inverse trace rank eigen sparse dense random sample mean median sort join".split()  # noqa: SIM905
# Every set of three words once: 560 texts.
TEXTS: list[str] = []
for i, first_word in enumerate(WORDS):
    for j, second_word in enumerate(WORDS[:i]):
        TEXTS += [f"{first_word} {second_word} {third_word}" for third_word in WORDS[:j]]
# Labels that join. Each repeats a word twice and the seventh word after it four times.
NEW = [
    NewLabel(f"new{number}", f"{one} {one} {other} {other} {other} {other}")
    for number, (one, other) in enumerate(zip(WORDS, WORDS[7:], strict=False))
]
DIM = 16
IVF = IndexSpec(factory="IVF8,Flat", nprobe=2, candidates=1)
HNSW = IndexSpec(factory="HNSW8", candidates=1)


def write_memory(folder: Path) -> Path:
    """A bundle with a memory of planted training queries: folder/memory; 47 labels, b = 25."""
    corpus = planted_corpus(folder, num_queries=300, num_labels=47)
    return write_memory_of(corpus, folder / "memory", DIM, seed=0)


def write_memory_of(corpus: Corpus, path: Path, dim: int, seed: int) -> Path:
    """A bundle of an untrained encoder whose training queries vote; b = 25."""
    encoder = path.with_name(f"{path.name}-encoder")
    build_encoder(EncoderConfig(dim=dim), corpus.tokenizer(), None, seed=seed).save(encoder)
    memory_bundle(str(encoder), corpus, path, MemoryConfig(keys=25))
    return path


def write_fused(memory: Path) -> Path:
    """The bundle of `write_memory` and one more member, with all parts: folder/fused."""
    corpus = Corpus.open(memory.parent / "corpus")
    second = write_memory_of(corpus, memory.parent / "second", DIM - 4, seed=1)
    members = (MemberConfig(name="first", memory=0.5), MemberConfig(name="second", memory=0.25))
    config = PartsConfig(members=members, words=0.5, texts=0.5, memory_keys=10)
    write_parts([memory, second], corpus, memory.parent / "fused", config)
    return memory.parent / "fused"


def write_transformer(folder: Path) -> Path:
    """A bundle with a tiny transformer and random label vectors: folder/bert; 99 labels."""
    from models import write_bert  # here, because transformers is slow to import

    name = str(write_bert(folder / "model", WORDS))
    tokenizer = from_transformer(name, max_len=32)
    encoder = build_encoder(EncoderConfig(name=name, dim=DIM), tokenizer, None, seed=0).eval()
    vectors = np.random.default_rng(0).standard_normal((99, DIM), np.float32)
    model = BundleModel(encoder=encoder, head=Head(DIM), tokenizer=tokenizer)
    labels = BundleLabels(
        uids=[f"u{label}" for label in range(99)],
        texts=TEXTS[:99],
        order=np.arange(99),
        vectors=[vectors],
    )
    write_bundle(folder / "bert", model, labels, ShardBuild(spec=IndexSpec()), {"by": "test"})
    return folder / "bert"


def write_bundle_of(path: Path, kind: str, dim: int = DIM, shard_rows: int = 1 << 20) -> Path:
    """560 labels whose vectors are of one kind: texts, rows, both or prototypes.

    A kind that ends with IVF or HNSW has an approximate index.
    """
    index = IndexSpec()
    if kind.endswith("IVF"):
        index = IVF
    elif kind.endswith("HNSW"):
        index = HNSW
    tokenizer = train_wordpiece(TEXTS, vocab_size=400, max_len=16)
    encoder = build_encoder(EncoderConfig(dim=dim), tokenizer, None, seed=0).eval()
    rng = np.random.default_rng(0)
    head = _head(kind, dim)
    with torch.no_grad():
        vectors = head(encoder(tokenizer.encode(TEXTS))).numpy()
    side = LabelSide()
    if kind.startswith("rows"):
        vectors = _trained_rows(vectors, rng)
        side = LabelSide(dim)
    elif kind == "both":
        rows = _trained_rows(vectors[:, -dim:], rng)
        vectors[:, dim:] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        side = LabelSide(dim)
    else:
        # The draws of the rows, so that every kind has the same order of labels.
        rng.standard_normal(vectors.shape, np.float32)
    if kind.startswith("prototypes"):
        network = PrototypeNetwork(dim, 8, 4, seed=0)
        clusters = torch.zeros(len(TEXTS), dtype=torch.int64)
        side = LabelSide(prototypes=network, cluster_L=clusters)
    order = rng.permutation(len(TEXTS))
    model = BundleModel(encoder=encoder, head=head, tokenizer=tokenizer, label_side=side)
    labels = BundleLabels(
        uids=[f"u{label}" for label in range(len(TEXTS))],
        texts=TEXTS,
        order=order,
        vectors=[vectors[order]],
    )
    build = ShardBuild(spec=index, shard_rows=shard_rows)
    write_bundle(path, model, labels, build, {"by": "test"})
    return path


def _head(kind: str, dim: int) -> Head:
    if kind == "both":
        head = TwoHeads(dim, dim)
        head.reset(0)
        return head
    return Head(dim) if kind.startswith("rows") else NormalisedHead(dim)


def _trained_rows(vectors: Float32Array, rng: np.random.Generator) -> Float32Array:
    """Rows as training makes them: long, with a part that all have and one that follows the text."""
    direction = vectors - vectors.mean(axis=0)
    length = np.linalg.norm(direction, axis=1, keepdims=True)
    noise = rng.standard_normal(vectors.shape, np.float32)
    return 5 * direction / length - 1 + 0.1 * noise
