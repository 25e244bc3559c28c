"""The trainer's side of the negatives: collects query vectors, publishes label vectors, switches versions and orders.

A rank never waits for an index to be built, except under `scheduled` at a step that names a version which is late.
Files are written by a background thread; a checkpoint waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from xmcray import storage
from xmcray.data.batches import QueryClusters
from xmcray.errors import ShortlistError
from xmcray.negatives.ledger import Ledger, VersionFolder
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.refresh import Refresher
from xmcray.parallel import collectives
from xmcray.types import Batch, Float32Array, Int64Array, Shortlist

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 16 << 20
_PENDING = ("ids", "vectors", "extra")
_EAGER_EVERY = 8  # steps between looks for a newer version: one costs a broadcast


class ShortlistFeed:
    """What the loop asks for hard negatives and for the clusters that batches are made of, one per rank.

    Args:
        ledger: of the run. config: section `negatives`. refresher: finishes versions; used by rank 0 only.
        steps_per_epoch, num_epochs: of the run. index_rows: the method's vectors of this rank's labels, [S, D].
        first_label: first label of this rank.
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
        self.ledger, self.config, self.refresher = ledger, config, refresher
        self.steps_per_epoch, self.num_epochs = steps_per_epoch, num_epochs
        self.index_rows, self.first_label = index_rows, first_label
        self.current: Shortlist | None = None
        self.clusters: QueryClusters | None = None
        self.blocked_s = 0.0
        self.broken_at_step: int | None = None
        self._writer = _Writer(ledger)
        self._collected: list[tuple[Int64Array, Float32Array, Int64Array]] = []

    @property
    def active(self) -> bool:
        """Whether the method asked for hard negatives or clusters at all."""
        return self.config.refreshed

    def before_step(self, step: int) -> Shortlist | None:
        """The hard negatives of a step; switches versions where the schedule says so, and clusters where epochs start.

        Raises:
            ShortlistError: the negatives in use are older than `max_age` epochs.
        """
        if not self.active:
            return None
        started = time.perf_counter()
        if self.config.schedule == "eager":
            if self.current is None or step % _EAGER_EVERY == 0:
                self._take(self._newest())
        elif step % self.steps_per_epoch == 0:
            self._switch_on_schedule(step)
        if (
            step % self.steps_per_epoch == 0 and self.current is not None
        ):  # within an epoch its order stays
            self._order_by(self.current.version, step)
        self.blocked_s += time.perf_counter() - started
        self._check_age(step)
        return self.current

    def after_step(self, batch: Batch, query_BD: Tensor | None) -> None:
        """Collects the query vectors of a step, and publishes at the end of a collecting epoch."""
        version = self._collecting(batch.step)
        if version is None or query_BD is None:
            return
        started = time.perf_counter()
        ids = batch.query_ids[batch.start : batch.stop]
        forbidden = (batch.positives.lengths + batch.excluded.lengths)[batch.start : batch.stop]
        vectors = query_BD.float().cpu().numpy().copy()
        self._collected.append((ids, vectors, forbidden))
        if (batch.step + 1) % self.steps_per_epoch == 0:
            self._publish(version, batch.step)
        elif sum(v.nbytes for _, v, _ in self._collected) > _BLOCK_BYTES:
            self._flush(version, batch.step)
        self.blocked_s += time.perf_counter() - started

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after `step` steps keeps; collective. All files it names are on disk when it returns."""
        if not self.active:
            return {}
        self._writer.drain()
        inputs: dict[str, str] = {}
        for part in collectives.gather_objects(self._writer.hashes):
            inputs.update(part)
        versions = self.ledger.versions()
        incomplete = {folder.path.name for folder in versions if not folder.complete}
        return {
            "inputs": {
                name: sha for name, sha in inputs.items() if name.split("/", 1)[0] in incomplete
            },
            "published": [folder.version for folder in versions if folder.published],
            "version": None if self.current is None else self.current.version,
            "clusters_version": None if self.clusters is None else self.clusters.version,
            "broken_at_step": self.broken_at_step,
        }

    def pending(self) -> dict[str, np.ndarray[Any, Any]]:
        """What this rank has collected and not yet written to the ledger; a checkpoint keeps it.

        So the blocks of the ledger are the same wherever checkpoints were written, and an approximate index, which
        answers by blocks, answers alike.
        """
        if not self._collected:
            return {}
        parts = (np.concatenate(parts) for parts in zip(*self._collected, strict=True))
        return dict(zip(_PENDING, parts, strict=True))

    def restore(
        self,
        state: Mapping[str, Any],
        step: int,
        pending: Sequence[Mapping[str, np.ndarray[Any, Any]]] = (),
    ) -> None:
        """Continues after a checkpoint of `step` steps (or from the start); collective.

        Args:
            pending: what ranks had pending then; each to one rank, whichever.
        """
        if not self.active:
            return
        for kept in pending:
            ids, vectors, extra = (kept[name] for name in _PENDING)
            self._collected.append((ids, vectors, extra))
        if collectives.rank() == 0:
            self.ledger.path.mkdir(parents=True, exist_ok=True)
            self.ledger.restore(state.get("inputs", {}), state.get("published", []))
            self._writer.hashes.update(self._renamed(state.get("inputs", {})))
        collectives.broadcast_int(0)  # nobody looks at the ledger before it is restored
        self.broken_at_step = state.get("broken_at_step")
        if state.get("version") is not None:
            self._take(int(state["version"]))
        if state.get("clusters_version") is not None:
            self._order_by(int(state["clusters_version"]), step)
        if collectives.rank() == 0:
            for folder in self.ledger.versions():
                if folder.published and not folder.complete:
                    self.refresher.start(folder.path)

    def age(self, step: int) -> int | None:
        """Steps since the vectors behind the hard negatives in use were copied."""
        return None if self.current is None else step - self.current.snapshot_step

    def close(self) -> None:
        """Ends the background thread."""
        self._writer.close()

    def _collecting(self, step: int) -> int | None:
        """The version that collects queries at a step, unless the run ends before it would be used."""
        if not self.active or step < 0:
            return None
        schedule = self.config.schedule_of
        version = schedule.collecting(step // self.steps_per_epoch)
        return (
            None if version is None or schedule.use_epoch(version) >= self.num_epochs else version
        )

    def _publish(self, version: int, step: int) -> None:
        self._flush(version, step)
        folder = self.ledger.version(version)
        rank, num_ranks = collectives.rank(), collectives.num_ranks()
        if self.config.hard:
            rows = self.index_rows().detach().float().cpu().numpy().copy()
            self._writer.put(lambda: folder.write_rows(self.first_label, rows))
        self._writer.put(lambda: [folder.publish(rank, num_ranks, step + 1)])
        if rank == 0:
            self.refresher.start(folder.path)

    def _flush(self, version: int, step: int) -> None:
        ids, vectors, extra = (
            np.concatenate(parts) for parts in zip(*self._collected, strict=True)
        )
        self._collected.clear()
        folder, rank = self.ledger.version(version), collectives.rank()
        if len(ids):
            self._writer.put(lambda: [folder.write_queries(step, rank, ids, vectors, extra)])

    def _switch_on_schedule(self, step: int) -> None:
        due = self.config.schedule_of.using(step // self.steps_per_epoch)
        if due is None or (self.current is not None and self.current.version >= due):
            return
        deadline = time.monotonic() + (self.config.wait_s if self.broken_at_step is None else 0.0)
        found = -1
        if collectives.rank() == 0:
            folder = self.ledger.version(due)
            while not folder.complete and time.monotonic() < deadline:
                self.refresher.check()
                time.sleep(0.01)
            found = due if folder.complete else self._newest_here()
        found = collectives.broadcast_int(found)
        if found < due and self.broken_at_step is None:
            self.broken_at_step = step
            logger.warning(
                "hard negatives of version %d were not ready at step %d after %.0f s; training goes on with version %s",
                due, step, self.config.wait_s, found if found >= 0 else "none",
            )  # fmt: skip
        self._take(found)

    def _newest(self) -> int:
        return collectives.broadcast_int(self._newest_here() if collectives.rank() == 0 else -1)

    def _newest_here(self) -> int:
        folder = self.ledger.newest_complete()
        return -1 if folder is None else folder.version

    def _take(self, version: int) -> None:
        if version >= 0 and (self.current is None or version > self.current.version):
            self.current = self.ledger.version(version).shortlist()

    def _order_by(self, version: int, step: int) -> None:
        """Takes the clusters of a version, as large as the epoch of `step` wants them."""
        if self.config.cluster_size:
            leaf = self.ledger.version(version).clusters()
            wanted = self.config.num_clusters_at(
                step // self.steps_per_epoch, int((leaf >= 0).sum())
            )
            halvings = max(0, int(leaf.max()).bit_length() + 1 - wanted.bit_length())
            cluster = leaf >> halvings  # -1 stays -1
            self.clusters = QueryClusters(version, int(cluster.max()) + 1, cluster)

    def _check_age(self, step: int) -> None:
        age = self.age(step)
        limit = (self.config.max_age + self.config.refresh_every) * self.steps_per_epoch
        if age is not None and age > limit:
            raise ShortlistError(
                f"hard negatives are {age} steps old at step {step}, allowed are {limit}: the negative pool does not"
                " answer; look at its log, or raise negatives.max_age"
            )

    def _renamed(self, inputs: Mapping[str, str]) -> dict[str, str]:
        """Inputs by their present names: the query blocks of a withdrawn attempt moved to the next one."""
        present = {}
        for name, sha in inputs.items():
            folder = self.ledger.version(VersionFolder(Path(name.split("/", 1)[0])).version)
            path = folder.path / name.split("/", 1)[1]
            if path.is_file():
                present[self.ledger.name_of(path)] = sha
        return present


class _Writer:
    """Runs write jobs in order in one thread; keeps the SHA-256 of what they wrote."""

    def __init__(self, ledger: Ledger) -> None:
        self.hashes: dict[str, str] = {}
        self._ledger = ledger
        self._jobs: queue.Queue[Callable[[], list[Path]] | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], list[Path]]) -> None:
        """Queues a job; raises what an earlier one raised."""
        self._raise()
        self._jobs.put(job)

    def drain(self) -> None:
        """Waits until all jobs are done."""
        self._jobs.join()
        self._raise()

    def close(self) -> None:
        """Finishes the jobs and ends the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    for path in job():
                        self.hashes[self._ledger.name_of(path)] = storage.hash_file(path).sha256
            except BaseException as error:
                self._error = error
            finally:
                self._jobs.task_done()
