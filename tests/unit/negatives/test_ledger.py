"""What a version's folder promises to readers while ranks still write into it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from refreshers import few_queries

from xmcray.errors import ShortlistError, StorageError
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.refresh import RefreshSpec, run_version
from xmcray.negatives.version_folder import QueryBlock, VersionFolder
from xmcray.storage.manifest import hash_file


def completed(ledger: Ledger, version: int) -> VersionFolder:
    """A finished version of one query, whose nearest label has the number of the version."""
    folder = ledger.version(version)
    vectors = np.eye(4, dtype=np.float32)
    block = QueryBlock(np.array([0]), vectors[[version]], np.array([0]))
    folder.write_queries(10 * version - 1, 0, block)
    folder.write_rows(0, vectors)
    folder.publish(0, 1, 10 * version)
    config = NegativesConfig(hard=1, start_epoch=2, index="Flat", recall_queries=0)
    run_version(folder, few_queries(1, num_labels=4), RefreshSpec(1, config, 0))
    return folder


def test_a_version_is_published_once_every_rank_has_written(tmp_path: Path) -> None:
    folder = Ledger(tmp_path).version(0)
    assert not folder.published
    folder.publish(1, 3, 7)
    folder.publish(0, 3, 7)
    assert not folder.published
    folder.publish(2, 3, 7)
    assert folder.published


def test_rows_are_read_across_the_files_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "xmcray.negatives.version_folder.ROW_BLOCK_BYTES", 3 * 4 * 2
    )  # three rows of two
    folder = Ledger(tmp_path).version(0)
    rows = np.arange(22, dtype=np.float32).reshape(11, 2)
    folder.write_rows(4, rows[4:])
    folder.write_rows(0, rows[:4])
    for start in range(11):
        for stop in range(start + 1, 12):
            assert np.array_equal(folder.read_rows(start, stop), rows[start:stop])


def test_the_newest_complete_version_is_used_and_older_ones_are_retired(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.newest_complete() is None
    for version in (0, 1, 2):
        completed(ledger, version)
    ledger.version(3)  # started, not complete
    newest = ledger.newest_complete()
    assert newest is not None
    assert newest.version == 2
    shortlist = newest.shortlist()
    assert (shortlist.version, shortlist.snapshot_step) == (2, 20)
    assert shortlist.labels.tolist() == [[2]]
    assert not (newest.path / "found").exists(), "what shards found is not needed any more"
    ledger.retire(2)
    assert [folder.version for folder in ledger.versions()] == [2, 3]


def test_an_altered_shortlist_is_refused(tmp_path: Path) -> None:
    folder = completed(Ledger(tmp_path), 0)
    path = folder.path / "shortlist.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ShortlistError, match="was altered"):
        folder.check()


@pytest.mark.parametrize("mark", ["{}", '{"num_ranks": null}', '{"num_ranks": 1e999}', "[]", ""])
def test_a_malformed_mark_of_a_rank_is_one_line(tmp_path: Path, mark: str) -> None:
    folder = completed(Ledger(tmp_path), 0)
    (folder.path / "published-0000.json").write_text(mark)
    with pytest.raises(ShortlistError, match=r"published-0000\.json is damaged .*resume from"):
        _ = folder.published


def test_a_restore_misses_a_version_that_is_gone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    inputs = {"v00003-0000/queries/00000006-0000.npz": "0" * 64}
    # Version 2 was in use, so version 1 may have been removed since.
    ledger.restore({}, published=[1], oldest=2)
    with pytest.raises(StorageError, match="lacks version 3 of the negatives; resume from"):
        ledger.restore(inputs, published=[1], oldest=2)
    with pytest.raises(StorageError, match="lacks version 2"):
        ledger.restore({}, published=[1, 2], oldest=2)


def test_a_restore_keeps_the_blocks_that_the_checkpoint_lists(tmp_path: Path) -> None:
    """The checkpoint was written after step 3; the version was published later, and starts again."""
    ledger = Ledger(tmp_path)
    folder = ledger.version(0)
    empty = np.empty((1, 2), np.float32)
    hashes = {}
    for step in (3, 6):
        block = QueryBlock(np.array([step]), empty, np.array([0]))
        path = folder.write_queries(step, 0, block)
        hashes[step] = (ledger.name_of(path), path)
    folder.publish(0, 1, 7)
    name, path = hashes[3]
    ledger.restore({name: hash_file(path).sha256}, published=[])
    again = ledger.version(0)
    assert again.attempt == 1
    assert not again.published
    assert folder.withdrawn
    assert [int(again.read_queries(block).ids[0]) for block in again.query_blocks] == [3]
