"""Vectors in several files, each with its index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from xmcray.errors import ConfigError
from xmcray.retrieval import index_tuning
from xmcray.retrieval.exact import exact_search
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.shards import ShardBuild, ShardedIndex, write_shards

ROWS_PER_SHARD = 500
DIM = 8


def rows_of(num_rows: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    return generator.standard_normal((num_rows, DIM), dtype=np.float32)


@pytest.mark.parametrize("factory", ["IVF16,Flat", "PQ4"])
def test_a_last_shard_with_too_few_rows_for_an_index_is_searched_without(
    factory: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of(1003)
    build = ShardBuild(spec=IndexSpec(factory=factory), shard_rows=ROWS_PER_SHARD)
    shards, dim = write_shards(tmp_path / "bundle", [rows], len(rows), build)
    assert [shard.indexed for shard in shards] == [True, True, False]
    assert "the last 3 vectors are searched without an index" in caplog.text
    index = ShardedIndex.load(tmp_path / "bundle", shards, dim, threads=1)
    # The rows of the last shard are found among those of all shards.
    queries = rows[-3:]
    expected = exact_search(rows, queries, 1)
    np.testing.assert_array_equal(index.search(queries, 1).ids, expected.ids)


def test_a_factory_that_does_not_fit_the_first_shard_is_refused(tmp_path: Path) -> None:
    rows = rows_of(503)
    build = ShardBuild(spec=IndexSpec(factory="IVF501,Flat"), shard_rows=ROWS_PER_SHARD)
    with pytest.raises(ConfigError, match="'IVF501,Flat' does not fit"):
        write_shards(tmp_path / "bundle", [rows], len(rows), build)


@pytest.mark.parametrize("ef_search", [0, 50])
def test_a_missed_recall_is_warned_of_unless_the_breadth_was_given(
    ef_search: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(index_tuning, "BREADTH_STEPS", (50,))
    rows = np.random.default_rng(0).standard_normal((1000, 16), dtype=np.float32)
    spec = IndexSpec(factory="HNSW4", recall=0.9999, ef_search=ef_search)
    write_shards(tmp_path / "bundle", [rows], len(rows), ShardBuild(spec=spec))
    assert ("index.recall=0.9999 wanted more" in caplog.text) == (ef_search == 0)
