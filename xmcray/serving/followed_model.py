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
    """Operations that are being applied to a version that is behind.

    Attributes:
        snapshot: the one without them.
        commits: the operations.
        changed: the one with them.
    """

    snapshot: Snapshot
    commits: Sequence[Commit]
    changed: asyncio.Future[Snapshot]


class FollowedModel:
    """What a replica holds of one model.

    Attributes:
        epoch: of the last decision that was carried out; "" if a version was dropped since.
        answering: version that answers requests that begin now; "" before the first one is loaded,
            and while it is loaded again.
        stale: the snapshot that answers while its version is loaded again.
        newest: the newest snapshot of each version.
        older: earlier snapshots by version and place in the label log, and the time at which each
            was replaced.
        passed: by version and place of an earlier snapshot, the commits that were applied to it at
            once. Requests may have begun between them elsewhere.
        dropped: versions that are no longer needed, and since when.
        loading_epoch: of the last decision whose other bundle was to be loaded.
        failure: why that bundle cannot be loaded; see `ReplicaState`.
        loads: by bundle, what makes its snapshot; until that is taken.
        catching_up: versions that get the operations that the one that answers has already.
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

    def state(self) -> ReplicaState:
        """The state that is sent to the coordinator."""
        places = {}
        for version, snapshot in self.newest.items():
            # One that is catching up has no place until its operations are applied. Otherwise they
            # would be sent again.
            if version not in self.catching_up:
                places[version] = snapshot.place
        # Nor is the decision carried out until then.
        epoch = "" if self.is_behind() else self.epoch
        return ReplicaState(epoch, self.answering, places, self.failure)

    def is_behind(self) -> bool:
        """Whether a version that is needed is catching up."""
        return bool(self.catching_up.keys() - self.dropped.keys())

    def replace(self, old: Snapshot, new: Snapshot, commits: Sequence[Commit]) -> None:
        """Sets the newest snapshot of a version.

        Args:
            old: the one before.
            new: the new one.
            commits: what made it of the old one.
        """
        self.keep(old)
        self.newest[new.version] = new
        if 1 < len(commits) <= MAX_PASSED_COMMITS:
            self.passed[old.version, old.place] = commits

    def before(self, version: str, place: LogPlace) -> tuple[Snapshot, Sequence[Commit]] | None:
        """An earlier snapshot and the commits that lead to a place; None if there are none."""
        for (passed_version, start), commits in self.passed.items():
            places = [commit.place for commit in commits]
            if passed_version == version and place in places:
                _, snapshot = self.older[version, start]
                return snapshot, commits[: places.index(place) + 1]
        return None

    def drop_stale(self, version: str) -> None:
        """Drops a version that has other operations than the label log.

        Its snapshot goes on answering until a version has the operations that there are.
        """
        snapshot = self._drop(version)
        # The decision is no longer carried out: the coordinator repeats it until it is again.
        self.epoch = ""
        self.keep(snapshot)
        if version == self.answering:
            self.answering = ""
            self.stale = snapshot

    def keep(self, old: Snapshot) -> None:
        """Keeps a snapshot for the requests that began with it."""
        # Few requests still come to it.
        old.drop_views()
        self.older[old.version, old.place] = (time.monotonic(), old)
        while len(self.older) > MAX_OLD_SNAPSHOTS:
            # Dictionaries keep the order of insertion: the first one is the oldest.
            self._forget_older(next(iter(self.older)))

    def drop_loads(self, needed: Sequence[ServedBundle]) -> None:
        """Forgets the loads of other bundles; one that has begun ends unused."""
        for bundle in list(self.loads):
            if bundle not in needed or bundle.version in self.newest:
                self.loads.pop(bundle).cancel()

    def forget(self, keep_s: float) -> int:
        """Drops versions and snapshots that have not been needed for so long.

        Returns:
            The number of versions.
        """
        limit = time.monotonic() - keep_s
        num_versions = len(self.newest)
        # Copies of the items, because the dictionaries shrink meanwhile.
        for version, since in list(self.dropped.items()):
            if since < limit:
                self._drop(version)
        for (version, place), (since, snapshot) in list(self.older.items()):
            # Requests still begin with it elsewhere, as they do here.
            if snapshot is self.stale:
                continue
            if since <= limit or version not in self.newest:
                self._forget_older((version, place))
        return num_versions - len(self.newest)

    def folders(self) -> set[Path]:
        """Folders of the bundles that may answer."""
        snapshots = [*self.newest.values(), *(snapshot for _, snapshot in self.older.values())]
        if self.stale is not None:
            snapshots.append(self.stale)
        return {snapshot.folder for snapshot in snapshots}

    def _drop(self, version: str) -> Snapshot:
        """Drops a version, and does not go on with its operations; returns its snapshot."""
        self.dropped.pop(version, None)
        catch_up = self.catching_up.pop(version, None)
        if catch_up is not None:
            catch_up.changed.cancel()
        return self.newest.pop(version)

    def _forget_older(self, key: tuple[str, LogPlace]) -> None:
        del self.older[key]
        self.passed.pop(key, None)
