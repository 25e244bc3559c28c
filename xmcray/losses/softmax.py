"""Softmax losses over columns that are split over ranks.

Decoupled (DEXML, Eq. 5), plain (Eq. 3) and SoftTop-k (Eq. 6). Each takes the positives as listed
pairs of a query and a column of this rank, on the host, and returns this rank's sum over them, each
as much as the pair counts; the sum over ranks is the loss, and `training/step.py` divides it. Scores
are inner products times `scale`, which is 1 / temperature. `query_GD` are all queries, the same on
every rank, and `column_UD` this rank's columns.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from xmcray.losses.columns import log_sum_exp, top_k_threshold
from xmcray.losses.pairs import Pairs, pair_scores
from xmcray.parallel.transfers import to_device

# From here on softplus(x) is x in float64. Torch's own threshold of 20 would cost a relative error
# of 1e-9 in the gradient.
_LINEAR = 40.0


def decoupled_softmax(
    query_GD: Tensor,
    column_UD: Tensor,
    positives: Pairs,
    not_negatives: Pairs,
    scale: float,
    log_q_U: Tensor | None = None,
) -> Tensor:
    """Sum over positives of -log(e^s / (e^s + sum over negatives of e^s' / Q)).

    Each positive competes with all negatives, but not with the other positives of its query.
    Source: DEXML, Eq. 5. With Q, the probability that a negative is among the columns, the sum over
    negatives estimates the one over all labels (methods/log_q.py).

    Args:
        query_GD: Vectors of all queries.
        column_UD: Vectors of this rank's columns.
        positives: Pairs that are learned.
        not_negatives: Pairs that are left out of the denominator: a query's own label and all
            positives, also those that are not in `positives` because they were not drawn.
        scale: 1 / temperature.
        log_q_U: log Q of this rank's columns, on the host; None counts each column once.
    """
    if log_q_U is not None:
        (log_q_U,) = to_device([log_q_U.to(query_GD.dtype)], query_GD.device)
    log_z_G = log_sum_exp(query_GD, column_UD, not_negatives, scale, log_q_U)
    positives = positives.to(query_GD.device)
    score_P = pair_scores(query_GD, column_UD, positives.rows, positives.columns) * scale
    # -log(e^s / (e^s + z)) = log(1 + z / e^s) = softplus(log z - s)
    loss_P = F.softplus(log_z_G[positives.rows] - score_P, threshold=_LINEAR)
    return positives.weighted(loss_P).sum()


def softmax(
    query_GD: Tensor,
    column_UD: Tensor,
    positives: Pairs,
    skipped: Pairs,
    scale: float,
    weight_P: Tensor | None = None,
) -> Tensor:
    """Sum over positives of -log(e^s / sum over all columns of e^s').

    Source: DEXML, Eq. 3; UniDEC's PSL with weights 1 / |P|.

    Args:
        query_GD: Vectors of all queries.
        column_UD: Vectors of this rank's columns.
        positives: Pairs that are learned.
        skipped: Pairs that do not count in the denominator.
        scale: 1 / temperature.
        weight_P: Weight of each positive, 1 if not given.
    """
    log_z_G = log_sum_exp(query_GD, column_UD, skipped, scale)
    positives = positives.to(query_GD.device)
    score_P = pair_scores(query_GD, column_UD, positives.rows, positives.columns) * scale
    loss_P = log_z_G[positives.rows] - score_P
    if weight_P is not None:
        loss_P = loss_P * weight_P
    return positives.weighted(loss_P).sum()


def soft_top_k(
    query_GD: Tensor,
    column_UD: Tensor,
    positives: Pairs,
    skipped: Pairs,
    k_G: Tensor,
    alpha: float,
    scale: float,
    *,
    widest: int,
) -> Tensor:
    """Sum over positives of -log z, with z = sigmoid(alpha * (s + t)).

    The threshold t of a query is such that its z over all columns sum to k: z is a soft answer to
    "is this column among the k best?". Source: DEXML, Eq. 6.

    Args:
        query_GD: Vectors of all queries.
        column_UD: Vectors of this rank's columns.
        positives: Pairs that are learned.
        skipped: Pairs that do not count in the sum.
        k_G: Sum of z over the columns, for each query, on the host.
        alpha: Steepness.
        scale: 1 / temperature.
        widest: Most columns of any rank.
    """
    threshold_G = top_k_threshold(query_GD, column_UD, skipped, k_G, alpha, scale, widest=widest)
    positives = positives.to(query_GD.device)
    score_P = pair_scores(query_GD, column_UD, positives.rows, positives.columns) * scale
    above_P = score_P + threshold_G[positives.rows]
    # -log(sigmoid(x)) = softplus(-x)
    loss_P = F.softplus(-alpha * above_P, threshold=_LINEAR)
    return positives.weighted(loss_P).sum()
