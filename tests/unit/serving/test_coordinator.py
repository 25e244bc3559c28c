"""What is decided stays whole: clients that leave, replicas that load slowly, a state disk that is full."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import shutil
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from operations import add
from served import ADMIN, Served, served

from xmcray.errors import ConfigError, StorageError
from xmcray.retrieval.labels import NewLabel, add_labels, remove_labels
from xmcray.retrieval.retriever import Retriever
from xmcray.serving import follower, replicas
from xmcray.serving.coordinator import SnapshotCoordinator
from xmcray.serving.decisions import Decision, Update
from xmcray.serving.problems import ProblemError
from xmcray.serving.schema import Filter, Operation, SwapRequest
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot


def inside(one: Served) -> Any:
    """The coordinator's own record of the only model."""
    return one.admin._models["default"]


def test_a_client_that_leaves_takes_no_operation_with_it(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with served(tmp_path, {"default": bundle}) as one:
            found = inside(one)
            durable = threading.Event()
            go_on = threading.Event()
            append = found.log.append

            def slow(operations: Sequence[Operation]) -> int:
                number: int = append(operations)
                durable.set()
                go_on.wait(60)
                return number

            monkeypatch.setattr(found.log, "append", slow)
            request = asyncio.create_task(one.admin.operate("default", [add("n1", "sort join")]))
            await asyncio.to_thread(durable.wait, 60)
            request.cancel()
            await asyncio.sleep(0)
            go_on.set()
            monkeypatch.setattr(found.log, "append", append)
            second = await one.change({"op": "add", "uid": "n2", "text": "sort"})
            assert second.json().get("label_log") == 2, second.text
            again = await one.change({"op": "add", "uid": "n1", "text": "sort join"})
            assert again.status_code == 409, "the first request's label is there"
            assert found.log.last == found.snapshot.number == 2

    asyncio.run(test())


async def test_a_swap_waits_for_a_replica_that_loads_longer_than_the_dead_are_silent(
    bundle: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "ALIVE_S", 1.5)
    monkeypatch.setattr(follower, "PRESENT_S", 0.1)
    load = Snapshot.load
    hold = threading.Event()
    loads: list[None] = []

    def slow(*arguments: Any, **options: Any) -> Snapshot:
        loads.append(None)
        # The coordinator itself loads the bundle first.
        if len(loads) > 1:
            hold.wait(60)
        return load(*arguments, **options)

    async with served(tmp_path, {"default": bundle}) as one:
        monkeypatch.setattr(Snapshot, "load", slow)
        body = {"bundle": str(other), "recall_floor": 0}
        swap = asyncio.create_task(one.ask("/admin/v1/swap", body, ADMIN))
        done, _ = await asyncio.wait([swap], timeout=4.5)
        assert not done, "three times as long as a silent replica is waited for"
        hold.set()
        answer = await swap
        assert answer.status_code == 200, answer.text
        assert one.models.current(None).version == answer.json()["version"]


async def test_a_swap_after_a_restart_waits_for_replicas_that_have_not_reported_yet(
    bundle: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "ALIVE_S", 1.5)
    monkeypatch.setattr(replicas, "CHECK_S", 0.1)
    monkeypatch.setattr(follower, "PRESENT_S", 0.1)
    paths = {"default": str(bundle)}
    config = ServeConfig(bundles=paths, state_dir=str(tmp_path), bundle_roots=(str(other.parent),))
    request = SwapRequest(bundle=str(other), recall_floor=0, version=None)
    before = SnapshotCoordinator(config, has_replicas=True)
    await before.start()
    replica = follower.Follower(config, before.follow)
    await replica.start()
    before.close()
    after = SnapshotCoordinator(config, has_replicas=True)
    await after.start()
    replica._follow = after.follow
    try:
        swap = asyncio.create_task(after.swap("default", request))
        done, _ = await asyncio.wait([swap], timeout=0.5)
        assert not done, "a replica that is still answering has not reported"
        task = asyncio.create_task(replica.run())
        response = await swap
        assert replica.current(None).version == response.version
        # Of replicas that died with the coordinator nothing is heard.
        task.cancel()
        monkeypatch.setattr(replicas, "ALIVE_S", 0.1)
        await after.swap("default", request)
    finally:
        after.close()


async def test_a_swap_that_cannot_be_remembered_changes_nothing(
    bundle: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, value: object) -> None:
        raise StorageError(f"{path} cannot be written; the disk is full")

    async with served(tmp_path, {"default": bundle}) as one:
        before = one.models.current(None).version
        monkeypatch.setattr("xmcray.serving.state_folder.write_json", full)
        body = {"bundle": str(other), "recall_floor": 0}
        answer = await one.ask("/admin/v1/swap", body, ADMIN)
        assert (answer.status_code, "disk is full" in answer.json()["detail"]) == (409, True)
        found = inside(one)
        assert found.decision.loading is None
        assert (
            found.snapshot.version
            == found.decision.bundle.version
            == one.models.current(None).version
            == before
        )
        monkeypatch.undo()
        assert (await one.ask("/admin/v1/swap", body, ADMIN)).status_code == 200


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nowhere://x/y", "Protocol not known"),
        ("http://127.0.0.1:9/x/y", "cannot be used"),
        ("memory://none/y", "has no"),
    ],
)
async def test_a_url_that_cannot_be_read_is_refused(
    bundle: Path, tmp_path: Path, url: str, said: str
) -> None:
    roots = ("nowhere://x", "http://127.0.0.1:9/x", "memory://none")

    async with served(tmp_path, {"default": bundle}, bundle_roots=roots) as one:
        answer = await one.ask("/admin/v1/swap", {"bundle": url}, ADMIN)
        assert answer.status_code == 409, answer.text
        assert said in answer.json()["detail"]


