"""Answers of fused bundles: each score is a weighted sum of parts, computed here by plain loops."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fused_parts import (
    ALONE,
    CONFIG,
    NUM_LABELS,
    UNNAMED,
    config_of,
    corpus_of_parts,
    two_sources,
)
from numpy.testing import assert_allclose, assert_array_equal

from xmcray.data.corpus import Corpus
from xmcray.errors import BundleError, ConfigError, StorageError
from xmcray.nn.cross_encoder import CrossEncoder
from xmcray.retrieval import candidates, fused
from xmcray.retrieval import retriever as retrievers
from xmcray.retrieval.bundle import KIND
from xmcray.retrieval.labels import (
    NewLabel,
    add_labels,
    load_label_sides,
    with_labels,
)
from xmcray.retrieval.parts import MemberConfig, PartsConfig
from xmcray.retrieval.reranker import RerankConfig, Reranker
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.terms import words
from xmcray.retrieval.vector_export import export_vectors
from xmcray.retrieval.votes import MemoryConfig
from xmcray.storage.manifest import finish_manifest
from xmcray.training.fuse import write_parts
from xmcray.types import Float32Array, Ragged


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of_parts(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def sources(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return two_sources(corpus, tmp_path_factory.mktemp("source"))


@pytest.fixture(
    scope="module",
    params=[ALONE, CONFIG],
    ids=["one member", "two members"],
)
def bundle(
    request: pytest.FixtureRequest,
    corpus: Corpus,
    sources: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A fused bundle of all parts."""
    path = tmp_path_factory.mktemp("bundles") / "all"
    config: PartsConfig = request.param
    num_members = len(config.members)
    write_parts(sources[:num_members], corpus, path, config)
    return path


@pytest.fixture(scope="module")
def retriever(bundle: Path) -> Retriever:
    return Retriever.load(bundle, threads=1)


@pytest.fixture(scope="module")
def texts(corpus: Corpus) -> list[str]:
    test = corpus.split("test")
    return test.texts(np.arange(12))


class WordCosines:
    """TF-IDF cosines of texts, by a plain loop."""

    def __init__(self, collection: list[str]) -> None:
        self.num_texts = len(collection)
        self.num_texts_with: Counter[str] = Counter()
        for text in collection:
            self.num_texts_with.update(set(words(text)))

    def vector(self, text: str) -> dict[str, float]:
        values = {}
        for term, count in Counter(words(text)).items():
            frequency = self.num_texts_with[term]
            # A term that is in no text, or in more than a fifth of them, does not count.
            if 0 < frequency <= 0.2 * self.num_texts:
                idf = math.log(self.num_texts / frequency) + 1
                values[term] = (1 + math.log(count)) * idf
        length = math.hypot(*values.values())
        return {term: value / length for term, value in values.items()}

    def cosines(
        self,
        text: str,
        others: list[str],
    ) -> list[float]:
        own = self.vector(text)
        cosines = []
        for other in others:
            cosine = 0.0
            for term, value in self.vector(other).items():
                cosine += own.get(term, 0) * value
            cosines.append(cosine)
        return cosines


def softmax(values: np.ndarray, temperature: float) -> np.ndarray:
    powers = np.exp((values - values.max()) / temperature)
    return powers / powers.sum()


class ExpectedScores:
    """The score of every label, by plain loops."""

    def __init__(
        self,
        retriever: Retriever,
        corpus: Corpus,
    ) -> None:
        self.members = retriever.members
        self.configs = config_of(retriever).members
        train = corpus.split("train")
        rows = np.flatnonzero(train.num_positives())
        self.tokens = train.tokens(rows)
        self.train_texts = train.texts(rows)
        self.positives = [labels.tolist() for labels in train.positives(rows)]
        self.label_texts = corpus.label_texts(np.arange(NUM_LABELS))
        self.words = WordCosines(self.train_texts + self.label_texts)

    def of(self, text: str) -> np.ndarray:
        scores = np.zeros(NUM_LABELS)
        for member, config in zip(self.members, self.configs, strict=True):
            query = member.encode([text])[0].astype(float)
            scores += config.labels * self._by_labels(member, query, config)
            scores += config.memory * self._by_memory(member, query, config)
        scores += CONFIG.words * self._by_words(text)
        cosine_L = self.words.cosines(text, self.label_texts)
        scores += CONFIG.texts * np.array(cosine_L)
        return scores

    def _by_labels(
        self,
        member: Any,
        query: np.ndarray,
        config: MemberConfig,
    ) -> np.ndarray:
        label_LD = member.labels.vectors_of(np.arange(NUM_LABELS))
        return softmax(label_LD @ query, config.label_temperature)

    def _by_memory(
        self,
        member: Any,
        query: np.ndarray,
        config: MemberConfig,
    ) -> np.ndarray:
        products = member.encode(self.tokens) @ query
        voters = np.argsort(-products, kind="stable")[: CONFIG.memory_keys]
        votes = softmax(products[voters], config.memory_temperature)
        return self._sum_of_votes(voters, votes)

    def _by_words(self, text: str) -> np.ndarray:
        cosines = np.array(self.words.cosines(text, self.train_texts))
        voters = np.argsort(-cosines, kind="stable")[: CONFIG.word_keys]
        votes = cosines[voters] / cosines[voters].sum()
        return self._sum_of_votes(voters, votes)

    def _sum_of_votes(
        self,
        voters: np.ndarray,
        votes: np.ndarray,
    ) -> np.ndarray:
        """Each voter gives its vote to every positive of its query."""
        scores = np.zeros(NUM_LABELS)
        for voter, vote in zip(voters, votes, strict=True):
            for label in self.positives[voter]:
                scores[label] += vote
        return scores


