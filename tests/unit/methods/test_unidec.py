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
from xmcray.training.run_config import RunConfig
from xmcray.types import Batch, Int64Array, Ragged, Shortlist

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


def unidec_of(setup: Setup) -> Unidec:
    assert isinstance(setup.method, Unidec)
    return setup.method


def batch_of(setup: Setup) -> Batch:
    """A batch of an epoch that uses hard negatives, with a filter pair whose label is in the pool."""
    first_step_of_epoch_5 = 5 * setup.sampler.steps_per_epoch
    batch = setup.sampler.batch(first_step_of_epoch_5, 0, 1)
    excluded = [batch.excluded[row].tolist() for row in range(len(batch.query_ids))]
    # A positive of another query, which brings it into the pool.
    of_others = np.setdiff1d(batch.positives.values, batch.positives[0])
    excluded[0] = [int(of_others[0])]
    return dataclasses.replace(batch, excluded=Ragged.from_rows(excluded))


def shortlist_of(setup: Setup) -> Shortlist:
    """Four labels for each query that are not its own: many are another query's."""
    data = setup.data
    generator = np.random.default_rng(0)
    labels = np.full((data.num_query_ids, 4), -1, np.int32)
    for row in range(data.num_query_ids):
        query = np.array([row])
        own = np.concatenate([data.positives(query).values, data.excluded(query).values])
        others = np.setdiff1d(np.arange(data.num_labels), own)
        labels[row] = generator.permutation(others)[:4]
    return Shortlist(0, 0, labels)


def psl_by_loops(score: Any, positive: Any, counted: Any) -> float:
    """One direction: the mean over anchors with a positive of the mean over their positives."""
    anchor_losses = []
    for score_row, is_positive, counts in zip(score, positive, counted, strict=True):
        if not any(is_positive):
            continue
        log_z = math.log(sum(math.exp(s) for s in score_row[counts]))
        losses = [log_z - s for s in score_row[is_positive]]
        anchor_losses.append(np.mean(losses))
    return float(np.mean(anchor_losses))


def membership(rows: Ragged, labels: Int64Array) -> np.ndarray:
    """bool [rows, labels]: whether a row holds a label."""
    return np.array([np.isin(labels, rows[row]) for row in range(len(rows))])


def both_ways(score_GP: Any, batch: Batch, pool: Int64Array, balance: float) -> float:
    """From queries to labels and back, of the scores of all queries with a pool of labels."""
    positive_GP = membership(batch.positives, pool)
    counted_GP = ~membership(batch.excluded, pool)
    to_labels = psl_by_loops(score_GP, positive_GP, counted_GP)
    to_queries = psl_by_loops(score_GP.T, positive_GP.T, counted_GP.T)
    return balance * to_labels + (1 - balance) * to_queries


def test_the_loss_is_the_papers(corpus: Corpus) -> None:
    setup = made(
        corpus,
        "method.num_positives=1",
        "method.hard_per_query=1",
        "method.classifier_positives=1",
        "method.balance=0.3",
        "method.balance_encoder=0.4",
        "method.balance_classifier=0.8",
        "method.head_dim=9",
        "optim.batch_size=7",
    )
    method = unidec_of(setup)
    heads = method.heads
    batch = batch_of(setup)
    shortlist = shortlist_of(setup)
    pools = method._pools(batch, shortlist)
    text_pool = pools.texts.ids
    row_pool = pools.rows.ids
    assert membership(batch.positives, text_pool).sum() > 7, (
        "no query met a positive that another one brought: the comparison would show little"
    )
    assert set(text_pool) < set(row_pool)

    with torch.no_grad():
        query_GD = setup.stepper.encoder(batch.tokens)
        label_tokens = setup.data.tokens(setup.data.num_train + text_pool)
        label_UD = setup.stepper.encoder(label_tokens)
        query_text_GE = F.normalize(torch.tanh(heads.text_layer(query_GD)))
        label_text_UE = F.normalize(torch.tanh(heads.text_layer(label_UD)))
        query_row_GE = heads.classifier_layer(query_GD)
        row_UE = method.tables["classifier"].weight_SD[torch.from_numpy(row_pool)]
    # 0.05 is the temperature, 0.3 the share of the encoder's loss.
    text_score_GU = (query_text_GE @ label_text_UE.T / 0.05).numpy()
    row_score_GU = (query_row_GE @ row_UE.T / 0.05).numpy()
    encoder_loss = both_ways(text_score_GU, batch, text_pool, 0.4)
    classifier_loss = both_ways(row_score_GU, batch, row_pool, 0.8)
    expected = 0.3 * encoder_loss + 0.7 * classifier_loss

    output = method.loss(batch, shortlist)

    loss = float(output.total.detach()) / output.divisor
    assert loss == pytest.approx(expected, rel=1e-10)


