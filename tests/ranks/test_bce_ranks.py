"""Losses over label shards equal the golden vectors, gradients included, on any number of ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from ranks import golden, over_ranks

from xmcray.losses.bce import full_bce, sampled_bce
from xmcray.losses.pairs import Pairs, pair_scores
from xmcray.negatives.sampler import gather_candidates
from xmcray.parallel import collectives
from xmcray.parallel.collectives import gather_rows
from xmcray.parallel.partition import LabelPartition, share
from xmcray.types import Batch, Ragged

RANKS = [1, 2, 3, 4]


def rows_of(mask: np.ndarray) -> Ragged:
    return Ragged.from_rows([np.flatnonzero(row) for row in mask])


def batch_of(positives: np.ndarray) -> Batch:
    queries = len(positives)
    start, stop = share(queries, collectives.rank(), collectives.num_ranks())
    ids = np.arange(queries, dtype=np.int64)
    return Batch(
        0,
        0,
        ids,
        start,
        stop,
        Ragged.empty(stop - start),
        rows_of(positives),
        Ragged.empty(queries),
    )


def sampled_on_rank(name: str) -> tuple[float, Any, Any]:
    g = golden(name)
    part = LabelPartition(len(g["classifier"]), collectives.num_ranks(), collectives.rank())
    batch = batch_of(g["positives"])
    query_BD = torch.tensor(g["queries"][batch.start : batch.stop], requires_grad=True)
    weight_SD = torch.tensor(g["classifier"][part.start : part.stop], requires_grad=True)
    query_GD = gather_rows(query_BD, len(batch.query_ids))
    found = gather_candidates(
        batch, Ragged.from_rows(list(g["hard"])), np.sort(g["pool"]), batch.positives, None, part
    )
    row_UD = weight_SD.index_select(0, found.row_ids)
    total = sampled_bce(
        pair_scores(query_GD, row_UD, found.pair_query, found.pair_row),
        found.pair_is_positive,
        found.pair_weight,
        query_GD @ row_UD.index_select(0, found.pool_rows).T,
        found.skip_query,
        found.skip_column,
        float(g["weight"]),
    )
    loss = total / len(query_GD)
    loss.backward()
    return float(loss.detach()), query_BD.grad.numpy(), weight_SD.grad.numpy()


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", ["astra_bce_one", "astra_bce_unbiased"])
def test_sampled_bce_is_golden(name: str, num_ranks: int) -> None:
    g = golden(name)
    total, query_GD, row_LD = over_ranks(sampled_on_rank, num_ranks, name)
    np.testing.assert_allclose(total, g["loss"], rtol=1e-9)
    np.testing.assert_allclose(query_GD, g["grad_queries"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(row_LD, g["grad_classifier"], rtol=1e-9, atol=1e-12)


def full_on_rank(chunk: int) -> tuple[float, Any]:
    """Full BCE with W = the scores themselves: queries are unit vectors, so the gradient of W is that of the scores."""
    g = golden("bce_full")
    part = LabelPartition(g["scores"].shape[1], collectives.num_ranks(), collectives.rank())
    batch = batch_of(g["positives"])
    query_GD = gather_rows(
        torch.eye(len(g["scores"]), dtype=torch.float64)[batch.start : batch.stop], len(g["scores"])
    )
    weight_SD = torch.tensor(g["scores"].T[part.start : part.stop].copy(), requires_grad=True)
    own = part.owns(batch.positives.values)
    rows, labels = batch.positives.row_ids[own], part.to_local(batch.positives.values[own])
    none = torch.empty(0, dtype=torch.int64)
    positives = Pairs(torch.from_numpy(rows), torch.from_numpy(labels))
    total = full_bce(query_GD, weight_SD, positives, Pairs(none, none), chunk)
    loss = total / len(query_GD)
    loss.backward()
    return float(loss.detach()), weight_SD.grad.numpy()


@pytest.mark.parametrize("num_ranks", [*RANKS, 5])
@pytest.mark.parametrize("chunk", [4, 100])
def test_full_bce_is_golden(num_ranks: int, chunk: int) -> None:
    g = golden("bce_full")
    total, row_LG = over_ranks(full_on_rank, num_ranks, chunk)
    np.testing.assert_allclose(total, g["loss"], rtol=1e-9)
    np.testing.assert_allclose(row_LG.T, g["grad_scores"], rtol=1e-9, atol=1e-12)


def few_labels_on_rank() -> tuple[float, Any, Any]:
    """Four labels on five ranks: rank 0 owns none and still takes part."""
    part = LabelPartition(4, collectives.num_ranks(), collectives.rank())
    torch.manual_seed(0)
    queries, classifier = (
        torch.randn(6, 3, dtype=torch.float64),
        torch.randn(4, 3, dtype=torch.float64),
    )
    positives = np.eye(6, 4, dtype=bool)
    batch = batch_of(positives)
    query_BD = queries[batch.start : batch.stop].clone().requires_grad_()
    weight_SD = classifier[part.start : part.stop].clone().requires_grad_()
    query_GD = gather_rows(query_BD, 6)
    hard = Ragged.from_rows([[3], [2], [1], [0], [0, 1], []])
    found = gather_candidates(batch, hard, np.array([0, 2]), batch.positives, None, part)
    row_UD = weight_SD.index_select(0, found.row_ids)
    pool = query_GD @ row_UD.index_select(0, found.pool_rows).T
    scores = pair_scores(query_GD, row_UD, found.pair_query, found.pair_row)
    total = sampled_bce(
        scores, found.pair_is_positive, None, pool, found.skip_query, found.skip_column, 2.0
    )
    loss = total / len(query_GD)
    loss.backward()
    return float(loss.detach()), query_BD.grad.numpy(), weight_SD.grad.numpy()


def test_a_rank_without_a_label() -> None:
    assert LabelPartition(4, 5, 0).size == 0
    one = over_ranks(few_labels_on_rank, 1)
    five = over_ranks(few_labels_on_rank, 5)
    for found, expected in zip(five, one, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9)
