"""Measures a search over a split, with intervals, and compares two such measurements.

`evaluate` accepts anything that returns `TopLabels`, so what is measured is what is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xmcray import draws
from xmcray.errors import DataError
from xmcray.evaluation.metrics import (
    F1_CUTOFF,
    MAIN_METRICS,
    SEGMENTS,
    GradedNdcg,
    Metrics,
    QueryValues,
    segment_range,
)
from xmcray.evaluation.reliability import Reliability
from xmcray.types import BoolArray, Float64Array, Int64Array, Ragged, TopLabels, spans

SEARCH_K = 100  # answers per query (R@100), clipped to the number of labels
_INTERVAL = [0.025, 0.975]  # quantiles that leave 5 % out
_FLIP_VALUES = 1 << 22  # random signs drawn at once
# Of more queries than this, as many random groups are resampled: 1000 resamples of 10^6 queries
# would take most of a minute. Which queries share a group changes the width of an interval by
# 1 / sqrt(2 * 2^15) = 0.4 %; the chance of 1000 resamples changes an end by about 4 %.
_MAX_RESAMPLED = 1 << 15
# Functions of rows of the split, int64 [B].
Search = Callable[[Int64Array], TopLabels]
Truth = Callable[[Int64Array], Ragged]
Grades = Callable[[Int64Array], Float64Array]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The measurements of one retriever on one split.

    Attributes:
        metrics: every metric as a fraction, by its key in metrics.json.
        queries: queries that counted.
        left_out: queries without a positive left.
        a: the propensity constant A behind every PSP.
        b: the propensity constant B.
        intervals: [low, high] of the 95 % bootstrap interval of each main metric.
        segments: labels, positives, recall, macro-F1 and share of P@5 of each frequency segment.
        deciles: ten equal groups of labels from rare to frequent, and the share of P@5 of each.
        index_recall: answers of the index against exact search on a sample of queries, or None.
        calibration: how right the probabilities of the answers are (reliability.py), or None.
        query_ids: int64 [queries], rows of the split that counted.
        per_query: the contributions of those queries to the main metrics.
        slices: main metrics of the queries with each value of an attribute (slices.py).
    """

    metrics: dict[str, float]
    queries: int
    left_out: int
    a: float
    b: float
    intervals: dict[str, list[float]]
    segments: list[dict[str, Any]]
    deciles: list[dict[str, Any]]
    index_recall: dict[str, float] | None
    calibration: dict[str, Any] | None
    query_ids: Int64Array = field(repr=False)
    per_query: QueryValues = field(repr=False)
    slices: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The content of metrics.json, which has no values per query."""
        content = {
            **self.metrics,
            "queries": self.queries,
            "left_out": self.left_out,
            "A": self.a,
            "B": self.b,
            "intervals": self.intervals,
            "segments": self.segments,
            "deciles": self.deciles,
            "index_recall": self.index_recall,
        }
        if self.calibration is not None:
            content["calibration"] = self.calibration
        if self.slices:
            content["slices"] = self.slices
        return content


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One metric of run `a` against run `b` on the same queries.

    Attributes:
        metric: its key in metrics.json.
        a: value of run `a`.
        b: value of run `b`.
        difference: a - b.
        low: lower end of the difference's 95 % interval by paired bootstrap over queries.
        high: upper end.
        p_value: two-sided sign-flip permutation test of "no difference".
    """

    metric: str
    a: float
    b: float
    difference: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True, slots=True)
class _Sums:
    """Running sums over all queries: of metrics, reliability, and graded nDCG."""

    metrics: Metrics
    reliability: Reliability
    graded: GradedNdcg

    def add(self, answers: TopLabels, positives: Ragged, grades: Float64Array | None) -> BoolArray:
        """Adds the answers to B queries; returns bool [B], which of them count.

        Raises:
            DataError: there are too few answers per query.
        """
        expected = min(SEARCH_K, self.metrics.num_labels)
        if answers.width < expected:
            raise DataError(
                f"the search returned {answers.width} answers per query, expected {expected}; raise its k"
            )
        is_counted = self.metrics.update(answers, positives)
        self.reliability.update(answers, positives)
        if grades is not None:
            self.graded.update(answers, positives, grades)
        return is_counted