def test_dropout_is_drawn_for_positions_of_the_batch(corpus: Corpus) -> None:
    setup = made(corpus, "method.dropout=0.5")
    method = unidec_of(setup)
    batch = batch_of(setup)

    whole = method._keep_mask("text", batch, 0, 20)
    from_13 = method._keep_mask("text", batch, 13, 20)
    labels = method._keep_mask("labels", batch, 0, 20)

    assert whole is not None
    assert from_13 is not None
    assert labels is not None
    assert torch.equal(whole[13:], from_13)
    assert not torch.equal(whole, labels)
    factors = method.context.keep_factors(whole, 0.5)
    assert factors is not None
    assert set(factors.unique().tolist()) == {0.0, 2.0}


def test_hard_negatives_are_searched_without_dropout(corpus: Corpus) -> None:
    setup = made(corpus, "method.dropout=0.5")
    method = unidec_of(setup)
    batch = batch_of(setup)

    output = method.loss(batch, None)

    with torch.no_grad():
        expected = method.heads.text(method.context.encode(batch.tokens))
    assert output.query_vectors is not None
    torch.testing.assert_close(output.query_vectors, expected)


def test_supcon_has_no_rows(corpus: Corpus) -> None:
    setup = made(corpus, "method.balance=1")
    assert not setup.method.tables
    assert setup.method.head.out_dim == setup.method.answer_rows().shape[1] == 12
    setup.stepper.step(batch_of(setup), shortlist_of(setup))


def test_a_classifier_alone_answers_with_its_own_width(corpus: Corpus) -> None:
    assert made(corpus, "method.balance=0").method.head.out_dim == 12


@pytest.mark.parametrize(
    "settings",
    [["optim.batch_size=1"], ["method.hard_per_query=50", "method.num_positives=50"]],
    ids=["one query", "more labels than there are"],
)
def test_settings_wider_than_the_data(corpus: Corpus, settings: list[str]) -> None:
    setup = made(corpus, *settings)
    first_step_of_epoch_5 = 5 * setup.sampler.steps_per_epoch
    batch = setup.sampler.batch(first_step_of_epoch_5, 0, 1)

    output = setup.stepper.step(batch, shortlist_of(setup))

    assert math.isfinite(output.total.detach())
    for module in setup.stepper.modules.values():
        for parameter in module.parameters():
            assert parameter.isfinite().all()


def test_what_is_not_trained_does_not_answer() -> None:
    assert UnidecConfig(balance=1.0).answers == "text"
    assert UnidecConfig(balance=0.0).answers == "classifier"
    assert UnidecConfig(answer_by="text").answers == "text"
    with pytest.raises(ConfigError, match=r"answer_by is classifier.*balance=1"):
        UnidecConfig(balance=1.0, answer_by="classifier")


@pytest.mark.parametrize("answer_by", ["both", "text", "classifier"])
def test_an_answer_adds_the_cosines_of_its_parts(corpus: Corpus, answer_by: str) -> None:
    method = unidec_of(made(corpus, f"method.answer_by={answer_by}"))
    heads = method.heads
    query_BD = torch.randn(5, 12, dtype=torch.float64)
    row_SE = method.tables["classifier"].weight_SD

    with torch.no_grad():
        score_BS = method.head.eval()(query_BD) @ method.answer_rows().T

        text_BE = F.normalize(torch.tanh(heads.text_layer(query_BD)))
        text_BS = text_BE @ method.index_rows().T
        # Each query with each row.
        classifier_BE = heads.classifier_layer(query_BD)
        classifier_BS = F.cosine_similarity(classifier_BE[:, None], row_SE[None], dim=2)
    expected = {"both": text_BS + classifier_BS, "text": text_BS, "classifier": classifier_BS}
    torch.testing.assert_close(score_BS, expected[answer_by])


