"""Fits the probabilities of a bundle's answers on held-out queries (retrieval/calibration.py).

First, logistic regression computes the *evidence* for an answer from its score and from the scores of
the query's nearest labels. Then isotonic regression maps evidence to probability: once for all labels
together, and once for each segment of labels by training frequency. Each fit has the one before as
its prior, which counts as much as PRIOR answers. So the curve of a segment with few answers stays close
to the common curve. Between the centres of the blocks of isotonic regression, a curve is linear
(centred isotonic regression: Oron and Flournoy, "Centered Isotonic Regression", Statistics in
Biopharmaceutical Research, 2017).

Letters of axes, in addition to those in types.py: A answers, M answers with labels of
one segment, G points of a prior, F features, N blocks.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, isotonic_regression, minimize
from scipy.special import expit

from xmcray.data.corpus import Corpus
from xmcray.errors import BundleError
from xmcray.evaluation.metrics import SEGMENTS, relevant
from xmcray.retrieval.calibration import (
    BINS,
    CONTEXT,
    Calibration,
    Curve,
    Curves,
    features,
)
from xmcray.retrieval.predictors import LabelPredictor
from xmcray.retrieval.retriever import CHUNK, Retriever
from xmcray.retrieval.shards import SearchScope
from xmcray.training.held_out import without_voters
from xmcray.types import BoolArray, Float64Array, Int64Array, spans

logger = logging.getLogger(__name__)

ANSWERS = 5  # answers of each query, as many as P@5 and ECE@5 look at
MAX_QUERIES = 10_000
PRIOR = 1000  # answers
GRID = 65  # points of a prior
UNSEEN = "unseen"  # labels without a training query, and those that join later
FEW_QUERIES = 50  # from fewer, a result is mostly chance
_RIDGE = 1e-4
_ROUNDING = 1e-5  # of inner products, as a share of the largest


@dataclass(frozen=True)
class Sample:
    """The first answers to held-out queries.

    Attributes:
        feature_AF: float64, see `calibration.features`.
        relevant_A: whether the label is a positive of the query.
        label_A: source ids.
        place_A: int64, place in the query's list, from 0.
    """

    feature_AF: Float64Array
    relevant_A: BoolArray
    label_A: Int64Array
    place_A: Int64Array


def fit_calibration(retriever: Retriever, corpus: Corpus, rows: Int64Array) -> Calibration:
    """Fits the probabilities of a bundle's answers.

    Args:
        retriever: the bundle.
        corpus: the one that it was made from.
        rows: training queries that no part of the bundle was trained on. They do not vote.

    Raises:
        BundleError: no query has an answer, as with weights that are no numbers.
    """
    if len(rows) < FEW_QUERIES:
        logger.warning(
            "probabilities are fitted to %d held-out queries, too few to rely on; hold out more with"
            " data.validation",
            len(rows),
        )
    # Evenly spaced, because queries may be sorted by time.
    step = math.ceil(len(rows) / MAX_QUERIES)
    rows = rows[::step]
    fair_retriever = without_voters(retriever, corpus, rows)
    sample = answers_to(fair_retriever, corpus, rows)
    if not len(sample.label_A):
        raise BundleError(
            f"none of {len(rows)} queries held out of training gets an answer, expected some;"
            " look for weights that are no numbers, and train again"
        )
    return calibration_of(sample, corpus, len(rows))


def calibration_of(sample: Sample, corpus: Corpus, num_queries: int) -> Calibration:
    """Fits probabilities to the answers that some queries got."""
    segment_L = segments_of(corpus.train_counts)
    segment_A = segment_L[sample.label_A].astype(np.int64)
    curves = fit_curves(sample, segment_A, num_queries)
    return Calibration(curves, segment_L)


def answers_to(
    retriever: Retriever, corpus: Corpus, rows: Int64Array, split_name: str = "train"
) -> Sample:
    """The first answers to some queries, and whether they are right."""
    split = corpus.split(split_name)
    num_labels = corpus.card.num_labels
    predictor = retriever.predictor()
    if isinstance(predictor, LabelPredictor):
        # So that it computes the same features as it will after the bundle is calibrated.
        predictor = dataclasses.replace(predictor, calibrated=True)
    chunks: list[Sample] = []
    for span in spans(len(rows), CHUNK):
        chunk = rows[span]
        texts = split.texts(chunk)
        filters = split.filters(chunk)
        query_BD = retriever.encode(texts, split.side_vectors(chunk))
        k = min(CONTEXT, num_labels)
        neighbours = predictor.find(query_BD, k, SearchScope(filters))
        top = predictor.rank(neighbours, k, filters, texts).first(ANSWERS)
        is_hit_BK = relevant(top.ids, split.positives(chunk), num_labels)
        feature_BKF = features(top.scores, neighbours.labels.scores)
        is_answer_BK = top.ids >= 0
        chunks.append(
            Sample(
                feature_AF=feature_BKF[is_answer_BK],
                relevant_A=is_hit_BK[is_answer_BK],
                label_A=top.ids[is_answer_BK],
                place_A=np.nonzero(is_answer_BK)[1],
            )
        )
    feature_AF = np.concatenate([chunk.feature_AF for chunk in chunks])
    relevant_A = np.concatenate([chunk.relevant_A for chunk in chunks])
    label_A = np.concatenate([chunk.label_A for chunk in chunks])
    place_A = np.concatenate([chunk.place_A for chunk in chunks])
    return Sample(feature_AF, relevant_A, label_A, place_A)


def segments_of(train_counts: Int64Array) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """uint8 [L], the number of each label's segment; 0 for labels without a training query."""
    lows = [low for _, low, _ in SEGMENTS]
    # The counts of a segment are above its own `low`, and at most the `low` of the next segment.
    return np.searchsorted(lows, train_counts, side="left").astype(np.uint8)


