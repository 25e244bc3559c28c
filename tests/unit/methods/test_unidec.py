"""UniDEC on one rank: its loss by loops over the formulas, its pools, what answers, and what a run exports."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from corpora import corpus_of, planted_corpus

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.errors import BundleError, ConfigError, DataError
from xmcray.methods.unidec import Unidec, UnidecConfig
from xmcray.nn.heads import TwoHeads, load_head
from xmcray.retrieval.retriever import Retriever
from xmcray.training.launch import train
from xmcray.training.loop import Setup, build
from xmcray.training.optim import EncoderOptimizer, OptimConfig
from xmcray.training.outcome import finish
from xmcray.training.run import RunConfig
from xmcray.types import Batch, Int64Array, Shortlist

SMALL = [
    "encoder.dim=12",
    "optim.precision=float64",
    "optim.batch_size=20",
    "negatives.hard=4",
    "method.dropout=0",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return planted_corpus(tmp_path_factory.mktemp("unidec"), num_queries=90, num_labels=17)


def made(corpus: Corpus, *settings: str) -> Setup:
    config = RunConfig.resolve("unidec", {}, [*SMALL, *settings])
    setup = build(config, TrainingData(corpus, config.data), torch.device("cpu"))
    setup.stepper.encoder.train()
    setup.method.start()
    return setup


def batch_of(setup: Setup) -> Batch:
    """A batch of an epoch that uses hard negatives, with a filter pair whose label is in the pool."""
    steps = setup.sampler.steps_per_epoch
    batch = setup.sampler.batch(5 * steps, 0, 1)
    rows = [list(batch.excluded[i]) for i in range(len(batch.query_ids))]
    taken = {int(label) for label in batch.positives[0]}
    rows[0] = [next(int(label) for label in batch.positives.values if int(label) not in taken)]
    return dataclasses.replace(batch, excluded=type(batch.excluded).from_rows(rows))


def shortlist_of(setup: Setup) -> Shortlist:
    """Four labels for each query that are not its own: many are another query's."""
    random, data = np.random.default_rng(0), setup.data
    labels = np.full((data.num_query_ids, 4), -1, np.int32)
    for row in range(data.num_query_ids):
        own = [*data.positives(np.array([row])).values, *data.excluded(np.array([row])).values]
        labels[row] = random.permutation(np.setdiff1d(np.arange(data.num_labels), own))[:4]
    return Shortlist(0, 0, labels)


def psl_by_loops(score: Any, positive: Any, counted: Any) -> float:
    """One direction: the mean over anchors with a positive of the mean over their positives."""
    losses = []
    for row, is_positive, counts in zip(score, positive, counted, strict=True):
        if any(is_positive):
            log_z = math.log(sum(math.exp(s) for s, c in zip(row, counts, strict=True) if c))
            losses.append(np.mean([log_z - s for s, p in zip(row, is_positive, strict=True) if p]))
    return float(np.mean(losses))


def both_ways(score: Any, batch: Batch, pool: Int64Array, balance: float) -> float:
    positive = np.array([np.isin(pool, batch.positives[i]) for i in range(len(score))])
    counted = ~np.array([np.isin(pool, batch.excluded[i]) for i in range(len(score))])
    to_labels, to_queries = (
        psl_by_loops(score, positive, counted),
        psl_by_loops(score.T, positive.T, counted.T),
    )
    return balance * to_labels + (1 - balance) * to_queries


def test_the_loss_is_the_papers(corpus: Corpus) -> None:
    settings = [
        "method.num_positives=1",
        "method.hard_per_query=1",
        "method.classifier_positives=1",
    ]
    parts = [
        "method.balance=0.3",
        "method.balance_encoder=0.4",
        "method.balance_classifier=0.8",
        "method.head_dim=9",
    ]
    setup = made(corpus, *settings, *parts, "optim.batch_size=7")
    method, batch, shortlist = setup.method, batch_of(setup), shortlist_of(setup)
    assert isinstance(method, Unidec)
    pools = method._pools(batch, shortlist)
    pool, wider = pools.texts, pools.rows
    brought = sum(np.isin(batch.positives[i], pool.ids).sum() for i in range(7))
    assert brought > 7, (
        "no query met a positive that another one brought: the comparison would show little"
    )
    assert set(pool.ids) < set(wider.ids)
    with torch.no_grad():
        query_GD = setup.stepper.encoder(batch.tokens)
        label_UD = setup.stepper.encoder(setup.data.tokens(setup.data.num_train + pool.ids))
        text_GE, text_UE = (
            F.normalize(torch.tanh(method.heads.text_layer(v))) for v in (query_GD, label_UD)
        )
        row_UE = method.tables["classifier"].weight_SD[torch.from_numpy(wider.ids)]
        row_GE = method.heads.classifier_layer(query_GD)
    expected = 0.3 * both_ways((text_GE @ text_UE.T / 0.05).numpy(), batch, pool.ids, 0.4)
    expected += 0.7 * both_ways((row_GE @ row_UE.T / 0.05).numpy(), batch, wider.ids, 0.8)
    output = method.loss(batch, shortlist)
    found = float(output.total.detach()) / output.divisor
    assert found == pytest.approx(expected, rel=1e-10)


