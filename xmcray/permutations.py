"""Random orders of 0 .. size - 1 whose parts are computed alone.

An epoch of 5 * 10^8 queries has an order of 4 GB, which every rank would hold. Beyond
`MAX_STORED_SIZE` numbers an order is therefore a keyed permutation: a function of a position that
needs no memory. Shorter orders are shuffled arrays, as they were before keyed permutations came, so
that runs of such corpora stay the same, bit for bit.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt

from xmcray.types import Int64Array, spans

MAX_STORED_SIZE = 1 << 24
_ROUNDS = 6
_POSITIONS_AT_ONCE = 1 << 16  # their intermediate results fit into a processor's cache
_HALF_WORD = np.uint64(32)

_Words = npt.NDArray[np.uint64]


class Permutation(Protocol):
    """An order of the numbers 0 .. size - 1."""

    def take(self, positions: Int64Array) -> Int64Array:
        """The numbers at some positions of the order."""


def random_permutation(generator: np.random.Generator, size: int) -> Permutation:
    """A random order of 0 .. size - 1, drawn from `generator`."""
    if size <= MAX_STORED_SIZE:
        return StoredPermutation(generator.permutation(size))
    return KeyedPermutation(generator, size)


def random_sample(generator: np.random.Generator, size: int, count: int) -> Int64Array:
    """The first `count` numbers of a random order of 0 .. size - 1; all if there are no more."""
    order = random_permutation(generator, size)
    return order.take(np.arange(min(size, count)))


class StoredPermutation:
    """An order that lies in memory.

    Args:
        numbers: int64 [size], the order.
    """

    def __init__(self, numbers: Int64Array) -> None:
        self._numbers = numbers

    def take(self, positions: Int64Array) -> Int64Array:
        """The numbers at some positions of the order."""
        return self._numbers[positions]


class KeyedPermutation:
    """An order whose numbers are computed from their positions: a generalised Feistel network.

    A position is split into two digits, x = a * right + left with left < a and right < b, where
    a * b is the smallest such product that is not below the size. Each round adds a keyed hash of
    one digit to the other, which can be undone, so the network permutes 0 .. a * b - 1. Results of
    `size` and more, fewer than a in all, are put through the network again until they lie below
    (cycle walking). Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
    2002, sections 4 and 5.

    Args:
        generator: draws the keys.
        size: numbers of the order, 1 .. 2^62.
    """

    def __init__(self, generator: np.random.Generator, size: int) -> None:
        self._size = np.uint64(size)
        left_base = math.isqrt(size - 1) + 1
        # The product of both bases is at least the size: this is size / left_base, rounded up.
        right_base = -(-size // left_base)
        self._left_base = np.uint64(left_base)
        self._right_base = np.uint64(right_base)
        self._keys: _Words = generator.integers(0, 2**64, size=_ROUNDS, dtype=np.uint64)

    def take(self, positions: Int64Array) -> Int64Array:
        """The numbers at some positions of the order."""
        numbers = np.empty(len(positions), np.int64)
        for block in spans(len(positions), _POSITIONS_AT_ONCE):
            numbers[block] = self._walk(positions[block].astype(np.uint64))
        return numbers

    def _walk(self, words: _Words) -> _Words:
        words = self._network(words)
        outside = np.flatnonzero(words >= self._size)
        # A cycle that starts below `size` comes back there, so this ends.
        while len(outside):
            words[outside] = self._network(words[outside])
            outside = outside[words[outside] >= self._size]
        return words

    def _network(self, words: _Words) -> _Words:
        bases = (self._left_base, self._right_base)
        other, digit = np.divmod(words, self._left_base)
        for round_number, key in enumerate(self._keys):
            base = bases[round_number % 2]
            digit += _hash_below(other ^ key, base)
            # The sum of two digits is below twice the base, so this is the remainder.
            digit -= base * (digit >= base)
            # The next round adds to the other digit.
            changed = digit
            digit = other
            other = changed
        # The number of rounds is even: each digit has its first base again.
        return other * self._left_base + digit


def _hash_below(words: _Words, bound: np.uint64) -> _Words:
    """Hashes words to numbers below a bound of at most 2^32, nearly uniformly."""
    # The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014); products wrap at 2^64.
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    # The last shift of SplitMix64 changes the lower half alone, and only the upper one is used.
    words >>= _HALF_WORD
    # A fraction of 2^32 times the bound replaces a division.
    words *= bound
    words >>= _HALF_WORD
    return words
