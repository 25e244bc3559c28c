"""UniDEC's loss over label shards equals the golden vectors and a loop over its formulas.

Gradients included.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from ranks import golden, over_ranks
from torch import Tensor

from xmcray.losses.pairs import Pairs
from xmcray.losses.psl import Picked, pick_some_labels
from xmcray.parallel import collectives
from xmcray.parallel.collectives import gather_rows
from xmcray.parallel.partition import LabelPartition, share

RANKS = [1, 2, 3, 4]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


def pairs_of(mask: Mask) -> Pairs:
    """The pairs of a row and a column for which the mask is true."""
    rows, columns = mask.nonzero()
    return Pairs(
        torch.from_numpy(rows),
        torch.from_numpy(columns),
    )


def picked_of(
    positive: Mask,
    skipped: Mask,
    part: LabelPartition,
) -> Picked:
    """One rank's share of two masks [queries, labels]."""
    own_columns = slice(part.start, part.stop)
    num_positives = positive.sum(axis=1)
    has_positive = positive.any(axis=0)
    return Picked(
        positives=pairs_of(positive[:, own_columns]),
        skipped=pairs_of(skipped[:, own_columns]),
        count_G=torch.from_numpy(num_positives),
        num_labels=int(has_positive.sum()),
    )


def partition_of_rank(num_labels: int) -> LabelPartition:
    """The labels of the rank that calls."""
    return LabelPartition(
        num_labels,
        collectives.num_ranks(),
        collectives.rank(),
    )


def share_of_rank(num_queries: int) -> slice:
    """The queries of the rank that calls."""
    start, stop = share(
        num_queries,
        collectives.rank(),
        collectives.num_ranks(),
    )
    return slice(start, stop)


def loss_and_gradients(
    total: Tensor,
    query: Tensor,
    column: Tensor,
) -> tuple[float, Any, Any]:
    total.backward()
    assert query.grad is not None
    assert column.grad is not None
    return float(total.detach()), query.grad.numpy(), column.grad.numpy()


def on_rank(name: str, balance: float) -> tuple[float, Any, Any]:
    """The loss of a golden vector on one rank.

    Queries are unit vectors, so that columns are scores and the columns' gradient is the scores'.
    """
    vector = golden(name)
    num_queries, num_columns = vector["scores"].shape
    part = partition_of_rank(num_columns)
    own_scores = vector["scores"].T[part.start : part.stop].copy()
    own_queries = share_of_rank(num_queries)
    query_GG = torch.eye(num_queries, dtype=torch.float64)
    query_BD = query_GG[own_queries].requires_grad_()
    column_UD = torch.tensor(own_scores, requires_grad=True)
    nothing = np.zeros_like(vector["positives"])

    total = pick_some_labels(
        gather_rows(query_BD, num_queries),
        column_UD,
        picked_of(vector["positives"], nothing, part),
        scale=1 / float(vector["tau"]),
        balance=balance,
        normaliser="paln" if name == "psl_paln" else "pal",
    )

    mean = total / num_queries
    return loss_and_gradients(mean, query_BD, column_UD)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", ["psl_paln", "psl_pal"])
def test_psl_is_golden(name: str, num_ranks: int) -> None:
    vector = golden(name)
    balance = float(vector["lambda_"])

    total, query_GG, column_UG = over_ranks(on_rank, num_ranks, name, balance)

    # A query's vector is its unit vector: its gradient sums over the columns.
    grad_scores = vector["grad_scores"]
    grad_queries = grad_scores @ vector["scores"].T
    assert_allclose(total, vector["loss"], rtol=1e-9)
    assert_allclose(column_UG.T, grad_scores, rtol=1e-9, atol=1e-11)
    assert_allclose(query_GG, grad_queries, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["psl_paln", "psl_pal"])
@pytest.mark.parametrize(
    ("balance", "direction"),
    [
        (1.0, "loss_q2l"),
        (0.0, "loss_l2q"),
    ],
)
def test_each_direction_is_golden(name: str, balance: float, direction: str) -> None:
    total, *_ = over_ranks(on_rank, 2, name, balance)

    expected = golden(name)[direction]
    assert_allclose(total, expected, rtol=1e-9)


def test_two_queries_by_hand() -> None:
    """The scores are 0 and log 3, in both directions.

    A query's label has 1/4 or 3/4 of the mass of two labels, and so has a label of queries.
    """
    query_GD = torch.eye(2, dtype=torch.float64)
    column_UD = torch.tensor(
        [
            [0.0, math.log(3)],
            [math.log(3), 0.0],
        ],
        dtype=torch.float64,
    )
    positive = np.array(
        [
            [True, False],
            [False, False],
        ]
    )
    skipped = np.zeros((2, 2), bool)
    picked = picked_of(positive, skipped, LabelPartition(2, 1, 0))

    for balance in (0.0, 0.5, 1.0):
        over_anchors = pick_some_labels(
            query_GD,
            column_UD,
            picked,
            scale=1.0,
            balance=balance,
        )
        over_queries = pick_some_labels(
            query_GD,
            column_UD,
            picked,
            scale=1.0,
            balance=balance,
            reduction="sum_per_query",
        )

        # The mean over anchors is multiplied by the number of queries.
        assert over_anchors / 2 == pytest.approx(math.log(4))
        assert over_queries == pytest.approx(math.log(4))


