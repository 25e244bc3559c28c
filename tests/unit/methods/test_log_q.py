"""The correction of in-batch negatives by the probability that a label is in a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from xmcray.data.batches import BatchSampler, DataConfig, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.draws import generator
from xmcray.errors import ConfigError
from xmcray.methods.dexml import Dexml
from xmcray.methods.log_q import BatchProbability
from xmcray.methods.rae import Rae
from xmcray.negatives.sampler import draw_from_rows
from xmcray.training.loop import Setup, build
from xmcray.training.run_config import RunConfig
from xmcray.types import Ragged


def made(corpus: Corpus, method: str, *extra: str) -> Setup:
    settings = [
        "encoder.dim=6",
        "optim.batch_size=40",
        "optim.precision=float64",
        "method.temperature=0.25",
        "method.log_q=true",
        *extra,
    ]
    config = RunConfig.resolve(method, {}, settings)
    return build(config, TrainingData(corpus, config.data), torch.device("cpu"))


@pytest.mark.parametrize("num_positives", [0, 1])
def test_the_probability_is_the_share_of_batches_that_have_the_label(
    corpus: Corpus, num_positives: int
) -> None:
    data = TrainingData(corpus, DataConfig(validation=0))
    num_batches = 2000
    sampler = BatchSampler(data, batch_size=len(data.query_ids) // 10, seed=0)
    seen_L = np.zeros(data.num_labels)
    taken = 0
    step = 0
    while taken < num_batches:
        query_ids = sampler.query_ids(step)
        step += 1
        if len(query_ids) < sampler.batch_size:
            continue
        taken += 1
        positives = data.positives(query_ids)
        if num_positives:
            positives = draw_from_rows(positives, num_positives, generator(0, "positives", step))
        seen_L[np.unique(positives.values)] += 1
    share_L = seen_L / num_batches
    assert share_L.max() - share_L.min() > 0.2, "too equal to show a difference"

    probability = BatchProbability.of(data, num_positives)
    log_q_L = probability.log_of_labels(np.arange(data.num_labels), sampler.batch_size)

    np.testing.assert_allclose(log_q_L.exp().numpy(), share_L, atol=0.05)
    assert np.exp(probability.log_of_query(sampler.batch_size)) == pytest.approx(0.1, rel=0.05)


def test_a_batch_of_all_queries_has_all_labels() -> None:
    probability = BatchProbability(np.array([0.5, 3.0]), num_queries=10)
    assert probability.log_of_labels(np.arange(2), batch_size=10).tolist() == [0, 0]
    assert probability.log_of_query(batch_size=10) == 0


def expected_loss(setup: Setup, num_positives: int, with_queries: bool) -> float:
    """The corrected loss of the first batch, one query after the other."""
    method = setup.method
    assert isinstance(method, (Dexml, Rae))
    batch = setup.sampler.batch(0, 0, 1)
    drawn = (
        method.context.draw_positives(batch, num_positives) if num_positives else batch.positives
    )
    pool = np.unique(drawn.values)
    with torch.no_grad():
        query_GD, label_CD = method.encode(batch, pool)
    exp_GC = (query_GD @ label_CD.T / 0.25).exp().numpy()
    exp_GG = (query_GD @ query_GD.T / 0.25).exp().numpy()
    probability = BatchProbability.of(setup.data, num_positives)
    q_C = probability.log_of_labels(pool, len(batch.query_ids)).exp().numpy()
    q_of_query = np.exp(probability.log_of_query(len(batch.query_ids)))
    total = 0.0
    for query, exp_C in enumerate(exp_GC):
        left_out = np.concatenate([batch.positives[query], batch.excluded[query]])
        denominator = (exp_C / q_C)[~np.isin(pool, left_out)].sum()
        if with_queries:
            is_other = [not shares(batch.positives, query, other) for other in range(len(exp_GC))]
            denominator += (exp_GG[query] / q_of_query)[is_other].sum()
        for positive in drawn[query]:
            exp_positive = exp_C[np.searchsorted(pool, positive)]
            total += float(np.log(1 + denominator / exp_positive))
    return total


def shares(positives: Ragged, query: int, other: int) -> bool:
    """Whether two queries have a positive in common."""
    return bool(np.isin(positives[query], positives[other]).any())


@pytest.mark.parametrize("num_positives", [0, 1])
def test_dexml_divides_negatives_by_their_probability(corpus: Corpus, num_positives: int) -> None:
    drawn = f"method.num_positives={num_positives}"
    setup = made(corpus, "dexml", "method.columns=in_batch", drawn)

    with torch.no_grad():
        total = setup.method.loss(setup.sampler.batch(0, 0, 1), None).total

    expected = expected_loss(setup, num_positives, with_queries=False)
    assert float(total) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("num_positives", "query_negatives"), [(1, True), (1, False), (0, True)])
def test_rae_divides_labels_and_queries_by_their_probability(
    corpus: Corpus, num_positives: int, query_negatives: bool
) -> None:
    drawn = f"method.num_positives={num_positives}"
    switch = f"method.query_negatives={query_negatives}".lower()
    setup = made(corpus, "rae", "negatives.hard=0", drawn, switch)

    with torch.no_grad():
        total = setup.method.loss(setup.sampler.batch(0, 0, 1), None).total

    expected = expected_loss(setup, num_positives, with_queries=query_negatives)
    assert float(total) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    ("method", "setting", "found"),
    [
        ("dexml", "method.columns=all", "columns=all"),
        ("dexml", "method.loss=softmax", "loss=softmax"),
        ("rae", "negatives.hard=3", "negatives.hard is 3"),
        ("rae", "negatives.cluster_size=4", "negatives.cluster_size is 4"),
    ],
)
def test_other_negatives_are_refused_before_training(method: str, setting: str, found: str) -> None:
    settings = ["method.columns=in_batch"] if method == "dexml" else ["negatives.hard=0"]
    with pytest.raises(ConfigError, match=found):
        RunConfig.resolve(method, {}, ["method.log_q=true", *settings, setting])