async def test_a_damaged_record_of_a_swap_ends_the_start_with_one_line(
    bundle: Path, other: Path, tmp_path: Path
) -> None:
    head = tmp_path / "state" / "default" / "head.json"

    async with served(tmp_path, {"default": bundle}) as one:
        body = {"bundle": str(other), "recall_floor": 0}
        assert (await one.ask("/admin/v1/swap", body, ADMIN)).status_code == 200
    content = head.read_bytes()
    for damaged in (content[:-9], b"", b"[]", b"{}", b"null", b"\xff", b"[" * 100_000):
        head.write_bytes(damaged)
        with pytest.raises(StorageError, match=r"head\.json is damaged.*remove the file"):
            async with served(tmp_path, {"default": bundle}):
                pass


async def test_a_start_without_the_bundle_that_was_swapped_in_says_how_to_go_on(
    bundle: Path, other: Path, tmp_path: Path
) -> None:
    swapped = tmp_path / "swapped"
    shutil.copytree(other, swapped)
    async with served(tmp_path, {"default": bundle}) as one:
        await one.change({"op": "add", "uid": "n1", "text": "sort join"})
        body = {"bundle": str(swapped), "recall_floor": 0}
        assert (await one.ask("/admin/v1/swap", body, ADMIN)).status_code == 200
    shutil.rmtree(swapped)
    head = tmp_path / "state" / "default" / "head.json"
    with pytest.raises(StorageError) as caught:
        async with served(tmp_path, {"default": bundle}):
            pass
    assert str(caught.value) == (
        f"{swapped} does not exist; expected a bundle folder; it was swapped in last: put it back,"
        f" or remove {head} to serve {bundle}"
    )
    head.unlink()
    async with served(tmp_path, {"default": bundle}) as one:
        assert one.models.current(None).label_id("n1") is not None


async def test_a_bundle_that_was_changed_in_place_is_not_compacted(
    bundle: Path, tmp_path: Path
) -> None:
    """New labels of both changes would have the same ids."""
    path = tmp_path / "b"
    shutil.copytree(bundle, path)
    body = {"out": str(tmp_path / "compacted")}
    async with served(tmp_path, {"default": path}) as one:
        await one.change({"op": "add", "uid": "n1", "text": "sort join"})
        add_labels(path, [NewLabel("n9", "matrix rank")])
        answer = await one.ask("/admin/v1/compact", body, ADMIN)
        assert answer.status_code == 409, answer.text
        assert "has changed since it was loaded" in answer.json()["detail"]
    assert not (tmp_path / "compacted").exists()


async def test_a_swap_before_another_bundle_was_configured_is_over(
    bundle: Path, other: Path, tmp_path: Path
) -> None:
    third = tmp_path / "third"
    remove_labels(bundle, ["u5"], third)
    versions = []
    for configured, swapped in [(bundle, other), (third, None), (bundle, None)]:
        async with served(tmp_path, {"default": configured}) as one:
            if swapped:
                body = {"bundle": str(swapped), "recall_floor": 0}
                assert (await one.ask("/admin/v1/swap", body, ADMIN)).status_code == 200
            versions.append(one.models.current(None).version)
    assert versions[2] == Retriever.load(bundle).sha256
    assert len(set(versions)) == 3


