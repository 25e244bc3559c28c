"""Rows of a one-vs-all classifier, split over ranks: a rank holds and updates its own only."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from xmcray import draws
from xmcray.errors import ConfigError
from xmcray.nn.row_table import RowOptimConfig, RowTable
from xmcray.parallel.partition import LabelPartition

# Rows are drawn in blocks of the global numbering, so a row's initial value does not depend on the
# number of ranks.
_INIT_BLOCK = 1 << 16


def classifier_rows(
    partition: LabelPartition,
    dim: int,
    config: RowOptimConfig,
    *,
    init_std: float = 0.02,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> RowTable:
    """A table of rows [S, D] of this rank's labels.

    Args:
        partition: which rank owns which label.
        dim: D.
        config: optimiser of the rows.
        init_std: standard deviation of the normal initial values; 0 starts the rows at zero.
        seed: of the initial values.
        dtype: of the rows and their optimiser state.
        device: of the rows and their optimiser state.

    Raises:
        ConfigError: rows in bfloat16 are computed with in float32, and the rest in float64.
    """
    if config.storage == "bfloat16" and dtype == torch.float64:
        raise ConfigError(
            "method.classifier.storage is bfloat16, but optim.precision is float64, expected rows in"
            " float32 then; leave one of them out"
        )
    weight_SD = torch.zeros(partition.size, dim, dtype=dtype, device=device)
    if init_std and weight_SD.device.type != "meta":  # meta tensors have no values
        _fill_normal(weight_SD, partition.start, init_std, seed)
    return RowTable(weight_SD, config, partition.start)


def _fill_normal(weight_SD: Tensor, start: int, std: float, seed: int) -> None:
    """Draws the rows from number `start` on."""
    rows, dim = weight_SD.shape
    stop = start + rows
    first_block = start // _INIT_BLOCK
    last_block = math.ceil(stop / _INIT_BLOCK)
    for block in range(first_block, last_block):
        generator = draws.generator(seed, "classifier", block)
        values = generator.standard_normal((_INIT_BLOCK, dim), dtype=np.float32)
        # The part of the block that this rank owns.
        first = block * _INIT_BLOCK
        low = max(first, start)
        high = min(first + _INIT_BLOCK, stop)
        own_values = values[low - first : high - first] * std
        weight_SD[low - start : high - start] = torch.from_numpy(own_values)
