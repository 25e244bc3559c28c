"""The votes of a memory equal Eq. 8 written as dense matrices, on arrays and through a bundle."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from corpora import planted_corpus
from models import write_bert
from ranks import golden
from shell import Shell

from xmcray.data.corpus import Corpus
from xmcray.data.tokens import TextTokenizer, from_transformer
from xmcray.errors import BundleError, ConfigError, DataError
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.nn.heads import Head
from xmcray.retrieval import memory as memories
from xmcray.retrieval import predictors
from xmcray.retrieval import retriever as retrievers
from xmcray.retrieval import votes as voting
from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.memory import remember
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.query_encoder import QueryEncoder
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import ShardBuild
from xmcray.retrieval.votes import MemoryConfig, Votes, count_votes, rank_votes, sweep
from xmcray.storage.manifest import finish_manifest, read_manifest
from xmcray.training.memory import memory_bundle, open_encoder
from xmcray.types import Ragged, TopLabels

SETTINGS = [
    MemoryConfig(weight=weight, keys=keys, temperature=temperature, joint=joint)
    for weight, keys, temperature, joint in itertools.product(
        (0, 0.3, 0.5, 1), (7, 40), (0.04, 0.5), (True, False)
    )
]


def nearest(score_BN: Any, width: int) -> TopLabels:
    """Best first, equal scores by lower row; the type of the scores stays."""
    ids = np.argsort(-score_BN, axis=1, kind="stable")[:, :width]
    return TopLabels(ids, np.take_along_axis(score_BN, ids, 1))


def dense(query_score_BN: Any, label_score_BL: Any, positive_NL: Any, config: MemoryConfig) -> Any:
    """Eq. 8, or 11: probabilities [B, L] as the formula is written."""
    num_queries, weight = query_score_BN.shape[1], config.weight
    keys = np.concatenate([query_score_BN, label_score_BL], axis=1)
    values = np.concatenate([weight * positive_NL, (1 - weight) * np.eye(positive_NL.shape[1])])
    parts = [slice(0, None)] if config.joint else [slice(0, num_queries), slice(num_queries, None)]
    if weight in (0, 1):
        parts = [slice(num_queries, None) if weight == 0 else slice(0, num_queries)]
    answer = np.zeros(label_score_BL.shape)
    for part in parts:
        score = keys[:, part]
        for row, best in enumerate(np.argsort(-score, axis=1, kind="stable")[:, : config.keys]):
            power = np.exp((score[row, best] - score[row, best].max()) / config.temperature)
            answer[row] += power / power.sum() @ values[part][best]
    return answer


@pytest.mark.parametrize("name", ["0.0", "0.3", "1.0"])
def test_probabilities_are_golden(name: str) -> None:
    g = golden(f"rae_predict_lambda{name}")
    config = MemoryConfig(weight=float(g["lambda_"]), keys=int(g["b"]), temperature=float(g["tau"]))
    near = Neighbours(
        nearest(g["queries"] @ g["memory_queries"].T, config.keys),
        nearest(g["queries"] @ g["memory_labels"].T, config.keys),
    )
    positives = Ragged.from_rows([np.flatnonzero(row) for row in g["memory_positives"]])
    votes = count_votes(near, positives, config, num_labels=len(g["memory_labels"]))
    found = np.zeros(g["probabilities"].shape)
    found.ravel()[votes.pairs] = votes.share(config.weight)
    np.testing.assert_allclose(found, g["probabilities"], rtol=1e-9, atol=1e-15)


@pytest.fixture(scope="module")
def arrays() -> tuple[Any, Any, Any]:
    """Scores full of ties, and positives; some training queries carry many labels."""
    rng = np.random.default_rng(0)
    positive_NL = (rng.random((60, 30)) < 0.05) | (rng.random((60, 1)) < 0.05)
    return (
        rng.integers(-4, 5, (9, 60)) / 4,
        rng.integers(-4, 5, (9, 30)) / 4,
        positive_NL.astype(float),
    )


@pytest.mark.parametrize("config", SETTINGS)
def test_any_setting_equals_the_formula(arrays: tuple[Any, Any, Any], config: MemoryConfig) -> None:
    query_score_BN, label_score_BL, positive_NL = arrays
    near = Neighbours(nearest(query_score_BN, 40), nearest(label_score_BL, 30))
    votes = count_votes(
        near, Ragged.from_rows([np.flatnonzero(row) for row in positive_NL]), config, 30
    )
    expected = dense(*arrays, config)
    found = np.zeros(expected.shape)
    found.ravel()[votes.pairs] = votes.share(config.weight)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-15)
    top = rank_votes(votes, config.weight, 30, near.labels, 30)
    for row in range(9):
        num_voted = np.count_nonzero(found[row])
        order = np.argsort(-found[row], kind="stable")[:num_voted]
        np.testing.assert_array_equal(top.ids[row, :num_voted], order)
        rest = [label for label in near.labels.ids[row] if not found[row, label]]
        assert top.ids[row, num_voted:].tolist() == rest, "completed in order of inner product"
        assert top.scores[row, num_voted:].tolist() == [
            label_score_BL[row, label] - 2 for label in rest
        ]


def test_a_sweep_equals_one_search_per_setting(
    arrays: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    query_score_BN, label_score_BL, positive_NL = arrays
    near = Neighbours(nearest(query_score_BN, 40), nearest(label_score_BL, 30))
    positives = Ragged.from_rows([np.flatnonzero(row) for row in positive_NL])
    exclude = Ragged.from_rows([[row] for row in range(9)])
    expected = [
        rank_votes(count_votes(near, positives, c, 30, exclude), c.weight, 5, near.labels, 30)
        for c in SETTINGS
    ]
    counted = []
    real = count_votes
    monkeypatch.setattr(voting, "count_votes", lambda *a, **k: counted.append(1) or real(*a, **k))
    for (config, top), one, asked in zip(
        sweep(near, positives, SETTINGS, 5, 30, exclude), expected, SETTINGS, strict=True
    ):
        assert config == asked
        np.testing.assert_array_equal(top.ids, one.ids)
        np.testing.assert_array_equal(top.scores, one.scores)
    assert len(counted) == len(SETTINGS) * 3 // 4, "0.3 and 0.5 share their votes"


def test_excluded_labels_get_no_votes(arrays: tuple[Any, Any, Any]) -> None:
    query_score_BN, label_score_BL, positive_NL = arrays
    near = Neighbours(nearest(query_score_BN, 40), nearest(label_score_BL, 30))
    positives = Ragged.from_rows([np.flatnonzero(row) for row in positive_NL])
    config = MemoryConfig(weight=0.5, keys=20)
    first = rank_votes(count_votes(near, positives, config, 30), 0.5, 4, near.labels, 30)
    exclude = Ragged.from_rows([first.ids[row, :2] for row in range(9)])
    second = rank_votes(count_votes(near, positives, config, 30, exclude), 0.5, 2, near.labels, 30)
    np.testing.assert_array_equal(second.ids, first.ids[:, 2:])
    np.testing.assert_array_equal(second.scores, first.scores[:, 2:])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return planted_corpus(tmp_path_factory.mktemp("memory"), num_queries=301, num_labels=47)


def make(
    corpus: Corpus, path: Path, spec: IndexSpec | None = None, config: MemoryConfig | None = None
) -> Path:
    """A bundle of an untrained encoder with a memory of the training queries."""
    spec = spec or IndexSpec()
    encoder = build_encoder(EncoderConfig(dim=24), corpus.tokenizer(), None, seed=0).eval()
    encode = QueryEncoder(encoder, Head(encoder.dim), corpus.tokenizer(), normalised=True).encode
    everything = np.arange(corpus.card.num_labels)
    predictor = remember(corpus.split("train"), encode, config or MemoryConfig(keys=30), spec)
    model = BundleModel(encoder=encoder, head=Head(encoder.dim), tokenizer=corpus.tokenizer())
    labels = BundleLabels(
        uids=corpus.label_uids(everything),
        texts=corpus.label_texts(everything),
        order=corpus.label_order,
        vectors=[encode(corpus.label_tokens(corpus.label_order))],
    )
    write_bundle(path, model, labels, ShardBuild(spec=spec), {}, predictor=predictor)
    return path


@pytest.fixture(scope="module")
def bundle(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(corpus, tmp_path_factory.mktemp("bundles") / "b")


def expected_of(retriever: Retriever, corpus: Corpus, rows: Any, config: MemoryConfig) -> Any:
    """Probabilities of test queries by the formula, from the vectors that the bundle makes."""
    train = corpus.split("train")
    kept = np.flatnonzero(train.num_positives())
    positives = train.positives(kept)
    positive_NL = np.zeros((len(kept), corpus.card.num_labels))
    positive_NL[positives.row_ids, positives.values] = 1
    queries = retriever.encode(corpus.split("test").tokens(rows))
    keys, labels = (
        retriever.encode(train.tokens(kept)),
        retriever.encode(corpus.label_tokens(np.arange(47))),
    )
    return dense(queries @ keys.T, queries @ labels.T, positive_NL, config)


@pytest.mark.parametrize(
    "config", [None, MemoryConfig(weight=0, keys=9), MemoryConfig(weight=1, keys=9, temperature=1)]
)
def test_a_bundle_answers_with_probabilities(
    corpus: Corpus, bundle: Path, config: MemoryConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever = Retriever.load(bundle, threads=1)
    rows = np.arange(len(corpus.split("test")))
    tokens = corpus.split("test").tokens(rows)
    top = retriever.top_labels(tokens, 47, memory=config)
    expected = expected_of(retriever, corpus, rows, config or MemoryConfig(keys=30))
    assert (np.sort(top.ids, axis=1) == np.arange(47)).all(), (
        "every label once: the list is completed"
    )
    np.testing.assert_allclose(
        np.maximum(top.scores, 0), np.take_along_axis(expected, top.ids, 1), atol=1e-4
    )
    assert (np.diff(top.scores, axis=1) <= 0).all()
    monkeypatch.setattr(retrievers, "CHUNK", 7)
    monkeypatch.setattr(predictors, "VOTE_QUERIES", 3)
    again = retriever.top_labels(tokens, 47, memory=config)
    np.testing.assert_allclose(again.scores, top.scores, atol=1e-5)


def test_weight_zero_is_the_dual_encoder(corpus: Corpus, bundle: Path) -> None:
    retriever = Retriever.load(bundle, threads=1)
    query_BD = retriever.encode(corpus.split("test").tokens(np.arange(20)))
    top = retriever.top_labels(query_BD, 10, memory=MemoryConfig(weight=0))
    np.testing.assert_array_equal(top.ids, retriever.labels.search_exported(query_BD, 10).ids)


def test_an_answer_names_who_voted(corpus: Corpus, bundle: Path) -> None:
    retriever, train = Retriever.load(bundle, threads=1), corpus.split("train")
    rows = np.arange(len(train))
    known = dict(
        zip(
            train.uids(rows),
            zip(train.texts(rows), map(set, train.positives(rows)), strict=True),
            strict=True,
        )
    )
    texts = corpus.split("test").texts(np.arange(5))
    for answers in retriever.search(texts, 6, explain=True, memory=MemoryConfig(weight=1)):
        assert answers[0].voters
        for answer in answers:
            assert answer.voters is not None
            weights = [voter.weight for voter in answer.voters]
            assert weights == sorted(weights, reverse=True)
            assert sum(weights) == pytest.approx(max(answer.score, 0), abs=1e-6)
            for voter in answer.voters:
                assert known[voter.uid][0] == voter.text
                assert answer.label_id in known[voter.uid][1]
    assert retriever.search(texts, 1)[0][0].voters is None


def test_texts_of_voters_come_from_several_blocks(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memories, "ROWS", 16)
    memory = Retriever.load(make(corpus, tmp_path / "b")).memory
    assert memory is not None
    train = corpus.split("train")
    kept = np.flatnonzero(train.num_positives())
    found = memory.queries.names([0, 15, 16, len(kept) - 1, 16])
    assert found == {
        row: (train.uids(kept[[row]])[0], train.texts(kept[[row]])[0])
        for row in (0, 15, 16, len(kept) - 1)
    }
    assert [memory.positives[row].tolist() for row in range(len(kept))] == [
        row.tolist() for row in train.positives(kept)
    ]


def test_exact_search_does_without_the_index(corpus: Corpus, bundle: Path, tmp_path: Path) -> None:
    spec = IndexSpec(factory="IVF16,Flat", nprobe=1, candidates=1)
    config = MemoryConfig(keys=5, weight=1)
    indexed, flat = Retriever.load(make(corpus, tmp_path / "b", spec)), Retriever.load(bundle)
    assert (tmp_path / "b" / "memory" / "index" / "00000.faiss").is_file()
    assert (indexed.is_exact, flat.is_exact) == (False, True)
    tokens = corpus.split("test").tokens(np.arange(40))
    exact = indexed.top_labels(tokens, 5, exact=True, memory=config)
    np.testing.assert_array_equal(exact.ids, flat.top_labels(tokens, 5, memory=config).ids)


def test_bundles_without_a_memory_say_so(corpus: Corpus, bundle: Path, tmp_path: Path) -> None:
    retriever = dataclasses.replace(Retriever.load(bundle), memory=None)
    for asked in ({"explain": True}, {"memory": MemoryConfig()}):
        with pytest.raises(ConfigError, match="no memory of training queries"):
            retriever.search(["w1"], 1, **asked)  # type: ignore[arg-type]
    assert retriever.search(["w1"], 1)[0][0].voters is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", -0.1),
        ("weight", 1.5),
        ("weight", float("nan")),
        ("keys", 0),
        ("temperature", 0.0),
    ],
)
def test_settings_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"memory.{name} is {value}, expected at least"):
        MemoryConfig(**{name: value})  # type: ignore[arg-type]


def damage_settings(folder: Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    settings["predictor"]["config"]["weight"] = 3
    (folder / "settings.json").write_text(json.dumps(settings))


def damage_labels(folder: Path) -> None:
    labels = np.load(folder / "memory" / "labels.npy")
    labels[0] = 1000
    np.save(folder / "memory" / "labels.npy", labels)


def damage_offsets(folder: Path) -> None:
    np.save(folder / "memory" / "label_offsets.npy", np.zeros(3, np.int64))


@pytest.mark.parametrize("damage", [damage_settings, damage_labels, damage_offsets])
def test_a_memory_that_does_not_fit_is_refused(corpus: Corpus, tmp_path: Path, damage: Any) -> None:
    folder = make(corpus, tmp_path / "b")
    damage(folder)
    manifest = read_manifest(folder, "bundle")
    finish_manifest(folder, "bundle", manifest.about, {})
    with pytest.raises(BundleError, match="memory"):
        Retriever.load(folder)


def test_a_transformer_fits_the_tokens_it_was_trained_with(corpus: Corpus, tmp_path: Path) -> None:
    def prepared_with(tokenizer: TextTokenizer) -> Any:
        return SimpleNamespace(tokenizer=lambda: tokenizer, path="corpus")

    one = write_bert(tmp_path / "one", ["sort", "an", "array"])
    other = write_bert(tmp_path / "other", ["array", "sort", "an"])
    prepared = prepared_with(from_transformer(str(one), max_len=16))
    encoder, head = open_encoder(str(one), prepared)
    assert (encoder.dim, head.kind) == (16, "plain")
    encoder.save(tmp_path / "saved")
    open_encoder(str(tmp_path / "saved"), prepared)
    for path, found in ((other, prepared), (one, corpus)):
        with pytest.raises(DataError, match="other tokens than encoder"):
            open_encoder(str(path), found)


class TestCommand:
    """`xmcray memory` with every kind of encoder, and `search --explain`."""

    def encoder(self, corpus: Corpus, folder: Path) -> Path:
        folder.mkdir()
        build_encoder(EncoderConfig(dim=24), corpus.tokenizer(), None, seed=0).save(folder)
        return folder

    def test_a_plain_encoder_and_a_bundle(
        self, corpus: Corpus, tmp_path: Path, shell: Shell
    ) -> None:
        first = tmp_path / "first"
        data = f"--data {corpus.path}"
        encoder = self.encoder(corpus, tmp_path / "encoder")
        shell.run(f"memory {encoder} {data} --out {first} --set memory.keys=30")
        shell.run(f"memory {first} {data} --out {tmp_path}/second --set memory.weight=0")
        retrievers_ = [Retriever.load(tmp_path / name) for name in ("first", "second")]
        configs = [r.memory.config for r in retrievers_ if r.memory]
        assert configs == [MemoryConfig(keys=30), MemoryConfig(weight=0)]
        tokens = corpus.split("test").tokens(np.arange(9))
        tops = [r.top_labels(tokens, 5, memory=MemoryConfig()).ids.tolist() for r in retrievers_]
        assert tops[0] == tops[1]
        text = corpus.split("test").texts(np.arange(1))[0]
        search = f"search {first} '{text}' -k 2 --explain"
        (found,) = json.loads(shell.run(f"{search} --set memory.weight=1 --json"))
        assert {"uid", "text", "weight"} == found["answers"][0]["voters"][0].keys()
        assert "  by " in shell.run(search)
        shell.run(f"evaluate {first} {data}")

    def test_mistakes_are_one_line(self, corpus: Corpus, tmp_path: Path, shell: Shell) -> None:
        other = planted_corpus(tmp_path / "other", num_queries=40, num_labels=47, seed=9)
        encoder = self.encoder(corpus, tmp_path / "encoder")
        bundle = tmp_path / "b"
        memory_bundle(str(encoder), corpus, bundle)
        data = f"--data {corpus.path} --out {tmp_path}/never"
        other_data = f"--data {other.path} --out {tmp_path}/never"
        for command, message in (
            (f"memory {encoder} {other_data}", "other tokens"),
            (f"memory {bundle} {other_data}", "other tokens"),
            (f"memory '{tmp_path}/nowhere/x y' {data}", "neither"),
            (f"memory {encoder} {data} --set memory.weight=2", "memory.weight is 2"),
            (f"memory {encoder} {data} --set memory.lambda=2", "memory.lambda"),
            (f"search {bundle} w1 -k 48", "k is 48"),
            (f"search {bundle} w1 --set memory.keys=0", "memory.keys is 0"),
            (f"search {bundle} w1 --set optim.lr=1", "setting 'optim'"),
            (
                f"search {bundle} w1 --memory weight=0",
                "--memory weight=0 is now written --set memory.weight=0",
            ),
        ):
            assert message in shell.error(command)
        assert not (tmp_path / "never").exists()


def test_labels_without_votes_follow_even_if_their_vectors_are_long() -> None:
    # One query, five labels: label 3 has a small vote, all inner products are above 2.
    votes = Votes(np.array([3]), np.array([0.1]), np.array([0.0]))
    ids = np.array([[4, 0, 3, 1]])
    fallback = TopLabels(ids, np.array([[9.0, 7.0, 7.0, 5.0]], np.float32))
    top = rank_votes(votes, 0.5, 3, fallback, 5)
    assert top.ids.tolist() == [[3, 4, 0]]
    np.testing.assert_array_equal(top.scores, np.array([[0.05, 7.0, 5.0]], np.float32))
