"""Decides what is served: which bundle of each model, and which operations on its labels. One
process.

All replicas follow it (follower.py). A label operation is acknowledged when it is in the log on the
disk. A new bundle is first loaded and probed here, then loaded by every replica alongside the old
one, and only then answers. Decisions are kept in the state folder, so that a coordinator that is
started again goes on where the last one was.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from xmcray import storage
from xmcray.errors import StorageError, XmcrayError
from xmcray.retrieval.bundle import KIND
from xmcray.retrieval.labels import write_changes
from xmcray.retrieval.retriever import Retriever
from xmcray.serving import schema
from xmcray.serving.label_log import LabelLog
from xmcray.serving.operations import check_operations
from xmcray.serving.problems import ProblemError, unknown_model
from xmcray.serving.settings import ServeConfig
from xmcray.serving.snapshot import Snapshot

log = logging.getLogger("xmcray.serving")
T = TypeVar("T")
ALIVE_S = 10.0  # a replica that was silent for so long is gone
CHECK_S = 1.0  # between two looks for replicas that are gone


@dataclass(frozen=True, slots=True)
class SnapshotHead:
    """A decision about what is served under a name.

    Attributes:
        bundle: folder or URL.
        version: SHA-256 that the bundle must have.
        loading: bundle and version that replicas load alongside.
        epoch: differs from that of every other decision.
    """

    bundle: str
    version: str
    loading: tuple[str, str] | None = None
    epoch: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What a replica has of one model.

    Attributes:
        epoch: the last decision that it carried out.
        answering: the version that answers.
        versions: the versions that are loaded.
        number: the last operation that all of them have; -1 if none is loaded.
    """

    epoch: str = ""
    answering: str = ""
    versions: tuple[str, ...] = ()
    number: int = -1


@dataclass(frozen=True, slots=True)
class SnapshotUpdate:
    """What a replica is to carry out: the decision, and operations after those that it has.

    Attributes:
        head: the decision.
        since: number of the operation before the first one.
        operations: some of the operations after it; none if there are none.
    """

    head: SnapshotHead
    since: int
    operations: Sequence[schema.Operation]


@dataclass(frozen=True, slots=True)
class CoordinatorStatus:
    """Numbers for the metrics.

    Attributes:
        num_replicas: number of replicas that follow.
        copy_seconds: by model, seconds by which the copy of the label log is behind.
    """

    num_replicas: int
    copy_seconds: Mapping[str, float]


@dataclass(slots=True)
class _ServedModel:
    """One model: the decision, its snapshot in this process, and its log."""

    name: str
    head: SnapshotHead
    snapshot: Snapshot
    log: LabelLog
    operating: asyncio.Lock = field(default_factory=asyncio.Lock)
    swapping: asyncio.Lock = field(default_factory=asyncio.Lock)