def evaluate(
    search: Search,
    truth: Truth,
    *,
    num_queries: int,
    train_counts: Int64Array,
    num_train: int,
    a: float,
    b: float,
    chunk: int = 1024,
    progress: Callable[[int], None] | None = None,
    exact: Search | None = None,
    exact_sample: int = 1000,
    grades: Grades | None = None,
    removed: Int64Array | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> Evaluation:
    """Searches all queries of a split, chunk by chunk, and measures the answers.

    Args:
        search: rows of the split (int64 [B]) -> the best min(100, L) labels, with filter pairs
            masked before the top k.
        truth: rows -> positives (source ids) without filter pairs.
        num_queries: rows of the split.
        train_counts: int64 [L], training queries per label (source ids, without label texts).
        num_train: N.
        a: propensity constant A of the corpus.
        b: propensity constant B.
        chunk: queries per call of `search`.
        progress: called with the number of queries done after each chunk.
        exact: an exhaustive search with the same signature. If given, the index's own error is
            measured on a sample.
        exact_sample: queries of that sample (seeded).
        grades: rows -> relevance of each positive that `truth` returns. If given, nDCG is measured
            with graded gains too.
        removed: int64, source ids of labels that are no answers any more.
        resamples: number of resamples of the bootstrap; 0 leaves the intervals out.
        seed: seed of the bootstrap and of the sample.
    Raises:
        DataError: no query has a positive, or the answers do not fit the corpus.
    """
    num_labels = len(train_counts)
    metrics = Metrics(train_counts, num_train, a, b, num_labels, removed)
    sums = _Sums(metrics, Reliability(num_labels), GradedNdcg())
    query_ids = []
    for span in spans(num_queries, chunk):
        rows = np.arange(span.start, span.stop)
        answers = search(rows)
        positive_grades = None if grades is None else grades(rows)
        is_counted = sums.add(answers, truth(rows), positive_grades)
        query_ids.append(rows[is_counted])
        if progress is not None:
            progress(span.stop)
    values = {**metrics.result(), **sums.graded.result()}
    per_query = metrics.per_query()
    return Evaluation(
        metrics=values,
        queries=metrics.queries,
        left_out=metrics.left_out,
        a=a,
        b=b,
        intervals=bootstrap_intervals(per_query, resamples, seed) if resamples else {},
        segments=_segments(metrics, values),
        deciles=_deciles(metrics),
        index_recall=_index_recall(search, exact, num_queries, exact_sample, seed, chunk),
        calibration=sums.reliability.result(),
        query_ids=np.concatenate(query_ids),
        per_query=per_query,
    )


def compare(
    a: Evaluation,
    b: Evaluation,
    *,
    resamples: int = 1000,
    permutations: int = 4999,
    seed: int = 0,
) -> list[ComparisonRow]:
    """Paired test of two evaluations of the same queries, one row per main metric.

    The interval resamples queries, both runs alike. The p-value exchanges the runs' answers query
    by query. For PSP and PSnDCG the divisor depends on the truth alone, so flipping the sign of the
    numerators' difference is that exchange. Of more than 2^15 queries, random groups are resampled
    and exchanged instead of single ones.

    Raises:
        DataError: the evaluations are of other queries or other propensities.
    """
    same_queries = np.array_equal(a.query_ids, b.query_ids)
    same_constants = (a.a, a.b) == (b.a, b.b)
    if not same_queries or not same_constants:
        raise DataError(
            f"found {a.queries} and {b.queries} queries with propensity A, B = {a.a}, {a.b} and {b.a}, {b.b}, "
            "expected the same queries and constants; evaluate both on one corpus and split"
        )
    query_difference_QM = a.per_query.gain_QM - b.per_query.gain_QM
    # Both runs have the same divisors, because those depend on the truth alone.
    difference_QM, divisor_QM = _in_groups(query_difference_QM, a.per_query.divisor_QM, seed)
    intervals = _bootstrap(difference_QM, divisor_QM, resamples, seed)
    p_values = sign_flip(difference_QM, permutations, seed)
    rows = []
    for name, (low, high), p_value in zip(MAIN_METRICS, intervals, p_values, strict=True):
        value_a = a.metrics[name]
        value_b = b.metrics[name]
        row = ComparisonRow(
            name,
            value_a,
            value_b,
            value_a - value_b,
            low,
            high,
            float(p_value),
        )
        rows.append(row)
    return rows


def compare_several(
    a: Evaluation, others: Sequence[Evaluation], **options: Any
) -> list[list[ComparisonRow]]:
    """Compares one evaluation with several, as `compare` does with each.

    The p-values of a metric are corrected for the number of comparisons (Holm, 1979): the chance
    that any of them is below 5 % by accident is at most 5 %.

    Args:
        a: the evaluation that is compared.
        others: the evaluations that it is compared with.
        options: keyword arguments of `compare`.
    Raises:
        DataError: as `compare`.
    """
    comparisons = [compare(a, other, **options) for other in others]
    for metric in range(len(MAIN_METRICS)):
        p_values = holm([rows[metric].p_value for rows in comparisons])
        for rows, p_value in zip(comparisons, p_values, strict=True):
            rows[metric] = replace(rows[metric], p_value=p_value)
    return comparisons


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of several tests, corrected so that together they err as often as one.

    Source: Holm, "A Simple Sequentially Rejective Multiple Test Procedure" (1979).
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    num_left = len(p_values)
    # The smallest is multiplied by the number of tests, the next one by one less, and so on.
    for place in np.argsort(p_values, kind="stable").tolist():
        product = min(1.0, num_left * p_values[place])
        # No p-value becomes smaller than those before it.
        largest = max(largest, product)
        corrected[place] = largest
        num_left -= 1
    return corrected


def _in_groups(
    gain_QM: Float64Array,
    divisor_QM: Float64Array,
    seed: int,
) -> tuple[Float64Array, Float64Array]:
    """Gains and divisors by query; by random group if there are more than _MAX_RESAMPLED queries.

    Queries are independent, so sums of random groups vary as much as the queries in them do.
    """
    num_queries = len(gain_QM)
    if num_queries <= _MAX_RESAMPLED:
        return gain_QM, divisor_QM
    # Neighbours may be alike, so the groups are random. Their sizes differ by one at most.
    order = draws.generator(seed, "resampled groups").permutation(num_queries)
    starts = np.arange(_MAX_RESAMPLED) * num_queries // _MAX_RESAMPLED

    def sums_of_groups(value_QM: Float64Array) -> Float64Array:
        sums: Float64Array = np.add.reduceat(value_QM[order], starts, axis=0)
        return sums

    return sums_of_groups(gain_QM), sums_of_groups(divisor_QM)


def _bootstrap(
    gain_QM: Float64Array,
    divisor_QM: Float64Array,
    resamples: int,
    seed: int,
) -> list[list[float]]:
    """The 95 % interval of sum(gain) / sum(divisor) over rows drawn with replacement.

    Returns:
        [low, high] of each metric.
    """
    generator = np.random.default_rng(seed)
    num_rows, num_metrics = gain_QM.shape
    # Numerators and divisors are drawn together.
    both_QM = np.hstack([gain_QM, divisor_QM])
    sums = np.empty((resamples, 2 * num_metrics))
    for i in range(resamples):
        # Drawing a row twice adds it twice: one product with the counts sums all columns.
        drawn = generator.integers(num_rows, size=num_rows)
        times = np.bincount(drawn, minlength=num_rows)
        sums[i] = times.astype(np.float64) @ both_QM
    ratios = sums[:, :num_metrics] / sums[:, num_metrics:]
    intervals: list[list[float]] = np.quantile(ratios, _INTERVAL, axis=0).T.tolist()
    return intervals


def bootstrap_intervals(
    per_query: QueryValues, resamples: int, seed: int
) -> dict[str, list[float]]:
    """[low, high] of the 95 % interval of each main metric, by bootstrap over queries.

    More than 2^15 queries are drawn in random groups.
    """
    gain_QM, divisor_QM = _in_groups(per_query.gain_QM, per_query.divisor_QM, seed)
    intervals = _bootstrap(gain_QM, divisor_QM, resamples, seed)
    return dict(zip(MAIN_METRICS, intervals, strict=True))


def sign_flip(difference_QM: Float64Array, permutations: int, seed: int) -> Float64Array:
    """Two-sided paired permutation test of "no difference".

    Args:
        difference_QM: float64 [queries, M], gains of the first run minus those of the second.
        permutations: number of random sign changes; the observed signs count as one more.
        seed: seed of the signs.
    Returns:
        float64 [M]: share of the sign changes whose sum is at least as far from zero as the
        observed one.
    """
    observed = np.abs(difference_QM.sum(0))
    # Equal sums in another order of addition differ in their last digits and must count as equal.
    threshold = observed - 1e-9 * (1.0 + observed)
    # Queries without any difference change no sum.
    differs = (difference_QM != 0).any(axis=1)
    different_QM = difference_QM[differs]
    num_different = len(different_QM)
    generator = np.random.default_rng(seed)
    # The count starts at one, for the observed signs.
    reached = np.ones(difference_QM.shape[1])
    # Signs are drawn in blocks of bounded memory.
    block = max(1, _FLIP_VALUES // max(num_different, 1))
    for start in range(0, permutations, block):
        size = min(block, permutations - start)
        coins = generator.integers(0, 2, (size, num_different), np.int8)
        # Coins of 0 and 1 become signs of -1 and 1.
        signs = (coins * 2 - 1).astype(np.float64)
        sums = np.abs(signs @ different_QM)
        reached += (sums >= threshold).sum(0)
    return reached / (permutations + 1)


def _group(metrics: Metrics, members: BoolArray | Int64Array) -> dict[str, Any]:
    """Size and contribution of a group of labels.

    Its share of P@5 is its hits divided by all first 5 answers. Its recall@5 is its hits divided by
    its positives.
    """
    hits = int(metrics.hits[members].sum())
    positives = int(metrics.positives[members].sum())
    return {
        "labels": len(metrics.train_counts[members]),
        "positives": positives,
        f"P@{F1_CUTOFF}": hits / (F1_CUTOFF * metrics.queries),
        f"recall@{F1_CUTOFF}": hits / positives if positives else None,
    }


def _segments(metrics: Metrics, values: dict[str, float]) -> list[dict[str, Any]]:
    """Segments from rare to frequent. Labels without a training query come first, as "unseen"."""
    macro_f1 = f"macroF1@{F1_CUTOFF}"
    rows = []
    unseen = metrics.is_answerable & (metrics.train_counts <= 0)
    if unseen.any():
        group = _group(metrics, unseen)
        rows.append({"name": "unseen", "range": "0", **group, macro_f1: None})
    for name, low, high in SEGMENTS:
        members = metrics.segment(low, high)
        if members.any():
            count_range = segment_range(low, high)
            group = _group(metrics, members)
            f1 = values.get(macro_f1 + count_range)
            rows.append({"name": name, "range": count_range, **group, macro_f1: f1})
    return rows


def _deciles(metrics: Metrics) -> list[dict[str, Any]]:
    rows = []
    # Rare labels first; of equal counts by id, so that groups are the same for all runs.
    by_count = np.argsort(metrics.train_counts, kind="stable")
    is_answerable = metrics.is_answerable[by_count]
    deciles = np.array_split(by_count[is_answerable], 10)
    for number, members in enumerate(deciles, start=1):
        # With fewer than ten labels, the last groups are empty.
        if not len(members):
            continue
        # The members ascend in their counts, so the extremes are at the ends.
        counts = metrics.train_counts[members]
        row = {
            "decile": number,
            "min_count": int(counts[0]),
            "max_count": int(counts[-1]),
            **_group(metrics, members),
        }
        rows.append(row)
    return rows


def _index_recall(
    search: Search,
    exact: Search | None,
    num_queries: int,
    sample: int,
    seed: int,
    chunk: int,
) -> dict[str, float] | None:
    """Share of the exact first k answers that are among the index's first k, on a seeded sample.

    Returns:
        By name; None without an exact search.
    """
    if exact is None:
        return None
    generator = np.random.default_rng(seed)
    drawn = generator.choice(num_queries, min(sample, num_queries), replace=False)
    # Sorted, because neighbouring rows are read faster.
    rows = np.sort(drawn).astype(np.int64)
    index_ids = []
    exact_ids = []
    for span in spans(len(rows), chunk):
        chunk_rows = rows[span]
        index_ids.append(search(chunk_rows).ids)
        exact_ids.append(exact(chunk_rows).ids)
    index_BK = np.concatenate(index_ids)
    exact_BK = np.concatenate(exact_ids)
    recall: dict[str, float] = {"queries": len(rows)}
    for k in (1, 10, 100):
        if k <= exact_BK.shape[1]:
            exact_pairs = _pairs(exact_BK[:, :k])
            index_pairs = _pairs(index_BK[:, :k])
            num_hits = int(np.isin(exact_pairs, index_pairs).sum())
            recall[f"recall@{k}"] = num_hits / max(len(exact_pairs), 1)
    return recall


def _pairs(ids_BK: Int64Array) -> Int64Array:
    """One number per pair of query and answer. Label ids have at most 31 bits."""
    row_B1 = np.arange(len(ids_BK))[:, None]
    pair_BK = (row_B1 << 32) + ids_BK
    return pair_BK[ids_BK >= 0]
