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
    """The columns of each row that are set."""
    return Ragged.from_rows([np.flatnonzero(row) for row in mask])


def partition_of(num_labels: int) -> LabelPartition:
    return LabelPartition(num_labels, collectives.num_ranks(), collectives.rank())


def batch_of(positives: np.ndarray) -> Batch:
    """A batch whose queries have these labels (bool [G, L]), as this rank sees it; it has no texts."""
    num_queries = len(positives)
    start, stop = share(num_queries, collectives.rank(), collectives.num_ranks())
    return Batch(
        epoch=0,
        step=0,
        query_ids=np.arange(num_queries, dtype=np.int64),
        start=start,
        stop=stop,
        tokens=Ragged.empty(stop - start),
        positives=rows_of(positives),
        excluded=Ragged.empty(num_queries),
    )


def sampled_on_rank(
    queries: np.ndarray,
    classifier: np.ndarray,
    positives: np.ndarray,
    hard: Ragged,
    pool: np.ndarray,
    pool_weight: float,
) -> tuple[float, Any, Any]:
    """This rank's part of the sampled loss, and its rows of both gradients."""
    part = partition_of(len(classifier))
    batch = batch_of(positives)
    query_BD = torch.tensor(queries[batch.start : batch.stop], requires_grad=True)
    weight_SD = torch.tensor(classifier[part.start : part.stop], requires_grad=True)

    query_GD = gather_rows(query_BD, len(queries))
    candidates = gather_candidates(batch, hard, pool, batch.positives, None, part)
    row_UD = weight_SD.index_select(0, candidates.row_ids)
    pool_CD = row_UD.index_select(0, candidates.pool_rows)
    total = sampled_bce(
        pair_scores(query_GD, row_UD, candidates.pair_query, candidates.pair_row),
        candidates.pair_is_positive,
        candidates.pair_weight,
        query_GD @ pool_CD.T,
        candidates.skip_query,
        candidates.skip_column,
        pool_weight,
    )
    loss = total / len(queries)
    loss.backward()
    return float(loss.detach()), query_BD.grad.numpy(), weight_SD.grad.numpy()


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", ["astra_bce_one", "astra_bce_unbiased"])
def test_sampled_bce_is_golden(name: str, num_ranks: int) -> None:
    g = golden(name)
    loss, grad_query_GD, grad_row_LD = over_ranks(
        sampled_on_rank,
        num_ranks,
        g["queries"],
        g["classifier"],
        g["positives"],
        Ragged.from_rows(list(g["hard"])),
        np.sort(g["pool"]),
        float(g["weight"]),
    )
    np.testing.assert_allclose(loss, g["loss"], rtol=1e-9)
    np.testing.assert_allclose(grad_query_GD, g["grad_queries"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(grad_row_LD, g["grad_classifier"], rtol=1e-9, atol=1e-12)


def full_on_rank(chunk: int) -> tuple[float, Any]:
    """Full BCE with W = the scores themselves: queries are unit vectors, so the gradient of W is that of the scores."""
    g = golden("bce_full")
    num_queries, num_labels = g["scores"].shape
    part = partition_of(num_labels)
    batch = batch_of(g["positives"])
    query_BD = torch.eye(num_queries, dtype=torch.float64)[batch.start : batch.stop]
    query_GD = gather_rows(query_BD, num_queries)
    weight_SD = torch.tensor(g["scores"].T[part.start : part.stop].copy(), requires_grad=True)
    is_own = part.owns(batch.positives.values)
    rows = batch.positives.row_ids[is_own]
    columns = part.to_local(batch.positives.values[is_own])
    positives = Pairs(torch.from_numpy(rows), torch.from_numpy(columns))
    none = torch.empty(0, dtype=torch.int64)

    total = full_bce(query_GD, weight_SD, positives, Pairs(none, none), chunk)
    loss = total / num_queries
    loss.backward()
    return float(loss.detach()), weight_SD.grad.numpy()


@pytest.mark.parametrize("num_ranks", [*RANKS, 5])
@pytest.mark.parametrize("chunk", [4, 100])
def test_full_bce_is_golden(num_ranks: int, chunk: int) -> None:
    g = golden("bce_full")
    loss, grad_LG = over_ranks(full_on_rank, num_ranks, chunk)
    np.testing.assert_allclose(loss, g["loss"], rtol=1e-9)
    np.testing.assert_allclose(grad_LG.T, g["grad_scores"], rtol=1e-9, atol=1e-12)


def test_a_rank_without_a_label() -> None:
    """Four labels on five ranks: rank 0 owns none and still takes part."""
    assert LabelPartition(4, 5, 0).size == 0
    generator = np.random.default_rng(0)
    arguments = (
        generator.standard_normal((6, 3)),  # queries
        generator.standard_normal((4, 3)),  # classifier
        np.eye(6, 4, dtype=bool),  # positives: the last two queries have none
        Ragged.from_rows([[3], [2], [1], [0], [0, 1], []]),  # hard negatives
        np.array([0, 2]),  # pool
        2.0,  # pool weight
    )

    on_one_rank = over_ranks(sampled_on_rank, 1, *arguments)
    on_five_ranks = over_ranks(sampled_on_rank, 5, *arguments)

    for value, expected in zip(on_five_ranks, on_one_rank, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-9)
