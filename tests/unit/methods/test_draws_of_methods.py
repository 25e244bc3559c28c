"""What methods draw for a batch, and the factors of dropout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from corpora import planted_corpus

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.methods.base import MethodContext
from xmcray.training.loop import Setup, build
from xmcray.training.run_config import RunConfig
from xmcray.types import Batch, Shortlist

SETTINGS = [
    "encoder.dim=6",
    "optim.batch_size=40",
    "negatives.hard=8",
    "negatives.start_epoch=3",
    "negatives.curriculum=4",
]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    corpus: Corpus = planted_corpus(tmp_path_factory.mktemp("draws"))
    config = RunConfig.resolve("rae", {}, SETTINGS)
    return build(config, TrainingData(corpus, config.data), torch.device("cpu"))


@pytest.fixture(scope="module")
def context(setup: Setup) -> MethodContext:
    found: MethodContext = setup.method.context  # type: ignore[attr-defined]
    return found


@pytest.fixture(scope="module")
def batch(setup: Setup) -> Batch:
    return setup.sampler.batch(3 * setup.sampler.steps_per_epoch, 0, 1)


def test_positives_are_drawn_anew_in_each_step(context: MethodContext, batch: Batch) -> None:
    fewer, more = context.draw_positives(batch, 1), context.draw_positives(batch, 2)
    for i in range(len(batch.query_ids)):
        assert set(fewer[i]) <= set(more[i]) <= set(batch.positives[i])
    later = dataclasses.replace(batch, step=batch.step + 1)
    assert not np.array_equal(fewer.values, context.draw_positives(later, 1).values)


def test_hard_negatives_follow_the_curriculum(context: MethodContext, batch: Batch) -> None:
    labels = np.tile(np.arange(8, dtype=np.int32), (context.data.num_query_ids, 1))
    shortlist = Shortlist(0, 0, labels)
    widths = []
    for epoch in range(2, 8):
        drawn = context.draw_hard_negatives(dataclasses.replace(batch, epoch=epoch), shortlist, 1)
        widths.append(len(np.unique(drawn.values)))
    # 40 draws of one label meet each of the first 2, 4, 6 and then all 8.
    assert widths == [0, 2, 4, 6, 8, 8]


def test_hard_negatives_are_drawn_anew_in_each_step(context: MethodContext, batch: Batch) -> None:
    labels = np.tile(np.arange(8, dtype=np.int32), (context.data.num_query_ids, 1))
    shortlist = Shortlist(0, 0, labels)
    now = context.draw_hard_negatives(batch, shortlist, 1)
    later = dataclasses.replace(batch, step=batch.step + 1)
    assert not np.array_equal(now.values, context.draw_hard_negatives(later, shortlist, 1).values)


def test_factors_of_dropout_keep_the_expected_value(context: MethodContext) -> None:
    factors = context.keep_factors(context.keep_mask("test", 0, 0, 50, 6, 0.75), 0.75)
    assert factors is not None
    assert set(factors.unique().tolist()) == {0.0, 4.0}
    assert context.keep_mask("test", 0, 0, 50, 6, 0.0) is None


def test_texts_of_labels_are_not_those_of_queries(context: MethodContext) -> None:
    labels = np.array([5, 0, 22])
    expected = context.data.label_tokens(labels)
    assert np.array_equal(context.label_tokens(labels).values, expected.values)
    whole = context.label_vectors()
    alone = context.encode_without_graph(expected)
    torch.testing.assert_close(whole[torch.from_numpy(labels)], alone)