class SnapshotCoordinator:
    """Holds the decision, the snapshot and the log of every model. `start` before use."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._folder = Path(config.state_dir)
        self._models: dict[str, _ServedModel] = {}
        # By replica: when it was last heard of, and its state of each model.
        self._replicas: dict[str, tuple[float, Mapping[str, ReplicaState]]] = {}
        self._changed = asyncio.Condition()
        # Two threads: operations go on while a bundle is loaded.
        self._thread = ThreadPoolExecutor(2, "coordinator")
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Loads the bundles and replays their logs.

        Raises:
            XmcrayError: a bundle or a log is damaged, or another coordinator uses the state folder.
        """
        for name, bundle in self._config.bundles.items():
            model = await self._run(self._open, name, bundle)
            self._models[name] = model
            await self._run(model.snapshot.probe, model.snapshot.probes)

    async def follow(
        self, replica: str, states: Mapping[str, ReplicaState], wait_s: float
    ) -> dict[str, SnapshotUpdate]:
        """The updates that a replica lacks, as soon as there are any; none after `wait_s`.

        Args:
            replica: name of the replica.
            states: by model, what the replica has.
            wait_s: longest wait, seconds.
        """
        self._replicas[replica] = (time.monotonic(), states)

        def updates() -> dict[str, SnapshotUpdate]:
            found = {}
            for name, model in self._models.items():
                update = _update(model, states.get(name, ReplicaState()))
                if update:
                    found[name] = update
            return found

        async with self._changed:
            self._changed.notify_all()  # a swap may wait for this replica
            # The result of the condition: the first updates that are not empty.
            try:
                return await asyncio.wait_for(self._changed.wait_for(updates), wait_s)
            except TimeoutError:
                return {}

    async def operations(self, model: str, since: int) -> Sequence[schema.Operation]:
        """Operations after a number, for a bundle that was just loaded.

        Args:
            model: name of the model.
            since: number of an operation.
        Returns:
            Some of the operations after it; none if there are none.
        """
        return self._models[model].log.since(since)

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
            try:
                snapshot = await self._run(_apply, model, operations)
            except XmcrayError as error:
                raise ProblemError("refused", str(error)) from None
            try:
                number = await self._run(model.log.append, operations)
            except StorageError as error:
                message = f"the operations were not acknowledged: {error}"
                raise ProblemError("refused", message) from None
            # After the append: an operation is never answered before it is durable.
            model.snapshot = snapshot
        await self._notify()
        return number

    async def swap(self, name: str, request: schema.SwapRequest) -> schema.SwapResponse:
        """Answers from another bundle, once every replica has it.

        Args:
            name: name of the model.
            request: the new bundle, and what it must fulfil.
        Raises:
            ProblemError: the bundle is damaged or worse, a replica could not load it, or the state
                disk is full; the old bundle is served as before.
        """
        return await self._to_the_end(self._swap(self._models[name], request))

    async def _swap(self, model: _ServedModel, request: schema.SwapRequest) -> schema.SwapResponse:
        begin = time.monotonic()
        async with model.swapping:
            old = model.head
            try:
                recall = await self._switch(model, request)
            except ProblemError:
                raise
            except XmcrayError as error:
                raise ProblemError("refused", str(error)) from None
            finally:
                if model.head.loading:
                    # The swap failed: replicas drop what they loaded.
                    await self._decide(model, SnapshotHead(old.bundle, old.version))
            # Requests go on with the old bundle until their replica has switched.
            version = model.head.version
            await self._wait_for_replicas(
                lambda states: states[model.name].answering == version, ALIVE_S
            )
        seconds = round(time.monotonic() - begin, 3)
        log.info(
            "model %s: %.12s replaced %.12s in %.1f s", model.name, version, old.version, seconds
        )
        return schema.SwapResponse(
            model=model.name, previous=old.version, version=version, recall=recall, seconds=seconds
        )

    async def _switch(self, model: _ServedModel, request: schema.SwapRequest) -> float:
        """Lets all replicas load a bundle and then answer from it; returns its recall."""
        bundle = request.bundle
        snapshot = await self._run(self._load, model.name, bundle)
        snapshot = await self._run(_caught_up, snapshot, model.log)
        version = snapshot.version
        floor = self._config.recall_floor if request.recall_floor is None else request.recall_floor
        # Before replicas load it: a wrong bundle costs them nothing.
        recall = await self._run(_compare, model.snapshot, snapshot, request.version, floor)
        loading = SnapshotHead(model.head.bundle, model.head.version, (bundle, version))
        await self._decide(model, loading)
        num_missing = await self._wait_for_replicas(
            lambda states: version in states[model.name].versions, self._config.swap_s
        )
        if num_missing:
            raise ProblemError(
                "refused",
                f"{num_missing} replica(s) did not load {bundle} in {self._config.swap_s:g} s",
            )
        async with model.operating:
            # Operations may have come since the bundle was loaded.
            snapshot = await self._run(_caught_up, snapshot, model.log)
            head = SnapshotHead(bundle, version)
            # First to the disk: after a crash the bundle that answered last is served.
            await self._run(self._remember, model.name, head)
            model.snapshot = snapshot
            await self._decide(model, head)
        return recall

    async def compact(self, name: str, out: str) -> schema.CompactResponse:
        """Writes the labels as they are now into a new bundle, which names its last operation.

        Args:
            name: name of the model.
            out: folder or URL of the new bundle.
        Raises:
            ProblemError: it cannot be written there.
        """
        snapshot = self._models[name].snapshot
        try:
            version = await self._run(self._write, name, snapshot, out)
        except XmcrayError as error:
            raise ProblemError("refused", str(error)) from None
        return schema.CompactResponse(
            model=name, bundle=out, version=version, label_log=snapshot.number
        )

    async def status(self) -> CoordinatorStatus:
        """Numbers for the metrics."""
        copy_seconds = {name: model.log.copy_lag_s() for name, model in self._models.items()}
        return CoordinatorStatus(len(self._alive()), copy_seconds)

    @property
    def ready(self) -> bool:
        """Whether every model can answer in this process."""
        return len(self._models) == len(self._config.bundles)

    def resolve(self, name: str | None) -> str:
        """The model that a request means."""
        return next(iter(self._config.bundles)) if name is None else name

    def current(self, name: str | None) -> Snapshot:
        """The snapshot from which a request that begins now is answered, in this process.

        Raises:
            ProblemError: no such model.
        """
        model = self._models.get(self.resolve(name))
        if model is None:
            raise unknown_model(str(name), self._models)
        return model.snapshot

    def close(self) -> None:
        """Lets others use the state folder."""
        for model in self._models.values():
            model.log.close()

    def _open(self, name: str, configured: str) -> _ServedModel:
        """Loads what was swapped in last, unless another bundle was configured since."""
        folder = self._folder / folder_name(name)
        head_file = folder / "head.json"
        bundle = configured
        expected = None
        if head_file.is_file():
            head = json.loads(head_file.read_text(encoding="utf-8"))
            if head["configured"] == configured:
                bundle = head["bundle"]
                expected = head["version"]
        snapshot = self._load(name, bundle)
        # Served all the same: the operator may have written the bundle anew on purpose.
        if expected not in (None, snapshot.version):
            log.warning("model %s: %s has changed since it was swapped in", name, bundle)
        upload_url = None
        if self._config.upload:
            upload_url = f"{self._config.upload.rstrip('/')}/{folder_name(name)}"
        label_log = LabelLog(
            folder / "labels", name, start_after=snapshot.number, upload_url=upload_url
        )
        snapshot = _caught_up(snapshot, label_log)
        return _ServedModel(name, SnapshotHead(bundle, snapshot.version), snapshot, label_log)

    def _load(self, name: str, bundle: str) -> Snapshot:
        return Snapshot.load(bundle, name, self._config.threads, encoder=self._config.encoder)

    def _write(self, name: str, snapshot: Snapshot, out: str) -> str:
        """Writes a bundle with the labels of a snapshot; returns its SHA-256."""
        exported = Retriever.load(snapshot.folder, threads=self._config.threads)
        manifest = storage.read_manifest(snapshot.folder, KIND)
        change = {"operations": snapshot.number, "of": manifest.sha256}
        about = {
            **manifest.about,
            "changes": [*manifest.about.get("changes", []), change],
            "label_log": {"model": name, "number": snapshot.number},
        }
        # Filled in the block: entries of files that are already verified are not hashed again.
        entries: dict[str, storage.FileEntry] = {}
        with storage.new_artifact(out, KIND, about, entries) as target:
            # Only files that changed are written; the others are hard links to the old bundle's.
            written = write_changes(exported, snapshot.retriever, target)
            written |= snapshot.attributes.save(target)
            entries |= storage.link_files(snapshot.folder, manifest, target, written)
        return storage.open_artifact(out, KIND, contents=False)[1].sha256

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Finishes what was begun, although a client that leaves cancels its request.

        Otherwise an operation could be in the log that no snapshot has.
        """
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def _remember(self, name: str, head: SnapshotHead) -> None:
        state = {
            "configured": self._config.bundles[name],
            "bundle": head.bundle,
            "version": head.version,
        }
        storage.write_json(self._folder / folder_name(name) / "head.json", state)

    async def _decide(self, model: _ServedModel, head: SnapshotHead) -> None:
        model.head = head
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for_replicas(
        self, is_done: Callable[[Mapping[str, ReplicaState]], bool], wait_s: float
    ) -> int:
        """Waits until a condition holds for all replicas that are alive.

        Returns:
            For how many it does not hold after `wait_s`.
        """
        deadline = time.monotonic() + wait_s
        async with self._changed:
            while True:
                num_missing = sum(not is_done(states) for states in self._alive())
                if not num_missing or time.monotonic() >= deadline:
                    return num_missing
                # Replicas also leave in silence.
                await _wait_at_most(self._changed, CHECK_S)

    def _alive(self) -> list[Mapping[str, ReplicaState]]:
        oldest = time.monotonic() - ALIVE_S
        self._replicas = {name: seen for name, seen in self._replicas.items() if seen[0] > oldest}
        return [states for _, states in self._replicas.values() if states]

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function in a thread: a bundle may take long to load, and operations go on
        meanwhile.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def folder_name(model: str) -> str:
    """Name of the folder of a model; no two models share one."""
    if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", model):
        return model
    # Slashes and dots could lead out of the folder, and long names do not fit.
    return f"model-{hashlib.sha256(model.encode()).hexdigest()[:16]}"


async def _wait_at_most(condition: asyncio.Condition, wait_s: float) -> None:
    try:
        await asyncio.wait_for(condition.wait(), wait_s)
    except TimeoutError:
        return


def _update(model: _ServedModel, state: ReplicaState) -> SnapshotUpdate | None:
    """What a replica in this state lacks of a model."""
    is_behind = state.number < model.snapshot.number
    if state.epoch == model.head.epoch and not is_behind:
        return None
    # A replica that has loaded nothing yet gets the operations when it has (`operations`).
    if is_behind and state.number >= 0:
        return SnapshotUpdate(model.head, state.number, model.log.since(state.number))
    return SnapshotUpdate(model.head, 0, [])


def _apply(model: _ServedModel, operations: Sequence[schema.Operation]) -> Snapshot:
    """The snapshot after operations.

    Raises:
        XmcrayError: an operation does not fit the labels.
    """
    snapshot = model.snapshot
    check_operations(operations, lambda uid: snapshot.label_id(uid) is not None)
    for operation in operations:
        if operation.text is not None and not snapshot.has_tokens(operation.text):
            raise ProblemError(
                "refused",
                f"the text of label {operation.uid[:80]!r} has no token, expected some: its vector is made of"
                " it; reword it",
            )
    after = snapshot.after(operations)
    if not after.retriever.num_labels:
        message = f"these are all labels of model {model.name!r}, expected some to be left"
        raise ProblemError("refused", message)
    return after


def _caught_up(snapshot: Snapshot, label_log: LabelLog) -> Snapshot:
    """The snapshot with all operations of the log."""
    while operations := label_log.since(snapshot.number):
        snapshot = snapshot.after(operations)
    return snapshot


def _compare(old: Snapshot, new: Snapshot, version: str | None, floor: float) -> float:
    """The share of the old bundle's best labels that the new one finds too.

    Raises:
        ProblemError: it has another version or width than expected, or finds too few of them.
    """
    if version is not None and new.version != version:
        raise ProblemError("refused", f"the bundle has SHA-256 {new.version}, expected {version}")
    width = new.retriever.settings.dim
    expected = old.retriever.settings.dim
    if width != expected:
        raise ProblemError(
            "refused",
            f"the bundle has vectors of width {width}, expected {expected} as those in use;"
            " serve it by another name",
        )
    recalls = []
    for best, found in zip(old.probe(old.probes), new.probe(old.probes), strict=True):
        recalls.append(len(best & found) / max(1, len(best)))
    recall = float(np.mean(recalls))
    if recall < floor:
        raise ProblemError(
            "refused",
            f"the bundle finds {recall:.2f} of the best labels of the one in use, expected at least {floor:g};"
            " look at it, or lower recall_floor",
        )
    return recall
