"""The one-vs-all classifier, its label rows split over ranks; a rank holds and updates its own rows only."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xmcray import draws
from xmcray.nn.row_table import RowOptimConfig, RowTable
from xmcray.parallel.partition import LabelPartition

_INIT_BLOCK = 1 << 16  # rows drawn together; a row's start value does not depend on the number of ranks


class ShardedClassifier:
    """Rows [S, D] of this rank's labels.

    Args:
        partition: who owns which label.
        dim: D.
        config: optimiser of the rows.
        init_std: rows start as normal draws with this deviation; 0 starts them at zero.
        seed: of the draws.
        dtype, device: of the rows and their optimiser state.
    """

    def __init__(
        self,
        partition: LabelPartition,
        dim: int,
        config: RowOptimConfig,
        *,
        init_std: float = 0.02,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.partition = partition
        weight_SD = torch.zeros(partition.size, dim, dtype=dtype, device=device)
        if init_std:
            _fill_normal(weight_SD, partition.start, init_std, seed)
        self.table = RowTable(weight_SD, config)


def _fill_normal(weight_SD: Tensor, start: int, std: float, seed: int) -> None:
    rows, dim = weight_SD.shape
    for block in range(start // _INIT_BLOCK, -(-(start + rows) // _INIT_BLOCK)):
        first = block * _INIT_BLOCK
        values = draws.generator(seed, "classifier", block).standard_normal((_INIT_BLOCK, dim), dtype=np.float32)
        low, high = max(first, start), min(first + _INIT_BLOCK, start + rows)
        weight_SD[low - start : high - start] = torch.from_numpy(values[low - first : high - first] * std)


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
    def forward(ctx: Any, query_GD: Tensor, row_UD: Tensor, query_P: Tensor, row_P: Tensor) -> Tensor:
        ctx.save_for_backward(query_GD, row_UD, query_P, row_P)
        return torch.einsum("pd,pd->p", query_GD.index_select(0, query_P), row_UD.index_select(0, row_P))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad_P,) = grads
        query_GD, row_UD, query_P, row_P = ctx.saved_tensors
        grad_query_GD = _sparse_product(query_P, row_P, grad_P, len(query_GD), row_UD)
        order = torch.argsort(row_P, stable=True)
        grad_row_UD = _sparse_product(row_P[order], query_P[order], grad_P[order], len(row_UD), query_GD)
        return grad_query_GD, grad_row_UD, None, None


def _sparse_product(rows: Tensor, columns: Tensor, values: Tensor, num_rows: int, dense: Tensor) -> Tensor:
    """The sparse matrix with `values` at (rows ascending, columns) times `dense`; an embedding bag is the fastest."""
    counts = torch.bincount(rows, minlength=num_rows)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return F.embedding_bag(columns, dense, starts, mode="sum", per_sample_weights=values, include_last_offset=True)
