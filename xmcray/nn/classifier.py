"""The one-vs-all classifier, its label rows split over ranks; a rank holds and updates its own rows only."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from xmcray import draws
from xmcray.nn.row_table import RowOptimConfig, RowTable
from xmcray.parallel.partition import LabelPartition

_INIT_BLOCK = (
    1 << 16
)  # rows drawn together; a row's start value does not depend on the number of ranks


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
        self.table = RowTable(weight_SD, config, partition.start)


def _fill_normal(weight_SD: Tensor, start: int, std: float, seed: int) -> None:
    rows, dim = weight_SD.shape
    for block in range(start // _INIT_BLOCK, -(-(start + rows) // _INIT_BLOCK)):
        first = block * _INIT_BLOCK
        values = draws.generator(seed, "classifier", block).standard_normal(
            (_INIT_BLOCK, dim), dtype=np.float32
        )
        low, high = max(first, start), min(first + _INIT_BLOCK, start + rows)
        weight_SD[low - start : high - start] = torch.from_numpy(
            values[low - first : high - first] * std
        )
