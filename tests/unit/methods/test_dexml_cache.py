"""DEXML's embedding cache: the labels with the largest gradients join the batch, and what is encoded is kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

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
from xmcray.training.run_config import RunConfig
from xmcray.types import Batch, StepOutput

SETTINGS = ["encoder.dim=6", "optim.batch_size=20", "optim.precision=float64"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    corpus = planted_corpus(tmp_path_factory.mktemp("cache"), num_queries=120, num_labels=40)
    return TrainingData(corpus, RunConfig.resolve("dexml", {}, SETTINGS).data)


class CachedRun(NamedTuple):
    """A run whose loss has the columns of the cache, before its first step."""

    setup: Setup
    method: Dexml
    cache: EmbeddingCache


def cached(data: TrainingData, *settings: str) -> CachedRun:
    config = RunConfig.resolve("dexml", {}, [*SETTINGS, "method.columns=cache", *settings])
    setup = build(config, data, torch.device("cpu"))
    assert isinstance(setup.method, Dexml)
    assert setup.method.cache is not None
    setup.method.start()
    return CachedRun(setup, setup.method, setup.method.cache)


def step(setup: Setup, number: int) -> StepOutput:
    batch = setup.sampler.batch(number, 0, 1)
    return setup.stepper.step(batch, None)


def test_hardest_are_the_longest_gradients_and_of_equal_ones_the_lower_labels() -> None:
    context = SimpleNamespace(
        partition=LabelPartition(6, 1, 0), dim=2, dtype=torch.float32, device=torch.device("cpu")
    )
    cache = EmbeddingCache(context)  # type: ignore[arg-type]
    # Of lengths 1, 5, 1, 9, 1 and 0.
    gradient_SD = torch.tensor([[0.0, 1], [3, 4], [0, 1], [-9, 0], [1, 0], [0, 0]])
    none = np.empty(0, np.int64)
    in_batch = np.array([1, 3])

    assert cache.hardest(gradient_SD, none, 1).tolist() == [3]
    assert cache.hardest(gradient_SD, none, 3).tolist() == [0, 1, 3]
    assert cache.hardest(gradient_SD, in_batch, 2).tolist() == [0, 2]
    # All there are, if fewer than wanted.
    assert cache.hardest(gradient_SD, in_batch, 99).tolist() == [0, 2, 4, 5]


def gradient_lengths(setup: Setup, method: Dexml, batch: Batch) -> np.ndarray:
    """Of the vectors of all labels, by a plain loop over the decoupled softmax with all labels."""
    num_labels = setup.data.num_labels
    query_GD = method.head(setup.stepper.encoder(batch.tokens)).detach()
    label_LD = method.answer_rows().requires_grad_()
    logit_GL = query_GD @ label_LD.T / method.config.temperature
    loss = torch.zeros((), dtype=torch.float64)
    for query in range(len(batch.query_ids)):
        positives = batch.positives[query]
        no_negatives = np.concatenate([positives, batch.excluded[query]])
        negatives = np.setdiff1d(np.arange(num_labels), no_negatives)
        for positive in positives:
            logits = logit_GL[query, [positive, *negatives]]
            loss = loss - torch.log_softmax(logits, dim=0)[0]
    loss.backward()
    assert label_LD.grad is not None
    return label_LD.grad.norm(dim=1).numpy()


def test_a_step_encodes_the_labels_that_a_dense_loss_would_move_most(
    data: TrainingData, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, method, cache = cached(data, "method.cache_hard=5", "optim.lr=0")
    batch = setup.sampler.batch(0, 0, 1)
    positives = np.unique(batch.positives.values)
    # The five hardest labels that are not in the batch anyway.
    lengths = gradient_lengths(setup, method, batch)
    lengths[positives] = -1
    hardest = np.argsort(-lengths)[:5]
    expected = np.union1d(hardest, positives)
    assert 5 < len(expected) < data.num_labels
    # Stale vectors of the batch's labels do not matter: those are refreshed before mining.
    cache.vector_SD[torch.from_numpy(positives)] = 0
    encoded: list[int] = []
    monkeypatch.setattr(cache, "refresh", lambda labels, _: encoded.extend(labels))

    setup.stepper.step(batch, None)

    assert encoded == expected.tolist()


def test_rows_start_as_the_label_texts_and_those_encoded_are_refreshed(data: TrainingData) -> None:
    setup, method, cache = cached(data, "method.cache_hard=3")
    vectors_before = method.answer_rows()
    assert torch.equal(cache.vector_SD, vectors_before)
    cache.vector_SD.zero_()
    batch = setup.sampler.batch(0, 0, 1)

    setup.stepper.step(batch, None)

    # Rows that were encoded are no longer zero.
    is_fresh = cache.vector_SD.any(dim=1)
    assert is_fresh[torch.from_numpy(np.unique(batch.positives.values))].all()
    assert not is_fresh.all()
    # The step encodes before it moves the encoder.
    torch.testing.assert_close(
        cache.vector_SD[is_fresh], vectors_before[is_fresh], rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("loss", ["decoupled", "softmax", "soft_top_k", "bce"])
def test_a_cache_that_takes_all_labels_is_no_restriction(data: TrainingData, loss: str) -> None:
    setup, method, _ = cached(data, "method.cache_hard=1000", f"method.loss={loss}")
    settings = [*SETTINGS, "method.columns=all", f"method.loss={loss}"]
    dense = build(RunConfig.resolve("dexml", {}, settings), data, torch.device("cpu"))
    dense.method.start()

    cached_loss = step(setup, 0).total
    dense_loss = step(dense, 0).total

    torch.testing.assert_close(cached_loss, dense_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        method.answer_rows(), dense.method.answer_rows(), rtol=1e-9, atol=1e-12
    )


def test_a_cut_run_goes_on_with_its_cache(data: TrainingData, tmp_path: Path) -> None:
    whole = cached(data, "method.cache_hard=3")
    resumed = cached(data, "method.cache_hard=3")
    step(whole.setup, 0)
    step(whole.setup, 1)
    writer = CheckpointWriter(tmp_path, whole.setup.stepper, whole.setup.partition, keep=1)
    writer.save(2, {"negatives": {}})
    writer.finish()
    newest = checkpoint.newest(tmp_path)
    assert newest is not None

    checkpoint.load(newest, resumed.setup.stepper, resumed.setup.partition)
    for number in (2, 3):
        step(whole.setup, number)
        step(resumed.setup, number)

    assert torch.equal(whole.method.answer_rows(), resumed.method.answer_rows())
    assert torch.equal(whole.cache.vector_SD, resumed.cache.vector_SD)


def test_hard_columns_without_an_index_are_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="hard is 0"):
        RunConfig.resolve("dexml", {}, [*SETTINGS, "method.columns=hard"])
