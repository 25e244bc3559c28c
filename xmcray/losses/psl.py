"""UniDEC's loss: pick some labels for a batch, then softmax in both directions.

A query should prefer its labels to the other picked labels, and a label its queries to the other
queries of the batch. The labels are columns that are split over ranks; the vectors of the G queries
are on every rank. A label lies on one rank, so its softmax over the queries needs no other rank.
https://arxiv.org/abs/2405.03714
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from xmcray.losses.pairs import Pairs
from xmcray.losses.softmax import softmax
from xmcray.parallel.transfers import to_device

Normaliser = Literal["paln", "pal"]
Reduction = Literal["mean_anchors", "sum_per_query"]


@dataclass(frozen=True, slots=True)
class Picked:
    """The true labels of the queries that are among the picked labels.

    Attributes:
        positives: Pairs of a query and a column of this rank. It does not matter which query
            brought the label into the pool.
        skipped: Pairs that are neither positive nor negative (a query's own label, or
            a positive that counts 0).
        count_G: int64 [G] on the host, |P_i^B|: positives of each query in the columns of all ranks.
        num_labels: Columns of all ranks that are positive for some query.
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
    """This rank's part of G times balance * l_q2l + (1 - balance) * l_l2q: a sum over queries.

    l_q2l sums over queries i, and l_l2q over labels l with a query in the batch:
        -1 / |P_i^B| sum over p in P_i^B of log(e^s_ip / sum over columns of e^s_il)
        -1 / |P_l^B| sum over p in P_l^B of log(e^s_pl / sum over queries of e^s_ql)

    Source: UniDEC, PSL loss.

    Args:
        query_GD: Vectors of all queries, the same on every rank.
        column_UD: Vectors of this rank's labels.
        picked: Which of them are true.
        scale: 1 / temperature, of the inner products.
        balance: Share of the direction from queries to labels.
        normaliser: "paln" as above; "pal" leaves 1 / |P| out.
        reduction: "sum_per_query" counts each anchor as one query (the paper's sums). With
            "mean_anchors" an anchor counts as so many queries that each direction, divided by G, is
            a mean over its anchors with a positive.
    """
    total = query_GD.new_zeros(())
    if balance > 0:
        anchor_weight = 1.0
        if reduction == "mean_anchors":
            num_anchors = int((picked.count_G > 0).sum())
            anchor_weight = len(query_GD) / max(num_anchors, 1)
        count_P = picked.count_G[picked.positives.rows]
        (count_P,) = to_device([count_P], query_GD.device)
        weight_P = _weights(count_P, anchor_weight, query_GD.dtype, normaliser)
        to_labels = softmax(query_GD, column_UD, picked.positives, picked.skipped, scale, weight_P)
        total = total + balance * to_labels
    if balance < 1:
        anchor_weight = 1.0
        if reduction == "mean_anchors":
            anchor_weight = len(query_GD) / max(picked.num_labels, 1)
        to_queries = _to_queries(query_GD, column_UD, picked, scale, anchor_weight, normaliser)
        total = total + (1 - balance) * to_queries
    return total


def _to_queries(
    query_GD: Tensor,
    column_UD: Tensor,
    picked: Picked,
    scale: float,
    anchor_weight: float,
    normaliser: Normaliser,
) -> Tensor:
    """Softmax over queries for each column with a positive; the other columns are not scored."""
    # Anchors are found on the host: the device would have to say how many there are.
    anchor_columns_A, anchor_P = picked.positives.columns.unique(return_inverse=True)
    # Column -> its anchor, -1 for a column without a positive.
    anchor_U = anchor_columns_A.new_full((len(column_UD),), -1)
    anchor_U[anchor_columns_A] = torch.arange(len(anchor_columns_A))
    skipped_anchor = anchor_U[picked.skipped.columns]
    is_anchor = skipped_anchor >= 0
    count_P = torch.bincount(anchor_P, minlength=len(anchor_columns_A))[anchor_P]
    anchor_columns_A, anchor_P, query_P, count_P, skipped_anchor, skipped_query = to_device(
        [
            anchor_columns_A,
            anchor_P,
            picked.positives.rows,
            count_P,
            skipped_anchor[is_anchor],
            picked.skipped.rows[is_anchor],
        ],
        query_GD.device,
    )

    score_AG = column_UD.index_select(0, anchor_columns_A) @ query_GD.T * scale
    never = score_AG.new_full((), -torch.inf)
    score_AG = score_AG.index_put((skipped_anchor, skipped_query), never)
    loss_P = score_AG.logsumexp(dim=1)[anchor_P] - score_AG[anchor_P, query_P]
    loss_P = loss_P * _weights(count_P, anchor_weight, query_GD.dtype, normaliser)
    return picked.positives.weighted(loss_P).sum()


def _weights(
    count_P: Tensor,
    anchor_weight: float,
    dtype: torch.dtype,
    normaliser: Normaliser,
) -> Tensor:
    """Weight of each positive: its anchor's, with "paln" shared by the positives of the anchor."""
    weight_P = torch.full_like(count_P, anchor_weight, dtype=dtype)
    return weight_P / count_P if normaliser == "paln" else weight_P
