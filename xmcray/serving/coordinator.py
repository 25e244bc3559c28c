"""Decides what is served: which bundle of each model, and which operations on its labels. One
process.

All replicas follow it (follower.py). A label operation is acknowledged when it is in the log on the
disk. A new bundle is first loaded and probed here, then loaded by every replica alongside the old
one, and only then answers. Decisions are kept in the state folder, so that a coordinator that is
started again goes on where the last one was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from xmcray.errors import StorageError, XmcrayError
from xmcray.retrieval.bundle import KIND
from xmcray.serving import schema
from xmcray.serving.bundle_roots import BundleRoots
from xmcray.serving.compaction import write_compacted
from xmcray.serving.decisions import Decision, ReplicaState, Report, ServedBundle, Update
from xmcray.serving.event_log import EventLog
from xmcray.serving.events import NOT_COLLECTED, FeedbackEvent, SearchEvent
from xmcray.serving.label_log import LabelLog
from xmcray.serving.metrics import coordinator_metrics
from xmcray.serving.operations import check_operations
from xmcray.serving.problems import ProblemError
from xmcray.serving.replicas import ALIVE_S, Replicas
from xmcray.serving.settings import ServeConfig, absolute
from xmcray.serving.snapshot import Snapshot
from xmcray.serving.source import SnapshotSource
from xmcray.serving.state_folder import StateFolder
from xmcray.serving.trial import check_successor
from xmcray.storage.cache import release_copies

log = logging.getLogger("xmcray.serving")
T = TypeVar("T")


@dataclass(slots=True)
class _ServedModel:
    """One model: the decision, its snapshot in this process, and its logs."""

    name: str
    folder: StateFolder
    decision: Decision
    snapshot: Snapshot
    log: LabelLog
    events: EventLog | None
    operating: asyncio.Lock = field(default_factory=asyncio.Lock)
    swapping: asyncio.Lock = field(default_factory=asyncio.Lock)


class SnapshotCoordinator(SnapshotSource):
    """Holds the decision, the snapshot and the log of every model. `start` before use.

    Args:
        config: settings.
        has_replicas: whether replicas follow, so that a swap waits for those of a coordinator that
            died.
    """

    def __init__(self, config: ServeConfig, *, has_replicas: bool = False) -> None:
        self._config = config
        self._has_replicas = has_replicas
        self._roots = BundleRoots(config)
        self._models: dict[str, _ServedModel] = {}
        self._replicas = Replicas()
        self._tasks: set[asyncio.Task[Any]] = set()
        # Loads and compactions take turns in one thread. A thread keeps much of the memory that it
        # once needed, and those of the loop's pool would all come to do this work.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="xmcray-loader")
        # Label operations do not wait for loads, and have one thread for the same reason.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="xmcray-labels")

    async def start(self) -> None:
        """Loads the bundles and replays their logs.

        Raises:
            XmcrayError: a bundle or a log is damaged, or another coordinator uses the state folder.
        """
        for name in self._config.bundles:
            model = await self._in_loader(self._open, name)
            self._models[name] = model
            await self._in_loader(model.snapshot.probe, model.snapshot.probes)
        self._release_copies()
        if self._has_replicas:
            self._replicas.expect_reports()

    async def follow(self, report: Report, wait_s: float) -> dict[str, Update]:
        """The updates that a replica lacks, as soon as there are any; none after `wait_s`.

        Args:
            report: what the replica has.
            wait_s: longest wait, seconds.
        """
        states = report.states

        def updates() -> dict[str, Update]:
            lacking = {}
            for name, model in self._models.items():
                # While a new version of the application is rolled out, replicas of the old one may
                # serve fewer models.
                update = _update(model, states[name]) if name in states else None
                if update:
                    lacking[name] = update
            return lacking

        return await self._replicas.report(report, updates, wait_s)

    async def operate(self, name: str, operations: Sequence[schema.Operation]) -> int:
        """Makes operations durable, all of them or none.

        Args:
            name: name of the model.
            operations: the changes, in order.
        Returns:
            Number of the last one.
        Raises:
            ProblemError: an operation does not fit the labels, or the disk is full.
        """
        return await self._to_the_end(self._operate(self._models[name], operations))

    async def _operate(self, model: _ServedModel, operations: Sequence[schema.Operation]) -> int:
        async with model.operating:
            with _refusing():
                snapshot = await self._in_worker(_changed, model.snapshot, operations)
            with _refusing("the operations were not acknowledged: "):
                number = await self._in_worker(model.log.append, operations)
            # After the append: an operation is never answered before it is durable.
            model.snapshot = snapshot.at(model.log.place(number))
        await self._replicas.notify()
        return number

    async def swap(self, name: str, request: schema.SwapRequest) -> schema.SwapResponse:
        """Answers from another bundle, once every replica has it.

        Args:
            name: name of the model.
            request: the new bundle, and what it must fulfil.
        Raises:
            ProblemError: the bundle is not below a root, damaged or worse, a replica could not load it, or the state
                disk is full; the old bundle is served as before.
        """
        self._roots.check(request.bundle)
        return await self._to_the_end(self._swap_and_release(self._models[name], request))

    async def _swap_and_release(
        self, model: _ServedModel, request: schema.SwapRequest
    ) -> schema.SwapResponse:
        try:
            return await self._swap(model, request)
        finally:
            # Also the copy of a bundle that was refused.
            self._release_copies()

    def _release_copies(self) -> None:
        """Lets copies of bundles that came from URLs be removed, but those that are served.

        Nothing waits for it: a compaction may come first, and large copies are removed slowly.
        """
        # One that is being swapped in is not served yet.
        if not any(model.swapping.locked() for model in self._models.values()):
            in_use = [model.snapshot.folder for model in self._models.values()]
            # Loads that begin from now on come after it in this thread.
            self._loader.submit(release_copies, KIND, in_use)

    async def _swap(self, model: _ServedModel, request: schema.SwapRequest) -> schema.SwapResponse:
        begin = time.monotonic()
        async with model.swapping:
            old = model.decision
            try:
                with _refusing():
                    recall = await self._switch(model, request)
            finally:
                if model.decision.loading:
                    # The swap failed: replicas drop what they loaded.
                    await self._decide(model, Decision(old.bundle))
            # Requests go on with the old bundle until their replica has switched. One that is busy
            # with another model may take as long as a load. One that starts answers nothing yet.
            # All of the swap shares one limit, because the client does not wait for ever.
            version = model.decision.bundle.version
            left_s = self._config.swap_s - (time.monotonic() - begin)
            num_missing = await self._replicas.wait_for(
                model.name,
                lambda state: state.answering in ("", version),
                max(ALIVE_S, left_s),
            )
            if num_missing:
                log.warning("model %s: %d replica(s) did not switch", model.name, num_missing)
        seconds = round(time.monotonic() - begin, 3)
        log.info(
            "model %s: %.12s replaced %.12s in %.1f s",
            model.name,
            version,
            old.bundle.version,
            seconds,
        )
        return schema.SwapResponse(
            model=model.name,
            previous=old.bundle.version,
            version=version,
            recall=recall,
            seconds=seconds,
        )

    async def _switch(self, model: _ServedModel, request: schema.SwapRequest) -> float:
        """Lets all replicas load a bundle and then answer from it; returns its recall."""
        # Replicas, and this process after a restart, may run in another working folder.
        bundle = absolute(request.bundle)
        snapshot = await self._in_loader(self._load, model.name, bundle)
        place = await self._in_worker(model.log.resume_place, snapshot.place)
        snapshot = snapshot.at(place)
        snapshot = await self._in_loader(_caught_up, snapshot, model.log)
        version = snapshot.version
        number = snapshot.number
        floor = self._config.recall_floor if request.recall_floor is None else request.recall_floor
        # Before replicas load it: a wrong bundle costs them nothing.
        recall = await self._in_loader(
            check_successor,
            model.snapshot,
            snapshot,
            request.version,
            floor,
        )
        new = ServedBundle(bundle, version, place)
        decision = Decision(model.decision.bundle, loading=new)
        await self._decide(model, decision)

        def has_loaded(state: ReplicaState) -> bool:
            if state.epoch == decision.epoch and state.failure:
                # It does not try again, so there is nothing to wait for.
                raise ProblemError("refused", f"a replica cannot load {bundle}: {state.failure}")
            # A version that was dropped before may still be there, and go at any moment.
            is_kept = state.epoch == decision.epoch and version in state.places
            return is_kept and state.places[version].number >= number

        num_missing = await self._replicas.wait_for(model.name, has_loaded, self._config.swap_s)
        if num_missing:
            raise ProblemError(
                "refused",
                f"{num_missing} replica(s) did not load {bundle} in {self._config.swap_s:g} s",
            )
        async with model.operating:
            # Operations may have come since the bundle was loaded. They are few, and others wait, so
            # that this takes no turn.
            snapshot = await self._in_worker(_caught_up, snapshot, model.log)
            # First to the disk: after a crash the bundle that answered last is served.
            await self._in_worker(model.folder.remember, bundle, version)
            model.snapshot = snapshot
            await self._decide(model, Decision(new))
        return recall

    def note_searches(self, name: str, events: Sequence[SearchEvent], num_dropped: int = 0) -> None:
        """Queues searches for the event log; never blocks or fails.

        Args:
            name: name of the model.
            events: the searches, in order.
            num_dropped: searches that the caller had no room for.
        """
        event_log = self._models[name].events
        if event_log is None:
            return
        event_log.count_dropped(num_dropped)
        for event in events:
            event_log.note(event)

    async def add_feedback(self, name: str, event: FeedbackEvent) -> int:
        """Makes feedback durable.

        Args:
            name: name of the model.
            event: the feedback.
        Returns:
            Number of the event.
        Raises:
            ProblemError: the search is unknown, or the disk is full.
        """
        event_log = self._models[name].events
        if event_log is None:
            raise ProblemError("not-found", NOT_COLLECTED)
        with _refusing():
            return await asyncio.wrap_future(event_log.add_feedback(event))

    async def compact(self, name: str, out: str) -> schema.CompactResponse:
        """Writes the labels as they are now into a new bundle, which names its last operation.

        Args:
            name: name of the model.
            out: folder or URL of the new bundle.
        Raises:
            ProblemError: it is not below a root, or cannot be written.
        """
        self._roots.check(out)
        snapshot = self._models[name].snapshot
        with _refusing():
            version = await self._in_loader(write_compacted, snapshot, out, self._config.threads)
        return schema.CompactResponse(
            model=name,
            bundle=out,
            version=version,
            label_log=snapshot.number,
        )

    async def metrics_text(self) -> str:
        """The coordinator's own metrics, in Prometheus' text format."""
        copy_seconds = {name: model.log.copy_lag_s() for name, model in self._models.items()}
        # Without replicas this process itself answers.
        num_replicas = len(self._replicas.alive()) or 1
        event_counts = {}
        for name, model in self._models.items():
            if model.events is not None:
                event_counts[name] = model.events.counts()
        return coordinator_metrics(num_replicas, copy_seconds, event_counts)

    def snapshots(self) -> Mapping[str, Snapshot | None]:
        """See `SnapshotSource`."""
        by_name: dict[str, Snapshot | None] = dict.fromkeys(self._config.bundles)
        for name, model in self._models.items():
            by_name[name] = model.snapshot
        return by_name

    def close(self) -> None:
        """Lets others use the state folder."""
        self._loader.shutdown(wait=False)
        self._worker.shutdown(wait=False)
        for model in self._models.values():
            model.log.close()
            if model.events is not None:
                model.events.close()

    def _open(self, name: str) -> _ServedModel:
        """Loads the bundle and replays the log."""
        folder = StateFolder(self._config, name)
        bundle, expected = folder.bundle()
        try:
            snapshot = self._load(name, bundle)
        except StorageError as error:
            if expected is None:
                raise
            # The command names another bundle.
            raise StorageError(f"{error}; {folder.swap_advice}") from None
        # Served all the same: the operator may have written the bundle anew on purpose.
        if expected not in (None, snapshot.version):
            log.warning("model %s: %s has changed since it was swapped in", name, bundle)
        label_log = folder.open_log(snapshot.place)
        snapshot = snapshot.at(label_log.resume_place(snapshot.place))
        decision = Decision(ServedBundle(bundle, snapshot.version, snapshot.place))
        snapshot = _caught_up(snapshot, label_log)
        if expected is None:
            folder.forget_swap()
        return _ServedModel(name, folder, decision, snapshot, label_log, folder.open_events())

    def _load(self, name: str, bundle: str) -> Snapshot:
        config = self._config
        return Snapshot.load(
            bundle, name, config.threads, encoder=config.encoder, rerank=config.rerank
        )

    async def _in_loader(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function in the thread of loads and compactions."""
        return await asyncio.get_running_loop().run_in_executor(self._loader, function, *arguments)

    async def _in_worker(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function in the thread of label operations."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Finishes what was begun, although a client that leaves cancels its request.

        Otherwise an operation could be in the log that no snapshot has.
        """
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _decide(self, model: _ServedModel, decision: Decision) -> None:
        model.decision = decision
        await self._replicas.notify()


@contextlib.contextmanager
def _refusing(prefix: str = "") -> Iterator[None]:
    """Raises any error that the user can repair as a ProblemError, mostly of the kind "refused"."""
    try:
        yield
    except ProblemError:
        raise
    except XmcrayError as error:
        raise ProblemError("refused", f"{prefix}{error}") from None


def _update(model: _ServedModel, state: ReplicaState) -> Update | None:
    """What a replica in this state lacks of a model."""
    last = model.snapshot.number
    has_carried_out = state.epoch == model.decision.epoch
    stale = []
    # A coordinator that is started again may read a log that was restored. Later the replica only
    # has what this coordinator sent.
    if not has_carried_out:
        stale = [version for version, place in state.places.items() if not model.log.holds(place)]
    behind = {}
    for version, place in state.places.items():
        if version not in stale and place.number < last:
            behind[version] = place.number
    # A replica that has loaded nothing yet gets the operations when it has.
    if has_carried_out and state.places and not behind:
        return None
    # Versions that are at the same operation share what is read, here and on the way.
    commits_by_number = {}
    for number in set(behind.values()):
        commits_by_number[number] = model.log.commits_after(number)
    commits = {version: commits_by_number[number] for version, number in behind.items()}
    return Update(model.decision, last, commits, stale)


def _changed(snapshot: Snapshot, operations: Sequence[schema.Operation]) -> Snapshot:
    """The snapshot after new operations.

    Raises:
        XmcrayError: an operation does not fit the labels.
    """
    check_operations(operations, snapshot)
    after = snapshot.after(operations)
    if not after.retriever.num_labels:
        message = f"these are all labels of model {snapshot.model!r}, expected some to be left"
        raise ProblemError("refused", message)
    return after


def _caught_up(snapshot: Snapshot, label_log: LabelLog) -> Snapshot:
    """The snapshot with all operations that the log has now."""
    # Not with those that come meanwhile: they may come as fast as they are applied, without an end.
    last = label_log.last
    while snapshot.number < last:
        snapshot = snapshot.after_commits(label_log.commits_after(snapshot.number))
    return snapshot
