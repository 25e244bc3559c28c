"""What is trained on, in which order, and which labels belong to it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from corpora import corpus_of
from models import write_bert
from numpy.testing import assert_array_equal
from planted import write_planted

from xmcray.data.batches import BatchSampler, DataConfig, QueryClusters, TrainingData
from xmcray.data.corpus import Corpus, Split
from xmcray.errors import DataError
from xmcray.types import Ragged


def rows_of(ragged: Ragged) -> list[list[int]]:
    return [ragged[row].tolist() for row in range(len(ragged))]


def ids_of_epoch(sampler: BatchSampler, epoch: int) -> np.ndarray:
    """The query ids of all steps of an epoch, in their order."""
    first = epoch * sampler.steps_per_epoch
    steps = range(first, first + sampler.steps_per_epoch)
    return np.concatenate([sampler.query_ids(step) for step in steps])


def test_held_out_queries_are_not_trained_on(corpus: Corpus) -> None:
    config = DataConfig(validation=0.2, augment_with_labels=False)
    data = TrainingData(corpus, config)

    trained = data.query_ids[:]
    held_out = data.validation_rows
    assert not set(trained) & set(held_out)
    together = np.union1d(trained, held_out)
    num_positives = corpus.split("train").num_positives()
    with_positive = np.flatnonzero(num_positives)
    assert_array_equal(together, with_positive)
    # 20 of 101 rows, of which a few have no positive.
    assert 15 <= len(held_out) <= 20

    other_seed = TrainingData(corpus, DataConfig(validation=0.2, seed=1))
    assert not np.array_equal(held_out, other_seed.validation_rows)


def test_an_epoch_has_every_query_once_in_an_order_of_its_own(corpus: Corpus) -> None:
    data = TrainingData(corpus, DataConfig())
    sampler = BatchSampler(data, 16, seed=0)
    other_seed = BatchSampler(data, 16, seed=1)

    first = ids_of_epoch(sampler, 0)
    second = ids_of_epoch(sampler, 1)

    every_query = data.query_ids[:]
    assert_array_equal(np.sort(first), every_query)
    assert_array_equal(np.sort(second), every_query)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first[:16], other_seed.query_ids(0))


def test_clusters_follow_each_other_in_a_random_order(corpus: Corpus) -> None:
    config = DataConfig(validation=0, augment_with_labels=False)
    data = TrainingData(corpus, config)
    num_queries = data.num_query_ids
    cluster_of_query = np.arange(num_queries, dtype=np.int32) % 16
    cluster_of_query[:7] = -1
    clusters = QueryClusters(0, 16, cluster_of_query)
    # One batch of all queries.
    sampler = BatchSampler(data, num_queries, seed=0)

    ids = sampler.query_ids(0, clusters)

    # One number for each run of equal clusters.
    order = cluster_of_query[ids].tolist()
    runs = [cluster for cluster, _ in itertools.groupby(order)]
    ascending = list(range(16))
    assert runs.pop() == -1, "queries in no cluster come last"
    assert sorted(runs) == ascending, "each cluster is one run"
    assert runs != ascending


def test_rows_and_label_texts_come_in_the_order_asked_for(corpus: Corpus) -> None:
    data = TrainingData(corpus, DataConfig(augment_with_labels=True))
    first_label = data.num_train
    ids = [
        3,
        first_label + 7,
        40,
        12,
        first_label,
        first_label + 2,
        5,
    ]

    for read in (data.tokens, data.positives, data.excluded):
        together = read(np.array(ids))

        assert len(together) == len(ids)
        for place, query_id in enumerate(ids):
            alone = read(np.array([query_id]))
            assert rows_of(alone) == [together[place].tolist()]


def test_a_label_text_is_a_query_of_its_label(corpus: Corpus) -> None:
    data = TrainingData(corpus, DataConfig(augment_with_labels=True))

    for label in (0, 5, 22):
        query_id = np.array([data.num_train + label])
        tokens = data.tokens(query_id)
        positives = data.positives(query_id)
        excluded = data.excluded(query_id)

        source_id = corpus.label_order[[label]]
        label_tokens = corpus.label_tokens(source_id)
        assert rows_of(tokens) == rows_of(label_tokens)
        assert rows_of(positives) == [[label]]
        assert rows_of(excluded) == [[]]


@pytest.mark.parametrize("is_transformer", [False, True])
def test_a_label_without_a_text_is_no_query(tmp_path: Path, is_transformer: bool) -> None:
    raw = tmp_path / "raw"
    write_planted(raw, num_queries=50, num_labels=8)
    texts = ["w1x1", "", "w2x2", "   ", *["w3x3"] * 4]
    rows = [json.dumps({"uid": f"label{label}", "text": text}) for label, text in enumerate(texts)]
    (raw / "labels.jsonl").write_text("\n".join(rows) + "\n")
    # Its tokenizer gives an empty text two special tokens.
    model = str(write_bert(tmp_path / "bert", ["w1x1", "w2x2", "w3x3"])) if is_transformer else None
    corpus = corpus_of(raw, tmp_path / "corpus", model)
    assert corpus.labels_without_tokens().tolist() == [1, 3]
    data = TrainingData(corpus, DataConfig(validation=0, augment_with_labels=True))
    assert len(data.query_ids) == len(data.training_rows) + 6


def test_labels_of_a_query_are_internal_and_ascending(corpus: Corpus) -> None:
    data = TrainingData(corpus, DataConfig())
    split = corpus.split("train")
    rows = np.arange(data.num_train)
    positives = split.positives(rows)
    filters = split.filters(rows)
    assert filters.lengths.any(), "without filter pairs the comparison would show little"

    def assert_internal(internal: Ragged, source: Ragged) -> None:
        assert len(internal) == len(source)
        for row in rows:
            labels = internal[row].tolist()
            assert labels == sorted(labels)
            source_ids = corpus.label_order[labels]
            assert sorted(source_ids) == sorted(source[row])

    assert_internal(data.positives(rows), positives)
    assert_internal(data.excluded(rows), filters)


def test_a_token_counts_once_for_each_text(
    corpus: Corpus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("xmcray.data.batches._COUNTED_AT_ONCE", 10)
    data = TrainingData(corpus, DataConfig())
    vocab_size = corpus.card.vocab_size

    expected = np.zeros(vocab_size, np.int64)
    num_repeats = 0
    for query_id in data.query_ids[:]:
        tokens = data.tokens(np.array([query_id]))[0]
        distinct = np.unique(tokens)
        num_repeats += len(tokens) - len(distinct)
        expected[distinct] += 1

    assert num_repeats > 0, "no text repeats a token: the comparison would show little"
    counts = data.token_counts(vocab_size)
    assert_array_equal(counts, expected)


def test_filters_of_a_split_take_no_memory_for_rows_without_any(corpus: Corpus) -> None:
    # Offsets of so many rows would take 8 TiB.
    num_rows = 1 << 40
    card = dataclasses.replace(corpus.card, num_train=num_rows)
    rows = np.arange(corpus.card.num_train)
    expected = corpus.split("train").filters(rows)

    huge = Split(corpus.path, "train", card)
    last_row = num_rows - 1
    filters = huge.filters(np.append(rows, last_row))

    assert_array_equal(filters.values, expected.values)
    # The last row has none.
    assert_array_equal(filters.lengths[:-1], expected.lengths)
    assert filters.lengths[-1] == 0


def test_held_out_queries_that_leave_none_are_named(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_planted(raw, num_queries=2, num_labels=20)
    lines = (raw / "train.jsonl").read_text().splitlines()
    without_labels = {**json.loads(lines[1]), "labels": []}
    (raw / "train.jsonl").write_text(f"{lines[0]}\n{json.dumps(without_labels)}\n")
    corpus = corpus_of(raw, tmp_path / "corpus")
    with pytest.raises(DataError, match=r"data\.validation=0\.5 holds out every training query"):
        # This seed holds out the query with a label.
        TrainingData(corpus, DataConfig(validation=0.5, seed=1))
