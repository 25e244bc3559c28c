"""Random draws as pure functions of what they are for: (seed, purpose, epoch or step, position).

A draw never depends on a rank, on the number of ranks, or on what was drawn before; so a run may be cut, resumed or
spread over other machines and still draw the same numbers. The generator is Philox, whose stream can be entered at
any position.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from xmcray.types import Int64Array

_LANES_PER_BLOCK = 16  # one Philox block is 4 words of 64 bits; a lane has 16 bits
_LANE_RANGE = 1 << 16


def generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """A generator for one purpose at one place in training, for example (0, "pool", step)."""
    return np.random.Generator(_philox(seed, purpose, *key))


def torch_seed(seed: int, purpose: str, *key: int) -> int:
    """A 63-bit seed for torch, from the same key."""
    return int(_philox(seed, purpose, *key).random_raw() >> 1)


def uniform_labels(seed: int, step: int, num_labels: int, count: int) -> Int64Array:
    """`count` distinct labels of [num_labels), ascending, all subsets equally likely; clipped to num_labels."""
    if count >= num_labels:
        return np.arange(num_labels, dtype=np.int64)
    chosen = generator(seed, "uniform", step).choice(
        num_labels, count, replace=False, shuffle=False
    )
    return np.sort(chosen.astype(np.int64))


def keep_mask(
    seed: int, purpose: str, step: int, start: int, stop: int, width: int, rate: float
) -> npt.NDArray[np.bool_]:
    """Dropout mask bool [stop - start, width] of global positions start .. stop - 1; True with probability 1 - rate.

    Row i is the same whoever asks for it: each position has its own blocks of the stream. The rate is rounded to a
    multiple of 2^-16.
    """
    blocks = -(-width // _LANES_PER_BLOCK)
    stream = _philox(seed, purpose, step)
    stream.advance(start * blocks)
    words = stream.random_raw((stop - start) * blocks * 4)
    lanes = np.asarray(words).view(np.uint16).reshape(stop - start, blocks * _LANES_PER_BLOCK)
    kept: npt.NDArray[np.bool_] = lanes[:, :width] >= round(rate * _LANE_RANGE)
    return kept


def _philox(seed: int, purpose: str, *key: int) -> np.random.Philox:
    name = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=4).digest(), "little")
    return np.random.Philox(np.random.SeedSequence([seed, name, *key]))
