"""Draws depend on their key alone."""

import numpy as np
import pytest

from xmcray import draws


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_dropout_of_a_position_is_the_same_in_any_slice(cut: int) -> None:
    whole = draws.keep_mask(3, "dropout", 17, 0, 7, 37, 0.6)
    parts = [draws.keep_mask(3, "dropout", 17, a, b, 37, 0.6) for a, b in ((0, cut), (cut, 7))]
    assert np.array_equal(np.concatenate(parts), whole)


def test_dropout_keeps_the_share_it_should() -> None:
    mask = draws.keep_mask(0, "dropout", 1, 0, 400, 250, 0.7)
    assert abs(mask.mean() - 0.3) < 4 * (0.21 / mask.size) ** 0.5
    assert not np.array_equal(mask, draws.keep_mask(0, "dropout", 2, 0, 400, 250, 0.7))


def test_every_label_enters_the_pool_equally_often() -> None:
    counts = np.zeros(50)
    for step in range(2000):
        pool = draws.uniform_labels(0, step, 50, 10)
        assert len(np.unique(pool)) == 10
        counts[pool] += 1
    z = (counts - 400) / (2000 * 0.2 * 0.8) ** 0.5
    assert np.abs(z).max() < 4.5
    assert draws.uniform_labels(0, 0, 5, 10).tolist() == [0, 1, 2, 3, 4]
