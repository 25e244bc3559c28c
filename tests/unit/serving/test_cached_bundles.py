"""Copies of bundles that came from URLs do not pile up, and those that someone uses stay."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import fsspec
import pytest
from bundles import write_bundle_of
from fsspec.implementations.local import LocalFileSystem
from served import ADMIN, served

from xmcray.errors import StorageError
from xmcray.retrieval.bundle import KIND
from xmcray.retrieval.labels import remove_labels
from xmcray.serving import follower
from xmcray.serving.coordinator import SnapshotCoordinator
from xmcray.serving.follower import Follower
from xmcray.serving.settings import ServeConfig
from xmcray.storage import cache
from xmcray.storage.artifact import open_artifact
from xmcray.storage.cache import NUM_UNUSED, local_copy, release_copies

HOLDER = """
import sys
from xmcray.storage.cache import local_copy
print(local_copy(sys.argv[1], "bundle"), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("XMCRAY_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same labels, less a different one each time."""
    folder = tmp_path_factory.mktemp("cached")
    made = [write_bundle_of(folder / "b", "texts")]
    for number in range(NUM_UNUSED + 3):
        made.append(folder / f"b{number}")
        remove_labels(made[0], [f"u{number}"], made[-1])
    return made


def copies(folder: Path) -> set[Path]:
    return {path for path in folder.iterdir() if not path.name.startswith(".")}


def test_copies_that_another_process_holds_stay(bundles: list[Path], cached: Path) -> None:
    urls = [f"file://{path}" for path in bundles]
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, urls[0]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout
        theirs = Path(holder.stdout.readline().strip())
        ours = [local_copy(url, KIND) for url in urls[1:]]
        other_kind = cached / "predicting-1"
        other_kind.mkdir()
        release_copies("corpus", ours)
        release_copies(KIND, ours)
        assert copies(cached) == {theirs, *ours, other_kind}, "all are held"
        release_copies(KIND, ours[:1])
        # The first one is in use here, and of the others the newest stay.
        assert copies(cached) == {theirs, ours[0], *ours[-NUM_UNUSED:], other_kind}
        holder.communicate()
    release_copies(KIND, ours[:1])
    assert copies(cached) == {ours[0], *ours[-NUM_UNUSED:], other_kind}
    release_copies(KIND, [])
    # The one that was in use for longest is not the oldest.
    assert copies(cached) == {ours[0], *ours[-NUM_UNUSED + 1 :], other_kind}
    # A copy that is gone is made again.
    assert open_artifact(urls[0], KIND)[0] == theirs
    assert theirs in cache._held


def test_a_cache_that_was_emptied_is_filled_again(bundles: list[Path], cached: Path) -> None:
    url = f"file://{bundles[0]}"
    copy = local_copy(url, KIND)
    shutil.rmtree(cached)
    release_copies(KIND, [copy])
    assert local_copy(url, KIND) == copy
    assert not cache._is_unused(copy, KIND), "the new copy is held as the first one was"
    release_copies(KIND, [])
    assert cache._is_unused(copy, KIND)


def test_artifacts_of_the_user_in_the_folder_of_the_cache_stay(
    bundles: list[Path], cached: Path
) -> None:
    for path in bundles:
        shutil.copytree(path, cached / path.name)
    release_copies(KIND, [])
    assert copies(cached) == {cached / path.name for path in bundles}


def test_the_age_of_a_copy_counts_from_its_release(bundles: list[Path], cached: Path) -> None:
    served = local_copy(f"file://{bundles[0]}", KIND)
    os.utime(cached / f".{served.name}.used", (0, 0))  # opened long ago
    others = [local_copy(f"file://{path}", KIND) for path in bundles[1:]]
    release_copies(KIND, [served])
    release_copies(KIND, [])
    assert copies(cached) == {served, *others[-NUM_UNUSED + 1 :]}


def test_nothing_stays_of_copies_that_are_gone(bundles: list[Path], cached: Path) -> None:
    """Neither parts of killed processes nor empty files; what another process makes stays."""
    cached.mkdir()
    killed = cached / f".{'a' * 32}.part"
    in_progress = cached / f".{'b' * 32}.part"
    theirs = cached / ".notes.part"
    for folder in (killed, in_progress, theirs):
        folder.mkdir()
        (folder / "vectors").write_bytes(b"some")
    for role in ("lock", "used"):
        (cached / f".{'c' * 32}.{role}").touch()
    lock = cached / f".{'b' * 32}.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held = [local_copy(f"file://{path}", KIND) for path in bundles]
        hidden = {path for path in cached.iterdir() if path.name.startswith(".")}
        files = {cached / f".{copy.name}.{role}" for copy in held for role in ("lock", "used")}
        assert hidden == {*files, in_progress, theirs, lock}
        release_copies(KIND, [])
    release_copies(KIND, [])
    hidden = {path for path in cached.iterdir() if path.name.startswith(".")}
    kept = held[-NUM_UNUSED:]
    assert hidden == {
        cached / f".{copy.name}.{role}" for copy in kept for role in ("lock", "used")
    } | {theirs}


def test_a_lock_that_was_removed_while_it_was_waited_for_is_taken_anew(cached: Path) -> None:
    cached.mkdir()
    copy = cached / ("a" * 32)
    lock = cached / f".{copy.name}.lock"
    got = threading.Event()
    leave = threading.Event()

    def wait_for_it() -> None:
        with cache._locked(copy):
            got.set()
            leave.wait(60)

    thread = threading.Thread(target=wait_for_it)
    with cache._locked(copy):
        thread.start()
        time.sleep(0.2)  # until it waits
        lock.unlink()
    try:
        assert got.wait(60)
        with pytest.raises(BlockingIOError), cache._locked(copy, waits=False):
            pass
    finally:
        leave.set()
        thread.join()


def test_a_source_that_refuses_a_file_is_told_of_it(
    bundles: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object stores refuse with the error of a file that is not readable."""

    def refuses(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Forbidden")

    monkeypatch.setattr(LocalFileSystem, "get_file", refuses)
    url = f"file://{bundles[0]}"
    with pytest.raises(StorageError, match=f"{url} cannot be used .*Forbidden"):
        local_copy(url, KIND)


def test_locks_are_taken_as_nfs_demands(
    bundles: list[Path], cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared lock needs a file that can be read, an exclusive one a file that can be written."""
    flock = fcntl.flock

    def flock_on_nfs(file: IO[str], operation: int) -> None:
        can_lock = file.readable() if operation & fcntl.LOCK_SH else file.writable()
        if not can_lock:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_on_nfs)
    held = [local_copy(f"file://{path}", KIND) for path in bundles]
    release_copies(KIND, [])
    assert copies(cached) == set(held[-NUM_UNUSED:])


async def test_a_server_keeps_what_it_serves_and_the_newest_copies(
    bundles: list[Path], cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "FOLLOW_S", 0.05)  # replicas look at what they may drop
    filesystem = fsspec.filesystem("memory")
    for path in bundles:
        filesystem.put(str(path), f"/cached/{path.name}", recursive=True)
    paths = {"default": bundles[0], "other": bundles[0]}
    roots = ("memory://cached",)
    try:
        async with served(tmp_path, paths, bundle_roots=roots, keep_s=0.0) as one:
            # Not the first bundle: replicas have it already, and would not open its copy.
            for number, path in enumerate(bundles[1:]):
                name = "default" if number else "other"
                body = {"bundle": f"memory://cached/{path.name}", "model": name, "recall_floor": 0}
                answer = await one.ask("/admin/v1/swap", body, ADMIN)
                assert answer.status_code == 200, answer.text
            in_use = {one.admin.current(name).folder for name in paths}
            # Two are served. Coordinator and replica share a process here, so each of them may
            # release what the other one uses, until both have released for the last time.
            async with asyncio.timeout(20):
                while len(copies(cached)) > 2 + NUM_UNUSED or not in_use <= cache._held.keys():
                    await asyncio.sleep(0.05)
            assert in_use <= copies(cached)
            for name in paths:
                await one.search(["sort"], model=name)
            body = {"out": str(tmp_path / "state" / "compacted"), "model": "other"}
            answer = await one.ask("/admin/v1/compact", body, ADMIN)
            assert answer.status_code == 200, answer.text
    finally:
        filesystem.rm("/cached", recursive=True)


async def test_a_replica_follows_while_copies_wait_to_be_removed(
    bundles: list[Path], tmp_path: Path
) -> None:
    """A load that was given up may keep the thread of loads busy for minutes."""
    config = ServeConfig(
        bundles={"default": str(bundles[0])}, state_dir=str(tmp_path / "state"), keep_s=0.0
    )
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()
    is_over = threading.Event()
    try:
        replica = Follower(config, coordinator.follow)
        await replica.start()
        model = replica._models["default"]
        model.newest["old"] = model.newest[model.answering]
        model.dropped["old"] = 0.0
        replica._loader.submit(is_over.wait, 60)
        async with asyncio.timeout(10):
            await replica._step(0.1)
        assert "old" not in model.newest
    finally:
        is_over.set()
        coordinator.close()


async def test_a_release_that_a_load_put_off_is_made_up_for(
    bundles: list[Path], cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServeConfig(
        bundles={"default": f"file://{bundles[0]}"}, state_dir=str(tmp_path / "state"), keep_s=0.0
    )
    coordinator = SnapshotCoordinator(config)
    await coordinator.start()
    try:
        replica = Follower(config, coordinator.follow)
        await replica.start()
        model = replica._models["default"]
        # The release after the first load, which would release this copy too.
        replica._loader.submit(lambda: None).result()
        old = local_copy(f"file://{bundles[1]}", KIND)
        old_snapshot = model.newest[model.answering]
        model.newest["old"] = dataclasses.replace(old_snapshot, folder=old)
        model.dropped["old"] = 0.0
        decision = coordinator._models["default"].decision
        load = asyncio.get_running_loop().create_future()
        model.loads[decision.bundle] = load
        await replica._step(0.0)
        assert "old" not in model.newest
        assert old in cache._held
        del model.loads[decision.bundle]
        await replica._step(0.0)
        async with asyncio.timeout(10):
            while old in cache._held:
                await asyncio.sleep(0.01)
        assert old_snapshot.folder in cache._held
    finally:
        coordinator.close()


def test_a_user_without_a_home_folder_has_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", has_none)
    monkeypatch.delenv("XMCRAY_CACHE")
    release_copies(KIND, [])
