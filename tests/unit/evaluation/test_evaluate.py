"""Whole evaluations of a small score matrix: chunks, intervals, tables, comparison."""

import io
import itertools
import json
from collections.abc import Callable

import numpy as np
import pytest
from dense_metrics import top_k
from rich.console import Console

from xmcray.errors import DataError
from xmcray.evaluation import table
from xmcray.evaluation.evaluate import Evaluation, compare, compare_several, evaluate, holm
from xmcray.evaluation.metrics import MAIN_METRICS
from xmcray.evaluation.slices import with_slices
from xmcray.types import Int64Array, Ragged, TopLabels

NUM_QUERIES, NUM_LABELS = 120, 150
GENERATOR = np.random.default_rng(5)
RELEVANT = GENERATOR.random((NUM_QUERIES, NUM_LABELS)) < 0.02
RELEVANT[7] = False
NOISE = GENERATOR.standard_normal((NUM_QUERIES, NUM_LABELS))
TRUTH = Ragged.from_rows([np.flatnonzero(row) for row in RELEVANT])
COUNTS = (2.0 ** GENERATOR.uniform(0, 11, NUM_LABELS)).astype(np.int64)
COUNTS[3] = 0


def searcher(strength: float, k: int = 100) -> Callable[[Int64Array], TopLabels]:
    scores = NOISE + strength * RELEVANT
    return lambda rows: top_k(scores[rows], k)


def run(strength: float, **options: object) -> Evaluation:
    arguments = {
        "num_queries": NUM_QUERIES,
        "train_counts": COUNTS,
        "num_train": 4000,
        "a": 0.6,
        "b": 2.6,
    }
    return evaluate(searcher(strength), TRUTH.take, **{**arguments, "resamples": 200, **options})  # type: ignore[arg-type]


def test_chunks_do_not_change_the_result() -> None:
    done: list[int] = []
    whole, chunked = run(2.0), run(2.0, chunk=37, progress=done.append)
    assert done == [37, 74, 111, 120]
    assert chunked.metrics == pytest.approx(whole.metrics, rel=1e-12)
    assert chunked.intervals == whole.intervals
    assert 7 not in whole.query_ids
    assert whole.left_out == NUM_QUERIES - whole.queries == NUM_QUERIES - len(whole.query_ids)


def test_intervals_hold_the_value_and_are_seeded() -> None:
    first, again, other = run(2.0), run(2.0), run(2.0, seed=1)
    assert first.intervals == again.intervals != other.intervals
    assert list(first.intervals) == list(MAIN_METRICS)
    for name, (low, high) in first.intervals.items():
        assert low <= first.metrics[name] <= high, name
    # A mean's interval is close to 1.96 standard errors.
    low, high = run(2.0, resamples=2000).intervals["P@1"]
    assert high - low == pytest.approx(
        2 * 1.96 * first.per_query.gain_QM[:, 0].std() / np.sqrt(first.queries), rel=0.1
    )


def test_segments_and_deciles_add_up_to_p_at_5() -> None:
    found = run(2.0)
    assert sum(row["P@5"] for row in found.segments) == pytest.approx(found.metrics["P@5"])
    assert sum(row["P@5"] for row in found.deciles) == pytest.approx(found.metrics["P@5"])
    assert [row["name"] for row in found.segments] == ["unseen", "tail", "torso", "head", "top"]
    assert (
        sum(row["labels"] for row in found.deciles)
        == sum(row["labels"] for row in found.segments)
        == NUM_LABELS
    )
    assert all(
        left["max_count"] <= right["min_count"] for left, right in itertools.pairwise(found.deciles)
    )


def test_json_holds_the_promised_keys() -> None:
    loaded = json.loads(json.dumps(run(2.0).to_json(), allow_nan=False))
    assert {*MAIN_METRICS, "macroF1@5(0,10]", "queries", "left_out", "A", "B"} <= loaded.keys()
    assert (loaded["A"], loaded["B"]) == (0.6, 2.6)


def test_index_recall_tells_index_error_from_model_error() -> None:
    def lossy(rows: Int64Array) -> TopLabels:
        top = searcher(2.0)(rows)
        ids = top.ids.copy()
        ids[:, 9] = -1  # this index misses the tenth answer of every query
        return TopLabels(ids, top.scores)

    options = {
        "num_queries": NUM_QUERIES,
        "train_counts": COUNTS,
        "num_train": 4000,
        "a": 0.6,
        "b": 2.6,
    }
    found = evaluate(
        lossy, TRUTH.take, exact=searcher(2.0), exact_sample=50, resamples=0, **options
    )  # type: ignore[arg-type]
    assert found.index_recall == {
        "queries": 50,
        "recall@1": 1.0,
        "recall@10": 0.9,
        "recall@100": 0.99,
    }
    assert found.intervals == {}


