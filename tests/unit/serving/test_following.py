"""A replica follows its coordinator without asking again and again, until it is cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from operations import add

from xmcray.errors import OutOfMemoryError
from xmcray.serving import followed_model, follower
from xmcray.serving.coordinator import SnapshotCoordinator
from xmcray.serving.decisions import Decision, Report, ServedBundle, Update
from xmcray.serving.followed_model import CatchUp, FollowedModel
from xmcray.serving.follower import Follower
from xmcray.serving.log_place import BEGINNING, Commit, LogPlace
from xmcray.serving.schema import Operation, SwapRequest
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot, SnapshotReference

MISSING = ServedBundle("missing", "3" * 64, BEGINNING)


class Decided:
    """A coordinator without operations; counts how often it is asked."""

    def __init__(self, path: Path) -> None:
        self.bundle = served_bundle(path)
        self.decision = Decision(self.bundle)
        self.config = ServeConfig(bundles={"default": str(path)})
        self.num_asked = 0

    async def follow(self, report: Report, wait_s: float) -> dict[str, Update]:
        self.num_asked += 1
        if report.states["default"].epoch == self.decision.epoch:
            await asyncio.sleep(wait_s)
            return {}
        return {"default": Update(self.decision, 0, {})}


def served_bundle(path: Path) -> ServedBundle:
    version = Snapshot.load(str(path), "default", 1).version
    return ServedBundle(str(path), version, BEGINNING)


async def steps(replica: Follower) -> None:
    """As many as a load needs that fails at once."""
    for _ in range(10):
        await replica._step(0.1)


async def test_a_bundle_that_waits_for_another_load_is_no_reason_to_ask_at_once(
    bundle: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = Decided(bundle)
    replica = Follower(decided.config, decided.follow)
    await replica.start()
    hold_other = threading.Event()
    hold_missing = threading.Event()
    load = Follower._load

    def slow(self: Follower, name: str, served: ServedBundle) -> Snapshot:
        (hold_missing if served == MISSING else hold_other).wait(60)
        return load(self, name, served)

    monkeypatch.setattr(Follower, "_load", slow)
    alongside = served_bundle(other)
    running = None
    try:
        # The replica was silent while the coordinator decided on the missing bundle.
        for decision in (
            Decision(decided.bundle, loading=alongside),
            Decision(MISSING, loading=alongside),
        ):
            decided.decision = decision
            await replica._step(0)
        hold_other.set()
        async with asyncio.timeout(30):
            await asyncio.wait([replica._models["default"].loads[alongside]])
        decided.num_asked = 0
        running = asyncio.create_task(replica.run())
        await asyncio.sleep(1)
        assert decided.num_asked <= 1 / follower.LOADING_S + 1
    finally:
        hold_other.set()
        hold_missing.set()
        if running:
            running.cancel()


async def test_a_bundle_that_cannot_be_loaded_is_tried_once(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the decision is not carried out yet, because a version catches up."""
    decided = Decided(bundle)
    replica = Follower(decided.config, decided.follow)
    await replica.start()
    attempts: list[None] = []

    def fails(*_: Any) -> Snapshot:
        attempts.append(None)
        raise OutOfMemoryError("it needs 9 GB, expected 1 GB")

    monkeypatch.setattr(Follower, "_load", fails)
    model = replica._models["default"]
    snapshot = model.newest[decided.bundle.version]
    unfinished = asyncio.get_running_loop().create_future()
    model.catching_up["dropped"] = CatchUp(snapshot, [], unfinished)
    decided.decision = Decision(decided.bundle, loading=MISSING)
    for _ in range(5):
        await replica._step(0)
    del model.catching_up["dropped"]
    await replica._step(0)
    assert len(attempts) == 1
    assert model.state().epoch == decided.decision.epoch
    assert "9 GB" in model.state().failure


async def test_no_decision_waits_for_a_version_that_is_not_needed_any_more(
    bundle: Path, other: Path
) -> None:
    """One of a swap that failed may be minutes behind, and the next swap begins meanwhile."""
    decided = Decided(bundle)
    replica = Follower(decided.config, decided.follow)
    await replica.start()
    model = replica._models["default"]
    failed = Snapshot.load(str(other), "default", 1)
    unfinished = asyncio.get_running_loop().create_future()
    model.newest[failed.version] = failed
    model.catching_up[failed.version] = CatchUp(failed, [], unfinished)
    decided.decision = Decision(decided.bundle)
    await replica._step(0)
    assert model.state().epoch == decided.decision.epoch
    decided.decision = Decision(decided.bundle, loading=served_bundle(other))
    await replica._step(0)
    assert not model.state().epoch, "it is needed again"


