"""RAE-XMC's loss, with labels and queries split over ranks, equals the golden vector.

Gradients included.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from ranks import golden, over_ranks

from xmcray.losses import columns
from xmcray.methods.label_pool import LabelPool
from xmcray.methods.rae import rae_loss, rae_pairs, sharing_queries
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition, share
from xmcray.types import Batch, Ragged


def batch_of(
    positives: Ragged,
    rank: int = 0,
    num_ranks: int = 1,
) -> Batch:
    """A batch without texts in which no label is excluded."""
    num_queries = len(positives)
    start, stop = share(num_queries, rank, num_ranks)
    return Batch(
        epoch=0,
        step=0,
        query_ids=np.arange(num_queries),
        start=start,
        stop=stop,
        tokens=Ragged.empty(stop - start),
        positives=positives,
        excluded=Ragged.empty(num_queries),
    )


def rows_of_true_columns(mask: np.ndarray) -> Ragged:
    """The label ids of each row of a boolean matrix [queries, labels]."""
    return Ragged.from_rows([np.flatnonzero(row) for row in mask])


def on_rank() -> tuple[float, Any, Any]:
    """The loss of the golden vector on one rank, and its gradients."""
    vector = golden("rae_loss")
    rank = collectives.rank()
    num_ranks = collectives.num_ranks()
    positive_GL = vector["positives_full"]
    num_queries, num_labels = positive_GL.shape

    # The pool of the golden vector is in any order; that of a batch ascends.
    order = np.argsort(vector["pool_label_ids"])
    ids = vector["pool_label_ids"][order]
    part = LabelPartition(num_labels, num_ranks, rank)
    is_own = part.owns(ids)
    pool = LabelPool(part, ids, ids[is_own])

    batch = batch_of(rows_of_true_columns(positive_GL), rank, num_ranks)
    picked_labels = vector["pool_label_ids"][vector["picked_positive"]]
    pairs = rae_pairs(batch, Ragged.from_rows(picked_labels[:, None]), pool)
    own_queries = vector["queries"][batch.start : batch.stop]
    own_labels = vector["label_pool"][order][is_own]
    query_BD = torch.tensor(own_queries, requires_grad=True)
    label_UD = torch.tensor(own_labels, requires_grad=True)

    scale = 1 / float(vector["tau"])
    total = (
        rae_loss(
            query_BD,
            label_UD,
            pairs,
            num_queries,
            scale,
        )
        / num_queries
    )
    total.backward()

    assert query_BD.grad is not None
    assert label_UD.grad is not None
    return float(total.detach()), query_BD.grad.numpy(), label_UD.grad.numpy()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("block_floats", [7, 1 << 20])
def test_the_loss_is_golden(
    num_ranks: int,
    block_floats: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(columns, "BLOCK_FLOATS", block_floats)
    vector = golden("rae_loss")

    total, query_GD, label_PD = over_ranks(on_rank, num_ranks)

    order = np.argsort(vector["pool_label_ids"])
    grad_label_PD = vector["grad_label_pool"][order]
    assert_allclose(total, vector["loss"], rtol=1e-9)
    assert_allclose(query_GD, vector["grad_queries"], rtol=1e-9, atol=1e-11)
    assert_allclose(label_PD, grad_label_PD, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 40])
def test_who_shares_a_positive_is_told_by_all_of_them(num_ranks: int) -> None:
    rng = np.random.default_rng(0)
    positive_GL = rng.random((31, 50)) < 0.04
    positives = rows_of_true_columns(positive_GL)
    has_positive = positive_GL.any(axis=1)
    assert not has_positive.all(), "a query without positives shares with no other"

    shares_GG = np.zeros((31, 31), bool)
    for rank in range(num_ranks):
        start, stop = share(31, rank, num_ranks)
        pairs = sharing_queries(positives, start, stop)
        shares_GG[pairs.rows, pairs.columns + start] = True

    count_GL = positive_GL.astype(int)
    num_shared_GG = count_GL @ count_GL.T
    np.testing.assert_array_equal(shares_GG, num_shared_GG > 0)


def test_queries_as_negatives_can_be_switched_off() -> None:
    positives = Ragged.from_rows([[0], [1]])
    batch = batch_of(positives)
    pool = LabelPool.everything(LabelPartition(2, 1, 0))
    axes = torch.eye(3, dtype=torch.float64)
    query_BD = axes[[0, 1]]
    label_UD = axes[[1, 2]]

    def loss(query_negatives: bool) -> float:
        total = rae_loss(
            query_BD,
            label_UD,
            pairs=rae_pairs(batch, positives, pool, query_negatives),
            num_queries=2,
            scale=2.0,
            query_negatives=query_negatives,
        )
        return float(total)

    # Query 0: all three scores are 0.
    # Query 1: its label scores 0, label 0 scores 2, and query 0 scores 0.
    exp_2 = np.exp(2)
    labels_only = np.log(1 + 1) + np.log(1 + exp_2)
    with_queries = np.log(1 + 1 + 1) + np.log(1 + exp_2 + 1)
    assert loss(query_negatives=False) == pytest.approx(labels_only)
    assert loss(query_negatives=True) == pytest.approx(with_queries)
