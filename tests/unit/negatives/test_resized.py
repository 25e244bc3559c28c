"""A pool of another size, or one whose actors were killed, finishes what an older one began, with
what the older one would have found.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import planted_corpus

from xmcray.data.batches import DataConfig, TrainingData
from xmcray.negatives import refresh
from xmcray.negatives.ledger import Ledger
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.refresh import (
    RefreshSpec,
    complete_version,
    merge_blocks,
    run_version,
    search_shard,
)
from xmcray.negatives.version_folder import MergedBlock, QueryBlock, VersionFolder


def published(path: Path, data: TrainingData) -> VersionFolder:
    """A version that two ranks have published."""
    rng, labels = np.random.default_rng(0), data.num_labels
    folder = Ledger(path).version(0)
    rows, vectors = (
        rng.normal(size=(labels, 8)).astype("f"),
        rng.normal(size=(len(data.query_ids[:]), 8)).astype("f"),
    )
    for rank, (ids, part) in enumerate(
        zip(np.array_split(data.query_ids[:], 2), np.array_split(vectors, 2), strict=True)
    ):
        extra = data.positives(ids).lengths + data.excluded(ids).lengths
        folder.write_queries(7, rank, QueryBlock(ids, part, extra))
        start, stop = rank * labels // 2, (rank + 1) * labels // 2
        folder.write_rows(start, rows[start:stop])
        folder.publish(rank, 2, 7)
    return folder


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (3, 2)])
def test_what_another_number_of_shards_found_is_not_mixed_in(
    before: int, after: int, tmp_path: Path
) -> None:
    data = TrainingData(planted_corpus(tmp_path / "data"), DataConfig())
    config = NegativesConfig(hard=5, start_epoch=2)
    expected = published(tmp_path / "expected", data)
    run_version(expected, data, RefreshSpec(before, config, 0))
    half_done = published(tmp_path / "half", data)
    search_shard(half_done, 0, data.num_labels, RefreshSpec(before, config, 0))
    for block in half_done.query_blocks:
        ids = half_done.read_queries(block).ids
        wrong = MergedBlock(ids, np.zeros((len(ids), 5), np.int32), np.zeros(len(ids), np.int64))
        half_done.write_merged(before, block, wrong)
    run_version(half_done, data, RefreshSpec(after, config, 0))
    np.testing.assert_array_equal(half_done.shortlist().labels, expected.shortlist().labels)


def test_only_the_blocks_that_a_killed_actor_did_not_merge_are_merged_again(tmp_path: Path) -> None:
    data = TrainingData(planted_corpus(tmp_path / "data"), DataConfig())
    spec = RefreshSpec(2, NegativesConfig(hard=5, start_epoch=2), 0)
    expected = published(tmp_path / "expected", data)
    run_version(expected, data, spec)
    killed = published(tmp_path / "killed", data)
    for shard in range(2):
        search_shard(killed, shard, data.num_labels, spec)
    merge_blocks(killed, 0, data, spec)
    first, second = killed.query_blocks
    assert killed.has_merged(2, first)
    assert not killed.has_merged(2, second), "it is the share of the other actor"
    with pytest.raises(FileNotFoundError):
        complete_version(killed, data, spec)
    assert not killed.complete
    assert not (killed.path / "shortlist.npy").exists()
    merged = killed.path / "found" / "merged-0002" / f"{first}.safetensors"
    before = merged.stat()
    for shard in range(2):
        merge_blocks(killed, shard, data, spec)
    assert merged.stat().st_ino == before.st_ino
    complete_version(killed, data, spec)
    np.testing.assert_array_equal(killed.shortlist().labels, expected.shortlist().labels)


@pytest.mark.parametrize("shares_gpu", [True, False])
def test_a_shard_whose_device_is_full_is_searched_on_the_cpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    shares_gpu: bool,
) -> None:
    data = TrainingData(planted_corpus(tmp_path / "data"), DataConfig())
    on_cpu = RefreshSpec(1, NegativesConfig(hard=5, start_epoch=2), 0)
    expected = published(tmp_path / "expected", data)
    run_version(expected, data, on_cpu)
    build = refresh.build_index

    def build_without_room(*args: Any, gpu: int | None, **settings: Any) -> Any:
        if gpu is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build(*args, gpu=gpu, **settings)

    monkeypatch.setattr(refresh, "build_index", build_without_room)
    # There was room when the actor looked.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    on_gpu = dataclasses.replace(on_cpu, gpu=0, shares_gpu=shares_gpu)
    folder = published(tmp_path / "full", data)
    if not shares_gpu:
        with pytest.raises(torch.OutOfMemoryError):
            run_version(folder, data, on_gpu)
        return
    with caplog.at_level(logging.WARNING):
        run_version(folder, data, on_gpu)
    assert "a trainer has taken the memory of device 0" in caplog.text
    np.testing.assert_array_equal(folder.shortlist().labels, expected.shortlist().labels)
