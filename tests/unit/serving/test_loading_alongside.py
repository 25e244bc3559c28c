"""While replicas load another bundle: operations reach the one that answers, and a failure is reported."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from operations import add
from served import ADMIN, served

from xmcray.errors import OutOfMemoryError
from xmcray.serving import follower
from xmcray.serving.coordinator import SnapshotCoordinator
from xmcray.serving.follower import Follower
from xmcray.serving.label_log import LabelLog
from xmcray.serving.log_place import Commit
from xmcray.serving.schema import SwapRequest
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot


async def steps(replica: Follower) -> None:
    """As many as a load needs that fails at once."""
    for _ in range(10):
        await replica._step(0.1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OutOfMemoryError("it needs 9 GB, expected 1 GB"), "it needs 9 GB, expected 1 GB"),
        (KeyError("a mistake of ours"), "KeyError: 'a mistake of ours'"),
    ],
)
async def test_a_swap_ends_as_soon_as_a_replica_cannot_load(
    bundle: Path,
    other: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    reason: str,
) -> None:
    load = Snapshot.load
    attempts: list[None] = []

    def fails(*arguments: Any, **options: Any) -> Snapshot:
        attempts.append(None)
        # The coordinator itself loads the bundle first.
        if len(attempts) > 1:
            raise error
        return load(*arguments, **options)

    body = {"bundle": str(other), "recall_floor": 0}
    async with served(tmp_path, {"default": bundle}) as one:
        before = one.models.current(None).version
        monkeypatch.setattr(Snapshot, "load", fails)
        begin = time.monotonic()
        answer = await one.ask("/admin/v1/swap", body, ADMIN)
        assert answer.status_code == 409, answer.text
        assert answer.json()["detail"] == f"a replica cannot load {other}: {reason}"
        assert time.monotonic() - begin < one.service.config.swap_s / 10
        changed = await one.change({"op": "delete", "uid": "u5"})
        await one.reached(changed.json()["label_log"])
        assert one.models.current(None).version == before
        assert len(attempts) == 2, "operations start no other attempt"
        monkeypatch.undo()
        answer = await one.ask("/admin/v1/swap", body, ADMIN)
        assert answer.status_code == 200, answer.text
        assert one.models.current(None).label_id("u5") is None


async def test_operations_reach_what_answers_while_another_bundle_is_loaded(
    bundle: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Snapshot.load
    hold = threading.Event()
    is_loading = threading.Event()
    loads: list[None] = []

    def slow(*arguments: Any, **options: Any) -> Snapshot:
        loads.append(None)
        if len(loads) > 1:
            is_loading.set()
            hold.wait(60)
        return load(*arguments, **options)

    async with served(tmp_path, {"default": bundle}) as one:
        monkeypatch.setattr(Snapshot, "load", slow)
        body = {"bundle": str(other), "recall_floor": 0}
        swap = asyncio.create_task(one.ask("/admin/v1/swap", body, ADMIN))
        try:
            await asyncio.to_thread(is_loading.wait, 60)
            for uid in ("n1", "n2"):
                changed = await one.change({"op": "add", "uid": uid, "text": "sort join"})
                await one.reached(changed.json()["label_log"])
            assert not swap.done()
            assert one.models.current(None).label_id("n2") is not None
        finally:
            hold.set()
        answer = await swap
        assert answer.status_code == 200, answer.text
        await one.reached(2)
        current = one.models.current(None)
        assert current.version == answer.json()["version"]
        assert None not in (current.label_id("n1"), current.label_id("n2"))
        assert len(loads) == 2, "the coordinator and the replica load once each"


async def test_a_bundle_that_was_dropped_is_loaded_until_that_succeeds(
    bundle: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the version before it is still there and lacks no operation."""
    config = ServeConfig(bundles={"default": str(bundle)}, state_dir=str(tmp_path / "state"))
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()
    try:
        replica = Follower(config, coordinator.follow)
        await replica.start()
        # No replica has reported for long, so that nothing is waited for.
        coordinator._replicas._reports.clear()
        request = SwapRequest(bundle=str(other), recall_floor=0)
        version = (await coordinator.swap("default", request)).version
        async with asyncio.timeout(10):
            while replica.current(None).version != version:
                await replica._step(0.1)
        model = replica._models["default"]
        assert len(model.newest) == 2
        await coordinator.operate("default", [add("n1", "sort join")])
        after_commits = Snapshot.after_commits

        def runs_out_of_memory(self: Snapshot, commits: Sequence[Commit]) -> Snapshot:
            if self.version == version:
                raise OutOfMemoryError("it needs 9 GB, expected 1 GB")
            return after_commits(self, commits)

        def cannot_load(*_: Any, **__: Any) -> Snapshot:
            raise OutOfMemoryError("it needs 9 GB, expected 1 GB")

        monkeypatch.setattr(Snapshot, "after_commits", runs_out_of_memory)
        monkeypatch.setattr(Snapshot, "load", cannot_load)
        with pytest.raises(OutOfMemoryError):
            await steps(replica)
        monkeypatch.undo()
        async with asyncio.timeout(30):
            while model.answering != version:
                await replica._step(0.1)
        assert replica.current(None).label_id("n1") is not None
    finally:
        coordinator.close()


