"""Values drawn from rows have the probabilities that they should.

The candidates of a small batch are those found by hand.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from xmcray import draws
from xmcray.negatives.sampler import capped_positives, draw_from_rows, gather_candidates
from xmcray.parallel.partition import LabelPartition
from xmcray.types import Batch, Ragged

MANY = 4000


def batch_of(
    positives: list[list[int]],
    excluded: list[list[int]],
    step: int = 0,
) -> Batch:
    """A batch without texts on one rank."""
    size = len(positives)
    return Batch(
        epoch=0,
        step=step,
        query_ids=np.arange(size, dtype=np.int64),
        start=0,
        stop=size,
        tokens=Ragged.empty(size),
        positives=Ragged.from_rows(positives),
        excluded=Ragged.from_rows(excluded),
    )


def test_two_of_four_values_are_drawn_equally_often() -> None:
    rows = Ragged.from_rows([[10, 11, 12, 13]] * MANY)

    drawn = draw_from_rows(rows, 2, draws.generator(0, "test"))

    assert (drawn.lengths == 2).all()
    first, second = drawn.values.reshape(MANY, 2).T
    assert (first < second).all(), "values keep their order"
    counts = np.bincount(drawn.values - 10, minlength=4)
    # Each share is 1/2, with this standard deviation.
    deviation = 0.5 / MANY**0.5
    error = np.abs(counts / MANY - 0.5)
    assert error.max() < 4 * deviation


def test_a_value_of_triple_weight_is_drawn_three_times_as_often() -> None:
    rows = Ragged.from_rows([[0, 1]] * MANY)
    weights = np.tile([1.0, 3.0], MANY)

    drawn = draw_from_rows(rows, 1, draws.generator(0, "test"), weights)

    deviation = (0.75 * 0.25 / MANY) ** 0.5
    error = abs(drawn.values.mean() - 0.75)
    assert error < 4 * deviation


def test_short_rows_are_kept_whole() -> None:
    rows = Ragged.from_rows([[5], [], [6, 7], [8, 9, 4]])

    drawn = draw_from_rows(rows, 2, draws.generator(0, "test"))

    assert drawn.lengths.tolist() == [1, 0, 2, 2]
    assert drawn[0].tolist() == [5]
    assert drawn[2].tolist() == [6, 7]
    assert set(drawn[3]) < {8, 9, 4}


def test_capped_positives_weigh_what_they_stand_for() -> None:
    batch = batch_of(
        positives=[[0, 1, 2], [3], [4, 5, 6, 7, 8]],
        excluded=[[], [], []],
    )

    drawn, weights = capped_positives(batch, 2, seed=0, unbiased=True)
    assert drawn.lengths.tolist() == [2, 1, 2]
    assert weights is not None
    # Two of three positives, one of one, two of five.
    assert weights.tolist() == [1.5, 1.0, 2.5]

    _, weights = capped_positives(batch, 2, seed=0, unbiased=False)
    assert weights is None

    # Without a cap, or with one that no query exceeds, all positives stay.
    for cap in (0, 5):
        positives, weights = capped_positives(batch, cap, seed=0, unbiased=True)
        assert positives is batch.positives
        assert weights is None


def test_positives_are_drawn_anew_in_each_step() -> None:
    def drawn_in_step(step: int) -> list[int]:
        batch = batch_of(
            positives=[list(range(10))] * 20,
            excluded=[[]] * 20,
            step=step,
        )
        positives, _ = capped_positives(batch, 3, seed=0, unbiased=True)
        return positives.values.tolist()

    assert drawn_in_step(1) == drawn_in_step(1)
    assert drawn_in_step(1) != drawn_in_step(2)


def test_candidates_of_two_queries_on_two_ranks() -> None:
    """Labels 0 .. 3 lie on rank 0 and 4 .. 7 on rank 1; query 0 has an undrawn positive, 5."""
    batch = batch_of(
        positives=[[1, 5], [6]],
        excluded=[[], [4]],
    )
    hard = Ragged.from_rows([[7], [2, 5]])
    drawn = Ragged.from_rows([[1], [6]])
    weights = np.array([2.0, 1.0])
    pool = np.array([1, 4, 5, 6, 7])

    pairs = []
    negatives = []
    for rank in range(2):
        part = LabelPartition(8, 2, rank)
        candidates = gather_candidates(
            batch,
            hard,
            pool,
            drawn,
            weights,
            part,
        )

        rows = candidates.row_ids.tolist()
        assert rows == sorted(set(rows))
        labels = part.to_global(candidates.row_ids.numpy())

        queries = candidates.pair_query.tolist()
        assert queries == sorted(queries)
        assert candidates.pair_weight is not None
        pairs += zip(
            queries,
            labels[candidates.pair_row.numpy()].tolist(),
            candidates.pair_is_positive.tolist(),
            candidates.pair_weight.tolist(),
            strict=True,
        )

        # Every query meets every label of the pool, except where it is skipped.
        pool_labels = labels[candidates.pool_rows.numpy()]
        is_met = np.ones((2, len(pool_labels)), bool)
        is_met[candidates.skip_query, candidates.skip_column] = False
        for query, column in np.argwhere(is_met).tolist():
            negatives.append((query, int(pool_labels[column])))

    assert sorted(pairs) == [
        (0, 1, True, 2.0),
        (0, 7, False, 1.0),
        (1, 2, False, 1.0),
        (1, 5, False, 1.0),
        (1, 6, True, 1.0),
    ]
    assert sorted(negatives) == [
        # Not 1 and 5, its positives, nor 7, its hard negative.
        (0, 4),
        (0, 6),
        # Not 6, its positive, nor 5, its hard negative, nor its own label 4.
        (1, 1),
        (1, 7),
    ]


def test_candidates_move_to_a_device_as_they_are() -> None:
    batch = batch_of(
        positives=[[1, 5], [6]],
        excluded=[[], [4]],
    )
    candidates = gather_candidates(
        batch,
        Ragged.from_rows([[7], [2, 5]]),
        np.array([1, 4, 5, 6, 7]),
        batch.positives,
        None,
        LabelPartition(8, 1, 0),
    )

    # This device keeps shapes and types without values, and every machine has it.
    moved = candidates.to(torch.device("meta"))

    for field in dataclasses.fields(candidates):
        before = getattr(candidates, field.name)
        after = getattr(moved, field.name)
        if before is None:
            assert after is None
            continue
        assert after.device.type == "meta"
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
