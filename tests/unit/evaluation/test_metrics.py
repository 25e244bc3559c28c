"""Metrics by hand and their bounds."""

import numpy as np
import pytest
from dense_metrics import top_k
from hypothesis import given, settings
from hypothesis import strategies as st

from xmcray.errors import DataError
from xmcray.evaluation.metrics import Metrics, inverse_propensity
from xmcray.types import Ragged, TopLabels

# The constants of Jain et al. that most data sets use.
A = 0.55
B = 1.5


def answers(*rows: list[int]) -> TopLabels:
    """Answers with these label ids; -1 is padding."""
    ids = np.array(rows, np.int64)
    scores = np.where(ids < 0, -np.inf, 1.0)
    return TopLabels(ids, scores.astype(np.float32))


def metrics_of(counts: np.ndarray, num_train: int) -> Metrics:
    """Empty metrics over as many labels as there are training counts."""
    return Metrics(
        counts,
        num_train=num_train,
        a=A,
        b=B,
        num_labels=len(counts),
    )


def measure(top: TopLabels, truth: Ragged) -> Metrics:
    """Metrics of one chunk of queries over six labels, of which label 0 is the rarest."""
    metrics = metrics_of(np.arange(1, 7), num_train=100)
    metrics.update(top, truth)
    return metrics


def rows_of_true_columns(relevant: np.ndarray) -> Ragged:
    """The label ids of each row of a boolean matrix [queries, labels]."""
    return Ragged.from_rows([np.flatnonzero(row) for row in relevant])


def test_values_derived_by_hand() -> None:
    # Query 0: a hit at rank 2; it has two positives.
    # Query 1: hits at ranks 1 and 3; it has three positives.
    top = answers(
        [0, 1, 2],
        [3, 0, 4],
    )
    truth = Ragged.from_rows([[1, 5], [2, 3, 4]])

    result = measure(top, truth).result()

    # Discounts of ranks 2 and 3; that of rank 1 is 1.
    second = 1 / np.log2(3)
    third = 1 / 2
    ideal_0 = 1 + second
    ideal_1 = 1 + second + third
    # These metrics are means of the values of query 0 and of query 1.
    value_per_query = {
        "P@3": [1 / 3, 2 / 3],
        "P@5": [1 / 5, 2 / 5],
        "R@3": [1 / 2, 2 / 3],
        "nDCG@3": [second / ideal_0, (1 + third) / ideal_1],
        "MRR@10": [1 / 2, 1],
    }
    assert result["P@1"] == 0.5
    for name, values in value_per_query.items():
        assert result[name] == pytest.approx(np.mean(values)), name

    # For the others sums first, then the quotient.
    # The rarest labels weigh most: w1 > w5, and w2 > w3 > w4.
    _, w1, w2, w3, w4, w5 = inverse_propensity(np.arange(1, 7), 100, A, B)
    assert result["PSP@1"] == pytest.approx(w3 / (w1 + w2))

    gain = w1 + w3 + w4
    best = w1 + w5 + w2 + w3 + w4
    assert result["PSP@3"] == pytest.approx(gain / best)

    gain_0 = w1 * second
    gain_1 = w3 + w4 * third
    best_0 = w1 + w5 * second
    best_1 = w2 + w3 * second + w4 * third
    gain = gain_0 / ideal_0 + gain_1 / ideal_1
    best = best_0 / ideal_0 + best_1 / ideal_1
    assert result["PSnDCG@3"] == pytest.approx(gain / best)

    # Of six labels all but the last are among the answers.
    assert result["coverage@5"] == pytest.approx(5 / 6)


def test_coverage_is_of_the_labels_that_were_not_removed() -> None:
    counts = np.arange(1, 7)
    metrics = Metrics(counts, num_train=100, a=A, b=B, num_labels=6, removed=np.array([2, 4]))
    metrics.update(answers([0, 1], [0, 3]), Ragged.from_rows([[0], [3]]))
    # Of labels 0, 1, 3 and 5 the first three are answers.
    assert metrics.result()["coverage@5"] == 3 / 4
    assert metrics.segment(0, 10).tolist() == [True, True, False, True, False, True]


def test_a_query_without_a_hit_has_no_reciprocal_rank() -> None:
    top = answers([0, 1], [2, -1])
    truth = Ragged.from_rows([[5], [3]])

    assert measure(top, truth).result()["MRR@10"] == 0.0


