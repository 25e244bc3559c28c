"""One step of training: its gradients are those of the mean over the queries of the batch."""

from __future__ import annotations

from pathlib import Path

import torch
from corpora import planted_corpus

from xmcray.data.batches import TrainingData
from xmcray.training.loop import build
from xmcray.training.run_config import RunConfig


def test_a_step_divides_the_loss_by_the_queries_of_the_batch(tmp_path: Path) -> None:
    corpus = planted_corpus(tmp_path, num_queries=60, num_labels=12)
    settings = ["encoder.dim=8", "optim.precision=float64", "optim.batch_size=20"]
    config = RunConfig.resolve("dexml", {}, settings)
    setup = build(config, TrainingData(corpus, config.data), torch.device("cpu"))
    setup.method.start()
    batch = setup.sampler.batch(0, 0, 1)
    parameters = list(setup.stepper.encoder.parameters())
    setup.stepper.encoder.train()

    total = setup.method.loss(batch, None).total
    expected = torch.autograd.grad(total / 20, parameters)
    setup.stepper.step(batch, None)

    assert len(batch.query_ids) == 20
    # Some start as 0, and so do their gradients.
    assert any(gradient.to_dense().any() for gradient in expected)
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert parameter.grad is not None
        # Tables of tokens have sparse gradients.
        torch.testing.assert_close(parameter.grad.to_dense(), gradient.to_dense())
