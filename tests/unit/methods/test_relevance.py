"""Graded relevance: how much each positive counts in the losses of all methods."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from corpora import corpus_of, planted_corpus

from xmcray.data.batches import BatchSampler, DataConfig, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.data.relevance import Relevance
from xmcray.errors import ConfigError, DataError
from xmcray.losses.bce import full_bce
from xmcray.losses.pairs import Pairs
from xmcray.methods.registry import method_names
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.memory import RememberedQueries, memory_writer, remembered_rows
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.votes import MemoryConfig, count_votes
from xmcray.training.held_out import relevance_of
from xmcray.training.loop import Setup, build
from xmcray.training.outcome import measure, nearest_queries
from xmcray.training.run_config import RunConfig
from xmcray.types import Batch, Float32Array, Float64Array, Int64Array, Ragged, TopLabels

# Settings under which a method's loss has other terms. Temperature 1 leaves no term close to 0.
EXTRA = {
    "astra": [[], ["method.exact=true"], ["method.max_positives=1"]],
    "dexml": [
        [f"method.loss={loss}", "method.temperature=1"]
        for loss in ("decoupled", "softmax", "soft_top_k", "bce")
    ],
    # A query that shares a positive is no negative, however little the positive counts.
    "rae": [[], ["method.num_positives=0", "method.query_negatives=false"]],
    "unidec": [["method.temperature=1"]],
}
CASES = [(method, extra) for method in method_names() for extra in EXTRA.get(method, [[]])]
# The losses over all positives of a query, and not over some that are drawn.
WITHOUT_DRAWS = [
    (method, extra)
    for method, extra in CASES
    if method != "prime"
    and (method, extra) not in (("rae", []), ("astra", ["method.max_positives=1"]))
]


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
    """Positives whose relevance rises with the label's id."""
    folder = tmp_path_factory.mktemp("rising")
    return planted_corpus(folder, num_queries=40, num_labels=12, graded=True)


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


def ones_but(place: int, value: float, size: int) -> Float64Array:
    values = np.ones(size)
    values[place] = value
    return values


@pytest.mark.parametrize(("method", "extra"), CASES)
def test_relevance_that_is_equal_everywhere_changes_no_loss(
    equal: Corpus, method: str, extra: list[str]
) -> None:
    setup = built(equal, method, "data.relevance=weight", *extra)
    batch = setup.sampler.batch(0, 0, 1)

    # A weight is a relevance by the mean of all, and all are 3.
    assert batch.relevance is not None
    assert batch.relevance.tolist() == [1.0] * len(batch.positives.values)
    unweighted = total_of(setup, batch, None)
    assert total_of(setup, batch, batch.relevance) == pytest.approx(unweighted, rel=1e-12)


@pytest.mark.parametrize(("method", "extra"), CASES)
def test_a_loss_is_the_sum_of_its_positives_by_their_weights(
    equal: Corpus, method: str, extra: list[str]
) -> None:
    setup = built(equal, method, "data.relevance=weight", *extra)
    batch = setup.sampler.batch(0, 0, 1)
    num_positives = len(batch.positives.values)
    weights = np.random.default_rng(0).uniform(0, 3, num_positives)

    # What a positive adds is the loss with this one doubled, less the loss with all weights 1.
    unweighted = total_of(setup, batch, None)
    terms = []
    for place in range(num_positives):
        doubled = total_of(setup, batch, ones_but(place, 2, num_positives))
        terms.append(doubled - unweighted)

    expected = unweighted + np.dot(weights - 1, terms)
    assert total_of(setup, batch, weights) == pytest.approx(expected, rel=1e-9)
    assert sum(terms) > 0, "positives add to the loss"


@pytest.mark.parametrize(("method", "extra"), WITHOUT_DRAWS)
def test_a_positive_that_counts_0_is_neither_positive_nor_negative(
    equal: Corpus, method: str, extra: list[str]
) -> None:
    """As the query's own label."""
    setup = built(equal, method, "data.relevance=weight", *extra)
    batch = setup.sampler.batch(0, 0, 1)
    positives = batch.positives
    # The query has another positive, and another query has the label, which is scored either way.
    labels, num_queries = np.unique(positives.values, return_counts=True)
    is_shared = np.isin(positives.values, labels[num_queries > 1])
    has_others = positives.lengths[positives.row_ids] > 1
    place = int(np.flatnonzero(is_shared & has_others)[0])
    relevance = ones_but(place, 0, len(positives.values))

    excluded = [row.tolist() for row in batch.excluded]
    of_query = excluded[positives.row_ids[place]]
    of_query.append(positives.values[place])
    of_query.sort()
    without = dataclasses.replace(
        batch,
        positives=positives.where(relevance > 0),
        excluded=Ragged.from_rows(excluded),
    )

    assert total_of(setup, batch, relevance) == pytest.approx(total_of(setup, without, None))
    assert total_of(setup, batch, relevance) != pytest.approx(total_of(setup, batch, None))


