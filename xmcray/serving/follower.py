"""A replica's copy of what is served, kept in step with the coordinator.

Every version that may be asked for is held with its newest snapshot; older snapshots and versions stay for a while, for
requests that began with them. A request names the pair (version, operation number) it began with, and is answered from
exactly that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from xmcray.errors import XmcrayError
from xmcray.retrieval.shards import ALL_SHARDS, ShardSubset
from xmcray.serving.coordinator import Known, News, Numbered
from xmcray.serving.problems import ProblemError, unknown_model
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot

log = logging.getLogger("xmcray.serving")
FOLLOW_S, PRESENT_S = (
    4.0,
    2.0,
)  # longest wait for news; between signs of life while a bundle is loaded
RETRY_S = 0.5
OLD_SNAPSHOTS = 64

Follow = Callable[[str, Mapping[str, Known], float], Awaitable[dict[str, News]]]
Operations = Callable[[str, int], Awaitable[list[Numbered]]]


class _Model:
    """What a replica holds of one model."""

    def __init__(self) -> None:
        self.epoch, self.answering = "", ""
        self.newest: dict[str, Snapshot] = {}
        self.older: dict[tuple[str, int], tuple[float, Snapshot]] = {}
        self.dropped: dict[str, float] = {}  # versions that nobody begins with any more, since when

    def known(self) -> Known:
        number = min((snapshot.number for snapshot in self.newest.values()), default=-1)
        return Known(self.epoch, self.answering, tuple(self.newest), number)


class Follower:
    """The models of one replica. `start` before use; `run` in the background from then on.

    Args:
        follow, operations: the coordinator's methods.
        subset: of the index shards, that this replica searches.
    """

    def __init__(
        self,
        config: ServeConfig,
        follow: Follow,
        operations: Operations,
        subset: ShardSubset = ALL_SHARDS,
    ) -> None:
        self._config, self._follow, self._operations, self._subset = (
            config,
            follow,
            operations,
            subset,
        )
        self._models = {name: _Model() for name in config.bundles}
        self._replica = secrets.token_hex(8)
        self._thread, self._changed = ThreadPoolExecutor(1, "follower"), asyncio.Condition()

    async def start(self) -> None:
        """Loads what is served now."""
        while any(not model.answering for model in self._models.values()):
            await self._step(self._config.swap_s)

    async def run(self) -> None:
        """Follows the coordinator until it is cancelled. Without one, requests go on being answered."""
        while True:
            try:
                await self._step(FOLLOW_S)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.warning(
                    "the coordinator cannot be followed (%s); trying again",
                    " ".join(str(error).split())[:200],
                )
                await asyncio.sleep(RETRY_S)

    @property
    def ready(self) -> bool:
        """Whether every model can be asked."""
        return all(model.answering in model.newest for model in self._models.values())

    def current(self, name: str | None) -> Snapshot:
        """What a request that begins now is answered from.

        Raises:
            ProblemError: no such model, or it is not loaded yet.
        """
        model = self._models.get(self.resolve(name))
        if model is None:
            raise unknown_model(str(name), self._models)
        if model.answering not in model.newest:
            raise ProblemError(
                "not-ready", f"model {self.resolve(name)!r} is being loaded; ask again"
            )
        return model.newest[model.answering]

    def resolve(self, name: str | None) -> str:
        """The model that a request means."""
        return next(iter(self._models)) if name is None else name

    async def pinned(self, name: str, version: str, number: int, wait_s: float) -> Snapshot:
        """The snapshot that a request began with elsewhere; waits if this replica is behind.

        Raises:
            ProblemError: this replica does not get there in time, or has dropped it.
        """
        model = self._models[name]

        def reached() -> bool:
            return version in model.newest and model.newest[version].number >= number

        await self._until(reached, wait_s)
        newest = model.newest.get(version)
        if newest is not None and newest.number == number:
            return newest
        if (version, number) in model.older:
            return model.older[version, number][1]
        raise ProblemError(
            "not-ready", f"version {version[:12]} with operation {number} is not here; ask again"
        )

    async def any_of(self, name: str, version: str, wait_s: float) -> Snapshot:
        """Some snapshot of a version: its encoder is the same in all of them.

        Raises:
            ProblemError: it is not loaded in time.
        """
        model = self._models[name]
        await self._until(lambda: version in model.newest, wait_s)
        if version not in model.newest:
            raise ProblemError("not-ready", f"version {version[:12]} is not here; ask again")
        return model.newest[version]

    async def _until(self, reached: Callable[[], bool], wait_s: float) -> None:
        """Waits for news that make a condition true, if it is not true already, which is the rule."""
        if not reached():
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait_for(reached), wait_s)

    async def _step(self, wait_s: float) -> None:
        news = await self._follow(self._replica, self._known(), wait_s)
        async with self._present():
            for name, told in news.items():
                await self._obey(name, self._models[name], told)
        for model in self._models.values():
            self._forget(model)
        if news:
            async with self._changed:
                self._changed.notify_all()

    async def _obey(self, name: str, model: _Model, news: News) -> None:
        head = news.head
        for snapshot in list(model.newest.values()):
            later = [operation for number, operation in news.operations if number > snapshot.number]
            if later:
                await self._replace(model, snapshot, later)
        wanted = [(head.bundle, head.version), *([head.loading] if head.loading else [])]
        for bundle, version in wanted:
            if version not in model.newest:
                try:
                    model.newest[version] = await self._load(name, bundle, version)
                except XmcrayError as error:
                    log.error("model %s: %s cannot be loaded (%s)", name, bundle, error)
                    if version == head.version:
                        raise
            model.dropped.pop(version, None)
        if head.version in model.newest:
            model.answering = head.version
        for version in model.newest.keys() - {version for _, version in wanted}:
            model.dropped.setdefault(version, time.monotonic())
        model.epoch = head.epoch

    @contextlib.asynccontextmanager
    async def _present(self) -> AsyncIterator[None]:
        """Tells the coordinator every few seconds that this replica lives: a large bundle loads for minutes."""

        async def tell() -> None:
            while True:
                await asyncio.sleep(PRESENT_S)
                with contextlib.suppress(
                    Exception
                ):  # without a coordinator nobody waits for this replica
                    await self._follow(self._replica, self._known(), 0.0)

        telling = asyncio.create_task(tell())
        try:
            yield
        finally:
            telling.cancel()

    def _known(self) -> dict[str, Known]:
        return {name: model.known() for name, model in self._models.items()}

    async def _load(self, name: str, bundle: str, version: str) -> Snapshot:
        config = self._config
        snapshot: Snapshot = await self._run(
            Snapshot.load, bundle, name, config.threads, self._subset, config.encoder
        )
        if snapshot.version != version:
            raise ProblemError(
                "refused", f"{bundle} has SHA-256 {snapshot.version}, expected {version}"
            )
        while operations := await self._operations(name, snapshot.number):
            snapshot = await self._run(snapshot.after, [operation for _, operation in operations])
        if self._subset == ALL_SHARDS:
            await self._run(
                snapshot.probe, snapshot.probes
            )  # pages of the files are read before the first request
        return snapshot

    async def _replace(self, model: _Model, snapshot: Snapshot, operations: Any) -> None:
        model.older[snapshot.version, snapshot.number] = time.monotonic(), snapshot
        model.newest[snapshot.version] = await self._run(snapshot.after, operations)
        while len(model.older) > OLD_SNAPSHOTS:
            model.older.pop(next(iter(model.older)))

    def _forget(self, model: _Model) -> None:
        """Lets go of what no request can still mean."""
        past = time.monotonic() - self._config.keep_s
        for version in [version for version, since in model.dropped.items() if since < past]:
            del model.dropped[version], model.newest[version]
        model.older = {
            pin: kept
            for pin, kept in model.older.items()
            if kept[0] > past and pin[0] in model.newest
        }

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
