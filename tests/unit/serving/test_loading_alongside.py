"""While replicas load another bundle: operations reach the one that answers, and a failure is reported."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bundles import write_bundle_of
from operations import add
from served import ADMIN, served

from xmcray.errors import OutOfMemoryError
from xmcray.retrieval.labels import remove_labels
from xmcray.serving.coordinator import SnapshotCoordinator
from xmcray.serving.follower import Follower
from xmcray.serving.log_place import Commit
from xmcray.serving.schema import SwapRequest
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle_of(tmp_path_factory.mktemp("alongside") / "b", "texts")


@pytest.fixture(scope="module")
def other(bundle: Path) -> Path:
    path = bundle.with_name("other")
    remove_labels(bundle, ["u3"], path)
    return path


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
        await replica._step(0.1)
        assert replica.current(None).version == version
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
            await replica._step(0.1)
        monkeypatch.undo()
        for _ in range(2):
            await replica._step(0.1)
        assert model.answering == version
        assert replica.current(None).label_id("n1") is not None
    finally:
        coordinator.close()
