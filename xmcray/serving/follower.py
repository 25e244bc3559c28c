"""A replica's copy of what is served, kept in step with the coordinator.

A replica holds the newest snapshot of every bundle version that requests may name. A request names
the version and the place in the label log with which it began, and is answered from exactly that
snapshot. Older snapshots and versions therefore stay for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from xmcray.errors import XmcrayError, one_line
from xmcray.retrieval.bundle import KIND
from xmcray.retrieval.shards import ALL_SHARDS, ShardSubset
from xmcray.serving.decisions import Decision, Follow, Report, ServedBundle, Update
from xmcray.serving.followed_model import CatchUp, FollowedModel
from xmcray.serving.log_place import Commit
from xmcray.serving.problems import ProblemError
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot, SnapshotReference
from xmcray.serving.source import SnapshotSource
from xmcray.storage.cache import release_copies

log = logging.getLogger("xmcray.serving")
FOLLOW_S = 4.0  # longest wait for an update
PRESENT_S = 2.0  # between heartbeats while operations are applied
LOADING_S = 0.2  # between updates while a bundle is loaded or catches up
RETRY_S = 0.5
# A version that is behind the answering one by at most this many operations gets its operations
# immediately. A version that is further behind catches up in the background.
FEW_OPERATIONS = 64


class Follower(SnapshotSource):
    """The models of one replica. `start` before use; `run` in the background from then on.

    Args:
        config: settings.
        follow: the coordinator's method.
        subset: shards that this replica searches.
    """

    def __init__(
        self,
        config: ServeConfig,
        follow: Follow,
        subset: ShardSubset = ALL_SHARDS,
    ) -> None:
        self._config = config
        self._follow = follow
        self._subset = subset
        self._models = {name: FollowedModel() for name in config.bundles}
        self._replica = secrets.token_hex(8)
        self._num_reports = 0
        # Whether the cache may hold copies of bundles that are no longer needed.
        self._may_hold_unused_copies = False
        self._changed = asyncio.Condition()
        # Tasks that rebuild earlier snapshots, by the reference of the snapshot.
        self._rebuilds: dict[SnapshotReference, asyncio.Task[Snapshot]] = {}
        # Loads and label operations have one thread each, for the same reasons as in the coordinator.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="xmcray-loader")
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="xmcray-labels")
        # Rebuilds have their own thread, because a request waits for them and must not wait for a
        # large update as well.
        self._rebuilder = ThreadPoolExecutor(1, thread_name_prefix="xmcray-earlier")

    async def start(self) -> None:
        """Loads what is served now."""
        while any(not model.answering for model in self._models.values()):
            await self._step(self._config.swap_s)

    async def run(self) -> None:
        """Follows the coordinator until cancelled. Without a coordinator, requests are still
        answered.
        """
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        # On Python 3.11 a cancelled `wait_for` may still return a result or raise another error. So the
        # loop asks the task itself whether it was cancelled.
        while not task.cancelling():
            try:
                await self._step(FOLLOW_S)
            except Exception as error:
                if task.cancelling():
                    break
                log.warning(
                    "the coordinator cannot be followed (%s); trying again", one_line(error)
                )
                await asyncio.sleep(RETRY_S)

    def snapshots(self) -> Mapping[str, Snapshot | None]:
        """See `SnapshotSource`."""
        return {name: model.current for name, model in self._models.items()}

    async def referenced(self, reference: SnapshotReference, wait_s: float) -> Snapshot:
        """The snapshot that a request began with elsewhere; waits if this replica is behind.

        Args:
            reference: names the snapshot.
            wait_s: longest wait, seconds.
        Raises:
            ProblemError: this replica does not get there in time, or has dropped it.
        """
        version = reference.version
        place = reference.place
        model = self._models[reference.model]
        deadline = time.monotonic() + wait_s
        # The request may have arrived before the update that it depends on.
        await self._wait_until_reached(reference, wait_s)
        newest = model.newest.get(version)
        if newest is not None and newest.place == place:
            return newest
        if (version, place) in model.older:
            _, snapshot = model.older[version, place]
            return snapshot
        # This replica may have applied several commits at once, and the request may have begun between
        # two of them on another replica.
        before = model.before(version, place)
        if before is not None:
            earlier, commits = before
            # Several requests often need the same snapshot, so they share one task.
            if reference not in self._rebuilds:
                task = asyncio.create_task(self._rebuild(reference, earlier, commits))
                self._rebuilds[reference] = task
            # The task goes on after this request times out, because later requests use its result.
            shielded = asyncio.shield(self._rebuilds[reference])
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(shielded, deadline - time.monotonic())
        raise ProblemError(
            "not-ready",
            f"version {version[:12]} with operation {place.number} is not here; ask again",
        )

    async def _wait_until_reached(self, reference: SnapshotReference, wait_s: float) -> None:
        """Waits until this replica has reached or passed a place, for `wait_s` at most."""
        version = reference.version
        place = reference.place
        model = self._models[reference.model]

        def is_reached() -> bool:
            # If a log was lost, the restored log may never reach the number of a place in the lost one.
            if (version, place) in model.older:
                return True
            return version in model.newest and model.newest[version].number >= place.number

        if is_reached():
            return
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(is_reached), wait_s)

    async def _rebuild(
        self, reference: SnapshotReference, earlier: Snapshot, commits: Sequence[Commit]
    ) -> Snapshot:
        """Rebuilds a snapshot that this replica skipped, and keeps it.

        Args:
            reference: of the snapshot.
            earlier: a snapshot before it.
            commits: from the earlier snapshot to this one.
        """
        loop = asyncio.get_running_loop()
        try:
            snapshot = await loop.run_in_executor(self._rebuilder, earlier.after_commits, commits)
            self._models[reference.model].keep(snapshot)
            return snapshot
        finally:
            del self._rebuilds[reference]

    async def _step(self, wait_s: float) -> None:
        """Asks for updates once, and carries them out."""
        # Before the states are sent, because the coordinator must see the places of these versions.
        for name in self._models:
            await self._take_caught_up(name)
        updates = await self._follow(self._report(), wait_s)
        failures = []
        async with self._heartbeat():
            for name, update in updates.items():
                # A model that cannot be loaded must not hold up the others.
                try:
                    await self._carry_out(name, update)
                except XmcrayError as error:
                    failures.append(error)
        for model in self._models.values():
            if model.forget(self._config.keep_s):
                self._may_hold_unused_copies = True
        if self._may_hold_unused_copies:
            self._release_copies()
        if updates:
            await self._wake_requests()
        if failures:
            raise failures[0]
        await self._wait_for_background_work()

    async def _wake_requests(self) -> None:
        """Lets requests that wait for a version or an operation look whether it is there."""
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for_background_work(self) -> None:
        """Waits for the next load or catch-up to finish, for LOADING_S at most.

        Until all of them have finished, their decision is not reported as carried out. The coordinator
        therefore answers the next `_follow` immediately, with the operations that have come meanwhile.
        """
        work: list[asyncio.Future[Snapshot]] = []
        for model in self._models.values():
            work += model.loads.values()
            work += [catch_up.changed for catch_up in model.catching_up.values()]
        # A finished load may stay in the list until another load has finished too.
        unfinished = [future for future in work if not future.done()]
        if unfinished:
            await asyncio.wait(unfinished, timeout=LOADING_S, return_when=asyncio.FIRST_COMPLETED)

    async def _carry_out(self, name: str, update: Update) -> None:
        """Applies an update to one model, and starts the loads that its decision asks for."""
        model = self._models[name]
        decision = update.decision
        for version in update.stale:
            log.warning(
                "model %s: the label log is another one than that of operation %d; loading the bundle again",
                name,
                model.newest[version].number,
            )
            model.drop_stale(version)
        await self._apply(name, update)
        bundle = decision.bundle
        needed = [bundle]
        if decision.loading:
            needed.append(decision.loading)
        needed_versions = {served.version for served in needed}
        for version in needed_versions:
            model.dropped.pop(version, None)
        model.drop_loads(needed)
        # Both bundles may have the same version at different paths. The answering bundle comes first,
        # so the version is loaded from its path.
        is_loaded = self._poll_load(name, bundle)
        # A newly loaded version does not answer before it has all operations.
        if is_loaded and model.newest[bundle.version].number >= update.last:
            model.answering = bundle.version
            model.stale = None
        for version in model.newest.keys() - needed_versions - {model.answering}:
            model.dropped.setdefault(version, time.monotonic())
        is_done = is_loaded and self._poll_load_alongside(name, decision)
        # The epoch is set last, because it tells the coordinator that the decision is carried out.
        if is_done and model.answering == bundle.version and not model.is_behind():
            model.epoch = decision.epoch

    async def _apply(self, name: str, update: Update) -> None:
        """Applies operations to the versions that lack them.

        A version that is far behind the answering one catches up in the background, because a large
        label log takes minutes. A version that is a little behind gets its operations here. In the
        background it would never draw level if operations came all the time.
        """
        model = self._models[name]
        # Before this update, so that a version that is level with the answering one is never far
        # behind it. While none answers, the last operation of all.
        answering_number = update.last
        if model.answering:
            answering_number = model.newest[model.answering].number
        for version, snapshot in list(model.newest.items()):
            commits = update.commits.get(version)
            if not commits:
                continue
            if answering_number - snapshot.number > FEW_OPERATIONS:
                loop = asyncio.get_running_loop()
                changed = loop.run_in_executor(self._loader, snapshot.after_commits, commits)
                model.catching_up[version] = CatchUp(snapshot, commits, changed)
                continue
            with self._reload_on_error(name, version):
                changed_snapshot = await self._in_worker(snapshot.after_commits, commits)
                model.replace(snapshot, changed_snapshot, commits)

    async def _take_caught_up(self, name: str) -> None:
        """Installs the snapshots of versions that have finished catching up."""
        model = self._models[name]
        for version, catch_up in list(model.catching_up.items()):
            if not catch_up.changed.done():
                continue
            del model.catching_up[version]
            with self._reload_on_error(name, version):
                changed = catch_up.changed.result()
                model.replace(catch_up.snapshot, changed, catch_up.commits)
                await self._wake_requests()

    @contextlib.contextmanager
    def _reload_on_error(self, name: str, version: str) -> Iterator[None]:
        """Drops a version to which operations cannot be applied, so that it is loaded again."""
        try:
            yield
        except XmcrayError as error:
            # The coordinator could apply the operations, so its snapshot must differ from this one.
            log.error("model %s: %s; loading the bundle again", name, one_line(error))
            self._models[name].drop_stale(version)

    def _poll_load(self, name: str, bundle: ServedBundle) -> bool:
        """Returns whether a bundle is loaded; starts to load it if no load is running.

        Does not wait for the load. It may take minutes, and operations are applied meanwhile.

        Args:
            name: name of the model.
            bundle: the bundle.
        Raises:
            XmcrayError: it cannot be loaded. The next call tries again.
        """
        model = self._models[name]
        if bundle.version in model.newest:
            return True
        if bundle not in model.loads:
            loop = asyncio.get_running_loop()
            model.loads[bundle] = loop.run_in_executor(self._loader, self._load, name, bundle)
            # Set when it begins, because a load that fails or is dropped leaves a copy that no one needs.
            self._may_hold_unused_copies = True
        load = model.loads[bundle]
        if not load.done():
            return False
        del model.loads[bundle]
        try:
            model.newest[bundle.version] = load.result()
        except XmcrayError as error:
            log.error("model %s: %s cannot be loaded (%s)", name, bundle.path, error)
            raise
        return True

    def _poll_load_alongside(self, name: str, decision: Decision) -> bool:
        """Returns whether nothing remains to be loaded alongside, because it is loaded or has failed."""
        model = self._models[name]
        bundle = decision.loading
        # A new decision makes a new attempt. The same decision does not repeat a failed load.
        if decision.epoch != model.loading_epoch:
            model.loading_epoch = decision.epoch
            model.failure = ""
        if bundle is None or model.failure:
            return True
        try:
            return self._poll_load(name, bundle)
        except XmcrayError as error:
            model.failure = str(error)
        except Exception as error:  # a bug of xmcray; the coordinator refuses the swap
            log.exception("model %s: loading a bundle failed", name)
            model.failure = f"{type(error).__name__}: {one_line(error)}"
        return True

    def _release_copies(self) -> None:
        """Removes the local copies of bundles from URLs, except for those that may still answer.

        Does not wait for the removal. An abandoned load may occupy the thread for minutes, and the
        coordinator would meanwhile take this replica for dead.
        """
        in_use: set[Path] = set()
        for model in self._models.values():
            # The folder of a bundle that is being loaded is not known yet. The next step tries again.
            if model.loads:
                return
            in_use |= model.folders()
        self._may_hold_unused_copies = False
        # In the thread of loads, so that a load that starts later also runs later.
        self._loader.submit(release_copies, KIND, in_use)

    @contextlib.asynccontextmanager
    async def _heartbeat(self) -> AsyncIterator[None]:
        """Tells the coordinator every few seconds that this replica is alive.

        Applying many operations takes minutes, and the replica asks for no updates meanwhile.
        """

        async def beat() -> None:
            while True:
                await asyncio.sleep(PRESENT_S)
                # If there is no coordinator, no one waits for this replica.
                with contextlib.suppress(Exception):
                    await self._follow(self._report(), 0.0)

        task = asyncio.create_task(beat())
        try:
            yield
        finally:
            task.cancel()

    async def _in_worker(self, function: Callable[..., Snapshot], *arguments: Any) -> Snapshot:
        """Calls a function that returns a snapshot, in the thread of label operations."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    def _report(self) -> Report:
        self._num_reports += 1
        states = {name: model.state() for name, model in self._models.items()}
        return Report(self._replica, self._num_reports, states)

    def _load(self, name: str, bundle: ServedBundle) -> Snapshot:
        config = self._config
        snapshot = Snapshot.load(
            bundle.path, name, config.threads, self._subset, config.encoder, config.rerank
        )
        if snapshot.version != bundle.version:
            message = f"{bundle.path} has SHA-256 {snapshot.version}, expected {bundle.version}"
            raise ProblemError("refused", message)
        if self._subset == ALL_SHARDS:
            # A trial search reads the files from disk before the first request does.
            snapshot.probe(snapshot.probes)
        return snapshot.at(bundle.place)
