"""Fused bundles: their scores are weighted sums, and their weights are earned."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from bundles import write_memory_of
from corpora import corpus_of, planted_corpus

from xmcray.data.corpus import Corpus
from xmcray.errors import BundleError, ConfigError, DataError, StorageError
from xmcray.evaluation.evaluate import compare
from xmcray.retrieval import retriever as retrievers
from xmcray.retrieval.bundle import KIND, read_settings
from xmcray.retrieval.labels import NewLabel, add_labels, load_label_sides, with_labels
from xmcray.retrieval.parts import Candidates, MemberConfig, MemberScores, PartsConfig, Votes
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.terms import words
from xmcray.retrieval.vector_export import export_vectors
from xmcray.retrieval.votes import MemoryConfig
from xmcray.storage.manifest import finish_manifest, read_manifest
from xmcray.training.fuse import fuse, write_parts
from xmcray.training.outcome import measure_bundle
from xmcray.training.part_weights import WeightSearch
from xmcray.types import Ragged, TopLabels

NUM_LABELS = 47
FIRST = MemberConfig(name="first", labels=1.0, memory=0.5, label_temperature=0.2)
SECOND = MemberConfig(name="second", labels=0.5, memory=0.25, memory_temperature=0.1)
CONFIG = PartsConfig(members=(FIRST, SECOND), words=0.75, texts=0.25, memory_keys=6, word_keys=4)
ALONE = dataclasses.replace(CONFIG, members=(dataclasses.replace(FIRST, name=""),))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    return planted_corpus(folder, num_queries=301, num_labels=NUM_LABELS)


@pytest.fixture(scope="module")
def sources(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Bundles of two untrained encoders."""
    folder = tmp_path_factory.mktemp("source")
    first = write_memory_of(corpus, folder / "first", dim=24, seed=0)
    second = write_memory_of(corpus, folder / "second", dim=16, seed=1)
    return [first, second]


