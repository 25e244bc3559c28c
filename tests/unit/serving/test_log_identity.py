"""Numbers of one label log are never taken for those of another one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bundles import write_bundle_of
from operations import add, delete
from served import ADMIN, Served, served

from xmcray.errors import StorageError
from xmcray.serving.coordinator import SnapshotCoordinator
from xmcray.serving.follower import Follower
from xmcray.serving.label_log import LabelLog
from xmcray.serving.log_database import create_database
from xmcray.serving.log_lines import first_line
from xmcray.serving.log_place import BEGINNING, LogPlace
from xmcray.serving.service import Service
from xmcray.serving.settings import ServeConfig

TEXT = "sort sort join"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle_of(tmp_path_factory.mktemp("identity") / "b", "texts")


async def add_labels(one: Served, *uids: str) -> None:
    """Adds labels, each by a request of its own, and waits until answers have them."""
    for uid in uids:
        answer = await one.change({"op": "add", "uid": uid, "text": TEXT})
        assert answer.status_code == 200, answer.text
    await one.reached(answer.json()["label_log"])


async def compact(one: Served, out: Path) -> None:
    answer = await one.ask("/admin/v1/compact", {"out": str(out)}, ADMIN)
    assert answer.status_code == 200, answer.text


async def swap(one: Served, bundle: Path) -> str:
    """Swaps; returns why it is refused, or ""."""
    body = {"bundle": str(bundle), "recall_floor": 0}
    answer = await one.ask("/admin/v1/swap", body, ADMIN)
    if answer.status_code == 200:
        return ""
    return str(answer.json()["detail"])


def present(one: Served, *uids: str) -> list[str]:
    """Which of these labels the answers of the replica and of the coordinator have."""
    snapshots = [one.models.current(None), one.admin.current(None)]
    found = [[uid for uid in uids if each.label_id(uid) is not None] for each in snapshots]
    assert found[0] == found[1]
    return found[0]


def compacted_from(one: Served) -> str | None:
    """What the replica and the coordinator say of it."""
    snapshots = [one.models.current(None), one.admin.current(None)]
    [origin] = {each.compacted_from for each in snapshots}
    return origin


@pytest.mark.parametrize("num_theirs", [2, 5])
async def test_a_bundle_of_another_server_gets_all_operations(
    bundle: Path, tmp_path: Path, num_theirs: int
) -> None:
    """It may hold fewer operations of its own log than this log has, or more."""
    theirs = tmp_path / "theirs"
    async with served(tmp_path / "1", {"default": bundle}, bundle_roots=(str(tmp_path),)) as one:
        await add_labels(one, *(f"theirs{number}" for number in range(num_theirs)))
        await compact(one, theirs)
    for is_restarted in (False, True):
        home = tmp_path / "2"
        async with served(home, {"default": bundle}, bundle_roots=(str(tmp_path),)) as one:
            if not is_restarted:
                await add_labels(one, "ours0", "ours1", "ours2")
                assert await swap(one, theirs) == ""
            assert present(one, "ours0", "ours1", "ours2") == ["ours0", "ours1", "ours2"]
            assert present(one, "theirs0", "theirs1") == ["theirs0", "theirs1"]
            # Its operations are not in this log, so that it does not stand for the bundle before.
            assert compacted_from(one) is None
            if is_restarted:
                version = one.models.current(None).version
                for name in ("ours", "again"):
                    await compact(one, tmp_path / name)
                    assert await swap(one, tmp_path / name) == ""
                    assert compacted_from(one) == version
                await add_labels(one, "ours3")
                assert present(one, "ours0", "theirs0", "ours3") == ["ours0", "theirs0", "ours3"]


async def test_a_server_that_starts_with_the_bundle_of_another_one_goes_its_own_way(
    bundle: Path, tmp_path: Path
) -> None:
    roots = (str(tmp_path),)
    async with served(tmp_path / "1", {"default": bundle}, bundle_roots=roots) as one:
        await add_labels(one, "a", "b")
        await compact(one, tmp_path / "start")
        await add_labels(one, "c")
        await compact(one, tmp_path / "later")
    for round_number in range(2):
        async with served(
            tmp_path / "2", {"default": tmp_path / "start"}, bundle_roots=roots
        ) as one:
            if round_number == 0:
                await add_labels(one, "d", "e")
                await compact(one, tmp_path / "own")
            assert present(one, "a", "b", "c", "d", "e") == ["a", "b", "d", "e"]
            # It has operation 3, which is another one here.
            assert "operations 1 to 2 of model" in await swap(one, tmp_path / "later")
            assert present(one, "d", "e") == ["d", "e"]
            for name in ("own", "start"):
                assert await swap(one, tmp_path / name) == ""
                assert present(one, "a", "b", "c", "d", "e") == ["a", "b", "d", "e"]


@contextlib.asynccontextmanager
async def coordinating(config: ServeConfig) -> AsyncIterator[SnapshotCoordinator]:
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()
    try:
        yield coordinator
    finally:
        coordinator.close()


@pytest.mark.parametrize("num_new", [0, 1, 2, 5])
async def test_a_replica_ahead_of_a_restored_log_loads_the_bundle_again(
    bundle: Path, tmp_path: Path, num_new: int
) -> None:
    """The restored log may have reached the replica's number with other operations."""
    config = ServeConfig(bundles={"default": str(bundle)}, state_dir=str(tmp_path / "state"))
    async with coordinating(config) as first:
        follower = Follower(config, first.follow)
        await follower.start()
        await first.operate("default", [add("kept", TEXT)])
        await follower._step(1.0)
        before = tmp_path / "backup"
        shutil.copytree(tmp_path / "state", before)
        await first.operate("default", [add("lost1", TEXT)])
        await first.operate("default", [add("lost2", TEXT), delete("u3")])
        await follower._step(1.0)
    snapshot = follower.current(None)
    assert (snapshot.number, snapshot.label_id("u3")) == (4, None)
    shutil.rmtree(tmp_path / "state")
    before.rename(tmp_path / "state")
    async with coordinating(config) as second:
        follower._follow = second.follow
        for number in range(num_new):
            await second.operate("default", [add(f"new{number}", TEXT)])
        # Each step ends with something that may answer.
        seen = []
        for _ in range(3):
            await follower._step(0.1)
            seen.append(follower.current(None).number)
        assert seen[-1] == 1 + num_new
        assert min(seen) >= 1, "the bundle alone never answers"
        expected = second.current(None)
        found = follower.current(None)
        assert found.reference == expected.reference
        for uid in ("kept", "lost1", "lost2", "u3", "new0", "new4"):
            assert found.label_id(uid) == expected.label_id(uid), uid


