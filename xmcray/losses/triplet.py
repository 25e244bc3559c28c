"""Triplet loss on cosines with a clipped dynamic margin, and the regulariser of prototypes (PRIME, Eq. 4-7, 13).

An anchor is a row of a score matrix, the others are its columns. Each function returns this rank's part of a sum or a
mean over the anchors of all ranks.
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
    """sum over anchors of max(s_n - s_p + m, 0), m = clip(|s_p - s_n|, gamma_min, gamma_max) without a gradient.

    An anchor's positives are averaged. An anchor without a positive, or without a negative, costs nothing.

    Args:
        score_AC: cosines of this rank's anchors.
        positives: pairs (anchor, column), in any order. not_negatives: pairs that are not negatives: all positives.
        gamma_min, gamma_max: equal for a fixed margin.
        inverted: turns the sign of s_n - s_p where 0 < s_p - s_n < gamma_min, as the text of Eq. 13 does.
        num_negatives: the hardest of each anchor that count; 0 for all.
        temperature: the terms of a positive are weighted with the softmax of s_n / temperature over those that violate
            the margin, and summed (the authors' code); None is the mean over all negatives.
        detached: the weights carry no gradient; they do in the authors' code.
    """
    positive_P1 = score_AC[positives.rows, positives.columns][:, None]
    negative_PK = hardest(score_AC, not_negatives, num_negatives)[0][positives.rows]
    gap_PK = positive_P1 - negative_PK
    margin_PK = gap_PK.detach().abs().clamp(gamma_min, gamma_max)
    if inverted:
        gap_PK = torch.where((gap_PK > 0) & (gap_PK < gamma_min), -gap_PK, gap_PK)
    # not relu: between gamma_min and gamma_max the term is 0, and its gradient is 1 in the definition
    term_PK = (margin_PK - gap_PK).clamp_min(0)
    if temperature is None:
        loss_P = term_PK.sum(dim=1) / negative_PK.isfinite().sum(dim=1).clamp_min(1)
    else:
        loss_P = (
            term_PK
            * _weights(term_PK, negative_PK.detach() if detached else negative_PK, temperature)
        ).sum(1)
    share_P = torch.bincount(positives.rows, minlength=len(score_AC))[positives.rows]
    return (loss_P / share_P).sum()


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
    """Prototypes shall be nearer to the positives and farther from the negatives than texts are (PRIME, Eq. 6, 7).

    1/2 [mean over positives of max(0, s_p - b_p + margin) + mean over negatives of max(0, b_n - s_n + margin)], b a
    cosine with a prototype and s with a text; the means are over the terms of all ranks that are not 0.

    Args:
        prototype_AC, text_AC: b and s of this rank's anchors. positives, not_negatives: as for `triplet`.
        num_negatives: of each anchor, those of largest b; 0 for all.
        hinge: as in the authors' code; otherwise terms may be negative and all of them are averaged (Eq. 6, 7).
    """
    gain_AC = prototype_AC - text_AC
    value_AK, column_AK = hardest(prototype_AC, not_negatives, num_negatives)
    near_P = margin - gain_AC[positives.rows, positives.columns]
    far_N = (margin + gain_AC.gather(1, column_AK))[value_AK.isfinite()]
    if hinge:
        near_P, far_N = F.relu(near_P), F.relu(far_N)
    counts = torch.stack(
        [((part != 0) if hinge else torch.ones_like(part)).sum() for part in (near_P, far_N)]
    )
    counts = collectives.sum_over_ranks(counts.to(prototype_AC.dtype)).clamp_min(1)
    return 0.5 * (near_P.sum() / counts[0] + far_N.sum() / counts[1])


def hardest(score_AC: Tensor, not_negatives: Pairs, count: int) -> tuple[Tensor, Tensor]:
    """Scores and columns [A, K] of each anchor's best negatives; the score is -inf where it has fewer than K."""
    masked_AC = score_AC.index_put(
        (not_negatives.rows, not_negatives.columns), score_AC.new_tensor(-torch.inf)
    )
    width = score_AC.shape[1]
    if not count or count >= width:
        return masked_AC, torch.arange(width, device=score_AC.device).expand_as(masked_AC)
    value_AK, column_AK = masked_AC.topk(count, dim=1)
    return value_AK, column_AK


def _weights(term_PK: Tensor, negative_PK: Tensor, temperature: float) -> Tensor:
    """Softmax over the terms that are not 0; rows without any are weighted alike, which counts for nothing."""
    violates_PK = term_PK > 0
    logit_PK = torch.where(violates_PK, negative_PK / temperature, -torch.inf)
    return torch.where(violates_PK.any(dim=1, keepdim=True), logit_PK, 0.0).softmax(dim=1)
