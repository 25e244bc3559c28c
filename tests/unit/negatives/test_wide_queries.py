"""A query with many positives makes its own list of hits long, and no other one."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from xmcray.negatives.hits import Hits
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.refresh import RefreshSpec, merge_blocks, search_shard
from xmcray.negatives.version_folder import QueryBlock, VersionFolder
from xmcray.types import Ragged

NUM_LABELS = 3000
NUM_QUERIES = 2000
NUM_SHARDS = 2
CONFIG = NegativesConfig(hard=4, recall_queries=0)
SPEC = RefreshSpec(NUM_SHARDS, CONFIG, 0)
# The first query has a third of all labels.
POSITIVES = Ragged.from_rows([np.arange(1000), *[[query] for query in range(1, NUM_QUERIES)]])


@pytest.fixture
def version(tmp_path: Path) -> VersionFolder:
    rng = np.random.default_rng(0)
    folder = Ledger(tmp_path).version(0)
    vectors = rng.standard_normal((NUM_QUERIES, 8), np.float32)
    folder.write_queries(1, 0, QueryBlock(np.arange(NUM_QUERIES), vectors, POSITIVES.lengths))
    folder.write_rows(0, rng.standard_normal((NUM_LABELS, 8), np.float32))
    return folder


def merged(version: VersionFolder) -> np.ndarray:
    """The hard negatives that are merged from what the shards found."""
    data: Any = SimpleNamespace(
        num_labels=NUM_LABELS,
        positives=POSITIVES.take,
        excluded=lambda ids: Ragged.empty(len(ids)),
    )
    for shard in range(NUM_SHARDS):
        merge_blocks(version, shard, data, SPEC)
    return version.read_merged(NUM_SHARDS, version.query_blocks[0]).labels


def expected(version: VersionFolder) -> np.ndarray:
    """The best labels but positives, of all scores."""
    vectors = version.read_queries(version.query_blocks[0]).vectors
    score_QL = vectors @ version.read_rows(0, NUM_LABELS).T
    score_QL[POSITIVES.row_ids, POSITIVES.values] = -np.inf
    return np.argsort(-score_QL, axis=1)[:, : CONFIG.hard]


def test_hits_take_no_room_for_the_longest_list_of_others(version: VersionFolder) -> None:
    tracemalloc.start()
    for shard in range(NUM_SHARDS):
        search_shard(version, shard, NUM_LABELS, SPEC)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    files = (version.path / "found").rglob("*.safetensors")
    file_bytes = sum(file.stat().st_size for file in files)
    # Padded to 1024 labels and 4 hard ones, they would take 12 bytes for each of 4 million.
    assert file_bytes < 1e6
    assert peak_bytes < 12e6
    np.testing.assert_array_equal(merged(version), expected(version))


def test_tables_of_an_earlier_release_are_merged(version: VersionFolder) -> None:
    block = version.query_blocks[0]
    for shard, part in enumerate(SPEC.parts(NUM_LABELS)):
        search_shard(version, shard, NUM_LABELS, SPEC)
        labels = version.read_hits(part, block).labels
        hits = version.read_hits(part, block)
        ids = labels.padded()
        scores = np.full(ids.shape, -np.inf, np.float32)
        scores[labels.row_ids, labels.places] = hits.scores
        (path,) = (version.path / "found" / f"{part.start:010d}-{part.stop:010d}").iterdir()
        save_file({"ids": ids, "scores": scores}, path)

    np.testing.assert_array_equal(merged(version), expected(version))


def test_a_shard_without_labels_finds_nothing() -> None:
    hits = Hits(Ragged.empty(3), np.empty(0, np.float32))
    assert hits.table(np.array([0, 2])).ids.shape == (2, 0)
