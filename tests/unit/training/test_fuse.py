"""Fusing: weights of parts are chosen by held-out queries, and members have to earn their place."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import write_memory_of
from corpora import corpus_of, planted_corpus
from fused_parts import (
    CONFIG,
    NUM_LABELS,
    config_of,
    corpus_of_parts,
    two_sources,
)
from numpy.testing import assert_array_equal

from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError, DataError
from xmcray.evaluation.evaluate import compare
from xmcray.retrieval.bundle import KIND, read_attributes, read_settings
from xmcray.retrieval.labels import (
    annotate_labels,
)
from xmcray.retrieval.parts import Candidates, MemberScores, Votes
from xmcray.retrieval.retriever import Retriever
from xmcray.storage.manifest import finish_manifest, read_manifest
from xmcray.training.fuse import fuse, write_parts
from xmcray.training.held_out import held_out_by
from xmcray.training.outcome import measure_bundle
from xmcray.training.part_weights import WeightSearch
from xmcray.types import Ragged, TopLabels


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of_parts(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def sources(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return two_sources(corpus, tmp_path_factory.mktemp("source"))


def test_fusing_chooses_by_held_out_queries_and_is_repeatable(
    corpus: Corpus,
    sources: list[Path],
    tmp_path: Path,
) -> None:
    source = str(sources[0])
    choice = fuse([source], corpus, tmp_path / "first")
    fuse([source], corpus, tmp_path / "second")

    manifest = read_manifest(tmp_path / "first", KIND)
    again = read_manifest(tmp_path / "second", KIND)
    assert manifest.sha256 == again.sha256
    names = [path.name for path in tmp_path.iterdir()]
    assert sorted(names) == ["first", "second"]

    fused = Retriever.load(tmp_path / "first")
    settings = read_settings(tmp_path / "first")
    assert choice.queries == 15
    assert settings.predictor["kind"] == "fused"
    assert fused.fusion is not None
    assert fused.fusion.config == choice.config

    # An untrained encoder knows little, and every label is named by words of its queries.
    unfused = dataclasses.replace(fused, fusion=None, memory=None)
    better = measure_bundle(fused, corpus, "test")
    worse = measure_bundle(unfused, corpus, "test")
    row_of = {row.metric: row for row in compare(better, worse)}
    assert row_of["P@1"].difference > 0
    assert row_of["P@1"].p_value < 0.01

    # Files of parts that were left out are gone.
    used = set(choice.config.used())
    uses_words = bool(used & {"words", "texts"})
    folders = {name.split("/")[0] for name in manifest.files}
    assert ("words" in folders) == uses_words
    assert settings.has_memory == ("memory" in used)


def test_fewer_labels_than_ten_have_temperatures_too(tmp_path: Path) -> None:
    corpus = planted_corpus(tmp_path, num_queries=200, num_labels=8)
    source = write_memory_of(corpus, tmp_path / "source", dim=16, seed=0)

    fuse([str(source)], corpus, tmp_path / "fused")

    (answers,) = Retriever.load(tmp_path / "fused").search(["w1x0 w2x1"], 8)
    assert all(math.isfinite(answer.score) for answer in answers)


def test_queries_are_held_out_of_a_bundle_if_all_members_hold_them_out(corpus: Corpus) -> None:
    def of_run(seed: int) -> dict[str, Any]:
        return {"config": {"data": {"validation": 0.3, "seed": seed}}}

    about = {**of_run(0), "members": {"first": of_run(0), "second": of_run(1)}}
    rows = [held_out_by("b", of_run(seed), corpus).validation_rows for seed in (0, 1)]

    both = held_out_by("b", about, corpus).validation_rows

    assert 0 < len(both) < len(rows[0])
    assert_array_equal(both, np.intersect1d(*rows))
    about["members"]["second"]["config"]["data"]["validation"] = 0
    with pytest.raises(ConfigError, match="member second was trained on all"):
        held_out_by("b", about, corpus)


def one_vote_each(
    num_queries: int,
    voting: np.ndarray,
    positives: np.ndarray,
) -> Votes:
    """Votes in which some queries have one voter, which votes for the query's positive."""
    voters = TopLabels.empty(num_queries, 1)
    voters.ids[voting] = 0
    voters.scores[voting] = 1
    pairs = voting * NUM_LABELS + positives[voting]
    places = np.zeros_like(voting)
    return Votes(voters, pairs, voting, places)


def no_votes(num_queries: int) -> Votes:
    nothing = np.empty(0, np.int64)
    return Votes(TopLabels.empty(num_queries), nothing, nothing, nothing)


