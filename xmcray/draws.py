"""Random draws as pure functions of (seed, purpose, epoch or step, position).

A draw never depends on a rank, on the number of ranks, or on earlier draws. So a run may be cut,
resumed or spread over other machines and still draws the same numbers. The generator is Philox,
whose stream can be entered at any position.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from xmcray.types import BoolArray, Int64Array

_WORDS_PER_BLOCK = 4  # a Philox block has 4 words of 64 bits
_LANES_PER_BLOCK = 16  # a lane has 16 bits
_LANE_RANGE = 1 << 16


def generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """A generator for one purpose at one place in training, for example (0, "pool", step)."""
    return np.random.Generator(_philox(seed, purpose, *key))


def torch_seed(seed: int, purpose: str, *key: int) -> int:
    """A 63-bit seed for torch, from the same key."""
    return int(_philox(seed, purpose, *key).random_raw() >> 1)


def uniform_labels(seed: int, step: int, num_labels: int, count: int) -> Int64Array:
    """`count` distinct labels below `num_labels`, ascending; every subset is equally likely.

    All labels if there are no more than `count`.
    """
    if count >= num_labels:
        return np.arange(num_labels, dtype=np.int64)
    random = generator(seed, "uniform", step)
    labels = random.choice(num_labels, count, replace=False, shuffle=False)
    return np.sort(labels.astype(np.int64))


def keep_mask(
    seed: int,
    purpose: str,
    step: int,
    start: int,
    stop: int,
    width: int,
    rate: float,
) -> BoolArray:
    """Dropout mask of global positions start .. stop - 1.

    A position has the same mask on every rank, because each has its own blocks of the stream.

    Args:
        seed: Of the run.
        purpose: Name of what is dropped.
        step: Optimisation step.
        start: First position.
        stop: One past the last position.
        width: Values of a position.
        rate: Probability of False, rounded to a multiple of 2^-16.

    Returns:
        bool [stop - start, width], True for what is kept.
    """
    blocks_per_row = math.ceil(width / _LANES_PER_BLOCK)
    stream = _philox(seed, purpose, step)
    stream.advance(start * blocks_per_row)
    num_rows = stop - start
    words = np.asarray(stream.random_raw(num_rows * blocks_per_row * _WORDS_PER_BLOCK))
    # Each word of 64 bits gives four lanes of 16 bits; the last block of a row may be too wide.
    lanes = words.view(np.uint16).reshape(num_rows, blocks_per_row * _LANES_PER_BLOCK)
    kept: BoolArray = lanes[:, :width] >= round(rate * _LANE_RANGE)
    return kept


def _philox(seed: int, purpose: str, *key: int) -> np.random.Philox:
    digest = hashlib.blake2b(purpose.encode(), digest_size=4).digest()
    purpose_number = int.from_bytes(digest, "little")
    return np.random.Philox(np.random.SeedSequence([seed, purpose_number, *key]))
