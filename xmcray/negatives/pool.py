"""The negative pool on Ray: one long-lived actor per index shard, and a coordinator that merges what they find.

Actors keep nothing that matters: everything is in the ledger, so a killed actor is restarted by Ray, its call is
repeated, and finished files are not made twice. The driver creates the pool and ends it with the run; workers find
the coordinator by the run's random id, also after they were restarted.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import torch

from xmcray.data.batches import DataConfig, TrainingData
from xmcray.data.node_copy import CorpusSource, open_on_node
from xmcray.errors import XmcrayError
from xmcray.gauges import POOL, Gauges
from xmcray.negatives.ledger import VersionFolder
from xmcray.negatives.refresh import RefreshSpec, merge_shards, search_shard, wait_published

_RESTARTS: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}


def coordinator_name(run_id: str) -> str:
    """Name of a run's coordinator in the cluster."""
    return f"xmcray-{run_id}-negatives"


def shard_name(run_id: str, shard: int) -> str:
    """Name of a run's index actor in the cluster."""
    return f"xmcray-{run_id}-index-{shard}"


class IndexShard:
    """Builds and searches the index of one shard; an actor."""

    def __init__(self, shard: int, num_labels: int, spec: RefreshSpec, nice: int) -> None:
        os.nice(nice)
        torch.set_float32_matmul_precision("medium" if spec.matmul == "bf16" else "highest")
        self.shard, self.num_labels, self.spec = shard, num_labels, spec

    def search(self, folder: str) -> None:
        """Searches one version; a withdrawn one ends quietly."""
        version = VersionFolder(Path(folder))
        if version.complete:
            return
        try:
            search_shard(version, self.shard, self.num_labels, self.spec)
        except FileNotFoundError:
            if not (version.withdrawn or version.complete):
                raise

    def pid(self) -> int:
        """The actor's process."""
        return os.getpid()


class Coordinator:
    """Starts searches when all ranks have published, merges, completes; an actor."""

    def __init__(
        self, run_id: str, corpus: CorpusSource, data: DataConfig, spec: RefreshSpec, nice: int
    ) -> None:
        os.nice(nice)
        self.data = TrainingData(open_on_node(corpus), data)
        # by name, not by handle: a handle among the arguments would be lost with the driver's object store
        self.shards = [ray.get_actor(shard_name(run_id, shard)) for shard in range(spec.num_shards)]
        self.spec = spec
        self.gauges, self._queue = Gauges(run_id, POOL), set[str]()

    def run(self, folder: str) -> None:
        """One version from published to complete."""
        with self._queued(folder):
            version = VersionFolder(Path(folder))
            wait_published(version)
            if version.withdrawn or version.complete:
                return
            started = time.perf_counter()
            ray.get([shard.search.remote(folder) for shard in self.shards])
            try:
                merge_shards(version, self.data, self.spec)
            except FileNotFoundError:
                if not (version.withdrawn or version.complete):
                    raise
            self.gauges.show(
                {"pool_version": version.version, "pool_refresh_s": time.perf_counter() - started}
            )

    @contextlib.contextmanager
    def _queued(self, folder: str) -> Iterator[None]:
        """Counts a version among those that are asked for while the block runs."""
        self._queue.add(folder)
        self.gauges.show({"pool_queue": len(self._queue)})
        try:
            yield
        finally:
            self._queue.discard(folder)
            self.gauges.show({"pool_queue": len(self._queue)})


class NegativePool:
    """The actors of one run, created and ended by the driver.

    Args:
        run_id: names them. corpus: where it is. data: section `data`. spec: shards, threads, index.
        nice: how far the actors yield the CPU to the trainer.
        on_index, on_coordinator: Ray's options that say where the actors go, also when they are restarted.
    """

    def __init__(
        self,
        run_id: str,
        corpus: CorpusSource,
        data: DataConfig,
        num_labels: int,
        spec: RefreshSpec,
        nice: int,
        on_index: Mapping[str, Any],
        on_coordinator: Mapping[str, Any],
    ) -> None:
        environment = {"env_vars": {"OMP_NUM_THREADS": str(spec.threads)}}
        index = ray.remote(**_RESTARTS)(IndexShard)
        self.shards = [
            index.options(name=shard_name(run_id, i), runtime_env=environment, **on_index).remote(
                i, num_labels, spec, nice
            )
            for i in range(spec.num_shards)
        ]
        coordinator = ray.remote(**_RESTARTS)(Coordinator)
        self.coordinator = coordinator.options(
            name=coordinator_name(run_id),
            max_concurrency=4,
            runtime_env=environment,
            **on_coordinator,
        ).remote(run_id, corpus, data, spec, nice)

    def close(self) -> None:
        """Ends the actors."""
        actors: list[Any] = [self.coordinator, *self.shards]
        for actor in actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)


class PoolRefresher:
    """A worker's way to the pool; fulfils `refresh.Refresher`."""

    def __init__(self, run_id: str) -> None:
        self._name = coordinator_name(run_id)
        self._calls: list[Any] = []

    def start(self, folder: Path) -> None:
        """Asks the coordinator for a version and does not wait."""
        self.check()
        self._calls.append(ray.get_actor(self._name).run.remote(str(folder)))

    def check(self) -> None:
        """Raises what a version failed with; a user's mistake as it was raised in the actor."""
        if not self._calls:
            return
        done, self._calls = ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        try:
            ray.get(done)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, XmcrayError):
                raise error.cause from None
            raise

    def close(self) -> None:
        """Nothing to end: the driver owns the pool."""
