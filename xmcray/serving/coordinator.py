"""The one process that decides what is served: which bundle of each model, and which operations on its labels.

All replicas follow it (follower.py). A label operation is acknowledged when it is in the log on the disk. A new bundle
is first loaded and tried out here, then loaded by every replica beside the old one, and only then answered from. What
was decided is in the state folder, so a coordinator that is started again goes on where the last one was.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from xmcray import storage
from xmcray.errors import DataError, StorageError, XmcrayError
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
OPERATIONS = 5000  # sent to a replica at once
ALIVE_S = 10.0  # a replica that did not ask for so long is gone
Numbered = tuple[int, schema.Operation]


@dataclass(frozen=True, slots=True)
class Head:
    """What is served under a name.

    Attributes:
        bundle, version: where it is, and the SHA-256 it must have.
        loading: bundle and version that replicas are to load beside it.
        epoch: of this decision; differs from that of every other one.
    """

    bundle: str
    version: str
    epoch: str
    loading: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What a replica has of one model: the last decision it heard of, its bundles, and the last operation in them."""

    epoch: str = ""
    answering: str = ""
    versions: tuple[str, ...] = ()
    number: int = -1


@dataclass(frozen=True, slots=True)
class News:
    """What a replica is to follow: the decision, and operations after those it has."""

    head: Head
    operations: Sequence[Numbered]


@dataclass(frozen=True, slots=True)
class Status:
    """How many replicas follow, and by how many seconds the copy of each model's label log is behind."""

    replicas: int
    copy_seconds: Mapping[str, float]


@dataclass(slots=True)
class _Model:
    head: Head
    snapshot: Snapshot
    log: LabelLog
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of operations
    swapping: asyncio.Lock = field(default_factory=asyncio.Lock)


