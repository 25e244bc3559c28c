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
    corpus = planted_corpus(tmp_path_factory.mktemp("false"))
    return TrainingData(corpus, DataConfig(augment_with_labels=False))


def train(folder: Path, corpus: Path, *settings: str) -> int:
    options = set_options([*SMALL, *settings])
    return run_command(
        f"train astra --data {corpus} --out {folder} --workers 0 --no-evaluate {options}"
    )


def left_out(run: Path) -> int | None:
    """What the last record of a training says."""
    number: int | None = None
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            number = record["negatives_left_out"]
    return number


def assert_some_left_out(run: Path) -> None:
    number = left_out(run)
    assert number is not None
    assert number > 0


def test_what_is_left_out_of_four_queries() -> None:
    ids = np.array(
        [
            [4, 0, 1, 2],
            [5, 0, 1, -1],
            [0, 1, 2, 3],
            [3, 2, 1, 0],
        ]
    )
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

    is_false = false_negatives(
        query_ids=np.arange(4),
        best=TopLabels(ids, scores),
        positives=Ragged.from_rows([[0], [0, 1], [5], [2]]),
        excluded=Ragged.from_rows([[], [5], [], []]),
        share=0.9,
        num_labels=6,
        teacher=None,
    )

    assert is_false.astype(int).tolist() == [
        [1, 0, 1, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]


def test_the_best_candidates_are_the_same_from_any_number_of_shards() -> None:
    num_best = np.array([2, 3])
    ids = np.array(
        [
            [7, 3, 5, -1],
            [1, 0, -1, -1],
        ]
    )
    scores = np.array(
        [
            [0.5, 0.9, 0.5, NONE],
            [0.1, 0.2, NONE, NONE],
        ],
        np.float32,
    )
    best = best_candidates(ids, scores, num_best)
    assert best.ids.tolist() == [
        [3, 5, -1],
        [0, 1, -1],
    ]

    # Candidates of another shard that are no better.
    more_ids = np.array([[6, 4], [2, 3]])
    more_scores = np.array([[0.1, 0.2], [NONE, NONE]], np.float32)
    of_two_shards = best_candidates(
        np.concatenate([ids, more_ids], axis=1),
        np.concatenate([scores, more_scores], axis=1),
        num_best,
    )
    assert of_two_shards.ids.tolist() == best.ids.tolist()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_version_leaves_out_what_scores_like_a_positive(
    data: TrainingData,
    tmp_path: Path,
    num_shards: int,
) -> None:
    """Each label has its own axis, so the query's number there is its score."""
    ids = data.query_ids[:]
    num_queries = len(ids)
    all_labels = np.arange(data.num_labels)
    positives = data.positives(ids)
    excluded = data.excluded(ids)
    rng = np.random.default_rng(0)
    score_NL = 0.5 * rng.random((num_queries, data.num_labels), np.float32)
    # One label of each query scores nearly as high as its positives.
    similar = []
    for query in range(num_queries):
        score_NL[query, positives[query]] = 1.0
        own = [*positives[query], *excluded[query]]
        others = np.setdiff1d(all_labels, own)
        label = int(others[query % len(others)])
        score_NL[query, label] = 0.96
        similar.append(label)

    folder = Ledger(tmp_path).version(0)
    extra = positives.lengths + excluded.lengths
    folder.write_queries(3, 0, QueryBlock(ids, score_NL, extra))
    folder.publish(0, 1, 4)
    folder.write_rows(0, np.eye(data.num_labels, dtype=np.float32))
    config = NegativesConfig(
        hard=HARD,
        start_epoch=2,
        index="Flat",
        max_relative_score=0.95,
    )
    run_version(folder, data, RefreshSpec(num_shards, config, 0))

    shortlist = folder.shortlist()
    assert shortlist.left_out == num_queries
    for query, query_id in enumerate(ids):
        forbidden = [*positives[query], *excluded[query], similar[query]]
        allowed = np.setdiff1d(all_labels, forbidden)
        order = np.argsort(-score_NL[query, allowed])
        expected = allowed[order][:HARD]
        assert shortlist.labels[query_id].tolist() == expected.tolist()


def test_a_training_reports_what_it_left_out_and_a_teacher_decides(
    data: TrainingData, tmp_path: Path
) -> None:
    corpus = data.corpus.path
    own = tmp_path / "own"
    taught = tmp_path / "taught"
    wrong = tmp_path / "wrong"
    share = "negatives.max_relative_score=0.5"
    teacher = f"negatives.teacher={own}/bundle"
    no_teacher = f"negatives.teacher={tmp_path}"

    assert train(own, corpus, share) == 0
    assert_some_left_out(own)
    assert train(taught, corpus, share, teacher) == 0
    assert_some_left_out(taught)

    # A teacher without a share, and a folder that is no teacher.
    assert train(wrong, corpus, teacher) == 2
    assert train(wrong, corpus, share, no_teacher) == 2
    assert not wrong.exists()


def test_a_teacher_scores_as_its_bundle_does(data: TrainingData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, data.corpus.path) == 0
    assert left_out(run) is None
    bundle = str(run / "bundle")
    augmented = TrainingData(data.corpus, DataConfig(augment_with_labels=True))
    # A training query and the text of internal label 2.
    query_ids = np.array([5, augmented.num_train + 2])
    labels = np.array([[4, 9], [-1, 0]])

    scores = open_teacher(bundle, augmented).scores(query_ids, labels)

    retriever = Retriever.load(bundle)
    order = data.corpus.label_order
    (text,) = data.corpus.split("train").texts(np.array([5]))
    (label_text,) = data.corpus.label_texts(order[[2]])
    query_vector, label_vector = retriever.encode([text, label_text])
    row_4, row_9, row_0 = retriever.labels.vectors_of(order[[4, 9, 0]])
    expected = [
        [query_vector @ row_4, query_vector @ row_9],
        [NONE, label_vector @ row_0],
    ]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)

    other_corpus = planted_corpus(tmp_path, num_labels=11)
    other = TrainingData(other_corpus, DataConfig())
    with pytest.raises(ConfigError, match="has 23 labels, expected the 11 of the corpus"):
        open_teacher(bundle, other)


def test_a_cross_encoder_is_a_teacher(data: TrainingData, tmp_path: Path) -> None:
    folder = str(write_cross_encoder(tmp_path / "model", ["w0x0", "w1x0", "w2x0"]))
    query_ids = np.array([5, 6])
    labels = np.array([[4, 9], [-1, 0]])

    scores = open_teacher(folder, data).scores(query_ids, labels)

    query_5, query_6 = data.corpus.split("train").texts(query_ids)
    order = data.corpus.label_order
    label_4, label_9, label_0 = data.corpus.label_texts(order[[4, 9, 0]])
    pairs = [
        (query_5, label_4),
        (query_5, label_9),
        (query_6, label_0),
    ]
    of_4, of_9, of_0 = np.exp(CrossEncoder.load(folder).score(pairs))
    expected = [
        [of_4, of_9],
        [NONE, of_0],
    ]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)

    status = train(
        tmp_path / "run",
        data.corpus.path,
        "negatives.max_relative_score=0.5",
        f"negatives.teacher={folder}",
    )
    assert status == 0
    assert_some_left_out(tmp_path / "run")
