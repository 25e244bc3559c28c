"""Whole evaluations of a small score matrix: chunks, intervals, tables, comparison."""

import dataclasses
import io
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dense_metrics import top_k
from rich.console import Console

from xmcray.errors import DataError
from xmcray.evaluation import table
from xmcray.evaluation.evaluate import (
    Evaluation,
    bootstrap_intervals,
    compare,
    compare_several,
    evaluate,
    holm,
)
from xmcray.evaluation.metrics import MAIN_METRICS, QueryValues
from xmcray.evaluation.slices import with_slices
from xmcray.types import Int64Array, Ragged, TopLabels

NUM_QUERIES = 120
NUM_LABELS = 150
GENERATOR = np.random.default_rng(5)
RELEVANT = GENERATOR.random((NUM_QUERIES, NUM_LABELS)) < 0.02
RELEVANT[7] = False
NOISE = GENERATOR.standard_normal((NUM_QUERIES, NUM_LABELS))
TRUTH = Ragged.from_rows([np.flatnonzero(row) for row in RELEVANT])
COUNTS = (2.0 ** GENERATOR.uniform(0, 11, NUM_LABELS)).astype(np.int64)
COUNTS[3] = 0
# Keywords of `evaluate` that most tests share.
CORPUS = {
    "num_queries": NUM_QUERIES,
    "train_counts": COUNTS,
    "num_train": 4000,
    "a": 0.6,
    "b": 2.6,
}


def searcher(strength: float, k: int = 100) -> Callable[[Int64Array], TopLabels]:
    scores = NOISE + strength * RELEVANT
    return lambda rows: top_k(scores[rows], k)


def run(strength: float, **options: Any) -> Evaluation:
    """An evaluation of answers that are the better the greater the strength."""
    arguments = {**CORPUS, "resamples": 200, **options}
    return evaluate(searcher(strength), TRUTH.take, **arguments)


def test_chunks_do_not_change_the_result() -> None:
    progress: list[int] = []
    whole = run(2.0)
    chunked = run(2.0, chunk=37, progress=progress.append)
    assert progress == [37, 74, 111, 120]
    assert chunked.metrics == pytest.approx(whole.metrics, rel=1e-12)
    assert chunked.intervals == whole.intervals


def test_a_query_without_positives_is_left_out() -> None:
    evaluation = run(2.0)
    assert 7 not in evaluation.query_ids
    assert evaluation.left_out == NUM_QUERIES - evaluation.queries
    assert evaluation.queries == len(evaluation.query_ids)


def test_intervals_hold_the_value_and_are_seeded() -> None:
    first = run(2.0)
    again = run(2.0)
    other_seed = run(2.0, seed=1)
    assert first.intervals == again.intervals
    assert first.intervals != other_seed.intervals
    assert list(first.intervals) == list(MAIN_METRICS)
    for name, (low, high) in first.intervals.items():
        assert low <= first.metrics[name] <= high, name


def test_the_interval_of_a_mean_is_that_of_its_standard_error() -> None:
    evaluation = run(2.0, resamples=2000)
    low, high = evaluation.intervals["P@1"]
    precision_Q = evaluation.per_query.gain_QM[:, 0]
    standard_error = precision_Q.std() / np.sqrt(evaluation.queries)
    # 95 % of a normal distribution lie within 1.96 standard deviations.
    assert high - low == pytest.approx(2 * 1.96 * standard_error, rel=0.1)


