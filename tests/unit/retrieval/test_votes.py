"""The votes of a memory equal Eq. 8 written as dense matrices, for arrays of scores."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from dense_votes import dense
from numpy.testing import assert_allclose, assert_array_equal
from ranks import golden

from xmcray.errors import ConfigError
from xmcray.retrieval import votes as voting
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.votes import MemoryConfig, Votes, count_votes, rank_votes, sweep
from xmcray.types import Ragged, TopLabels

SETTINGS = [
    MemoryConfig(
        weight=weight,
        keys=keys,
        temperature=temperature,
        joint=joint,
    )
    for weight, keys, temperature, joint in itertools.product(
        (0, 0.3, 0.5, 1),
        (7, 40),
        (0.04, 0.5),
        (True, False),
    )
]


def nearest(score_BN: Any, width: int) -> TopLabels:
    """Best first, equal scores by lower row; the type of the scores stays."""
    order = np.argsort(-score_BN, axis=1, kind="stable")
    ids = order[:, :width]
    scores = np.take_along_axis(score_BN, ids, axis=1)
    return TopLabels(ids, scores)


def rows_of_true_columns(mask: Any) -> Ragged:
    """The label ids of each row of a matrix [queries, labels] of zeros and ones."""
    return Ragged.from_rows([np.flatnonzero(row) for row in mask])


def probabilities_of(
    votes: Votes,
    config: MemoryConfig,
    shape: tuple[int, int],
) -> Any:
    """The probabilities [B, L] of all pairs; those without votes are 0."""
    probability_BL = np.zeros(shape)
    probability_BL.ravel()[votes.pairs] = votes.share(config.weight)
    return probability_BL


@pytest.mark.parametrize("name", ["0.0", "0.3", "1.0"])
def test_probabilities_are_golden(name: str) -> None:
    vector = golden(f"rae_predict_lambda{name}")
    config = MemoryConfig(
        weight=float(vector["lambda_"]),
        keys=int(vector["b"]),
        temperature=float(vector["tau"]),
    )
    query_score_BN = vector["queries"] @ vector["memory_queries"].T
    label_score_BL = vector["queries"] @ vector["memory_labels"].T
    near = Neighbours(
        nearest(query_score_BN, config.keys),
        nearest(label_score_BL, config.keys),
    )
    positives = rows_of_true_columns(vector["memory_positives"])
    num_labels = len(vector["memory_labels"])

    votes = count_votes(near, positives, config, num_labels)

    expected = vector["probabilities"]
    found = probabilities_of(votes, config, expected.shape)
    assert_allclose(found, expected, rtol=1e-9, atol=1e-15)


@dataclasses.dataclass
class PlantedScores:
    """Scores of 9 queries full of ties, and positives of 60 training queries over 30 labels."""

    query_score_BN: Any
    label_score_BL: Any
    positive_NL: Any

    @property
    def near(self) -> Neighbours:
        return Neighbours(
            nearest(self.query_score_BN, 40),
            nearest(self.label_score_BL, 30),
        )

    @property
    def positives(self) -> Ragged:
        return rows_of_true_columns(self.positive_NL)

    def votes(
        self,
        config: MemoryConfig,
        exclude: Ragged | None = None,
    ) -> Votes:
        return count_votes(
            self.near,
            self.positives,
            config,
            30,
            exclude,
        )

    def ranked(
        self,
        config: MemoryConfig,
        width: int,
        exclude: Ragged | None = None,
    ) -> TopLabels:
        """The best labels of each query, by one count of the votes."""
        votes = self.votes(config, exclude)
        return rank_votes(
            votes,
            config.weight,
            width,
            self.near.labels,
            30,
        )


@pytest.fixture(scope="module")
def planted() -> PlantedScores:
    rng = np.random.default_rng(0)
    is_positive = rng.random((60, 30)) < 0.05
    # Some training queries carry all labels.
    has_all = rng.random((60, 1)) < 0.05
    positive_NL = is_positive | has_all
    return PlantedScores(
        query_score_BN=rng.integers(-4, 5, (9, 60)) / 4,
        label_score_BL=rng.integers(-4, 5, (9, 30)) / 4,
        positive_NL=positive_NL.astype(float),
    )


@pytest.mark.parametrize("config", SETTINGS)
def test_any_setting_equals_the_formula(planted: PlantedScores, config: MemoryConfig) -> None:
    label_score_BL = planted.label_score_BL
    expected = dense(
        planted.query_score_BN,
        label_score_BL,
        planted.positive_NL,
        config,
    )

    found = probabilities_of(planted.votes(config), config, expected.shape)
    top = planted.ranked(config, 30)

    assert_allclose(found, expected, rtol=1e-9, atol=1e-15)
    for row, probabilities in enumerate(found):
        num_voted = np.count_nonzero(probabilities)
        order = np.argsort(-probabilities.astype(np.float32), kind="stable")
        voted = order[probabilities[order] > 0]
        assert_array_equal(top.ids[row, :num_voted], voted)

        by_product = planted.near.labels.ids[row]
        rest = by_product[probabilities[by_product] == 0]
        assert_array_equal(
            top.ids[row, num_voted:],
            rest,
            "completed in order of inner product",
        )
        # 2 less, so that they are below every probability.
        assert_array_equal(
            top.scores[row, num_voted:],
            label_score_BL[row, rest] - 2,
        )


def test_a_sweep_equals_one_search_per_setting(
    planted: PlantedScores,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exclude = Ragged.from_rows([[row] for row in range(9)])
    expected = [planted.ranked(config, 5, exclude) for config in SETTINGS]
    num_counts = 0

    def counted(*args: Any, **kwargs: Any) -> Votes:
        nonlocal num_counts
        num_counts += 1
        return count_votes(*args, **kwargs)

    monkeypatch.setattr(voting, "count_votes", counted)
    results = list(
        sweep(
            planted.near,
            planted.positives,
            SETTINGS,
            5,
            30,
            exclude,
        )
    )

    assert [config for config, _ in results] == SETTINGS
    for (_, top), alone in zip(results, expected, strict=True):
        assert_array_equal(top.ids, alone.ids)
        assert_array_equal(top.scores, alone.scores)
    assert num_counts == len(SETTINGS) * 3 // 4, "0.3 and 0.5 share their votes"


def test_excluded_labels_get_no_votes(planted: PlantedScores) -> None:
    config = MemoryConfig(weight=0.5, keys=20)

    four = planted.ranked(config, 4)
    first_two = Ragged.from_rows([four.ids[row, :2] for row in range(9)])
    others = planted.ranked(config, 2, exclude=first_two)

    assert_array_equal(others.ids, four.ids[:, 2:])
    assert_array_equal(others.scores, four.scores[:, 2:])


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


def test_probabilities_that_are_equal_as_float32_are_ordered_by_label() -> None:
    """As a file of predictions has them, which must give the same answers."""
    votes = Votes(np.array([3, 7]), np.array([1 - 1e-9, 1.0]), np.zeros(2))
    top = rank_votes(votes, 1.0, 2, TopLabels.empty(1), 10)
    assert top.ids.tolist() == [[3, 7]]
    assert top.scores.tolist() == [[1.0, 1.0]]


def test_a_share_too_small_for_float32_is_ranked_by_its_inner_product() -> None:
    votes = Votes(np.array([2, 3, 7]), np.array([1.0, 1e-60, 1e-50]), np.zeros(3))
    nearest = TopLabels(np.array([[2, 7, 3]]), np.array([[0.9, 0.8, 0.7]], np.float32))
    top = rank_votes(votes, 1.0, 3, nearest, 10)
    assert top.ids.tolist() == [[2, 7, 3]]


def test_labels_without_votes_follow_even_if_their_vectors_are_long() -> None:
    # One query, five labels: label 3 has a small vote, all inner products are above 2.
    votes = Votes(
        pairs=np.array([3]),
        of_queries=np.array([0.1]),
        of_labels=np.array([0.0]),
    )
    ids = np.array([[4, 0, 3, 1]])
    products = np.array([[9.0, 7.0, 7.0, 5.0]], np.float32)

    top = rank_votes(
        votes,
        0.5,
        3,
        TopLabels(ids, products),
        5,
    )

    assert top.ids.tolist() == [[3, 4, 0]]
    expected = np.array([[0.05, 7.0, 5.0]], np.float32)
    assert_array_equal(top.scores, expected)