def test_weights_are_relevance_by_its_mean_in_the_order_of_the_positives(rising: Corpus) -> None:
    split = rising.split("train")
    relevance = split.relevance()
    assert relevance is not None
    mean = float(relevance.mean(dtype=np.float64))
    positives = split.positives(np.arange(len(split)))
    pairs = zip(positives.row_ids.tolist(), positives.values.tolist(), strict=True)
    weight_of_pair = dict(zip(pairs, relevance / mean, strict=True))
    data = TrainingData(rising, DataConfig(relevance="weight"))

    batch = BatchSampler(data, 17, seed=0).batch(1, 0, 1)

    assert batch.relevance is not None
    expected = []
    for place, query_id in enumerate(batch.query_ids.tolist()):
        # The text of a label is a query of this label alone, without relevance.
        source_labels = rising.label_order[batch.positives[place]].tolist()
        expected += [weight_of_pair.get((query_id, label), 1.0) for label in source_labels]
    assert batch.relevance == pytest.approx(expected, rel=1e-6)
    assert len(set(expected)) > 2


def first_batch(corpus: Corpus, relevance: Literal["weight", "sample"]) -> Batch:
    data = TrainingData(corpus, DataConfig(relevance=relevance))
    return BatchSampler(data, 500, seed=0).batch(0, 0, 1)


def test_a_positive_is_sampled_as_often_as_its_share_of_the_largest(rising: Corpus) -> None:
    weighted = first_batch(rising, "weight")
    assert weighted.relevance is not None
    weights_of_queries = np.split(weighted.relevance, weighted.positives.offsets[1:-1])
    largest = [max(weights, default=0) for weights in weights_of_queries]
    share = weighted.relevance / np.repeat(largest, weighted.positives.lengths)

    is_drawn = first_batch(rising, "sample").relevance

    assert is_drawn is not None
    assert set(is_drawn.tolist()) == {0.0, 1.0}
    # The most relevant positive of a query always counts.
    assert is_drawn[share == 1].all()
    is_smaller = share < 1
    assert is_drawn[is_smaller].mean() == pytest.approx(share[is_smaller].mean(), abs=0.2)


def test_all_ranks_sample_the_same_positives(rising: Corpus) -> None:
    """Each rank has a sampler of its own."""
    one_rank = first_batch(rising, "sample").relevance
    other_rank = first_batch(rising, "sample").relevance
    assert one_rank is not None
    assert other_rank is not None
    assert np.array_equal(one_rank, other_rank)


