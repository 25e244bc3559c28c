"""The sampled loss and its gradients are unbiased estimates of the exact ones (ASTRA, Lemma 4.1)."""

import numpy as np
import torch

from xmcray import draws
from xmcray.losses.bce import full_bce, sampled_bce
from xmcray.losses.pairs import Pairs, pair_scores
from xmcray.negatives.sampler import gather_candidates
from xmcray.parallel.partition import LabelPartition
from xmcray.types import Batch, Ragged

POOLS, QUERIES, LABELS, POOL, DIM = 5000, 4, 60, 12, 3


def test_loss_and_gradients_over_5000_pools() -> None:
    torch.manual_seed(1)
    query_GD = torch.randn(QUERIES, DIM, dtype=torch.float64, requires_grad=True)
    row_LD = torch.randn(LABELS, DIM, dtype=torch.float64, requires_grad=True)
    positives = Ragged.from_rows([[0, 7], [3], [], [9, 20, 41]])
    hard = Ragged.from_rows([[5, 6], [8], [9, 1], []])
    none = torch.empty(0, dtype=torch.int64)
    rows, labels = torch.from_numpy(positives.row_ids), torch.from_numpy(positives.values)
    full_bce(query_GD, row_LD, Pairs(rows, labels), Pairs(none, none)).backward()
    exact = np.concatenate([query_GD.grad.numpy().ravel(), row_LD.grad.numpy().ravel()])
    with torch.no_grad():
        exact_loss = float(full_bce(query_GD, row_LD, Pairs(rows, labels), Pairs(none, none)))

    part = LabelPartition(LABELS, 1, 0)
    losses, gradients = np.empty(POOLS), np.empty((POOLS, exact.size))
    for step in range(POOLS):
        batch = Batch(
            0,
            step,
            np.arange(QUERIES),
            0,
            QUERIES,
            Ragged.empty(QUERIES),
            positives,
            Ragged.empty(QUERIES),
        )
        pool = draws.uniform_labels(0, step, LABELS, POOL)
        found = gather_candidates(batch, hard, pool, positives, None, part)
        query_GD.grad = row_LD.grad = None
        row_UD = row_LD.index_select(0, found.row_ids)
        loss = sampled_bce(
            pair_scores(query_GD, row_UD, found.pair_query, found.pair_row),
            found.pair_is_positive,
            None,
            query_GD @ row_UD.index_select(0, found.pool_rows).T,
            found.skip_query,
            found.skip_column,
            LABELS / POOL,
        )
        loss.backward()
        losses[step] = float(loss.detach())
        gradients[step] = np.concatenate(
            [query_GD.grad.numpy().ravel(), row_LD.grad.numpy().ravel()]
        )
    assert abs((losses.mean() - exact_loss) / (losses.std() / POOLS**0.5)) <= 3
    z = (gradients.mean(axis=0) - exact) / (gradients.std(axis=0) / POOLS**0.5)
    assert np.abs(z).max() <= 4.5
    assert 0.7 <= (z**2).mean() <= 1.3


def test_a_positive_is_never_a_negative_of_the_pool() -> None:
    positives, hard = Ragged.from_rows([[0, 2]]), Ragged.from_rows([[1]])
    batch = Batch(0, 0, np.arange(1), 0, 1, Ragged.empty(1), positives, Ragged.from_rows([[3]]))
    found = gather_candidates(batch, hard, np.arange(5), positives, None, LabelPartition(5, 1, 0))
    assert sorted(found.row_ids[found.pool_rows][found.skip_column].tolist()) == [0, 1, 2, 3]
