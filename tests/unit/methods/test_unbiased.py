"""The sampled loss and its gradients are unbiased estimates of the exact ones.

Source: ASTRA, Lemma 4.1.
"""

import numpy as np
import torch
from torch import Tensor

from xmcray import draws
from xmcray.losses.bce import full_bce, sampled_bce
from xmcray.losses.pairs import Pairs, pair_scores
from xmcray.negatives.sampler import Candidates, gather_candidates
from xmcray.parallel.partition import LabelPartition
from xmcray.types import Batch, Ragged

NUM_POOLS = 2000
NUM_QUERIES = 4
NUM_LABELS = 60
POOL_SIZE = 12
DIM = 3


def batch_of(
    step: int,
    positives: Ragged,
    excluded: Ragged | None = None,
) -> Batch:
    num_queries = len(positives)
    if excluded is None:
        excluded = Ragged.empty(num_queries)
    return Batch(
        epoch=0,
        step=step,
        query_ids=np.arange(num_queries),
        start=0,
        stop=num_queries,
        tokens=Ragged.empty(num_queries),
        positives=positives,
        excluded=excluded,
    )


def exact_loss(
    query_GD: Tensor,
    row_LD: Tensor,
    positives: Ragged,
) -> Tensor:
    nothing = torch.empty(0, dtype=torch.int64)
    positive_pairs = Pairs(
        torch.from_numpy(positives.row_ids),
        torch.from_numpy(positives.values),
    )
    return full_bce(query_GD, row_LD, positive_pairs, Pairs(nothing, nothing))


def sampled_loss(
    query_GD: Tensor,
    row_LD: Tensor,
    candidates: Candidates,
) -> Tensor:
    row_UD = row_LD.index_select(0, candidates.row_ids)
    pool_CD = row_UD.index_select(0, candidates.pool_rows)
    return sampled_bce(
        pair_scores(query_GD, row_UD, candidates.pair_query, candidates.pair_row),
        candidates.pair_is_positive,
        pair_weight_P=None,
        pool_score_GC=query_GD @ pool_CD.T,
        skip_rows=candidates.skip_query,
        skip_columns=candidates.skip_column,
        pool_weight=NUM_LABELS / POOL_SIZE,
    )


def value_and_gradient(
    loss: Tensor,
    query_GD: Tensor,
    row_LD: Tensor,
) -> tuple[float, np.ndarray]:
    """The loss, and the gradients of all queries and labels as one vector."""
    query_grad, row_grad = torch.autograd.grad(loss, [query_GD, row_LD])
    gradient = torch.cat([query_grad.ravel(), row_grad.ravel()])
    return float(loss.detach()), gradient.numpy()


def test_loss_and_gradients_over_2000_pools() -> None:
    torch.manual_seed(1)
    query_GD = torch.randn(NUM_QUERIES, DIM, dtype=torch.float64, requires_grad=True)
    row_LD = torch.randn(NUM_LABELS, DIM, dtype=torch.float64, requires_grad=True)
    positives = Ragged.from_rows([[0, 7], [3], [], [9, 20, 41]])
    hard = Ragged.from_rows([[5, 6], [8], [9, 1], []])
    part = LabelPartition(NUM_LABELS, 1, 0)
    loss = exact_loss(query_GD, row_LD, positives)
    exact, exact_gradient = value_and_gradient(loss, query_GD, row_LD)

    losses = np.empty(NUM_POOLS)
    gradients = np.empty((NUM_POOLS, exact_gradient.size))
    for step in range(NUM_POOLS):
        batch = batch_of(step, positives)
        pool = draws.uniform_labels(0, step, NUM_LABELS, POOL_SIZE)
        candidates = gather_candidates(
            batch,
            hard,
            pool,
            positives,
            None,
            part,
        )
        loss = sampled_loss(query_GD, row_LD, candidates)
        losses[step], gradients[step] = value_and_gradient(loss, query_GD, row_LD)

    # How many standard errors the means are from the exact values.
    standard_error = losses.std() / NUM_POOLS**0.5
    assert abs(losses.mean() - exact) / standard_error <= 3
    standard_errors = gradients.std(axis=0) / NUM_POOLS**0.5
    z = (gradients.mean(axis=0) - exact_gradient) / standard_errors
    assert np.abs(z).max() <= 4.5
    assert 0.7 <= (z**2).mean() <= 1.3


def test_a_positive_is_never_a_negative_of_the_pool() -> None:
    positives = Ragged.from_rows([[0, 2]])
    hard = Ragged.from_rows([[1]])
    excluded = Ragged.from_rows([[3]])

    candidates = gather_candidates(
        batch_of(0, positives, excluded),
        hard,
        np.arange(5),
        positives,
        None,
        LabelPartition(5, 1, 0),
    )

    pool_labels = candidates.row_ids[candidates.pool_rows]
    skipped = pool_labels[candidates.skip_column]
    assert sorted(skipped.tolist()) == [0, 1, 2, 3]
