"""Numbers per query that depend on all columns of a score matrix that no rank holds whole.

The columns (vectors of labels, and of other queries) are split over ranks; the vectors of the G
queries are on every rank. Scores exist only in blocks, in the forward pass and again in the
backward pass. With these numbers and the scores of listed pairs (losses/pairs.py), the loss of a
rank is a sum over its own pairs, and the sum over ranks is the loss.

Letters of axes: G queries of all ranks, R of them in a block; U columns of this rank, C of them in
a block; D dimensions. P queries of a block are polished.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from xmcray.losses.pairs import Pairs
from xmcray.parallel import collectives
from xmcray.parallel.transfers import to_device

BLOCK_FLOATS = 1 << 23  # scores in a block; a few arrays of this size are in memory at a time
_MOST_STEPS = 60  # of Newton's method, which needs up to 40 for scores in distant clusters
_FLAT = 0.01  # sum of z (1 - z) below which a threshold is polished


def log_sum_exp(
    query_GD: Tensor,
    column_UD: Tensor,
    skipped: Pairs,
    scale: float,
    log_q_U: Tensor | None = None,
) -> Tensor:
    """log sum_c (exp(scale * <q_i, c>) / Q(c)) over the columns of all ranks; collective.

    Args:
        query_GD: All queries, the same on every rank.
        column_UD: This rank's columns, possibly none.
        skipped: Pairs that do not count, on the host, columns local to this rank.
        scale: 1 / temperature.
        log_q_U: log Q of this rank's columns, the probability that a column was drawn; None if
            none was left to chance.

    Returns:
        [G], the same on every rank; -inf for a query without a column that counts. The backward
        pass first sums the gradient over ranks.
    """
    return cast(Tensor, _LogSumExp.apply(query_GD, column_UD, skipped, scale, log_q_U))


def top_k_threshold(
    query_GD: Tensor,
    column_UD: Tensor,
    skipped: Pairs,
    k_G: Tensor,
    alpha: float,
    scale: float,
    *,
    widest: int,
) -> Tensor:
    """t_i such that sum_c sigmoid(alpha * (scale * <q_i, c> + t_i)) = k_i; collective.

    The sum is over the columns of all ranks. The threshold is added to the scores: a column with a
    score of -t_i has a sigmoid of 0.5. Source: DEXML, Eq. 6.

    Args:
        query_GD: All queries, the same on every rank.
        column_UD: This rank's columns, possibly none.
        skipped: Pairs that do not count, on the host, columns local to this rank.
        k_G: For each query, above 0 and less than the number of its columns that count; it may be a
            fraction; on the host.
        alpha: Steepness.
        scale: 1 / temperature.
        widest: Most columns of any rank. Ranks meet for each block of queries, so all of them must
            cut the same blocks.

    Returns:
        [G], the same on every rank. Backward by the implicit function theorem:
        dt/ds_m = -v_m / sum(v) with v = z (1 - z).
    """
    height = max(1, BLOCK_FLOATS // max(1, widest))
    threshold_G = _Threshold.apply(query_GD, column_UD, skipped, k_G, alpha, scale, height)
    return cast(Tensor, threshold_G)


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_GD: Tensor,
        column_UD: Tensor,
        skipped: Pairs,
        scale: float,
        log_q_U: Tensor | None,
    ) -> Tensor:
        # log(0) = -inf starts the sum: a rank may have no column.
        own_G = query_GD.new_full((len(query_GD),), -torch.inf)
        for _, _, score_GC in _column_blocks(query_GD, column_UD, skipped, scale, log_q_U):
            own_G = torch.logaddexp(own_G, score_GC.logsumexp(dim=1))
        all_G = _log_sum_over_ranks(own_G)
        ctx.save_for_backward(query_GD, column_UD, all_G)
        ctx.skipped = skipped
        ctx.scale = scale
        ctx.log_q_U = log_q_U
        return all_G

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_GD, column_UD, all_G = ctx.saved_tensors
        # Every rank used the result for pairs of its own; together they give the gradient.
        grad_G = grads[0].contiguous().clone()
        collectives.sum_over_ranks(grad_G)
        # A query without a column has -inf, and must not turn its zero gradient into NaN.
        has_columns_G = all_G.isfinite()
        shift_G1 = torch.where(has_columns_G, all_G, 0.0)[:, None]
        grad_G1 = torch.where(has_columns_G, grad_G, 0.0)[:, None]

        grad_query_GD = torch.zeros_like(query_GD)
        grad_column_UD = torch.empty_like(column_UD)
        for start, column_CD, score_GC in _column_blocks(
            query_GD,
            column_UD,
            ctx.skipped,
            ctx.scale,
            ctx.log_q_U,
        ):
            # d logsumexp / d score is the softmax, exp(score - logsumexp).
            grad_GC = score_GC.sub_(shift_G1).exp_().mul_(ctx.scale * grad_G1)
            grad_query_GD.addmm_(grad_GC, column_CD)
            stop = start + len(column_CD)
            torch.mm(grad_GC.T, query_GD, out=grad_column_UD[start:stop])
        return grad_query_GD, grad_column_UD, None, None, None


class _Threshold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_GD: Tensor,
        column_UD: Tensor,
        skipped: Pairs,
        k_G: Tensor,
        alpha: float,
        scale: float,
        height: int,
    ) -> Tensor:
        (k_G,) = to_device([k_G.to(query_GD.dtype)], query_GD.device)
        thresholds = []
        for start, score_RU in _row_blocks(query_GD, column_UD, skipped, scale, height):
            k_R = k_G[start : start + len(score_RU)]
            threshold_R, slope_R = _solve(score_RU, k_R, alpha)
            # Only a whole number of columns can have all of the sum.
            is_flat_R = (slope_R < _FLAT) & (k_R == k_R.round())
            thresholds.append(_polished(score_RU, threshold_R, is_flat_R, alpha))
        threshold_G = torch.cat(thresholds)
        ctx.save_for_backward(query_GD, column_UD, threshold_G)
        ctx.skipped = skipped
        ctx.alpha = alpha
        ctx.scale = scale
        ctx.height = height
        return threshold_G

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_GD, column_UD, threshold_G = ctx.saved_tensors
        # As in _LogSumExp: each rank knows the gradient of its own pairs only.
        grad_G = grads[0].contiguous().clone()
        collectives.sum_over_ranks(grad_G)
        grad_query_GD = torch.empty_like(query_GD)
        grad_column_UD = torch.zeros_like(column_UD)
        blocks = _row_blocks(query_GD, column_UD, ctx.skipped, ctx.scale, ctx.height)
        for start, score_RU in blocks:
            stop = start + len(score_RU)
            rows = slice(start, stop)
            distance_RU = score_RU.add_(threshold_G[rows, None]).mul_(ctx.alpha).abs_()
            # With x = alpha (score + t), log(z (1 - z)) = -|x| - 2 log(1 + exp(-|x|)). The product
            # itself is lost where z rounds to 1, and where all columns are far from the threshold.
            log_slope_RU = F.softplus(-distance_RU).mul_(-2).sub_(distance_RU)
            log_sum_R = _log_sum_over_ranks(log_slope_RU.logsumexp(dim=1))
            # A query without columns has -inf, and its shares must be 0.
            log_sum_R = torch.where(log_sum_R.isfinite(), log_sum_R, 0.0)
            share_RU = log_slope_RU.sub_(log_sum_R[:, None]).exp_()
            grad_RU = share_RU.mul_(-ctx.scale * grad_G[rows, None])
            torch.mm(grad_RU, column_UD, out=grad_query_GD[rows])
            grad_column_UD.addmm_(grad_RU.T, query_GD[rows])
        return grad_query_GD, grad_column_UD, None, None, None, None, None


def _solve(score_RU: Tensor, k_R: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Thresholds of some queries by Newton's method inside a bracket; collective.

    Newton is applied to the logarithm of the sum, which is all but linear below the threshold: from
    the lower end of the bracket, the first step is the threshold that exp in place of the sigmoid
    would have. Where a step leaves the bracket, the bracket is halved.

    Args:
        score_RU: Scores with this rank's columns; -inf for skipped ones.
        k_R: Sum of the sigmoids over the columns of all ranks, for each query.
        alpha: Steepness.

    Returns:
        The threshold [R], and the sum of z (1 - z) [R] over the columns of all ranks before the
        last step, which was tiny.
    """
    low_R, high_R = _bracket(score_RU, alpha)
    threshold_R = low_R
    z_RU = torch.empty_like(score_RU)
    rounding = 4 * torch.finfo(score_RU.dtype).eps
    for _ in range(_MOST_STEPS):
        # alpha * (score + threshold), without an array for the sum in brackets.
        shift_R1 = (alpha * threshold_R)[:, None]
        torch.add(shift_R1, score_RU, alpha=alpha, out=z_RU).sigmoid_()
        sum_R, squares_R = _sum_and_squares(z_RU)
        slope_R = sum_R - squares_R

        # The sum rises with the threshold.
        too_low_R = sum_R < k_R
        low_R = torch.where(too_low_R, threshold_R, low_R)
        high_R = torch.where(too_low_R, high_R, threshold_R)

        # d log(sum) / dt = alpha * slope / sum
        newton_R = threshold_R + (k_R / sum_R).log() * sum_R / (alpha * slope_R)
        inside_R = (newton_R >= low_R) & (newton_R <= high_R)
        next_R = torch.where(inside_R, newton_R, (low_R + high_R) / 2)
        # A solved query stays where it is: from there on, steps are noise.
        solved_R = (sum_R - k_R).abs() <= rounding * k_R
        next_R = torch.where(solved_R, threshold_R, next_R)

        moved_R = (next_R - threshold_R).abs()
        threshold_R = next_R
        is_moving_R = moved_R > rounding * (threshold_R.abs() + 1 / alpha)
        # Processors of different kinds round differently, and all ranks must leave together.
        if not collectives.sum_over_ranks(is_moving_R.sum()):
            break
    return threshold_R, slope_R