def test_dropout_is_drawn_for_positions_of_the_batch(corpus: Corpus) -> None:
    setup = made(corpus, "method.dropout=0.5")
    batch = batch_of(setup)
    assert isinstance(setup.method, Unidec)
    whole, part = (setup.method._keep_mask("text", batch, start, 20) for start in (0, 13))
    assert whole is not None
    assert part is not None
    assert torch.equal(whole[13:], part)
    factors = setup.method.context.keep_factors(whole, 0.5)
    assert factors is not None
    assert set(factors.unique().tolist()) == {0.0, 2.0}
    other = setup.method._keep_mask("labels", batch, 0, 20)
    assert other is not None
    assert not torch.equal(whole, other)


def test_supcon_has_no_rows(corpus: Corpus) -> None:
    setup = made(corpus, "method.balance=1")
    assert not setup.method.tables
    assert setup.method.head.out_dim == setup.method.answer_rows().shape[1] == 12
    setup.stepper.step(batch_of(setup), shortlist_of(setup))
    assert made(corpus, "method.balance=0").method.head.out_dim == 12


@pytest.mark.parametrize(
    "settings", [["optim.batch_size=1"], ["method.hard_per_query=50", "method.num_positives=50"]]
)
def test_settings_wider_than_the_data(corpus: Corpus, settings: list[str]) -> None:
    setup = made(corpus, *settings)
    output = setup.stepper.step(
        setup.sampler.batch(5 * setup.sampler.steps_per_epoch, 0, 1), shortlist_of(setup)
    )
    assert math.isfinite(output.total)
    assert all(
        p.isfinite().all() for module in setup.stepper.modules.values() for p in module.parameters()
    )


def test_what_is_not_trained_does_not_answer() -> None:
    assert UnidecConfig(balance=1.0).answers == "text"
    assert UnidecConfig(balance=0.0).answers == "classifier"
    assert UnidecConfig(answer_by="text").answers == "text"
    with pytest.raises(ConfigError, match=r"answer_by is classifier.*balance=1"):
        UnidecConfig(balance=1.0, answer_by="classifier")


@pytest.mark.parametrize("answer_by", ["both", "text", "classifier"])
def test_an_answer_adds_the_cosines_of_its_parts(corpus: Corpus, answer_by: str) -> None:
    method = made(corpus, f"method.answer_by={answer_by}").method
    query_BD = torch.randn(5, 12, dtype=torch.float64)
    row_SE = method.tables["classifier"].weight_SD
    assert isinstance(method, Unidec)
    with torch.no_grad():
        text = F.normalize(torch.tanh(method.heads.text_layer(query_BD))) @ method.index_rows().T
        clf = F.cosine_similarity(
            method.heads.classifier_layer(query_BD)[:, None], row_SE[None], dim=2
        )
        expected = {"both": text + clf, "text": text, "classifier": clf}[answer_by]
        torch.testing.assert_close(method.head.eval()(query_BD) @ method.answer_rows().T, expected)


def test_a_head_is_saved_and_loaded(tmp_path: Path) -> None:
    head = TwoHeads(6, 4, text_share=0.75)
    head.reset(3)
    head.save(tmp_path)
    vector_BD = torch.randn(5, 6)
    torch.testing.assert_close(load_head(tmp_path)(vector_BD), head(vector_BD))
    assert head(vector_BD).shape == (5, 8)
    torch.testing.assert_close(
        head(vector_BD)[:, :4].norm(dim=1), torch.full((5,), 1.5)
    )  # twice its share
    torch.testing.assert_close(head(vector_BD)[:, 4:].norm(dim=1), torch.full((5,), 0.5))
    (tmp_path / "head.safetensors").unlink()
    with pytest.raises(BundleError, match="export it again"):
        load_head(tmp_path)


def test_a_module_learns_at_a_multiple_of_the_learning_rate() -> None:
    modules = {name: torch.nn.Linear(3, 2) for name in ("encoder", "head")}
    before = {name: module.weight.detach().clone() for name, module in modules.items()}
    optimizer = EncoderOptimizer(modules, OptimConfig(lr=0.01, weight_decay=0.0), [], {"head": 3.0})
    for module in modules.values():
        module(torch.ones(1, 3)).sum().backward()
    optimizer.step(0.5)
    moved = {name: (before[name] - module.weight.detach()) for name, module in modules.items()}
    torch.testing.assert_close(
        moved["encoder"], torch.full((2, 3), 0.005)
    )  # Adam's first step is the learning rate
    torch.testing.assert_close(moved["head"], torch.full((2, 3), 0.015))


def test_labels_without_any_text_are_refused(tmp_path: Path) -> None:
    planted_corpus(tmp_path, num_queries=20, num_labels=5)
    lines = [json.dumps({"uid": f"label{label}", "text": ""}) for label in range(5)]
    (tmp_path / "raw" / "labels.jsonl").write_text("\n".join(lines) + "\n")
    bare = corpus_of(tmp_path / "raw", tmp_path / "bare", vocab_size=2000)
    with pytest.raises(DataError, match="no label text"):
        made(bare)


def test_a_run_answers_with_both_parts(corpus: Corpus, tmp_path: Path) -> None:
    settings = [
        "encoder.dim=16",
        "optim.batch_size=32",
        "optim.epochs=12",
        "optim.warmup_steps=5",
        "optim.lr=0.01",
    ]
    settings += ["negatives.start_epoch=2", "cluster.workers=0", "cluster.threads_per_process=1"]
    run = train(corpus.path, tmp_path / "run", RunConfig.resolve("unidec", {}, settings))
    found = finish(run, corpus)
    assert found is not None
    assert found.metrics["P@1"] > 0.7  # 0.61 without training
    assert Retriever.load(run.path / "bundle").settings.dim == 32