async def test_operations_reach_what_answers_while_the_loaded_bundle_catches_up(
    bundle: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new bundle lacks the whole label log, which comes in several pieces."""
    after_commits = Snapshot.after_commits
    commits_after = LabelLog.commits_after
    is_catching_up = threading.Event()
    hold = threading.Event()

    def few(self: LabelLog, number: int) -> list[Commit]:
        return commits_after(self, number, max_bytes=1)

    async with served(tmp_path, {"default": bundle}) as one:
        for number in range(4):
            changed = await one.change({"op": "add", "uid": f"n{number}", "text": "sort join"})
        await one.reached(4)
        before = one.models.current(None).version

        def slow(self: Snapshot, commits: Sequence[Commit]) -> Snapshot:
            # The coordinator's own snapshot of the new bundle catches up first, in another thread pool.
            if self.version != before and is_catching_up.is_set():
                hold.wait(60)
            return after_commits(self, commits)

        monkeypatch.setattr(follower, "FEW_OPERATIONS", 0)
        monkeypatch.setattr(LabelLog, "commits_after", few)
        monkeypatch.setattr(Snapshot, "after_commits", slow)
        decide = one.admin._decide

        async def noted(*arguments: Any) -> None:
            is_catching_up.set()
            await decide(*arguments)

        monkeypatch.setattr(one.admin, "_decide", noted)
        body = {"bundle": str(other), "recall_floor": 0}
        swap = asyncio.create_task(one.ask("/admin/v1/swap", body, ADMIN))
        try:
            await asyncio.to_thread(is_catching_up.wait, 60)
            model = one.models._models["default"]
            async with asyncio.timeout(10):
                while len(model.newest) < 2:
                    await asyncio.sleep(0.01)
            for uid in ("late1", "late2"):
                changed = await one.change({"op": "add", "uid": uid, "text": "sort join"})
                await one.reached(changed.json()["label_log"])
            current = one.models.current(None)
            assert current.version == before
            assert current.label_id("late2") is not None
            assert not swap.done()
        finally:
            hold.set()
        answer = await swap
        assert answer.status_code == 200, answer.text
        current = one.models.current(None)
        assert current.version == answer.json()["version"]
        for uid in ("n0", "n3", "late1", "late2"):
            assert current.label_id(uid) is not None


async def test_a_replica_that_is_late_for_a_swap_loads_the_bundle_once(
    bundle: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for a replica that was silent for too long. It goes on with its load."""
    config = ServeConfig(
        bundles={"default": str(bundle)},
        state_dir=str(tmp_path / "state"),
        bundle_roots=(str(other.parent),),
    )
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()
    hold = threading.Event()
    load = Follower._load
    loads: list[None] = []

    def slow(*arguments: Any) -> Snapshot:
        loads.append(None)
        hold.wait(60)
        return load(*arguments)

    try:
        replica = Follower(config, coordinator.follow)
        await replica.start()
        monkeypatch.setattr(Follower, "_load", slow)
        request = SwapRequest(bundle=str(other), recall_floor=0)
        swap = asyncio.create_task(coordinator.swap("default", request))
        async with asyncio.timeout(20):
            while not loads:
                await replica._step(0.1)
            coordinator._replicas._reports.clear()
            version = (await swap).version
            # Operations still reach what answers.
            await coordinator.operate("default", [add("n1", "sort join")])
            while replica.current(None).number < 1:
                await replica._step(0.1)
            assert replica.current(None).version != version
            hold.set()
            while replica.current(None).version != version:
                await replica._step(0.1)
        assert replica.current(None).label_id("n1") is not None
        assert len(loads) == 1
    finally:
        hold.set()
        coordinator.close()


async def test_a_swap_ends_although_operations_come_as_fast_as_the_bundle_gets_them(
    bundle: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServeConfig(
        bundles={"default": str(bundle)},
        state_dir=str(tmp_path / "state"),
        bundle_roots=(str(other.parent),),
    )
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()
    loop = asyncio.get_running_loop()
    after_commits = Snapshot.after_commits
    added: list[str] = []

    def slow(self: Snapshot, commits: Sequence[Commit]) -> Snapshot:
        # Not while the last operations are applied, during which others wait.
        if threading.current_thread().name.startswith("xmcray-loader") and len(added) < 20:
            added.append(f"n{len(added)}")
            operation = coordinator.operate("default", [add(added[-1], "sort join")])
            asyncio.run_coroutine_threadsafe(operation, loop).result()
        return after_commits(self, commits)

    try:
        await coordinator.operate("default", [add("first", "sort join")])
        monkeypatch.setattr(Snapshot, "after_commits", slow)
        await coordinator.swap("default", SwapRequest(bundle=str(other), recall_floor=0))
        assert added == ["n0"]
        assert coordinator.current(None).label_id("n0") is not None
    finally:
        coordinator.close()
