"""UniDEC's loss over label shards equals the golden vectors, gradients included, and a loop over its formulas."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from ranks import golden, over_ranks

from xmcray.losses.pairs import Pairs
from xmcray.losses.psl import Picked, pick_some_labels
from xmcray.parallel import collectives
from xmcray.parallel.collectives import gather_rows
from xmcray.parallel.partition import LabelPartition, share

RANKS = [1, 2, 3, 4]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


def picked_of(positives: Mask, skipped: Mask, part: LabelPartition) -> Picked:
    def pairs(mask: Mask) -> Pairs:
        return Pairs(
            *(torch.from_numpy(where) for where in mask[:, part.start : part.stop].nonzero())
        )

    count_G = torch.from_numpy(positives.sum(axis=1))
    return Picked(pairs(positives), pairs(skipped), count_G, int(positives.any(axis=0).sum()))


def on_rank(name: str, balance: float) -> tuple[float, Any, Any]:
    """Queries are unit vectors, so that columns are scores and the columns' gradient is the scores'."""
    g = golden(name)
    num_queries, num_columns = g["scores"].shape
    part = LabelPartition(num_columns, collectives.num_ranks(), collectives.rank())
    start, stop = share(num_queries, collectives.rank(), collectives.num_ranks())
    query_BD = torch.eye(num_queries, dtype=torch.float64)[start:stop].requires_grad_()
    column_UD = torch.tensor(g["scores"].T[part.start : part.stop].copy(), requires_grad=True)
    picked = picked_of(g["positives"], np.zeros_like(g["positives"]), part)
    query_GD, kind = gather_rows(query_BD, num_queries), "paln" if name == "psl_paln" else "pal"
    total = (
        pick_some_labels(query_GD, column_UD, picked, 1 / float(g["tau"]), balance, kind)
        / num_queries
    )
    total.backward()
    assert query_BD.grad is not None
    assert column_UD.grad is not None
    return float(total.detach()), query_BD.grad.numpy(), column_UD.grad.numpy()


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", ["psl_paln", "psl_pal"])
def test_psl_is_golden(name: str, num_ranks: int) -> None:
    g = golden(name)
    total, query_GG, column_UG = over_ranks(on_rank, num_ranks, name, float(g["lambda_"]))
    np.testing.assert_allclose(total, g["loss"], rtol=1e-9)
    np.testing.assert_allclose(column_UG.T, g["grad_scores"], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(query_GG, g["grad_scores"] @ g["scores"].T, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["psl_paln", "psl_pal"])
@pytest.mark.parametrize(("balance", "direction"), [(1.0, "loss_q2l"), (0.0, "loss_l2q")])
def test_each_direction_is_golden(name: str, balance: float, direction: str) -> None:
    total, *_ = over_ranks(on_rank, 2, name, balance)
    np.testing.assert_allclose(total, golden(name)[direction], rtol=1e-9)


def test_two_queries_by_hand() -> None:
    """Scores 0 and log 3: a query's label has 1/4 or 3/4 of the mass of two labels, and so has a label of queries."""
    query_GD = torch.eye(2, dtype=torch.float64)
    column_UD = torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0]], dtype=torch.float64)
    both = np.array([[True, False], [False, False]])
    picked = picked_of(both, np.zeros((2, 2), bool), LabelPartition(2, 1, 0))
    for balance in (0.0, 0.5, 1.0):
        mean = pick_some_labels(query_GD, column_UD, picked, 1.0, balance) / 2
        assert mean == pytest.approx(math.log(4))
        total = pick_some_labels(
            query_GD, column_UD, picked, 1.0, balance, reduction="sum_per_query"
        )
        assert total == pytest.approx(math.log(4))


@pytest.mark.parametrize("normaliser", ["paln", "pal"])
@pytest.mark.parametrize("reduction", ["mean_anchors", "sum_per_query"])
def test_a_loop_over_the_formulas_agrees(normaliser: Any, reduction: Any) -> None:
    random = np.random.default_rng(0)
    score_GL = random.normal(size=(5, 8))
    kind = random.choice(3, size=score_GL.shape, p=[0.5, 0.3, 0.2])
    positive, skipped = kind == 1, kind == 2
    positive[3] = positive[:, 6] = False  # a query and a label without a positive
    skipped[:, 6] = True  # a label that no query may meet

    def direction(score: Any, positive: Any, counts: Any) -> float:
        anchors = []
        for row, is_positive, counted in zip(score, positive, counts, strict=True):
            if is_positive.any():
                log_z = math.log(
                    sum(math.exp(4 * s) for s, c in zip(row, counted, strict=True) if c)
                )
                terms = [log_z - 4 * s for s, p in zip(row, is_positive, strict=True) if p]
                anchors.append(sum(terms) / (len(terms) if normaliser == "paln" else 1))
        return sum(anchors) / (len(anchors) if reduction == "mean_anchors" else len(score_GL))

    expected = 0.3 * direction(score_GL, positive, ~skipped) + 0.7 * direction(
        score_GL.T, positive.T, ~skipped.T
    )
    query_GD = torch.eye(5, dtype=torch.float64, requires_grad=True)
    column_UD = torch.tensor(score_GL.T.copy(), requires_grad=True)
    picked = picked_of(positive, skipped, LabelPartition(8, 1, 0))
    total = pick_some_labels(query_GD, column_UD, picked, 4.0, 0.3, normaliser, reduction)
    assert float(total.detach()) / 5 == pytest.approx(expected, rel=1e-12)
    total.backward()
    assert column_UD.grad is not None
    assert column_UD.grad.isfinite().all()
    assert not column_UD.grad.T[torch.from_numpy(skipped)].any()


def few_labels_on_rank() -> tuple[float, Any, Any]:
    """Two labels: on three ranks rank 0 has a query and no label."""
    part = LabelPartition(2, collectives.num_ranks(), collectives.rank())
    start, stop = share(4, collectives.rank(), collectives.num_ranks())
    torch.manual_seed(0)
    query_BD = torch.randn(4, 3, dtype=torch.float64)[start:stop].requires_grad_()
    column_UD = torch.randn(2, 3, dtype=torch.float64)[part.start : part.stop].requires_grad_()
    positive = np.array([[True, False], [True, True], [False, True], [False, False]])
    picked = picked_of(positive, ~positive & [[True, False]], part)
    total = pick_some_labels(gather_rows(query_BD, 4), column_UD, picked, 2.0)
    total.backward()
    assert query_BD.grad is not None
    assert column_UD.grad is not None
    return float(total.detach()), query_BD.grad.numpy(), column_UD.grad.numpy()


def test_a_rank_without_a_label() -> None:
    assert LabelPartition(2, 3, 0).size == 0
    one = over_ranks(few_labels_on_rank, 1)
    three = over_ranks(few_labels_on_rank, 3)
    for found, expected in zip(three, one, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_gradients() -> None:
    torch.manual_seed(0)
    query_GD = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    column_UD = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    kind = np.random.default_rng(1).choice(3, size=(4, 6), p=[0.5, 0.3, 0.2])
    picked = picked_of(kind == 1, kind == 2, LabelPartition(6, 1, 0))
    assert torch.autograd.gradcheck(
        lambda q, c: pick_some_labels(q, c, picked, 2.0, 0.4), (query_GD, column_UD)
    )
