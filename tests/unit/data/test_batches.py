"""What is trained on, in which order, and which labels belong to it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from xmcray.data.batches import BatchSampler, DataConfig, QueryClusters, TrainingData
from xmcray.data.corpus import Corpus, Split
from xmcray.types import Ragged


def rows_of(ragged: Ragged) -> list[list[int]]:
    return [ragged[row].tolist() for row in range(len(ragged))]


def test_held_out_queries_are_not_trained_on(corpus: Corpus) -> None:
    data = TrainingData(corpus, DataConfig(validation=0.2, augment_with_labels=False))
    with_positive = np.flatnonzero(corpus.split("train").num_positives())
    assert not set(data.query_ids[:]) & set(data.validation_rows)
    both = np.union1d(data.query_ids[:], data.validation_rows)
    assert both.tolist() == with_positive.tolist()
    # 20 of 101 rows, of which a few have no positive.
    assert 15 <= len(data.validation_rows) <= 20
    other = TrainingData(corpus, DataConfig(validation=0.2, seed=1))
    assert not np.array_equal(data.validation_rows, other.validation_rows)


def test_an_epoch_has_every_query_once_in_an_order_of_its_own(corpus: Corpus) -> None:
    data = TrainingData(corpus, DataConfig())
    sampler = BatchSampler(data, 16, seed=0)
    epochs = []
    for epoch in range(2):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        ids = np.concatenate([sampler.query_ids(step) for step in steps])
        assert np.array_equal(np.sort(ids), data.query_ids[:])
        epochs.append(ids)
    assert not np.array_equal(epochs[0], epochs[1])
    other_seed = BatchSampler(data, 16, seed=1).query_ids(0)
    assert not np.array_equal(epochs[0][:16], other_seed)


def test_clusters_follow_each_other_in_a_random_order(corpus: Corpus) -> None:
    data = TrainingData(corpus, DataConfig(validation=0, augment_with_labels=False))
    cluster = np.arange(data.num_query_ids, dtype=np.int32) % 16
    cluster[:7] = -1
    sampler = BatchSampler(data, data.num_query_ids, seed=0)
    ids = sampler.query_ids(0, QueryClusters(0, 16, cluster))
    order = cluster[ids]
    starts = np.flatnonzero(np.diff(order)) + 1
    sequence = order[np.concatenate([[0], starts])].tolist()
    assert sorted(sequence[:-1]) == list(range(16)), "each cluster is one run"
    assert sequence[-1] == -1, "queries in no cluster come last"
    assert sequence[:-1] != list(range(16))


def test_rows_and_label_texts_come_in_the_order_asked_for(corpus: Corpus) -> None:
    data = TrainingData(corpus, DataConfig(augment_with_labels=True))
    first_label = data.num_train
    ids = np.array([3, first_label + 7, 40, 12, first_label, first_label + 2, 5])
    for read in (data.tokens, data.positives, data.excluded):
        together = rows_of(read(ids))
        alone = [read(ids[place : place + 1])[0].tolist() for place in range(len(ids))]
        assert together == alone


def test_a_label_text_is_a_query_of_its_label(corpus: Corpus) -> None:
    data = TrainingData(corpus, DataConfig(augment_with_labels=True))
    for label in (0, 5, 22):
        query_id = np.array([data.num_train + label])
        source_id = corpus.label_order[[label]]
        assert rows_of(data.tokens(query_id)) == rows_of(corpus.label_tokens(source_id))
        assert rows_of(data.positives(query_id)) == [[label]]
        assert rows_of(data.excluded(query_id)) == [[]]


def test_labels_of_a_query_are_internal_and_ascending(corpus: Corpus) -> None:
    data = TrainingData(corpus, DataConfig())
    split = corpus.split("train")
    rows = np.arange(data.num_train)
    assert split.filters(rows).lengths.any()
    for internal, source in (
        (data.positives(rows), split.positives(rows)),
        (data.excluded(rows), split.filters(rows)),
    ):
        for row in rows:
            assert internal[row].tolist() == sorted(internal[row])
            assert sorted(corpus.label_order[internal[row]]) == sorted(source[row])


def test_a_token_counts_once_for_each_text(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("xmcray.data.batches._COUNTED_AT_ONCE", 10)
    data = TrainingData(corpus, DataConfig())
    vocab_size = corpus.card.vocab_size
    expected = np.zeros(vocab_size, np.int64)
    repeats = 0
    for query_id in data.query_ids[:]:
        tokens = data.tokens(np.array([query_id])).values
        repeats += len(tokens) - len(set(tokens))
        expected[list(set(tokens))] += 1
    assert repeats, "no text repeats a token: the comparison would show little"
    assert np.array_equal(data.token_counts(vocab_size), expected)


def test_filters_of_a_split_take_no_memory_for_rows_without_any(corpus: Corpus) -> None:
    num_rows = 1 << 40  # whose offsets would take 8 TiB
    card = dataclasses.replace(corpus.card, num_train=num_rows)
    rows = np.arange(corpus.card.num_train)
    expected = corpus.split("train").filters(rows)
    filters = Split(corpus.path, "train", card).filters(np.append(rows, num_rows - 1))
    assert filters.values.tolist() == expected.values.tolist()
    assert filters.lengths.tolist() == [*expected.lengths, 0]