def test_intervals_of_many_queries_are_as_wide_and_cost_as_little() -> None:
    num_few = 1 << 15
    num_many = 20 * num_few
    hits_Q = (
        np.arange(num_many) < 0.3 * num_many
    )  # queries with equal answers lie next to each other
    gain_QM = np.repeat(hits_Q[:, None], len(MAIN_METRICS), axis=1).astype(np.float32)
    many = QueryValues(gain_QM, np.ones_like(gain_QM))
    few = QueryValues(many.gain_QM[::20], many.divisor_QM[::20])

    start = time.process_time()
    bootstrap_intervals(few, 400, 0)
    few_s = time.process_time() - start
    start = time.process_time()
    low, high = bootstrap_intervals(many, 400, 0)["P@1"]
    many_s = time.process_time() - start

    assert low < hits_Q.mean() < high
    # 95 % of a normal distribution lie within 1.96 standard deviations.
    assert high - low == pytest.approx(2 * 1.96 * hits_Q.std() / np.sqrt(num_many), rel=0.15)
    # Each query is read once, and not in each resample.
    assert many_s < 5 * few_s


def test_a_difference_of_many_queries_is_found_and_noise_is_not() -> None:
    queries = np.arange(40_000)
    ranks = GENERATOR.random(len(queries))

    def evaluation(hit_rate: float, shift: int) -> Evaluation:
        is_hit_Q = np.roll(ranks, shift) < hit_rate
        gain_QM = np.repeat(is_hit_Q[:, None], len(MAIN_METRICS), axis=1).astype(np.float32)
        values = dict.fromkeys(MAIN_METRICS, float(is_hit_Q.mean()))
        per_query = QueryValues(gain_QM, np.ones_like(gain_QM))
        return dataclasses.replace(
            run(1.0, resamples=0),
            metrics=values,
            queries=len(queries),
            query_ids=queries,
            per_query=per_query,
        )

    options: Any = {"resamples": 100, "permutations": 999}
    better = compare(evaluation(0.52, 0), evaluation(0.5, 1), **options)[0]
    assert better.p_value == 1 / 1000
    assert 0 < better.low < 0.02 < better.high
    same = compare(evaluation(0.5, 0), evaluation(0.5, 1), **options)[0]
    assert same.p_value == 1.0
    assert same.low < 0 < same.high


def test_segments_and_deciles_add_up_to_p_at_5() -> None:
    evaluation = run(2.0)
    for groups in (evaluation.segments, evaluation.deciles):
        assert sum(group["P@5"] for group in groups) == pytest.approx(evaluation.metrics["P@5"])
        assert sum(group["labels"] for group in groups) == NUM_LABELS
    names = [segment["name"] for segment in evaluation.segments]
    assert names == ["unseen", "tail", "torso", "head", "top"]
    for rarer, more_frequent in itertools.pairwise(evaluation.deciles):
        assert rarer["max_count"] <= more_frequent["min_count"]


def test_removed_labels_belong_to_no_group() -> None:
    removed = np.arange(0, NUM_LABELS, 3)
    truth = TRUTH.where(~np.isin(TRUTH.values, removed))
    scores = NOISE + 2.0 * RELEVANT
    scores[:, removed] = -np.inf
    evaluation = evaluate(
        lambda rows: top_k(scores[rows], 100),
        truth.take,
        **CORPUS,
        removed=removed,
        resamples=0,
    )
    for groups in (evaluation.segments, evaluation.deciles):
        assert sum(group["labels"] for group in groups) == NUM_LABELS - len(removed)
        assert sum(group["positives"] for group in groups) == len(truth.values)
        assert sum(group["P@5"] for group in groups) == pytest.approx(evaluation.metrics["P@5"])
    # Label 3, the only one without training queries, was removed.
    assert "unseen" not in [segment["name"] for segment in evaluation.segments]


def test_json_holds_the_promised_keys() -> None:
    text = json.dumps(run(2.0).to_json(), allow_nan=False)
    loaded = json.loads(text)
    assert {*MAIN_METRICS, "macroF1@5(0,10]", "queries", "left_out", "A", "B"} <= loaded.keys()
    assert loaded["A"] == 0.6
    assert loaded["B"] == 2.6


