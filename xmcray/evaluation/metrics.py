"""Metrics of extreme multi-label retrieval, as a running sum over chunks of queries. Pure numpy.

    P@k       hits among the first k answers / k
    R@k       hits among the first k answers / |P_i|
    nDCG@k    DCG with gain 1 and discount 1 / log2(rank + 1), divided by the DCG of min(k, |P_i|)
              hits
    PSP@k     sum of 1/p_l over the hits, divided by the best attainable sum; both are summed over
              all queries first
    PSnDCG@k  the same with discounts; both sums of a query are divided by the DCG of min(k, |P_i|)
              hits
    graded nDCG@k
              nDCG@k with the relevance of a positive as its gain; only if the raw files have it
    MRR@k     1 / rank of the first hit among the first k answers, 0 without one
    coverage@k
              share of the labels that were not removed which are among the first k answers of some query
    macroF1@k F1 of each label over all queries' first k answers, averaged over the labels of a
              frequency segment that have a positive in the truth

Propensities follow Jain et al., "Extreme Multi-label Loss Functions for Recommendation, Tagging,
Ranking & Other Missing Label Applications" (KDD 2016). A query without a positive is left out of
every metric and is counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xmcray.errors import DataError, NoPositivesError
from xmcray.types import (
    BoolArray,
    Float64Array,
    Int64Array,
    Ragged,
    TopLabels,
    find_sorted,
    pairs_of,
)

if TYPE_CHECKING:
    from xmcray.data.corpus import Corpus

CUTOFFS = (1, 3, 5, 10)
RECALL_CUTOFFS = (1, 3, 5, 10, 100)
# What metrics.json holds and what gets an interval.
MEAN_METRICS = ("P@1", "P@3", "P@5", "nDCG@3", "nDCG@5", "R@10", "R@100", "MRR@10")
RATIO_METRICS = ("PSP@1", "PSP@3", "PSP@5", "PSnDCG@3", "PSnDCG@5")
MAIN_METRICS = (*MEAN_METRICS[:5], *RATIO_METRICS, *MEAN_METRICS[5:])
F1_CUTOFF = 5
MRR_CUTOFF = 10
# (name, low, high): labels with low < training count <= high. Labels without any training query
# belong to no segment.
SEGMENTS = (("tail", 0, 10), ("torso", 10, 100), ("head", 100, 1000), ("top", 1000, None))


@dataclass(frozen=True, slots=True)
class QueryValues:
    """The contributions of each query to the main metrics, which the bootstrap resamples.

    A metric is the sum of its gains divided by the sum of its divisors.

    Attributes:
        gain_QM: float64 [queries, metrics], columns in the order of MAIN_METRICS. Differences of
            thirds in float32 are too coarse for `sign_flip` to see that sums are equal.
        divisor_QM: float64, the same shape: 1 for a mean, the best attainable gain for a ratio.
    """

    gain_QM: Float64Array
    divisor_QM: Float64Array


def inverse_propensity(
    train_counts: Int64Array,
    num_train: int,
    a: float,
    b: float,
) -> Float64Array:
    """1 / p_l = 1 + C exp(-A log(N_l + B)) with C = (log N - 1) (B + 1)^A.

    Source: Jain et al. 2016, Eq. 7.

    Args:
        train_counts: int64 [L], training queries that carry each label; label texts added as
            queries do not count.
        num_train: N, the number of training queries.
        a: the data set's constant A, a recorded field of the corpus.
        b: its constant B.
    Returns:
        float64 [L], at least 1 (for N < e the formula would leave [0, 1], there C is 0).
    """
    scale = max(np.log(num_train) - 1.0, 0.0) * (b + 1.0) ** a
    counts = np.asarray(train_counts, np.float64)
    # exp(-A log x) is x^-A, written as in the paper.
    decay = np.exp(-a * np.log(counts + b))
    weights: Float64Array = 1.0 + scale * decay
    return weights


class Metrics:
    """All metrics over chunks of queries.

    Memory: 29 bytes per label and 26 float64 per query (kept for the bootstrap), never queries x
    labels.

    Args:
        train_counts: int64 [L], training queries that carry each label.
        num_train: N.
        a: the propensity constant A.
        b: the propensity constant B.
        num_labels: L.
        removed: int64, ids of labels that are no answers any more; they belong to no group of labels.
    Raises:
        DataError: the counts are not those of L labels.
    """

    def __init__(
        self,
        train_counts: Int64Array,
        num_train: int,
        a: float,
        b: float,
        num_labels: int,
        removed: Int64Array | None = None,
    ) -> None:
        if len(train_counts) != num_labels:
            raise DataError(
                f"found {len(train_counts)} training counts, expected {num_labels}, one per label"
            )
        self.train_counts = np.asarray(train_counts, np.int64)
        self.weights = inverse_propensity(train_counts, num_train, a, b)
        self.num_labels = num_labels
        self.is_answerable = np.ones(num_labels, bool)
        if removed is not None:
            self.is_answerable[removed] = False
        self.queries = 0
        self.left_out = 0
        # Per label, hits and answers among the first F1_CUTOFF answers of all queries.
        self.hits = np.zeros(num_labels, np.int32)
        self.answered = np.zeros(num_labels, np.int32)
        # Per label, the queries of which it is a positive.
        self.positives = np.zeros(num_labels, np.int32)
        # By metric: sums over queries. Of main metrics also the summands, chunk by chunk.
        self._gains: defaultdict[str, float] = defaultdict(float)
        self._divisors: defaultdict[str, float] = defaultdict(float)
        self._gain_chunks: defaultdict[str, list[Float64Array]] = defaultdict(list)
        self._divisor_chunks: defaultdict[str, list[Float64Array]] = defaultdict(list)

    @classmethod
    def of_corpus(cls, corpus: Corpus) -> Metrics:
        """Metrics with the counts and the propensities of a corpus."""
        card = corpus.card
        return cls(
            corpus.train_counts,
            card.num_train,
            card.propensity_a,
            card.propensity_b,
            card.num_labels,
            corpus.removed_labels,
        )

    def update(self, top: TopLabels, truth: Ragged) -> BoolArray:
        """Adds a chunk of B queries.

        Args:
            top: answers [B, K], no label twice in a row, -1 where there is none; filter pairs are
                already masked.
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
        self._check_labels(top.ids, "an answer")
        self._check_labels(truth.values, "a positive")
        # Precision and recall of a query without positives would be 0 or undefined: it says nothing.
        counted = truth.lengths > 0
        rows = np.flatnonzero(counted)
        self.queries += len(rows)
        self.left_out += len(counted) - len(rows)
        if len(rows):
            self._add(top.ids[rows], truth.take(rows))
        return counted

    def result(self) -> dict[str, float]:
        """Every metric as a fraction; a segment without a label in the truth has no macro-F1.

        Raises:
            NoPositivesError: no query had a positive.
        """
        if not self.queries:
            raise NoPositivesError(
                f"none of {self.left_out} queries has a positive left, expected at least one;"
                " choose another split"
            )
        values = {}
        for name, gain in self._gains.items():
            values[name] = gain / self._divisors[name]
        is_answered = self.answered[self.is_answerable] > 0
        values[f"coverage@{F1_CUTOFF}"] = float(is_answered.mean())
        # F1 = 2 TP / (2 TP + FP + FN), and 2 TP + FP + FN = answers + positives.
        # A label with neither is in no segment's mean; 1 keeps its division defined.
        answers_and_positives = np.maximum(self.answered + self.positives, 1)
        f1 = 2.0 * self.hits / answers_and_positives
        has_positive = self.positives > 0
        for _, low, high in SEGMENTS:
            members = self.segment(low, high) & has_positive
            if members.any():
                name = f"macroF1@{F1_CUTOFF}{segment_range(low, high)}"
                values[name] = float(f1[members].mean())
        return values

    def segment(self, low: int, high: int | None) -> BoolArray:
        """bool [L]: labels with low < training count <= high that were not removed."""
        members = self.is_answerable & (self.train_counts > low)
        if high is not None:
            members &= self.train_counts <= high
        return members

    def per_query(self) -> QueryValues:
        """The summands of the main metrics, queries in the order of `update`."""
        return QueryValues(_as_columns(self._gain_chunks), _as_columns(self._divisor_chunks))

    def _check_labels(self, label_ids: Int64Array, what: str) -> None:
        """Raises DataError for a label id that is not one of the L labels."""
        largest = label_ids.max(initial=-1)
        if largest >= self.num_labels:
            raise DataError(
                f"{what} is label {largest}, expected less than {self.num_labels}: bundle and corpus differ"
            )

    def _add(self, ids_BK: Int64Array, truth: Ragged) -> None:
        """Adds queries that all have a positive."""
        is_hit_BK = relevant(ids_BK, truth, self.num_labels)
        self._count_labels(ids_BK[:, :F1_CUTOFF], is_hit_BK[:, :F1_CUTOFF], truth)
        # The id -1 of a missing answer reads the last label's weight, but is never a hit.
        gain_BK = is_hit_BK * self.weights[ids_BK]
        ideal_BK = self._ideal_gain(truth)
        lengths = truth.lengths
        hit_BK = is_hit_BK.astype(np.float64)
        for k in RECALL_CUTOFFS:
            num_hits = hit_BK[:, :k].sum(1)
            self._record(f"R@{k}", num_hits / lengths)
        is_early_hit = is_hit_BK[:, :MRR_CUTOFF]
        # `argmax` returns the first hit; it also is 0 without any hit, where `any` makes the
        # reciprocal rank 0.
        first_hit = is_early_hit.argmax(1)
        self._record(f"MRR@{MRR_CUTOFF}", is_early_hit.any(1) / (first_hit + 1.0))
        for k in CUTOFFS:
            # The first k ranks; narrower than k if each query has fewer answers.
            self._add_ranked(k, hit_BK[:, :k], gain_BK[:, :k], ideal_BK[:, :k], lengths)

    def _count_labels(self, ids_BK: Int64Array, is_hit_BK: BoolArray, truth: Ragged) -> None:
        """Counts for macro-F1 how often each label is a hit, an answer, and a positive."""
        # `hits[ids] += 1` would count a repeated label once.
        np.add.at(self.hits, ids_BK[is_hit_BK], 1)
        np.add.at(self.answered, ids_BK[ids_BK >= 0], 1)
        np.add.at(self.positives, truth.values, 1)

    def _add_ranked(
        self,
        k: int,
        hit_BK: Float64Array,
        gain_BK: Float64Array,
        ideal_BK: Float64Array,
        lengths: Int64Array,
    ) -> None:
        """Adds precision, nDCG and their propensity-scored variants at k.

        Args:
            k: the cutoff.
            hit_BK: float64, 1 for a hit, of the first k answers.
            gain_BK: float64, 1/p_l of hits, 0 for other answers.
            ideal_BK: float64, the k best gains that a query can have.
            lengths: int64 [B], number of positives.
        """
        # Rank r, counted from 1, has the discount 1 / log2(r + 1).
        discount = 1.0 / np.log2(np.arange(2, k + 2))
        # DCG of min(k, number of positives) hits; entry i sums the first i + 1 discounts.
        num_attainable = np.minimum(lengths, k)
        attainable = np.cumsum(discount)[num_attainable - 1]
        # Fewer answers than k: later ranks contribute nothing.
        answer_discount = discount[: hit_BK.shape[1]]
        self._record(f"P@{k}", hit_BK.sum(1) / k)
        self._record(f"nDCG@{k}", hit_BK @ answer_discount / attainable)
        self._record(f"PSP@{k}", gain_BK.sum(1), ideal_BK.sum(1))
        dcg = gain_BK @ answer_discount / attainable
        ideal_dcg = ideal_BK @ discount / attainable
        self._record(f"PSnDCG@{k}", dcg, ideal_dcg)

    def _ideal_gain(self, truth: Ragged) -> Float64Array:
        """float64 [B, max(CUTOFFS)]: the largest 1/p_l of each query's positives, then zeros."""
        weights = self.weights[truth.values]
        return _largest_first(weights, truth)

    def _record(self, name: str, gains: Float64Array, best: Float64Array | None = None) -> None:
        """Adds a metric's gains per query; a ratio metric also has the best attainable ones."""
        # A mean is the ratio whose divisor is 1 for each query.
        divisors = np.ones_like(gains) if best is None else best
        self._gains[name] += float(gains.sum())
        self._divisors[name] += float(divisors.sum())
        if name in MAIN_METRICS:
            self._gain_chunks[name].append(gains)
            self._divisor_chunks[name].append(divisors)