class Coordinator:
    """Holds every model's head and log. `start` before use."""

    def __init__(self, config: ServeConfig) -> None:
        self._config, self._folder = config, Path(config.state_dir)
        self._models: dict[str, _Model] = {}
        self._seen: dict[str, tuple[float, Mapping[str, Known]]] = {}
        self._changed, self._thread = asyncio.Condition(), ThreadPoolExecutor(2, "coordinator")
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Loads the bundles and replays their logs.

        Raises:
            XmcrayError: a bundle or a log is damaged, or another coordinator uses the state folder.
        """
        for name, bundle in self._config.bundles.items():
            self._models[name] = found = await self._run(self._open, name, bundle)
            await self._run(found.snapshot.probe, found.snapshot.probes)

    async def follow(
        self, replica: str, known: Mapping[str, Known], wait_s: float
    ) -> dict[str, News]:
        """What a replica lacks, as soon as there is something; nothing after `wait_s`."""
        self._seen[replica] = time.monotonic(), known
        async with self._changed:
            self._changed.notify_all()  # whoever waits for this replica

            def lacks() -> list[str]:
                return [n for n, m in self._models.items() if self._lacks(known.get(n, Known()), m)]

            try:
                await asyncio.wait_for(self._changed.wait_for(lacks), wait_s)
            except TimeoutError:
                return {}
            names = lacks()
        return {name: self._news(self._models[name], known.get(name, Known())) for name in names}

    async def operations(self, model: str, since: int) -> Sequence[Numbered]:
        """Operations after a number: what a bundle that was just loaded lacks."""
        return self._models[model].log.since(since, OPERATIONS)

    async def operate(self, model: str, operations: Sequence[schema.Operation]) -> int:
        """Makes operations durable and returns the number of the last one; all of them or none.

        Raises:
            ProblemError: one of them does not fit the labels.
        """
        return await self._to_the_end(self._operate(model, operations))

    async def _operate(self, model: str, operations: Sequence[schema.Operation]) -> int:
        found = self._models[model]
        async with found.lock:
            snapshot = found.snapshot
            try:
                check_operations(operations, lambda uid: snapshot.label_id(uid) is not None)
            except DataError as error:
                raise ProblemError("refused", str(error)) from None
            for operation in operations:
                if operation.text is not None and not await self._run(
                    snapshot.has_tokens, operation.text
                ):
                    raise ProblemError(
                        "refused",
                        f"the text of label {operation.uid[:80]!r} has no token, expected some: its vector is made of"
                        " it; reword it",
                    )
            try:
                after = await self._run(snapshot.after, operations)
            except XmcrayError as error:
                raise ProblemError("refused", str(error)) from None
            if not after.retriever.num_labels:
                raise ProblemError(
                    "refused", f"these are all labels of model {model!r}, expected some to be left"
                )
            try:
                number = await self._run(found.log.append, operations)
            except StorageError as error:
                raise ProblemError(
                    "refused", f"the operations were not acknowledged: {error}"
                ) from None
            found.snapshot = after
        await self._tell()
        return number

    async def swap(self, model: str, request: schema.SwapRequest) -> schema.SwapResponse:
        """Answers from another bundle, once every replica has it.

        Raises:
            ProblemError: it is damaged or worse, a replica could not load it, or the state disk is full; the old one is
                served as before.
        """
        return await self._to_the_end(self._swap(model, request))

    async def _swap(self, model: str, request: schema.SwapRequest) -> schema.SwapResponse:
        begin, found = time.monotonic(), self._models[model]
        async with found.swapping:
            old = found.head
            try:
                fresh, recall = await self._switch(model, found, request)
            except ProblemError:
                raise
            except XmcrayError as error:
                raise ProblemError("refused", str(error)) from None
            finally:
                if found.head.loading:  # it came to nothing: replicas let go of what they loaded
                    await self._decide(found, replace(old, epoch=_epoch()))
            await self._until(lambda known: known[model].answering == fresh.version, ALIVE_S)
            try:
                await self._run(found.log.trim, fresh.exported)
            except StorageError as error:  # it only takes room
                log.warning("model %s: the log before the new bundle stays (%s)", model, error)
        seconds = round(time.monotonic() - begin, 3)
        log.info(
            "model %s: %s replaced %s in %.1f s",
            model,
            fresh.version[:12],
            old.version[:12],
            seconds,
        )
        return schema.SwapResponse(
            model=model, previous=old.version, version=fresh.version, recall=recall, seconds=seconds
        )

    async def _switch(
        self, model: str, found: _Model, request: schema.SwapRequest
    ) -> tuple[Snapshot, float]:
        """The new snapshot, from which everybody answers now, and its recall."""
        fresh = await self._run(self._load, model, request.bundle, found.log)
        version = fresh.version
        floor = self._config.recall_floor if request.recall_floor is None else request.recall_floor
        recall = await self._run(_compare, found.snapshot, fresh, request.version, floor)
        await self._decide(
            found, replace(found.head, epoch=_epoch(), loading=(request.bundle, version))
        )
        missing = await self._until(
            lambda known: version in known[model].versions, self._config.swap_s
        )
        if missing:
            raise ProblemError(
                "refused",
                f"{missing} replica(s) did not load {request.bundle} in {self._config.swap_s:g} s",
            )
        async with found.lock:  # operations that came meanwhile
            fresh = await self._run(_caught_up, fresh, found.log)
            head = Head(request.bundle, version, _epoch())
            await self._run(self._remember, model, head)
            found.snapshot = fresh
            await self._decide(found, head)
        return fresh, recall

    async def compact(self, model: str, out: str) -> schema.CompactResponse:
        """Writes the labels as they are now into a new bundle, which knows up to which operation.

        Raises:
            ProblemError: it cannot be written there.
        """
        found = self._models[model]
        snapshot = found.snapshot
        try:
            version = await self._run(self._write, model, snapshot, found.head.bundle, out)
        except XmcrayError as error:
            raise ProblemError("refused", str(error)) from None
        return schema.CompactResponse(
            model=model, bundle=out, version=version, label_log=snapshot.number
        )

    async def status(self) -> Status:
        """How it stands, for the metrics."""
        return Status(
            len(self._alive()),
            {name: model.log.lag().seconds for name, model in self._models.items()},
        )

    @property
    def ready(self) -> bool:
        """Whether every model can be asked in this process."""
        return len(self._models) == len(self._config.bundles)

    def resolve(self, name: str | None) -> str:
        """The model that a request means."""
        return next(iter(self._config.bundles)) if name is None else name

    def current(self, name: str | None) -> Snapshot:
        """What a request that begins now is answered from, in this process.

        Raises:
            ProblemError: no such model.
        """
        found = self._models.get(self.resolve(name))
        if found is None:
            raise unknown_model(str(name), self._models)
        return found.snapshot

    def close(self) -> None:
        """Lets others use the state folder."""
        for model in self._models.values():
            model.log.close()

    def _open(self, name: str, configured: str) -> _Model:
        """What was swapped in last, unless another bundle was configured since."""
        folder = self._folder / folder_name(name)
        state = folder / "head.json"
        bundle, expected = configured, None
        if state.is_file():
            known = json.loads(state.read_text(encoding="utf-8"))
            if known["configured"] == configured:
                bundle, expected = known["bundle"], known["version"]
        snapshot = Snapshot.load(bundle, name, self._config.threads, encoder=self._config.encoder)
        if expected not in (None, snapshot.version):
            log.warning("model %s: %s has changed since it was swapped in", name, bundle)
        upload = (
            f"{self._config.upload.rstrip('/')}/{folder_name(name)}"
            if self._config.upload
            else None
        )
        journal = LabelLog(folder / "labels", name, start_after=snapshot.number, upload_url=upload)
        snapshot = _caught_up(snapshot, journal)
        return _Model(Head(bundle, snapshot.version, _epoch()), snapshot, journal)

    def _load(self, model: str, bundle: str, journal: LabelLog) -> Snapshot:
        snapshot = Snapshot.load(bundle, model, self._config.threads, encoder=self._config.encoder)
        return _caught_up(snapshot, journal)

    def _write(self, model: str, snapshot: Snapshot, bundle: str, out: str) -> str:
        before = Retriever.load(snapshot.folder, threads=self._config.threads)
        manifest = storage.read_manifest(snapshot.folder, KIND)
        change = {"operations": snapshot.number, "of": manifest.sha256}
        about = {**manifest.about, "changes": [*manifest.about.get("changes", []), change]}
        about["label_log"] = {"model": model, "number": snapshot.number}
        known: dict[str, storage.FileEntry] = {}
        with storage.new_artifact(out, KIND, about, known) as target:
            written = write_changes(before, snapshot.retriever, target)
            written |= snapshot.attributes.save(target)
            known |= storage.link_files(snapshot.folder, manifest, target, written)
        return storage.open_artifact(out, KIND, contents=False)[1].sha256

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """A client that leaves cancels its request: what was begun is finished all the same.

        Otherwise an operation could be in the log that no snapshot has.
        """
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def _remember(self, model: str, head: Head) -> None:
        state = {
            "configured": self._config.bundles[model],
            "bundle": head.bundle,
            "version": head.version,
        }
        storage.write_json(self._folder / folder_name(model) / "head.json", state)

    async def _decide(self, model: _Model, head: Head) -> None:
        model.head = head
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, done: Callable[[Mapping[str, Known]], bool], wait_s: float) -> int:
        """Waits until a condition holds for all replicas that are alive; returns for how many it does not."""

        def missing() -> int:
            return sum(not done(known) for known in self._alive())

        deadline = time.monotonic() + wait_s
        async with self._changed:
            while missing() and time.monotonic() < deadline:
                try:
                    await asyncio.wait_for(
                        self._changed.wait(), 1.0
                    )  # replicas also leave without a word
                except TimeoutError:
                    continue
            return missing()

    def _alive(self) -> list[Mapping[str, Known]]:
        now = time.monotonic()
        self._seen = {name: seen for name, seen in self._seen.items() if now - seen[0] < ALIVE_S}
        return [known for _, known in self._seen.values() if known]

    def _lacks(self, known: Known, model: _Model) -> bool:
        return known.epoch != model.head.epoch or known.number < model.snapshot.number

    def _news(self, model: _Model, known: Known) -> News:
        behind = 0 <= known.number < model.snapshot.number
        return News(model.head, model.log.since(known.number, OPERATIONS) if behind else [])

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """In a thread: a bundle may take long to load, and operations go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def folder_name(model: str) -> str:
    """A folder for a model of any name; two names never share one."""
    if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", model):
        return model
    return f"model-{hashlib.sha256(model.encode()).hexdigest()[:16]}"


def _caught_up(snapshot: Snapshot, journal: LabelLog) -> Snapshot:
    return snapshot.after([operation for _, operation in journal.since(snapshot.number)])


def _compare(old: Snapshot, new: Snapshot, version: str | None, floor: float) -> float:
    """The share of the old one's best labels that the new one finds too.

    Raises:
        ProblemError: it is another bundle than was meant, of another width, or finds too few of them.
    """
    if version is not None and new.version != version:
        raise ProblemError("refused", f"the bundle has SHA-256 {new.version}, expected {version}")
    width, expected = new.retriever.settings.dim, old.retriever.settings.dim
    if width != expected:
        raise ProblemError(
            "refused",
            f"the bundle has vectors of width {width}, expected {expected} as those in use; serve it by another name",
        )
    pairs = zip(old.probe(old.probes), new.probe(old.probes), strict=True)
    recall = float(np.mean([len(one & other) / max(1, len(one)) for one, other in pairs]))
    if recall < floor:
        raise ProblemError(
            "refused",
            f"the bundle finds {recall:.2f} of the best labels of the one in use, expected at least {floor:g}; look at"
            " it, or lower recall_floor",
        )
    return recall


def _epoch() -> str:
    return secrets.token_hex(8)
