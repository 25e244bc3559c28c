import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xmcray.data.tokens import train_wordpiece
from xmcray.errors import BundleError, ConfigError, DataError, StorageError
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.heads import Head, NormalisedHead
from xmcray.retrieval.bundle import read_settings, write_settings
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ShardBuild
from xmcray.storage.manifest import finish_manifest, read_manifest
from xmcray.types import Ragged

LABELS, DIM = 300, 8
TEXTS = [f"label {number} {'abc'[number % 3]}" for number in range(LABELS)]


@pytest.fixture(scope="module")
def parts():
    """Tokenizer, encoder, order and vectors in SOURCE order: small integers, full of ties."""
    tokenizer = train_wordpiece(iter(TEXTS), vocab_size=200, max_len=8)
    encoder = build_encoder(EncoderConfig(dim=DIM), tokenizer, None, seed=0).eval()
    rng = np.random.default_rng(0)
    vectors = rng.integers(-1, 2, (LABELS, DIM)).astype(np.float32)
    return tokenizer, encoder, rng.permutation(LABELS), vectors


def make(parts, path, vectors=None, order=None, uids=None, head=Head, **build):
    tokenizer, encoder, known_order, known_vectors = parts
    order = known_order if order is None else order
    vectors = known_vectors if vectors is None else vectors
    model = BundleModel(encoder=encoder, head=head(encoder.dim), tokenizer=tokenizer)
    labels = BundleLabels(
        uids=[f"uid{number}" for number in range(LABELS)] if uids is None else uids,
        texts=TEXTS,
        order=order,
        vectors=(vectors[order][start : start + 70] for start in range(0, LABELS, 70)),
    )
    shard_build = ShardBuild(**{"spec": IndexSpec(), **build})
    write_bundle(path, model, labels, shard_build, {"command": "test"})
    return path


@pytest.fixture(scope="module")
def bundle(parts, tmp_path_factory):
    return make(parts, tmp_path_factory.mktemp("bundles") / "one")


def test_answers_are_inner_products_with_ties_by_lower_source_id(parts, bundle):
    retriever = Retriever.load(bundle, threads=1)
    queries = np.random.default_rng(1).integers(-1, 2, (20, DIM)).astype(np.float32)
    top = retriever.top_labels(queries, 60)
    score = queries @ parts[3].T
    order = np.argsort(-score, axis=1, kind="stable")[:, :60]
    np.testing.assert_array_equal(top.ids, order)
    np.testing.assert_array_equal(top.scores, np.take_along_axis(score, order, 1))


@pytest.mark.parametrize("shard_rows", [41, 70, 299])
def test_several_shards_equal_one(parts, bundle, tmp_path, shard_rows):
    many = Retriever.load(make(parts, tmp_path / "many", shard_rows=shard_rows))
    queries = np.random.default_rng(2).integers(-1, 2, (5, DIM)).astype(np.float32)
    for k in (1, 17, LABELS):
        one = Retriever.load(bundle).top_labels(queries, k)
        np.testing.assert_array_equal(many.top_labels(queries, k).ids, one.ids)
        np.testing.assert_array_equal(many.top_labels(queries, k).scores, one.scores)


@pytest.mark.parametrize("shard_rows", [110, 300])
def test_excluded_labels_are_masked_before_the_top_k(parts, tmp_path, shard_rows):
    retriever = Retriever.load(make(parts, tmp_path / "b", shard_rows=shard_rows))
    tokens = retriever.tokenizer.encode(["label 7", "", "a b c"])
    first = retriever.top_labels(tokens, 12)
    exclude = Ragged.from_rows([first.ids[0, :10], [], first.ids[2, [3]]])
    second = retriever.top_labels(tokens, 2, exclude=exclude)
    assert second.ids.tolist() == [
        first.ids[0, 10:].tolist(),
        first.ids[1, :2].tolist(),
        first.ids[2, :2].tolist(),
    ]
    everything = retriever.top_labels(
        tokens.slice(0, 1), LABELS, exclude=Ragged.from_rows([[5, 6]])
    )
    assert everything.ids[0, -2:].tolist() == [-1, -1]
    assert np.isneginf(everything.scores[0, -2:]).all()
    assert sorted(everything.ids[0, :-2]) == sorted(set(range(LABELS)) - {5, 6})


def test_approximate_index_and_exact(parts, tmp_path):
    rng = np.random.default_rng(3)
    vectors = rng.standard_normal((LABELS, DIM)).astype(np.float32)
    spec = IndexSpec(factory="IVF8,Flat", nprobe=1, candidates=1)
    path = make(parts, tmp_path / "b", vectors=vectors, spec=spec, shard_rows=200)
    assert sorted(p.name for p in (path / "index").glob("*.faiss")) == [
        "00000.faiss",
        "00001.faiss",
    ]
    retriever = Retriever.load(path)
    queries = rng.standard_normal((50, DIM)).astype(np.float32)
    exact = retriever.top_labels(queries, 5, exact=True)
    np.testing.assert_array_equal(exact.ids, np.argsort(-(queries @ vectors.T), axis=1)[:, :5])
    found = retriever.top_labels(queries, 5)
    assert not np.array_equal(found.ids, exact.ids), "one list of eight does not hold all"
    np.testing.assert_allclose(
        found.scores, np.take_along_axis(queries @ vectors.T, found.ids, 1), rtol=1e-5
    )


