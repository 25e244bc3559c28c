"""The trainer's side of the negatives: collects query vectors, publishes versions, and switches to
finished ones.

A rank never waits for an index to be built, except under the schedule "scheduled" at a step that
names a version which is late. Files are written by a background thread, and a checkpoint waits for
it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from xmcray.data.batches import QueryClusters
from xmcray.errors import ShortlistError
from xmcray.negatives.ledger import Ledger, version_of
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.publisher import Publisher
from xmcray.negatives.refresh import Refresher
from xmcray.negatives.version_checks import VersionChecks
from xmcray.negatives.version_folder import QueryBlock, VersionFolder
from xmcray.parallel import collectives
from xmcray.types import Batch, Shortlist

logger = logging.getLogger(__name__)

_NO_VERSION = -1
_EAGER_EVERY = 8  # steps between two checks for a newer version, each of which costs a broadcast
_POLL_S = 0.01


# Files that `ShortlistFeed.state` lists, by path relative to the ledger.
_INPUT = re.compile(
    r"v[0-9]{5,9}-[0-9]{4,9}/(?:(?:queries|rows)/[0-9-]+\.safetensors|published-[0-9]+\.json)"
)


def check_state(state: Any, step: int) -> None:
    """Checks what a checkpoint says that `ShortlistFeed.state` has returned.

    Args:
        state: contents of JSON.
        step: steps done then. There is a version an epoch at most, so none has a higher number.

    Raises:
        KeyError, TypeError, ValueError: it is malformed.
    """
    # A run without hard negatives and clusters.
    if state == {}:
        return
    for name, sha256 in state["inputs"].items():
        if _INPUT.fullmatch(name) is None or not isinstance(sha256, str):
            raise ValueError(f"found the input {name!r}: {sha256!r}")
    optional = [state[key] for key in ("version", "clusters_version", "broken_at_step")]
    numbers = [number for number in optional if number is not None]
    for number in [*numbers, *state["published"]]:
        if type(number) is not int or not 0 <= number <= step:
            raise ValueError(f"found {number!r}, expected a number of at most {step}")


class ShortlistFeed:
    """Gives the loop hard negatives and the clusters that batches are made of; one per rank.

    Args:
        ledger: of the run.
        config: section `negatives`.
        refresher: finishes versions, which rank 0 starts.
        steps_per_epoch: of the run.
        num_epochs: of the run.
        index_rows: returns the method's vectors of this rank's labels, [S, D].
        first_label: first label of this rank.

    Attributes:
        current: the hard negatives in use.
        clusters: the clusters in use.
        blocked_s: seconds that training has spent here.
        broken_at_step: first step whose version was late, after which the schedule waits no more.
    """

    def __init__(
        self,
        ledger: Ledger,
        config: NegativesConfig,
        refresher: Refresher,
        steps_per_epoch: int,
        num_epochs: int,
        index_rows: Callable[[], Tensor],
        first_label: int,
    ) -> None:
        self.ledger = ledger
        self.config = config
        self.refresher = refresher
        self.steps_per_epoch = steps_per_epoch
        self.num_epochs = num_epochs
        self.current: Shortlist | None = None
        self.clusters: QueryClusters | None = None
        self.blocked_s = 0.0
        self.broken_at_step: int | None = None
        self._has_warned = False
        self._checks = VersionChecks()
        self._publisher = Publisher(ledger, index_rows if config.hard else None, first_label)

    @property
    def active(self) -> bool:
        """Whether the run uses hard negatives or clusters at all."""
        return self.config.refreshed

    def before_step(self, step: int) -> Shortlist | None:
        """Returns the hard negatives of a step.

        Switches versions when the schedule says so, and clusters when an epoch starts.

        Raises:
            ShortlistError: the negatives in use are older than `max_age` epochs, or there are none
                so many epochs after the first were due.
        """
        if not self.active:
            return None
        starts_epoch = step % self.steps_per_epoch == 0
        with self._blocking():
            if self.config.schedule == "eager":
                # Ranks must switch at the same step, so rank 0 decides.
                if self.current is None or step % _EAGER_EVERY == 0:
                    newest = collectives.broadcast_int(self._newest_on_rank_0())
                    self._use_version(newest)
            elif starts_epoch:
                self._follow_schedule(step)
            # The order of an epoch never changes within it. An eager version may come too early.
            is_due = step >= self.config.start_epoch * self.steps_per_epoch
            if starts_epoch and is_due and self.current is not None:
                self._use_clusters(self.current.version, step)
        self._check_age(step)
        return self.current

    def after_step(self, batch: Batch, query_BD: Tensor | None) -> None:
        """Collects the query vectors of a step, and publishes at the end of a collecting epoch."""
        version = self._collecting(batch.step)
        if version is None or query_BD is None:
            return
        with self._blocking():
            own = slice(batch.start, batch.stop)
            num_forbidden = batch.positives.lengths + batch.excluded.lengths
            self._publisher.collect(batch.query_ids[own], query_BD, num_forbidden[own])
            ends_epoch = (batch.step + 1) % self.steps_per_epoch == 0
            if ends_epoch:
                folder = self._publisher.publish(version, batch.step)
                self._checks.expect(VersionFolder(folder))
                if collectives.rank() == 0:
                    self.refresher.start(folder)
            elif self._publisher.full:
                self._publisher.flush(version, batch.step)

    def state(self, step: int) -> dict[str, Any]:
        """Returns what a checkpoint after `step` steps keeps; collective.

        All files that it names are on disk when it returns.
        """
        if not self.active:
            return {}
        self._publisher.writer.drain()
        versions = self.ledger.versions()
        incomplete = {folder.path.name for folder in versions if not folder.complete}
        inputs = {}
        for hashes_of_rank in collectives.gather_objects(self._publisher.writer.hashes):
            for name, sha256 in hashes_of_rank.items():
                # A complete version needs its inputs no more, so a checkpoint does not list them.
                folder_name, _, _ = name.partition("/")
                if folder_name in incomplete:
                    inputs[name] = sha256
        self._publisher.writer.forget_all_but(incomplete)
        return {
            "inputs": inputs,
            "published": [folder.version for folder in versions if folder.published],
            "version": self.current.version if self.current else None,
            "clusters_version": self.clusters.version if self.clusters else None,
            "broken_at_step": self.broken_at_step,
        }

    def pending(self) -> dict[str, np.ndarray[Any, Any]]:
        """Returns what this rank has collected and not yet written to the ledger; a checkpoint
        keeps it.

        Then the blocks of the ledger do not depend on where checkpoints were written, and an
        approximate index, which searches block by block, finds the same.
        """
        block = self._publisher.pending
        return {} if block is None else block.arrays()

    def restore(
        self,
        state: Mapping[str, Any],
        step: int,
        pending: Sequence[QueryBlock] = (),
    ) -> None:
        """Continues after a checkpoint, or from the start; collective.

        Args:
            state: of the checkpoint; empty at the start.
            step: steps that were done.
            pending: what ranks had pending then; each goes to one rank, no matter which.
        """
        if not self.active:
            return
        for block in pending:
            self._publisher.restore(block)
        if collectives.rank() == 0:
            self._restore_ledger(state)
        collectives.broadcast_int(0)  # no rank reads the ledger before rank 0 has restored it
        self.broken_at_step = state.get("broken_at_step")
        version = state.get("version")
        if version is not None:
            self._use_version(version)
        clusters_version = state.get("clusters_version")
        if clusters_version is not None:
            self._use_clusters(clusters_version, step)
        if collectives.rank() == 0:
            for folder in self.ledger.versions():
                if folder.published and not folder.complete:
                    self.refresher.start(folder.path)

    def age(self, step: int) -> int | None:
        """Returns the steps since the vectors behind the hard negatives in use were copied.

        None while there are no hard negatives.
        """
        if self.current is None:
            return None
        return step - self.current.snapshot_step

    def close(self) -> None:
        """Ends the background thread."""
        self._publisher.writer.close()

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        """Counts the seconds of the block as time that training was blocked."""
        start = time.perf_counter()
        yield
        self.blocked_s += time.perf_counter() - start

    def _collecting(self, step: int) -> int | None:
        """Returns the version that collects queries at a step; None if it would never be used."""
        if not self.active or step < 0:
            return None
        schedule = self.config.schedule_of
        version = schedule.collecting(step // self.steps_per_epoch)
        if version is None or schedule.use_epoch(version) >= self.num_epochs:
            return None
        return version

    def _follow_schedule(self, step: int) -> None:
        """Switches to the version of an epoch, or to the newest one if that version is too late."""
        epoch = step // self.steps_per_epoch
        due = self.config.schedule_of.using(epoch)
        if due is None:
            return
        # A resumed run may have opened the version already.
        if self.current is not None and self.current.version >= due:
            return
        # Only rank 0 watches the files; the others learn from it what they may open.
        version = collectives.broadcast_int(self._wait_on_rank_0(due))
        if version < due and self.broken_at_step is None:
            self.broken_at_step = step
            used_instead = "none" if version == _NO_VERSION else version
            logger.warning(
                "hard negatives of version %d were not ready at step %d after %.0f s; training goes on with version %s",
                due,
                step,
                self.config.wait_s,
                used_instead,
            )
        self._use_version(version)

    def _wait_on_rank_0(self, due: int) -> int:
        """Waits for a version, unless an earlier one was too late; returns it or the newest one."""
        # Other ranks wait in the collective that follows. NCCL would keep a device busy meanwhile,
        # which the search may share, so there they watch the files too.
        if collectives.rank() > 0 and not collectives.on_gpu():
            return _NO_VERSION
        wait_s = self.config.wait_s if self.broken_at_step is None else 0.0
        deadline = time.monotonic() + wait_s
        folder = self.ledger.version(due)
        while not folder.complete and time.monotonic() < deadline:
            self.refresher.check()
            time.sleep(_POLL_S)
        if folder.complete:
            return due  # that of rank 0 counts
        return self._newest_on_rank_0()

    def _newest_on_rank_0(self) -> int:
        """Returns the newest finished version; what other ranks return is not used.

        Raises:
            XmcrayError: a refresh failed, which would otherwise end unseen.
        """
        if collectives.rank() > 0:
            return _NO_VERSION
        self.refresher.check()
        folder = self.ledger.newest_complete()
        if folder is None:
            return _NO_VERSION
        return folder.version

    def _use_version(self, version: int) -> None:
        """Opens the hard negatives of a version unless those in use are as new."""
        current = _NO_VERSION if self.current is None else self.current.version
        if version > current:
            self.current = self._checks.checked(self.ledger.version(version)).shortlist()

    def _use_clusters(self, version: int, step: int) -> None:
        """Opens the clusters of a version, merged to the size that the epoch of a step wants."""
        if not self.config.cluster_size:
            return
        smallest = self._checks.checked(self.ledger.version(version)).clusters()
        num_queries = int((smallest >= 0).sum())
        epoch = step // self.steps_per_epoch
        num_clusters = self.config.num_clusters_at(epoch, num_queries)
        # There are 2^a of the smallest clusters and 2^b are wanted: dropping the last a - b bits of
        # a number merges each cluster with its siblings (see `balanced_clusters`), and -1 stays -1.
        smallest_levels = int(smallest.max()).bit_length()
        wanted_levels = num_clusters.bit_length() - 1
        dropped_bits = max(0, smallest_levels - wanted_levels)
        cluster = smallest >> dropped_bits
        num_merged = int(cluster.max()) + 1
        self.clusters = QueryClusters(version, num_merged, cluster)

    def _check_age(self, step: int) -> None:
        age = self.age(step)
        if age is None:
            self._check_missing(step)
            return
        # Of this age a version is replaced: one epoch to build it, and those of its use.
        usual_age = 1 + self.config.refresh_every
        limit = (usual_age + self.config.max_age) * self.steps_per_epoch
        if age > limit:
            raise ShortlistError(
                f"hard negatives are {age} steps old at step {step}, allowed are {limit}: the negative pool does not"
                " answer; look at its log, or raise negatives.max_age"
            )

    def _check_missing(self, step: int) -> None:
        """Checks that the first version is not too late, while there is none at all."""
        due_step = self.config.start_epoch * self.steps_per_epoch
        if step < due_step:
            return
        # Nothing has an age yet, so the epochs count from when version 0 was due.
        limit = due_step + self.config.max_age * self.steps_per_epoch
        if step > limit:
            raise ShortlistError(
                f"hard negatives are missing at step {step}, due at step {due_step}, allowed until step {limit}: the"
                " negative pool does not answer; look at its log, or raise negatives.max_age"
            )
        # The schedule "scheduled" has said so when it gave up waiting.
        if self.config.schedule == "eager" and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "hard negatives of version 0 were not ready at step %d; training goes on without, until step %d at most",
                step,
                limit,
            )

    def _restore_ledger(self, state: Mapping[str, Any]) -> None:
        inputs: Mapping[str, str] = state.get("inputs", {})
        self.ledger.path.mkdir(parents=True, exist_ok=True)
        in_use = (state.get("version"), state.get("clusters_version"))
        oldest = min((version for version in in_use if version is not None), default=0)
        self.ledger.restore(inputs, state.get("published", []), oldest)
        # Query blocks of a withdrawn attempt have moved to the next one, where they have other
        # names.
        for name, sha256 in inputs.items():
            folder = self.ledger.version(version_of(name))
            _, _, name_in_folder = name.partition("/")
            path = folder.path / name_in_folder
            if path.is_file():
                self._publisher.writer.hashes[self.ledger.name_of(path)] = sha256
