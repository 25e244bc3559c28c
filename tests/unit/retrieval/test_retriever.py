import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from xmcray.data.tokens import TextTokenizer, train_wordpiece
from xmcray.errors import BundleError, ConfigError, DataError, StorageError
from xmcray.nn.encoder import Encoder, EncoderConfig, build_encoder
from xmcray.nn.heads import Head, NormalisedHead
from xmcray.retrieval.bundle import read_settings, write_settings
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ShardBuild
from xmcray.storage.manifest import finish_manifest, read_manifest
from xmcray.types import Ragged

LABELS = 300
DIM = 8
UIDS = [f"uid{number}" for number in range(LABELS)]
TEXTS = [f"label {number} {'abc'[number % 3]}" for number in range(LABELS)]


class Parts(NamedTuple):
    """What a bundle is written from; the vectors are in source order: small integers, full of ties."""

    tokenizer: TextTokenizer
    encoder: Encoder
    order: np.ndarray
    vectors: np.ndarray


@pytest.fixture(scope="module")
def parts():
    tokenizer = train_wordpiece(iter(TEXTS), vocab_size=200, max_len=8)
    encoder = build_encoder(EncoderConfig(dim=DIM), tokenizer, None, seed=0).eval()
    rng = np.random.default_rng(0)
    vectors = rng.integers(-1, 2, (LABELS, DIM)).astype(np.float32)
    order = rng.permutation(LABELS)
    return Parts(tokenizer, encoder, order, vectors)


def make(parts, path, vectors=None, order=None, uids=UIDS, head=Head, **build):
    """Writes a bundle, whose vectors come in chunks of 70 labels."""
    order = parts.order if order is None else order
    vectors = parts.vectors if vectors is None else vectors
    chunks = (vectors[order][start : start + 70] for start in range(0, LABELS, 70))
    model = BundleModel(
        encoder=parts.encoder, head=head(parts.encoder.dim), tokenizer=parts.tokenizer
    )
    labels = BundleLabels(uids=uids, texts=TEXTS, order=order, vectors=chunks)
    shard_build = ShardBuild(**{"spec": IndexSpec(), **build})
    write_bundle(path, model, labels, shard_build, {"command": "test"})
    return path


@pytest.fixture(scope="module")
def bundle(parts, tmp_path_factory):
    return make(parts, tmp_path_factory.mktemp("bundles") / "one")