def _polished(score_RU: Tensor, threshold_R: Tensor, is_flat_R: Tensor, alpha: float) -> Tensor:
    """The thresholds, exact also for queries whose k best columns are far ahead of the rest; collective.

    For them the sum rounds to k anywhere in the gap. What the k best lack to 1 and what the rest
    have above 0 must balance, and these small numbers do not round away. The logarithm of each is
    all but linear in the threshold, with a slope of alpha and -alpha, so two steps are enough.

    Args:
        score_RU: Scores with this rank's columns; -inf for skipped ones.
        threshold_R: At which the sum of z rounds to k.
        is_flat_R: Whether the sum of z hardly changes with the threshold there, and k is whole.
        alpha: Steepness.
    """
    # All ranks must polish the same queries.
    votes_R = collectives.sum_over_ranks(is_flat_R.int())
    flat_P = votes_R.nonzero().flatten()
    if not len(flat_P):
        return threshold_R
    score_PU = score_RU[flat_P]
    polished_P = threshold_R[flat_P]
    for _ in range(2):
        x_PU = alpha * (score_PU + polished_P[:, None])
        log_small_PU = F.logsigmoid(-x_PU.abs())
        log_rest_P = torch.where(x_PU < 0, log_small_PU, -torch.inf).logsumexp(dim=1)
        log_lacking_P = torch.where(x_PU >= 0, log_small_PU, -torch.inf).logsumexp(dim=1)
        log_both_2P = _log_sum_over_ranks(torch.stack([log_rest_P, log_lacking_P]))
        step_P = (log_both_2P[1] - log_both_2P[0]) / (2 * alpha)
        # A query without columns has nothing to balance.
        polished_P = polished_P + step_P.nan_to_num(0.0, 0.0, 0.0)
    return threshold_R.index_copy(0, flat_P, polished_P)