def fit_curves(sample: Sample, segment_A: Int64Array, num_queries: int) -> Curves:
    """Fits all of curves.json.

    Args:
        sample: answers.
        segment_A: int64, number of the segment of each answer's label.
        num_queries: of the sample.
    """
    weights = _logistic(sample.feature_AF, sample.relevant_A)
    # The first weight is the intercept.
    evidence_A = weights[0] + (sample.feature_AF * weights[1:]).sum(axis=1)
    # Quantiles are denser where there are more answers.
    grid_G = np.quantile(evidence_A, np.linspace(0.0, 1.0, GRID))
    common = _curve(evidence_A, sample.relevant_A, grid_G, expit(grid_G))
    seen: dict[str, Curve] = {}
    for number, (name, _, _) in enumerate(SEGMENTS, start=1):
        members = segment_A == number
        relevant_M = sample.relevant_A[members]
        seen[name] = _curve(evidence_A[members], relevant_M, grid_G, common.at(grid_G))
    members = segment_A == 0
    # The prior of labels without a training query is the curve of rare labels, which resemble them most.
    rare_G = seen[SEGMENTS[0][0]].at(grid_G)
    unseen = _curve(evidence_A[members], sample.relevant_A[members], grid_G, rare_G)
    by_segment = {UNSEEN: unseen, **seen}
    probability_A = np.empty(len(evidence_A))
    for number, curve in enumerate(by_segment.values()):
        members = segment_A == number
        probability_A[members] = curve.at(evidence_A[members])
    best = probability_A[sample.place_A == 0]
    counts, _ = np.histogram(best, BINS, (0.0, 1.0))
    # Without any answer, all shares are 0.
    share_of_bin = counts / max(len(best), 1)
    return Curves(
        intercept=float(weights[0]),
        score=float(weights[1]),
        best=float(weights[2]),
        tenth=float(weights[3]),
        by_segment=by_segment,
        best_answers=tuple(share_of_bin.tolist()),
        queries=num_queries,
    )


def _logistic(feature_AF: Float64Array, relevant_A: BoolArray) -> Float64Array:
    """Intercept and factors of a logistic regression, float64 [1 + F].

    The first feature is the score. Its factor is not negative, so that of two answers to one query, the
    one with the higher score never has less evidence.
    """
    mean_F = feature_AF.mean(axis=0)
    deviation_F = feature_AF.std(axis=0)
    # A feature that is constant except for rounding says nothing. An example is the best inner product if
    # every query is a label too. Without the next lines, rounding would be scaled up to a deviation of 1.
    is_same_F = deviation_F <= _ROUNDING * np.abs(feature_AF).max(axis=0)
    deviation_F[is_same_F] = 1.0
    standard_AF = (feature_AF - mean_F) / deviation_F
    sign_A = np.where(relevant_A, 1.0, -1.0)

    def loss(weights: Float64Array) -> tuple[float, Float64Array]:
        evidence_A = weights[0] + standard_AF @ weights[1:]
        margin_A = sign_A * evidence_A
        # `logaddexp` computes log(1 + exp(-margin)) without an overflow of exp.
        mean_loss = np.logaddexp(0, -margin_A).mean()
        penalty = _RIDGE * (weights**2).sum()
        # The derivative of the mean loss by the evidence of each answer.
        slope_A = -sign_A * expit(-margin_A) / len(margin_A)
        gradient = np.concatenate([[slope_A.sum()], slope_A @ standard_AF])
        return float(mean_loss + penalty), gradient + 2 * _RIDGE * weights

    num_weights = 1 + standard_AF.shape[1]
    lowest = np.full(num_weights, -np.inf)
    lowest[1] = 0.0
    bounds = Bounds(lowest, np.inf)
    fitted = minimize(loss, np.zeros(num_weights), jac=True, method="L-BFGS-B", bounds=bounds)
    # Undo the standardisation: factors are divided by the deviations, and the means move into the
    # intercept.
    factors = fitted.x[1:] / deviation_F
    intercept = fitted.x[0] - factors @ mean_F
    return np.concatenate([[intercept], factors])


def _curve(
    evidence_M: Float64Array,
    relevant_M: BoolArray,
    grid_G: Float64Array,
    prior_G: Float64Array,
) -> Curve:
    """Isotonic regression of relevance on evidence.

    Args:
        evidence_M: evidence of the answers.
        relevant_M: whether these answers are right.
        grid_G: evidence at the points of the prior.
        prior_G: probabilities at these points. Together they weigh as much as PRIOR answers.
    """
    evidence = np.concatenate([grid_G, evidence_M])
    target = np.concatenate([prior_G, relevant_M])
    weight = np.ones(len(evidence))
    weight[: len(grid_G)] = PRIOR / len(grid_G)
    # Sorted by evidence. Among equal evidence, targets descend, so that they become one block.
    order = np.lexsort((-target, evidence))
    fitted = isotonic_regression(target[order], weights=weight[order]).x
    value_N, block = np.unique(fitted, return_inverse=True)
    # A block's centre is the weighted mean of its evidence.
    weight_N = np.bincount(block, weight[order])
    weighted_sum_N = np.bincount(block, weight[order] * evidence[order])
    centre_N = weighted_sum_N / weight_N
    # Due to rounding, the centre of a block may not be above that of the block before. Such blocks are
    # left out.
    highest_N = np.maximum.accumulate(centre_N)
    rises = np.diff(highest_N, prepend=-np.inf) > 0
    probability_N = value_N[rises].clip(0.0, 1.0)
    return Curve(
        evidence=tuple(centre_N[rises].tolist()),
        probability=tuple(probability_N.tolist()),
    )
