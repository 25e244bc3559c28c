"""The triplet loss equals the golden vectors, gradients included.

The anchors are split over one to four ranks.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from ranks import golden, on_ranks, over_ranks
from torch import Tensor

from xmcray.losses.pairs import Pairs
from xmcray.losses.triplet import regulariser, triplet
from xmcray.parallel import collectives
from xmcray.parallel.collectives import gather_parts
from xmcray.parallel.partition import share

RANKS = [1, 2, 3, 4]
EMPTY = Pairs(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
# All pairs of two anchors and two columns.
EVERYTHING = Pairs(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]))
FIRST_PAIR = Pairs(torch.tensor([0]), torch.tensor([0]))


def pairs(mask: Any) -> Pairs:
    """The pairs of a row and a column for which the mask is true."""
    rows, columns = np.nonzero(mask)
    return Pairs(torch.from_numpy(rows), torch.from_numpy(columns))


def share_of_rank(num_anchors: int) -> slice:
    """The anchors of the rank that calls."""
    start, stop = share(
        num_anchors,
        collectives.rank(),
        collectives.num_ranks(),
    )
    return slice(start, stop)


def settings_of(vector: dict[str, Any]) -> dict[str, Any]:
    """The settings of the loss of a golden vector."""
    settings = {
        "gamma_min": float(vector["gamma_min"]),
        "gamma_max": float(vector["gamma_max"]),
        "num_negatives": int(vector.get("num_negatives", 0)),
        "temperature": None,
    }
    if "positive_index" in vector:
        settings["temperature"] = float(vector["weight_temperature"])
        settings["detached"] = bool(vector["weights_detached"])
    return settings


def own_anchors(name: str) -> tuple[float, Any]:
    """The loss of a golden vector on one rank, and its gradient."""
    vector = golden(name)
    num_anchors = len(vector["scores"])
    own = share_of_rank(num_anchors)
    score_AC = torch.tensor(vector["scores"][own], requires_grad=True)
    true = pairs(vector["positives"][own].astype(bool))
    positives = true
    if "positive_index" in vector:
        # One positive of each anchor was drawn.
        columns = torch.from_numpy(vector["positive_index"][own])
        positives = Pairs(torch.arange(len(columns)), columns)

    total = triplet(
        score_AC,
        positives,
        true,
        inverted=name.endswith("inverted"),
        **settings_of(vector),
    )
    loss = total / num_anchors
    loss.backward()

    assert score_AC.grad is not None
    return float(loss.detach()), score_AC.grad.numpy()


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(
    "name",
    [
        "triplet_dynamic",
        "triplet_dynamic_inverted",
        "triplet_weighted",
    ],
)
def test_triplet_is_golden(name: str, num_ranks: int) -> None:
    vector = golden(name)

    total, grad_AC = over_ranks(own_anchors, num_ranks, name)

    assert_allclose(total, vector["loss"], rtol=1e-9)
    assert_allclose(grad_AC, vector["grad_scores"], rtol=1e-9, atol=1e-12)


def scores_and_truth() -> tuple[Tensor, Any]:
    """Scores of seven anchors with prototypes and with texts, and a mask of the true pairs."""
    rng = np.random.default_rng(0)
    scores = rng.random((2, 7, 9)) * 0.3
    is_true = rng.random((7, 9)) < 0.3
    return torch.from_numpy(scores), is_true


def own_regulariser(hinge: bool, num_negatives: int) -> tuple[float, Any]:
    """The regulariser on one rank, and its gradient for the scores of both kinds."""
    scores, is_true = scores_and_truth()
    own = share_of_rank(7)
    own_scores = scores[:, own].clone().requires_grad_()
    prototype_AC, text_AC = own_scores
    true = pairs(is_true[own])

    loss = regulariser(
        prototype_AC,
        text_AC,
        true,
        true,
        margin=0.1,
        num_negatives=num_negatives,
        hinge=hinge,
    )
    loss.backward()

    assert own_scores.grad is not None
    return float(loss.detach()), own_scores.grad.numpy()


def expected_regulariser(hinge: bool, num_negatives: int) -> float:
    """The mean term of the positives and that of the worst negatives, halved, by a plain loop."""
    scores, is_true = scores_and_truth()
    positive_terms = []
    negative_terms = []
    for prototype, text, is_positive in zip(*scores.numpy(), is_true, strict=True):
        positives = np.flatnonzero(is_positive)
        gaps = text[positives] - prototype[positives]
        positive_terms += [gap + 0.1 for gap in gaps]

        negatives = np.flatnonzero(~is_positive)
        worst_first = negatives[np.argsort(-prototype[negatives])]
        # 0 stands for all negatives.
        worst = worst_first[: num_negatives or None]
        gaps = prototype[worst] - text[worst]
        negative_terms += [gap + 0.1 for gap in gaps]
    if hinge:
        positive_terms = [term for term in positive_terms if term > 0]
        negative_terms = [term for term in negative_terms if term > 0]
    return (np.mean(positive_terms) + np.mean(negative_terms)) / 2


@pytest.mark.parametrize("hinge", [True, False])
@pytest.mark.parametrize("count", [0, 3])
def test_regulariser_is_a_plain_loop_on_any_number_of_ranks(hinge: bool, count: int) -> None:
    expected = expected_regulariser(hinge, count)
    _, expected_grad = own_regulariser(hinge, count)

    for num_ranks in RANKS:
        results = on_ranks(own_regulariser, num_ranks, hinge, count)

        losses = [loss for loss, _ in results]
        grads = [grad for _, grad in results]
        assert_allclose(sum(losses), expected, rtol=1e-9)
        assert_allclose(np.concatenate(grads, axis=1), expected_grad, rtol=1e-9)


@pytest.mark.parametrize("temperature", [0.1, None])
@pytest.mark.parametrize("detached", [True, False])
def test_gradient_is_that_of_the_value(temperature: float | None, detached: bool) -> None:
    torch.manual_seed(1)
    score_AC = torch.rand(3, 6, dtype=torch.float64).requires_grad_()
    true = Pairs(torch.tensor([0, 1, 1]), torch.tensor([2, 0, 4]))

    def with_a_fixed_margin(score_AC: Tensor) -> Tensor:
        # A margin that moves with the scores is no part of the gradient.
        return triplet(
            score_AC,
            true,
            true,
            gamma_min=0.25,
            gamma_max=0.25,
            temperature=temperature,
        )

    assert torch.autograd.gradcheck(with_a_fixed_margin, (score_AC,))

    loss = triplet(
        score_AC,
        true,
        true,
        gamma_min=0.0,
        gamma_max=9.0,
        temperature=temperature,
        detached=detached,
    )
    (grad,) = torch.autograd.grad(loss, score_AC)
    assert grad.isfinite().all()
    assert not grad[2].any(), "an anchor without a positive"


def assert_both_losses_are_finite(positives: Pairs, temperature: float | None) -> None:
    """Where every pair is true, so that there is no negative."""
    score_AC = torch.rand(2, 2, dtype=torch.float64, requires_grad=True)
    of_triplets = triplet(
        score_AC,
        positives,
        EVERYTHING,
        gamma_min=0.1,
        gamma_max=0.3,
        temperature=temperature,
    )
    of_regulariser = regulariser(
        score_AC,
        score_AC + 9,
        positives,
        EVERYTHING,
        margin=0.1,
        num_negatives=1,
    )

    loss = of_triplets + of_regulariser
    (grad,) = torch.autograd.grad(loss, score_AC)

    assert loss.isfinite()
    assert grad.isfinite().all()


def test_nothing_is_nan_where_nothing_is_left() -> None:
    assert_both_losses_are_finite(EVERYTHING, temperature=0.1)
    assert_both_losses_are_finite(EVERYTHING, temperature=None)
    assert_both_losses_are_finite(EMPTY, temperature=0.1)
    assert_both_losses_are_finite(EMPTY, temperature=None)

    # A pair that satisfies every margin.
    score_AC = torch.tensor([[1.0, -1.0]], requires_grad=True)
    zeros = score_AC * 0
    of_triplets = triplet(
        score_AC,
        FIRST_PAIR,
        FIRST_PAIR,
        gamma_min=0.1,
        gamma_max=0.3,
    )
    of_regulariser = regulariser(
        score_AC,
        zeros,
        FIRST_PAIR,
        FIRST_PAIR,
        margin=0.1,
    )
    loss = of_triplets + of_regulariser
    (grad,) = torch.autograd.grad(loss, score_AC)
    assert loss == 0
    assert not grad.any()


@pytest.mark.parametrize("temperature", [0.1, None])
@pytest.mark.parametrize("detached", [True, False])
def test_a_pair_that_costs_nothing_moves_nothing(temperature: float | None, detached: bool) -> None:
    """Gaps at, between and above the bounds 1/8 and 1/4 cost 0.

    Binary fractions make them exact.
    """
    scores = [0.75, 0.625, 0.5625, 0.5, 0.25]
    score_AC = torch.tensor([scores], dtype=torch.float64, requires_grad=True)

    loss = triplet(
        score_AC,
        FIRST_PAIR,
        FIRST_PAIR,
        gamma_min=0.125,
        gamma_max=0.25,
        temperature=temperature,
        detached=detached,
    )
    (grad,) = torch.autograd.grad(loss, score_AC)

    assert loss == 0
    assert not grad.any()


@pytest.mark.parametrize("temperature", [0.1, None])
def test_a_tie_costs_the_smallest_margin(temperature: float | None) -> None:
    """s_p = s_n = 1/2 costs gamma_min.

    The pairs of the same anchor that cost nothing stay still.
    """
    scores = [0.5, 0.5, 0.25]
    score_AC = torch.tensor([scores], dtype=torch.float64, requires_grad=True)

    loss = triplet(
        score_AC,
        FIRST_PAIR,
        FIRST_PAIR,
        gamma_min=0.125,
        gamma_max=0.5,
        temperature=temperature,
        detached=True,
    )
    (grad,) = torch.autograd.grad(loss, score_AC)

    # The weights share one unit among the violating terms; the mean divides by both negatives.
    share_of_tie = 0.5 if temperature is None else 1.0
    assert loss == 0.125 * share_of_tie
    assert grad.tolist() == [[-share_of_tie, share_of_tie, 0.0]]


def own_part() -> tuple[Any, Any]:
    """The rows of all ranks, and the gradient of this rank's; rank r has r rows of the number r."""
    rank = collectives.rank()
    own = torch.full((rank, 2), float(rank), dtype=torch.float64, requires_grad=True)

    whole = gather_parts(own)
    # Row i counts i + 1 times, and each rank's loss rank + 1 times.
    weights = torch.arange(1, len(whole) + 1)[:, None]
    loss = (whole * weights).sum() * (rank + 1)
    loss.backward()

    assert own.grad is not None
    return whole.detach().numpy(), own.grad.numpy()


def test_parts_are_gathered_and_their_gradients_summed() -> None:
    results = on_ranks(own_part, 3)

    for whole, _ in results:
        np.testing.assert_array_equal(whole[:, 0], [1, 2, 2])
    # The losses of the ranks count 1 + 2 + 3 times.
    grad = np.concatenate([grad for _, grad in results])
    np.testing.assert_array_equal(grad[:, 0], [6.0, 12.0, 18.0])