def anchor_loss(
    scores: list[float],
    is_positive: list[bool],
    counts: list[bool],
    normaliser: str,
) -> float:
    """The softmax loss of one anchor, at scale 4, over the columns that count for it."""
    mass = 0.0
    for score, in_softmax in zip(scores, counts, strict=True):
        if in_softmax:
            mass += math.exp(4 * score)
    terms = []
    for score, wanted in zip(scores, is_positive, strict=True):
        if wanted:
            terms.append(math.log(mass) - 4 * score)
    if normaliser == "paln":
        return sum(terms) / len(terms)
    return sum(terms)


def direction_loss(
    scores: Any,
    positive: Any,
    counts: Any,
    normaliser: str,
    divisor: int | None,
) -> float:
    """One direction of the loss. Without a divisor it is the mean over anchors with a positive."""
    anchors = []
    for row, is_positive, in_softmax in zip(scores, positive, counts, strict=True):
        if is_positive.any():
            anchors.append(anchor_loss(row, is_positive, in_softmax, normaliser))
    return sum(anchors) / (divisor or len(anchors))


@pytest.mark.parametrize("normaliser", ["paln", "pal"])
@pytest.mark.parametrize("reduction", ["mean_anchors", "sum_per_query"])
def test_a_loop_over_the_formulas_agrees(normaliser: Any, reduction: Any) -> None:
    rng = np.random.default_rng(0)
    score_GL = rng.normal(size=(5, 8))
    kind = rng.choice(3, size=score_GL.shape, p=[0.5, 0.3, 0.2])
    positive = kind == 1
    skipped = kind == 2
    # A query and a label without a positive.
    positive[3] = False
    positive[:, 6] = False
    # A label that no query may meet.
    skipped[:, 6] = True
    counts = ~skipped
    divisor = None if reduction == "mean_anchors" else len(score_GL)
    query_GD = torch.eye(5, dtype=torch.float64, requires_grad=True)
    column_UD = torch.tensor(score_GL.T.copy(), requires_grad=True)

    total = pick_some_labels(
        query_GD,
        column_UD,
        picked_of(positive, skipped, LabelPartition(8, 1, 0)),
        scale=4.0,
        balance=0.3,
        normaliser=normaliser,
        reduction=reduction,
    )

    of_queries = direction_loss(score_GL, positive, counts, normaliser, divisor)
    of_labels = direction_loss(score_GL.T, positive.T, counts.T, normaliser, divisor)
    expected = 0.3 * of_queries + 0.7 * of_labels
    assert float(total.detach()) / 5 == pytest.approx(expected, rel=1e-12)

    total.backward()
    assert column_UD.grad is not None
    assert column_UD.grad.isfinite().all()
    grad_of_skipped = column_UD.grad.T[torch.from_numpy(skipped)]
    assert not grad_of_skipped.any()


def few_labels_on_rank() -> tuple[float, Any, Any]:
    """Two labels: on three ranks rank 0 has a query and no label."""
    part = partition_of_rank(2)
    own_queries = share_of_rank(4)
    own_columns = slice(part.start, part.stop)
    torch.manual_seed(0)
    query_GD = torch.randn(4, 3, dtype=torch.float64)
    column_LD = torch.randn(2, 3, dtype=torch.float64)
    query_BD = query_GD[own_queries].requires_grad_()
    column_UD = column_LD[own_columns].requires_grad_()
    positive = np.array(
        [
            [True, False],
            [True, True],
            [False, True],
            [False, False],
        ]
    )
    # Label 0 is not a negative of any query.
    skipped = ~positive & [[True, False]]

    total = pick_some_labels(
        gather_rows(query_BD, 4),
        column_UD,
        picked_of(positive, skipped, part),
        scale=2.0,
    )

    return loss_and_gradients(total, query_BD, column_UD)


def test_a_rank_without_a_label() -> None:
    assert LabelPartition(2, 3, 0).size == 0

    on_one = over_ranks(few_labels_on_rank, 1)
    on_three = over_ranks(few_labels_on_rank, 3)

    for found, expected in zip(on_three, on_one, strict=True):
        assert_allclose(found, expected, rtol=1e-9)


def test_gradients() -> None:
    torch.manual_seed(0)
    query_GD = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    column_UD = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    rng = np.random.default_rng(1)
    kind = rng.choice(3, size=(4, 6), p=[0.5, 0.3, 0.2])
    picked = picked_of(kind == 1, kind == 2, LabelPartition(6, 1, 0))

    def loss(query_GD: Tensor, column_UD: Tensor) -> Tensor:
        return pick_some_labels(query_GD, column_UD, picked, scale=2.0, balance=0.4)

    assert torch.autograd.gradcheck(loss, (query_GD, column_UD))