@pytest.fixture(scope="module", params=[ALONE, CONFIG], ids=["one member", "two members"])
def bundle(
    request: pytest.FixtureRequest,
    corpus: Corpus,
    sources: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A fused bundle of all parts."""
    path = tmp_path_factory.mktemp("bundles") / "all"
    config: PartsConfig = request.param
    write_parts(sources[: len(config.members)], corpus, path, config)
    return path


@pytest.fixture(scope="module")
def retriever(bundle: Path) -> Retriever:
    return Retriever.load(bundle, threads=1)


@pytest.fixture(scope="module")
def texts(corpus: Corpus) -> list[str]:
    return corpus.split("test").texts(np.arange(12))


def cosines(text: str, others: list[str], everything: list[str]) -> list[float]:
    """TF-IDF cosines of a text with others, by a plain loop."""
    frequency = Counter(term for other in everything for term in set(words(other)))
    limit = 0.2 * len(everything)

    def vector(of: str) -> dict[str, float]:
        values = {}
        for term, count in Counter(words(of)).items():
            if 0 < frequency[term] <= limit:
                idf = math.log(len(everything) / frequency[term]) + 1
                values[term] = (1 + math.log(count)) * idf
        length = math.sqrt(sum(value**2 for value in values.values()))
        return {term: value / length for term, value in values.items()}

    own = vector(text)
    return [sum(own.get(term, 0) * v for term, v in vector(other).items()) for other in others]


def config_of(retriever: Retriever) -> PartsConfig:
    assert retriever.fusion is not None
    return retriever.fusion.config


def expected_scores(retriever: Retriever, corpus: Corpus, text: str) -> list[float]:
    """The score of every label, by plain loops."""
    train = corpus.split("train")
    rows = np.flatnonzero(train.num_positives())
    positives = [set(labels.tolist()) for labels in train.positives(rows)]
    train_texts = train.texts(rows)
    label_texts = corpus.label_texts(np.arange(NUM_LABELS))
    everything = train_texts + label_texts
    scores = [0.0] * NUM_LABELS
    for member, config in zip(retriever.members, config_of(retriever).members, strict=True):
        query = member.encode([text])[0].astype(float)
        products = member.labels.vectors_of(np.arange(NUM_LABELS)) @ query
        powers = np.exp((products - products.max()) / config.label_temperature)
        for label, power in enumerate(powers / powers.sum()):
            scores[label] += config.labels * power
        near = member.encode(train.tokens(rows)) @ query
        voters = sorted(range(len(rows)), key=lambda row: -near[row])[: CONFIG.memory_keys]
        votes = np.exp((near[voters] - near.max()) / config.memory_temperature)
        for voter, vote in zip(voters, votes / votes.sum(), strict=True):
            for label in positives[voter]:
                scores[label] += config.memory * vote
    alike = cosines(text, train_texts, everything)
    voters = sorted(range(len(rows)), key=lambda row: (-alike[row], row))[: CONFIG.word_keys]
    total = sum(alike[voter] for voter in voters)
    for voter in voters:
        for label in positives[voter]:
            scores[label] += CONFIG.words * alike[voter] / total
    for label, cosine in enumerate(cosines(text, label_texts, everything)):
        scores[label] += CONFIG.texts * cosine
    return scores


def test_a_score_is_the_weighted_sum_of_the_parts(
    retriever: Retriever, corpus: Corpus, texts: list[str]
) -> None:
    for text, answers in zip(texts, retriever.search(texts, NUM_LABELS), strict=True):
        expected = expected_scores(retriever, corpus, text)
        assert sorted(answer.label_id for answer in answers) == list(range(NUM_LABELS))
        for answer in answers:
            assert answer.score == pytest.approx(expected[answer.label_id], abs=1e-5)
        ranked = [(-answer.score, answer.label_id) for answer in answers]
        assert ranked == sorted(ranked)


def test_an_answer_says_how_much_each_part_gave(retriever: Retriever, texts: list[str]) -> None:
    for answers in retriever.search(texts, 5, explain=True):
        for answer in answers:
            assert answer.parts is not None
            assert list(answer.parts) == config_of(retriever).parts
            assert sum(answer.parts.values()) == pytest.approx(answer.score, abs=1e-5)
            assert answer.voters is not None
            weights = [voter.weight for voter in answer.voters]
            assert weights == sorted(weights, reverse=True)
            voting = [gain for part, gain in answer.parts.items() if "memory" in part]
            votes = sum(voting) + answer.parts["words"]
            assert sum(weights) == pytest.approx(votes, abs=1e-6)
    assert retriever.search(texts, 1)[0][0].parts is None


def test_answers_do_not_depend_on_the_batch(
    retriever: Retriever, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = retriever.top_labels(texts, 7)
    monkeypatch.setattr(retrievers, "CHUNK", 5)
    apart = retriever.top_labels(texts, 7)
    np.testing.assert_array_equal(apart.ids, together.ids)
    np.testing.assert_allclose(apart.scores, together.scores, rtol=1e-6)


def test_filters_and_removals_change_no_other_score(retriever: Retriever, texts: list[str]) -> None:
    everything = retriever.top_labels(texts, NUM_LABELS)
    allowed = np.arange(NUM_LABELS) % 3 == 0
    removed = np.flatnonzero(~allowed)
    for view in (retriever.restricted(allowed), retriever.without(removed)):
        top = view.top_labels(texts, 10)
        for query in range(len(texts)):
            kept = allowed[everything.ids[query]]
            np.testing.assert_array_equal(top.ids[query], everything.ids[query][kept][:10])
            np.testing.assert_allclose(
                top.scores[query], everything.scores[query][kept][:10], rtol=1e-6
            )
    exclude = Ragged.from_rows([[int(row[0])] for row in everything.ids])
    second = retriever.top_labels(texts, 3, exclude=exclude)
    np.testing.assert_array_equal(second.ids, everything.ids[:, 1:4])


def test_a_label_that_joins_is_found_by_its_words(
    bundle: Path, retriever: Retriever, texts: list[str], tmp_path: Path
) -> None:
    before = retriever.top_labels(texts, NUM_LABELS)
    new = NewLabel("new", texts[0])
    joined = with_labels(retriever, load_label_sides(bundle, retriever.settings), [new])
    after = joined.top_labels(texts, NUM_LABELS + 1)
    is_old = after.ids < NUM_LABELS
    assert (is_old.sum(axis=1) == NUM_LABELS).all()
    np.testing.assert_array_equal(after.ids[is_old].reshape(before.ids.shape), before.ids)
    # Not even the last bit of another label's score.
    kept_scores = after.scores[is_old].reshape(before.ids.shape)
    np.testing.assert_array_equal(kept_scores, before.scores)
    answers = joined.search(texts[:1], NUM_LABELS + 1, explain=True)[0]
    parts = next(answer.parts for answer in answers if answer.uid == "new")
    assert parts is not None
    assert all(gain > 0 for part, gain in parts.items() if "labels" in part)
    assert parts["texts"] == pytest.approx(CONFIG.texts, rel=1e-5)
    # The changed bundle on disk answers as the view in memory.
    add_labels(bundle, [new], tmp_path / "grown")
    stored = Retriever.load(tmp_path / "grown", threads=1).top_labels(texts, 9)
    np.testing.assert_array_equal(stored.ids, joined.top_labels(texts, 9).ids)


def test_requests_that_do_not_fit_are_refused(retriever: Retriever, texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="chosen together"):
        retriever.search(texts, 3, memory=MemoryConfig())
    with pytest.raises(ConfigError, match="needs the queries' texts"):
        retriever.top_labels(retriever.encode(texts), 3)


@pytest.mark.parametrize("name", ["query_rows.npy", "terms.npy", "label_offsets.npy"])
def test_a_damaged_index_of_words_is_refused_in_one_line(
    bundle: Path, tmp_path: Path, name: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    path = copy / "words" / name
    values = np.load(path)
    values[0] = values.max() + 10_000
    np.save(path, values)
    with pytest.raises(StorageError, match=f"{name} was altered"):
        Retriever.load(copy)
    finish_manifest(copy, KIND, {}, {})
    with pytest.raises(BundleError, match="fuse the bundle again") as error:
        Retriever.load(copy)
    assert "\n" not in str(error.value)


def test_fusing_chooses_by_held_out_queries_and_is_repeatable(
    corpus: Corpus, sources: list[Path], tmp_path: Path
) -> None:
    choice = fuse([str(sources[0])], corpus, tmp_path / "first")
    fuse([str(sources[0])], corpus, tmp_path / "second")
    manifests = [read_manifest(tmp_path / name, KIND) for name in ("first", "second")]
    assert manifests[0].sha256 == manifests[1].sha256
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
    assert choice.queries == 15
    fused = Retriever.load(tmp_path / "first")
    settings = read_settings(tmp_path / "first")
    assert settings.predictor["kind"] == "fused"
    assert fused.fusion is not None
    assert fused.fusion.config == choice.config
    # An untrained encoder knows little, and every label is named by words of its queries.
    unfused = dataclasses.replace(fused, fusion=None, memory=None)
    better = measure_bundle(fused, corpus, "test")
    worse = measure_bundle(unfused, corpus, "test")
    row = next(row for row in compare(better, worse) if row.metric == "P@1")
    assert row.difference > 0
    assert row.p_value < 0.01
    # Files of parts that were left out are gone.
    files = {name.split("/")[0] for name in manifests[0].files}
    used = set(choice.config.used())
    assert ("words" in files) == bool(used & {"words", "texts"})
    assert settings.has_memory == ("memory" in used)


def test_a_part_that_does_not_help_is_left_out(corpus: Corpus) -> None:
    """Label vectors know half of the answers, words the other half, and texts are noise."""
    num_queries = 40
    draw = np.random.default_rng(0)
    positives = draw.integers(0, NUM_LABELS, num_queries)
    label_ids = np.tile(np.arange(NUM_LABELS), num_queries)
    labels = Ragged(label_ids, np.arange(num_queries + 1) * NUM_LABELS)
    scores = draw.random(len(label_ids), np.float32)
    is_positive = label_ids == np.repeat(positives, NUM_LABELS)
    scores[is_positive & (labels.row_ids % 2 == 0)] = 2
    noise = draw.random(len(label_ids), np.float32)
    keys = -np.sort(-scores.reshape(num_queries, -1), axis=1)
    odd = np.arange(1, num_queries, 2)
    voters = TopLabels.empty(num_queries, 1)
    voters.ids[odd] = 0
    voters.scores[odd] = 1
    no_votes = np.empty(0, np.int64)
    words_votes = Votes(voters, odd * NUM_LABELS + positives[odd], odd, np.zeros_like(odd))
    nobody = Votes(TopLabels.empty(num_queries), no_votes, no_votes, no_votes)
    candidates = Candidates(
        labels=labels,
        # The second member's vectors are noise.
        members=(MemberScores(scores, keys, nobody), MemberScores(noise, keys, nobody)),
        words=words_votes,
        text_P=draw.random(len(label_ids), np.float32),
    )
    truth = Ragged.from_rows([[int(label)] for label in positives])
    choice = WeightSearch(corpus, [candidates], truth, CONFIG).choose()
    assert choice.config.used() == ["first.labels", "words"]
    assert [member.name for member in choice.config.members] == ["first"]
    assert choice.metrics["P@1"] == 1
    assert 0.5 <= choice.alone["first.labels"]["P@1"] < 0.6
    tests = {test.part: test for test in choice.tests}
    assert tests["words"].p_value < 0.01
    assert tests["first.memory"].p_value > 0.15
    assert tests["first.memory"].weight == 0
    assert tests["second.labels"].weight == 0


def test_members_that_earn_their_place_are_one_bundle(
    corpus: Corpus, sources: list[Path], tmp_path: Path
) -> None:
    choice = fuse([str(source) for source in sources], corpus, tmp_path / "both")
    assert [test.part for test in choice.tests][:2] == ["memory.labels", "memory.memory"]
    assert list(choice.alone) == ["memory.labels", "memory-2.labels"]
    fused = Retriever.load(tmp_path / "both")
    assert config_of(fused) == choice.config
    assert len(fused.members) == len(choice.config.members)
    # Nothing outside the bundle is read, and files of other members are gone.
    names = {path.name for path in (tmp_path / "both" / "members").glob("*")}
    assert names == {member.name for member in choice.config.members[1:]}
    write_parts(sources, corpus, tmp_path / "all", CONFIG)
    with pytest.raises(ConfigError, match="several members"):
        fuse([str(tmp_path / "all")], corpus, tmp_path / "again")


def test_members_may_have_tokenizers_of_their_own(
    corpus: Corpus, sources: list[Path], tmp_path: Path
) -> None:
    other = corpus_of(corpus.path.parent / "raw", tmp_path / "corpus", vocab_size=120)
    assert other.card.vocab_size < corpus.card.vocab_size
    second = write_memory_of(other, tmp_path / "second", dim=16, seed=1)
    paths = [str(sources[0]), str(second)]
    fuse(paths, corpus, tmp_path / "fused", retokenized=[other])
    measure_bundle(Retriever.load(tmp_path / "fused"), corpus, "test")
    strange = planted_corpus(tmp_path / "strange", num_queries=301, num_labels=NUM_LABELS, seed=1)
    with pytest.raises(DataError, match="other texts or positives"):
        fuse(paths, corpus, tmp_path / "again", retokenized=[strange])


def test_runs_that_held_out_other_queries_are_refused(
    corpus: Corpus, sources: list[Path], tmp_path: Path
) -> None:
    shutil.copytree(sources[1], tmp_path / "other")
    about = {"config": {"data": {"seed": 1, "validation": 0.01}}}
    finish_manifest(tmp_path / "other", KIND, about, {})
    with pytest.raises(ConfigError, match="train them with equal") as error:
        fuse([str(sources[0]), str(tmp_path / "other")], corpus, tmp_path / "fused")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "fused").exists()


def test_settings_of_an_earlier_release_are_those_of_a_single_member() -> None:
    flat = {**dataclasses.asdict(ALONE), **dataclasses.asdict(ALONE.members[0])}
    del flat["members"]
    del flat["name"]
    assert PartsConfig.read(flat) == ALONE


def test_an_export_of_vectors_says_that_other_parts_are_missing(
    bundle: Path, tmp_path: Path
) -> None:
    export_vectors(bundle, tmp_path / "vectors", "parquet")
    assert "adds up several parts" in (tmp_path / "vectors" / "README.md").read_text()
