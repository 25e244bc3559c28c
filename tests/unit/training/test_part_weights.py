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
from xmcray.training.part_weights import DEPTH, SUMMED, WeightSearch
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


def random_candidates(rng: np.random.Generator) -> Candidates:
    # Some queries have fewer candidates than answers are measured.
    labels = random_labels(rng, 4, 40)
    num_pairs = len(labels.values)
    nothing = np.empty(0, np.int64)
    no_votes = Votes(TopLabels.empty(NUM_QUERIES), nothing, nothing, nothing)
    key_BK = -np.sort(-rng.random((NUM_QUERIES, NUM_LABELS), np.float32), axis=1)
    member = MemberScores(rng.random(num_pairs, np.float32), key_BK, no_votes)
    texts = rng.random(num_pairs, np.float32)
    return Candidates(labels=labels, members=(member,), words=no_votes, text_P=texts)


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
        # Values of hits go through float32.
        assert search.measure(config).objective == pytest.approx(metrics.result()[name], rel=1e-5)


@pytest.mark.parametrize("name", sorted(set(MAIN_METRICS) - set(SUMMED)))
def test_a_metric_that_is_no_sum_over_hits_is_refused(
    corpus: Corpus, name: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{name}.* expected one of P@1, P@3, .*R@10$") as error:
        fuse(["bundle"], corpus, tmp_path / "fused", metrics=["P@1", name])
    assert "\n" not in str(error.value)
