"""What every method gives the loop."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from corpora import planted_corpus

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.methods.registry import method_names
from xmcray.training.loop import Setup, build
from xmcray.training.run_config import RunConfig


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder: Path = tmp_path_factory.mktemp("outputs")
    return planted_corpus(folder, num_queries=40, num_labels=12)


def built(corpus: Corpus, method: str, *settings: str) -> Setup:
    config = RunConfig.resolve(method, {}, ["encoder.dim=4", "optim.batch_size=9", *settings])
    return build(config, TrainingData(corpus, config.data), torch.device("cpu"))


@pytest.mark.parametrize("method", method_names())
def test_a_loss_has_a_graph_and_the_query_vectors_have_none(corpus: Corpus, method: str) -> None:
    setup = built(corpus, method)
    setup.method.start()
    output = setup.method.loss(setup.sampler.batch(0, 0, 1), None)
    assert output.total.requires_grad
    assert output.query_vectors is not None
    assert output.query_vectors.shape == (9, 4)
    assert not output.query_vectors.requires_grad


def test_only_a_setting_that_is_clipped_is_reported(
    corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    for free_vectors, is_clipped in ((8, False), (16, True)):
        caplog.clear()
        setup = built(corpus, "prime", f"method.free_vectors={free_vectors}")
        with caplog.at_level(logging.WARNING):
            setup.method.start()
        assert ("clipped to 8 for 12 labels" in caplog.text) == is_clipped
