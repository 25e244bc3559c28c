"""Simulated answers of two bundles to the same queries, for the test that decides on a promotion."""

from __future__ import annotations

import numpy as np

from xmcray.evaluation.evaluate import Evaluation, compare
from xmcray.evaluation.metrics import MAIN_METRICS, QueryValues
from xmcray.training.promotion import LAST, MARGIN, METRIC, Verdict
from xmcray.types import Float64Array


def simulated_verdict(seed: int, loss: float, share: float = 0.2) -> Verdict:
    """Two bundles with five answers to each query.

    Args:
        seed: of the draw.
        loss: how much worse the second one is, as a fraction.
        share: of the queries that the second one answers anew, independently of the first.
    """
    generator = np.random.default_rng(seed)
    rate_Q = generator.beta(1.2, 2, LAST)
    old_Q = generator.binomial(5, rate_Q)
    again_Q = generator.binomial(5, rate_Q)
    new_Q = np.where(generator.random(LAST) < share, again_Q, old_Q)
    # Of its hits this share is lost.
    new_Q = generator.binomial(new_Q, 1 - loss / rate_Q.mean())
    rows = compare(_evaluation(new_Q), _evaluation(old_Q), resamples=300, permutations=9)
    return Verdict(rows, METRIC, MARGIN, LAST)


def _evaluation(hits_Q: Float64Array) -> Evaluation:
    """An evaluation in which every metric of a query is its share of hits."""
    gain_QM = np.repeat(hits_Q[:, None] / 5, len(MAIN_METRICS), axis=1).astype(np.float32)
    return Evaluation(
        metrics=dict.fromkeys(MAIN_METRICS, float(gain_QM[:, 0].mean())),
        queries=len(hits_Q),
        left_out=0,
        a=0.55,
        b=1.5,
        intervals={},
        segments=[],
        deciles=[],
        index_recall=None,
        calibration=None,
        query_ids=np.arange(len(hits_Q)),
        per_query=QueryValues(gain_QM, np.ones_like(gain_QM)),
    )
