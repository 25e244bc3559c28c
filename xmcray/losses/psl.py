"""UniDEC's loss: pick some labels for a batch, then softmax from queries to labels and from labels to queries.

The labels are columns that are split over ranks; the vectors of the G queries are on every rank. A label lies on one
rank, so its softmax over the queries needs no other rank. https://arxiv.org/abs/2405.03714
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from xmcray.losses.pairs import Pairs
from xmcray.losses.softmax import softmax

Normaliser = Literal["paln", "pal"]
Reduction = Literal["mean_anchors", "sum_per_query"]


@dataclass(frozen=True, slots=True)
class Picked:
    """What of the truth is in the picked labels.

    Attributes:
        positives: pairs of a query and a column of this rank, however the label came into the pool.
        skipped: pairs that are neither positive nor negative (a query's own label).
        count_G: int64 [G], |P_i^B|: positives of each query in the columns of all ranks.
        num_labels: columns of all ranks that are positive for some query.
    """

    positives: Pairs
    skipped: Pairs
    count_G: Tensor
    num_labels: int


def pick_some_labels(
    query_GD: Tensor,
    column_UD: Tensor,
    picked: Picked,
    scale: float,
    balance: float = 0.5,
    normaliser: Normaliser = "paln",
    reduction: Reduction = "mean_anchors",
) -> Tensor:
    """balance * l_q2l + (1 - balance) * l_l2q, times the number of queries G, this rank's share of it.

    l_q2l sums over queries i, and l_l2q over labels l with a query in the batch (UniDEC, PSL loss):
        -1 / |P_i^B| sum over p in P_i^B of log(e^s_ip / sum over columns of e^s_il)
        -1 / |P_l^B| sum over p in P_l^B of log(e^s_pl / sum over queries of e^s_ql)

    Args:
        scale: 1 / temperature, of the inner products.
        normaliser: "paln" as above; "pal" leaves 1 / |P| out.
        reduction: "mean_anchors" divides each direction by its number of anchors with a positive, "sum_per_query" (the
            paper's sums) both by G.
    """
    total = query_GD.new_zeros(())
    if balance > 0:
        count_P = picked.count_G[picked.positives.rows]
        weight_P = _weights(
            count_P, int((picked.count_G > 0).sum()), query_GD, normaliser, reduction
        )
        to_labels = softmax(query_GD, column_UD, picked.positives, picked.skipped, scale, weight_P)
        total = total + balance * to_labels
    if balance < 1:
        total = total + (1 - balance) * _to_queries(
            query_GD, column_UD, picked, scale, normaliser, reduction
        )
    return total


def _to_queries(
    query_GD: Tensor,
    column_UD: Tensor,
    picked: Picked,
    scale: float,
    normaliser: Normaliser,
    reduction: Reduction,
) -> Tensor:
    """Only columns with a positive are scored: the others are nobody's anchor."""
    column_A, anchor_P = picked.positives.columns.unique(return_inverse=True)
    place_U = column_A.new_full((len(column_UD),), -1)
    place_U[column_A] = torch.arange(len(column_A), device=column_A.device)
    skip_anchor = place_U[picked.skipped.columns]
    skip = skip_anchor >= 0
    score_AG = column_UD.index_select(0, column_A) @ query_GD.T * scale
    score_AG = score_AG.index_put(
        (skip_anchor[skip], picked.skipped.rows[skip]), score_AG.new_tensor(-torch.inf)
    )
    loss_P = score_AG.logsumexp(dim=1)[anchor_P] - score_AG[anchor_P, picked.positives.rows]
    count_P = torch.bincount(anchor_P, minlength=len(column_A))[anchor_P]
    return (loss_P * _weights(count_P, picked.num_labels, query_GD, normaliser, reduction)).sum()


def _weights(
    count_P: Tensor,
    num_anchors: int,
    query_GD: Tensor,
    normaliser: Normaliser,
    reduction: Reduction,
) -> Tensor:
    """Weight of each positive, such that the sum is G times the loss."""
    share = len(query_GD) / max(num_anchors, 1) if reduction == "mean_anchors" else 1.0
    weight_P = torch.full_like(count_P, share, dtype=query_GD.dtype)
    return weight_P / count_P if normaliser == "paln" else weight_P
