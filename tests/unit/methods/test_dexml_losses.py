"""DEXML's losses with a drawn positive per query, against plain loops: the other positives are no negatives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import expit, logsumexp
from torch import Tensor

from xmcray import draws
from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.methods.dexml import Dexml
from xmcray.training.loop import Setup, build
from xmcray.training.run_config import RunConfig
from xmcray.types import Batch, Int64Array, Ragged, Shortlist

SETTINGS = [
    "encoder.dim=6",
    "optim.batch_size=40",
    "optim.precision=float64",
    "method.num_positives=1",
    "method.temperature=0.25",
]


def made(corpus: Corpus, *extra: str) -> tuple[Setup, Dexml]:
    config = RunConfig.resolve("dexml", {}, [*SETTINGS, *extra])
    setup = build(config, TrainingData(corpus, config.data), torch.device("cpu"))
    assert isinstance(setup.method, Dexml)
    return setup, setup.method


def loss_of_query(loss: str, scores: np.ndarray, place: int, top_k: float) -> float:
    """The loss of one query.

    Args:
        loss: as the setting.
        scores: of the columns that count.
        place: of the drawn positive among them.
        top_k: k of SoftTop-k.
    """
    if loss in ("decoupled", "softmax"):
        return float(logsumexp(scores) - scores[place])
    if loss == "bce":
        signs = np.ones(len(scores))
        signs[place] = -1
        return float(np.logaddexp(0, signs * scores).sum())
    threshold = brentq(lambda t: expit(2 * (scores + t)).sum() - top_k, -500, 500, xtol=1e-13)
    return float(-np.log(expit(2 * (scores[place] + threshold))))


def left_out_of(batch: Batch, drawn: Ragged, query: int) -> Int64Array:
    """Labels that are no negatives of a query: positives that were not drawn, and its own label."""
    labels = np.concatenate([batch.positives[query], batch.excluded[query]])
    return np.setdiff1d(labels, drawn[query])


def summed_loss(
    batch: Batch, drawn: Ragged, pool: Int64Array, logits_GC: Tensor, loss: str, top_k: int = 0
) -> float:
    """The loss of all queries, one after the other.

    Args:
        batch: the queries.
        drawn: the positive of each.
        pool: labels of the columns.
        logits_GC: inner products with them.
        loss: as the setting.
        top_k: k of SoftTop-k, where a query has more columns than that.
    """
    score_GC = logits_GC.numpy() / 0.25
    total = 0.0
    for query, score_C in enumerate(score_GC):
        counted = np.flatnonzero(~np.isin(pool, left_out_of(batch, drawn, query)))
        k = min(top_k, len(counted) - 1)
        for positive in drawn[query]:
            place = int(np.flatnonzero(pool[counted] == positive)[0])
            total += loss_of_query(loss, score_C[counted], place, k)
    return total


def expected_loss(
    method: Dexml, batch: Batch, drawn: Ragged, pool: Int64Array, loss: str, top_k: int = 0
) -> float:
    """The summed loss of the encoder's vectors with a pool of labels."""
    with torch.no_grad():
        query_GD, label_CD = method.encode(batch, pool)
    return summed_loss(batch, drawn, pool, query_GD @ label_CD.T, loss, top_k)


def method_loss(method: Dexml, batch: Batch, shortlist: Shortlist | None = None) -> float:
    """The sum before it is divided by the number of queries."""
    with torch.no_grad():
        output = method.loss(batch, shortlist)
    assert output.divisor == len(batch.query_ids)
    return float(output.total)


def pool_of(setup: Setup, drawn: Ragged, columns: str) -> Int64Array:
    if columns == "all":
        return np.arange(setup.data.num_labels)
    return np.unique(drawn.values)


@pytest.mark.parametrize("columns", ["all", "in_batch"])
@pytest.mark.parametrize("loss", ["decoupled", "softmax", "soft_top_k", "bce"])
def test_undrawn_positives_are_no_negatives(corpus: Corpus, loss: str, columns: str) -> None:
    setup, method = made(corpus, f"method.loss={loss}", f"method.columns={columns}")
    batch = setup.sampler.batch(0, 0, 1)
    drawn = method.context.draw_positives(batch, 1)
    pool = pool_of(setup, drawn, columns)
    undrawn_in_pool = 0
    for query in range(len(batch.query_ids)):
        undrawn_in_pool += int(np.isin(left_out_of(batch, drawn, query), pool).sum())
    assert undrawn_in_pool > 10, "too few to show a difference"

    expected = expected_loss(method, batch, drawn, pool, loss, top_k=5)

    assert method_loss(method, batch) == pytest.approx(expected, rel=1e-8)


def test_hard_columns_are_drawn_from_the_shortlist(corpus: Corpus) -> None:
    settings = ["method.columns=hard", "method.hard_per_query=2", "negatives.hard=3"]
    setup, method = made(corpus, *settings, "negatives.start_epoch=2")
    first_step_of_epoch_2 = 2 * setup.sampler.steps_per_epoch
    batch = setup.sampler.batch(first_step_of_epoch_2, 0, 1)
    drawn = method.context.draw_positives(batch, 1)
    # The same three labels for all queries; a query that has one of them as a positive is skipped.
    hard = np.array([20, 21, 22], np.int32)
    shortlist = Shortlist(0, 0, np.tile(hard, (setup.data.num_query_ids, 1)))

    pool = np.union1d(drawn.values, hard)
    expected = expected_loss(method, batch, drawn, pool, "decoupled")

    assert method_loss(method, batch, shortlist) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("num_positives", [1, 0], ids=["one positive", "all positives"])
@pytest.mark.parametrize("columns", ["in_batch", "all"])
def test_each_query_has_the_largest_k_that_leaves_a_column_outside(
    corpus: Corpus, columns: str, num_positives: int
) -> None:
    settings = ["method.loss=soft_top_k", f"method.columns={columns}", "method.top_k=1000"]
    setup, method = made(corpus, *settings, f"method.num_positives={num_positives}")
    batch = setup.sampler.batch(0, 0, 1)
    drawn = batch.positives
    if num_positives:
        drawn = method.context.draw_positives(batch, num_positives)

    pool = pool_of(setup, drawn, columns)
    expected = expected_loss(method, batch, drawn, pool, "soft_top_k", top_k=1000)

    assert method_loss(method, batch) == pytest.approx(expected, rel=1e-8)


def test_dropout_keeps_the_expected_length_of_free_vectors(corpus: Corpus) -> None:
    setup, method = made(corpus, "method.dropout=0.75", "method.normalised=false")
    batch = setup.sampler.batch(0, 0, 1)
    drawn = method.context.draw_positives(batch, 1)
    labels = np.arange(setup.data.num_labels)
    with torch.no_grad():
        query_GD, label_LD = method.context.encode_with_labels(batch, labels)
    for vectors, purpose in ((query_GD, "queries"), (label_LD, "labels")):
        mask = draws.keep_mask(0, f"dropout {purpose}", 0, 0, len(vectors), 6, 0.75)
        # A quarter of the coordinates is kept.
        vectors *= 4.0 * torch.from_numpy(mask)

    expected = summed_loss(batch, drawn, labels, query_GD @ label_LD.T, "decoupled")

    assert method_loss(method, batch) == pytest.approx(expected, rel=1e-8)