def test_the_exact_loss_by_hand() -> None:
    query_GD = torch.tensor([[1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    row_SD = torch.tensor([[0.5, 0.25], [1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([2.5], dtype=torch.float64)
    positive = Pairs(torch.tensor([0]), torch.tensor([1]), weights)
    none = torch.empty(0, dtype=torch.int64)

    def loss(query_GD: torch.Tensor, row_SD: torch.Tensor) -> torch.Tensor:
        return full_bce(query_GD, row_SD, positive, Pairs(none, none), chunk_labels=1)

    # Scores 0 and -1; label 1 is the positive. softplus(0) = log(2) and softplus(1) = log(1 + e).
    expected = np.log(2) + 2.5 * np.log1p(np.exp(1.0))
    in_one_chunk = full_bce(query_GD, row_SD, positive, Pairs(none, none))
    assert in_one_chunk.item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(loss, (query_GD, row_SD))


def test_relevance_that_is_missing_is_refused(tmp_path: Path) -> None:
    plain = planted_corpus(tmp_path, num_queries=40, num_labels=12)
    with pytest.raises(ConfigError, match="have no relevance; leave"):
        TrainingData(plain, DataConfig(relevance="weight"))


def test_relevance_that_is_0_everywhere_is_refused(tmp_path: Path) -> None:
    irrelevant = regraded_corpus(tmp_path, 0)
    with pytest.raises(DataError, match="expected numbers of at least 0, not all"):
        TrainingData(irrelevant, DataConfig(relevance="sample"))


def metrics_of_order(corpus: Corpus, *, least_relevant_first: bool) -> dict[str, float]:
    """The metrics of answers that are a query's positives in the order of their relevance."""
    truth = corpus.split("test")

    def search(rows: Int64Array) -> TopLabels:
        top = TopLabels.empty(len(rows), 12)
        positives = truth.positives(rows)
        for place in range(len(rows)):
            # Relevance rises with the label's id, and ids ascend.
            labels = positives[place]
            ordered = labels if least_relevant_first else labels[::-1]
            top.ids[place, : len(labels)] = ordered
        return top

    return measure(search, corpus, "test", resamples=0).metrics


def test_graded_ndcg_rewards_the_most_relevant_first(rising: Corpus) -> None:
    best = metrics_of_order(rising, least_relevant_first=False)
    worst = metrics_of_order(rising, least_relevant_first=True)

    # Without grades, all answers are right in either order.
    assert best["nDCG@5"] == worst["nDCG@5"] == 1
    assert best["graded nDCG@5"] == pytest.approx(1)
    num_positives = rising.split("test").num_positives()
    assert set(num_positives.tolist()) <= {0, 1, 2, 3, 4}
    # Of two positives with grades 1 and 2, the worst order is worth
    # (1 + 2 / log2(3)) / (2 + 1 / log2(3)). Three and four are worth less than 1, one is worth 1.
    of_two = (1 + 2 / np.log2(3)) / (2 + 1 / np.log2(3))
    bounds = [of_two if number == 2 else 1.0 for number in num_positives if number]
    assert worst["graded nDCG@5"] < np.mean(bounds)


def test_graded_ndcg_is_ndcg_if_grades_are_equal(equal: Corpus) -> None:
    metrics = metrics_of_order(equal, least_relevant_first=True)
    assert metrics["graded nDCG@5"] == pytest.approx(metrics["nDCG@5"])


def remembered(corpus: Corpus, relevance: Relevance, folder: Path) -> RememberedQueries:
    """The training queries as a memory whose keys do not matter."""

    def encode(tokens: Ragged) -> Float32Array:
        return np.full((len(tokens), 4), 0.5, np.float32)

    (folder / "memory").mkdir()
    write = memory_writer(corpus, encode, MemoryConfig(), IndexSpec(), relevance=relevance)
    write(folder)
    return RememberedQueries.load(folder, len(remembered_rows(corpus)), 12)


def test_voters_weigh_their_positives(rising: Corpus, tmp_path: Path) -> None:
    train = rising.split("train")
    relevance = Relevance.read(train)
    assert relevance is not None
    queries = remembered(rising, relevance, tmp_path)
    # Two voters with half of the votes each, so each gives a label half of its relevance.
    voters = TopLabels(np.array([[3, 5]]), np.full((1, 2), 0.9, np.float32))
    neighbours = Neighbours(voters, TopLabels.empty(1))

    votes = count_votes(neighbours, queries.positives, MemoryConfig(weight=1.0), 12)

    rows = remembered_rows(rising)
    expected_L = np.zeros(12)
    for voter in (3, 5):
        weights = relevance.grades(rows[[voter]]) / relevance.mean
        labels = train.positives(rows[[voter]])[0]
        expected_L[labels] += 0.5 * weights
        graded_weights = [weight for _, weight in queries.graded(voter)]
        assert graded_weights == pytest.approx(weights.tolist())
    # One query: a pair's number is the label's.
    assert votes.pairs.tolist() == np.flatnonzero(expected_L).tolist()
    expected = expected_L[votes.pairs]
    assert votes.of_queries == pytest.approx(expected)
    assert len(set(expected.tolist())) > 1


def test_relevance_of_0_alone_cannot_weigh_votes(tmp_path: Path) -> None:
    """A memory may be of another corpus than the one that a run was trained on and checked with."""
    about = {"config": {"data": {"relevance": "weight"}}}
    with pytest.raises(
        DataError, match="relevance below 0, or 0 alone, by which no query can vote"
    ):
        relevance_of(about, regraded_corpus(tmp_path, 0))


def test_a_graded_split_whose_positives_are_all_filtered_is_one_line(tmp_path: Path) -> None:
    plain = planted_corpus(tmp_path, num_queries=10, num_labels=5)
    raw = tmp_path / "raw"
    label = json.loads((raw / "labels.jsonl").read_text().splitlines()[0])["uid"]
    row = {"uid": "only", "text": "w1x1", "labels": [label], "relevance": [2]}
    (raw / "test.jsonl").write_text(json.dumps(row) + "\n")
    (raw / "filter_labels_test.txt").write_text("0 0\n")
    corpus = corpus_of(raw, tmp_path / "filtered", plain.tokenizer())
    with pytest.raises(DataError, match="none of 1 queries has a positive left"):
        measure(nearest_queries(corpus, "test"), corpus, "test")
