"""Runs a search over a split and turns the answers into numbers with intervals; compares two such runs.

`evaluate` accepts anything that returns `TopLabels`, so what is measured is what is served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from xmcray.errors import DataError
from xmcray.evaluation.metrics import (
    F1_CUTOFF,
    MAIN_METRICS,
    SEGMENTS,
    Float64Array,
    Metrics,
    segment_range,
)
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

SEARCH_K = 100  # answers per query (R@100), clipped to the number of labels
Search = Callable[[Int64Array], TopLabels]
Truth = Callable[[Int64Array], Ragged]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one retriever reaches on one split.

    Attributes:
        metrics: every metric as a fraction, by its key in metrics.json.
        queries, left_out: queries that counted, and those without a positive left.
        a, b: the propensity constants behind every PSP.
        intervals: [low, high] of the 95 % bootstrap interval per main metric.
        segments: per frequency segment its labels, positives, recall, macro-F1 and contribution to P@5.
        deciles: ten equal groups of labels from rare to frequent, and what each contributes to P@5.
        index_recall: answers of the index against exact search on a sample of queries, or None.
        query_ids: int64 [queries], rows of the split that counted; columns: their values per main metric.
    """

    metrics: dict[str, float]
    queries: int
    left_out: int
    a: float
    b: float
    intervals: dict[str, list[float]]
    segments: list[dict[str, Any]]
    deciles: list[dict[str, Any]]
    index_recall: dict[str, float] | None = None
    query_ids: Int64Array = field(repr=False, default_factory=lambda: np.empty(0, np.int64))
    columns: dict[str, Float32Array] = field(repr=False, default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The content of metrics.json (without the columns per query)."""
        about: dict[str, Any] = {
            "queries": self.queries,
            "left_out": self.left_out,
            "A": self.a,
            "B": self.b,
        }
        tables = {"intervals": self.intervals, "segments": self.segments, "deciles": self.deciles}
        return {**self.metrics, **about, **tables, "index_recall": self.index_recall}


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One metric of run `a` against run `b` on the same queries.

    Attributes:
        difference: a - b; low, high: its 95 % interval by paired bootstrap over queries.
        p_value: two-sided sign-flip permutation test of "no difference".
    """

    metric: str
    a: float
    b: float
    difference: float
    low: float
    high: float
    p_value: float


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
    resamples: int = 1000,
    seed: int = 0,
) -> Evaluation:
    """Searches all queries of a split, chunk by chunk, and measures the answers.

    Args:
        search: rows of the split (int64 [B]) -> the best min(100, L) labels, filter pairs masked before the top k.
        truth: rows -> positives (source ids) without filter pairs.
        num_queries: rows of the split.
        train_counts: int64 [L], training queries per label (source ids, without label texts as queries).
        num_train: N.
        a, b: propensity constants of the corpus.
        chunk: queries per call of `search`.
        progress: called with the number of queries done after each chunk.
        exact: an exhaustive search with the same signature; given, the index's own error is measured on a sample.
        exact_sample: queries of that sample (seeded).
        resamples, seed: of the bootstrap; 0 resamples leave the intervals out (validation while training).
    Raises:
        DataError: no query has a positive, or the answers do not fit the corpus.
    """
    num_labels = len(train_counts)
    metrics = Metrics(train_counts, num_train, a, b, num_labels)
    counted = []
    for start in range(0, num_queries, chunk):
        rows = np.arange(start, min(start + chunk, num_queries), dtype=np.int64)
        top = search(rows)
        if top.width < min(SEARCH_K, num_labels):
            raise DataError(
                f"the search returned {top.width} answers per query, expected {min(SEARCH_K, num_labels)}; raise its k"
            )
        counted.append(rows[metrics.update(top, truth(rows))])
        if progress is not None:
            progress(int(rows[-1]) + 1)
    values, columns = metrics.result(), metrics.columns()
    return Evaluation(
        metrics=values,
        queries=metrics.queries,
        left_out=metrics.left_out,
        a=a,
        b=b,
        intervals=_intervals(columns, resamples, seed) if resamples else {},
        segments=_segments(metrics, values),
        deciles=_deciles(metrics),
        index_recall=None
        if exact is None
        else _index_recall(search, exact, num_queries, exact_sample, seed, chunk),
        query_ids=np.concatenate(counted),
        columns=columns,
    )


