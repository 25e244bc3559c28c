"""The labels of a batch as columns of three ranks, found by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from xmcray.methods.label_pool import LabelPool
from xmcray.parallel.partition import LabelPartition
from xmcray.types import Ragged

# Labels 0 .. 2, 3 .. 5 and 6 .. 8 lie on ranks 0, 1 and 2.
PARTS = [LabelPartition(9, 3, rank) for rank in range(3)]
POSITIVES = Ragged.from_rows([[7, 1], [4], [], [8, 1, 2]])
HARD = Ragged.from_rows([[0], [1, 7], [4], []])


def pools() -> list[LabelPool]:
    return [LabelPool.of(part, POSITIVES.take(np.array([0, 1])), HARD) for part in PARTS]


def as_labels(pool: LabelPool, pairs: Any) -> list[tuple[int, int]]:
    columns = pool.own[pairs.columns.numpy()].tolist()
    return list(zip(pairs.rows.tolist(), columns, strict=True))


def test_ranks_hold_the_columns_of_their_labels() -> None:
    assert [pool.ids.tolist() for pool in pools()] == [[0, 1, 4, 7]] * 3
    assert [pool.own.tolist() for pool in pools()] == [[0, 1], [4], [7]]
    assert [pool.first for pool in pools()] == [0, 2, 3]


def test_pairs_are_sorted_and_each_is_listed_once() -> None:
    found = [as_labels(pool, pool.pairs(POSITIVES, HARD, POSITIVES)) for pool in pools()]
    assert found == [[(0, 0), (0, 1), (1, 1), (3, 1)], [(1, 4), (2, 4)], [(0, 7), (1, 7)]]


def test_pairs_of_another_list_can_be_left_out() -> None:
    drawn = Ragged.from_rows([[7], [4], [], [8]])
    found = [as_labels(pool, pool.pairs(POSITIVES, without=drawn)) for pool in pools()]
    assert found == [[(0, 1), (3, 1)], [], []]


def test_positives_are_counted_on_all_ranks() -> None:
    for pool in pools():
        assert pool.count(POSITIVES).tolist() == [2, 1, 0, 1]
