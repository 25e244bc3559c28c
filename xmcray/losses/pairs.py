"""Listed pairs of a query and a column, and their scores without those of any other pair.

A column is a label row, the vector of a label's text, or the vector of another query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of a row (mostly a query) and a column of this rank.

    Attributes:
        rows: int64 [P], ascending unless a function says otherwise.
        columns: int64 [P].
    """

    rows: Tensor
    columns: Tensor

    def swapped(self) -> Pairs:
        """The pairs (column, row), in the same order: rows are no longer ascending."""
        return Pairs(self.columns, self.rows)

    @staticmethod
    def union(first: Pairs, second: Pairs) -> Pairs:
        """The pairs of both, one after the other: not sorted, so not for `pair_scores`."""
        rows = torch.cat([first.rows, second.rows])
        columns = torch.cat([first.columns, second.columns])
        return Pairs(rows, columns)


def pair_scores(query_GD: Tensor, row_UD: Tensor, query_P: Tensor, row_P: Tensor) -> Tensor:
    """Inner products of listed pairs: out[p] = <query_GD[query_P[p]], row_UD[row_P[p]]>.

    Args:
        query_GD: Query vectors.
        row_UD: Column vectors.
        query_P: int64 [P], ascending.
        row_P: int64 [P].

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
        query_PD = query_GD.index_select(0, query_P)
        row_PD = row_UD.index_select(0, row_P)
        return torch.einsum("pd,pd->p", query_PD, row_PD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad_P,) = grads
        query_GD, row_UD, query_P, row_P = ctx.saved_tensors
        grad_query_GD = _sparse_product(query_P, row_P, grad_P, len(query_GD), row_UD)
        # The transposed product needs the pairs sorted by row.
        order_P = torch.argsort(row_P, stable=True)
        grad_row_UD = _sparse_product(
            row_P[order_P], query_P[order_P], grad_P[order_P], len(row_UD), query_GD
        )
        return grad_query_GD, grad_row_UD, None, None


def _sparse_product(
    rows: Tensor, columns: Tensor, values: Tensor, num_rows: int, dense: Tensor
) -> Tensor:
    """The sparse matrix with `values` at (rows, columns), times `dense`; rows ascending."""
    counts = torch.bincount(rows, minlength=num_rows)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    # A weighted embedding bag computes the same as a sparse product and was the fastest way.
    return F.embedding_bag(
        columns, dense, starts, mode="sum", per_sample_weights=values, include_last_offset=True
    )