def compare(
    a: Evaluation, b: Evaluation, *, resamples: int = 1000, permutations: int = 4999, seed: int = 0
) -> list[ComparisonRow]:
    """Paired test of two evaluations of the same queries, one row per main metric.

    The interval resamples queries, both runs alike. The p-value exchanges the runs' answers query by query; for PSP
    and PSnDCG the divisor depends on the truth alone, so flipping the numerator's difference is that exchange.

    Raises:
        DataError: the evaluations are of other queries or other propensities.
    """
    if not np.array_equal(a.query_ids, b.query_ids) or (a.a, a.b) != (b.a, b.b):
        raise DataError(
            f"found {a.queries} and {b.queries} queries with propensity A, B = {a.a}, {a.b} and {b.a}, {b.b}, "
            "expected the same queries and constants; evaluate both on one corpus and split"
        )
    names = [name for name in MAIN_METRICS if name in a.columns]
    difference_QM = np.stack(
        [a.columns[name].astype(np.float64) - b.columns[name] for name in names], axis=1
    )
    best_QM = np.stack([_best(a.columns, name) for name in names], axis=1)
    sampled = _resample(np.hstack([difference_QM, best_QM]), resamples, seed)
    low, high = np.quantile(
        sampled[:, : len(names)] / sampled[:, len(names) :], [0.025, 0.975], axis=0
    )
    p_values = _sign_flip(difference_QM, permutations, seed)
    rows = []
    for i, name in enumerate(names):
        left, right = a.metrics[name], b.metrics[name]
        rows.append(
            ComparisonRow(
                name, left, right, left - right, float(low[i]), float(high[i]), float(p_values[i])
            )
        )
    return rows


def _best(columns: dict[str, Float32Array], name: str) -> Float64Array:
    """What the sum of a metric is divided by, per query: 1 for a mean, the best attainable gain for a ratio."""
    return np.asarray(columns.get(f"best {name}", np.ones_like(columns[name])), np.float64)


def _resample(columns_QM: Float64Array, resamples: int, seed: int) -> Float64Array:
    """float64 [resamples, M]: column sums over queries drawn with replacement."""
    generator = np.random.default_rng(seed)
    num_queries = len(columns_QM)
    sums = np.empty((resamples, columns_QM.shape[1]))
    for i in range(resamples):
        times = np.bincount(
            generator.integers(num_queries, size=num_queries), minlength=num_queries
        )
        sums[i] = times.astype(np.float64) @ columns_QM
    return sums


def _intervals(
    columns: dict[str, Float32Array], resamples: int, seed: int
) -> dict[str, list[float]]:
    names = [name for name in MAIN_METRICS if name in columns]
    gains = [columns[name].astype(np.float64) for name in names]
    sums = _resample(
        np.stack([*gains, *(_best(columns, name) for name in names)], axis=1), resamples, seed
    )
    low, high = np.quantile(sums[:, : len(names)] / sums[:, len(names) :], [0.025, 0.975], axis=0)
    return {name: [float(low[i]), float(high[i])] for i, name in enumerate(names)}


