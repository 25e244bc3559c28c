"""Binary cross-entropy against sampled labels (ASTRA, Eq. 2) and against all labels (Renée).

With s the score of a query and a label, bce(s, 1) = softplus(-s) and bce(s, 0) = softplus(s).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from xmcray.types import LossTerms


def sampled_bce(
    pair_score_P: Tensor,
    pair_is_positive_P: Tensor,
    pair_weight_P: Tensor | None,
    pool_score_GC: Tensor,
    skip_rows: Tensor,
    skip_columns: Tensor,
    pool_weight: float,
) -> LossTerms:
    """Sum over listed pairs, plus weighted sum over a pool of negatives shared by all queries (ASTRA, Eq. 2).

    Args:
        pair_score_P: scores of positives and hard negatives of this rank's labels, one entry per (query, label).
        pair_is_positive_P: bool [P].
        pair_weight_P: weight of each pair, or None for 1 (|P_i| / cap where positives were capped).
        pool_score_GC: scores of all G queries with this rank's C pool labels.
        skip_rows, skip_columns: int64, entries of the pool that are positive, hard or the query itself: not counted.
        pool_weight: L / c makes the sum an unbiased estimate of the sum over all negatives (Lemma 4.1).
    Returns:
        This rank's sum over its labels, and G.
    """
    sign_P = torch.where(pair_is_positive_P, -1.0, 1.0).to(pair_score_P.dtype)
    pair_loss_P = F.softplus(sign_P * pair_score_P)
    if pair_weight_P is not None:
        pair_loss_P = pair_loss_P * pair_weight_P
    pool_loss = cast(Tensor, _SkippingSoftplusSum.apply(pool_score_GC, skip_rows, skip_columns))
    return LossTerms(pair_loss_P.sum() + pool_weight * pool_loss, len(pool_score_GC))


def full_bce(
    query_GD: Tensor,
    row_SD: Tensor,
    positive_rows: Tensor,
    positive_labels: Tensor,
    skip_rows: Tensor,
    skip_labels: Tensor,
    chunk_labels: int = 8192,
    offset: float = 0.0,
) -> LossTerms:
    """Binary cross-entropy over all labels of this rank, in label chunks: scores are never kept (Renée).

    Args:
        query_GD: vectors of all G queries. row_SD: this rank's classifier rows.
        positive_rows, positive_labels: int64 [P], relevant pairs, labels local to this rank.
        skip_rows, skip_labels: int64, pairs that are neither positive nor negative (a query and its own label).
        chunk_labels: memory is O(G x chunk_labels) besides the gradients.
        offset: added to every score.
    Returns:
        This rank's sum over its labels, and G. Both gradients are computed in the forward pass, because the gradient
        of a score is sigmoid(score) - y.
    """
    total = cast(
        Tensor,
        _ChunkedBce.apply(
            query_GD,
            row_SD,
            positive_rows,
            positive_labels,
            skip_rows,
            skip_labels,
            chunk_labels,
            offset,
        ),
    )
    return LossTerms(total, len(query_GD))


class _SkippingSoftplusSum(torch.autograd.Function):
    """Sum of softplus over a matrix but for listed entries; the backward is a sigmoid, computed once."""

    @staticmethod
    def forward(ctx: Any, score_GC: Tensor, skip_rows: Tensor, skip_columns: Tensor) -> Tensor:
        kept_GC = score_GC.index_put((skip_rows, skip_columns), score_GC.new_tensor(-torch.inf))
        ctx.save_for_backward(kept_GC)
        return F.softplus(kept_GC).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (kept_GC,) = ctx.saved_tensors
        return torch.sigmoid(kept_GC).mul_(grads[0]), None, None


class _ChunkedBce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_GD: Tensor,
        row_SD: Tensor,
        positive_rows: Tensor,
        positive_labels: Tensor,
        skip_rows: Tensor,
        skip_labels: Tensor,
        chunk_labels: int,
        offset: float,
    ) -> Tensor:
        total = query_GD.new_zeros(())
        grad_query_GD, grad_row_SD = torch.zeros_like(query_GD), torch.empty_like(row_SD)
        for start in range(0, len(row_SD), chunk_labels):
            rows = row_SD[start : start + chunk_labels].to(
                query_GD.dtype
            )  # stored narrower, perhaps
            score_GC = (query_GD @ rows.T).add_(offset)
            skip = (skip_labels >= start) & (skip_labels < start + len(rows))
            score_GC[skip_rows[skip], skip_labels[skip] - start] = -torch.inf
            inside = (positive_labels >= start) & (positive_labels < start + len(rows))
            at = positive_rows[inside], positive_labels[inside] - start
            total += F.softplus(score_GC).sum() - score_GC[at].sum()
            grad_GC = score_GC.sigmoid_()
            grad_GC[at] -= 1
            grad_query_GD.addmm_(grad_GC, rows)
            grad_row_SD[start : start + len(rows)] = grad_GC.T @ query_GD
        ctx.save_for_backward(grad_query_GD, grad_row_SD)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_query_GD, grad_row_SD = ctx.saved_tensors
        return grad_query_GD * grads[0], grad_row_SD * grads[0], None, None, None, None, None, None