def _bracket(score_RU: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Two thresholds [R] of each query, low and high; collective.

    Every sigmoid is about 0 at the low one, and about 1 at the high one.
    """
    if score_RU.shape[1]:
        # A skipped score of -inf must not become the minimum.
        counted_RU = torch.where(score_RU.isfinite(), score_RU, torch.inf)
        least_R = counted_RU.amin(dim=1)
        most_R = score_RU.amax(dim=1)
    else:
        # A rank without columns must not change what the others find.
        least_R = score_RU.new_full((len(score_RU),), torch.inf)
        most_R = -least_R
    # One exchange for both: the minimum of -most over ranks is -1 times their maximum.
    own_extremes_R2 = torch.stack([-most_R, least_R], dim=1)
    extremes_R2 = collectives.gather_equal(own_extremes_R2).amin(dim=0)
    # A query without any column, of which all thresholds are true.
    extremes_R2 = torch.where(extremes_R2.isfinite(), extremes_R2, 0.0)
    # At -max - 30 / alpha every sigmoid is below 1e-13; at -min + 30 / alpha all are 1.
    low_R = extremes_R2[:, 0] - 30 / alpha
    high_R = -extremes_R2[:, 1] + 30 / alpha
    return low_R, high_R


def _sum_and_squares(z_RU: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of z and of its square for each query, over the columns of all ranks; collective."""
    # A norm squares without an array for the squares.
    norm_R = torch.linalg.vector_norm(z_RU, dim=1)
    own_2R = torch.stack([z_RU.sum(dim=1), norm_R.square()])
    sum_R, squares_R = collectives.sum_over_ranks(own_2R)
    return sum_R, squares_R


def _log_sum_over_ranks(log_of_rank: Tensor) -> Tensor:
    """The logarithm of the sum of exp(log_of_rank) over ranks; collective."""
    # Logarithms cannot be summed by an all-reduce, so every rank gets all of them.
    return collectives.gather_equal(log_of_rank).logsumexp(dim=0)


def _column_blocks(
    query_GD: Tensor,
    column_UD: Tensor,
    skipped: Pairs,
    scale: float,
    log_q_U: Tensor | None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Blocks of columns: first column, columns [C, D], scores [G, C] with -inf for skipped pairs."""
    width = max(1, BLOCK_FLOATS // max(1, len(query_GD)))
    skipped_blocks = skipped.column_blocks(width, len(column_UD), query_GD.device)
    for i, block in enumerate(skipped_blocks):
        start = i * width
        column_CD = column_UD[start : start + width]
        score_GC = (query_GD @ column_CD.T).mul_(scale)
        if log_q_U is not None:
            score_GC.sub_(log_q_U[start : start + width])
        # exp(-inf) = 0: a skipped pair adds nothing.
        score_GC[block.rows, block.columns] = -torch.inf
        yield start, column_CD, score_GC


def _row_blocks(
    query_GD: Tensor,
    column_UD: Tensor,
    skipped: Pairs,
    scale: float,
    height: int,
) -> Iterator[tuple[int, Tensor]]:
    """Blocks of `height` queries: first query, scores [R, U] with -inf for skipped pairs."""
    skipped_blocks = skipped.row_blocks(height, len(query_GD), query_GD.device)
    for i, block in enumerate(skipped_blocks):
        start = i * height
        query_RD = query_GD[start : start + height]
        score_RU = (query_RD @ column_UD.T).mul_(scale)
        score_RU[block.rows, block.columns] = -torch.inf
        yield start, score_RU
