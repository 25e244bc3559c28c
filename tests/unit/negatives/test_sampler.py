"""Draws from rows have the probabilities that they should; candidates of a small batch are those found by hand."""

from __future__ import annotations

import numpy as np

from xmcray import draws
from xmcray.negatives.sampler import capped_positives, draw_from_rows, gather_candidates
from xmcray.parallel.partition import LabelPartition
from xmcray.types import Batch, Ragged

MANY = 4000


def batch_of(positives: list[list[int]], excluded: list[list[int]], step: int = 0) -> Batch:
    size = len(positives)
    ids = np.arange(size, dtype=np.int64)
    tokens = Ragged.empty(size)
    rows = Ragged.from_rows(positives)
    return Batch(0, step, ids, 0, size, tokens, rows, Ragged.from_rows(excluded))


def test_two_of_four_values_are_drawn_equally_often() -> None:
    rows = Ragged.from_rows([[10, 11, 12, 13]] * MANY)
    drawn = draw_from_rows(rows, 2, draws.generator(0, "test"))
    assert (drawn.lengths == 2).all()
    assert (drawn.values[0::2] < drawn.values[1::2]).all(), "values keep their order"
    share = np.bincount(drawn.values - 10, minlength=4) / MANY
    # Each share is 1/2 with a deviation of 1 / (2 sqrt(n)).
    assert np.abs(share - 0.5).max() < 4 * 0.5 / MANY**0.5


def test_a_value_of_triple_weight_is_drawn_three_times_as_often() -> None:
    rows = Ragged.from_rows([[0, 1]] * MANY)
    weights = np.tile([1.0, 3.0], MANY)
    drawn = draw_from_rows(rows, 1, draws.generator(0, "test"), weights)
    deviation = (0.75 * 0.25 / MANY) ** 0.5
    assert abs(drawn.values.mean() - 0.75) < 4 * deviation


def test_short_rows_are_kept_whole() -> None:
    rows = Ragged.from_rows([[5], [], [6, 7], [8, 9, 4]])
    drawn = draw_from_rows(rows, 2, draws.generator(0, "test"))
    assert drawn.lengths.tolist() == [1, 0, 2, 2]
    assert drawn[0].tolist() == [5]
    assert drawn[2].tolist() == [6, 7]
    assert set(drawn[3]) < {8, 9, 4}


def test_capped_positives_weigh_what_they_stand_for() -> None:
    batch = batch_of([[0, 1, 2], [3], [4, 5, 6, 7, 8]], [[], [], []])
    drawn, weights = capped_positives(batch, 2, seed=0, unbiased=True)
    assert drawn.lengths.tolist() == [2, 1, 2]
    assert weights is not None
    assert weights.tolist() == [1.5, 1.0, 2.5]
    assert capped_positives(batch, 2, seed=0, unbiased=False)[1] is None
    for cap in (0, 5):
        positives, weights = capped_positives(batch, cap, seed=0, unbiased=True)
        assert positives is batch.positives
        assert weights is None


def test_positives_are_drawn_anew_in_each_step() -> None:
    many = [list(range(10))] * 20
    first, _ = capped_positives(batch_of(many, [[]] * 20, step=1), 3, 0, unbiased=True)
    again, _ = capped_positives(batch_of(many, [[]] * 20, step=1), 3, 0, unbiased=True)
    later, _ = capped_positives(batch_of(many, [[]] * 20, step=2), 3, 0, unbiased=True)
    assert np.array_equal(first.values, again.values)
    assert not np.array_equal(first.values, later.values)


def test_candidates_of_two_queries_on_two_ranks() -> None:
    """Labels 0 .. 3 lie on rank 0 and 4 .. 7 on rank 1; query 0 has an undrawn positive, 5."""
    batch = batch_of([[1, 5], [6]], [[], [4]])
    hard = Ragged.from_rows([[7], [2, 5]])
    drawn = Ragged.from_rows([[1], [6]])
    weights = np.array([2.0, 1.0])
    pool = np.array([1, 4, 5, 6, 7])
    pairs, negatives = [], []
    for rank in range(2):
        part = LabelPartition(8, 2, rank)
        found = gather_candidates(batch, hard, pool, drawn, weights, part)
        assert found.row_ids.tolist() == sorted(set(found.row_ids.tolist()))
        labels = part.to_global(found.row_ids.numpy())
        assert found.pair_weight is not None
        assert found.pair_query.tolist() == sorted(found.pair_query.tolist())
        for query, row, is_positive, weight in zip(
            found.pair_query.tolist(),
            found.pair_row.tolist(),
            found.pair_is_positive.tolist(),
            found.pair_weight.tolist(),
            strict=True,
        ):
            pairs.append((query, int(labels[row]), is_positive, weight))
        candidates = labels[found.pool_rows.numpy()]
        skipped = set(zip(found.skip_query.tolist(), found.skip_column.tolist(), strict=True))
        for query in range(2):
            for column, label in enumerate(candidates.tolist()):
                if (query, column) not in skipped:
                    negatives.append((query, label))
    assert sorted(pairs) == [
        (0, 1, True, 2.0),
        (0, 7, False, 1.0),
        (1, 2, False, 1.0),
        (1, 5, False, 1.0),
        (1, 6, True, 1.0),
    ]
    # Not 1 and 5, its positives, nor 7, its hard negative; not 6, 5 and its own label 4.
    assert sorted(negatives) == [(0, 4), (0, 6), (1, 1), (1, 7)]
