"""Encoders in fewer bits: near float32's vectors, alone as among others, and refused in one line where impossible."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from bundles import write_bundle_of
from models import write_bert, write_family

from xmcray.data.tokens import from_transformer
from xmcray.errors import ConfigError
from xmcray.nn.compact import PRECISIONS, compacted
from xmcray.nn.encoder import EncoderConfig, build_encoder, load_encoder
from xmcray.nn.heads import Head
from xmcray.nn.transformer import TransformerEncoder
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ShardBuild
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot
from xmcray.types import Ragged

WORDS = [
    "sort",
    "an",
    "array",
    "of",
    "numbers",
    "find",
    "the",
    "largest",
    "element",
    "in",
    "each",
    "row",
    "and",
    "a",
]
TEXTS = [
    "sort an array",
    "",
    "find",
    " ".join(WORDS * 2),
    "the largest element",
    "row",
    "a row of numbers",
]
LABELS = [f"{a} {b}" for a in WORDS for b in WORDS if a != b]
DIM = 12
LEAST_COSINE = {"bfloat16": 0.999, "int8": 0.98}


def encoder_of(folder: Path, **settings: object) -> TransformerEncoder:
    tokenizer = from_transformer(str(folder), max_len=32)
    encoder = build_encoder(EncoderConfig(name=str(folder), **settings), tokenizer, None, seed=1)  # type: ignore[arg-type]
    assert isinstance(encoder, TransformerEncoder)
    return encoder.eval()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"), WORDS, layers=2)


@pytest.fixture(scope="module")
def bundle(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labels of random vectors behind a transformer with a projection."""
    path = tmp_path_factory.mktemp("bundles") / "bert"
    encoder, tokenizer = encoder_of(bert, dim=DIM), from_transformer(str(bert), max_len=32)
    vectors = np.random.default_rng(0).standard_normal((len(LABELS), DIM)).astype(np.float32)
    model = BundleModel(encoder=encoder, head=Head(DIM), tokenizer=tokenizer)
    labels = BundleLabels(
        uids=[f"u{i}" for i in range(len(LABELS))],
        texts=LABELS,
        order=np.arange(len(LABELS)),
        vectors=[vectors],
    )
    build = ShardBuild(spec=IndexSpec(factory="Flat"))
    write_bundle(path, model, labels, build, {"by": "test"})
    return path


def cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    known = np.abs(other).sum(axis=1) > 0
    return torch.cosine_similarity(
        torch.from_numpy(one[known]), torch.from_numpy(other[known])
    ).numpy()


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_vectors_are_near_those_of_float32_but_not_the_same(bundle: Path, precision: str) -> None:
    exact, compact = (
        Retriever.load(bundle).encode(TEXTS),
        Retriever.load(bundle, precision=precision).encode(TEXTS),
    )
    assert compact.dtype == np.float32
    assert cosines(compact, exact).min() >= LEAST_COSINE[precision]
    assert np.abs(compact - exact).max() > 0  # it did change how the encoder computes


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_a_text_has_its_vector_whatever_its_neighbours(
    bert: Path, precision: str, pooling: str
) -> None:
    given = encoder_of(bert, dim=0, pooling=pooling)
    encoder = compacted(given, precision)
    assert not given.model.training  # else dropout: its vectors would be another text's each time
    tokens = from_transformer(str(bert), max_len=32).encode(TEXTS)
    tokens = Ragged.concatenate([tokens, Ragged.empty(1)])
    with torch.inference_mode():
        together = encoder(tokens).numpy()
        alone = torch.cat([encoder(tokens.slice(i, i + 1)) for i in range(len(tokens))]).numpy()
        exact = encoder_of(bert, dim=0, pooling=pooling)(tokens).numpy()
    # bfloat16 rounds sums whose order depends on the kernel that the number of rows selects; 8-bit integers do not
    np.testing.assert_allclose(
        alone, together, rtol=0, atol=0.02 if precision == "bfloat16" else 1e-6
    )
    assert cosines(together, exact).min() >= LEAST_COSINE[precision]
    assert not together[-1].any()


def test_a_batch_of_nothing_but_empty_texts_is_zero_in_any_precision(bert: Path) -> None:
    for precision in PRECISIONS:
        vectors = compacted(encoder_of(bert, dim=DIM), precision)(Ragged.empty(2))
        assert vectors.dtype == torch.float32
        assert vectors.tolist() == [[0.0] * DIM] * 2


@pytest.mark.parametrize("family", ["qwen3", "modernbert"])
def test_rotations_keep_their_frequencies_in_bfloat16(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, WORDS, family)
    exact, compact = load_encoder(folder), compacted(load_encoder(folder), "bfloat16")
    frequencies = dict(exact.named_buffers())
    assert frequencies
    for name, buffer in compact.named_buffers():
        assert torch.equal(buffer, frequencies[name]), name
    assert {weight.dtype for weight in compact.parameters()} == {torch.bfloat16}


def test_a_static_encoder_stays_as_it_is(tmp_path: Path) -> None:
    path = write_bundle_of(tmp_path / "b", "texts")
    texts = ["matrix norm", "random sample"]
    same = Retriever.load(path, precision="int8").encode(texts)
    np.testing.assert_array_equal(same, Retriever.load(path).encode(texts))


def test_what_cannot_be_is_refused_in_one_line(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match="encoder is 'int4', expected one of float32, bfloat16, int8"
    ):
        Retriever.load(bundle, precision="int4")
    with pytest.raises(ConfigError, match="encoder is 'int4'"):
        ServeConfig(bundles={"a": "b"}, encoder="int4")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigError, match=r"pip install 'xmcray\[onnx\]'") as caught:
        Retriever.load(bundle, precision="int8")
    assert "\n" not in str(caught.value)


def test_a_model_that_does_not_compute_in_bfloat16_is_refused(tmp_path: Path) -> None:
    encoder = load_encoder(write_family(tmp_path, WORDS, "fnet"))
    with pytest.raises(ConfigError, match=r"does not compute in it \(Unsupported dtype BFloat16"):
        compacted(encoder, "bfloat16")


def test_a_served_model_takes_the_precision_it_is_told(bundle: Path) -> None:
    snapshot = Snapshot.load(str(bundle), "default", 1, encoder="bfloat16")
    served = snapshot.encode(TEXTS, 32).query_BD
    np.testing.assert_array_equal(
        served, Retriever.load(bundle, precision="bfloat16").encode(TEXTS)
    )
    assert np.abs(served - Retriever.load(bundle).encode(TEXTS)).max() > 0
