"""Hard negatives that are probably right answers are left out, and counted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from corpora import planted_corpus
from models import write_cross_encoder
from shell import run_command, set_options

from xmcray.data.batches import DataConfig, TrainingData
from xmcray.errors import ConfigError
from xmcray.negatives.false_negatives import best_candidates, false_negatives, open_teacher
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.refresh import RefreshSpec, run_version
from xmcray.negatives.version_folder import QueryBlock
from xmcray.nn.cross_encoder import CrossEncoder
from xmcray.retrieval.retriever import Retriever
from xmcray.types import Ragged, TopLabels

NONE = np.float32(-np.inf)
HARD = 3
SMALL = (
    "encoder.dim=8",
    "encoder.bigram_buckets=0",
    "optim.batch_size=16",
    "optim.epochs=3",
    "negatives.start_epoch=2",
    "negatives.hard=3",
    "negatives.uniform=5",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    folder = tmp_path_factory.mktemp("false")
    return TrainingData(planted_corpus(folder), DataConfig(augment_with_labels=False))


def train(folder: Path, corpus: Path, *settings: str) -> int:
    options = set_options([*SMALL, *settings])
    return run_command(
        f"train astra --data {corpus} --out {folder} --workers 0 --no-evaluate {options}"
    )


def left_out(run: Path) -> int | None:
    """What the last record of a training says."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    number: int | None = steps[-1]["negatives_left_out"]
    return number


def test_what_is_left_out_of_four_queries() -> None:
    ids = np.array([[4, 0, 1, 2], [5, 0, 1, -1], [0, 1, 2, 3], [3, 2, 1, 0]])
    scores = np.array(
        [
            # Label 0 is positive: 4 is above it, 1 is above 0.9 of it, 2 is not.
            [1.1, 1.0, 0.95, 0.85],
            # The best of two positives counts; 5 is excluded, and -1 is no label.
            [3.0, 2.0, 1.0, NONE],
            # No positive is among the candidates.
            [9.0, 8.0, 7.0, 6.0],
            # A share of a score below 0 would mean nothing.
            [-0.1, -0.2, -0.3, -0.4],
        ],
        np.float32,
    )
    positives = Ragged.from_rows([[0], [0, 1], [5], [2]])
    excluded = Ragged.from_rows([[], [5], [], []])
    queries = np.arange(4)
    is_false = false_negatives(queries, TopLabels(ids, scores), positives, excluded, 0.9, 6, None)
    assert is_false.astype(int).tolist() == [[1, 0, 1, 0], [0] * 4, [0] * 4, [0] * 4]


def test_the_best_candidates_are_the_same_from_any_number_of_shards() -> None:
    ids = np.array([[7, 3, 5, -1], [1, 0, -1, -1]])
    scores = np.array([[0.5, 0.9, 0.5, NONE], [0.1, 0.2, NONE, NONE]], np.float32)
    best = best_candidates(ids, scores, np.array([2, 3]))
    assert best.ids.tolist() == [[3, 5, -1], [0, 1, -1]]
    wider = np.concatenate([ids, np.array([[6, 4], [2, 3]])], axis=1)
    more = np.concatenate([scores, np.array([[0.1, 0.2], [NONE, NONE]], np.float32)], axis=1)
    assert best_candidates(wider, more, np.array([2, 3])).ids.tolist() == best.ids.tolist()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_version_leaves_out_what_scores_like_a_positive(
    data: TrainingData, tmp_path: Path, num_shards: int
) -> None:
    """Each label has its own axis, so the query's number there is its score."""
    ids = data.query_ids[:]
    positives, excluded = data.positives(ids), data.excluded(ids)
    vectors = 0.5 * np.random.default_rng(0).random((len(ids), data.num_labels), np.float32)
    hidden = []
    for i in range(len(ids)):
        vectors[i, positives[i]] = 1.0
        others = np.setdiff1d(np.arange(data.num_labels), [*positives[i], *excluded[i]])
        hidden.append(int(others[i % len(others)]))
        vectors[i, hidden[i]] = 0.96
    folder = Ledger(tmp_path).version(0)
    extra = positives.lengths + excluded.lengths
    folder.write_queries(3, 0, QueryBlock(ids, vectors, extra))
    folder.publish(0, 1, 4)
    folder.write_rows(0, np.eye(data.num_labels, dtype=np.float32))
    config = NegativesConfig(hard=HARD, start_epoch=2, index="Flat", max_relative_score=0.95)
    run_version(folder, data, RefreshSpec(num_shards, config, 0))
    shortlist = folder.shortlist()
    assert shortlist.left_out == len(ids)
    for i, query_id in enumerate(ids):
        allowed = np.setdiff1d(np.arange(data.num_labels), [*positives[i], *excluded[i], hidden[i]])
        ranking = allowed[np.argsort(-vectors[i, allowed])]
        assert shortlist.labels[query_id].tolist() == ranking[:HARD].tolist()


