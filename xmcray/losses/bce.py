"""Binary cross-entropy against sampled labels (ASTRA, Eq. 2) and against all labels (Renée).

With s the score of a query and a label, bce(s, 1) = softplus(-s) and bce(s, 0) = softplus(s): a
positive costs nothing if its score is high, a negative if its score is low. Both functions return
this rank's sum over its labels; `training/step.py` divides.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from xmcray.losses.pairs import Pairs


def sampled_bce(
    pair_score_P: Tensor,
    pair_is_positive_P: Tensor,
    pair_weight_P: Tensor | None,
    pool_score_GC: Tensor,
    skip_rows: Tensor,
    skip_columns: Tensor,
    pool_weight: float,
) -> Tensor:
    """Sum over listed pairs, plus a weighted sum over negatives shared by all queries.

    Source: ASTRA, Eq. 2.

    Args:
        pair_score_P: Scores of positives and hard negatives of this rank's labels.
        pair_is_positive_P: bool [P].
        pair_weight_P: Weight of each pair (|P_i| / cap if positives were capped), or None for 1.
        pool_score_GC: Scores of all G queries with this rank's C pool labels.
        skip_rows: int64, queries of the pool entries that do not count, because the label is
            positive, hard, or the query itself.
        skip_columns: int64, columns of those entries.
        pool_weight: Weight of a pool entry. L / c makes the sum an unbiased estimate of the sum
            over all negatives (Lemma 4.1).
    """
    sign_P = torch.where(pair_is_positive_P, -1.0, 1.0).to(pair_score_P.dtype)
    pair_loss_P = F.softplus(sign_P * pair_score_P)
    if pair_weight_P is not None:
        pair_loss_P = pair_loss_P * pair_weight_P
    pool_loss = cast(Tensor, _SkippingSoftplusSum.apply(pool_score_GC, skip_rows, skip_columns))
    return pair_loss_P.sum() + pool_weight * pool_loss


def full_bce(
    query_GD: Tensor,
    row_SD: Tensor,
    positives: Pairs,
    skipped: Pairs,
    chunk_labels: int = 8192,
    logit_prior: float = 0.0,
) -> Tensor:
    """Sum over all labels of this rank, in label chunks: scores are never kept.

    Source: Renée. The gradient of a score is sigmoid(score) - y, so both gradients are computed in
    the forward pass.

    Args:
        query_GD: Vectors of all G queries.
        row_SD: Vectors of this rank's labels.
        positives: Relevant pairs on the host, columns local to this rank. Weights multiply their
            terms.
        skipped: Pairs on the host that are neither positive nor negative (a query and its own
            label).
        chunk_labels: Labels that are scored at once. Memory is O(G x chunk_labels) besides the
            gradients.
        logit_prior: Added to every score.
    """
    total = _ChunkedBce.apply(query_GD, row_SD, positives, skipped, chunk_labels, logit_prior)
    return cast(Tensor, total)


class _SkippingSoftplusSum(torch.autograd.Function):
    """Sum of softplus over a matrix without listed entries; the backward is one sigmoid."""

    @staticmethod
    def forward(ctx: Any, score_GC: Tensor, skip_rows: Tensor, skip_columns: Tensor) -> Tensor:
        # softplus(-inf) = 0 and sigmoid(-inf) = 0: a skipped entry has neither loss nor gradient.
        # A number that is filled in on the device needs no copy from the host.
        never = score_GC.new_full((), -torch.inf)
        kept_GC = score_GC.index_put((skip_rows, skip_columns), never)
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
        positives: Pairs,
        skipped: Pairs,
        chunk_labels: int,
        logit_prior: float,
    ) -> Tensor:
        total = query_GD.new_zeros(())
        grad_query_GD = torch.zeros_like(query_GD)
        grad_row_SD = torch.empty_like(row_SD)
        device = query_GD.device
        positive_blocks = positives.column_blocks(chunk_labels, len(row_SD), device)
        skipped_blocks = skipped.column_blocks(chunk_labels, len(row_SD), device)
        blocks = zip(positive_blocks, skipped_blocks, strict=True)
        for i, (block_positives, block_skipped) in enumerate(blocks):
            start = i * chunk_labels
            # Rows may be stored in bfloat16; the product is computed in the queries' precision.
            row_CD = row_SD[start : start + chunk_labels].to(query_GD.dtype)
            stop = start + len(row_CD)
            score_GC = (query_GD @ row_CD.T).add_(logit_prior)

            score_GC[block_skipped.rows, block_skipped.columns] = -torch.inf
            # bce(s, 1) = softplus(-s) = bce(-s, 0). So positives change their sign and are then
            # treated like negatives, which keeps the last bits of a small loss.
            positive = block_positives.rows, block_positives.columns
            negated_P = -score_GC[positive]
            score_GC[positive] = negated_P
            total += F.softplus(score_GC).sum()
            weight_P: Tensor | float = 1.0
            if block_positives.weights is not None:
                weight_P = block_positives.weights.to(negated_P)
                # The sum above has counted them once.
                total += ((weight_P - 1) * F.softplus(negated_P)).sum()

            # In place: the scores are not needed any more.
            grad_GC = score_GC.sigmoid_()
            grad_GC[positive] *= -weight_P
            grad_query_GD.addmm_(grad_GC, row_CD)
            grad_row_SD[start:stop] = grad_GC.T @ query_GD
        ctx.save_for_backward(grad_query_GD, grad_row_SD)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_query_GD, grad_row_SD = ctx.saved_tensors
        grad_query_GD = grad_query_GD * grads[0]
        grad_row_SD = grad_row_SD * grads[0]
        return grad_query_GD, grad_row_SD, None, None, None, None
