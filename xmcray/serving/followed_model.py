"""What a replica holds of one model: the snapshots that answer, and those that are being made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xmcray.serving.decisions import ReplicaState, ServedBundle
from xmcray.serving.log_place import Commit, LogPlace
from xmcray.serving.snapshot import Snapshot

MAX_OLD_SNAPSHOTS = 64
MAX_PASSED_COMMITS = 256  # of one update; a replica that gets more is catching up


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Operations that are being applied in the background to a version that is behind.

    Attributes:
        snapshot: the version without the operations.
        commits: the operations.
        changed: the version with the operations.
    """

    snapshot: Snapshot
    commits: Sequence[Commit]
    changed: asyncio.Future[Snapshot]


class FollowedModel:
    """What a replica holds of one model.

    Attributes:
        epoch: of the last decision that was carried out; "" if a version was dropped since.
        answering: the version that answers new requests; "" before the first version is loaded, and
            while it is loaded again.
        stale: the snapshot that answers while its version is loaded again.
        newest: the newest snapshot of each version.
        older: by version and place in the label log, the time at which an earlier snapshot was
            replaced, and that snapshot.
        passed: by version and place of an earlier snapshot, the commits that replaced it, if several
            were applied at once. On other replicas, requests may have begun between these commits.
        dropped: versions that are no longer needed, and since when.
        loading_epoch: of the last decision for which a bundle was loaded alongside.
        failure: why that bundle cannot be loaded; see `ReplicaState`.
        loads: by bundle, its load, until the snapshot is in `newest`.
        catching_up: by version, the operations that are applied to it in the background.
    """

    def __init__(self) -> None:
        self.epoch = ""
        self.answering = ""
        self.stale: Snapshot | None = None
        self.newest: dict[str, Snapshot] = {}
        self.older: dict[tuple[str, LogPlace], tuple[float, Snapshot]] = {}
        self.passed: dict[tuple[str, LogPlace], Sequence[Commit]] = {}
        self.dropped: dict[str, float] = {}
        self.loading_epoch = ""
        self.failure = ""
        self.loads: dict[ServedBundle, asyncio.Future[Snapshot]] = {}
        self.catching_up: dict[str, CatchUp] = {}

    @property
    def current(self) -> Snapshot | None:
        """The snapshot that answers new requests; None before the first version is loaded."""
        return self.newest.get(self.answering, self.stale)

    def state(self) -> ReplicaState:
        """The state that is sent to the coordinator."""
        places = {}
        for version, snapshot in self.newest.items():
            # The place of a version that is catching up is left out. Otherwise the coordinator would
            # send its operations again.
            if version not in self.catching_up:
                places[version] = snapshot.place
        # The decision is not carried out until all versions have caught up.
        epoch = "" if self.is_behind() else self.epoch
        return ReplicaState(epoch, self.answering, places, self.failure)

    def is_behind(self) -> bool:
        """Whether a version that is needed is catching up."""
        return bool(self.catching_up.keys() - self.dropped.keys())

    def replace(self, old: Snapshot, new: Snapshot, commits: Sequence[Commit]) -> None:
        """Sets the newest snapshot of a version.

        Args:
            old: the snapshot before.
            new: the new snapshot.
            commits: from the old snapshot to the new one.
        """
        self.newest[new.version] = new
        self.keep(old)
        if 1 < len(commits) <= MAX_PASSED_COMMITS:
            self.passed[old.version, old.place] = commits

    def before(self, version: str, place: LogPlace) -> tuple[Snapshot, Sequence[Commit]] | None:
        """An earlier snapshot, and the commits from it to a place; None if no update passed the place."""
        for (passed_version, start), commits in self.passed.items():
            places = [commit.place for commit in commits]
            if passed_version == version and place in places:
                _, snapshot = self.older[version, start]
                return snapshot, commits[: places.index(place) + 1]
        return None

    def drop_stale(self, version: str) -> None:
        """Drops a version whose operations are not those of the label log.

        Its snapshot goes on answering until a version with the operations of the log is loaded.
        """
        snapshot = self._drop(version)
        # The decision is no longer carried out. The coordinator repeats it until it is.
        self.epoch = ""
        self.keep(snapshot)
        if version == self.answering:
            self.answering = ""
            self.stale = snapshot

    def keep(self, old: Snapshot) -> None:
        """Keeps a snapshot for the requests that began with it."""
        # Few requests will still use this snapshot, so what it has cached is not worth its memory.
        old.drop_views()
        newest = self.newest.get(old.version)
        # Operations that change attributes alone leave the labels, and their arrays, as they are.
        if newest is None or newest.retriever is not old.retriever:
            old.drop_derived()
        key = (old.version, old.place)
        # A snapshot that is kept again moves to the end.
        self.older.pop(key, None)
        self.older[key] = (time.monotonic(), old)
        while len(self.older) > MAX_OLD_SNAPSHOTS:
            # A dictionary keeps the order of insertion, so its first key is the oldest one.
            oldest = next(iter(self.older))
            self._forget_older(oldest)

    def drop_loads(self, needed: Sequence[ServedBundle]) -> None:
        """Cancels the loads of other bundles, and of versions that are loaded already.

        A load that has begun runs on, and its result is unused.
        """
        for bundle in list(self.loads):
            if bundle not in needed or bundle.version in self.newest:
                self.loads.pop(bundle).cancel()

    def forget(self, keep_s: float) -> int:
        """Drops versions and snapshots that have not been needed for `keep_s` seconds.

        Returns:
            The number of versions that were dropped.
        """
        limit = time.monotonic() - keep_s
        num_versions = len(self.newest)
        # The loops go over copies, because the dictionaries shrink meanwhile.
        for version, since in list(self.dropped.items()):
            if since < limit:
                self._drop(version)
        for (version, place), (since, snapshot) in list(self.older.items()):
            # This snapshot still answers new requests, here and on other replicas.
            if snapshot is self.stale:
                continue
            if since <= limit or version not in self.newest:
                self._forget_older((version, place))
        return num_versions - len(self.newest)

    def folders(self) -> set[Path]:
        """Folders of the bundles that may answer."""
        folders = {snapshot.folder for snapshot in self.newest.values()}
        for _, snapshot in self.older.values():
            folders.add(snapshot.folder)
        if self.stale is not None:
            folders.add(self.stale.folder)
        return folders

    def _drop(self, version: str) -> Snapshot:
        """Drops a version, cancels its catch-up, and returns its snapshot."""
        self.dropped.pop(version, None)
        catch_up = self.catching_up.pop(version, None)
        if catch_up is not None:
            catch_up.changed.cancel()
        return self.newest.pop(version)

    def _forget_older(self, key: tuple[str, LogPlace]) -> None:
        del self.older[key]
        self.passed.pop(key, None)
