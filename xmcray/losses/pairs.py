"""Listed pairs of a query and a column, and their scores without those of any other pair.

A column is a label row, the vector of a label's text, or the vector of another query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from xmcray.parallel.transfers import to_device


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of a row (mostly a query) and a column of this rank.

    Methods list pairs on the host. Losses cut them there, and move them to the device of the scores.

    Attributes:
        rows: int64 [P], ascending unless a function says otherwise.
        columns: int64 [P].
        weights: float64 [P], how much each pair counts as a positive; None if all count 1.
    """

    rows: Tensor
    columns: Tensor
    weights: Tensor | None = None

    def to(self, device: torch.device) -> Pairs:
        """The same pairs on another device, without waiting for it."""
        rows, columns = to_device([self.rows, self.columns], device)
        weights = self.weights
        if weights is not None:
            (weights,) = to_device([weights], device)
        return Pairs(rows, columns, weights)

    def swapped(self) -> Pairs:
        """The pairs (column, row), in the same order: rows are no longer ascending."""
        return Pairs(self.columns, self.rows, self.weights)

    def weighted(self, loss_P: Tensor) -> Tensor:
        """Losses of the pairs, each as much as the pair counts."""
        if self.weights is None:
            return loss_P
        weight_P = self.weights
        if weight_P.device != loss_P.device:
            (weight_P,) = to_device([weight_P], loss_P.device)
        return loss_P * weight_P.to(loss_P.dtype)

    @staticmethod
    def union(first: Pairs, second: Pairs) -> Pairs:
        """The pairs of both, one after the other: not sorted, so not for `pair_scores`.

        Without weights, because these are pairs that are no negatives.
        """
        rows = torch.cat([first.rows, second.rows])
        columns = torch.cat([first.columns, second.columns])
        return Pairs(rows, columns)

    def column_blocks(self, size: int, num_columns: int, device: torch.device) -> list[Pairs]:
        """The pairs of each block of columns, on a device; columns count from the block's first.

        Args:
            size: Columns of a block; the last one may have fewer.
            num_columns: Columns of all blocks.
            device: Of the results.
        """
        blocks = self.swapped().row_blocks(size, num_columns, device)
        return [block.swapped() for block in blocks]

    def row_blocks(self, size: int, num_rows: int, device: torch.device) -> list[Pairs]:
        """The pairs of each block of rows, on a device; rows count from the block's first.

        The pairs are sorted and cut on the host, so the device is never asked how many a block has.
        A mask on the device would stop the host twice for each block.

        Args:
            size: Rows of a block; the last one may have fewer.
            num_rows: Rows of all blocks.
            device: Of the results.
        """
        num_blocks = math.ceil(num_rows / size)
        block_P = self.rows // size
        # A stable sort keeps the order of the pairs within a block, and so the order of sums.
        sorted_P, order_P = torch.sort(block_P, stable=True)
        block_numbers = torch.arange(num_blocks)
        ends = torch.searchsorted(sorted_P, block_numbers, right=True).tolist()
        # The first row of block b is b * size.
        row_in_block_P = self.rows[order_P] - sorted_P * size
        weights = None if self.weights is None else self.weights[order_P]
        pairs = Pairs(row_in_block_P, self.columns[order_P], weights).to(device)
        blocks = []
        start = 0
        for end in ends:
            span = slice(start, end)
            weights = None if pairs.weights is None else pairs.weights[span]
            blocks.append(Pairs(pairs.rows[span], pairs.columns[span], weights))
            start = end
        return blocks


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
        ctx: Any,
        query_GD: Tensor,
        row_UD: Tensor,
        query_P: Tensor,
        row_P: Tensor,
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
            row_P[order_P],
            query_P[order_P],
            grad_P[order_P],
            len(row_UD),
            query_GD,
        )
        return grad_query_GD, grad_row_UD, None, None


def _sparse_product(
    rows: Tensor,
    columns: Tensor,
    values: Tensor,
    num_rows: int,
    dense: Tensor,
) -> Tensor:
    """The sparse matrix with `values` at (rows, columns), times `dense`; rows ascending."""
    # Not `bincount`, which asks the device for the largest row, and so makes the host wait.
    counts = rows.new_zeros(num_rows + 1)
    counts.scatter_add_(0, rows + 1, torch.ones_like(rows))
    starts = counts.cumsum(0)
    # A weighted embedding bag computes the same as a sparse product and was the fastest way.
    return F.embedding_bag(
        columns,
        dense,
        starts,
        mode="sum",
        per_sample_weights=values,
        include_last_offset=True,
    )
