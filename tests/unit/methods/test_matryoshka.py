"""Prefixes of vectors that are trained: answers by the first columns, and what stays whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import planted_corpus
from loops import trained

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError
from xmcray.methods.matryoshka import Matryoshka
from xmcray.training.loop import Setup, build
from xmcray.training.run_config import RunConfig
from xmcray.training.step import encode_queries

WIDTH = 8
SETTINGS = [
    "encoder.dim=32",
    "negatives.hard=0",
    "optim.batch_size=32",
    "optim.epochs=25",
    "optim.lr=0.03",
    "log.checkpoint_every=1000",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return planted_corpus(tmp_path_factory.mktemp("matryoshka"), num_queries=300, num_labels=30)


def precision(setup: Setup, corpus: Corpus, width: int) -> float:
    """P@1 on test queries by the first columns of queries and labels."""
    test = corpus.split("test")
    tokens = test.tokens(np.arange(len(test)))
    query_BD = encode_queries(setup.stepper.encoder, setup.method, tokens)
    scores_BL = query_BD[:, :width] @ setup.method.answer_rows()[:, :width].T
    best_B = corpus.label_order[scores_BL.argmax(dim=1).numpy()]
    positives = test.positives(np.arange(len(test)))
    hits = [label in positives[row] for row, label in enumerate(best_B)]
    return float(np.mean(hits))


def test_prefixes_answer_better_than_those_of_whole_vectors(tmp_path: Path, corpus: Corpus) -> None:
    config = RunConfig.resolve("dexml", {}, SETTINGS)
    plain = trained(tmp_path / "plain", corpus, config)
    config = RunConfig.resolve("dexml", {}, [*SETTINGS, f"encoder.matryoshka=[4,{WIDTH}]"])
    nested = trained(tmp_path / "nested", corpus, config)
    prefixes = [precision(setup, corpus, WIDTH) for setup in (plain, nested)]
    wholes = [precision(setup, corpus, 32) for setup in (plain, nested)]
    assert prefixes[1] > prefixes[0] + 0.05, (prefixes, wholes)
    assert wholes[1] > wholes[0] - 0.05, (prefixes, wholes)


@pytest.mark.parametrize(
    ("method", "columns"), [("astra", []), ("dexml", ["method.columns=in_batch"])]
)
def test_the_loss_is_the_mean_over_prefixes_with_one_encoding(
    corpus: Corpus, method: str, columns: list[str]
) -> None:
    values = ["encoder.dim=8", "encoder.matryoshka=[3,2]", "negatives.hard=0", *columns]
    values.append("optim.precision=float64")
    config = RunConfig.resolve(method, {}, values)
    data = TrainingData(corpus, config.data)
    setup = build(config, data, torch.device("cpu"))
    nested = setup.method
    assert isinstance(nested, Matryoshka)
    calls = []
    setup.stepper.encoder.register_forward_hook(lambda *_: calls.append(1))
    batch = setup.sampler.batch(0, 0, 1)
    output = nested.loss(batch, None)
    assert len(calls) == 1
    losses = []
    for width in (2, 3, 8):
        nested.encode.width = width
        losses.append(nested.method.loss(batch, None).total)
        nested.encode.forget()
    torch.testing.assert_close(output.total, torch.stack(losses).mean())
    assert output.query_vectors is not None
    assert output.query_vectors.all()  # of the whole width


@pytest.mark.parametrize(
    ("method", "values", "message"),
    [
        ("unidec", ["encoder.matryoshka=4"], "compares more than the encoder's own columns"),
        ("dexml", ["encoder.matryoshka=4", "method.columns=cache"], "dexml without a cache"),
    ],
)
def test_methods_without_prefixes_refuse(method: str, values: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.resolve(method, {}, values)


def test_widths_of_no_prefix_are_refused(corpus: Corpus) -> None:
    config = RunConfig.resolve("astra", {}, ["encoder.dim=8", "encoder.matryoshka=8"])
    with pytest.raises(ConfigError, match="matryoshka has 8, expected widths of 1 to 7"):
        build(config, TrainingData(corpus, config.data), torch.device("cpu"))
