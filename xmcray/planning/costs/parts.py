"""Seconds of the products and passes that losses are made of."""

from __future__ import annotations

import math

from xmcray.planning.costs.base import block
from xmcray.planning.step import VALUE, Step


def all_labels(step: Step, columns: float, chunk: float = 8192) -> float:
    """`losses.bce.full_bce`: three products, softplus and sigmoid of all scores, the gradient of all rows."""
    load, rates, dim = step.load, step.rates, step.shape.dim
    chunk = min(chunk, columns)
    grid, chunks = load.queries * columns, math.ceil(columns / chunk)
    products = 3 * rates.product(load.queries, columns, dim)
    passes = grid / max(1, chunk * load.queries) * rates.move(chunk * load.queries * VALUE, 5)
    listed = chunks * (12 * rates.call_s + load.positives / step.shard.workers * rates.call_s / 500)
    scalars = grid * (rates.softplus_s + rates.exp_s)
    return products + scalars + passes + rates.move(columns * dim * VALUE, 4) + listed


def softmax(step: Step, columns: float, dim: int) -> float:
    """`losses.columns.log_sum_exp` and listed pairs: two products forward and backward, then two for gradients."""
    load, rates = step.load, step.rates
    grid, row = load.queries * columns, dim * VALUE
    kept = block(grid)
    passes = grid / max(1.0, kept) * rates.move(kept * VALUE, 14)
    pairs = load.positives / step.shard.workers
    listed = 3 * rates.read_rows(pairs, row, columns * row) + rates.move(pairs * row, 4)
    return 4 * rates.product(load.queries, columns, dim) + 2 * grid * rates.exp_s + passes + listed
