"""The probability that an answer is relevant, by curves that were fitted on held-out queries.

    calibration/curves.json     coefficients, and one curve for each segment of labels
    calibration/segments.npy    uint8 [L], the segment of each label of the export

Inner products of one query say little about another's: some queries have many near labels. So an
answer's evidence is a linear function of its score and of the best and tenth inner products of the
query with labels of the export. A curve maps evidence to a probability. There is one curve for each
segment of labels by training frequency, because rare labels are relevant less often at the same
evidence.

A probability depends on nothing but the query, the label and the bundle: not on the number of
answers, other queries, filters, or labels that joined later. Pure numpy.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmcray import config as configs
from xmcray.config import check_range
from xmcray.data.checked_files import read_array
from xmcray.errors import ConfigError
from xmcray.retrieval.readable import readable
from xmcray.storage.whole_files import read_json
from xmcray.types import Float32Array, Float64Array, Int64Array, TopLabels

FOLDER = "calibration"
CONTEXT = 10  # nearest labels of the export that say how much a score is worth
BINS = 10  # of equal width, in the histogram of the best answers' probabilities
FEWEST = 100  # queries before drift is reported
_MEMORY = 0.999
_SMALL = 0.005
_CURVES = "curves.json"
_SEGMENTS = "segments.npy"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A function that does not fall: linear between its points, constant beyond them.

    Attributes:
        evidence: ascending positions of the points.
        probability: values at the points, 0 .. 1.
    """

    evidence: tuple[float, ...]
    probability: tuple[float, ...]

    def __post_init__(self) -> None:
        rises = np.diff(self.evidence) > 0
        # Values that do not fall and lie between 0 and 1.
        never_falls = np.diff([0.0, *self.probability, 1.0]) >= 0
        same_length = len(self.evidence) == len(self.probability) >= 1
        if not (same_length and rises.all() and never_falls.all()):
            raise ConfigError("a curve of probabilities is malformed; calibrate the bundle again")

    def at(self, evidence: Float64Array) -> Float64Array:
        """float64, a probability for each value."""
        values: Float64Array = np.interp(evidence, self.evidence, self.probability)
        return values


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What curves.json holds.

    Attributes:
        intercept: of the evidence.
        score: factor of the answer's score.
        best: factor of the query's best inner product.
        tenth: factor of its tenth best inner product.
        by_segment: the segments of labels, in the order of their numbers. The first segment holds
            labels without any training query; labels that join later belong to it too.
        best_answers: shares of held-out queries by the probability of their best answer, in bins of
            equal width between 0 and 1.
        queries: held-out queries by which the curves were fitted.
    """

    intercept: float
    score: float
    best: float
    tenth: float
    by_segment: Mapping[str, Curve]
    best_answers: tuple[float, ...]
    queries: int


@dataclass(frozen=True, eq=False)
class Calibration:
    """Curves, and the segment of each label.

    Attributes:
        curves: from evidence to probability.
        segment_L: uint8 [L], number of the segment of each label of the export.
    """

    curves: Curves
    segment_L: np.ndarray[Any, np.dtype[np.uint8]]

    @classmethod
    def load(cls, bundle: Path, num_exported: int) -> Calibration | None:
        """Reads the calibration of a verified bundle; None if it has none.

        Args:
            bundle: local folder of the bundle.
            num_exported: labels of the export.
        Raises:
            BundleError: a file is malformed, or does not fit the bundle.
        """
        folder = bundle / FOLDER
        if not has_calibration(bundle):
            return None
        with readable(f"{folder} cannot be read", "calibrate the bundle again"):
            curves = configs.build(Curves, read_json(folder / _CURVES))
            segment_L = read_array(folder / _SEGMENTS, np.uint8, mapped=True)
            if segment_L.shape != (num_exported,):
                raise ValueError(f"segments.npy is not of {num_exported} labels")
            if segment_L.max(initial=0) >= len(curves.by_segment):
                raise ValueError("segments.npy names a segment that has no curve")
        return cls(curves, segment_L)

    def save(self, bundle: Path) -> set[str]:
        """Writes the files into a bundle's folder; returns their names."""
        folder = bundle / FOLDER
        folder.mkdir()
        text = json.dumps(dataclasses.asdict(self.curves), indent=1)
        (folder / _CURVES).write_text(text + "\n", encoding="utf-8")
        np.save(folder / _SEGMENTS, self.segment_L)
        return {f"{FOLDER}/{_CURVES}", f"{FOLDER}/{_SEGMENTS}"}

    def with_probabilities(self, top: TopLabels, nearest: TopLabels) -> TopLabels:
        """Answers with their probabilities.

        Args:
            top: answers [B, K] by source id.
            nearest: the best labels of the export for the same queries, by inner product; at least
                CONTEXT of them, or all.
        """
        feature_BKF = features(top.scores, nearest.scores)
        curves = self.curves
        weights = np.array([curves.score, curves.best, curves.tenth])
        # Not a matrix product, whose last bits may depend on the other queries.
        evidence_BK = curves.intercept + (feature_BKF * weights).sum(axis=-1)
        segment_BK = self.segments_of(top.ids)
        probability_BK = np.zeros(top.ids.shape)
        for number, curve in enumerate(curves.by_segment.values()):
            inside = segment_BK == number
            probability_BK[inside] = curve.at(evidence_BK[inside])
        probability_BK[top.ids < 0] = 0.0
        return dataclasses.replace(top, probabilities=probability_BK.astype(np.float32))

    def segments_of(self, label_ids: Int64Array) -> Int64Array:
        """Numbers of the segments of labels by source id; 0 for labels that joined later."""
        segments = np.zeros(label_ids.shape, np.int64)
        exported = (label_ids >= 0) & (label_ids < len(self.segment_L))
        segments[exported] = self.segment_L[label_ids[exported]]
        return segments


