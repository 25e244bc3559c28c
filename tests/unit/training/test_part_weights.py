"""What the search for weights maximises is what the metrics measure."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from corpora import planted_corpus

from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError
from xmcray.evaluation.metrics import MAIN_METRICS, Metrics
from xmcray.retrieval.parts import Candidates, MemberConfig, MemberScores, PartsConfig, Votes
from xmcray.training.fuse import fuse
from xmcray.training.part_weights import DEPTH, SUMMED, WEIGHTS, WeightSearch
from xmcray.types import Ragged, TopLabels

NUM_LABELS = 47
NUM_QUERIES = 60
CONFIG = PartsConfig(members=(MemberConfig(labels=1.0),), texts=0.3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    return planted_corpus(folder, num_queries=301, num_labels=NUM_LABELS)


def random_labels(rng: np.random.Generator, fewest: int, most: int) -> Ragged:
    """Distinct labels of each query, ascending."""
    rows = []
    for _ in range(NUM_QUERIES):
        num_labels = int(rng.integers(fewest, most + 1))
        labels = rng.choice(NUM_LABELS, num_labels, replace=False)
        rows.append(np.sort(labels).tolist())
    return Ragged.from_rows(rows)


def random_candidates(rng: np.random.Generator, num_members: int = 1) -> Candidates:
    # Some queries have fewer candidates than answers are measured.
    labels = random_labels(rng, 4, 40)
    num_pairs = len(labels.values)
    nothing = np.empty(0, np.int64)
    no_votes = Votes(TopLabels.empty(NUM_QUERIES), nothing, nothing, nothing)
    members = []
    for _ in range(num_members):
        key_BK = -np.sort(-rng.random((NUM_QUERIES, NUM_LABELS), np.float32), axis=1)
        members.append(MemberScores(rng.random(num_pairs, np.float32), key_BK, no_votes))
    texts = rng.random(num_pairs, np.float32)
    return Candidates(labels=labels, members=tuple(members), words=no_votes, text_P=texts)


@pytest.mark.parametrize("name", SUMMED)
def test_the_objective_is_the_metric(corpus: Corpus, name: str) -> None:
    rng = np.random.default_rng(0)
    candidates = random_candidates(rng)
    # Some queries have no positive, others more than answers are measured.
    truth = random_labels(rng, 0, 14)
    search = WeightSearch(corpus, [candidates], truth, CONFIG, [name])
    for texts in (0.0, 0.3, 2.0):
        config = dataclasses.replace(CONFIG, texts=texts)
        metrics = Metrics.of_corpus(corpus)
        metrics.update(candidates.top(config, DEPTH), truth)
        assert search.measure(config).objective == pytest.approx(metrics.result()[name], rel=1e-5)


def test_the_ratios_of_the_grid_are_tried_after_the_first_part_is_removed(corpus: Corpus) -> None:
    rng = np.random.default_rng(2)  # next to the noise, the second member gets a weight of 2
    truth = random_labels(rng, 1, 5)
    candidates = random_candidates(rng, num_members=2)
    noise, informed = candidates.members
    # The second member says something, and texts say more, in small numbers.
    is_hit = np.isin(candidates.labels.pairs(NUM_LABELS), truth.pairs(NUM_LABELS))
    informed = dataclasses.replace(informed, score_P=informed.score_P + np.float32(0.3) * is_hit)
    texts = np.float32(0.2) * (candidates.text_P + np.float32(0.4) * is_hit)
    candidates = dataclasses.replace(candidates, members=(noise, informed), text_P=texts)
    members = (MemberConfig(name="noise"), MemberConfig(name="informed"))
    start = PartsConfig(members=members, texts=1.0)
    search = WeightSearch(corpus, [candidates], truth, start)

    config = search.choose().config

    assert config.used() == ["informed.labels", "texts"]
    without_noise = MemberConfig(name="noise", labels=0)
    chosen = dataclasses.replace(config, members=(without_noise, *config.members))
    objective = search.measure(chosen).objective
    for ratio in WEIGHTS:
        other = chosen.changed("texts", ratio * chosen.weight("informed.labels"))
        assert search.measure(other).objective <= objective + 1e-9


def test_without_the_only_part_there_is_no_answer(corpus: Corpus) -> None:
    rng = np.random.default_rng(0)
    truth = random_labels(rng, 1, 5)
    search = WeightSearch(corpus, [random_candidates(rng)], truth, CONFIG)
    [only] = [test for test in search.choose().tests if test.weight]
    assert set(only.without.values()) == {0.0}
    assert only.p_value < 0.01


@pytest.mark.parametrize("name", sorted(set(MAIN_METRICS) - set(SUMMED)))
def test_a_metric_that_is_no_sum_over_hits_is_refused(
    corpus: Corpus, name: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{name}.* expected one of P@1, P@3, .*R@10$") as error:
        fuse(["bundle"], corpus, tmp_path / "fused", metrics=["P@1", name])
    assert "\n" not in str(error.value)
