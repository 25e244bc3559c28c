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

CONFIG = NegativesConfig(hard=5, start_epoch=2)


@pytest.fixture
def data(tmp_path: Path) -> TrainingData:
    return TrainingData(planted_corpus(tmp_path / "data"), DataConfig())


def published(path: Path, data: TrainingData) -> VersionFolder:
    """A version that two ranks have published."""
    rng = np.random.default_rng(0)
    query_ids = data.query_ids[:]
    row_LD = rng.normal(size=(data.num_labels, 8)).astype("f")
    query_ND = rng.normal(size=(len(query_ids), 8)).astype("f")
    ids_of_ranks = np.array_split(query_ids, 2)
    queries_of_ranks = np.array_split(query_ND, 2)
    folder = Ledger(path).version(0)
    for rank in range(2):
        ids = ids_of_ranks[rank]
        # As many more labels are searched as may not be negatives.
        extra = data.positives(ids).lengths + data.excluded(ids).lengths
        folder.write_queries(7, rank, QueryBlock(ids, queries_of_ranks[rank], extra))
        start = rank * data.num_labels // 2
        stop = (rank + 1) * data.num_labels // 2
        folder.write_rows(start, row_LD[start:stop])
        folder.publish(rank, 2, 7)
    return folder


def completed(path: Path, data: TrainingData, spec: RefreshSpec) -> VersionFolder:
    """The same version, found without interruption."""
    folder = published(path, data)
    run_version(folder, data, spec)
    return folder


def assert_same_shortlist(folder: VersionFolder, expected: VersionFolder) -> None:
    np.testing.assert_array_equal(folder.shortlist().labels, expected.shortlist().labels)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (3, 2)])
def test_what_another_number_of_shards_found_is_not_mixed_in(
    before: int, after: int, data: TrainingData, tmp_path: Path
) -> None:
    expected = completed(tmp_path / "expected", data, RefreshSpec(before, CONFIG, 0))
    half_done = published(tmp_path / "half", data)
    search_shard(half_done, 0, data.num_labels, RefreshSpec(before, CONFIG, 0))
    for block in half_done.query_blocks:
        ids = half_done.read_queries(block).ids
        wrong = MergedBlock(ids, np.zeros((len(ids), 5), np.int32), np.zeros(len(ids), np.int64))
        half_done.write_merged(before, block, wrong)

    run_version(half_done, data, RefreshSpec(after, CONFIG, 0))

    assert_same_shortlist(half_done, expected)


def test_only_the_blocks_that_a_killed_actor_did_not_merge_are_merged_again(
    data: TrainingData, tmp_path: Path
) -> None:
    spec = RefreshSpec(2, CONFIG, 0)
    expected = completed(tmp_path / "expected", data, spec)
    killed = published(tmp_path / "killed", data)
    first, second = killed.query_blocks

    # Both shards are searched, and only the first actor merges its block.
    for shard in range(2):
        search_shard(killed, shard, data.num_labels, spec)
    merge_blocks(killed, 0, data, spec)
    assert killed.has_merged(2, first)
    assert not killed.has_merged(2, second), "it is the share of the other actor"
    with pytest.raises(FileNotFoundError):
        complete_version(killed, data, spec)
    assert not killed.complete
    assert not (killed.path / "shortlist.npy").exists()

    # A new pool merges what is missing.
    merged_first = killed.path / "found" / "merged-0002" / f"{first}.safetensors"
    file_before = merged_first.stat().st_ino
    for shard in range(2):
        merge_blocks(killed, shard, data, spec)
    assert merged_first.stat().st_ino == file_before
    complete_version(killed, data, spec)
    assert_same_shortlist(killed, expected)


@pytest.fixture
def full_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose memory was taken after an actor had looked at it."""
    build = refresh.build_index

    def build_without_room(*args: Any, gpu: int | None, **settings: Any) -> Any:
        if gpu is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build(*args, gpu=gpu, **settings)

    monkeypatch.setattr(refresh, "build_index", build_without_room)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))


@pytest.mark.usefixtures("full_gpu")
def test_a_shard_whose_shared_device_is_full_is_searched_on_the_cpu(
    data: TrainingData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on_cpu = RefreshSpec(1, CONFIG, 0)
    on_gpu = dataclasses.replace(on_cpu, gpu=0, shares_gpu=True)
    expected = completed(tmp_path / "expected", data, on_cpu)
    folder = published(tmp_path / "full", data)

    with caplog.at_level(logging.WARNING):
        run_version(folder, data, on_gpu)

    assert "a trainer has taken the memory of device 0" in caplog.text
    assert_same_shortlist(folder, expected)


@pytest.mark.usefixtures("full_gpu")
def test_a_device_of_its_own_that_is_full_is_an_error(data: TrainingData, tmp_path: Path) -> None:
    on_gpu = RefreshSpec(1, CONFIG, 0, gpu=0, shares_gpu=False)
    folder = published(tmp_path / "full", data)
    with pytest.raises(torch.OutOfMemoryError):
        run_version(folder, data, on_gpu)