def test_a_score_is_the_weighted_sum_of_the_parts(
    retriever: Retriever,
    corpus: Corpus,
    texts: list[str],
) -> None:
    expected_scores = ExpectedScores(retriever, corpus)

    answers_of_texts = retriever.search(texts, NUM_LABELS)

    for text, answers in zip(texts, answers_of_texts, strict=True):
        expected = expected_scores.of(text)
        label_ids = [answer.label_id for answer in answers]
        assert sorted(label_ids) == list(range(NUM_LABELS))
        scores = [answer.score for answer in answers]
        assert scores == pytest.approx(expected[label_ids], abs=1e-5)
        # By descending score, equal ones by ascending label.
        ranked = [(-answer.score, answer.label_id) for answer in answers]
        assert ranked == sorted(ranked)


def test_an_answer_says_how_much_each_part_gave(retriever: Retriever, texts: list[str]) -> None:
    for answers in retriever.search(texts, 5, explain=True):
        for answer in answers:
            parts = answer.parts
            assert parts is not None
            assert list(parts) == config_of(retriever).parts
            assert sum(parts.values()) == pytest.approx(answer.score, abs=1e-5)

            assert answer.voters is not None
            weights = [voter.weight for voter in answer.voters]
            assert weights == sorted(weights, reverse=True)
            voted = [parts[part] for part in parts if "memory" in part]
            voted.append(parts["words"])
            assert sum(weights) == pytest.approx(sum(voted), abs=1e-6)

    unexplained = retriever.search(texts, 1)
    assert unexplained[0][0].parts is None


class ReversedOrder(CrossEncoder):
    """Prefers the answers that a bundle puts last."""

    def __init__(self) -> None:
        """Reads no model."""

    def score(self, pairs: Sequence[tuple[str, str]]) -> Float32Array:
        return np.arange(len(pairs), dtype=np.float32)