def _as_columns(chunks: Mapping[str, list[Float64Array]]) -> Float64Array:
    """float64 [queries, metrics] of the chunks of each metric, in the order of MAIN_METRICS."""
    num_queries = sum(map(len, chunks[MAIN_METRICS[0]]))
    value_QM = np.empty((num_queries, len(MAIN_METRICS)))
    for column, name in enumerate(MAIN_METRICS):
        np.concatenate(chunks[name], out=value_QM[:, column])
    return value_QM


class GradedNdcg:
    """nDCG with graded gains, as a running mean over queries.

    The gain of an answer is the relevance of the positive, as it is (Järvelin and Kekäläinen, 2002).
    A query whose positives all have relevance 0 does not count.
    """

    def __init__(self) -> None:
        self._sums = dict.fromkeys(CUTOFFS, 0.0)
        self._num_queries = 0

    def update(self, top: TopLabels, truth: Ragged, grades: Float64Array) -> None:
        """Adds a chunk of B queries.

        Args:
            top: answers [B, K], -1 where there is none.
            truth: positives of the same queries, ascending.
            grades: float64, the relevance of each positive, at least 0.
        """
        width = max(CUTOFFS)
        discount = 1.0 / np.log2(np.arange(2, width + 2))
        ideal = _largest_first(grades, truth)
        first_ids = top.ids[:, :width]
        largest_answer = int(top.ids.max(initial=0))
        largest_positive = int(truth.values.max(initial=0))
        num_ids = 1 + max(largest_answer, largest_positive)
        is_hit = relevant(first_ids, truth, num_ids)
        # Every hit is a positive, whose place among all positives is that of its grade.
        hit_pairs = pairs_of(first_ids, num_ids)[is_hit]
        hit_places = np.searchsorted(truth.pairs(num_ids), hit_pairs)
        gains = np.zeros((len(truth), width))
        # There may be fewer answers than columns. A slice is a view, so this writes into `gains`.
        answer_gains = gains[:, : first_ids.shape[1]]
        answer_gains[is_hit] = grades[hit_places]
        counts = ideal[:, 0] > 0
        self._num_queries += int(counts.sum())
        for k in CUTOFFS:
            dcg = gains[counts, :k] @ discount[:k]
            ideal_dcg = ideal[counts, :k] @ discount[:k]
            self._sums[k] += float((dcg / ideal_dcg).sum())

    def result(self) -> dict[str, float]:
        """The mean over queries by name; empty if no query counted."""
        if not self._num_queries:
            return {}
        return {f"graded nDCG@{k}": total / self._num_queries for k, total in self._sums.items()}