def _sign_flip(difference_QM: Float64Array, permutations: int, seed: int) -> Float64Array:
    """float64 [M]: share of random sign changes whose sum is at least as far from zero, the observed one included."""
    observed = np.abs(difference_QM.sum(0))
    # Equal sums in another order of addition differ in their last digits and must count as equal.
    threshold = observed - 1e-9 * (1.0 + observed)
    moved_QM = difference_QM[(difference_QM != 0).any(axis=1)]
    generator = np.random.default_rng(seed)
    reached = np.ones(difference_QM.shape[1])
    done, block = 0, max(1, (1 << 22) // max(len(moved_QM), 1))
    while done < permutations:
        size = min(block, permutations - done)
        signs: npt.NDArray[np.int8] = (
            generator.integers(0, 2, (size, len(moved_QM)), np.int8) * 2 - 1
        )
        reached += (np.abs(signs.astype(np.float64) @ moved_QM) >= threshold).sum(0)
        done += size
    return reached / (permutations + 1)


def _group(metrics: Metrics, members: npt.NDArray[np.bool_] | Int64Array) -> dict[str, Any]:
    """What a group of labels holds and contributes: its hits over all of P@5's answers, found over its positives."""
    hits, positives = int(metrics.hits[members].sum()), int(metrics.positives[members].sum())
    return {
        "labels": len(metrics.train_counts[members]),
        "positives": positives,
        f"P@{F1_CUTOFF}": hits / (F1_CUTOFF * metrics.queries),
        f"recall@{F1_CUTOFF}": hits / positives if positives else None,
    }


def _segments(metrics: Metrics, values: dict[str, float]) -> list[dict[str, Any]]:
    """From rare to frequent; labels that no training query carries come first, as "unseen", if there are any."""
    rows = []
    unseen = metrics.train_counts <= 0
    if unseen.any():
        rows.append({"name": "unseen", "range": "0", **_group(metrics, unseen), "macroF1@5": None})
    for name, low, high in SEGMENTS:
        members = metrics.segment(low, high)
        if members.any():
            reach = segment_range(low, high)
            f1 = values.get(f"macroF1@{F1_CUTOFF}{reach}")
            rows.append(
                {
                    "name": name,
                    "range": reach,
                    **_group(metrics, members),
                    f"macroF1@{F1_CUTOFF}": f1,
                }
            )
    return rows


def _deciles(metrics: Metrics) -> list[dict[str, Any]]:
    rows = []
    order = np.argsort(metrics.train_counts, kind="stable")
    for number, members in enumerate(np.array_split(order, 10), start=1):
        if len(members):
            counts = metrics.train_counts[members]
            reach = {"min_count": int(counts[0]), "max_count": int(counts[-1])}
            rows.append({"decile": number, **reach, **_group(metrics, members)})
    return rows


def _index_recall(
    search: Search, exact: Search, num_queries: int, sample: int, seed: int, chunk: int
) -> dict[str, float]:
    """Share of the exact first k answers that the index returned among its own first k, on a seeded sample."""
    generator = np.random.default_rng(seed)
    rows = np.sort(generator.choice(num_queries, min(sample, num_queries), replace=False)).astype(
        np.int64
    )
    found: dict[str, float] = {}
    totals: dict[str, float] = {}
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        index_BK, exact_BK = search(part).ids, exact(part).ids
        for k in (1, 10, 100):
            if k <= exact_BK.shape[1]:
                both, wanted = _overlap(index_BK[:, :k], exact_BK[:, :k])
                found[f"recall@{k}"] = found.get(f"recall@{k}", 0) + both
                totals[f"recall@{k}"] = totals.get(f"recall@{k}", 0) + wanted
    return {"queries": len(rows), **{name: found[name] / max(totals[name], 1) for name in found}}


def _overlap(index_BK: Int64Array, exact_BK: Int64Array) -> tuple[int, int]:
    width = 1 + int(max(index_BK.max(initial=0), exact_BK.max(initial=0)))
    row_B1 = np.arange(len(exact_BK))[:, None] * width
    wanted = (row_B1 + exact_BK)[exact_BK >= 0]
    return int(np.isin(wanted, (row_B1 + index_BK)[index_BK >= 0]).sum()), len(wanted)