def test_indexes_built_at_the_same_time_have_the_same_bytes(parts, tmp_path):
    spec = IndexSpec(factory="IVF4,SQfp16")
    hashes = set()
    for threads in (1, 3):
        path = make(parts, tmp_path / str(threads), spec=spec, shard_rows=60, threads=threads)
        hashes.add(read_manifest(path, "bundle").sha256)
    assert len(list((path / "index").glob("*.faiss"))) == 5
    assert len(hashes) == 1


def test_search_gives_uids_and_texts(parts, bundle):
    retriever = Retriever.load(bundle)
    answers = retriever.search(["label 12 a", ""], k=4)
    assert [len(row) for row in answers] == [4, 4]
    for row, vector in zip(answers, retriever.encode(["label 12 a", ""]), strict=True):
        for answer in row:
            assert answer.uid == f"uid{answer.label_id}"
            assert answer.text == TEXTS[answer.label_id]
            assert answer.score == pytest.approx(
                float(vector @ parts[3][answer.label_id]), abs=1e-5
            )
    assert retriever.search([], k=1) == []


def test_texts_and_their_tokens_are_encoded_alike_in_any_chunk(bundle, monkeypatch):
    retriever = Retriever.load(bundle)
    texts = TEXTS[:37]
    whole = retriever.encode(texts)
    monkeypatch.setattr("xmcray.retrieval.retriever.CHUNK", 5)
    monkeypatch.setattr("xmcray.retrieval.query_encoder.CHUNK", 3)
    np.testing.assert_allclose(
        retriever.encode(retriever.tokenizer.encode(texts)), whole, atol=1e-6
    )
    assert retriever.top_labels(retriever.tokenizer.encode(texts), 3).ids.shape == (37, 3)
    assert [len(row) for row in retriever.search(texts, 3)] == [3] * 37


def test_normalised_queries(parts, tmp_path):
    retriever = Retriever.load(make(parts, tmp_path / "b", head=NormalisedHead))
    np.testing.assert_allclose(
        np.linalg.norm(retriever.encode(["label 3", "b"]), axis=1), 1, rtol=1e-5
    )


@pytest.mark.parametrize("k", [-1, 0, LABELS + 1])
def test_k_out_of_range(bundle, k):
    retriever = Retriever.load(bundle)
    with pytest.raises(ConfigError, match=f"k is {k}, expected 1 .. 300"):
        retriever.search(["label"], k)
    with pytest.raises(ConfigError, match=f"k is {k}"):
        retriever.top_labels(Ragged.empty(1), k)


def test_one_string_instead_of_a_list(bundle):
    with pytest.raises(ConfigError, match="list of texts"):
        Retriever.load(bundle).search("label")


@pytest.mark.parametrize(
    ("text", "message"), [("a \ud800", "is not UTF-8"), (None, "expected texts")]
)
def test_what_is_no_text_is_refused(bundle, text, message):
    with pytest.raises(ConfigError, match=message):
        Retriever.load(bundle).search(["label", text])


@pytest.mark.parametrize("shape", [(1, DIM - 1), (3, DIM + 1), (DIM,)])
def test_query_vectors_of_another_width_are_refused(bundle, shape):
    with pytest.raises(ConfigError, match=f"expected .queries, {DIM}."):
        Retriever.load(bundle).top_labels(np.ones(shape, np.float32), 3)


def test_vectors_stay_on_disk(bundle):
    shard = Retriever.load(bundle).labels.rows.indexes[0]
    address = shard.vectors.data_ptr()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [line.split() for line in maps if "vectors/00000.safetensors" in line]
    assert any(
        int(low, 16) <= address < int(high, 16)
        for low, high in (span[0].split("-") for span in spans)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"uids": ["a"] * (LABELS - 1)}, "differ"),
        (
            {"vectors": np.ones((LABELS, DIM), np.float32), "order": np.arange(LABELS - 1)},
            "uids were given",
        ),
    ],
)
def test_wrong_counts_leave_nothing_behind(parts, tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        make(parts, tmp_path / "b", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_is_never_overwritten(parts, bundle):
    with pytest.raises(StorageError, match="not empty"):
        make(parts, bundle)


def test_unknown_device(bundle):
    with pytest.raises(ConfigError, match="device 'nonsense'"):
        Retriever.load(bundle, device="nonsense")


def test_unknown_predictor(parts, tmp_path):
    path = make(parts, tmp_path / "b")
    write_settings(path, dataclasses.replace(read_settings(path), predictor={"kind": "later"}))
    finish_manifest(path, "bundle", {}, {})
    with pytest.raises(BundleError, match="predictor 'later'"):
        Retriever.load(path)


def test_import_needs_no_ray():
    program = (
        "import sys; sys.modules['ray'] = None; import xmcray.retrieval.retriever; print('ok')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "ok\n", done.stderr
