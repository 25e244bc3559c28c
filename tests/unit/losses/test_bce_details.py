"""Weights, priors and skipped pairs of the binary cross-entropies, against sums over listed scores."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from xmcray.losses.bce import full_bce, sampled_bce
from xmcray.losses.pairs import Pairs

# Pairs of a query and a label, as (queries, labels).
POSITIVES = Pairs(
    torch.tensor([0, 1, 1]),
    torch.tensor([2, 0, 4]),
    weights=torch.tensor([1.0, 2.5, 0.5], dtype=torch.float64),
)
SKIPPED = Pairs(torch.tensor([0, 2]), torch.tensor([3, 1]))


@pytest.mark.parametrize("chunk_labels", [2, 100])
def test_the_exact_loss_has_a_prior_and_weights_and_leaves_out_skipped_pairs(
    chunk_labels: int,
) -> None:
    torch.manual_seed(0)
    query_GD = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    row_SD = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def loss(query_GD: torch.Tensor, row_SD: torch.Tensor) -> torch.Tensor:
        return full_bce(query_GD, row_SD, POSITIVES, SKIPPED, chunk_labels, logit_prior=-2.0)

    # A positive costs softplus(-score), a negative softplus(score), a skipped pair nothing.
    sign_GS = torch.ones(3, 5, dtype=torch.float64)
    sign_GS[POSITIVES.rows, POSITIVES.columns] = -1
    count_GS = torch.ones(3, 5, dtype=torch.float64)
    count_GS[POSITIVES.rows, POSITIVES.columns] = POSITIVES.weights
    count_GS[SKIPPED.rows, SKIPPED.columns] = 0
    score_GS = query_GD @ row_SD.T - 2.0
    loss_GS = F.softplus(sign_GS * score_GS)
    expected = (count_GS * loss_GS).sum()

    torch.testing.assert_close(loss(query_GD, row_SD), expected)
    assert torch.autograd.gradcheck(loss, (query_GD, row_SD))


def test_the_exact_loss_of_a_high_score_keeps_its_digits() -> None:
    """exp(-20) is far below the last bit of the score 20."""
    query_GD = torch.tensor([[20.0]], requires_grad=True)
    row_SD = torch.tensor([[1.0]])
    none = torch.empty(0, dtype=torch.int64)
    positive = Pairs(torch.tensor([0]), torch.tensor([0]))

    loss = full_bce(query_GD, row_SD, positive, Pairs(none, none))
    loss.backward()

    torch.testing.assert_close(loss, torch.tensor(20.0).neg().exp(), atol=0, rtol=1e-5)
    torch.testing.assert_close(
        query_GD.grad, torch.tensor([[-20.0]]).exp().neg(), atol=0, rtol=1e-5
    )


def test_the_sampled_loss_weighs_pairs_and_pool() -> None:
    """A positive of weight 2.5, a hard negative, and a pool of two labels that weighs 4."""
    pair_score_P = torch.tensor([1.0, -0.5], dtype=torch.float64, requires_grad=True)
    pool_score_GC = torch.tensor([[0.3, 2.0], [-1.0, 0.7]], dtype=torch.float64, requires_grad=True)

    def loss(pair_score_P: torch.Tensor, pool_score_GC: torch.Tensor) -> torch.Tensor:
        return sampled_bce(
            pair_score_P,
            pair_is_positive_P=torch.tensor([True, False]),
            pair_weight_P=torch.tensor([2.5, 1.0], dtype=torch.float64),
            pool_score_GC=pool_score_GC,
            skip_rows=torch.tensor([0]),
            skip_columns=torch.tensor([1]),
            pool_weight=4.0,
        )

    positive = 2.5 * F.softplus(-pair_score_P[0])
    hard = F.softplus(pair_score_P[1])
    # Query 0 skips column 1 of the pool.
    pool_GC = F.softplus(pool_score_GC)
    pool = pool_GC[0, 0] + pool_GC[1, 0] + pool_GC[1, 1]
    expected = positive + hard + 4 * pool

    torch.testing.assert_close(loss(pair_score_P, pool_score_GC), expected)
    assert torch.autograd.gradcheck(loss, (pair_score_P, pool_score_GC))
