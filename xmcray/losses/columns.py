"""What a loss needs to know of all columns of a score matrix that no rank holds whole.

The columns (vectors of labels, and of other queries) are split over ranks; the vectors of the G queries are on every
rank. Both functions give every rank one number per query that depends on the columns of all ranks. Scores exist only
in blocks, forward and again backward. With them and the scores of listed pairs (nn/classifier.py), a rank's loss is a
sum over its own pairs, and the sum over ranks is the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from xmcray.parallel import collectives

BLOCK_FLOATS = 1 << 23  # scores that exist at a time
_BISECTIONS = 60  # halve a bracket of some hundred down to the last digits of float64


def log_sum_exp(
    query_GD: Tensor, column_UD: Tensor, skip_rows: Tensor, skip_columns: Tensor, scale: float = 1.0
) -> Tensor:
    """log sum_c exp(scale * <q_i, c>) over the columns of all ranks.

    Args:
        query_GD: all queries, the same on every rank. column_UD: this rank's columns, perhaps none.
        skip_rows, skip_columns: int64, pairs of a query and a column of this rank that do not count.
        scale: 1 / temperature.
    Returns:
        [G], the same on every rank; -inf where no column counts. The backward sums its gradient over ranks first.
    """
    return cast(Tensor, _LogSumExp.apply(query_GD, column_UD, skip_rows, skip_columns, scale))


def top_k_threshold(
    query_GD: Tensor,
    column_UD: Tensor,
    skip_rows: Tensor,
    skip_columns: Tensor,
    k: float,
    alpha: float,
    scale: float = 1.0,
) -> Tensor:
    """t_i such that sum_c sigmoid(alpha * (scale * <q_i, c> + t_i)) = k over the columns of all ranks (DEXML, Eq. 6).

    Args:
        k: less than the number of columns that count for any query. Others as for `log_sum_exp`.
    Returns:
        [G], the same on every rank. Backward by the implicit function: dt/ds_m = -v_m / sum(v), v = z (1 - z).
    """
    return cast(
        Tensor, _Threshold.apply(query_GD, column_UD, skip_rows, skip_columns, k, alpha, scale)
    )


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_GD: Tensor,
        column_UD: Tensor,
        skip_rows: Tensor,
        skip_columns: Tensor,
        scale: float,
    ) -> Tensor:
        own_G = query_GD.new_full((len(query_GD),), -torch.inf)
        for _, _, score_GC in _blocks(query_GD, column_UD, skip_rows, skip_columns, scale):
            own_G = torch.logaddexp(own_G, score_GC.logsumexp(dim=1))
        all_G = collectives.gather_equal(own_G).logsumexp(dim=0)
        ctx.save_for_backward(query_GD, column_UD, skip_rows, skip_columns, all_G)
        ctx.scale = scale
        return all_G

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_GD, column_UD, skip_rows, skip_columns, all_G = ctx.saved_tensors
        counted_G = all_G.isfinite()
        shift_G1 = torch.where(counted_G, all_G, 0.0)[:, None]
        grad_G1 = torch.where(
            counted_G, collectives.sum_over_ranks(grads[0].contiguous().clone()), 0.0
        )[:, None]
        grad_query_GD, grad_column_UD = torch.zeros_like(query_GD), torch.empty_like(column_UD)
        for start, columns, score_GC in _blocks(
            query_GD, column_UD, skip_rows, skip_columns, ctx.scale
        ):
            grad_GC = score_GC.sub_(shift_G1).exp_().mul_(ctx.scale * grad_G1)
            grad_query_GD.addmm_(grad_GC, columns)
            torch.mm(grad_GC.T, query_GD, out=grad_column_UD[start : start + len(columns)])
        return grad_query_GD, grad_column_UD, None, None, None


class _Threshold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_GD: Tensor,
        column_UD: Tensor,
        skip_rows: Tensor,
        skip_columns: Tensor,
        k: float,
        alpha: float,
        scale: float,
    ) -> Tensor:
        parts = [
            _solve(score_RU, k, alpha)
            for _, score_RU in _row_blocks(query_GD, column_UD, skip_rows, skip_columns, scale)
        ]
        threshold_G = torch.cat(parts)
        ctx.save_for_backward(query_GD, column_UD, skip_rows, skip_columns, threshold_G)
        ctx.settings = alpha, scale
        return threshold_G

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_GD, column_UD, skip_rows, skip_columns, threshold_G = ctx.saved_tensors
        alpha, scale = ctx.settings
        grad_G = collectives.sum_over_ranks(grads[0].contiguous().clone())
        grad_query_GD, grad_column_UD = torch.empty_like(query_GD), torch.zeros_like(column_UD)
        for start, score_RU in _row_blocks(query_GD, column_UD, skip_rows, skip_columns, scale):
            rows = slice(start, start + len(score_RU))
            z_RU = torch.sigmoid(alpha * (score_RU + threshold_G[rows, None]))
            slope_RU = z_RU * (1 - z_RU)
            sum_R = collectives.sum_over_ranks(slope_RU.sum(dim=1)).clamp_min(
                torch.finfo(z_RU.dtype).tiny
            )
            grad_RU = slope_RU.mul_((-scale * grad_G[rows] / sum_R)[:, None])
            torch.mm(grad_RU, column_UD, out=grad_query_GD[rows])
            grad_column_UD.addmm_(grad_RU.T, query_GD[rows])
        return grad_query_GD, grad_column_UD, None, None, None, None, None


def _solve(score_RU: Tensor, k: float, alpha: float) -> Tensor:
    """Thresholds of some queries by bisection, every rank with its own columns; skipped columns are -inf."""
    low = score_RU.new_full((len(score_RU),), torch.inf)
    if score_RU.shape[1]:
        low = torch.where(score_RU.isfinite(), score_RU, torch.inf).amin(dim=1)
    high = score_RU.amax(dim=1) if score_RU.shape[1] else -low
    # below -max - 30 / alpha every sigmoid is under 1e-13 of one; above -min + 30 / alpha all are one
    bound = collectives.gather_equal(torch.stack([-high, low], dim=1)).amin(dim=0)
    low, high = bound[:, 0] - 30 / alpha, -bound[:, 1] + 30 / alpha
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        total = collectives.sum_over_ranks(
            torch.sigmoid(alpha * (score_RU + middle[:, None])).sum(dim=1)
        )
        low, high = torch.where(total < k, middle, low), torch.where(total < k, high, middle)
    return (low + high) / 2


def _blocks(
    query_GD: Tensor, column_UD: Tensor, skip_rows: Tensor, skip_columns: Tensor, scale: float
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """First column, columns [C, D] and scores [G, C] of blocks of columns; what is skipped is -inf."""
    width = max(1, BLOCK_FLOATS // max(1, len(query_GD)))
    for start in range(0, len(column_UD), width):
        columns = column_UD[start : start + width]
        score_GC = (query_GD @ columns.T).mul_(scale)
        inside = (skip_columns >= start) & (skip_columns < start + len(columns))
        score_GC[skip_rows[inside], skip_columns[inside] - start] = -torch.inf
        yield start, columns, score_GC


def _row_blocks(
    query_GD: Tensor, column_UD: Tensor, skip_rows: Tensor, skip_columns: Tensor, scale: float
) -> Iterator[tuple[int, Tensor]]:
    """First query and scores [R, U] of blocks of queries, the same blocks on every rank."""
    widest = max(collectives.gather_objects(len(column_UD)))
    height = max(1, BLOCK_FLOATS // max(1, widest))
    for start in range(0, len(query_GD), height):
        queries = query_GD[start : start + height]
        score_RU = (queries @ column_UD.T).mul_(scale)
        inside = (skip_rows >= start) & (skip_rows < start + len(queries))
        score_RU[skip_rows[inside] - start, skip_columns[inside]] = -torch.inf
        yield start, score_RU