def test_too_few_answers_are_refused() -> None:
    with pytest.raises(DataError, match="returned 10 answers per query, expected 100"):
        evaluate(
            searcher(2.0, k=10),
            TRUTH.take,
            num_queries=9,
            train_counts=COUNTS,
            num_train=4000,
            a=0.6,
            b=2.6,
        )


def test_comparison_sees_a_difference_and_none() -> None:
    better, worse = run(2.5), run(1.5)
    for row in compare(better, worse):
        assert row.difference == pytest.approx(row.a - row.b)
        assert row.low <= row.difference <= row.high
        if row.metric in ("P@5", "PSP@5", "nDCG@5"):
            assert row.low > 0
            assert row.p_value < 0.01
    for row in compare(better, better):
        assert (row.difference, row.low, row.high, row.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_sign_flip_equals_enumeration() -> None:
    # Three queries in favour, none against: of 8 sign patterns two are as extreme, p = 1/4.
    def answering_first(label: int) -> Evaluation:
        ids = np.tile(np.roll(np.arange(5), -label), (3, 1))
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

    row = compare(answering_first(0), answering_first(1), permutations=20_000)[0]
    assert (row.metric, row.difference) == ("P@1", 1.0)
    assert row.p_value == pytest.approx(0.25, abs=0.02)


def test_comparison_of_other_queries_is_refused() -> None:
    with pytest.raises(DataError, match="expected the same queries"):
        compare(run(2.0), run(2.0, num_queries=100))
    with pytest.raises(DataError, match="expected the same queries"):
        compare(run(2.0), run(2.0, a=0.55))


def test_tables_show_percent_interval_and_constants() -> None:
    found, other = run(2.5), run(1.5)
    numbers = found.to_json()
    console = Console(file=io.StringIO(), width=160)
    console.print(table.metrics_table({"ours [bold]": numbers, "baseline": {"P@1": 0.25}}))
    for shown in (
        table.segment_table(numbers),
        table.decile_table(numbers),
        table.index_table(run(1.0, exact=searcher(1.0)).to_json()),
    ):
        console.print(shown)
    console.print(table.comparison_table(compare(found, other), "a", "b"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    low, high = found.intervals["P@1"]
    assert f"{100 * found.metrics['P@1']:.2f}  [{100 * low:.2f}, {100 * high:.2f}]" in text
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
    first, others = run(2.0), [run(1.9), run(1.0), run(0.5)]
    corrected = compare_several(first, others)
    plain = [compare(first, other) for other in others]
    for rows, own_rows in zip(corrected, plain, strict=True):
        assert [row.difference for row in rows] == [row.difference for row in own_rows]
    for column, own_column in zip(
        zip(*corrected, strict=True), zip(*plain, strict=True), strict=True
    ):
        assert [row.p_value for row in column] == holm([row.p_value for row in own_column])


def test_slices_have_the_metrics_of_their_queries_alone() -> None:
    whole = run(2.0)
    attributes: list[dict[str, object]] = [{} for _ in range(whole.queries)]
    for place, query in enumerate(whole.query_ids.tolist()):
        if query > 20:
            attributes[place]["language"] = "de" if query % 3 else "en"
    sliced = with_slices(whole, attributes, resamples=50)
    rows = {row["value"]: row for row in sliced.slices}
    assert list(rows) == ["de", "en", None]
    assert sum(row["queries"] for row in sliced.slices) == whole.queries
    members = np.array([own.get("language") == "de" for own in attributes])
    gains = whole.per_query.gain_QM[members].sum(0) / whole.per_query.divisor_QM[members].sum(0)
    assert [rows["de"][name] for name in MAIN_METRICS] == pytest.approx(gains.tolist())
    low, high = rows["de"]["intervals"]["P@5"]
    assert low <= rows["de"]["P@5"] <= high
    assert whole.slices == []


def test_an_attribute_that_is_no_group_is_refused() -> None:
    whole = run(2.0)
    with pytest.raises(DataError, match=r"none of 1.. queries has an attribute"):
        with_slices(whole, [{}] * whole.queries)
    with pytest.raises(DataError, match=r"'price' has 1.. values, expected at most 100"):
        with_slices(whole, [{"price": i} for i in range(whole.queries)])