def _largest_first(gains: Float64Array, truth: Ragged) -> Float64Array:
    """The largest gains of each query's positives, which the ideal ranking has first.

    Args:
        gains: float64, the gain of each positive.
        truth: positives of B queries.
    Returns:
        float64 [B, max(CUTOFFS)], descending, then zeros.
    """
    width = max(CUTOFFS)
    # By query, then the largest gain first. Each query keeps its range of positions, so row ids and
    # places are the same after sorting.
    order = np.lexsort((-gains, truth.row_ids))
    sorted_gains = gains[order]
    is_first = truth.places < width
    rows = truth.row_ids[is_first]
    places = truth.places[is_first]
    largest = np.zeros((len(truth), width))
    largest[rows, places] = sorted_gains[is_first]
    return largest


def relevant(ids_BK: Int64Array, truth: Ragged, num_labels: int) -> BoolArray:
    """Which answers are positives of their queries.

    Args:
        ids_BK: int64 [B, K], label ids of answers; -1 for a missing one.
        truth: positives of the same queries.
        num_labels: L.
    Returns:
        bool [B, K].
    """
    true_pairs = np.sort(truth.pairs(num_labels))
    pair_BK = pairs_of(ids_BK, num_labels)
    _, is_true_BK = find_sorted(true_pairs, pair_BK)
    # Id -1 of a missing answer makes the pair of the previous row's last label.
    is_hit_BK: BoolArray = is_true_BK & (ids_BK >= 0)
    return is_hit_BK


def precisions(hit_BK: BoolArray) -> tuple[float, float]:
    """P@1 and P@5 of some answers, K = 5 unless there are fewer labels.

    Args:
        hit_BK: which answers are positives.
    """
    p1 = hit_BK[:, 0].mean()
    p5 = hit_BK[:, :5].sum(axis=1).mean() / 5
    return float(p1), float(p5)


def segment_range(low: int, high: int | None) -> str:
    """(10,100] or (1000,inf)."""
    return f"({low},inf)" if high is None else f"({low},{high}]"