def test_a_part_that_does_not_help_is_left_out(corpus: Corpus) -> None:
    """Label vectors know half of the answers, words the other half, and texts are noise."""
    num_queries = 40
    rng = np.random.default_rng(0)
    positives = rng.integers(0, NUM_LABELS, num_queries)
    # Every label is a candidate of every query.
    label_ids = np.tile(np.arange(NUM_LABELS), num_queries)
    labels = Ragged(label_ids, np.arange(num_queries + 1) * NUM_LABELS)
    num_pairs = len(label_ids)

    # The first member is right about queries with an even number.
    scores = rng.random(num_pairs, np.float32)
    is_positive = label_ids == np.repeat(positives, NUM_LABELS)
    is_even = labels.row_ids % 2 == 0
    scores[is_positive & is_even] = 2
    descending = -np.sort(-scores.reshape(num_queries, NUM_LABELS), axis=1)
    first = MemberScores(scores, descending, no_votes(num_queries))

    # The second member's vectors are noise.
    noise = rng.random(num_pairs, np.float32)
    second = MemberScores(noise, descending, no_votes(num_queries))

    # Words are right about queries with an odd number.
    odd = np.arange(1, num_queries, 2)
    candidates = Candidates(
        labels=labels,
        members=(first, second),
        words=one_vote_each(num_queries, odd, positives),
        text_P=rng.random(num_pairs, np.float32),
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
    corpus: Corpus,
    sources: list[Path],
    tmp_path: Path,
) -> None:
    paths = [str(source) for source in sources]

    choice = fuse(paths, corpus, tmp_path / "both")

    parts = [test.part for test in choice.tests]
    assert parts[:2] == ["memory.labels", "memory.memory"]
    assert list(choice.alone) == ["memory.labels", "memory-2.labels"]
    fused = Retriever.load(tmp_path / "both")
    assert config_of(fused) == choice.config
    assert len(fused.members) == len(choice.config.members)

    # Nothing outside the bundle is read, and files of other members are gone.
    folder = tmp_path / "both" / "members"
    stored = {path.name for path in folder.glob("*")}
    others = choice.config.members[1:]
    assert stored == {member.name for member in others}

    write_parts(sources, corpus, tmp_path / "all", CONFIG)
    with pytest.raises(ConfigError, match="several members"):
        fuse([str(tmp_path / "all")], corpus, tmp_path / "again")


def test_members_may_have_tokenizers_of_their_own(
    corpus: Corpus,
    sources: list[Path],
    tmp_path: Path,
) -> None:
    raw = corpus.path.parent / "raw"
    other = corpus_of(raw, tmp_path / "corpus", vocab_size=120)
    assert other.card.vocab_size < corpus.card.vocab_size
    second = write_memory_of(other, tmp_path / "second", dim=16, seed=1)
    paths = [str(sources[0]), str(second)]

    fuse(paths, corpus, tmp_path / "fused", retokenized=[other])

    fused = Retriever.load(tmp_path / "fused")
    measure_bundle(fused, corpus, "test")
    # The same queries are held out of either corpus, but not of another one.
    first_about, second_about = (read_manifest(path, KIND).about for path in paths)
    about = {**first_about, "members": {"second": second_about}}
    of_first = held_out_by("both", about, corpus).validation_rows
    of_second = held_out_by("both", about, other).validation_rows
    assert len(of_first) > 0
    assert_array_equal(of_first, of_second)

    strange = planted_corpus(
        tmp_path / "strange",
        num_queries=301,
        num_labels=NUM_LABELS,
        seed=1,
    )
    with pytest.raises(DataError, match="both was made from another corpus than"):
        held_out_by("both", about, strange)
    with pytest.raises(DataError, match="other texts or positives"):
        fuse(paths, corpus, tmp_path / "again", retokenized=[strange])


def test_runs_that_held_out_other_queries_are_refused(
    corpus: Corpus,
    sources: list[Path],
    tmp_path: Path,
) -> None:
    other = tmp_path / "other"
    shutil.copytree(sources[1], other)
    about = {"config": {"data": {"seed": 1, "validation": 0.01}}}
    finish_manifest(other, KIND, about, {})

    paths = [str(sources[0]), str(other)]
    with pytest.raises(ConfigError, match="train them with equal") as error:
        fuse(paths, corpus, tmp_path / "fused")

    # A run that goes on from another one holds out queries that are new to it.
    newest = corpus.card.num_train - 5
    about = {"config": {"data": {"seed": 1, "validation": 0.2, "validation_from": newest}}}
    finish_manifest(other, KIND, about, {})
    with pytest.raises(ConfigError, match=rf"train all runs with data\.validation_from={newest}$"):
        fuse(paths, corpus, tmp_path / "fused")

    assert "\n" not in str(error.value)
    assert not (tmp_path / "fused").exists()


def test_labels_have_the_attributes_of_the_first_member_that_has_some(
    corpus: Corpus,
    sources: list[Path],
    tmp_path: Path,
) -> None:
    [uid] = corpus.label_uids(np.array([3]))
    annotated = tmp_path / "annotated"
    annotate_labels(sources[1], {uid: {"market": "de"}}, annotated)

    write_parts([sources[0], annotated], corpus, tmp_path / "fused", CONFIG)

    folder = tmp_path / "fused"
    attributes = read_attributes(folder, read_settings(folder), np.empty(0, np.int64))
    assert attributes.of(np.array([3, 4])) == [{"market": "de"}, {}]
    assert not list(folder.glob("members/**/attributes.parquet"))
