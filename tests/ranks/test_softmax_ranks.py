"""Softmax losses over columns that are split over ranks equal the golden vectors, gradients included."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ranks import golden, over_ranks
from torch import Tensor

from xmcray.losses import columns
from xmcray.losses.pairs import Pairs
from xmcray.losses.softmax import decoupled_softmax, soft_top_k, softmax
from xmcray.parallel import collectives
from xmcray.parallel.collectives import gather_rows
from xmcray.parallel.partition import LabelPartition, share

RANKS = [1, 2, 3, 4]
NONE = Pairs(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
# From the arrays of a golden vector, query_GD, column_UD and the positives of this rank.
LossOfScores = Callable[[dict[str, Any], Tensor, Tensor, Pairs], Tensor]


def loss_on_rank(name: str, loss_of: LossOfScores) -> tuple[float, Any]:
    """A loss whose queries are unit vectors, so that columns are scores and the columns' gradient is the scores'."""
    g = golden(name)
    num_queries, num_columns = g["scores"].shape
    part = LabelPartition(num_columns, collectives.num_ranks(), collectives.rank())
    own_columns = slice(part.start, part.stop)
    start, stop = share(num_queries, collectives.rank(), collectives.num_ranks())
    query_BD = torch.eye(num_queries, dtype=torch.float64)[start:stop].requires_grad_()
    query_GD = gather_rows(query_BD, num_queries)
    column_UD = torch.tensor(g["scores"].T[own_columns].copy(), requires_grad=True)
    rows, columns_of_rows = g["positives"].astype(bool)[:, own_columns].nonzero()
    positives = Pairs(torch.from_numpy(rows), torch.from_numpy(columns_of_rows))

    total = loss_of(g, query_GD, column_UD, positives)
    loss = total / num_queries
    loss.backward()

    assert column_UD.grad is not None
    return float(loss.detach()), column_UD.grad.numpy()


def assert_golden(name: str, num_ranks: int, loss_of: LossOfScores) -> None:
    g = golden(name)
    loss, grad_UG = over_ranks(loss_on_rank, num_ranks, name, loss_of)
    np.testing.assert_allclose(loss, g["loss"], rtol=1e-9)
    np.testing.assert_allclose(grad_UG.T, g["grad_scores"], rtol=1e-9, atol=1e-11)


@pytest.fixture(params=[7, 1 << 20], autouse=True, ids=["many blocks", "one block"])
def block_floats(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "BLOCK_FLOATS", request.param)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("tau", ["0.05", "1.0"])
def test_softmax_is_golden(tau: str, num_ranks: int) -> None:
    def loss_of(g: dict[str, Any], query_GD: Tensor, column_UD: Tensor, positives: Pairs) -> Tensor:
        scale = 1 / float(g["tau"])
        return softmax(query_GD, column_UD, positives, NONE, scale)

    assert_golden(f"softmax_tau{tau}", num_ranks, loss_of)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("tau", ["0.05", "1.0"])
def test_decoupled_softmax_is_golden(tau: str, num_ranks: int) -> None:
    def loss_of(g: dict[str, Any], query_GD: Tensor, column_UD: Tensor, positives: Pairs) -> Tensor:
        scale = 1 / float(g["tau"])
        return decoupled_softmax(query_GD, column_UD, positives, positives, scale)

    assert_golden(f"decoupled_tau{tau}", num_ranks, loss_of)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_negatives_are_divided_by_their_probability(num_ranks: int) -> None:
    g = golden("decoupled_tau1.0")
    num_queries, num_columns = g["scores"].shape
    log_q_U = torch.linspace(-5, 0, num_columns, dtype=torch.float64)

    def loss_of(g: dict[str, Any], query_GD: Tensor, column_UD: Tensor, positives: Pairs) -> Tensor:
        part = LabelPartition(num_columns, collectives.num_ranks(), collectives.rank())
        own_log_q_U = log_q_U[part.start : part.stop]
        return decoupled_softmax(query_GD, column_UD, positives, positives, 1.0, own_log_q_U)

    loss, grad_UG = over_ranks(loss_on_rank, num_ranks, "decoupled_tau1.0", loss_of)

    score_GU = torch.tensor(g["scores"], requires_grad=True)
    is_positive_GU = torch.from_numpy(g["positives"].astype(bool))
    weighed_GU = (score_GU.exp() / log_q_U.exp()).masked_fill(is_positive_GU, 0)
    loss_GU = (1 + weighed_GU.sum(dim=1, keepdim=True) / score_GU.exp()).log()
    expected = loss_GU[is_positive_GU].sum() / num_queries
    expected.backward()
    assert score_GU.grad is not None
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-9)
    np.testing.assert_allclose(grad_UG.T, score_GU.grad.numpy(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("k", [3, 5])
def test_soft_top_k_is_golden(k: int, num_ranks: int) -> None:
    name = f"softtopk_k{k}"
    num_queries, num_columns = golden(name)["scores"].shape
    k_G = torch.full((num_queries,), float(k))
    most_columns = math.ceil(num_columns / num_ranks)

    def loss_of(g: dict[str, Any], query_GD: Tensor, column_UD: Tensor, positives: Pairs) -> Tensor:
        alpha = float(g["alpha"])
        return soft_top_k(
            query_GD, column_UD, positives, NONE, k_G, alpha, scale=1.0, widest=most_columns
        )

    assert_golden(name, num_ranks, loss_of)


def test_soft_top_k_sums_to_k_and_has_the_gradient_of_its_definition() -> None:
    torch.manual_seed(0)
    query_GD = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    column_UD = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    skipped = Pairs(torch.tensor([0, 2]), torch.tensor([1, 8]))
    k_G = torch.tensor([3.0, 5.0, 0.5, 3.0], dtype=torch.float64)
    alpha = 2.0
    scale = 4.0

    def threshold(query_GD: Tensor, column_UD: Tensor) -> Tensor:
        return columns.top_k_threshold(query_GD, column_UD, skipped, k_G, alpha, scale, widest=9)

    score_GU = scale * query_GD @ column_UD.T
    score_GU[skipped.rows, skipped.columns] = -torch.inf
    threshold_G = threshold(query_GD, column_UD)
    selected_GU = torch.sigmoid(alpha * (score_GU + threshold_G[:, None]))
    torch.testing.assert_close(selected_GU.sum(dim=1), k_G, atol=1e-6, rtol=0)
    assert torch.autograd.gradcheck(threshold, (query_GD, column_UD))


@pytest.mark.parametrize("scale", [1.0, 20.0, 1000.0])
@pytest.mark.parametrize("k", [1.0, 3.0, 5.0, 50.0, 100.0])
@pytest.mark.parametrize("alpha", [0.05, 5.0])
def test_soft_top_k_sums_to_k_over_scores_in_distant_clusters(
    alpha: float, k: float, scale: float
) -> None:
    # Between two clusters the sum hardly changes with the threshold, and Newton's steps are wild.
    query_GD = torch.ones(2, 1, dtype=torch.float64)
    near_U1 = torch.linspace(0.99, 1.01, 2, dtype=torch.float64)[:, None]
    far_U1 = torch.linspace(-1.1, -0.9, 100, dtype=torch.float64)[:, None]
    column_UD = torch.cat([near_U1, far_U1])
    k_G = torch.full((2,), k, dtype=torch.float64)

    skipped = Pairs(torch.tensor([0]), torch.tensor([50]))

    threshold_G = columns.top_k_threshold(
        query_GD, column_UD, skipped, k_G, alpha, scale, widest=102
    )

    score_GU = scale * query_GD @ column_UD.T
    score_GU[skipped.rows, skipped.columns] = -torch.inf
    selected_GU = torch.sigmoid(alpha * (score_GU + threshold_G[:, None]))
    torch.testing.assert_close(selected_GU.sum(dim=1), k_G, atol=0, rtol=1e-12)


def threshold_on_rank(scale: float) -> tuple[Any, Any, Any]:
    """The threshold of k = 5 for 5 columns at 0.8 and 100 at -0.2, with its gradient by this rank's columns."""
    column_U1 = torch.tensor([0.8] * 5 + [-0.2] * 100)[:, None]
    part = LabelPartition(len(column_U1), collectives.num_ranks(), collectives.rank())
    own_U1 = column_U1[part.start : part.stop].clone().requires_grad_()
    query_11 = torch.ones(1, 1)
    k_1 = torch.tensor([5.0])
    threshold_1 = columns.top_k_threshold(
        query_11, own_U1, NONE, k_1, alpha=2.0, scale=scale, widest=len(column_U1)
    )
    threshold_1.sum().backward()
    assert own_U1.grad is not None
    return 0, threshold_1.detach().numpy(), own_U1.grad[:, 0].numpy()


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("scale", [20.0, 60.0, 1000.0])
def test_soft_top_k_balances_both_sides_of_a_wide_gap(scale: float, num_ranks: int) -> None:
    # In float32 the sum rounds to 5 for every threshold in the gap.
    _, threshold_R, grad_U = over_ranks(threshold_on_rank, num_ranks, scale)

    # 5 exp(-2 (0.8 scale + t)) = 100 exp(2 (-0.2 scale + t))
    expected = -scale * 0.3 - math.log(100 / 5) / 4
    np.testing.assert_allclose(threshold_R, expected, rtol=1e-6)
    # Each side has half of the slope, and every rank has asked for the gradient.
    by_column = -scale * num_ranks * np.repeat([0.5 / 5, 0.5 / 100], [5, 100])
    np.testing.assert_allclose(grad_U, by_column, rtol=1e-3)


