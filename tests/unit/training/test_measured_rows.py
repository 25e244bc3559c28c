"""Which held-out queries `distil` and `train-reranker` measure on, if there are many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import write_memory_of
from corpora import corpus_of, planted_corpus
from models import write_bert
from planted import WORDS_PER_LABEL, write_planted

import xmcray
from xmcray.errors import DataError
from xmcray.retrieval.labels import NewLabel, add_labels
from xmcray.retrieval.query_encoder import QueryEncoder
from xmcray.retrieval.reranker import Reranker
from xmcray.training import distil, train_reranker
from xmcray.training.held_out import held_out_by, some_rows
from xmcray.training.memory import memory_bundle
from xmcray.training.train_reranker import RerankTraining
from xmcray.types import Float32Array, Ragged

NUM_LABELS = 23
WORDS = [f"w{label}x{n}" for label in range(NUM_LABELS) for n in range(WORDS_PER_LABEL)]


def test_queries_that_are_measured_come_from_everywhere_in_the_file() -> None:
    rows = np.arange(0, 30_000, 3)
    measured = some_rows(rows, 1000, seed=0)
    assert len(measured) == 1000
    assert np.isin(measured, rows).all()
    assert (np.diff(measured) > 0).all()
    # The mean of 1,000 draws is within 4 standard errors of the middle.
    assert abs(measured.mean() - rows.mean()) < 4 * rows.std() / np.sqrt(1000)
    np.testing.assert_array_equal(measured, some_rows(rows, 1000, seed=0))
    assert not np.array_equal(measured, some_rows(rows, 1000, seed=1))


def test_few_queries_are_all_measured() -> None:
    rows = np.array([2, 3, 9])
    np.testing.assert_array_equal(some_rows(rows, 3, seed=0), rows)


def test_distil_measures_and_finds_its_temperature_on_a_random_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_planted(tmp_path / "raw", 300, NUM_LABELS)
    model = str(write_bert(tmp_path / "model", WORDS))
    corpus = corpus_of(tmp_path / "raw", tmp_path / "corpus", model)
    memory_bundle(model, corpus, tmp_path / "teacher")
    monkeypatch.setattr(distil, "MOST_MEASURED", 6)
    monkeypatch.setattr(distil, "TEMPERATURE_QUERIES", 5)
    encoded: list[list[list[int]]] = []
    encode = QueryEncoder.encode

    def noting(self: QueryEncoder, queries: Any, *more: Any) -> Float32Array:
        if isinstance(queries, Ragged):
            encoded.append([row.tolist() for row in queries])
        return encode(self, queries, *more)

    monkeypatch.setattr(QueryEncoder, "encode", noting)
    settings = {"epochs": 1, "bigram_buckets": 50, "random_labels": 5}

    outcome = xmcray.distil(tmp_path / "teacher", corpus, tmp_path / "out", settings)

    rows = held_out_by("", {}, corpus).validation_rows
    assert len(rows) > 6
    assert outcome.queries == 6
    for count in (5, 6):
        tokens = corpus.split("train").tokens(some_rows(rows, count, seed=0))
        assert [row.tolist() for row in tokens] in encoded


def test_train_reranker_measures_on_a_random_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = planted_corpus(tmp_path, num_queries=200, num_labels=NUM_LABELS)
    bundle = write_memory_of(corpus, tmp_path / "bundle", dim=8, seed=0)
    read: list[list[str]] = []
    pair_scores = Reranker.pair_scores

    def noting(self: Reranker, texts: list[str], *more: Any) -> Float32Array:
        read.append(texts)
        return pair_scores(self, texts, *more)

    monkeypatch.setattr(Reranker, "pair_scores", noting)
    monkeypatch.setattr(train_reranker, "MOST_HELD_OUT", 4)

    model = str(write_bert(tmp_path / "model", WORDS))
    config = RerankTraining(model=model, queries=8, negatives=2, candidates=6, max_len=16)

    train_reranker.train_reranker(str(bundle), corpus, tmp_path / "out", config)

    rows = held_out_by("", {}, corpus).validation_rows
    assert len(rows) > 4
    assert read == [corpus.split("train").texts(some_rows(rows, 4, seed=0))]


def test_train_reranker_refuses_labels_that_the_corpus_does_not_know(tmp_path: Path) -> None:
    corpus = planted_corpus(tmp_path, num_queries=200, num_labels=NUM_LABELS)
    bundle = write_memory_of(corpus, tmp_path / "bundle", dim=8, seed=0)
    add_labels(bundle, [NewLabel("new", "w1x0")])
    model = str(write_bert(tmp_path / "model", WORDS))
    with pytest.raises(DataError, match="labels joined or were removed"):
        train_reranker.train_reranker(
            str(bundle), corpus, tmp_path / "out", RerankTraining(model=model)
        )