def integer_queries(num_queries, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(-1, 2, (num_queries, DIM)).astype(np.float32)


def assert_same_answers(top, expected):
    np.testing.assert_array_equal(top.ids, expected.ids)
    np.testing.assert_array_equal(top.scores, expected.scores)


def test_answers_are_inner_products_with_ties_by_lower_source_id(parts, bundle):
    retriever = Retriever.load(bundle, threads=1)
    queries = integer_queries(20, seed=1)

    top = retriever.top_labels(queries, 60)

    scores = queries @ parts.vectors.T
    # A stable sort leaves equal scores in the order of their ids.
    best = np.argsort(-scores, axis=1, kind="stable")[:, :60]
    np.testing.assert_array_equal(top.ids, best)
    np.testing.assert_array_equal(top.scores, np.take_along_axis(scores, best, 1))


@pytest.mark.parametrize("shard_rows", [41, 70, 299])
def test_several_shards_equal_one(parts, bundle, tmp_path, shard_rows):
    several = Retriever.load(make(parts, tmp_path / "several", shard_rows=shard_rows))
    one = Retriever.load(bundle)
    queries = integer_queries(5, seed=2)
    for k in (1, 17, LABELS):
        assert_same_answers(several.top_labels(queries, k), one.top_labels(queries, k))


@pytest.mark.parametrize("shard_rows", [110, 300])
def test_excluded_labels_are_masked_before_the_top_k(parts, tmp_path, shard_rows):
    retriever = Retriever.load(make(parts, tmp_path / "b", shard_rows=shard_rows))
    tokens = retriever.tokenizer.encode(["label 7", "", "a b c"])
    best = retriever.top_labels(tokens, 12).ids
    # The ten best answers to the first query, none of the second, the fourth of the third.
    exclude = Ragged.from_rows([best[0, :10], [], best[2, [3]]])

    left = retriever.top_labels(tokens, 2, exclude=exclude)

    assert left.ids[0].tolist() == best[0, 10:].tolist()
    assert left.ids[1].tolist() == best[1, :2].tolist()
    assert left.ids[2].tolist() == best[2, :2].tolist()


@pytest.mark.parametrize("shard_rows", [110, 300])
def test_places_of_excluded_labels_are_empty_if_all_are_asked_for(parts, tmp_path, shard_rows):
    retriever = Retriever.load(make(parts, tmp_path / "b", shard_rows=shard_rows))
    tokens = retriever.tokenizer.encode(["label 7"])

    top = retriever.top_labels(tokens, LABELS, exclude=Ragged.from_rows([[5, 6]]))

    assert top.ids[0, -2:].tolist() == [-1, -1]
    assert np.isneginf(top.scores[0, -2:]).all()
    others = set(range(LABELS)) - {5, 6}
    assert sorted(top.ids[0, :-2]) == sorted(others)


def test_approximate_index_and_exact(parts, tmp_path):
    rng = np.random.default_rng(3)
    vectors = rng.standard_normal((LABELS, DIM)).astype(np.float32)
    queries = rng.standard_normal((50, DIM)).astype(np.float32)
    spec = IndexSpec(factory="IVF8,Flat", nprobe=1, candidates=1)
    path = make(parts, tmp_path / "b", vectors=vectors, spec=spec, shard_rows=200)
    index_files = sorted(file.name for file in (path / "index").glob("*.faiss"))
    assert index_files == ["00000.faiss", "00001.faiss"]
    retriever = Retriever.load(path)

    exact = retriever.top_labels(queries, 5, exact=True)
    approximate = retriever.top_labels(queries, 5)

    scores = queries @ vectors.T
    np.testing.assert_array_equal(exact.ids, np.argsort(-scores, axis=1)[:, :5])
    assert not np.array_equal(approximate.ids, exact.ids), "one list of eight does not hold all"
    # Also answers of the index have exact scores.
    expected = np.take_along_axis(scores, approximate.ids, 1)
    np.testing.assert_allclose(approximate.scores, expected, rtol=1e-5)


def test_indexes_built_at_the_same_time_have_the_same_bytes(parts, tmp_path):
    spec = IndexSpec(factory="IVF4,SQfp16")
    one_by_one = make(parts, tmp_path / "1", spec=spec, shard_rows=60, threads=1)
    together = make(parts, tmp_path / "3", spec=spec, shard_rows=60, threads=3)

    assert len(list((together / "index").glob("*.faiss"))) == 5
    expected = read_manifest(one_by_one, "bundle").sha256
    assert read_manifest(together, "bundle").sha256 == expected


def test_search_gives_uids_and_texts(parts, bundle):
    retriever = Retriever.load(bundle)
    texts = ["label 12 a", ""]

    answers = retriever.search(texts, k=4)

    assert [len(row) for row in answers] == [4, 4]
    for row, vector in zip(answers, retriever.encode(texts), strict=True):
        for answer in row:
            assert answer.uid == f"uid{answer.label_id}"
            assert answer.text == TEXTS[answer.label_id]
            score = float(vector @ parts.vectors[answer.label_id])
            assert answer.score == pytest.approx(score, abs=1e-5)


def test_no_texts_have_no_answers(bundle):
    assert Retriever.load(bundle).search([], k=1) == []


def test_texts_and_their_tokens_are_encoded_alike_in_any_chunk(bundle, monkeypatch):
    retriever = Retriever.load(bundle)
    texts = TEXTS[:37]
    tokens = retriever.tokenizer.encode(texts)
    whole = retriever.encode(texts)

    monkeypatch.setattr("xmcray.retrieval.retriever.CHUNK", 5)
    monkeypatch.setattr("xmcray.retrieval.query_encoder.CHUNK", 3)

    np.testing.assert_allclose(retriever.encode(tokens), whole, atol=1e-6)
    assert retriever.top_labels(tokens, 3).ids.shape == (37, 3)
    assert [len(row) for row in retriever.search(texts, 3)] == [3] * 37


def test_normalised_queries(parts, tmp_path):
    retriever = Retriever.load(make(parts, tmp_path / "b", head=NormalisedHead))
    vectors = retriever.encode(["label 3", "b"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("k", [-1, 0, LABELS + 1])
def test_k_out_of_range(bundle, k):
    retriever = Retriever.load(bundle)
    with pytest.raises(ConfigError, match=f"k is {k}, expected 1 .. 300"):
        retriever.search(["label"], k)
    with pytest.raises(ConfigError, match=f"k is {k}"):
        retriever.top_labels(Ragged.empty(1), k)


@pytest.mark.parametrize("function", ["search", "encode"])
def test_one_string_instead_of_a_list(bundle, function):
    retriever = Retriever.load(bundle)
    with pytest.raises(ConfigError, match=f"{function} was given one string, expected a list"):
        getattr(retriever, function)("label")


def test_threads_are_a_number_of_threads(bundle):
    with pytest.raises(ConfigError, match="threads is 0, expected at least 1"):
        Retriever.load(bundle, threads=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a \ud800", "is not UTF-8"), (None, "expected texts")],
    ids=["half of a surrogate pair", "None"],
)
def test_what_is_no_text_is_refused(bundle, text, message):
    with pytest.raises(ConfigError, match=message):
        Retriever.load(bundle).search(["label", text])


@pytest.mark.parametrize("shape", [(1, DIM - 1), (3, DIM + 1), (DIM,)])
def test_query_vectors_of_another_width_are_refused(bundle, shape):
    with pytest.raises(ConfigError, match=f"expected .queries, {DIM}."):
        Retriever.load(bundle).top_labels(np.ones(shape, np.float32), 3)


def test_vectors_stay_on_disk(bundle):
    index = Retriever.load(bundle).labels.rows.indexes[0]
    address = index.vectors.data_ptr()

    # A line begins with the first and last address of a mapped file: 7f00a000-7f00b000 r--s ...
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    is_mapped = False
    for line in maps:
        if "vectors/00000.safetensors" in line:
            first, last = line.split()[0].split("-")
            is_mapped |= int(first, 16) <= address < int(last, 16)
    assert is_mapped


FEWER_LABELS = {"vectors": np.ones((LABELS, DIM), np.float32), "order": np.arange(LABELS - 1)}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"uids": ["a"] * (LABELS - 1)}, "differ"), (FEWER_LABELS, "uids were given")],
    ids=["a uid less than texts", "a vector less than uids"],
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
    settings = dataclasses.replace(read_settings(path), predictor={"kind": "later"})
    write_settings(path, settings)
    finish_manifest(path, "bundle", {}, {})

    with pytest.raises(BundleError, match="predictor 'later'"):
        Retriever.load(path)
