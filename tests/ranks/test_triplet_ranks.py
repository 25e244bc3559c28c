"""The triplet loss equals the golden vectors, gradients included, with the anchors split over 1-4 ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from ranks import golden, on_ranks, over_ranks

from xmcray.losses.pairs import Pairs
from xmcray.losses.triplet import regulariser, triplet
from xmcray.parallel import collectives
from xmcray.parallel.collectives import gather_parts
from xmcray.parallel.partition import share

RANKS = [1, 2, 3, 4]
EMPTY = Pairs(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


def pairs(mask: Any) -> Pairs:
    rows, columns = np.nonzero(mask)
    return Pairs(torch.from_numpy(rows), torch.from_numpy(columns))


def settings(g: dict[str, Any]) -> dict[str, Any]:
    found = {
        "gamma_min": float(g["gamma_min"]),
        "gamma_max": float(g["gamma_max"]),
        "temperature": None,
    }
    if "positive_index" in g:
        found |= {
            "temperature": float(g["weight_temperature"]),
            "detached": bool(g["weights_detached"]),
        }
    return found | {"num_negatives": int(g.get("num_negatives", 0))}


def own_anchors(name: str) -> tuple[float, Any]:
    g = golden(name)
    start, stop = share(len(g["scores"]), collectives.rank(), collectives.num_ranks())
    score_AC = torch.tensor(g["scores"][start:stop], requires_grad=True)
    true = g["positives"].astype(bool)[start:stop]
    positives = pairs(true)
    if "positive_index" in g:
        positives = Pairs(
            torch.arange(stop - start), torch.from_numpy(g["positive_index"][start:stop])
        )
    inverted = name.endswith("inverted")
    loss = triplet(score_AC, positives, pairs(true), inverted=inverted, **settings(g)) / len(
        g["scores"]
    )
    loss.backward()
    assert score_AC.grad is not None
    return float(loss.detach()), score_AC.grad.numpy()


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(
    "name", ["triplet_dynamic", "triplet_dynamic_inverted", "triplet_weighted"]
)
def test_triplet_is_golden(name: str, num_ranks: int) -> None:
    g = golden(name)
    total, score_AC = over_ranks(own_anchors, num_ranks, name)
    np.testing.assert_allclose(total, g["loss"], rtol=1e-9)
    np.testing.assert_allclose(score_AC, g["grad_scores"], rtol=1e-9, atol=1e-12)


def scores_and_truth() -> tuple[torch.Tensor, Any]:
    generator = np.random.default_rng(0)
    return torch.from_numpy(generator.random((2, 7, 9)) * 0.3), generator.random((7, 9)) < 0.3


def own_regulariser(hinge: bool, count: int) -> tuple[float, Any]:
    both, true = scores_and_truth()
    start, stop = share(7, collectives.rank(), collectives.num_ranks())
    own = both[:, start:stop].clone().requires_grad_()
    listed = pairs(true[start:stop])
    loss = regulariser(own[0], own[1], listed, listed, margin=0.1, num_negatives=count, hinge=hinge)
    loss.backward()
    assert own.grad is not None
    return float(loss.detach()), own.grad.numpy()


@pytest.mark.parametrize("hinge", [True, False])
@pytest.mark.parametrize("count", [0, 3])
def test_regulariser_is_a_plain_loop_on_any_number_of_ranks(hinge: bool, count: int) -> None:
    (b, s), true = scores_and_truth()
    near = [float(s[i, j] - b[i, j]) + 0.1 for i, j in zip(*np.nonzero(true), strict=True)]
    far = []
    for b_row, s_row, true_row in zip(b, s, true, strict=True):
        negatives = np.flatnonzero(~true_row)
        worst = negatives[np.argsort(-b_row[negatives].numpy())][: count or None]
        far += [float(b_row[j] - s_row[j]) + 0.1 for j in worst]
    kept = [[term for term in part if term > 0] if hinge else part for part in (near, far)]
    expected = sum(np.mean(part) for part in kept) / 2
    one = own_regulariser(hinge, count)
    for num_ranks in RANKS:
        results = on_ranks(own_regulariser, num_ranks, hinge, count)
        np.testing.assert_allclose(sum(r[0] for r in results), expected, rtol=1e-9)
        np.testing.assert_allclose(
            np.concatenate([r[1] for r in results], axis=1), one[1], rtol=1e-9
        )


@pytest.mark.parametrize("temperature", [0.1, None])
@pytest.mark.parametrize("detached", [True, False])
def test_gradient_is_that_of_the_value(temperature: float | None, detached: bool) -> None:
    torch.manual_seed(1)
    score_AC = torch.rand(3, 6, dtype=torch.float64).requires_grad_()
    true = Pairs(torch.tensor([0, 1, 1]), torch.tensor([2, 0, 4]))

    def fixed(score: torch.Tensor) -> torch.Tensor:
        # a margin that moves with the scores is no part of the gradient
        return triplet(score, true, true, gamma_min=0.25, gamma_max=0.25, temperature=temperature)

    assert torch.autograd.gradcheck(fixed, (score_AC,))
    moving = triplet(
        score_AC,
        true,
        true,
        gamma_min=0.0,
        gamma_max=9.0,
        temperature=temperature,
        detached=detached,
    )
    (grad,) = torch.autograd.grad(moving, score_AC)
    assert grad.isfinite().all()
    assert not grad[2].any()  # an anchor without a positive


def test_nothing_is_nan_where_nothing_is_left() -> None:
    score_AC = torch.rand(2, 2, dtype=torch.float64, requires_grad=True)
    everything = Pairs(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]))
    for positives in (everything, EMPTY):
        for temperature in (0.1, None):
            loss = triplet(
                score_AC,
                positives,
                everything,
                gamma_min=0.1,
                gamma_max=0.3,
                temperature=temperature,
            )
            loss = loss + regulariser(
                score_AC, score_AC + 9, positives, everything, margin=0.1, num_negatives=1
            )
            (grad,) = torch.autograd.grad(loss, score_AC)
            assert loss.isfinite()
            assert grad.isfinite().all()
    satisfied = torch.tensor([[1.0, -1.0]], requires_grad=True)
    true = Pairs(torch.tensor([0]), torch.tensor([0]))
    loss = triplet(satisfied, true, true, gamma_min=0.1, gamma_max=0.3)
    loss = loss + regulariser(satisfied, satisfied * 0, true, true, margin=0.1)
    (grad,) = torch.autograd.grad(loss, satisfied)
    assert loss == 0
    assert not grad.any()


@pytest.mark.parametrize("temperature", [0.1, None])
@pytest.mark.parametrize("detached", [True, False])
def test_a_pair_that_costs_nothing_moves_nothing(temperature: float | None, detached: bool) -> None:
    """Gaps at, between and above the bounds 1/8 and 1/4 cost 0; binary fractions make them exact."""
    score_AC = torch.tensor([[0.75, 0.625, 0.5625, 0.5, 0.25]], dtype=torch.float64)
    score_AC.requires_grad_()
    true = Pairs(torch.tensor([0]), torch.tensor([0]))
    settings = {"gamma_min": 0.125, "gamma_max": 0.25, "temperature": temperature}
    loss = triplet(score_AC, true, true, **settings, detached=detached)
    (grad,) = torch.autograd.grad(loss, score_AC)
    assert loss == 0
    assert not grad.any()


@pytest.mark.parametrize("temperature", [0.1, None])
def test_a_tie_costs_the_smallest_margin(temperature: float | None) -> None:
    """s_p = s_n = 1/2 costs gamma_min; the pairs of the same anchor that cost nothing stay still."""
    score_AC = torch.tensor([[0.5, 0.5, 0.25]], dtype=torch.float64, requires_grad=True)
    true = Pairs(torch.tensor([0]), torch.tensor([0]))
    settings = {"gamma_min": 0.125, "gamma_max": 0.5, "temperature": temperature}
    loss = triplet(score_AC, true, true, **settings, detached=True)
    (grad,) = torch.autograd.grad(loss, score_AC)
    # The weights share one unit among the violating terms; the mean divides by both negatives.
    share_of_tie = 0.5 if temperature is None else 1.0
    assert loss == 0.125 * share_of_tie
    assert grad.tolist() == [[-share_of_tie, share_of_tie, 0.0]]


def own_part() -> tuple[Any, Any]:
    rank = collectives.rank()
    own = torch.full(
        (rank, 2), float(rank), dtype=torch.float64, requires_grad=True
    )  # rank 0 has none
    whole = gather_parts(own)
    (whole * torch.arange(1, len(whole) + 1)[:, None] * (rank + 1)).sum().backward()
    assert own.grad is not None
    return whole.detach().numpy(), own.grad.numpy()


def test_parts_are_gathered_and_their_gradients_summed() -> None:
    results = on_ranks(own_part, 3)
    for whole, _ in results:
        np.testing.assert_array_equal(whole[:, 0], [1, 2, 2])
    np.testing.assert_array_equal(
        np.concatenate([grad for _, grad in results])[:, 0], [6.0, 12.0, 18.0]
    )