def test_macro_f1_averages_labels_that_have_a_positive() -> None:
    metrics = metrics_of(np.array([5, 10, 11, 2000]), num_train=3000)
    top = answers([0, 2], [0, 3])
    truth = Ragged.from_rows([[0, 1], [3]])

    metrics.update(top, truth)
    result = metrics.result()

    # Label 0 was answered twice, once rightly. Label 1 was missed.
    f1_of_label_0 = 2 / 3
    f1_of_label_1 = 0
    assert result["macroF1@5(0,10]"] == pytest.approx((f1_of_label_0 + f1_of_label_1) / 2)
    # Label 2 was answered but is a positive of no query.
    assert "macroF1@5(10,100]" not in result
    assert result["macroF1@5(1000,inf)"] == 1.0


def test_propensity_uses_counts_and_constants() -> None:
    counts = np.array([0, 7])
    a = 0.6
    b = 2.6

    weights = inverse_propensity(counts, 1000, a, b)

    # C of the paper's equation 7.
    scale = (np.log(1000) - 1) * (b + 1) ** a
    decay = np.exp(-a * np.log(counts + b))
    np.testing.assert_allclose(weights, 1 + scale * decay)


def test_queries_without_a_positive_are_left_out_and_counted() -> None:
    top = answers([0], [1], [2])
    truth = Ragged.from_rows([[0], [], [3]])

    metrics = measure(top, truth)

    assert metrics.queries == 2
    assert metrics.left_out == 1
    assert metrics.result()["P@1"] == 0.5


def test_nothing_to_measure_is_an_error() -> None:
    top = answers([0], [1])
    truth = Ragged.empty(2)
    metrics = measure(top, truth)

    with pytest.raises(DataError, match="none of 2 queries"):
        metrics.result()


def test_short_lists_are_padded_not_counted_as_answers() -> None:
    # -1 would read the last label: it must be neither a hit nor an answer of label 5.
    top = answers([0, -1, -1])
    truth = Ragged.from_rows([[0, 5]])

    metrics = measure(top, truth)

    result = metrics.result()
    assert result["P@1"] == 1.0
    assert result["P@5"] == 0.2
    assert result["R@100"] == 0.5
    assert metrics.answered.tolist() == [1, 0, 0, 0, 0, 0]


def test_no_answers_at_all() -> None:
    top = answers([-1], [-1])
    truth = Ragged.from_rows([[0], [1]])

    assert measure(top, truth).result()["PSP@5"] == 0.0


def test_foreign_label_ids_are_refused() -> None:
    one_query = Ragged.from_rows([[0]])
    with pytest.raises(DataError, match="label 6, expected less than 6"):
        measure(answers([6]), one_query)

    two_queries = Ragged.from_rows([[0], [1]])
    with pytest.raises(DataError, match="answers of 1 queries, expected 2"):
        measure(answers([0]), two_queries)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_queries=st.integers(1, 12),
    num_labels=st.integers(1, 30),
)
def test_bounds_and_order(
    seed: int,
    num_queries: int,
    num_labels: int,
) -> None:
    rng = np.random.default_rng(seed)
    relevant = rng.random((num_queries, num_labels)) < 0.3
    # Few different scores, so that there are ties.
    score_BL = rng.integers(0, 4, (num_queries, num_labels)).astype(float)
    counts = rng.integers(0, 2000, num_labels)
    metrics = metrics_of(counts, num_train=5000)

    measured = metrics.update(
        top_k(score_BL, 20),
        rows_of_true_columns(relevant),
    )

    if not measured.any():
        return
    result = metrics.result()
    for name, value in result.items():
        assert 0 <= value <= 1 + 1e-12, (name, result)

    # With one answer there is nothing to discount.
    assert result["P@1"] == pytest.approx(result["nDCG@1"])
    assert result["PSP@1"] == pytest.approx(result["PSnDCG@1"])

    recalls = [
        result["R@1"],
        result["R@3"],
        result["R@5"],
        result["R@10"],
        result["R@100"],
    ]
    assert recalls == sorted(recalls)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_perfect_ranking_reaches_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    relevant = rng.random((8, 20)) < 0.4
    # Every query has a positive.
    relevant[:, 0] = True
    counts = np.arange(20) * 7
    metrics = metrics_of(counts, num_train=500)

    # Rarer positives first: the best ranking for the propensity-scored metrics as well.
    score_BL = relevant * (1000.0 - counts)
    metrics.update(
        top_k(score_BL, 20),
        rows_of_true_columns(relevant),
    )

    result = metrics.result()
    names = [
        "nDCG@3",
        "nDCG@5",
        "PSP@1",
        "PSP@5",
        "PSnDCG@5",
        "R@100",
    ]
    for name in names:
        assert result[name] == pytest.approx(1.0), name