async def replica_of_a_lost_log(config: ServeConfig) -> Follower:
    """A replica with the label "lost" of a log that is gone."""
    async with coordinating(config) as first:
        follower = Follower(config, first.follow)
        await follower.start()
        await first.operate("default", [add("lost", TEXT)])
        await follower._step(1.0)
    shutil.rmtree(config.state_dir)
    return follower


async def test_requests_of_the_log_that_was_lost_are_not_answered_from_the_new_one(
    bundle: Path, tmp_path: Path
) -> None:
    config = ServeConfig(bundles={"default": str(bundle)}, state_dir=str(tmp_path / "state"))
    follower = await replica_of_a_lost_log(config)
    lost = follower.current(None).reference
    async with coordinating(config) as second:
        follower._follow = second.follow
        await second.operate("default", [add("new", TEXT)])
        for _ in range(3):
            await follower._step(0.1)
    new = follower.current(None).reference
    assert (lost.place.number, lost.version) == (new.place.number, new.version) == (1, lost.version)
    for reference, uid in ((lost, "lost"), (new, "new")):
        snapshot = await follower.referenced(reference, 0.1)
        assert snapshot.label_id(uid) is not None


async def test_a_request_of_a_lost_log_waits_for_no_number_of_the_new_one(
    bundle: Path, tmp_path: Path
) -> None:
    config = ServeConfig(bundles={"default": str(bundle)}, state_dir=str(tmp_path / "state"))
    follower = await replica_of_a_lost_log(config)
    lost = follower.current(None).reference
    async with coordinating(config) as second:
        follower._follow = second.follow
        async with asyncio.timeout(30):
            while follower.current(None).number:
                await follower._step(0.1)
            snapshot = await follower.referenced(lost, 60)
        assert snapshot.label_id("lost") is not None


