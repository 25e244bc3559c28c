"""Softmax losses over columns that are split over ranks equal the golden vectors, gradients included."""

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


def of_scores(
    name: str, loss: Callable[[dict[str, Any], Tensor, Tensor, Pairs], Tensor]
) -> tuple[float, Any]:
    """A loss whose queries are unit vectors, so that columns are scores and the columns' gradient is the scores'."""
    g = golden(name)
    num_queries, num_columns = g["scores"].shape
    part = LabelPartition(num_columns, collectives.num_ranks(), collectives.rank())
    start, stop = share(num_queries, collectives.rank(), collectives.num_ranks())
    query_GD = gather_rows(
        torch.eye(num_queries, dtype=torch.float64)[start:stop].requires_grad_(), num_queries
    )
    column_UD = torch.tensor(g["scores"].T[part.start : part.stop].copy(), requires_grad=True)
    rows, labels = g["positives"].astype(bool)[:, part.start : part.stop].nonzero()
    total = (
        loss(g, query_GD, column_UD, Pairs(torch.from_numpy(rows), torch.from_numpy(labels)))
        / num_queries
    )
    total.backward()
    assert column_UD.grad is not None
    return float(total.detach()), column_UD.grad.numpy()


def check(name: str, num_ranks: int, loss: Callable[..., Tensor]) -> None:
    g = golden(name)
    total, grad_UG = over_ranks(of_scores, num_ranks, name, loss)
    np.testing.assert_allclose(total, g["loss"], rtol=1e-9)
    np.testing.assert_allclose(grad_UG.T, g["grad_scores"], rtol=1e-9, atol=1e-11)


@pytest.fixture(params=[7, 1 << 20], autouse=True)
def block_floats(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "BLOCK_FLOATS", request.param)


NONE = Pairs(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("tau", ["0.05", "1.0"])
def test_softmax_is_golden(tau: str, num_ranks: int) -> None:
    check(
        f"softmax_tau{tau}",
        num_ranks,
        lambda g, q, c, pos: softmax(q, c, pos, NONE, 1 / float(g["tau"])),
    )


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("tau", ["0.05", "1.0"])
def test_decoupled_softmax_is_golden(tau: str, num_ranks: int) -> None:
    check(
        f"decoupled_tau{tau}",
        num_ranks,
        lambda g, q, c, p: decoupled_softmax(q, c, p, p, 1 / float(g["tau"])),
    )


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("k", [3, 5])
def test_soft_top_k_is_golden(k: int, num_ranks: int) -> None:
    name = f"softtopk_k{k}"
    num_queries, num_columns = golden(name)["scores"].shape
    widest = -(-num_columns // num_ranks)
    k_G = torch.full((num_queries,), float(k))
    check(
        name,
        num_ranks,
        lambda g, q, c, p: soft_top_k(q, c, p, NONE, k_G, float(g["alpha"]), 1.0, widest=widest),
    )


def test_soft_top_k_sums_to_k_and_has_the_gradient_of_its_definition() -> None:
    torch.manual_seed(0)
    query_GD = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    column_UD = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    skip = torch.tensor([0, 2]), torch.tensor([1, 8])
    k_G = torch.tensor([3.0, 5.0, 0.5, 3.0], dtype=torch.float64)

    def threshold(query: Tensor, column: Tensor) -> Tensor:
        return columns.top_k_threshold(query, column, Pairs(*skip), k_G, 2.0, 4.0, widest=9)

    score = 4 * query_GD @ column_UD.T
    score[skip] = -torch.inf
    sums = torch.sigmoid(2 * (score + threshold(query_GD, column_UD)[:, None])).sum(dim=1)
    torch.testing.assert_close(sums, k_G, atol=1e-6, rtol=0)
    assert torch.autograd.gradcheck(threshold, (query_GD, column_UD))


def test_a_query_without_a_negative_costs_nothing() -> None:
    query_GD = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    column_UD = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    only = Pairs(torch.tensor([0, 1]), torch.tensor([0, 0]))
    loss = decoupled_softmax(query_GD, column_UD, only, only, 20.0)
    loss.backward()
    assert loss == 0
    assert query_GD.grad is not None
    assert not query_GD.grad.any()