def test_soft_top_k_has_a_finite_gradient_where_all_slopes_are_tiny() -> None:
    column_UD = torch.tensor([[1.0], [0.9], [-0.5]], requires_grad=True)
    k_G = torch.tensor([2.0])

    # The slopes are about exp(-81): a gradient divided by them would be infinite.
    threshold_G = columns.top_k_threshold(
        torch.ones(1, 1), column_UD, NONE, k_G, alpha=2.0, scale=58.0, widest=3
    )
    (1e3 * threshold_G).sum().backward()

    assert column_UD.grad is not None
    torch.testing.assert_close(column_UD.grad.sum().item(), -58e3, rtol=1e-5, atol=0)


def test_soft_top_k_has_no_gradient_for_a_query_without_columns() -> None:
    column_UD = torch.ones(1, 3, requires_grad=True)
    skipped = Pairs(torch.tensor([0]), torch.tensor([0]))
    k_G = torch.tensor([0.5])

    threshold_G = columns.top_k_threshold(
        torch.ones(1, 3), column_UD, skipped, k_G, alpha=2.0, scale=4.0, widest=1
    )
    threshold_G.sum().backward()

    assert threshold_G.isfinite().all()
    assert column_UD.grad is not None
    assert not column_UD.grad.any()


def test_soft_top_k_keeps_the_type_of_the_scores() -> None:
    query_GD = torch.randn(4, 3, requires_grad=True)
    column_UD = torch.randn(9, 3, requires_grad=True)
    k_G = torch.full((4,), 3.0, dtype=torch.float64)

    threshold_G = columns.top_k_threshold(query_GD, column_UD, NONE, k_G, 2.0, 4.0, widest=9)
    threshold_G.sum().backward()

    assert threshold_G.dtype == torch.float32


def test_a_query_without_a_negative_costs_nothing() -> None:
    query_GD = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    column_UD = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    # The only column is a positive of both queries.
    positives = Pairs(torch.tensor([0, 1]), torch.tensor([0, 0]))

    loss = decoupled_softmax(query_GD, column_UD, positives, positives, scale=20.0)
    loss.backward()

    assert loss == 0
    assert query_GD.grad is not None
    assert not query_GD.grad.any()
