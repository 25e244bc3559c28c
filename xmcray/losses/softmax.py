"""Softmax losses over columns that are split over ranks: decoupled (DEXML, Eq. 5), plain (Eq. 3), SoftTop-k (Eq. 6).

Each takes the positives as listed pairs of a query and a column of this rank and returns this rank's sum; whoever
calls it divides. Scores are inner products times `scale` = 1 / temperature.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from xmcray.losses.columns import log_sum_exp, top_k_threshold
from xmcray.losses.pairs import Pairs, pair_scores

_LINEAR = 40.0  # from here log(1 + e^x) is x in float64; torch's own 20 is a relative error of 1e-9 in the gradient


def decoupled_softmax(
    query_GD: Tensor, column_UD: Tensor, positives: Pairs, not_negatives: Pairs, scale: float
) -> Tensor:
    """sum over positives of -log(e^s / (e^s + sum over negatives of e^s')): positives do not compete (DEXML, Eq. 5).

    Args:
        not_negatives: pairs that are left out of the denominator: all positives, also those that are not listed in
            `positives` because they were not drawn, and a query's own label.
    """
    log_z_G = log_sum_exp(query_GD, column_UD, not_negatives.rows, not_negatives.columns, scale)
    score_P = pair_scores(query_GD, column_UD, positives.rows, positives.columns) * scale
    return F.softplus(log_z_G[positives.rows] - score_P, threshold=_LINEAR).sum()


def softmax(
    query_GD: Tensor,
    column_UD: Tensor,
    positives: Pairs,
    skipped: Pairs,
    scale: float,
    weight_P: Tensor | None = None,
) -> Tensor:
    """sum over positives of -log(e^s / sum over all columns of e^s') (DEXML, Eq. 3; UniDEC's PSL with weights 1 / |P|).

    Args:
        skipped: pairs that do not count in the denominator. weight_P: of each positive, 1 if not given.
    """
    log_z_G = log_sum_exp(query_GD, column_UD, skipped.rows, skipped.columns, scale)
    score_P = pair_scores(query_GD, column_UD, positives.rows, positives.columns) * scale
    loss_P = log_z_G[positives.rows] - score_P
    return (loss_P if weight_P is None else loss_P * weight_P).sum()


def soft_top_k(
    query_GD: Tensor,
    column_UD: Tensor,
    positives: Pairs,
    skipped: Pairs,
    k: float,
    alpha: float,
    scale: float,
) -> Tensor:
    """sum over positives of -log z, z = sigmoid(alpha * (s + t)) and sum of z = k over all columns (DEXML, Eq. 6)."""
    threshold_G = top_k_threshold(
        query_GD, column_UD, skipped.rows, skipped.columns, k, alpha, scale
    )
    score_P = pair_scores(query_GD, column_UD, positives.rows, positives.columns) * scale
    return F.softplus(-alpha * (score_P + threshold_G[positives.rows]), threshold=_LINEAR).sum()
