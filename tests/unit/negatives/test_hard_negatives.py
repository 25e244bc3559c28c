"""Hard negatives of a small version: the best labels of all shards that are allowed.

The expected ones come from a plain sort.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from corpora import planted_corpus

from xmcray.data.batches import DataConfig, TrainingData
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.refresh import RefreshSpec, best_allowed, run_version
from xmcray.negatives.version_folder import QueryBlock, VersionFolder
from xmcray.types import Ragged

HARD = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    corpus = planted_corpus(tmp_path_factory.mktemp("hard"))
    return TrainingData(corpus, DataConfig(augment_with_labels=False))


def test_the_best_allowed_labels_of_two_queries() -> None:
    candidates = np.array(
        [
            [3, 0, 2, 1],
            [4, 1, -1, 0],
        ]
    )
    scores = np.array(
        [
            [0.5, 0.9, 0.5, 0.1],
            [0.2, 0.7, 9.0, 0.3],
        ],
        np.float32,
    )
    # Label 0 for query 0, and label 1 for query 1.
    forbidden = [
        Ragged.from_rows([[0], []]),
        Ragged.from_rows([[], [1]]),
    ]
    nothing = [Ragged.empty(2)]

    allowed = best_allowed(
        candidates,
        scores,
        forbidden,
        num_labels=5,
        width=3,
    )
    everything = best_allowed(
        candidates,
        scores,
        nothing,
        num_labels=5,
        width=5,
    )

    # Equal scores are decided by the lower label, and -1 is no label.
    assert allowed.tolist() == [
        [2, 3, 1],
        [0, 4, -1],
    ]
    assert everything.tolist() == [
        [0, 2, 3, 1, -1],
        [1, 0, 4, -1, -1],
    ]


def write_version(
    folder: VersionFolder,
    ids: np.ndarray,
    query_ND: np.ndarray,
    label_LD: np.ndarray,
    extra: np.ndarray,
) -> None:
    """Vectors as two ranks would write them, each with half of the queries."""
    half = len(ids) // 2
    for rank, part in enumerate([slice(0, half), slice(half, None)]):
        block = QueryBlock(ids[part], query_ND[part], extra[part])
        folder.write_queries(3, rank, block)
        folder.publish(rank, 2, 4)
    folder.write_rows(0, label_LD)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_version_has_the_best_labels_that_are_allowed(
    data: TrainingData,
    tmp_path: Path,
    num_shards: int,
) -> None:
    """Each query is closest to the labels that it may not have."""
    ids = data.query_ids[:]
    num_queries = len(ids)
    positives = data.positives(ids)
    excluded = data.excluded(ids)
    assert positives.lengths.max() >= HARD
    # Label vectors are axes, so that a query's vector is its scores.
    label_LD = np.eye(data.num_labels, dtype=np.float32)
    rng = np.random.default_rng(0)
    score_NL = rng.random((num_queries, data.num_labels)).astype(np.float32)
    for query in range(num_queries):
        score_NL[query, positives[query]] += 2
        score_NL[query, excluded[query]] += 3

    folder = Ledger(tmp_path).version(0)
    extra = positives.lengths + excluded.lengths
    write_version(
        folder,
        ids,
        score_NL,
        label_LD,
        extra,
    )
    config = NegativesConfig(
        hard=HARD,
        start_epoch=2,
        index="Flat",
        recall_queries=10,
    )
    run_version(folder, data, RefreshSpec(num_shards, config, 0))

    shortlist = folder.shortlist()
    for query, query_id in enumerate(ids):
        ranking = np.argsort(-score_NL[query])
        forbidden = [*positives[query], *excluded[query]]
        is_allowed = ~np.isin(ranking, forbidden)
        expected = ranking[is_allowed][:HARD]
        assert shortlist.labels[query_id].tolist() == expected.tolist()
    all_ids = np.arange(data.num_query_ids)
    others = np.setdiff1d(all_ids, ids)
    assert (shortlist.labels[others] == -1).all()
    assert shortlist.index_recall == 1.0, "an exact index finds all exact neighbours"


def test_the_recall_counts_no_more_labels_than_there_are(
    data: TrainingData,
    tmp_path: Path,
) -> None:
    """An exact index finds all labels, also if more hard negatives are asked for."""
    folder = written_version(data, tmp_path)
    config = NegativesConfig(
        hard=data.num_labels + 3,
        start_epoch=2,
        index="Flat",
        recall_queries=10,
    )

    run_version(folder, data, RefreshSpec(1, config, 0))

    assert folder.shortlist().index_recall == 1.0


def test_a_version_may_have_clusters_alone(data: TrainingData, tmp_path: Path) -> None:
    folder = written_version(data, tmp_path)
    config = NegativesConfig(
        hard=0,
        cluster_size=4,
        start_epoch=2,
    )

    run_version(folder, data, RefreshSpec(1, config, 0))

    assert folder.complete
    assert folder.has_clusters


def written_version(data: TrainingData, path: Path) -> VersionFolder:
    """A version whose vectors of queries and labels are random."""
    ids = data.query_ids[:]
    rng = np.random.default_rng(0)
    folder = Ledger(path).version(0)
    write_version(
        folder,
        ids,
        rng.random((len(ids), 8)).astype(np.float32),
        rng.random((data.num_labels, 8)).astype(np.float32),
        np.zeros(len(ids), np.int64),
    )
    return folder