class Drift:
    """Compares the best answers to new queries with those to held-out queries.

    New queries count less as further ones come: each has 0.999 of the weight of the next one, so
    about the last 1,000 count.

    Args:
        expected: `Curves.best_answers`.
    """

    def __init__(self, expected: tuple[float, ...]) -> None:
        self.expected = expected
        self._queries = 0
        self._weights = np.zeros(len(expected))

    def add(self, probability: float) -> None:
        """Notes the probability of a query's best answer."""
        num_bins = len(self.expected)
        # A probability of 1 belongs to the last bin.
        number = min(int(probability * num_bins), num_bins - 1)
        self._weights *= _MEMORY
        self._weights[number] += 1
        self._queries += 1

    def index(self) -> float | None:
        """The population stability index; None before FEWEST queries.

        0 is no difference; more than 0.25 is commonly read as another distribution (Siddiqi,
        "Credit Risk Scorecards", 2006).
        """
        if self._queries < FEWEST:
            return None
        # Half a percent in every bin keeps the logarithms finite.
        expected = np.array(self.expected) + _SMALL
        observed = self._weights / self._weights.sum() + _SMALL
        index_of_bin = (observed - expected) * np.log(observed / expected)
        return float(index_of_bin.sum())


def has_calibration(bundle: Path) -> bool:
    """Whether the folder of a bundle holds probabilities."""
    return (bundle / FOLDER / _CURVES).is_file()


def check_min_probability(min_probability: float, has_probabilities: bool) -> None:
    """Refuses a bound that cannot be kept.

    Raises:
        ConfigError: it is out of range, or the answers have no probabilities.
    """
    check_range("min_probability", min_probability, 0, 1)
    if not has_probabilities:
        raise ConfigError(
            "min_probability: these answers have no probabilities; make some with"
            " `xmcray calibrate`, and leave other memory settings out"
        )


def features(score_BK: Float32Array, nearest_BC: Float32Array) -> Float64Array:
    """What the evidence is a linear function of: score, best and tenth inner product.

    Args:
        score_BK: scores of answers; -inf for a missing one.
        nearest_BC: the best inner products of each query with labels of the export, best first.
    Returns:
        float64 [B, K, 3], with zeros in place of missing numbers.
    """
    nearest = nearest_BC[:, :CONTEXT].astype(np.float64)
    num_nearest = np.isfinite(nearest).sum(axis=1)
    # With fewer labels than CONTEXT the last one stands for the tenth.
    last_B1 = np.maximum(num_nearest - 1, 0)[:, None]
    tenth_B1 = np.take_along_axis(nearest, last_B1, axis=1)
    columns = np.broadcast_arrays(score_BK.astype(np.float64), nearest[:, :1], tenth_B1)
    feature_BKF = np.stack(columns, axis=-1)
    return np.where(np.isfinite(feature_BKF), feature_BKF, 0.0)