async def test_a_bundle_swapped_in_by_a_relative_path_is_found_from_another_folder(
    bundle: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(other.parent)
    async with served(tmp_path, {"default": bundle}) as one:
        body = {"bundle": other.name, "recall_floor": 0}
        answer = await one.ask("/admin/v1/swap", body, ADMIN)
        assert answer.status_code == 200, answer.text
    monkeypatch.chdir(tmp_path)
    async with served(tmp_path, {"default": bundle}) as one:
        assert one.models.current(None).version == answer.json()["version"]


async def test_a_replica_whose_snapshot_refuses_an_operation_loads_the_bundle_again(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = Snapshot.after

    async with served(tmp_path, {"default": bundle}) as one:
        stale = one.models.current(None)

        def refuses(self: Snapshot, operations: Sequence[Operation]) -> Snapshot:
            if self is stale:
                raise ConfigError("found a string, expected a number")
            return after(self, operations)

        monkeypatch.setattr(Snapshot, "after", refuses)
        for uid in ("n1", "n2"):
            answer = await one.change({"op": "add", "uid": uid, "text": "sort join"})
            assert answer.status_code == 200, answer.text
        await one.reached(2)
        assert one.models.current(None).label_id("n1") is not None


async def test_a_version_that_a_replica_may_drop_does_not_count_as_loaded(
    bundle: Path, other: Path, tmp_path: Path
) -> None:
    paths = {"default": str(bundle)}
    roots = (str(other.parent),)
    config = ServeConfig(bundles=paths, state_dir=str(tmp_path), bundle_roots=roots, swap_s=0.3)
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()
    replica = follower.Follower(config, coordinator.follow)
    await replica.start()
    request = SwapRequest(bundle=str(other), recall_floor=0)
    steps = asyncio.create_task(replica.run())
    try:
        await coordinator.swap("default", request)
        # The replica still has the first version, and answers nobody from now on.
        steps.cancel()
        with pytest.raises(ProblemError, match=r"1 replica\(s\) did not load"):
            await coordinator.swap("default", SwapRequest(bundle=str(bundle), recall_floor=0))
    finally:
        coordinator.close()


async def test_a_replica_loads_what_answers_from_its_own_path(bundle: Path, tmp_path: Path) -> None:
    """A swap to the same version at another path may be under way when the replica starts."""
    config = ServeConfig(bundles={"default": str(bundle)}, state_dir=str(tmp_path))
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()

    async def follow(*arguments: Any) -> dict[str, Update]:
        update = (await coordinator.follow(*arguments))["default"]
        served_bundle = update.decision.bundle
        gone = dataclasses.replace(served_bundle, path=str(tmp_path / "gone"))
        decision = Decision(served_bundle, loading=gone)
        return {"default": dataclasses.replace(update, decision=decision)}

    replica = follower.Follower(config, follow)
    try:
        await replica.start()
        assert replica.current(None).version == coordinator.current(None).version
    finally:
        coordinator.close()


async def test_a_replica_of_an_application_with_fewer_models_follows_those_that_it_has(
    bundle: Path, other: Path, tmp_path: Path
) -> None:
    """So it is while another configuration is rolled out."""
    few = ServeConfig(bundles={"a": str(bundle)}, state_dir=str(tmp_path))
    more = {"new": str(bundle), "a": str(bundle)}
    roots = (str(other.parent),)
    coordinator = SnapshotCoordinator(
        ServeConfig(bundles=more, state_dir=str(tmp_path), bundle_roots=roots, swap_s=5.0)
    )
    await coordinator.start()
    replica = follower.Follower(few, coordinator.follow)
    await replica.start()
    steps = asyncio.create_task(replica.run())
    try:
        for name in more:
            await coordinator.operate(name, [add("n1", "sort join")])
            request = SwapRequest(bundle=str(other), recall_floor=0)
            version = (await coordinator.swap(name, request)).version
        assert replica.current("a").version == version
        assert replica.current("a").label_id("n1") is not None
    finally:
        steps.cancel()
        coordinator.close()


async def test_a_replica_keeps_no_filtered_view_of_a_snapshot_that_was_replaced(
    bundle: Path, tmp_path: Path
) -> None:
    """Requests may come to 64 such snapshots, and each could have 16 views."""
    async with served(tmp_path, {"default": bundle}) as one:
        await one.search(["sort"], filter={"deny": ["u1"]})
        replaced = one.models.current(None)
        view = weakref.ref(replaced.view(Filter(deny=["u1"])))
        assert view() is not None
        answer = await one.change({"op": "delete", "uid": "u2"})
        await one.reached(answer.json()["label_log"])
        gc.collect()
        assert view() is None


async def test_label_operations_take_turns_in_one_thread(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread that makes snapshots keeps some memory."""
    after = Snapshot.after
    threads = set[str]()

    def noted(self: Snapshot, operations: Sequence[Operation]) -> Snapshot:
        threads.add(threading.current_thread().name)
        return after(self, operations)

    paths = {"a": str(bundle), "b": str(bundle)}
    coordinator = SnapshotCoordinator(ServeConfig(bundles=paths, state_dir=str(tmp_path)))
    await coordinator.start()
    monkeypatch.setattr(Snapshot, "after", noted)
    changes = [
        coordinator.operate(name, [add(f"n{number}", "sort join")])
        for number in range(8)
        for name in paths
    ]
    await asyncio.gather(*changes)
    coordinator.close()
    assert threads == {"xmcray-labels_0"}


@pytest.mark.parametrize("broken", ["a", "b"])
async def test_a_model_that_cannot_be_loaded_holds_up_no_other(
    broken: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates come in the order of the models."""
    carry_out = follower.Follower._carry_out

    async def fails(self: follower.Follower, name: str, update: Any) -> None:
        if name == broken and update.commits:
            raise StorageError("its bundle cannot be read")
        await carry_out(self, name, update)

    async with served(tmp_path, {"a": bundle, "b": bundle}) as one:
        monkeypatch.setattr(follower.Follower, "_carry_out", fails)
        [whole] = {"a", "b"} - {broken}
        for model in (broken, whole):
            await one.admin.operate(model, [add("n1", "sort join")])
        async with asyncio.timeout(10):
            while one.models.current(whole).number < 1:
                await asyncio.sleep(0.01)