def test_index_recall_tells_index_error_from_model_error() -> None:
    exact = searcher(2.0)

    def lossy(rows: Int64Array) -> TopLabels:
        top = exact(rows)
        ids = top.ids.copy()
        ids[:, 9] = -1  # this index misses the tenth answer of every query
        return TopLabels(ids, top.scores)

    options: Any = {**CORPUS, "exact": exact, "exact_sample": 50, "resamples": 0}
    evaluation = evaluate(lossy, TRUTH.take, **options)

    assert evaluation.index_recall == {
        "queries": 50,
        "recall@1": 1.0,
        "recall@10": 0.9,
        "recall@100": 0.99,
    }
    assert evaluation.intervals == {}


def test_too_few_answers_are_refused() -> None:
    options: Any = {**CORPUS, "num_queries": 9}
    with pytest.raises(DataError, match="returned 10 answers per query, expected 100"):
        evaluate(searcher(2.0, k=10), TRUTH.take, **options)


def test_comparison_sees_a_difference() -> None:
    better = run(2.5)
    worse = run(1.5)
    for row in compare(better, worse):
        assert row.difference == pytest.approx(row.a - row.b)
        assert row.low <= row.difference <= row.high
        if row.metric in ("P@5", "PSP@5", "nDCG@5"):
            assert row.low > 0
            assert row.p_value < 0.01


def test_comparison_with_itself_sees_no_difference() -> None:
    evaluation = run(2.5)
    for row in compare(evaluation, evaluation):
        assert row.difference == row.low == row.high == 0
        assert row.p_value == 1


def answering_first(label: int) -> Evaluation:
    """Of three queries with positive 0, which all have a label as their first answer."""
    answers = np.roll(np.arange(5), -label)
    ids = np.tile(answers, (3, 1))
    top = TopLabels(ids, np.zeros(ids.shape, np.float32))
    return evaluate(
        lambda rows: top,
        lambda rows: Ragged.from_rows([[0], [0], [0]]),
        num_queries=3,
        train_counts=np.ones(5, np.int64),
        num_train=10,
        a=0.5,
        b=1.5,
        resamples=10,
    )


def test_sign_flip_equals_enumeration() -> None:
    row = compare(answering_first(0), answering_first(1), permutations=20_000)[0]
    assert row.metric == "P@1"
    assert row.difference == 1.0
    # Three queries in favour, none against: of 8 sign patterns two are as extreme, p = 1/4.
    assert row.p_value == pytest.approx(0.25, abs=0.02)


def test_sign_flip_sees_equal_sums_of_thirds() -> None:
    def of_hits(hits: list[int]) -> Evaluation:
        """Queries with three positives, so many of which are the first answers."""
        ids = np.array([[*range(count), *range(3, 8), *range(count, 3)] for count in hits])
        top = TopLabels(ids, np.zeros(ids.shape, np.float32))
        return evaluate(
            lambda rows: TopLabels(top.ids[rows], top.scores[rows]),
            lambda rows: Ragged.from_rows([[0, 1, 2]] * len(rows)),
            num_queries=len(hits),
            train_counts=np.ones(8, np.int64),
            num_train=10,
            a=0.5,
            b=1.5,
            resamples=10,
        )

    ours = of_hits([1, 3, 1, 1, 1, 1, 2, 2, 2])
    theirs = of_hits([0, 2, 0, 0, 0, 0, 1, 3, 3])
    by_metric = {row.metric: row for row in compare(ours, theirs, permutations=20_000)}
    # Seven thirds in favour, two against: of 512 sign patterns 92 are as extreme.
    assert by_metric["P@3"].p_value == pytest.approx(92 / 512, abs=0.01)


@pytest.mark.parametrize("changed", [{"num_queries": 100}, {"a": 0.55}])
def test_comparison_of_other_queries_or_propensities_is_refused(changed: dict[str, Any]) -> None:
    evaluation = run(2.0)
    other = run(2.0, **changed)
    with pytest.raises(DataError, match="expected the same queries"):
        compare(evaluation, other)


