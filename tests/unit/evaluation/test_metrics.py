"""Metrics by hand and their bounds."""

import numpy as np
import pytest
from dense_metrics import top_k
from hypothesis import given, settings
from hypothesis import strategies as st

from xmcray.errors import DataError
from xmcray.evaluation.metrics import Metrics, inverse_propensity
from xmcray.types import Ragged, TopLabels


def answers(*rows: list[int]) -> TopLabels:
    ids = np.array(rows, np.int64)
    return TopLabels(ids, np.where(ids < 0, -np.inf, 1.0).astype(np.float32))


def measure(top: TopLabels, truth: Ragged, num_labels: int = 6) -> Metrics:
    metrics = Metrics(np.arange(1, num_labels + 1), 100, 0.55, 1.5, num_labels)
    metrics.update(top, truth)
    return metrics


def test_values_derived_by_hand() -> None:
    # Query 0: hit at rank 2 of two positives; query 1: hits at ranks 1 and 3 of three.
    metrics = measure(answers([0, 1, 2], [3, 0, 4]), Ragged.from_rows([[1, 5], [2, 3, 4]]))
    found = metrics.result()
    assert found["P@1"] == 0.5
    assert found["P@3"] == pytest.approx((1 / 3 + 2 / 3) / 2)
    assert found["P@5"] == pytest.approx((1 / 5 + 2 / 5) / 2)
    assert found["R@3"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    second, third = 1 / np.log2(3), 1 / 2
    dcg, ideal = (second, 1 + third), (1 + second, 1 + second + third)
    assert found["nDCG@3"] == pytest.approx((dcg[0] / ideal[0] + dcg[1] / ideal[1]) / 2)
    w = inverse_propensity(np.arange(1, 7), 100, 0.55, 1.5)
    # Sums first, then the quotient. The rarest labels weigh most: w[1] > w[5], w[2] > w[3] > w[4].
    assert found["PSP@1"] == pytest.approx(w[3] / (w[1] + w[2]))
    assert found["PSP@3"] == pytest.approx(
        (w[1] + w[3] + w[4]) / (w[1] + w[5] + w[2] + w[3] + w[4])
    )
    gain = w[1] * second / ideal[0] + (w[3] + w[4] * third) / ideal[1]
    best = (w[1] + w[5] * second) / ideal[0] + (w[2] + w[3] * second + w[4] * third) / ideal[1]
    assert found["PSnDCG@3"] == pytest.approx(gain / best)
    assert found["MRR@10"] == pytest.approx((1 / 2 + 1) / 2)
    # Of six labels all but the last are among the answers.
    assert found["coverage@5"] == pytest.approx(5 / 6)


def test_a_query_without_a_hit_has_no_reciprocal_rank() -> None:
    found = measure(answers([0, 1], [2, -1]), Ragged.from_rows([[5], [3]])).result()
    assert found["MRR@10"] == 0.0


def test_macro_f1_averages_labels_that_have_a_positive() -> None:
    metrics = Metrics(np.array([5, 10, 11, 2000]), 3000, 0.55, 1.5, 4)
    metrics.update(answers([0, 2], [0, 3]), Ragged.from_rows([[0, 1], [3]]))
    found = metrics.result()
    assert found["macroF1@5(0,10]"] == pytest.approx(
        (2 / 3 + 0) / 2
    )  # label 0: one right of two; label 1: missed
    assert "macroF1@5(10,100]" not in found  # label 2 was answered but is nobody's positive
    assert found["macroF1@5(1000,inf)"] == 1.0


def test_propensity_uses_counts_and_constants() -> None:
    scale = (np.log(1000) - 1) * 3.6**0.6
    expected = 1 + scale * np.exp(-0.6 * np.log(np.array([0, 7]) + 2.6))
    np.testing.assert_allclose(inverse_propensity(np.array([0, 7]), 1000, 0.6, 2.6), expected)


def test_queries_without_a_positive_are_left_out_and_counted() -> None:
    metrics = measure(answers([0], [1], [2]), Ragged.from_rows([[0], [], [3]]))
    assert (metrics.queries, metrics.left_out, metrics.result()["P@1"]) == (2, 1, 0.5)


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(DataError, match="none of 2 queries"):
        measure(answers([0], [1]), Ragged.empty(2)).result()


def test_short_lists_are_padded_not_counted_as_answers() -> None:
    # -1 would read the last label: it must be neither a hit nor an answer of label 5.
    metrics = measure(answers([0, -1, -1]), Ragged.from_rows([[0, 5]]))
    found = metrics.result()
    assert (found["P@1"], found["P@5"], found["R@100"]) == (1.0, 0.2, 0.5)
    assert metrics.answered.tolist() == [1, 0, 0, 0, 0, 0]


def test_no_answers_at_all() -> None:
    assert measure(answers([-1], [-1]), Ragged.from_rows([[0], [1]])).result()["PSP@5"] == 0.0


def test_foreign_label_ids_are_refused() -> None:
    with pytest.raises(DataError, match="label 6, expected less than 6"):
        measure(answers([6]), Ragged.from_rows([[0]]))
    with pytest.raises(DataError, match="answers of 1 queries, expected 2"):
        measure(answers([0]), Ragged.from_rows([[0], [1]]))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 30))
def test_bounds_and_order(seed: int, num_queries: int, num_labels: int) -> None:
    generator = np.random.default_rng(seed)
    truth = Ragged.from_rows(
        [np.flatnonzero(row) for row in generator.random((num_queries, num_labels)) < 0.3]
    )
    top = top_k(generator.integers(0, 4, (num_queries, num_labels)).astype(float), 20)
    metrics = Metrics(generator.integers(0, 2000, num_labels), 5000, 0.55, 1.5, num_labels)
    counted = metrics.update(top, truth)
    if not counted.any():
        return
    found = metrics.result()
    assert all(0 <= value <= 1 + 1e-12 for value in found.values()), found
    assert found["P@1"] == pytest.approx(found["nDCG@1"])
    assert found["PSP@1"] == pytest.approx(found["PSnDCG@1"])
    recalls = [found[f"R@{k}"] for k in (1, 3, 5, 10, 100)]
    assert recalls == sorted(recalls)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_perfect_ranking_reaches_one(seed: int) -> None:
    relevant = np.random.default_rng(seed).random((8, 20)) < 0.4
    relevant[:, 0] = True
    counts = np.arange(20) * 7
    metrics = Metrics(counts, 500, 0.55, 1.5, 20)
    # Rarer positives first: the best ranking for the propensity-scored metrics as well.
    metrics.update(
        top_k(relevant * (1000.0 - counts), 20),
        Ragged.from_rows([np.flatnonzero(r) for r in relevant]),
    )
    found = metrics.result()
    for name in ("nDCG@3", "nDCG@5", "PSP@1", "PSP@5", "PSnDCG@5", "R@100"):
        assert found[name] == pytest.approx(1.0), name
