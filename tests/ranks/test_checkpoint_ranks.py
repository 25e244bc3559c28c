"""Ranks that resume share the hashing of a checkpoint and agree on the one that is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import on_ranks

from xmcray.storage.manifest import FileEntry, finish_manifest, hash_file
from xmcray.storage.whole_files import write_json
from xmcray.training import checkpoint as checkpoints

NUM_RANKS = 2


def write_checkpoint(folder: Path, step: int) -> Path:
    path = checkpoints.step_folder(folder, step)
    path.mkdir(parents=True)
    write_json(path / "state.json", {"negatives": {}})
    for name in ("a", "b", "c"):
        (path / name).write_bytes(bytes([step]) * 100)
    entries = {file.name: hash_file(file) for file in path.iterdir()}
    finish_manifest(path, checkpoints.KIND, {"step": step}, entries)
    return path


def newest_and_hashed(folder: Path) -> tuple[int, list[str]]:
    """Step of the newest whole checkpoint, and the files that this rank hashed."""
    hashed = []

    def counted(path: Path) -> FileEntry:
        hashed.append(f"{path.parent.name}/{path.name}")
        return hash_file(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xmcray.storage.manifest.hash_file", counted)
        newest = checkpoints.newest(folder)
    assert newest is not None
    return newest.step, hashed


def test_each_file_of_a_checkpoint_is_hashed_by_one_rank(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    results = on_ranks(newest_and_hashed, NUM_RANKS, tmp_path)
    assert [step for step, _ in results] == [1, 1]
    hashed = [name for _, names in results for name in names]
    assert sorted(hashed) == [f"step-00000001/{name}" for name in ("a", "b", "c", "state.json")]


@pytest.mark.parametrize("name", ["a", "b"])  # hashed by rank 0 and by rank 1
def test_all_ranks_pass_over_what_one_of_them_finds_damaged(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, 1)
    newer = write_checkpoint(tmp_path, 2)
    (newer / name).write_bytes(bytes(100))
    results = on_ranks(newest_and_hashed, NUM_RANKS, tmp_path)
    assert [step for step, _ in results] == [1, 1]
