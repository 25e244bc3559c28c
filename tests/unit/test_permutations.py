"""Orders that are computed are orders: every number once, wherever a reader starts."""

from __future__ import annotations

import numpy as np
import pytest

from xmcray import draws
from xmcray.permutations import (
    KeyedPermutation,
    StoredPermutation,
    random_permutation,
    random_sample,
)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 97, 1000, 70_000])
def test_a_keyed_order_has_every_number_once(size: int) -> None:
    order = KeyedPermutation(draws.generator(0, "order"), size)
    numbers = order.take(np.arange(size))
    assert np.array_equal(np.sort(numbers), np.arange(size))


def test_any_part_of_a_keyed_order_is_computed_alone() -> None:
    size = 70_000  # more than are computed at once
    order = KeyedPermutation(draws.generator(0, "order"), size)
    numbers = order.take(np.arange(size))
    positions = np.array([69_999, 0, 65_536, 65_535, 17])
    assert np.array_equal(order.take(positions), numbers[positions])
    largest = KeyedPermutation(draws.generator(0, "order"), 1 << 40)
    assert len(np.unique(largest.take(np.arange(1000)))) == 1000


def test_keys_give_other_keyed_orders() -> None:
    positions = np.arange(1000)
    first = KeyedPermutation(draws.generator(0, "order", 0), 1000).take(positions)
    again = KeyedPermutation(draws.generator(0, "order", 0), 1000).take(positions)
    second = KeyedPermutation(draws.generator(0, "order", 1), 1000).take(positions)
    assert np.array_equal(first, again)
    # Two random orders of 1,000 numbers agree in one place on average, in ten with probability
    # 10^-7.
    assert np.count_nonzero(first == second) < 10
    assert np.count_nonzero(first == positions) < 10


def test_a_keyed_order_is_the_same_in_every_release() -> None:
    # Otherwise a run that goes on under a newer release would see some queries twice in an epoch.
    order = KeyedPermutation(draws.generator(0, "order", 3), 10**9)
    expected = [919151877, 464254177, 488707357, 81550681]
    assert order.take(np.arange(4)).tolist() == expected


def test_batches_of_a_keyed_order_are_spread_evenly() -> None:
    size = 200_000
    order = KeyedPermutation(draws.generator(0, "spread"), size)
    numbers = order.take(np.arange(size))
    # Of each batch of 2,000, a tenth belongs to each tenth of the numbers: chi-square over all
    # cells, whose mean is 900 and standard deviation 42.
    tenth = numbers * 10 // size
    batch = np.arange(size) // 2000
    counts = np.bincount(batch * 10 + tenth, minlength=1000)
    statistic = np.sum((counts - 200.0) ** 2 / 200.0)
    assert 690 < statistic < 1110
    # Neighbours in the order have nothing in common, as of 200,000 independent pairs.
    correlation = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(correlation) < 5 / np.sqrt(size)


def test_short_orders_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = draws.generator(0, "order").permutation(50)
    order = random_permutation(draws.generator(0, "order"), 50)
    assert isinstance(order, StoredPermutation)
    assert np.array_equal(order.take(np.arange(50)), expected)
    sample = random_sample(draws.generator(0, "order"), 50, 7)
    assert np.array_equal(sample, expected[:7])
    assert len(random_sample(draws.generator(0, "order"), 50, 60)) == 50
    monkeypatch.setattr("xmcray.permutations.MAX_STORED_SIZE", 49)
    assert isinstance(random_permutation(draws.generator(0, "order"), 50), KeyedPermutation)
