"""Replicas get label operations in groups of their own, and answer for every place between them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from bundles import write_bundle_of
from operations import add, delete

from xmcray.serving import followed_model
from xmcray.serving.coordinator import SnapshotCoordinator
from xmcray.serving.follower import Follower
from xmcray.serving.log_place import Commit
from xmcray.serving.problems import ProblemError
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot

TEXTS = ["sort join", "matrix rank"]


async def test_a_replica_answers_for_a_place_that_it_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = write_bundle_of(tmp_path / "b", "texts")
    config = ServeConfig(bundles={"default": str(bundle)}, state_dir=str(tmp_path / "state"))
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()
    try:
        gateway = Follower(config, coordinator.follow)
        searcher = Follower(config, coordinator.follow)
        await gateway.start()
        await searcher.start()
        batches = [[add("n1", TEXTS[0]), delete("u3")], [add("n2", TEXTS[1])], [delete("n1")]]
        begun = []
        for operations in batches:
            await coordinator.operate("default", operations)
            await gateway._step(1.0)
            begun.append(gateway.current(None))
        # All of them at once.
        await searcher._step(1.0)
        assert searcher.current(None).reference == begun[-1].reference
        for expected in begun:
            requests = [searcher.referenced(expected.reference, 10) for _ in range(3)]
            found = await asyncio.gather(*requests)
            assert found[0] is found[1] is found[2], "requests can be one batch"
            assert found[0].reference == expected.reference
            answers = found[0].retriever.search(TEXTS, 5)
            for labels, wanted in zip(answers, expected.retriever.search(TEXTS, 5), strict=True):
                assert [label.label_id for label in labels] == [label.label_id for label in wanted]
                scores = [label.score for label in labels]
                np.testing.assert_array_equal(scores, [label.score for label in wanted])
        # What is passed is forgotten with the snapshot that it began with.
        monkeypatch.setattr(followed_model, "MAX_OLD_SNAPSHOTS", 0)
        model = searcher._models["default"]
        model.keep(begun[0])
        assert not model.older
        assert not model.passed
        with pytest.raises(ProblemError, match="with operation 2 is not here"):
            await searcher.referenced(begun[0].reference, 0.1)
    finally:
        coordinator.close()


async def test_a_request_for_an_earlier_place_waits_for_no_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = write_bundle_of(tmp_path / "b", "texts")
    config = ServeConfig(bundles={"default": str(bundle)}, state_dir=str(tmp_path / "state"))
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()
    has_begun = threading.Event()
    go_on = threading.Event()
    after_commits = Snapshot.after_commits

    def slow(self: Snapshot, commits: Sequence[Commit]) -> Snapshot:
        if commits[-1].place.number == 3:
            has_begun.set()
            go_on.wait(60)
        return after_commits(self, commits)

    try:
        searcher = Follower(config, coordinator.follow)
        await searcher.start()
        await coordinator.operate("default", [add("n1", TEXTS[0])])
        reference = coordinator.current(None).reference
        await coordinator.operate("default", [add("n2", TEXTS[1])])
        await searcher._step(1.0)
        monkeypatch.setattr(Snapshot, "after_commits", slow)
        await coordinator.operate("default", [delete("n1")])
        large_update = asyncio.create_task(searcher._step(1.0))
        await asyncio.to_thread(has_begun.wait, 60)
        found = await searcher.referenced(reference, 10)
        assert found.reference == reference
        assert not large_update.done()
        go_on.set()
        await large_update
        assert searcher.current(None).number == 3
    finally:
        go_on.set()
        coordinator.close()


async def test_what_a_late_request_began_is_there_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = write_bundle_of(tmp_path / "b", "texts")
    config = ServeConfig(bundles={"default": str(bundle)}, state_dir=str(tmp_path / "state"))
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()
    go_on = threading.Event()
    after_commits = Snapshot.after_commits
    calls: list[None] = []

    def slow(self: Snapshot, commits: Sequence[Commit]) -> Snapshot:
        calls.append(None)
        go_on.wait(60)
        return after_commits(self, commits)

    try:
        searcher = Follower(config, coordinator.follow)
        await searcher.start()
        await coordinator.operate("default", [add("n1", TEXTS[0])])
        reference = coordinator.current(None).reference
        await coordinator.operate("default", [add("n2", TEXTS[1])])
        await searcher._step(1.0)
        monkeypatch.setattr(Snapshot, "after_commits", slow)
        for _ in range(2):
            with pytest.raises(ProblemError, match="with operation 1 is not here; ask again"):
                await searcher.referenced(reference, 0.1)
        go_on.set()
        assert (await searcher.referenced(reference, 10)).reference == reference
        assert len(calls) == 1
    finally:
        go_on.set()
        coordinator.close()
