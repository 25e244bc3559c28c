"""DEXML's embedding cache: the labels with the largest gradients join the batch, and what is encoded is kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from corpora import planted_corpus

from xmcray.data.batches import TrainingData
from xmcray.errors import ConfigError
from xmcray.methods.dexml import Dexml, EmbeddingCache
from xmcray.parallel.partition import LabelPartition
from xmcray.training import checkpoint
from xmcray.training.checkpoint_writer import CheckpointWriter
from xmcray.training.loop import Setup, build
from xmcray.training.run import RunConfig

SETTINGS = ["encoder.dim=6", "optim.batch_size=20", "optim.precision=float64"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    corpus = planted_corpus(tmp_path_factory.mktemp("cache"), num_queries=120, num_labels=40)
    return TrainingData(corpus, RunConfig.resolve("dexml", {}, SETTINGS).data)


def setup_of(data: TrainingData, *extra: str) -> tuple[Setup, Dexml, EmbeddingCache]:
    config = RunConfig.resolve("dexml", {}, [*SETTINGS, "method.columns=cache", *extra])
    setup = build(config, data, torch.device("cpu"))
    assert isinstance(setup.method, Dexml)
    assert setup.method.cache is not None
    setup.method.start()
    return setup, setup.method, setup.method.cache


def test_hardest_are_the_longest_gradients_and_of_equal_ones_the_lower_labels() -> None:
    context = SimpleNamespace(
        partition=LabelPartition(6, 1, 0), dim=2, dtype=torch.float32, device=torch.device("cpu")
    )
    cache = EmbeddingCache(context)  # type: ignore[arg-type]
    gradient = torch.tensor([[0.0, 1], [3, 4], [0, 1], [-9, 0], [1, 0], [0, 0]])
    none = np.empty(0, np.int64)
    assert cache.hardest(gradient, none, 1).tolist() == [3]
    assert cache.hardest(gradient, none, 3).tolist() == [0, 1, 3]
    assert cache.hardest(gradient, np.array([1, 3]), 2).tolist() == [0, 2]
    assert cache.hardest(gradient, np.array([1, 3]), 99).tolist() == [0, 2, 4, 5], (
        "more than there are: all"
    )


def test_a_step_encodes_the_labels_that_a_dense_loss_would_move_most(
    data: TrainingData, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, method, cache = setup_of(data, "method.cache_hard=5", "optim.lr=0")
    batch = setup.sampler.batch(0, 0, 1)
    query_GD = method.head(setup.stepper.encoder(batch.tokens)).detach()
    label_LD = method.answer_rows().requires_grad_()
    score_GL = query_GD @ label_LD.T / method.config.temperature
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(len(batch.query_ids)):
        own = batch.positives[i]
        negatives = np.setdiff1d(
            np.arange(data.num_labels), np.concatenate([own, batch.excluded[i]])
        )
        for p in own:
            loss = loss - torch.log_softmax(score_GL[i, [p, *negatives]], dim=0)[0]
    loss.backward()
    assert label_LD.grad is not None
    norms = label_LD.grad.norm(dim=1).numpy()
    positives = np.unique(batch.positives.values)
    norms[positives] = -1
    expected = np.union1d(np.argsort(-norms)[:5], positives)
    assert 5 < len(expected) < data.num_labels
    # Stale vectors of the batch's labels do not matter: those are refreshed before mining.
    cache.vector_SD[torch.from_numpy(positives)] = 0

    encoded: list[int] = []
    monkeypatch.setattr(cache, "refresh", lambda labels, _: encoded.extend(labels))
    setup.stepper.step(batch, None)
    assert encoded == expected.tolist()


def test_rows_start_as_the_label_texts_and_those_encoded_are_refreshed(data: TrainingData) -> None:
    setup, method, cache = setup_of(data, "method.cache_hard=3")
    assert torch.equal(cache.vector_SD, method.answer_rows())
    cache.vector_SD.zero_()
    batch = setup.sampler.batch(0, 0, 1)
    before = method.answer_rows()
    setup.stepper.step(batch, None)
    fresh = cache.vector_SD.any(dim=1)
    assert fresh[torch.from_numpy(np.unique(batch.positives.values))].all()
    assert not fresh.all()
    torch.testing.assert_close(cache.vector_SD[fresh], before[fresh], rtol=1e-9, atol=0)


@pytest.mark.parametrize("loss", ["decoupled", "softmax", "soft_top_k", "bce"])
def test_a_cache_that_takes_all_labels_is_no_restriction(data: TrainingData, loss: str) -> None:
    setup, method, _ = setup_of(data, "method.cache_hard=1000", f"method.loss={loss}")
    config = RunConfig.resolve(
        "dexml", {}, [*SETTINGS, "method.columns=all", f"method.loss={loss}"]
    )
    whole = build(config, data, torch.device("cpu"))
    whole.method.start()
    batch = setup.sampler.batch(0, 0, 1)
    cached_loss = setup.stepper.step(batch, None).total
    whole_loss = whole.stepper.step(batch, None).total
    torch.testing.assert_close(cached_loss, whole_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        method.answer_rows(), whole.method.answer_rows(), rtol=1e-9, atol=1e-12
    )


def test_a_cut_run_goes_on_with_its_cache(data: TrainingData, tmp_path: Path) -> None:
    setup, method, cache = setup_of(data, "method.cache_hard=3")
    again, other, restored = setup_of(data, "method.cache_hard=3")
    for step in range(2):
        setup.stepper.step(setup.sampler.batch(step, 0, 1), None)
    writer = CheckpointWriter(tmp_path, setup.stepper, setup.partition, keep=1)
    writer.save(2, {"negatives": {}})
    writer.finish()
    found = checkpoint.newest(tmp_path)
    assert found is not None
    checkpoint.load(found, again.stepper, again.partition)
    for step in range(2, 4):
        for one in (setup, again):
            one.stepper.step(one.sampler.batch(step, 0, 1), None)
    assert torch.equal(method.answer_rows(), other.answer_rows())
    assert torch.equal(cache.vector_SD, restored.vector_SD)


def test_hard_columns_without_an_index_are_refused(data: TrainingData) -> None:
    config = RunConfig.resolve("dexml", {}, [*SETTINGS, "method.columns=hard"])
    with pytest.raises(ConfigError, match="hard is 0"):
        build(config, data, torch.device("cpu"))
