"""What is measured or chosen on a corpus of which labels were removed: they are no answers, no positives."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import write_memory_of
from corpora import planted_corpus
from models import write_bert
from torch import Tensor

from xmcray.data.corpus import KIND, REMOVED, Corpus
from xmcray.evaluation.metrics import Metrics
from xmcray.evaluation.predictions import write_predictions
from xmcray.nn.cross_encoder import CrossEncoder, Pair
from xmcray.retrieval import memory as memories
from xmcray.retrieval.parts import MemberConfig, PartsConfig
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import MemoryConfig
from xmcray.retrieval.word_index import WordIndex
from xmcray.storage.manifest import finish_manifest
from xmcray.training import fuse as fusing
from xmcray.training.fuse import write_parts
from xmcray.training.held_out import held_out_by, without_voters
from xmcray.training.outcome import measure, nearest_queries, stored_answers
from xmcray.training.part_weights import WeightSearch
from xmcray.training.train_reranker import RerankTraining, train_reranker
from xmcray.tuning.auto_results import evaluate_rows
from xmcray.tuning.inference import sweep_bundle
from xmcray.tuning.space import Choice
from xmcray.types import Ragged, TopLabels

NUM_LABELS = 23
REMOVED_LABELS = np.arange(0, NUM_LABELS, 3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    whole = planted_corpus(folder, num_queries=200, num_labels=NUM_LABELS)
    shutil.copytree(whole.path, folder / "removed")
    np.save(folder / "removed" / REMOVED, REMOVED_LABELS)
    finish_manifest(folder / "removed", KIND, {}, {})
    return Corpus.open(folder / "removed")


def test_weights_of_a_fused_bundle_are_chosen_without_them(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truths: list[Ragged] = []

    class NotingSearch(WeightSearch):
        def __init__(self, corpus: Corpus, candidates: Any, truth: Ragged, *more: Any) -> None:
            truths.append(truth)
            super().__init__(corpus, candidates, truth, *more)

    monkeypatch.setattr(fusing, "WeightSearch", NotingSearch)
    source = write_memory_of(corpus, tmp_path / "source", dim=8, seed=0)

    fusing.fuse([str(source)], corpus, tmp_path / "fused")

    (truth,) = truths
    assert len(truth.values) > 0
    assert not np.isin(truth.values, REMOVED_LABELS).any()


def test_queries_all_of_whose_labels_were_removed_are_not_remembered(
    corpus: Corpus, tmp_path: Path
) -> None:
    bundle = write_memory_of(corpus, tmp_path / "source", dim=8, seed=0)
    config = PartsConfig(members=(MemberConfig(name="source", memory=1.0),), words=1.0)

    write_parts([bundle], corpus, tmp_path / "fused", config)

    train = corpus.split("train")
    positives = train.positives(np.arange(len(train)))
    kept = [row for row, labels in enumerate(positives) if set(labels) - set(REMOVED_LABELS)]
    assert len(kept) < np.count_nonzero(train.num_positives())
    for name in ("source", "fused"):
        retriever = Retriever.load(tmp_path / name)
        (memory,) = [member.memory for member in retriever.members if member.memory is not None]
        expected = dict(enumerate(train.texts(np.array(kept))))
        names = memory.queries.names(range(len(memory.positives)))
        assert {row: text for row, (_, text) in names.items()} == expected
    words = WordIndex.load(tmp_path / "fused", len(kept), NUM_LABELS, ("query",))
    assert words.queries.shape[1] == len(kept)


def test_a_memory_of_an_earlier_release_hides_the_right_queries(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = corpus.split("train")
    all_rows = np.flatnonzero(train.num_positives())
    with monkeypatch.context() as earlier:
        earlier.setattr(memories, "remembered_rows", lambda corpus: all_rows)
        bundle = write_memory_of(corpus, tmp_path / "source", dim=8, seed=0)
    rows = held_out_by(str(bundle), {}, corpus).validation_rows

    view = without_voters(Retriever.load(bundle), corpus, rows)

    assert view.memory is not None
    np.testing.assert_array_equal(all_rows[view.memory.queries.hidden], rows)


def test_a_reranker_does_not_learn_them(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = write_memory_of(corpus, tmp_path / "bundle", dim=8, seed=0)
    label_texts: set[str] = set()
    forward = CrossEncoder.forward

    def noting(self: CrossEncoder, pairs: Sequence[Pair]) -> Tensor:
        label_texts.update(text for _, text in pairs)
        return forward(self, pairs)

    monkeypatch.setattr(CrossEncoder, "forward", noting)
    model = str(write_bert(tmp_path / "model", ["w1x0"]))
    settings = {"model": model, "negatives": 2, "candidates": 6, "max_len": 16}
    config = RerankTraining(**settings)

    train_reranker(str(bundle), corpus, tmp_path / "out", config)

    assert label_texts
    assert label_texts.isdisjoint(corpus.label_texts(REMOVED_LABELS))


def test_the_nearest_training_queries_do_not_answer_with_them(corpus: Corpus) -> None:
    search = nearest_queries(corpus, "test")
    answers = search(np.arange(corpus.card.num_test)).ids
    assert (answers >= 0).any()
    assert not np.isin(answers, REMOVED_LABELS).any()


def test_a_file_of_predictions_does_not_answer_with_them(corpus: Corpus, tmp_path: Path) -> None:
    search = nearest_queries(corpus, "test")
    answers = search(np.arange(corpus.card.num_test))
    # The file scores them above all other labels.
    removed_ids = np.tile(REMOVED_LABELS, (len(answers.ids), 1))
    removed_scores = np.full(removed_ids.shape, 1e6, np.float32)
    ids = np.hstack([removed_ids, answers.ids])
    scores = np.hstack([removed_scores, answers.scores])
    path = write_predictions(tmp_path / "p.npz", [TopLabels(ids, scores)], NUM_LABELS)

    stored = stored_answers(str(path), corpus, "test")

    expected = measure(search, corpus, "test").metrics
    assert measure(stored, corpus, "test").metrics == expected


def test_a_sweep_of_a_memory_measures_what_its_bundle_answers(
    corpus: Corpus, tmp_path: Path
) -> None:
    # With one key, the nearest of the other labels follow it.
    bundle = write_memory_of(corpus, tmp_path / "source", dim=8, seed=0)
    space = {"memory.weight": Choice(values=(0,)), "memory.keys": Choice(values=(1,))}

    swept = sweep_bundle(str(bundle), corpus, space, 1, 0, "P@1")

    retriever = Retriever.load(bundle)
    rows = held_out_by(str(bundle), {}, corpus).validation_rows
    train = corpus.split("train")
    config = MemoryConfig(weight=0, keys=1)
    k = retriever.num_labels
    top = retriever.top_labels(train.tokens(rows), k, exclude=train.filters(rows), memory=config)
    metrics = Metrics.of_corpus(corpus)
    metrics.update(top, corpus.answerable(train.positives(rows)))
    assert swept.settings[0].metrics == metrics.result()


def test_they_belong_to_no_segment_of_an_evaluation(corpus: Corpus) -> None:
    evaluation = measure(nearest_queries(corpus, "test"), corpus, "test")
    num_labels = sum(segment["labels"] for segment in evaluation.segments)
    assert num_labels == NUM_LABELS - len(REMOVED_LABELS)


def test_auto_measures_as_evaluate_does(corpus: Corpus) -> None:
    search = nearest_queries(corpus, "test")
    rows = np.arange(corpus.card.num_test)
    measured = evaluate_rows(search, corpus, rows)
    assert measured.metrics == measure(search, corpus, "test").metrics
