"""ASTRA's and the one-vs-all methods' loss, start values and dropout against plain loops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from corpora import corpus_of, planted_corpus
from planted import write_planted

from xmcray import draws
from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import DataError
from xmcray.methods.astra import Astra
from xmcray.negatives.sampler import capped_positives
from xmcray.training.loop import Setup, build
from xmcray.training.run_config import RunConfig
from xmcray.types import Shortlist

NUM_LABELS = 23
SETTINGS = [
    "encoder.dim=6",
    "optim.batch_size=40",
    "optim.precision=float64",
    "method.dropout=0",
    "method.init_std=0.5",
    "method.logit_prior=-1.5",
    "method.max_positives=1",
    "negatives.uniform=7",
    "negatives.hard=4",
    "negatives.start_epoch=2",
    "negatives.curriculum=4",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return planted_corpus(tmp_path_factory.mktemp("astra"), num_labels=NUM_LABELS)


def made(corpus: Corpus, *extra: str) -> tuple[Setup, Astra]:
    config = RunConfig.resolve("astra", {}, [*SETTINGS, *extra])
    setup = build(config, TrainingData(corpus, config.data), torch.device("cpu"))
    assert isinstance(setup.method, Astra)
    return setup, setup.method


def test_an_index_on_label_texts_needs_some(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_planted(raw, num_queries=50, num_labels=8)
    rows = [json.dumps({"uid": f"label{label}"}) for label in range(8)]
    (raw / "labels.jsonl").write_text("\n".join(rows) + "\n")
    without_texts = corpus_of(raw, tmp_path / "corpus")
    made(without_texts, "method.index_on=classifier")
    with pytest.raises(DataError, match=r"expected some for method\.index_on=labels; use method"):
        made(without_texts, "method.index_on=labels")


def shortlist_of(data: TrainingData) -> Shortlist:
    """Four labels of each query that are neither its positives nor itself."""
    labels = np.full((data.num_query_ids, 4), -1, np.int32)
    random = np.random.default_rng(0)
    ids = np.arange(data.num_query_ids)
    positives, excluded = data.positives(ids), data.excluded(ids)
    for query_id in ids:
        own = np.concatenate([positives[query_id], excluded[query_id]])
        others = np.setdiff1d(np.arange(NUM_LABELS), own)
        labels[query_id] = random.permutation(others)[:4]
    return Shortlist(0, 0, labels)


def softplus(value: Any) -> float:
    return float(F.softplus(torch.as_tensor(value)))


@pytest.mark.parametrize(
    ("settings", "pool_weight", "num_uniform", "capped_weights"),
    [
        (["method.importance_weight=unbiased"], NUM_LABELS / 7, 7, True),
        (["method.importance_weight=none"], 1.0, 7, False),
        (["method.importance_weight=2.5"], 2.5, 7, False),
        (["negatives.uniform_epochs=2"], NUM_LABELS / 7, 0, True),
    ],
)
def test_the_sampled_loss_is_that_of_a_loop(
    corpus: Corpus,
    settings: list[str],
    pool_weight: float,
    num_uniform: int,
    capped_weights: bool,
) -> None:
    setup, method = made(corpus, *settings)
    data = setup.data
    # Epoch 3 has half of the curriculum: two hard negatives.
    batch = setup.sampler.batch(3 * setup.sampler.steps_per_epoch, 0, 1)
    shortlist = shortlist_of(data)
    query_GD = setup.stepper.encoder(batch.tokens).detach()
    score_GL = query_GD @ method.answer_rows().T - 1.5
    drawn, _ = capped_positives(batch, 1, seed=0, unbiased=True)
    pool = draws.uniform_labels(0, batch.step, NUM_LABELS, num_uniform).tolist()
    assert batch.positives.lengths.max() > 1
    assert batch.excluded.lengths.any()

    expected = 0.0
    for i in range(len(batch.query_ids)):
        positives = batch.positives[i].tolist()
        weight = max(1, len(positives)) if capped_weights else 1
        for label in drawn[i]:
            expected += weight * softplus(-score_GL[i, label])
        hard = shortlist.labels[batch.query_ids[i], :2].tolist()
        for label in hard:
            expected += softplus(score_GL[i, label])
        for label in pool:
            if label not in [*positives, *hard, *batch.excluded[i]]:
                expected += pool_weight * softplus(score_GL[i, label])
    output = method.loss(batch, shortlist)
    found = float(output.total.detach()) / output.divisor
    assert found == pytest.approx(expected / len(batch.query_ids), rel=1e-10)


def test_the_exact_loss_leaves_out_only_the_query_itself(corpus: Corpus) -> None:
    setup, method = made(corpus, "method.exact=true", "method.chunk_labels=5")
    batch = setup.sampler.batch(0, 0, 1)
    query_GD = setup.stepper.encoder(batch.tokens).detach()
    score_GL = query_GD @ method.answer_rows().detach().T - 1.5
    assert batch.excluded.lengths.any()
    expected = 0.0
    for i in range(len(batch.query_ids)):
        for label in range(NUM_LABELS):
            if label in batch.positives[i]:
                expected += softplus(-score_GL[i, label])
            elif label not in batch.excluded[i]:
                expected += softplus(score_GL[i, label])
    output = method.loss(batch, None)
    found = float(output.total.detach()) / output.divisor
    assert found == pytest.approx(expected / len(batch.query_ids), rel=1e-10)


@pytest.mark.parametrize(
    ("settings", "num_negatives", "most_positives"),
    [
        (["method.importance_weight=none"], 4 + 7, 1),
        (["method.importance_weight=none", "method.max_positives=0"], 4 + 7, NUM_LABELS),
        (["method.importance_weight=2.0"], 4 + 2 * 7, 1),
        # 4 + 23 labels, of which there are 23; the positive that is drawn stands for all.
        (["method.importance_weight=unbiased"], NUM_LABELS, NUM_LABELS),
        (["method.exact=true"], NUM_LABELS, NUM_LABELS),
        (["negatives.uniform=0", "negatives.hard=1"], 1, NUM_LABELS),
    ],
)
def test_the_prior_is_the_log_odds_among_the_labels_that_count(
    corpus: Corpus, settings: list[str], num_negatives: int, most_positives: int
) -> None:
    setup, method = made(corpus, "method.logit_prior=prior", *settings)
    num_positives = setup.data.positives(setup.data.query_ids[:]).lengths
    assert num_positives.max() > 1
    counted = np.minimum(num_positives, most_positives)
    assert method.logit_prior == pytest.approx(math.log(counted.mean() / num_negatives))


def test_dropout_keeps_the_expected_vector(corpus: Corpus) -> None:
    setup, method = made(corpus, "method.dropout=0.75")
    batch = setup.sampler.batch(0, 0, 1)
    ones_GD = torch.ones(len(batch.query_ids), 6, dtype=torch.float64)
    dropped = method.drop(ones_GD, method.keep_mask(batch))
    assert set(dropped.unique().tolist()) == {0.0, 4.0}
    later = setup.sampler.batch(1, 0, 1)
    assert not torch.equal(dropped, method.drop(ones_GD, method.keep_mask(later)))


def test_rows_that_start_from_texts_have_the_wanted_deviation(corpus: Corpus) -> None:
    _, method = made(corpus, "method.init=texts")
    method.start()
    expected = method.context.label_vectors() * 0.5 * math.sqrt(6)
    torch.testing.assert_close(method.answer_rows(), expected)


def test_the_index_is_built_on_rows_or_on_label_texts(corpus: Corpus) -> None:
    _, method = made(corpus)
    assert torch.equal(method.index_rows(), method.answer_rows())
    _, method = made(corpus, "method.index_on=labels")
    assert torch.equal(method.index_rows(), method.context.label_vectors())
