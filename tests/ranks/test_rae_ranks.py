"""RAE-XMC's loss, with labels and queries split over ranks, equals the golden vector, gradients included."""

from typing import Any

import numpy as np
import pytest
import torch
from ranks import golden, over_ranks

from xmcray.losses import columns
from xmcray.methods.label_pool import LabelPool
from xmcray.methods.rae import rae_loss, rae_pairs, sharing_queries
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition, share
from xmcray.types import Batch, Ragged


def batch_of(positives: Ragged, rank: int = 0, num_ranks: int = 1) -> Batch:
    start, stop = share(len(positives), rank, num_ranks)
    nothing = Ragged.empty(len(positives))
    return Batch(
        0, 0, np.arange(len(positives)), start, stop, Ragged.empty(stop - start), positives, nothing
    )


def on_rank() -> tuple[float, Any, Any]:
    g = golden("rae_loss")
    rank, num_ranks = collectives.rank(), collectives.num_ranks()
    order = np.argsort(g["pool_label_ids"])
    ids = g["pool_label_ids"][order]
    part = LabelPartition(g["positives_full"].shape[1], num_ranks, rank)
    pool = LabelPool(part, ids, ids[part.owns(ids)])
    batch = batch_of(
        Ragged.from_rows([np.flatnonzero(row) for row in g["positives_full"]]), rank, num_ranks
    )
    drawn = Ragged.from_rows(g["pool_label_ids"][g["picked_positive"]][:, None])
    query_BD = torch.tensor(g["queries"][batch.start : batch.stop], requires_grad=True)
    label_UD = torch.tensor(g["label_pool"][order][part.owns(ids)], requires_grad=True)
    num_queries = len(batch.query_ids)
    pairs = rae_pairs(batch, drawn, pool)
    total = rae_loss(query_BD, label_UD, pairs, num_queries, 1 / float(g["tau"])) / num_queries
    total.backward()
    assert query_BD.grad is not None
    assert label_UD.grad is not None
    return float(total.detach()), query_BD.grad.numpy(), label_UD.grad.numpy()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("block_floats", [7, 1 << 20])
def test_the_loss_is_golden(
    num_ranks: int, block_floats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "BLOCK_FLOATS", block_floats)
    g = golden("rae_loss")
    total, query_GD, label_PD = over_ranks(on_rank, num_ranks)
    np.testing.assert_allclose(total, g["loss"], rtol=1e-9)
    np.testing.assert_allclose(query_GD, g["grad_queries"], rtol=1e-9, atol=1e-11)
    expected = g["grad_label_pool"][np.argsort(g["pool_label_ids"])]
    np.testing.assert_allclose(label_PD, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 40])
def test_who_shares_a_positive_is_told_by_all_of_them(num_ranks: int) -> None:
    rng = np.random.default_rng(0)
    positive_GL = rng.random((31, 50)) < 0.04
    positives = Ragged.from_rows([np.flatnonzero(row) for row in positive_GL])
    found = np.zeros((31, 31), bool)
    for rank in range(num_ranks):
        start, stop = share(31, rank, num_ranks)
        pairs = sharing_queries(positives, start, stop)
        found[pairs.rows, pairs.columns + start] = True
    np.testing.assert_array_equal(found, (positive_GL.astype(int) @ positive_GL.T.astype(int)) > 0)
    assert not positive_GL.any(axis=1).all(), "one without positives shares with nobody"


def test_queries_as_negatives_can_be_switched_off() -> None:
    positives = Ragged.from_rows([[0], [1]])
    vectors = torch.eye(3, dtype=torch.float64)
    pool = LabelPool.everything(LabelPartition(2, 1, 0))
    query_BD, label_UD = vectors[:2], vectors[[1, 2]]
    batch = batch_of(positives)
    losses = []
    for query_negatives in (True, False):
        pairs = rae_pairs(batch, positives, pool, query_negatives)
        losses.append(float(rae_loss(query_BD, label_UD, pairs, 2, 2.0, query_negatives)))
    with_queries, without = losses
    # query 0: all three scores are 0; query 1: its label scores 0, label 0 scores 2, query 0 scores 0
    e = np.exp
    assert without == pytest.approx(np.log(1 + 1) + np.log(1 + e(2)))
    assert with_queries == pytest.approx(np.log(1 + 1 + 1) + np.log(1 + e(2) + 1))
