"""Small bundles for tests: an untrained encoder, and label vectors as each method makes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from corpora import planted_corpus

from xmcray.data.tokens import from_transformer, train_wordpiece
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.heads import Head, NormalisedHead, TwoHeads
from xmcray.nn.label_side import LabelSide
from xmcray.nn.prototypes import PrototypeNetwork
from xmcray.retrieval.bundle import write_bundle
from xmcray.retrieval.index import IndexSpec
from xmcray.retrieval.votes import MemoryConfig
from xmcray.training.memory import memory_bundle

WORDS = "matrix vector norm solve inverse trace rank eigen sparse dense random sample mean median sort join".split()  # noqa: SIM905
TEXTS = [
    f"{a} {b} {c}" for i, a in enumerate(WORDS) for j, b in enumerate(WORDS[:i]) for c in WORDS[:j]
]
DIM = 16
IVF = IndexSpec(factory="IVF8,Flat", nprobe=2, candidates=1)


def write_memory(folder: Path) -> Path:
    """A bundle with a memory of planted training queries: folder/memory; 47 labels, b = 25."""
    corpus = planted_corpus(folder, num_queries=300, num_labels=47)
    build_encoder(EncoderConfig(dim=DIM), corpus.tokenizer(), None, seed=0).save(folder / "encoder")
    memory_bundle(str(folder / "encoder"), corpus, folder / "memory", MemoryConfig(keys=25))
    return folder / "memory"


def write_transformer(folder: Path) -> Path:
    """A bundle with a tiny transformer and random label vectors: folder/bert; 99 labels."""
    from models import write_bert  # here: transformers is slow to import

    bert = str(write_bert(folder / "model", WORDS))
    tokenizer = from_transformer(bert, max_len=32)
    encoder = build_encoder(EncoderConfig(name=bert, dim=DIM), tokenizer, None, seed=0).eval()
    vectors, order = np.random.default_rng(0).standard_normal((99, DIM), np.float32), np.arange(99)
    uids, about = [f"u{i}" for i in order], {"by": "test"}
    head, spec = Head(DIM), IndexSpec()
    write_bundle(
        folder / "bert", encoder, head, tokenizer, uids, TEXTS[:99], order, [vectors], spec, about
    )
    return folder / "bert"


def write_bundle_of(path: Path, kind: str, dim: int = DIM, shard_rows: int = 1 << 20) -> Path:
    """560 labels whose vectors are of one kind: texts, rows, both, prototypes; indexed where it ends with IVF."""
    tokenizer = train_wordpiece(iter(TEXTS), vocab_size=400, max_len=16)
    encoder = build_encoder(EncoderConfig(dim=dim), tokenizer, None, seed=0).eval()
    head: Head = (
        TwoHeads(dim, dim)
        if kind == "both"
        else Head(dim)
        if kind.startswith("rows")
        else NormalisedHead(dim)
    )
    if isinstance(head, TwoHeads):
        head.reset(0)
    rng, side = np.random.default_rng(0), LabelSide()
    with torch.no_grad():
        vectors = head(encoder(tokenizer.encode(TEXTS))).numpy()
    # as training makes them: long, with a part that all have and one that follows the text
    way = vectors[:, -dim:] - vectors[:, -dim:].mean(axis=0)
    row = (
        5 * way / np.linalg.norm(way, axis=1, keepdims=True)
        - 1
        + 0.1 * rng.standard_normal(way.shape, np.float32)
    )
    if kind.startswith("rows"):
        vectors, side = row, LabelSide(dim)
    elif kind == "both":
        vectors[:, dim:], side = row / np.linalg.norm(row, axis=1, keepdims=True), LabelSide(dim)
    elif kind == "prototypes":
        network = PrototypeNetwork(dim, 8, 4, seed=0)
        clusters = torch.zeros(len(TEXTS), dtype=torch.int64)
        side = LabelSide(prototypes=network, cluster_L=clusters)
    order = rng.permutation(len(TEXTS))
    spec = IVF if kind.endswith("IVF") else IndexSpec()
    uids = [f"u{i}" for i in range(len(TEXTS))]
    made = [vectors[order]]
    write_bundle(
        path,
        encoder,
        head,
        tokenizer,
        uids,
        TEXTS,
        order,
        made,
        spec,
        {"by": "test"},
        label_side=side,
        shard_rows=shard_rows,
    )
    return path
