"""DEXML's dropout on the embeddings: where it falls, and what has none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from corpora import planted_corpus
from torch import Tensor

from xmcray import draws
from xmcray.data.batches import TrainingData
from xmcray.methods.dexml import Dexml
from xmcray.training.loop import Setup, build
from xmcray.training.run_config import RunConfig
from xmcray.types import Batch

SETTINGS = [
    "encoder.dim=6",
    "optim.batch_size=20",
    "optim.precision=float64",
]
TEMPERATURE = 0.5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    folder = tmp_path_factory.mktemp("dexml")
    corpus = planted_corpus(folder, num_queries=60, num_labels=20)
    config = RunConfig.resolve("dexml", {}, SETTINGS)
    return TrainingData(corpus, config.data)


def built(data: TrainingData, *extra: str) -> tuple[Setup, Dexml, Batch]:
    """A training of DEXML, its method and its first batch."""
    settings = [*SETTINGS, f"method.temperature={TEMPERATURE}", *extra]
    config = RunConfig.resolve("dexml", {}, settings)
    setup = build(config, data, torch.device("cpu"))
    assert isinstance(setup.method, Dexml)
    return setup, setup.method, setup.sampler.batch(0, 0, 1)


def with_dropout(
    vector_BD: Tensor,
    seed: int,
    purpose: str,
) -> Tensor:
    """Unit vectors of which about a quarter of the numbers was dropped before."""
    mask = draws.keep_mask(
        seed,
        purpose,
        0,
        0,
        *vector_BD.shape,
        0.25,
    )
    assert 0.1 < 1 - mask.mean() < 0.4
    dropped_BD = vector_BD * torch.from_numpy(mask) / 0.75
    return F.normalize(dropped_BD, dim=-1)


def softmax_loss(score_BL: Tensor, batch: Batch) -> Tensor:
    """The sum over positives of -log of their share of the labels that are not excluded."""
    total = torch.zeros((), dtype=torch.float64)
    for query, score_L in enumerate(score_BL):
        excluded = torch.from_numpy(batch.excluded[query])
        positives = torch.from_numpy(batch.positives[query])
        allowed_L = score_L.index_fill(0, excluded, -torch.inf)
        log_share_L = allowed_L.log_softmax(dim=0)
        total = total - log_share_L[positives].sum()
    return total


def test_dropout_falls_on_the_embeddings_before_they_are_normalised(data: TrainingData) -> None:
    setup, method, batch = built(data, "method.dropout=0.25", "method.loss=softmax")
    encoder = setup.stepper.encoder
    label_ids = data.num_train + np.arange(data.num_labels)
    query_BD = encoder(batch.tokens)
    label_LD = encoder(data.tokens(label_ids))

    output = method.loss(batch, None)

    seed = method.context.seed
    dropped_BD = with_dropout(query_BD, seed, "dropout queries")
    dropped_LD = with_dropout(label_LD, seed, "dropout labels")
    score_BL = dropped_BD @ dropped_LD.T / TEMPERATURE
    assert len(score_BL) == len(batch.query_ids)
    expected = softmax_loss(score_BL, batch)
    torch.testing.assert_close(output.total, expected, rtol=1e-9, atol=1e-9)

    # What the index and the cache get, and what answers, has no dropout.
    plain_BD = F.normalize(query_BD, dim=-1).detach()
    plain_LD = F.normalize(label_LD, dim=-1).detach()
    torch.testing.assert_close(output.query_vectors, plain_BD)
    torch.testing.assert_close(method.answer_rows(), plain_LD)


def test_the_cache_keeps_vectors_without_dropout(data: TrainingData) -> None:
    setup, method, batch = built(
        data,
        "method.columns=cache",
        "method.cache_hard=3",
        "method.dropout=0.5",
        # The step changes no weight, so that the encoder makes the same vectors after it.
        "optim.lr=0",
    )
    method.start()
    assert method.cache is not None
    before = method.cache.vector_SD.clone()

    setup.stepper.step(batch, None)

    torch.testing.assert_close(
        method.cache.vector_SD,
        before,
        rtol=1e-9,
        atol=1e-12,
    )
