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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from xmcray.errors import XmcrayError
from xmcray.retrieval.shards import ALL_SHARDS, ShardSubset
from xmcray.serving.coordinator import ReplicaState, SnapshotUpdate
from xmcray.serving.problems import ProblemError, unknown_model
from xmcray.serving.schema import Operation
from xmcray.serving.service import SnapshotReference
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot

T = TypeVar("T")
log = logging.getLogger("xmcray.serving")
FOLLOW_S = 4.0  # longest wait for an update
PRESENT_S = 2.0  # between signs of life while a bundle is loaded
RETRY_S = 0.5
MAX_OLD_SNAPSHOTS = 64

Follow = Callable[[str, Mapping[str, ReplicaState], float], Awaitable[dict[str, SnapshotUpdate]]]
Operations = Callable[[str, int], Awaitable[Sequence[Operation]]]


class _FollowedModel:
    """What a replica holds of one model.

    Attributes:
        epoch: of the last decision that was carried out.
        answering: version that answers requests that begin now; "" before the first one is loaded.
        newest: the newest snapshot of each version.
        older: earlier snapshots by version and operation number, and the time at which each was
            replaced.
        dropped: versions that are no longer needed, and since when.
    """

    def __init__(self) -> None:
        self.epoch = ""
        self.answering = ""
        self.newest: dict[str, Snapshot] = {}
        self.older: dict[tuple[str, int], tuple[float, Snapshot]] = {}
        self.dropped: dict[str, float] = {}

    def state(self) -> ReplicaState:
        """The state that is sent to the coordinator."""
        # The coordinator sends what the version that is furthest behind lacks.
        number = min((snapshot.number for snapshot in self.newest.values()), default=-1)
        return ReplicaState(self.epoch, self.answering, tuple(self.newest), number)

    def replace(self, old: Snapshot, new: Snapshot) -> None:
        """Sets the newest snapshot of a version."""
        self.older[old.version, old.number] = (time.monotonic(), old)
        self.newest[new.version] = new
        while len(self.older) > MAX_OLD_SNAPSHOTS:
            # Dictionaries keep the order of insertion: the first one is the oldest.
            self.older.pop(next(iter(self.older)))

    def forget(self, keep_s: float) -> None:
        """Drops versions and snapshots that have not been needed for so long."""
        limit = time.monotonic() - keep_s
        # Copies of the items, because the dictionaries shrink meanwhile.
        for version, since in list(self.dropped.items()):
            if since < limit:
                del self.dropped[version]
                del self.newest[version]
        for (version, number), (since, _) in list(self.older.items()):
            if since <= limit or version not in self.newest:
                del self.older[version, number]


