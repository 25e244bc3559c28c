"""Measuring a bundle, whose answers may also go to a file."""

from __future__ import annotations

import functools
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import write_memory_of

from xmcray.data.corpus import Corpus
from xmcray.evaluation.evaluate import Search, evaluate
from xmcray.evaluation.predictions import read_predictions
from xmcray.retrieval.retriever import Retriever
from xmcray.training import outcome
from xmcray.types import Int64Array, TopLabels

searcher = outcome.searcher


def test_answers_that_are_in_the_file_do_not_stay_in_memory(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[weakref.ref[Int64Array]] = []
    num_held: list[int] = []

    def noting(*arguments: Any) -> Search:
        search = searcher(*arguments)

        def search_and_note(rows: Int64Array) -> TopLabels:
            num_held.append(sum(ids() is not None for ids in answers))
            top = search(rows)
            answers.append(weakref.ref(top.ids))
            return top

        return search_and_note

    monkeypatch.setattr(outcome, "searcher", noting)
    monkeypatch.setattr(outcome, "evaluate", functools.partial(evaluate, chunk=4))
    retriever = Retriever.load(write_memory_of(corpus, tmp_path / "bundle", dim=8, seed=0))
    file = tmp_path / "p.npz"

    outcome.measure_bundle(retriever, corpus, "test", predictions=str(file))

    assert len(num_held) > 3
    assert max(num_held) <= 1, "those of the chunk before"
    num_queries = corpus.card.num_test
    matrix = read_predictions(file, num_queries, corpus.card.num_labels)
    assert np.diff(matrix.indptr).min() > 0
