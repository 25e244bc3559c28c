"""Graded relevance: how much each positive counts in the losses of all methods."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import corpus_of, planted_corpus

from xmcray.data.batches import BatchSampler, DataConfig, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.data.relevance import Relevance
from xmcray.errors import ConfigError, DataError
from xmcray.evaluation.evaluate import Evaluation
from xmcray.losses.bce import full_bce
from xmcray.losses.pairs import Pairs
from xmcray.methods.registry import method_names
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.memory import RememberedQueries, remember, remembered_rows
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.votes import MemoryConfig, count_votes
from xmcray.training.loop import Setup, build
from xmcray.training.outcome import measure
from xmcray.training.run import RunConfig
from xmcray.types import Batch, Float32Array, Int64Array, Ragged, TopLabels

EXTRA = {
    "astra": [[], ["method.exact=true"], ["method.max_positives=1"]],
    "dexml": [[], *([f"method.loss={loss}"] for loss in ("softmax", "soft_top_k", "bce"))],
}
CASES = [(method, extra) for method in method_names() for extra in EXTRA.get(method, [[]])]


def regraded_corpus(folder: Path, relevance: float) -> Corpus:
    """Planted queries whose positives all have one relevance."""
    plain = planted_corpus(folder, num_queries=40, num_labels=12)
    raw = folder / "raw"
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (raw / f"{split}.jsonl").read_text().splitlines()]
        for row in rows:
            row["relevance"] = [relevance] * len(row["labels"])
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (raw / f"{split}.jsonl").write_text(text)
    return corpus_of(raw, folder / "regraded", plain.tokenizer())


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return regraded_corpus(tmp_path_factory.mktemp("equal"), 3)


@pytest.fixture(scope="module")
def rising(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return planted_corpus(
        tmp_path_factory.mktemp("rising"), num_queries=40, num_labels=12, graded=True
    )


def built(corpus: Corpus, method: str, *settings: str) -> Setup:
    small = ["encoder.dim=4", "optim.batch_size=9", "optim.precision=float64", "data.validation=0"]
    config = RunConfig.resolve(method, {}, [*small, "negatives.uniform=5", *settings])
    setup = build(config, TrainingData(corpus, config.data), torch.device("cpu"))
    torch.manual_seed(0)
    setup.method.start()
    return setup


def total_of(setup: Setup, batch: Batch, relevance: np.ndarray | None) -> float:
    graded = dataclasses.replace(batch, relevance=relevance)
    return setup.method.loss(graded, None).total.item()


@pytest.mark.parametrize(("method", "extra"), CASES)
def test_a_loss_is_the_sum_of_its_positives_by_their_weights(
    equal: Corpus, method: str, extra: list[str]
) -> None:
    setup = built(equal, method, "data.relevance=weight", *extra)
    batch = setup.sampler.batch(0, 0, 1)
    num_positives = len(batch.positives.values)
    # Equal numbers are no grades: the weights are 1, and nothing changes.
    assert batch.relevance is not None
    assert batch.relevance.tolist() == [1.0] * num_positives
    plain = total_of(setup, batch, None)
    assert total_of(setup, batch, batch.relevance) == pytest.approx(plain, rel=1e-12)
    weights = np.random.default_rng(0).uniform(0, 3, num_positives)
    without = total_of(setup, batch, np.zeros(num_positives))
    expected = without
    for place, weight in enumerate(weights):
        only = np.zeros(num_positives)
        only[place] = 1
        expected += weight * (total_of(setup, batch, only) - without)
    assert total_of(setup, batch, weights) == pytest.approx(expected, rel=1e-9)
    assert plain > without, "positives add to the loss"


def test_weights_are_relevance_by_its_mean_in_the_order_of_the_positives(rising: Corpus) -> None:
    split = rising.split("train")
    rows = np.arange(len(split))
    values = split.relevance()
    assert values is not None
    by_pair = {}
    mean = float(values.mean(dtype=np.float64))
    start = 0
    positives = split.positives(rows)
    for row in range(len(positives)):
        for label in positives[row].tolist():
            by_pair[row, label] = values[start] / mean
            start += 1
    data = TrainingData(rising, DataConfig(relevance="weight"))
    batch = BatchSampler(data, 17, seed=0).batch(1, 0, 1)
    assert batch.relevance is not None
    expected = []
    for place, query_id in enumerate(batch.query_ids.tolist()):
        # The text of a label is a query of this label alone, without relevance.
        source_labels = rising.label_order[batch.positives[place]].tolist()
        expected += [by_pair.get((query_id, label), 1.0) for label in source_labels]
    assert batch.relevance == pytest.approx(expected, rel=1e-6)
    assert len(set(expected)) > 2


def test_a_positive_is_sampled_as_often_as_its_share_of_the_largest(rising: Corpus) -> None:
    weighted = BatchSampler(TrainingData(rising, DataConfig(relevance="weight")), 500, seed=0)
    sampled = BatchSampler(TrainingData(rising, DataConfig(relevance="sample")), 500, seed=0)
    weights = weighted.batch(0, 0, 1)
    assert weights.relevance is not None
    lists = np.split(weights.relevance, weights.positives.offsets[1:-1])
    largest = [max(row, default=0) for row in lists]
    share = weights.relevance / np.repeat(largest, weights.positives.lengths)
    draw = sampled.batch(0, 0, 1).relevance
    assert draw is not None
    assert set(draw.tolist()) == {0.0, 1.0}
    # The most relevant positive of a query always counts.
    assert draw[share == 1].all()
    again = sampled.batch(0, 0, 1).relevance
    assert again is not None
    assert np.array_equal(draw, again), "the same on all ranks"
    is_smaller = share < 1
    assert draw[is_smaller].mean() == pytest.approx(share[is_smaller].mean(), abs=0.2)


def test_the_exact_loss_by_hand() -> None:
    query = torch.tensor([[1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([[0.5, 0.25], [1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([2.5], dtype=torch.float64)
    none = torch.empty(0, dtype=torch.int64)
    positive = Pairs(torch.tensor([0]), torch.tensor([1]), weights)
    # Scores 0 and -1; label 1 is the positive.
    total = full_bce(query, rows, positive, Pairs(none, none))
    expected = np.log(2) + 2.5 * np.log1p(np.exp(1.0))
    assert total.item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(
        lambda q, r: full_bce(q, r, positive, Pairs(none, none), chunk_labels=1), (query, rows)
    )


def test_relevance_that_is_missing_or_negative_is_refused(tmp_path: Path) -> None:
    plain = planted_corpus(tmp_path / "plain", num_queries=40, num_labels=12)
    with pytest.raises(ConfigError, match="have no relevance; leave"):
        TrainingData(plain, DataConfig(relevance="weight"))
    with pytest.raises(DataError, match="expected numbers of at least 0, not all"):
        TrainingData(regraded_corpus(tmp_path / "bad", -1), DataConfig(relevance="sample"))


def test_graded_ndcg_rewards_the_most_relevant_first(rising: Corpus, equal: Corpus) -> None:
    def measured(corpus: Corpus, backwards: bool) -> Evaluation:
        truth = corpus.split("test")

        def search(rows: Int64Array) -> TopLabels:
            top = TopLabels.empty(len(rows), 12)
            positives = truth.positives(rows)
            for place in range(len(rows)):
                # Relevance rises with the label's id.
                labels = positives[place]
                ordered = labels if backwards else labels[::-1]
                top.ids[place, : len(labels)] = ordered
            return top

        return measure(search, corpus, "test", resamples=0)

    best = measured(rising, backwards=False).metrics
    worst = measured(rising, backwards=True).metrics
    assert best["nDCG@5"] == worst["nDCG@5"] == 1
    assert best["graded nDCG@5"] == pytest.approx(1)
    # By hand, of two positives with grades 1 and 2: (1 + 2 / log2(3)) / (2 + 1 / log2(3)).
    values = {1: 1.0, 2: (1 + 2 / np.log2(3)) / (2 + 1 / np.log2(3))}
    lengths = rising.split("test").num_positives()
    assert set(lengths.tolist()) <= {0, 1, 2, 3, 4}
    assert worst["graded nDCG@5"] < np.mean([values.get(n, 1.0) for n in lengths if n])
    # Equal grades are no grades.
    same = measured(equal, backwards=True).metrics
    assert same["graded nDCG@5"] == pytest.approx(same["nDCG@5"])


def test_voters_weigh_their_positives(rising: Corpus, tmp_path: Path) -> None:
    train = rising.split("train")
    relevance = Relevance.read(train)
    assert relevance is not None
    rows = remembered_rows(train)

    def encode(tokens: Ragged) -> Float32Array:
        return np.full((len(tokens), 4), 0.5, np.float32)

    (tmp_path / "memory").mkdir()
    write = remember(train, encode, MemoryConfig(), IndexSpec(), relevance=relevance)
    write(tmp_path)
    queries = RememberedQueries.load(tmp_path, len(rows), 12)
    # Two voters with half of the votes each, so each gives a label half of its relevance.
    voters = TopLabels(np.array([[3, 5]]), np.full((1, 2), 0.9, np.float32))
    neighbours = Neighbours(voters, TopLabels.empty(1))
    votes = count_votes(neighbours, queries.positives, MemoryConfig(weight=1.0), 12)
    expected = np.zeros(12)
    for voter in (3, 5):
        grades = relevance.grades(rows[[voter]])
        labels = train.positives(rows[[voter]])[0]
        expected[labels] += 0.5 * grades / relevance.mean
        assert [weight for _, weight in queries.graded(voter)] == pytest.approx(
            (grades / relevance.mean).tolist()
        )
    assert votes.pairs.tolist() == np.flatnonzero(expected).tolist()
    assert votes.of_queries == pytest.approx(expected[votes.pairs])
    assert len(set(expected[votes.pairs].tolist())) > 1
