"""Metrics of extreme multi-label retrieval, as a running sum over chunks of queries. Pure numpy.

    P@k       hits among the first k answers / k
    R@k       hits among the first k answers / |P_i|
    nDCG@k    DCG with gain 1 and discount 1 / log2(rank + 1), divided by the DCG of min(k, |P_i|) hits
    PSP@k     sum of 1/p_l over the hits, divided by the best attainable sum; both are summed over all queries first
    PSnDCG@k  the same with discounts; both sums of a query are divided by the DCG of min(k, |P_i|) hits
    macroF1@k F1 of each label over all queries' first k answers, averaged over the labels of a frequency segment
              that have a positive in the truth

Propensities follow Jain et al., "Extreme Multi-label Loss Functions for Recommendation, Tagging, Ranking & Other
Missing Label Applications" (KDD 2016). A query without a positive is left out of every metric and counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from xmcray.errors import DataError
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

Float64Array = npt.NDArray[np.float64]

CUTOFFS = (1, 3, 5, 10)
RECALL_CUTOFFS = (1, 3, 5, 10, 100)
# What metrics.json holds and what gets an interval.
MEAN_METRICS = ("P@1", "P@3", "P@5", "nDCG@3", "nDCG@5", "R@10", "R@100")
RATIO_METRICS = ("PSP@1", "PSP@3", "PSP@5", "PSnDCG@3", "PSnDCG@5")
MAIN_METRICS = (*MEAN_METRICS[:5], *RATIO_METRICS, *MEAN_METRICS[5:])
F1_CUTOFF = 5
# (name, low, high): labels with low < training count <= high. Labels no training query carries stand apart.
SEGMENTS = (("tail", 0, 10), ("torso", 10, 100), ("head", 100, 1000), ("top", 1000, None))


def inverse_propensity(
    train_counts: Int64Array, num_train: int, a: float, b: float
) -> Float64Array:
    """1 / p_l = 1 + C exp(-A log(N_l + B)) with C = (log N - 1) (B + 1)^A  (Jain et al. 2016, Eq. 7).

    Args:
        train_counts: int64 [L], training queries that carry each label; label texts added as queries do not count.
        num_train: N, the number of training queries.
        a, b: the data set's constants A and B; a recorded field of the corpus.
    Returns:
        float64 [L], at least 1 (for N < e the formula would leave [0, 1], there C is 0).
    """
    scale = max(np.log(num_train) - 1.0, 0.0) * (b + 1.0) ** a
    weights: Float64Array = 1.0 + scale * np.exp(
        -a * np.log(np.asarray(train_counts, np.float64) + b)
    )
    return weights


def top_k(
    scores_BL: npt.NDArray[np.floating[Any]], k: int, exclude: Ragged | None = None
) -> TopLabels:
    """The k best labels of each row of a dense score matrix, ties by the lower label id. Meant for small matrices.

    Args:
        scores_BL: scores [B, L]; -inf and NaN mean "not an answer".
        k: answers per row, clipped to L.
        exclude: label ids per row that are masked before the top k is taken (filter pairs).
    """
    masked = np.where(np.isnan(scores_BL), -np.inf, scores_BL)
    if exclude is not None:
        masked[exclude.row_ids, exclude.values] = -np.inf
    order = np.argsort(-masked, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(masked, order, axis=1)
    return TopLabels(np.where(best == -np.inf, -1, order).astype(np.int64), best.astype(np.float32))


def remove_pairs(rows: Ragged, exclude: Ragged) -> Ragged:
    """`rows` without the values that `exclude` names for the same row: truth without its filter pairs."""
    width = 1 + max(int(part.values.max(initial=-1)) for part in (rows, exclude))
    keep = ~np.isin(rows.row_ids * width + rows.values, exclude.row_ids * width + exclude.values)
    lengths = np.bincount(rows.row_ids[keep], minlength=len(rows))
    return Ragged(
        rows.values[keep],
        np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
    )


class Metrics:
    """All metrics over chunks of queries.

    Memory: 12 bytes per label and 17 float32 per query (kept for the bootstrap), never queries x labels.
    """

    def __init__(
        self, train_counts: Int64Array, num_train: int, a: float, b: float, num_labels: int
    ) -> None:
        if len(train_counts) != num_labels:
            raise DataError(
                f"found {len(train_counts)} training counts, expected {num_labels}, one per label"
            )
        self.train_counts = np.asarray(train_counts, np.int64)
        self.weights = inverse_propensity(train_counts, num_train, a, b)
        self.num_labels = num_labels
        self.queries = 0
        self.left_out = 0
        self.hits = np.zeros(num_labels, np.int32)  # per label, among the first F1_CUTOFF answers
        self.answered = np.zeros(num_labels, np.int32)
        self.positives = np.zeros(num_labels, np.int32)
        self._numerators: dict[str, float] = {}
        self._denominators: dict[str, float] = {}
        self._columns: dict[str, list[Float32Array]] = {}

    def update(self, top: TopLabels, truth: Ragged) -> npt.NDArray[np.bool_]:
        """Adds a chunk of B queries.

        Args:
            top: answers [B, K], no label twice in a row, -1 where there is none; filter pairs already masked.
            truth: positives of the same B queries without filter pairs.
        Returns:
            bool [B]: which queries have a positive and so count.
        Raises:
            DataError: the chunks differ in length, or a label id is not one of the L labels.
        """
        if len(top.ids) != len(truth):
            raise DataError(
                f"found answers of {len(top.ids)} queries, expected {len(truth)}, one row per query"
            )
        for ids, what in ((top.ids, "an answer"), (truth.values, "a positive")):
            if ids.size and ids.max() >= self.num_labels:
                raise DataError(
                    f"{what} is label {ids.max()}, expected less than {self.num_labels}: bundle and corpus differ"
                )
        counted = truth.lengths > 0
        rows = np.flatnonzero(counted)
        self.queries += len(rows)
        self.left_out += len(counted) - len(rows)
        if len(rows):
            self._add(top.ids[rows], truth.take(rows))
        return counted

    def _add(self, ids_BK: Int64Array, truth: Ragged) -> None:
        hits_BK = self._hits(ids_BK, truth)
        self._count_labels(ids_BK[:, :F1_CUTOFF], hits_BK[:, :F1_CUTOFF], truth.values)
        gain_BK = hits_BK * self.weights[ids_BK]  # id -1 reads the last label, but is never a hit
        ideal_BK = self._ideal(truth)
        lengths = truth.lengths
        hits = hits_BK.astype(np.float64)
        for k in RECALL_CUTOFFS:
            self._record(f"R@{k}", hits[:, :k].sum(1) / lengths)
        for k in CUTOFFS:
            discount = 1.0 / np.log2(np.arange(2, k + 2))
            attainable = np.cumsum(discount)[np.minimum(lengths, k) - 1]
            answered = discount[: hits.shape[1]]
            self._record(f"P@{k}", hits[:, :k].sum(1) / k)
            self._record(f"nDCG@{k}", hits[:, :k] @ answered / attainable)
            self._record(f"PSP@{k}", gain_BK[:, :k].sum(1), ideal_BK[:, :k].sum(1))
            dcg, ideal = (
                gain_BK[:, :k] @ answered / attainable,
                ideal_BK[:, :k] @ discount / attainable,
            )
            self._record(f"PSnDCG@{k}", dcg, ideal)

    def _hits(self, ids_BK: Int64Array, truth: Ragged) -> npt.NDArray[np.bool_]:
        """bool [B, K]: whether an answer is a positive of its query."""
        pairs = np.sort(truth.row_ids * self.num_labels + truth.values)
        wanted = np.arange(len(ids_BK))[:, None] * self.num_labels + ids_BK
        place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
        found: npt.NDArray[np.bool_] = (pairs[place] == wanted) & (ids_BK >= 0)
        return found

    def _ideal(self, truth: Ragged) -> Float64Array:
        """float64 [B, max(CUTOFFS)]: the largest 1/p_l of each query's positives, descending, then zeros."""
        weights = self.weights[truth.values]
        order = np.lexsort((-weights, truth.row_ids))
        place = np.arange(len(order)) - np.repeat(truth.offsets[:-1], truth.lengths)
        first = place < max(CUTOFFS)
        ideal = np.zeros((len(truth), max(CUTOFFS)))
        ideal[truth.row_ids[first], place[first]] = weights[order][first]
        return ideal

    def _count_labels(
        self, ids: Int64Array, hits: npt.NDArray[np.bool_], positives: Int64Array
    ) -> None:
        for counts, labels in (
            (self.hits, ids[hits]),
            (self.answered, ids[ids >= 0]),
            (self.positives, positives),
        ):
            seen, times = np.unique(labels, return_counts=True)
            counts[seen] += times.astype(np.int32)

    def _record(self, name: str, values: Float64Array, best: Float64Array | None = None) -> None:
        self._numerators[name] = self._numerators.get(name, 0.0) + float(values.sum())
        if name in MAIN_METRICS:
            self._columns.setdefault(name, []).append(values.astype(np.float32))
        if best is not None:
            self._denominators[name] = self._denominators.get(name, 0.0) + float(best.sum())
            if name in MAIN_METRICS:
                self._columns.setdefault(f"best {name}", []).append(best.astype(np.float32))

    def result(self) -> dict[str, float]:
        """Every metric as a fraction; a segment without a label in the truth has no macro-F1.

        Raises:
            DataError: no query had a positive.
        """
        if not self.queries:
            raise DataError(
                f"none of {self.left_out} queries has a positive left, expected at least one; choose another split"
            )
        values = {
            name: total / self._denominators.get(name, self.queries)
            for name, total in self._numerators.items()
        }
        return {**values, **self._macro_f1()}

    def _macro_f1(self) -> dict[str, float]:
        wrong_or_right = np.maximum(self.answered + self.positives, 1)
        f1 = 2.0 * self.hits / wrong_or_right
        found: dict[str, float] = {}
        for _, low, high in SEGMENTS:
            members = self.segment(low, high) & (self.positives > 0)
            if members.any():
                found[f"macroF1@{F1_CUTOFF}{segment_range(low, high)}"] = float(f1[members].mean())
        return found

    def segment(self, low: int, high: int | None) -> npt.NDArray[np.bool_]:
        """bool [L]: labels with low < training count <= high."""
        members = self.train_counts > low
        return members if high is None else members & (self.train_counts <= high)

    def columns(self) -> dict[str, Float32Array]:
        """float32 [queries] per main metric, in order of `update`; "best X" is the divisor of ratio metric X."""
        return {name: np.concatenate(parts) for name, parts in self._columns.items()}


def segment_range(low: int, high: int | None) -> str:
    """(10,100] or (1000,inf)."""
    return f"({low},inf)" if high is None else f"({low},{high}]"