class Follower:
    """The models of one replica. `start` before use; `run` in the background from then on.

    Args:
        config: settings.
        follow: the coordinator's method.
        operations: the coordinator's method.
        subset: shards that this replica searches.
    """

    def __init__(
        self,
        config: ServeConfig,
        follow: Follow,
        operations: Operations,
        subset: ShardSubset = ALL_SHARDS,
    ) -> None:
        self._config = config
        self._follow = follow
        self._operations = operations
        self._subset = subset
        self._models = {name: _FollowedModel() for name in config.bundles}
        self._replica = secrets.token_hex(8)
        self._thread = ThreadPoolExecutor(1, "follower")
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        """Loads what is served now."""
        while any(not model.answering for model in self._models.values()):
            await self._step(self._config.swap_s)

    async def run(self) -> None:
        """Follows the coordinator until cancelled. Without a coordinator, requests are still
        answered.
        """
        while True:
            try:
                await self._step(FOLLOW_S)
            except Exception as error:
                reason = " ".join(str(error).split())[:200]
                log.warning("the coordinator cannot be followed (%s); trying again", reason)
                await asyncio.sleep(RETRY_S)

    @property
    def ready(self) -> bool:
        """Whether every model can answer."""
        return all(model.answering in model.newest for model in self._models.values())

    def current(self, name: str | None) -> Snapshot:
        """The snapshot from which a request that begins now is answered.

        Raises:
            ProblemError: no such model, or it is not loaded yet.
        """
        model = self._models.get(self.resolve(name))
        if model is None:
            raise unknown_model(str(name), self._models)
        if model.answering not in model.newest:
            message = f"model {self.resolve(name)!r} is being loaded; ask again"
            raise ProblemError("not-ready", message)
        return model.newest[model.answering]

    def resolve(self, name: str | None) -> str:
        """The model that a request means."""
        return next(iter(self._models)) if name is None else name

    async def referenced(self, reference: SnapshotReference, wait_s: float) -> Snapshot:
        """The snapshot that a request began with elsewhere; waits if this replica is behind.

        Args:
            reference: names the snapshot.
            wait_s: longest wait, seconds.
        Raises:
            ProblemError: this replica does not get there in time, or has dropped it.
        """
        version = reference.version
        number = reference.number
        model = self._models[reference.model]

        def is_reached() -> bool:
            return version in model.newest and model.newest[version].number >= number

        # The request may have overtaken the update.
        await self._wait_until(is_reached, wait_s)
        newest = model.newest.get(version)
        if newest is not None and newest.number == number:
            return newest
        if (version, number) in model.older:
            return model.older[version, number][1]
        raise ProblemError(
            "not-ready", f"version {version[:12]} with operation {number} is not here; ask again"
        )

    async def any_snapshot(self, name: str, version: str, wait_s: float) -> Snapshot:
        """Any snapshot of a version: all have the same encoder.

        Args:
            name: name of the model.
            version: SHA-256 of the bundle.
            wait_s: longest wait, seconds.
        Raises:
            ProblemError: it is not loaded in time.
        """
        model = self._models[name]
        await self._wait_until(lambda: version in model.newest, wait_s)
        if version not in model.newest:
            raise ProblemError("not-ready", f"version {version[:12]} is not here; ask again")
        return model.newest[version]

    async def _wait_until(self, is_reached: Callable[[], bool], wait_s: float) -> None:
        """Waits for updates until a condition holds; mostly it holds already."""
        if not is_reached():
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait_for(is_reached), wait_s)

    async def _step(self, wait_s: float) -> None:
        """Asks for updates once, and carries them out."""
        updates = await self._follow(self._replica, self._states(), wait_s)
        async with self._showing_presence():
            for name, update in updates.items():
                await self._carry_out(name, update)
        for model in self._models.values():
            model.forget(self._config.keep_s)
        # Requests may wait for a version or an operation.
        if updates:
            async with self._changed:
                self._changed.notify_all()

    async def _carry_out(self, name: str, update: SnapshotUpdate) -> None:
        model = self._models[name]
        head = update.head
        for snapshot in list(model.newest.values()):
            # Versions may be at different operations.
            later = update.operations[max(0, snapshot.number - update.since) :]
            if later:
                model.replace(snapshot, await self._run(snapshot.after, later))
        needed = {head.version: head.bundle}
        if head.loading:
            bundle, version = head.loading
            needed[version] = bundle
        for version, bundle in needed.items():
            model.dropped.pop(version, None)
            if version in model.newest:
                continue
            try:
                model.newest[version] = await self._load(name, bundle, version)
            except XmcrayError as error:
                log.error("model %s: %s cannot be loaded (%s)", name, bundle, error)
                # A version to swap to may be broken. Then the coordinator refuses the swap.
                if version == head.version:
                    raise
        # All that the decision names is loaded: requests that begin now use it.
        model.answering = head.version
        for version in model.newest.keys() - needed.keys():
            model.dropped.setdefault(version, time.monotonic())
        # Last: the epoch tells the coordinator that the decision is carried out.
        model.epoch = head.epoch

    @contextlib.asynccontextmanager
    async def _showing_presence(self) -> AsyncIterator[None]:
        """Shows the coordinator every few seconds that this replica lives: large bundles load for
        minutes.
        """

        async def show() -> None:
            while True:
                await asyncio.sleep(PRESENT_S)
                # Without a coordinator nothing waits for this replica.
                with contextlib.suppress(Exception):
                    await self._follow(self._replica, self._states(), 0.0)

        task = asyncio.create_task(show())
        try:
            yield
        finally:
            task.cancel()

    def _states(self) -> dict[str, ReplicaState]:
        return {name: model.state() for name, model in self._models.items()}

    async def _load(self, name: str, bundle: str, version: str) -> Snapshot:
        config = self._config
        snapshot = await self._run(
            Snapshot.load, bundle, name, config.threads, self._subset, config.encoder
        )
        if snapshot.version != version:
            message = f"{bundle} has SHA-256 {snapshot.version}, expected {version}"
            raise ProblemError("refused", message)
        # In chunks, until the log has no more.
        while operations := await self._operations(name, snapshot.number):
            snapshot = await self._run(snapshot.after, operations)
        if self._subset == ALL_SHARDS:
            # Reads pages of the files before the first request.
            await self._run(snapshot.probe, snapshot.probes)
        return snapshot

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function in this replica's own thread, so that requests go on."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
