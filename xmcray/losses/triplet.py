"""Triplet loss with a clipped dynamic margin, and the regulariser of prototypes (PRIME).

An anchor is a row of a score matrix; the other side of a pair is a column. An anchor should be
closer to its positives than to its negatives, by a margin. Source: PRIME, Eq. 3-7, 13, 14.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xmcray.losses.pairs import Pairs
from xmcray.parallel import collectives


def triplet(
    score_AC: Tensor,
    positives: Pairs,
    not_negatives: Pairs,
    *,
    gamma_min: float,
    gamma_max: float,
    inverted: bool = False,
    num_negatives: int = 100,
    temperature: float | None = 0.1,
    detached: bool = False,
) -> Tensor:
    """Sum over this rank's anchors of max(s_n - s_p + m, 0).

    m = clip(|s_p - s_n|, gamma_min, gamma_max), without a gradient. A pair whose gap s_p - s_n is at
    least gamma_min costs nothing and moves nothing. The positives of an anchor are averaged. An
    anchor without a positive or without a negative costs nothing.

    Args:
        score_AC: Cosines of this rank's anchors.
        positives: Pairs (anchor, column), in any order, on the device of the scores.
        not_negatives: Pairs that are not negatives: all positives and excluded labels.
        gamma_min: Lower bound of the margin; equal to `gamma_max` for a fixed margin.
        gamma_max: Upper bound of the margin.
        inverted: Turns the sign of s_n - s_p if 0 < s_p - s_n < gamma_min, as the text of Eq. 13
            does.
        num_negatives: The hardest negatives of each anchor that count; 0 for all.
        temperature: The terms of a positive are weighted with the softmax of s_n / temperature
            over those that violate the margin, and summed (the authors' code). None takes the mean
            over those that count.
        detached: The weights carry no gradient. They do in the authors' code.
    """
    positive_P1 = score_AC[positives.rows, positives.columns][:, None]
    negative_AK, _ = hardest(score_AC, not_negatives, num_negatives)
    negative_PK = negative_AK[positives.rows]
    gap_PK = positive_P1 - negative_PK
    margin_PK = gap_PK.detach().abs().clamp(gamma_min, gamma_max)
    if inverted:
        is_small_PK = (gap_PK > 0) & (gap_PK < gamma_min)
        gap_PK = torch.where(is_small_PK, -gap_PK, gap_PK)
    # Between gamma_min and gamma_max the margin is the gap, so the term is 0 and must not move the
    # scores (Eq. 3, 14). The derivative of relu at 0 is 0; that of clamp_min would be 1.
    term_PK = F.relu(margin_PK - gap_PK)
    if temperature is None:
        # An anchor with fewer than K negatives has scores of -inf, which do not count.
        num_negatives_P = negative_PK.isfinite().sum(dim=1).clamp_min(1)
        loss_P = term_PK.sum(dim=1) / num_negatives_P
    else:
        hardness_PK = negative_PK.detach() if detached else negative_PK
        loss_P = (term_PK * _weights(term_PK, hardness_PK, temperature)).sum(1)
    # Not `bincount`, which asks the device for the largest row, and so makes the host wait.
    num_positives_A = positives.rows.new_zeros(len(score_AC))
    num_positives_A.scatter_add_(0, positives.rows, torch.ones_like(positives.rows))
    num_positives_P = num_positives_A[positives.rows]
    return positives.weighted(loss_P / num_positives_P).sum()


def regulariser(
    prototype_AC: Tensor,
    text_AC: Tensor,
    positives: Pairs,
    not_negatives: Pairs,
    *,
    margin: float,
    num_negatives: int = 100,
    hinge: bool = True,
) -> Tensor:
    """Prototypes should be closer to the positives and farther from the negatives than texts are.

    With b a cosine with a prototype and s with a text, this rank's part of
        1/2 [mean over positives of max(0, s_p - b_p + margin)
             + mean over negatives of max(0, b_n - s_n + margin)].
    The means are over the terms of all ranks that are not 0. Source: PRIME, Eq. 6, 7.

    Args:
        prototype_AC: b of this rank's anchors.
        text_AC: s of this rank's anchors.
        positives: Pairs (anchor, column), in any order.
        not_negatives: Pairs that are not negatives.
        margin: m'.
        num_negatives: Negatives of each anchor with the largest b; 0 for all.
        hinge: As in the authors' code. Otherwise terms may be negative and all of them are
            averaged (Eq. 6, 7).
    """
    gain_AC = prototype_AC - text_AC
    value_AK, column_AK = hardest(prototype_AC, not_negatives, num_negatives)
    near_P = margin - gain_AC[positives.rows, positives.columns]
    far_N = (margin + gain_AC.gather(1, column_AK))[value_AK.isfinite()]
    if hinge:
        near_P = F.relu(near_P)
        far_N = F.relu(far_N)
        counts = torch.stack([(near_P != 0).sum(), (far_N != 0).sum()])
    else:
        # Filled on the device: a copy from the host would be one more wait.
        counts = torch.stack([near_P.new_full((), len(near_P)), far_N.new_full((), len(far_N))])
    counts = collectives.sum_over_ranks(counts.to(prototype_AC.dtype)).clamp_min(1)
    near_mean = positives.weighted(near_P).sum() / counts[0]
    far_mean = far_N.sum() / counts[1]
    return 0.5 * (near_mean + far_mean)


def hardest(score_AC: Tensor, not_negatives: Pairs, count: int) -> tuple[Tensor, Tensor]:
    """The `count` negatives of each anchor with the largest scores; 0 for all.

    Returns:
        Scores [A, K], -inf if an anchor has fewer than K negatives, and columns int64 [A, K].
    """
    entries = not_negatives.rows, not_negatives.columns
    masked_AC = score_AC.index_put(entries, score_AC.new_full((), -torch.inf))
    width = score_AC.shape[1]
    if not count or count >= width:
        columns = torch.arange(width, device=score_AC.device)
        return masked_AC, columns.expand_as(masked_AC)
    value_AK, column_AK = masked_AC.topk(count, dim=1)
    return value_AK, column_AK


def _weights(term_PK: Tensor, hardness_PK: Tensor, temperature: float) -> Tensor:
    """Softmax of hardness / temperature over the terms that are not 0; the others weigh nothing."""
    violates_PK = term_PK > 0
    logit_PK = torch.where(violates_PK, hardness_PK / temperature, -torch.inf)
    # A softmax over no term at all is NaN, so a row without one gets equal logits first.
    has_violation_P1 = violates_PK.any(dim=1, keepdim=True)
    weight_PK = torch.where(has_violation_P1, logit_PK, 0.0).softmax(dim=1)
    return torch.where(violates_PK, weight_PK, 0.0)
