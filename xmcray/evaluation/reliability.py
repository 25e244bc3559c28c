"""Measures whether probabilities are right: calibration error, precision and coverage.

    ECE@k        expected calibration error of the first k answers (Guo et al., "On Calibration of
                 Modern Neural Networks", ICML 2017). BINS bins of equal width divide the answers by
                 probability. A bin's error is the distance between the mean probability and the
                 precision of its answers. ECE is the mean error of the bins, weighted by answers.
    precision    share of relevant labels among the answers that reach a threshold of probability
    coverage     share of queries that have such an answer

As for the other metrics, queries without a positive do not count. Pure numpy.

Letters of axes, in addition to those in types.py:

    Q  queries with a positive, of all chunks
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xmcray.evaluation.metrics import relevant
from xmcray.types import BoolArray, Float32Array, Float64Array, Ragged, TopLabels

BINS = 15
ECE_CUTOFFS = (1, 5, 10)
DIAGRAM_CUTOFF = 5  # answers of each query in the diagram
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_WIDTH = max(ECE_CUTOFFS)  # answers of each query that count


class Reliability:
    """Collects the probabilities of answers, chunk by chunk.

    Args:
        num_labels: L.
    """

    def __init__(self, num_labels: int) -> None:
        self._num_labels = num_labels
        self._probabilities: list[Float32Array] = []
        self._hits: list[BoolArray] = []

    def update(self, top: TopLabels, truth: Ragged) -> None:
        """Adds a chunk of queries; answers without probabilities are skipped."""
        rows = np.flatnonzero(truth.lengths > 0)
        if top.probabilities is None or not len(rows):
            return
        ids_BK = top.ids[rows, :_WIDTH]
        probability_BK = top.probabilities[rows, :_WIDTH]
        is_hit_BK = relevant(ids_BK, truth.take(rows), self._num_labels)
        # A missing answer gets NaN, so that it is in no bin.
        probability_BK = np.where(ids_BK >= 0, probability_BK, np.nan)
        self._probabilities.append(probability_BK)
        self._hits.append(is_hit_BK)

    def result(self) -> dict[str, Any] | None:
        """The section `calibration` of metrics.json; None if no answer had a probability."""
        if not self._hits:
            return None
        probability_QK = np.concatenate(self._probabilities).astype(np.float64)
        is_hit_QK = np.concatenate(self._hits)
        errors = {}
        for k in ECE_CUTOFFS:
            bins = _bins(probability_QK[:, :k], is_hit_QK[:, :k])
            errors[f"ECE@{k}"] = _calibration_error(bins)
        diagram_bins = _bins(probability_QK[:, :DIAGRAM_CUTOFF], is_hit_QK[:, :DIAGRAM_CUTOFF])
        thresholds = [_at_threshold(level, probability_QK, is_hit_QK) for level in THRESHOLDS]
        return {**errors, "bins": diagram_bins, "thresholds": thresholds}


def _bins(probability_QK: Float64Array, is_hit_QK: BoolArray) -> list[dict[str, Any]]:
    """The bins that hold an answer, with mean probability and precision."""
    is_answer_QK = np.isfinite(probability_QK)
    probabilities = probability_QK[is_answer_QK]
    is_hit = is_hit_QK[is_answer_QK]
    bin_numbers = (probabilities * BINS).astype(np.int64)
    # A probability of 1 belongs to the last bin.
    bin_numbers = np.minimum(bin_numbers, BINS - 1)
    num_answers = np.bincount(bin_numbers, minlength=BINS)
    probability_sums = np.bincount(bin_numbers, weights=probabilities, minlength=BINS)
    num_hits = np.bincount(bin_numbers, weights=is_hit, minlength=BINS)
    bins = []
    for number in np.flatnonzero(num_answers).tolist():
        count = int(num_answers[number])
        bins.append(
            {
                "low": number / BINS,
                "high": (number + 1) / BINS,
                "answers": count,
                "probability": float(probability_sums[number]) / count,
                "precision": float(num_hits[number]) / count,
            }
        )
    return bins


def _calibration_error(bins: list[dict[str, Any]]) -> float:
    """The mean error of the bins, weighted by answers."""
    error_sum = 0.0
    num_answers = 0
    for filled_bin in bins:
        error = abs(filled_bin["probability"] - filled_bin["precision"])
        error_sum += filled_bin["answers"] * error
        num_answers += filled_bin["answers"]
    return error_sum / max(num_answers, 1)


def _at_threshold(
    level: float, probability_QK: Float64Array, is_hit_QK: BoolArray
) -> dict[str, Any]:
    """Precision and coverage of the answers that are at least as probable as `level`."""
    # `TopLabels.at_least` compares float32 numbers. Rounded to float32, the level lets the same
    # answers pass here. A missing answer never passes, because comparisons with NaN are false.
    passes_QK = probability_QK >= float(np.float32(level))
    num_answers = int(passes_QK.sum())
    num_hits = int((passes_QK & is_hit_QK).sum())
    return {
        "min_probability": level,
        "answers": num_answers,
        "precision": num_hits / num_answers if num_answers else None,
        "coverage": float(passes_QK.any(axis=1).mean()),
    }
