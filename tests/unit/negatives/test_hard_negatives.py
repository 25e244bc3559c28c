"""Hard negatives of a small version: the best labels of all shards that are allowed, by a plain sort."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from corpora import planted_corpus

from xmcray.data.batches import DataConfig, TrainingData
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.refresh import RefreshSpec, best_allowed, run_version
from xmcray.negatives.version_folder import QueryBlock
from xmcray.types import Ragged

HARD = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    corpus = planted_corpus(tmp_path_factory.mktemp("hard"))
    return TrainingData(corpus, DataConfig(augment_with_labels=False))


def test_the_best_allowed_labels_of_two_queries() -> None:
    candidates = np.array([[3, 0, 2, 1], [4, 1, -1, 0]])
    scores = np.array([[0.5, 0.9, 0.5, 0.1], [0.2, 0.7, 9.0, 0.3]], np.float32)
    forbidden = [Ragged.from_rows([[0], []]), Ragged.from_rows([[], [1]])]
    best = best_allowed(candidates, scores, forbidden, num_labels=5, width=3)
    # Equal scores by the lower label; 0 and 1 are forbidden, and -1 is no label.
    assert best.tolist() == [[2, 3, 1], [0, 4, -1]]
    everything = best_allowed(candidates, scores, [Ragged.empty(2)], num_labels=5, width=5)
    assert everything.tolist() == [[0, 2, 3, 1, -1], [1, 0, 4, -1, -1]]


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_version_has_the_best_labels_that_are_allowed(
    data: TrainingData, tmp_path: Path, num_shards: int
) -> None:
    """Each query is closest to the labels that it may not have."""
    ids = data.query_ids[:]
    rows_LD = np.eye(data.num_labels, dtype=np.float32)
    random = np.random.default_rng(0)
    vectors = random.random((len(ids), data.num_labels)).astype(np.float32)
    positives, excluded = data.positives(ids), data.excluded(ids)
    for i in range(len(ids)):
        vectors[i, positives[i]] += 2
        vectors[i, excluded[i]] += 3
    assert positives.lengths.max() >= HARD

    folder = Ledger(tmp_path).version(0)
    extra = positives.lengths + excluded.lengths
    half = len(ids) // 2
    for rank, part in enumerate((slice(0, half), slice(half, None))):
        folder.write_queries(3, rank, QueryBlock(ids[part], vectors[part], extra[part]))
        folder.publish(rank, 2, 4)
    folder.write_rows(0, rows_LD)
    config = NegativesConfig(hard=HARD, start_epoch=2, index="Flat", recall_queries=10)
    run_version(folder, data, RefreshSpec(num_shards, config, 0))

    shortlist = folder.shortlist()
    for i, query_id in enumerate(ids):
        forbidden = {*positives[i].tolist(), *excluded[i].tolist()}
        ranking = [int(label) for label in np.argsort(-vectors[i]) if label not in forbidden]
        assert shortlist.labels[query_id].tolist() == ranking[:HARD]
    others = np.setdiff1d(np.arange(data.num_query_ids), ids)
    assert (shortlist.labels[others] == -1).all()
    assert shortlist.index_recall == 1.0, "an exact index finds all exact neighbours"
