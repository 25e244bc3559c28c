"""Listed pairs of a query and a column (a label row, a label's vector): their scores, without any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of a query and a column of this rank.

    Attributes:
        rows: int64 [P], queries, ascending. columns: int64 [P].
    """

    rows: Tensor
    columns: Tensor

    @staticmethod
    def union(*parts: Pairs) -> Pairs:
        """All pairs of the parts, one part after another: not for `pair_scores`, which wants them sorted."""
        return Pairs(torch.cat([p.rows for p in parts]), torch.cat([p.columns for p in parts]))


def pair_scores(query_GD: Tensor, row_UD: Tensor, query_P: Tensor, row_P: Tensor) -> Tensor:
    """Inner products of listed pairs: out[p] = <query_GD[query_P[p]], row_UD[row_P[p]]>.

    Args:
        query_P, row_P: int64 [P]; query_P ascending.
    Returns:
        [P]. Backward: two sparse-dense products.
    """
    return cast(Tensor, _PairScores.apply(query_GD, row_UD, query_P, row_P))


class _PairScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_GD: Tensor, row_UD: Tensor, query_P: Tensor, row_P: Tensor
    ) -> Tensor:
        ctx.save_for_backward(query_GD, row_UD, query_P, row_P)
        return torch.einsum(
            "pd,pd->p", query_GD.index_select(0, query_P), row_UD.index_select(0, row_P)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad_P,) = grads
        query_GD, row_UD, query_P, row_P = ctx.saved_tensors
        grad_query_GD = _sparse_product(query_P, row_P, grad_P, len(query_GD), row_UD)
        order = torch.argsort(row_P, stable=True)
        grad_row_UD = _sparse_product(
            row_P[order], query_P[order], grad_P[order], len(row_UD), query_GD
        )
        return grad_query_GD, grad_row_UD, None, None


def _sparse_product(
    rows: Tensor, columns: Tensor, values: Tensor, num_rows: int, dense: Tensor
) -> Tensor:
    """The sparse matrix with `values` at (rows ascending, columns) times `dense`; an embedding bag is the fastest."""
    counts = torch.bincount(rows, minlength=num_rows)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return F.embedding_bag(
        columns, dense, starts, mode="sum", per_sample_weights=values, include_last_offset=True
    )