def test_a_training_reports_what_it_left_out_and_a_teacher_decides(
    data: TrainingData, tmp_path: Path
) -> None:
    corpus = data.corpus.path
    share = "negatives.max_relative_score=0.5"
    assert train(tmp_path / "own", corpus, share) == 0
    teacher = f"negatives.teacher={tmp_path / 'own' / 'bundle'}"
    assert train(tmp_path / "taught", corpus, share, teacher) == 0
    for name in ("own", "taught"):
        number = left_out(tmp_path / name)
        assert number is not None
        assert number > 0
    assert train(tmp_path / "wrong", corpus, teacher) == 2
    wrong = f"negatives.teacher={tmp_path}"
    assert train(tmp_path / "wrong", corpus, share, wrong) == 2
    assert not (tmp_path / "wrong").exists()


def test_a_teacher_scores_as_its_bundle_does(data: TrainingData, tmp_path: Path) -> None:
    assert train(tmp_path / "run", data.corpus.path) == 0
    assert left_out(tmp_path / "run") is None
    bundle = str(tmp_path / "run" / "bundle")
    augmented = TrainingData(data.corpus, DataConfig(augment_with_labels=True))
    # A training query and the text of internal label 2.
    query_ids = np.array([5, augmented.num_train + 2])
    scores = open_teacher(bundle, augmented).scores(query_ids, np.array([[4, 9], [-1, 0]]))
    retriever = Retriever.load(bundle)
    order = data.corpus.label_order
    text = data.corpus.split("train").texts(np.array([5]))[0]
    label_text = data.corpus.label_texts(order[[2]])[0]
    vectors = retriever.encode([text, label_text])
    rows = retriever.labels.vectors_of(order[[4, 9, 0]])
    expected = vectors @ rows.T
    np.testing.assert_allclose(scores[0], expected[0, :2], rtol=1e-5)
    assert scores[1, 0] == NONE
    np.testing.assert_allclose(scores[1, 1], expected[1, 2], rtol=1e-5)
    other = TrainingData(planted_corpus(tmp_path, num_labels=11), DataConfig())
    with pytest.raises(ConfigError, match="has 23 labels, expected the 11 of the corpus"):
        open_teacher(bundle, other)


def test_a_cross_encoder_is_a_teacher(data: TrainingData, tmp_path: Path) -> None:
    folder = write_cross_encoder(tmp_path / "model", ["w0x0", "w1x0", "w2x0"])
    scores = open_teacher(str(folder), data).scores(np.array([5, 6]), np.array([[4, 9], [-1, 0]]))
    order = data.corpus.label_order
    queries = data.corpus.split("train").texts(np.array([5, 5, 6]))
    label_texts = data.corpus.label_texts(order[[4, 9, 0]])
    outputs = CrossEncoder.load(str(folder)).score(list(zip(queries, label_texts, strict=True)))
    assert scores[1, 0] == NONE
    np.testing.assert_allclose(scores[[0, 0, 1], [0, 1, 1]], np.exp(outputs), rtol=1e-5)

    settings = ("negatives.max_relative_score=0.5", f"negatives.teacher={folder}")
    assert train(tmp_path / "run", data.corpus.path, *settings) == 0
    number = left_out(tmp_path / "run")
    assert number is not None
    assert number > 0