def test_a_bundle_that_is_ahead_of_its_own_log_is_refused(tmp_path: Path) -> None:
    """Else its later operations would be undone by earlier ones."""
    with LabelLog(tmp_path / "log", "m") as log:
        log.append([add("a")])
        shutil.copytree(tmp_path / "log", tmp_path / "old")
        log.append([add("b")])
        held = log.place(2)
        assert log.resume_place(held) == held
    with pytest.raises(StorageError, match="ends with operation 1, the bundle holds 2 of model"):
        LabelLog(tmp_path / "old", "m", start_after=held)
    with LabelLog(tmp_path / "old", "m") as log:
        with pytest.raises(StorageError, match="ends with operation 1, the bundle holds 2"):
            log.resume_place(held)
        log.append([add("c")])
        # The number alone would match now.
        assert log.resume_place(held) == log.place(0)
        assert log.resume_place(log.place(1)) == log.place(1)


def test_logs_and_bundles_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """They say nothing of an identity."""
    for begin in (0, 3):
        folder = tmp_path / f"begins{begin}"
        folder.mkdir()
        old_line = first_line("m", begin)
        assert set(json.loads(old_line.data[33:])) == {"at", "first", "model", "operations"}
        create_database(folder / "label_log.sqlite", [old_line])
        with LabelLog(folder, "m", start_after=LogPlace(begin)) as log:
            assert log.append([add("a"), add("b")]) == begin + 2
            for number in (begin, begin + 2):
                assert log.resume_place(LogPlace(number)) == log.place(number)
                # A bundle that this version compacts.
                assert log.resume_place(log.place(number)) == log.place(number)
            # No batch ends there, so the number is another log's.
            assert log.resume_place(LogPlace(begin + 1)) == log.place(0)
            with pytest.raises(StorageError, match="restore the newest"):
                log.resume_place(LogPlace(begin + 3))
    with LabelLog(tmp_path / "new", "m", start_after=LogPlace(7)) as log:
        assert log.resume_place(LogPlace(7)) == log.place(7)
        assert log.append([add("a")]) == 8
        assert log.resume_place(LogPlace(7)) == log.place(7)
        assert log.resume_place(BEGINNING) == log.place(0)


def test_two_logs_do_not_share_a_copy(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/copy"
    LabelLog(tmp_path / "one", "m", upload_url=url).close()
    LabelLog(tmp_path / "two", "m").close()
    with pytest.raises(StorageError, match="is no copy of the local log"):
        LabelLog(tmp_path / "two", "m", upload_url=url)
    shutil.rmtree(tmp_path / "two")
    with (
        LabelLog(tmp_path / "one", "m", upload_url=url) as one,
        LabelLog(tmp_path / "two", "m", upload_url=url) as two,
    ):
        assert one.place(0) == two.place(0), "a log that is restored is the same one"


def test_a_log_does_not_go_on_with_the_copy_of_the_one_before_it(tmp_path: Path) -> None:
    """Its newest segment reaches back to operations that this log never had."""
    url = f"file://{tmp_path}/copy"
    with LabelLog(tmp_path / "one", "m", upload_url=url) as one:
        one.append([add("a")])
        place = one.place(1)
        one.append([add("b")])
    segments = sorted(Path(tmp_path / "copy").rglob("*.log"))
    with LabelLog(tmp_path / "two", "m", start_after=place) as two:
        two.append([add("c")])
        two.append([add("d")])
    with pytest.raises(StorageError, match="is no copy of the local log"):
        LabelLog(tmp_path / "two", "m", upload_url=url)
    assert sorted(Path(tmp_path / "copy").rglob("*.log")) == segments


def test_a_log_does_not_go_on_with_the_copy_of_one_that_began_later(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/copy"
    with LabelLog(tmp_path / "one", "m") as one:
        one.append([add("a"), add("b")])
        place = one.place(2)
    # A server with an empty state folder and a bundle that the first one compacted.
    LabelLog(tmp_path / "two", "m", start_after=place, upload_url=url).close()
    with pytest.raises(StorageError, match="is no copy of the local log"):
        LabelLog(tmp_path / "one", "m", upload_url=url)


async def test_the_service_answers_while_a_replica_loads_again(
    bundle: Path, tmp_path: Path
) -> None:
    config = ServeConfig(bundles={"default": str(bundle)}, state_dir=str(tmp_path / "state"))
    follower = await replica_of_a_lost_log(config)
    async with coordinating(config) as second:
        follower._follow = second.follow
        service = Service(config, follower)
        running = asyncio.create_task(follower.run())
        async with asyncio.timeout(30):
            while service.models().models[0].label_log:
                assert service.models().models[0].label_log == 1
                assert not running.done()
                await asyncio.sleep(0)
        running.cancel()
        assert follower.current(None).label_id("lost") is None