async def test_other_processes_are_answered_from_what_answers_while_a_bundle_is_loaded_again(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = Decided(bundle)
    replica = Follower(decided.config, decided.follow)
    await replica.start()

    def fails(*_: Any) -> Snapshot:
        raise OutOfMemoryError("it needs 9 GB, expected 1 GB")

    snapshot = replica.current(None)
    with monkeypatch.context() as patched:
        patched.setattr(Follower, "_load", fails)
        replica._models["default"].drop_stale(snapshot.version)
        with pytest.raises(OutOfMemoryError):
            await steps(replica)
        assert replica.current(None) is snapshot
        assert await replica.referenced(snapshot.reference, 0.1) is snapshot
    async with asyncio.timeout(30):
        while replica.current(None) is snapshot:
            await replica._step(0)


@pytest.mark.parametrize("part", ["load", "catch-up"])
async def test_operations_reach_a_model_while_the_bundle_of_another_is_loaded_again(
    bundle: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    config = ServeConfig(
        bundles={"a": str(bundle), "b": str(other)}, state_dir=str(tmp_path / "state")
    )
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()
    hold = threading.Event()
    load = Follower._load
    after_commits = Snapshot.after_commits

    def slow_load(*arguments: Any) -> Snapshot:
        hold.wait(60)
        return load(*arguments)

    def slow_catch_up(self: Snapshot, commits: Sequence[Commit]) -> Snapshot:
        if self.model == "a":
            hold.wait(60)
        return after_commits(self, commits)

    running = None
    try:
        many = [add(f"n{number}", "sort join") for number in range(follower.FEW_OPERATIONS + 1)]
        await coordinator.operate("a", many)
        replica = Follower(config, coordinator.follow)
        await replica.start()
        if part == "load":
            monkeypatch.setattr(Follower, "_load", slow_load)
        else:
            monkeypatch.setattr(Snapshot, "after_commits", slow_catch_up)
        model = replica._models["a"]
        model.drop_stale(model.answering)
        running = asyncio.create_task(replica.run())
        # Until the load or the catch-up has begun.
        await asyncio.sleep(1)
        await coordinator.operate("b", [add("n1", "sort join")])
        async with asyncio.timeout(10):
            while replica.current("b").number < 1:
                await asyncio.sleep(0.01)
        assert not model.answering
        hold.set()
        async with asyncio.timeout(10):
            while not model.answering:
                await asyncio.sleep(0.01)
    finally:
        hold.set()
        if running:
            running.cancel()
        coordinator.close()


async def test_a_replica_that_is_cancelled_ends_whatever_its_wait_raises(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On Python 3.11 a condition raises RuntimeError if its wait is cancelled twice."""
    decided = Decided(bundle)

    async def fails(*arguments: Any) -> dict[str, Update]:
        try:
            return await decided.follow(*arguments)
        except asyncio.CancelledError:
            raise RuntimeError("Lock is not acquired.") from None

    replica = Follower(decided.config, fails)
    await replica.start()
    running = asyncio.create_task(replica.run())
    await asyncio.sleep(0.1)
    running.cancel()
    await asyncio.wait([running], timeout=follower.RETRY_S / 2)
    assert running.done()
    assert not caplog.records


async def test_a_bundle_gets_level_while_operations_come_all_the_time(
    bundle: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them takes longer than the wait between two updates."""
    after_commits = Snapshot.after_commits

    def slow(self: Snapshot, commits: Sequence[Commit]) -> Snapshot:
        time.sleep(0.05)
        return after_commits(self, commits)

    config = ServeConfig(
        bundles={"default": str(bundle)},
        state_dir=str(tmp_path / "state"),
        bundle_roots=(str(other.parent),),
    )
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()
    try:
        replica = Follower(config, coordinator.follow)
        await replica.start()
        await coordinator.operate("default", [add("first", "sort join")])
        monkeypatch.setattr(Snapshot, "after_commits", slow)
        monkeypatch.setattr(follower, "LOADING_S", 0.01)
        request = SwapRequest(bundle=str(other), recall_floor=0)
        swap = asyncio.create_task(coordinator.swap("default", request))
        before = replica.current(None).version
        for number in range(40):
            await coordinator.operate("default", [add(f"n{number}", "sort join")])
            await replica._step(0.1)
            if replica.current(None).version != before:
                break
        assert replica.current(None).version != before
        assert replica.current(None).number == coordinator.current(None).number
        await swap
    finally:
        coordinator.close()


async def test_a_report_that_arrives_late_hides_no_newer_one(bundle: Path, tmp_path: Path) -> None:
    """Otherwise a swap would wait for a replica that has loaded the bundle long ago."""
    config = ServeConfig(bundles={"default": str(bundle)}, state_dir=str(tmp_path))
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()
    reports = []

    async def overtaking(report: Report, wait_s: float) -> dict[str, Update]:
        reports.append(report)
        return await coordinator.follow(report, wait_s)

    try:
        replica = Follower(config, overtaking)
        await replica.start()
        await replica._step(0.0)
        first, *_, last = reports
        await coordinator.follow(first, 0.0)
        assert coordinator._replicas.alive() == [last.states]
        assert first.states != last.states
    finally:
        coordinator.close()


async def test_a_version_that_is_dropped_no_longer_catches_up(bundle: Path) -> None:
    decided = Decided(bundle)
    replica = Follower(decided.config, decided.follow)
    await replica.start()
    model = replica._models["default"]
    snapshot = model.newest[decided.bundle.version]
    loop = asyncio.get_running_loop()
    catch_ups = []
    for drop in (model.drop_stale, lambda _: model.forget(0)):
        catch_ups.append(CatchUp(snapshot, [], loop.create_future()))
        model.newest[snapshot.version] = snapshot
        model.dropped[snapshot.version] = 0
        model.catching_up[snapshot.version] = catch_ups[-1]
        drop(snapshot.version)
        assert not model.catching_up
        assert not model.newest
        assert not model.dropped
    assert all(catch_up.changed.cancelled() for catch_up in catch_ups)


async def test_a_request_finds_a_version_as_soon_as_it_has_caught_up(bundle: Path) -> None:
    """The coordinator has nothing to tell this replica meanwhile."""
    decided = Decided(bundle)
    replica = Follower(decided.config, decided.follow)
    await replica.start()
    model = replica._models["default"]
    snapshot = model.newest[model.answering]
    place = LogPlace(1, "later")
    caught_up = asyncio.get_running_loop().create_future()
    model.catching_up[snapshot.version] = CatchUp(snapshot, [], caught_up)
    reference = SnapshotReference("default", snapshot.version, place)
    request = asyncio.create_task(replica.referenced(reference, 30))
    await asyncio.sleep(0)
    caught_up.set_result(snapshot.at(place))
    step = asyncio.create_task(replica._step(20))
    try:
        async with asyncio.timeout(5):
            assert (await request).place == place
    finally:
        step.cancel()
        await asyncio.wait([step])


def test_a_snapshot_that_is_kept_again_is_the_last_to_be_forgotten(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_model, "MAX_OLD_SNAPSHOTS", 2)
    snapshot = Snapshot.load(str(bundle), "default", 1)
    model = FollowedModel()
    for number in (1, 2, 1, 3):
        model.keep(snapshot.at(LogPlace(number)))
    assert [place.number for _, place in model.older] == [1, 3]


def test_a_snapshot_that_was_replaced_keeps_no_arrays_over_all_labels(bundle: Path) -> None:
    model = FollowedModel()
    exported = Snapshot.load(str(bundle), "default", 1)
    begun = exported.after([Operation(op="delete", uid="u3")])
    answers = begun.probe(["sort"])
    derived = {"answer_labels", "hidden_labels", "_answer_rows"}
    assert derived <= vars(begun.retriever.labels).keys()

    # The labels stay the same, and so do their arrays.
    annotated = begun.after([Operation(op="update", uid="u4", attributes={"lang": "en"})])
    model.replace(begun, annotated, [])
    assert derived <= vars(annotated.retriever.labels).keys()

    model.replace(annotated, annotated.after([Operation(op="delete", uid="u5")]), [])
    assert not derived & vars(begun.retriever.labels).keys()
    assert begun.probe(["sort"]) == answers
