"""Which held-out queries `distil` and `train-reranker` measure on, if there are many."""

from __future__ import annotations

import numpy as np

from xmcray.training.held_out import some_rows


def test_queries_that_are_measured_come_from_everywhere_in_the_file() -> None:
    rows = np.arange(0, 30_000, 3)
    measured = some_rows(rows, 1000, seed=0)
    assert len(measured) == 1000
    assert np.isin(measured, rows).all()
    assert (np.diff(measured) > 0).all()
    # The mean of 1,000 draws is within 4 standard errors of the middle.
    assert abs(measured.mean() - rows.mean()) < 4 * rows.std() / np.sqrt(1000)
    np.testing.assert_array_equal(measured, some_rows(rows, 1000, seed=0))
    assert not np.array_equal(measured, some_rows(rows, 1000, seed=1))


def test_few_queries_are_all_measured() -> None:
    rows = np.array([2, 3, 9])
    np.testing.assert_array_equal(some_rows(rows, 3, seed=0), rows)