def test_tables_show_percent_interval_and_constants() -> None:
    evaluation = run(2.5)
    with_index = run(1.0, exact=searcher(1.0))
    numbers = evaluation.to_json()
    console = Console(file=io.StringIO(), width=160)

    console.print(table.metrics_table({"ours [bold]": numbers, "baseline": {"P@1": 0.25}}))
    console.print(table.segment_table(numbers))
    console.print(table.decile_table(numbers))
    console.print(table.index_table(with_index.to_json()))
    console.print(table.comparison_table(compare(evaluation, run(1.5)), "a", "b"))

    text = console.file.getvalue()  # type: ignore[attr-defined]
    low, high = evaluation.intervals["P@1"]
    assert f"{100 * evaluation.metrics['P@1']:.2f}  [{100 * low:.2f}, {100 * high:.2f}]" in text
    assert "A, B of PSP" in text
    assert "0.6, 2.6" in text
    assert "ours [bold]" in text
    assert "25.00" in text
    assert "macroF1@5(0,10]" in text
    assert "recall@100" in text
    assert "(100,1000]" in text


def test_p_values_of_several_tests_are_corrected_as_in_holms_paper() -> None:
    # Sorted: 0.01 * 4, 0.02 * 3, then 0.03 * 2 and 0.04 * 1, which may not be below 0.06.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]


def test_several_comparisons_correct_the_p_values_of_each_metric() -> None:
    first = run(2.0)
    others = [run(1.9), run(1.0), run(0.5)]

    corrected = compare_several(first, others)

    plain = [compare(first, other) for other in others]
    for rows, plain_rows in zip(corrected, plain, strict=True):
        assert [row.difference for row in rows] == [row.difference for row in plain_rows]
    for metric in range(len(plain[0])):
        p_values = [rows[metric].p_value for rows in plain]
        assert [rows[metric].p_value for rows in corrected] == holm(p_values)


def test_slices_have_the_metrics_of_their_queries_alone() -> None:
    whole = run(2.0)
    # The first queries have no language, and every third of the others is English.
    query_ids = whole.query_ids
    languages = np.where(query_ids % 3, "de", "en")
    attributes: list[dict[str, object]] = []
    for query, language in zip(query_ids.tolist(), languages.tolist(), strict=True):
        attributes.append({"language": language} if query > 20 else {})

    sliced = with_slices(whole, attributes, resamples=50)

    rows = {row["value"]: row for row in sliced.slices}
    assert list(rows) == ["de", "en", None]
    assert sum(row["queries"] for row in sliced.slices) == whole.queries
    is_german = (query_ids > 20) & (languages == "de")
    gain_M = whole.per_query.gain_QM[is_german].sum(0)
    divisor_M = whole.per_query.divisor_QM[is_german].sum(0)
    german = rows["de"]
    assert [german[name] for name in MAIN_METRICS] == pytest.approx((gain_M / divisor_M).tolist())
    low, high = german["intervals"]["P@5"]
    assert low <= german["P@5"] <= high
    assert whole.slices == []


def test_true_and_1_are_slices_of_their_own() -> None:
    whole = run(2.0)
    values = [True, 1, 1.0, "1"]
    attributes = [{"new": values[i % 4]} for i in range(whole.queries)]

    slices = with_slices(whole, attributes, resamples=50).slices

    sizes = [sum(own["new"] is value for own in attributes) for value in values]
    found = [(type(row["value"]), row["queries"]) for row in slices]
    assert found == [(str, sizes[3]), (int, sizes[1] + sizes[2]), (bool, sizes[0])]


def test_an_attribute_that_is_no_group_is_refused() -> None:
    whole = run(2.0)
    with pytest.raises(DataError, match=r"none of 1.. queries has an attribute"):
        with_slices(whole, [{}] * whole.queries)
    with pytest.raises(DataError, match=r"'price' has 1.. values, expected at most 100"):
        with_slices(whole, [{"price": i} for i in range(whole.queries)])
