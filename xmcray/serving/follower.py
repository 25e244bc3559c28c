"""A replica's copy of what is served, kept in step with the coordinator.

A replica holds the newest snapshot of every bundle version that requests may name. Older snapshots
and versions stay for a while, for requests that began with them: a request names the version and
operation number with which it began, and is answered from exactly those.
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
PRESENT_S = 2.0  # between signs of life while operations are applied
LOADING_S = 0.2  # between updates while a bundle is loaded or catches up
RETRY_S = 0.5
FEW_OPERATIONS = 64  # so many are applied at once also to a version that does not answer


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
        # Whether copies of bundles may be held that do not answer any more.
        self._holds_more = False
        self._changed = asyncio.Condition()
        # By reference, what makes an earlier snapshot again.
        self._going_back: dict[SnapshotReference, asyncio.Task[Snapshot]] = {}
        # Two threads, for the reasons that the coordinator has two. And one for earlier snapshots:
        # the request that needs one must not wait for a large update.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="xmcray-loader")
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="xmcray-labels")
        self._returner = ThreadPoolExecutor(1, thread_name_prefix="xmcray-earlier")

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
        # On Python 3.11 a wait that is cancelled may end with a result or another error all the same.
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
        by_name = {}
        for name, model in self._models.items():
            by_name[name] = model.newest.get(model.answering, model.stale)
        return by_name

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

        def is_reached() -> bool:
            # A place of a log that was lost may have a number that the restored one never gets.
            if (version, place) in model.older:
                return True
            return version in model.newest and model.newest[version].number >= place.number

        # The request may have overtaken the update.
        if not is_reached():
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait_for(is_reached), wait_s)
        newest = model.newest.get(version)
        if newest is not None and newest.place == place:
            return newest
        if (version, place) in model.older:
            return model.older[version, place][1]
        # Elsewhere the commits may have come in other groups.
        if before := model.before(version, place):
            # Once for all requests, because several often come for one place.
            if reference not in self._going_back:
                task = asyncio.create_task(self._go_back(reference, *before))
                self._going_back[reference] = task
            # What a late request began is still there for those that come after it.
            shielded = asyncio.shield(self._going_back[reference])
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(shielded, deadline - time.monotonic())
        raise ProblemError(
            "not-ready",
            f"version {version[:12]} with operation {place.number} is not here; ask again",
        )

    async def _go_back(
        self, reference: SnapshotReference, earlier: Snapshot, commits: Sequence[Commit]
    ) -> Snapshot:
        """Makes and keeps the snapshot of a place that updates have passed."""
        loop = asyncio.get_running_loop()
        try:
            snapshot = await loop.run_in_executor(self._returner, earlier.after_commits, commits)
            self._models[reference.model].keep(snapshot)
            return snapshot
        finally:
            del self._going_back[reference]

    async def _step(self, wait_s: float) -> None:
        """Asks for updates once, and carries them out."""
        # Before the states are sent: the coordinator has to see the places of these versions.
        for name in self._models:
            self._take_caught_up(name)
        updates = await self._follow(self._report(), wait_s)
        failures = []
        async with self._showing_presence():
            for name, update in updates.items():
                # Other models do not wait for one that cannot be loaded.
                try:
                    await self._carry_out(name, update)
                except XmcrayError as error:
                    failures.append(error)
        for model in self._models.values():
            if model.forget(self._config.keep_s):
                self._holds_more = True
        if self._holds_more:
            self._release_copies()
        # Requests may wait for a version or an operation.
        if updates:
            async with self._changed:
                self._changed.notify_all()
        if failures:
            raise failures[0]
        # Until this work is over, its decision counts as not carried out. So the coordinator answers
        # the next question at once, with the operations that have come meanwhile.
        work: list[asyncio.Future[Snapshot]] = []
        for model in self._models.values():
            work += model.loads.values()
            work += [catch_up.changed for catch_up in model.catching_up.values()]
        # A load that is over may have to stay until another one is.
        unfinished = [future for future in work if not future.done()]
        if unfinished:
            await asyncio.wait(unfinished, timeout=LOADING_S, return_when=asyncio.FIRST_COMPLETED)

    async def _carry_out(self, name: str, update: Update) -> None:
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
        versions = {one.version for one in needed}
        for version in versions:
            model.dropped.pop(version, None)
        model.drop_loads(needed)
        # The same version may be at another path; the one that answers is loaded from its own.
        is_loaded = self._is_loaded(name, bundle)
        # A version that was just loaded answers when it has the operations that there are.
        if is_loaded and model.newest[bundle.version].number >= update.last:
            model.answering = bundle.version
            model.stale = None
        for version in model.newest.keys() - versions - {model.answering}:
            model.dropped.setdefault(version, time.monotonic())
        is_done = is_loaded and self._is_loaded_alongside(name, decision)
        # Last: the epoch tells the coordinator that the decision is carried out.
        if is_done and model.answering == bundle.version and not model.is_behind():
            model.epoch = decision.epoch

    async def _apply(self, name: str, update: Update) -> None:
        """Applies operations to the versions that lack them.

        Nothing waits for versions that are far behind the one that answers: a large label log takes
        minutes. It waits for those that are a little behind, because they would never be level with
        the one that answers if operations came all the time.
        """
        model = self._models[name]
        # Where the one that answers is before the update; if there is none, where one has to get to.
        current = update.last
        if model.answering:
            current = model.newest[model.answering].number
        for version, snapshot in list(model.newest.items()):
            commits = update.commits.get(version)
            if not commits:
                continue
            if current - snapshot.number > FEW_OPERATIONS:
                loop = asyncio.get_running_loop()
                changed = loop.run_in_executor(self._loader, snapshot.after_commits, commits)
                model.catching_up[version] = CatchUp(snapshot, commits, changed)
                continue
            with self._loading_again(name, version):
                changed_snapshot = await self._in_worker(snapshot.after_commits, commits)
                model.replace(snapshot, changed_snapshot, commits)

    def _take_caught_up(self, name: str) -> None:
        """Takes the snapshots that have got their operations."""
        model = self._models[name]
        for version, catch_up in list(model.catching_up.items()):
            if not catch_up.changed.done():
                continue
            del model.catching_up[version]
            with self._loading_again(name, version):
                changed = catch_up.changed.result()
                model.replace(catch_up.snapshot, changed, catch_up.commits)

    @contextlib.contextmanager
    def _loading_again(self, name: str, version: str) -> Iterator[None]:
        """Drops a version to which operations cannot be applied, so that it is loaded again."""
        try:
            yield
        except XmcrayError as error:
            # The coordinator has accepted the operations, so its snapshot is another one.
            log.error("model %s: %s; loading the bundle again", name, one_line(error))
            self._models[name].drop_stale(version)

    def _is_loaded(self, name: str, bundle: ServedBundle) -> bool:
        """Whether a bundle is loaded; begins to load it otherwise.

        Nothing waits for the load: it may take minutes, and operations are applied meanwhile.

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
            # If it fails or is dropped.
            self._holds_more = True
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

    def _is_loaded_alongside(self, name: str, decision: Decision) -> bool:
        """Whether a decision has no other bundle, or its load is over or failed."""
        model = self._models[name]
        bundle = decision.loading
        # Once for each decision, even if it takes long to be carried out for another reason.
        if decision.epoch != model.loading_epoch:
            model.loading_epoch = decision.epoch
            model.failure = ""
        if bundle is None or model.failure:
            return True
        try:
            return self._is_loaded(name, bundle)
        except XmcrayError as error:
            model.failure = str(error)
        except Exception as error:  # a mistake of ours; the coordinator refuses the swap
            log.exception("model %s: loading a bundle failed", name)
            model.failure = f"{type(error).__name__}: {one_line(error)}"
        return True

    def _release_copies(self) -> None:
        """Lets copies of bundles that came from URLs be removed, but those that may answer.

        Nothing waits for it: a load that was given up may come first, for minutes, and meanwhile
        the coordinator would take this replica for gone.
        """
        in_use: set[Path] = set()
        for model in self._models.values():
            # The folder of a bundle that is being loaded is not known yet. The next step looks again.
            if model.loads:
                return
            in_use |= model.folders()
        self._holds_more = False
        # Loads that begin from now on come after it in this thread.
        self._loader.submit(release_copies, KIND, in_use)

    @contextlib.asynccontextmanager
    async def _showing_presence(self) -> AsyncIterator[None]:
        """Shows the coordinator every few seconds that this replica lives: many operations are
        applied for minutes.
        """

        async def show() -> None:
            while True:
                await asyncio.sleep(PRESENT_S)
                # Without a coordinator nothing waits for this replica.
                with contextlib.suppress(Exception):
                    await self._follow(self._report(), 0.0)

        task = asyncio.create_task(show())
        try:
            yield
        finally:
            task.cancel()

    async def _in_worker(self, function: Callable[..., Snapshot], *arguments: Any) -> Snapshot:
        """Calls a function that makes a snapshot in the thread of label operations."""
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
            # Reads pages of the files before the first request.
            snapshot.probe(snapshot.probes)
        return snapshot.at(bundle.place)