def test_what_a_reranker_moved_to_the_front_is_explained(
    retriever: Retriever,
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Words propose two labels of their own accord, and more for the reranker.
    monkeypatch.setattr(candidates, "DEPTH", 2)
    monkeypatch.setattr(fused, "DEPTH", 2)
    config = RerankConfig(candidates=12)
    reordered = dataclasses.replace(retriever, reranker=Reranker(ReversedOrder(), config))

    for text in texts:
        (plain,) = retriever.search([text], 12)
        score_of_uid = {label.uid: label.score for label in plain}

        (answers,) = reordered.search([text], 2, explain=True)

        for answer in answers:
            assert answer.parts is not None
            assert sum(answer.parts.values()) == pytest.approx(score_of_uid[answer.uid], abs=1e-5)


def test_answers_do_not_depend_on_the_batch(
    retriever: Retriever,
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = retriever.top_labels(texts, 7)
    monkeypatch.setattr(retrievers, "CHUNK", 5)
    apart = retriever.top_labels(texts, 7)

    assert_array_equal(apart.ids, together.ids)
    assert_allclose(apart.scores, together.scores, rtol=1e-6)


def test_filters_and_removals_change_no_other_score(retriever: Retriever, texts: list[str]) -> None:
    everything = retriever.top_labels(texts, NUM_LABELS)
    is_allowed = np.arange(NUM_LABELS) % 3 == 0
    removed = np.flatnonzero(~is_allowed)

    restricted = retriever.restricted(is_allowed)
    without_removed = retriever.without(removed)

    for view in (restricted, without_removed):
        top = view.top_labels(texts, 10)
        for query in range(len(texts)):
            all_ids = everything.ids[query]
            all_scores = everything.scores[query]
            is_kept = is_allowed[all_ids]
            assert_array_equal(top.ids[query], all_ids[is_kept][:10])
            assert_allclose(top.scores[query], all_scores[is_kept][:10], rtol=1e-6)

    # Without its best label a query gets the next ones.
    best = [[int(row[0])] for row in everything.ids]
    others = retriever.top_labels(texts, 3, exclude=Ragged.from_rows(best))
    assert_array_equal(others.ids, everything.ids[:, 1:4])


def test_a_label_that_joins_is_found_by_its_words(
    bundle: Path,
    retriever: Retriever,
    texts: list[str],
    tmp_path: Path,
) -> None:
    new = NewLabel("new", texts[0])
    sides = load_label_sides(bundle, retriever.settings)

    joined = with_labels(retriever, sides, [new])

    before = retriever.top_labels(texts, NUM_LABELS)
    after = joined.top_labels(texts, NUM_LABELS + 1)
    is_old = after.ids < NUM_LABELS
    assert (is_old.sum(axis=1) == NUM_LABELS).all()
    old_ids = after.ids[is_old].reshape(before.ids.shape)
    assert_array_equal(old_ids, before.ids)
    # Not even the last bit of another label's score changes.
    old_scores = after.scores[is_old].reshape(before.ids.shape)
    assert_array_equal(old_scores, before.scores)

    (answers,) = joined.search(texts[:1], NUM_LABELS + 1, explain=True)
    (answer,) = [answer for answer in answers if answer.uid == "new"]
    assert answer.parts is not None
    for part, gain in answer.parts.items():
        if "labels" in part:
            assert gain > 0
    # The query is the label's text: their cosine is 1.
    assert answer.parts["texts"] == pytest.approx(CONFIG.texts, rel=1e-5)

    # The changed bundle on disk answers as the view in memory.
    add_labels(bundle, [new], tmp_path / "grown")
    stored = Retriever.load(tmp_path / "grown", threads=1)
    top_of_stored = stored.top_labels(texts, 9)
    top_of_view = joined.top_labels(texts, 9)
    assert_array_equal(top_of_stored.ids, top_of_view.ids)


def test_labels_that_join_have_vectors_of_length_1_as_those_of_a_memory(
    bundle: Path, tmp_path: Path
) -> None:
    """The encoder's own vectors have other lengths."""
    add_labels(bundle, [NewLabel("new", "w1x1 w2x2")], tmp_path / "grown")
    for member in Retriever.load(tmp_path / "grown").members:
        vectors = member.labels.vectors_of(np.arange(NUM_LABELS + 1))
        assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_requests_that_do_not_fit_are_refused(retriever: Retriever, texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="chosen together"):
        retriever.search(texts, 3, memory=MemoryConfig())

    query_BD = retriever.encode(texts)
    with pytest.raises(ConfigError, match="needs the queries' texts"):
        retriever.top_labels(query_BD, 3)


def test_query_vectors_of_another_type_are_compared_as_float32(
    corpus: Corpus, sources: list[Path], texts: list[str], tmp_path: Path
) -> None:
    without_words = dataclasses.replace(ALONE, words=0.0, texts=0.0)
    write_parts(sources[:1], corpus, tmp_path / "b", without_words)
    retriever = Retriever.load(tmp_path / "b", threads=1)
    query_BD = retriever.encode(texts)

    top = retriever.top_labels(query_BD.astype(np.float64), 3)

    assert_array_equal(top.scores, retriever.top_labels(query_BD, 3).scores)


@pytest.mark.parametrize("name", ["query_rows.npy", "terms.npy", "label_offsets.npy"])
def test_a_damaged_index_of_words_is_refused_in_one_line(
    bundle: Path,
    tmp_path: Path,
    name: str,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    path = copy / "words" / name
    values = np.load(path)
    values[0] = values.max() + 10_000
    np.save(path, values)

    with pytest.raises(StorageError, match=f"{name} was altered"):
        Retriever.load(copy)

    # A new manifest has the checksum of the damaged file.
    finish_manifest(copy, KIND, {}, {})
    with pytest.raises(BundleError, match="fuse the bundle again") as error:
        Retriever.load(copy)
    assert "\n" not in str(error.value)


def test_settings_of_an_earlier_release_are_those_of_a_single_member() -> None:
    # They held the settings of the one member alongside those of the other parts.
    flat = {
        **dataclasses.asdict(ALONE),
        **dataclasses.asdict(UNNAMED),
    }
    del flat["members"]
    del flat["name"]

    assert PartsConfig.read(flat) == ALONE


def test_an_export_of_vectors_says_that_other_parts_are_missing(
    bundle: Path, tmp_path: Path
) -> None:
    export_vectors(bundle, tmp_path / "vectors", "parquet")

    readme = tmp_path / "vectors" / "README.md"
    assert "adds up several parts" in readme.read_text()