def two_heads() -> TwoHeads:
    head = TwoHeads(6, 4, text_share=0.75)
    head.reset(3)
    return head


def test_a_head_is_saved_and_loaded(tmp_path: Path) -> None:
    head = two_heads()
    head.save(tmp_path)
    vector_BD = torch.randn(5, 6)
    torch.testing.assert_close(load_head(tmp_path)(vector_BD), head(vector_BD))


def test_a_part_of_a_head_is_as_long_as_twice_its_share() -> None:
    vector_BE = two_heads()(torch.randn(5, 6))
    assert vector_BE.shape == (5, 8)
    text_length_B = vector_BE[:, :4].norm(dim=1)
    classifier_length_B = vector_BE[:, 4:].norm(dim=1)
    torch.testing.assert_close(text_length_B, torch.full((5,), 1.5))
    torch.testing.assert_close(classifier_length_B, torch.full((5,), 0.5))


def test_a_head_without_its_weights_is_refused(tmp_path: Path) -> None:
    two_heads().save(tmp_path)
    (tmp_path / "head.safetensors").unlink()
    with pytest.raises(BundleError, match="export it again"):
        load_head(tmp_path)


def test_a_module_learns_at_a_multiple_of_the_learning_rate() -> None:
    encoder = torch.nn.Linear(3, 2)
    head = torch.nn.Linear(3, 2)
    encoder_before = encoder.weight.detach().clone()
    head_before = head.weight.detach().clone()
    config = OptimConfig(lr=0.01, weight_decay=0.0)
    optimizer = EncoderOptimizer({"encoder": encoder, "head": head}, config, [], {"head": 3.0})

    for module in (encoder, head):
        module(torch.ones(1, 3)).sum().backward()
    optimizer.step(0.5)

    # Adam's first step is the learning rate, here 0.5 * 0.01; the head's is three times that.
    encoder_moved = encoder_before - encoder.weight.detach()
    head_moved = head_before - head.weight.detach()
    torch.testing.assert_close(encoder_moved, torch.full((2, 3), 0.005))
    torch.testing.assert_close(head_moved, torch.full((2, 3), 0.015))


def test_labels_without_any_text_are_refused(tmp_path: Path) -> None:
    planted_corpus(tmp_path, num_queries=20, num_labels=5)
    lines = [json.dumps({"uid": f"label{label}", "text": ""}) for label in range(5)]
    (tmp_path / "raw" / "labels.jsonl").write_text("\n".join(lines) + "\n")
    bare = corpus_of(tmp_path / "raw", tmp_path / "bare", vocab_size=2000)
    with pytest.raises(DataError, match="no label text"):
        made(bare)


def test_rows_start_as_the_vectors_of_their_texts(corpus: Corpus) -> None:
    setup = made(corpus, "method.init=texts", "method.init_std=0.3", "method.head_dim=9")
    method = unidec_of(setup)

    rows = method.tables["classifier"].weight_SD

    with torch.no_grad():
        texts = method.heads.classifier(method.context.label_vectors())
    cosines = F.cosine_similarity(rows.double(), texts.double())
    torch.testing.assert_close(cosines, torch.ones_like(cosines))
    # The coordinates of a row have this deviation around 0.
    deviations = rows.double().square().mean(dim=1).sqrt()
    torch.testing.assert_close(deviations, torch.full_like(deviations, 0.3))


def test_a_run_answers_with_both_parts(corpus: Corpus, tmp_path: Path) -> None:
    settings = [
        "encoder.dim=16",
        "optim.batch_size=32",
        "optim.epochs=12",
        "optim.warmup_steps=5",
        "optim.lr=0.01",
        "negatives.start_epoch=2",
        "cluster.workers=0",
        "cluster.threads_per_process=1",
    ]
    run = train(corpus.path, tmp_path / "run", RunConfig.resolve("unidec", {}, settings))

    evaluation = finish(run, corpus)

    assert evaluation is not None
    assert evaluation.metrics["P@1"] > 0.7  # 0.61 without training
    # 16 of each part.
    assert Retriever.load(run.path / "bundle").settings.dim == 32
