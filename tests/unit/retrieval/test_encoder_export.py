"""Exported encoders: folders that sentence-transformers opens, with the vectors of the bundle.

`tests/unit/nn/test_sentence_transformers.py` opens such folders with sentence-transformers itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bundles import DIM, TEXTS, WORDS, write_bundle_of
from models import write_bert

from xmcray.data.tokens import TextTokenizer, from_transformer, train_wordpiece
from xmcray.errors import ConfigError
from xmcray.nn.encoder import Encoder, EncoderConfig, build_encoder, load_encoder
from xmcray.nn.heads import Head, NormalisedHead
from xmcray.nn.static import StaticEncoder
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.encoder_export import export_encoder
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ShardBuild
from xmcray.retrieval.static_module import StaticText

QUERIES = ["matrix norm", "", "solve inverse trace rank eigen sparse", "sort", "no such words"]


def written(folder: Path, encoder: Encoder, head: Head, tokenizer: TextTokenizer) -> Path:
    """A bundle of ten labels."""
    vectors = np.random.default_rng(0).standard_normal((10, encoder.dim), np.float32)
    model = BundleModel(encoder=encoder, head=head, tokenizer=tokenizer)
    labels = BundleLabels(
        uids=[f"u{label}" for label in range(10)],
        texts=TEXTS[:10],
        order=np.arange(10),
        vectors=[vectors],
    )
    write_bundle(folder, model, labels, ShardBuild(spec=IndexSpec()), {})
    return folder


@pytest.mark.parametrize("is_plain", [True, False])
def test_static_folder_has_the_vectors_of_queries_and_labels(
    tmp_path: Path, is_plain: bool
) -> None:
    tokenizer = train_wordpiece(TEXTS, max_len=5, label_max_len=3)
    if not is_plain:
        tokenizer.query_prompt = "norm "
        tokenizer.label_prompt = "rank "
    parts = {"position_decay": 1.5, "bigram_buckets": 50, "separate_labels": True}
    settings = {"residual": False} if is_plain else parts
    config = EncoderConfig(dim=DIM, **settings)  # type: ignore[arg-type]
    counts = np.arange(tokenizer.vocab_size)
    encoder = build_encoder(config, tokenizer, counts, seed=0)
    assert isinstance(encoder, StaticEncoder)
    with torch.no_grad():
        for weight in encoder.parameters():  # labels differ from queries, and the network matters
            weight.add_(torch.randn_like(weight) / 4)
    head = Head(DIM) if is_plain else NormalisedHead(DIM)
    bundle = written(tmp_path / "bundle", encoder, head, tokenizer)
    assert export_encoder(bundle, tmp_path / "out")
    module = StaticText.load(str(tmp_path / "out"))
    retriever = Retriever.load(bundle)
    query_encoder = retriever.query_encoder
    expected = {
        "query": query_encoder.encode(QUERIES),
        "document": query_encoder.encode_labels(tokenizer.encode_labels(QUERIES)),
    }
    prompts_file = tmp_path / "out" / "config_sentence_transformers.json"
    assert prompts_file.is_file() != is_plain
    for task, vectors in expected.items():
        # sentence-transformers passes the prompt of the task to the module.
        prompt = None if is_plain else json.loads(prompts_file.read_text())["prompts"][task]
        features = module.preprocess(QUERIES, prompt=prompt, task=task)
        found = module(features)["sentence_embedding"]
        if not is_plain:
            found = F.normalize(found, dim=-1)
        np.testing.assert_allclose(found, vectors, rtol=0, atol=1e-5)
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    kinds = [each["type"].rsplit(".", 1)[-1] for each in modules]
    assert kinds == (["StaticText"] if is_plain else ["StaticText", "Normalize"])
    module.save(str(tmp_path))
    again = StaticText.load(str(tmp_path))
    found = again(again.preprocess(QUERIES))["sentence_embedding"]
    assert torch.equal(found, module(module.preprocess(QUERIES))["sentence_embedding"])


def test_transformer_folder_has_the_normalisation_of_the_head_and_the_prompts(
    tmp_path: Path,
) -> None:
    name = str(write_bert(tmp_path / "model", WORDS))
    tokenizer = from_transformer(name, 16, query_prompt="norm ", label_prompt="rank ")
    encoder = build_encoder(EncoderConfig(name=name, dim=DIM), tokenizer, None, seed=0).eval()
    bundle = written(tmp_path / "bundle", encoder, NormalisedHead(DIM), tokenizer)
    assert not export_encoder(bundle, tmp_path / "out")
    own = from_transformer(str(tmp_path / "out"), 16)
    with torch.no_grad():
        found = load_encoder(tmp_path / "out")(own.encode(QUERIES))
    assert (own.query_prompt, own.label_prompt) == ("norm ", "rank ")
    np.testing.assert_allclose(found, Retriever.load(bundle).encode(QUERIES), rtol=0, atol=1e-6)


def test_the_export_says_that_label_texts_are_cut_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = str(write_bert(tmp_path / "model", WORDS))
    for label_max_len in (16, 6):
        tokenizer = from_transformer(name, 16, label_max_len)
        encoder = build_encoder(EncoderConfig(name=name, dim=DIM), tokenizer, None, seed=0).eval()
        folder = tmp_path / str(label_max_len)
        export_encoder(written(folder / "bundle", encoder, Head(DIM), tokenizer), folder / "out")
        assert ("the bundle cuts them at 6" in caplog.text) == (label_max_len == 6)


def test_a_head_with_two_vectors_is_refused(tmp_path: Path) -> None:
    bundle = write_bundle_of(tmp_path / "both", "both")
    with pytest.raises(ConfigError, match="has a head of kind 'unidec'"):
        export_encoder(bundle, tmp_path / "out")
    assert not (tmp_path / "out").exists()
