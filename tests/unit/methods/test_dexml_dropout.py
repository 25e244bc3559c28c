"""DEXML's dropout on the embeddings: where it falls, and what has none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from corpora import planted_corpus

from xmcray import draws
from xmcray.data.batches import TrainingData
from xmcray.methods.dexml import Dexml
from xmcray.training.loop import Setup, build
from xmcray.training.run import RunConfig
from xmcray.types import Batch

SETTINGS = ["encoder.dim=6", "optim.batch_size=20", "optim.precision=float64"]
TEMPERATURE = 0.5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    corpus = planted_corpus(tmp_path_factory.mktemp("dexml"), num_queries=60, num_labels=20)
    return TrainingData(corpus, RunConfig.resolve("dexml", {}, SETTINGS).data)


def built(data: TrainingData, *extra: str) -> tuple[Setup, Dexml, Batch]:
    settings = [*SETTINGS, f"method.temperature={TEMPERATURE}", *extra]
    setup = build(RunConfig.resolve("dexml", {}, settings), data, torch.device("cpu"))
    assert isinstance(setup.method, Dexml)
    return setup, setup.method, setup.sampler.batch(0, 0, 1)


def test_dropout_falls_on_the_embeddings_before_they_are_normalised(data: TrainingData) -> None:
    setup, method, batch = built(data, "method.dropout=0.25", "method.loss=softmax")
    encoder = setup.stepper.encoder
    label_ids = data.num_train + np.arange(data.num_labels)
    vectors = {"queries": encoder(batch.tokens), "labels": encoder(data.tokens(label_ids))}
    dropped = {}
    for name, vector_BD in vectors.items():
        purpose = f"dropout {name}"
        mask = draws.keep_mask(method.context.seed, purpose, 0, 0, *vector_BD.shape, 0.25)
        assert 0.1 < 1 - mask.mean() < 0.4
        dropped[name] = F.normalize(vector_BD * torch.from_numpy(mask) / 0.75, dim=-1)
    score_BL = dropped["queries"] @ dropped["labels"].T / TEMPERATURE
    expected = torch.zeros((), dtype=torch.float64)
    for query in range(len(batch.query_ids)):
        excluded = torch.from_numpy(batch.excluded[query])
        log_share_L = score_BL[query].index_fill(0, excluded, -torch.inf).log_softmax(dim=0)
        expected = expected - log_share_L[torch.from_numpy(batch.positives[query])].sum()
    output = method.loss(batch, None)
    torch.testing.assert_close(output.total, expected, rtol=1e-9, atol=1e-9)
    # What the index and the cache get, and what answers, has no dropout.
    plain_BD = F.normalize(vectors["queries"], dim=-1)
    torch.testing.assert_close(output.query_vectors, plain_BD.detach())
    plain_LD = F.normalize(vectors["labels"], dim=-1)
    torch.testing.assert_close(method.answer_rows(), plain_LD.detach())


def test_the_cache_keeps_vectors_without_dropout(data: TrainingData) -> None:
    settings = ["method.columns=cache", "method.cache_hard=3", "method.dropout=0.5", "optim.lr=0"]
    setup, method, batch = built(data, *settings)
    method.start()
    assert method.cache is not None
    before = method.cache.vector_SD.clone()
    setup.stepper.step(batch, None)
    torch.testing.assert_close(method.cache.vector_SD, before, rtol=1e-9, atol=1e-12)
