"""The negative pool on Ray: one long-lived actor per index shard, and a coordinator.

The actors search, then each merges the hits of all shards for its share of the queries. The
coordinator joins what they merged.

Actors keep nothing that matters, because everything is in the ledger. When an actor is killed, Ray
restarts it and repeats its call, and files that are finished are not made twice. The driver creates
the pool and ends it with the run. Workers find the coordinator by the run's random id, also after a
restart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from xmcray.data.batches import DataConfig, TrainingData
from xmcray.data.node_copy import CorpusSource, open_on_node
from xmcray.errors import StorageError
from xmcray.negatives.refresh import (
    RefreshSpec,
    complete_version,
    merge_blocks,
    search_shard,
    wait_published,
)
from xmcray.negatives.version_folder import VersionFolder
from xmcray.nn.matmul import TORCH_PRECISION
from xmcray.ray_adapter.actors import (
    find_actor,
    kill_actors,
    start_actor,
    unfinished_calls,
    wait_for_calls,
)
from xmcray.ray_adapter.gauges import POOL, Gauges


def coordinator_name(run_id: str) -> str:
    """Returns the name of a run's coordinator in the cluster."""
    return f"xmcray-{run_id}-negatives"


def shard_name(run_id: str, shard: int) -> str:
    """Returns the name of a run's index actor in the cluster."""
    return f"xmcray-{run_id}-index-{shard}"


class IndexShard:
    """An actor that builds and searches the index of one shard of the labels, and merges the hits
    of all shards for its share of the queries.
    """

    def __init__(
        self,
        shard: int,
        num_labels: int,
        corpus: CorpusSource,
        data: DataConfig,
        spec: RefreshSpec,
        nice: int,
    ) -> None:
        os.nice(nice)
        torch.set_float32_matmul_precision(TORCH_PRECISION[spec.matmul])
        self.shard = shard
        self.num_labels = num_labels
        self.corpus = corpus
        self.data_config = data
        self.spec = spec

    @functools.cached_property
    def data(self) -> TrainingData:
        """The training data, opened when the first version is merged."""
        return TrainingData(open_on_node(self.corpus), self.data_config)

    def search(self, folder: str) -> None:
        """Searches one version; returns quietly if the version is withdrawn."""
        version = VersionFolder(Path(folder))
        _check_shared(version)
        if version.complete:
            return
        with _ignore_if_over(version):
            search_shard(version, self.shard, self.num_labels, self.spec)
        if self.spec.shares_gpu:
            # The trainer may want the memory before the next version. Without CUDA it does nothing.
            torch.cuda.empty_cache()

    def merge(self, folder: str) -> None:
        """Merges this actor's share of one version that all actors have searched."""
        version = VersionFolder(Path(folder))
        if version.complete or not self.spec.negatives.hard:
            return
        with _ignore_if_over(version):
            merge_blocks(version, self.shard, self.data, self.spec)

    def pid(self) -> int:
        """Returns the actor's process."""
        return os.getpid()


class IndexCoordinator:
    """An actor that starts the searches of a published version, then the merges, and completes
    it.
    """

    def __init__(
        self,
        run_id: str,
        corpus: CorpusSource,
        data: DataConfig,
        spec: RefreshSpec,
        nice: int,
    ) -> None:
        os.nice(nice)
        self.data = TrainingData(open_on_node(corpus), data)
        self.spec = spec
        # By name, not by handle: a handle among the arguments would be lost with the driver's
        # object store.
        self.shards = [find_actor(shard_name(run_id, shard)) for shard in range(spec.num_shards)]
        self.gauges = Gauges(run_id, POOL)
        self._queue: set[str] = set()
        self._newest = -1
        self._showing = threading.Lock()

    def run(self, folder: str) -> None:
        """Takes one version from published to complete."""
        with self._queued(folder):
            version = VersionFolder(Path(folder))
            wait_published(version)
            if version.withdrawn or version.complete:
                return
            start = time.perf_counter()
            wait_for_calls([shard.search.remote(folder) for shard in self.shards])
            wait_for_calls([shard.merge.remote(folder) for shard in self.shards])
            with _ignore_if_over(version):
                complete_version(version, self.data, self.spec)
            seconds = time.perf_counter() - start
            # Calls run in threads, and a later version may be shown before an earlier one.
            with self._showing:
                self._newest = max(self._newest, version.version)
                self.gauges.show({"pool_version": self._newest, "pool_refresh_s": seconds})

    @contextlib.contextmanager
    def _queued(self, folder: str) -> Iterator[None]:
        """Counts a version as one of the queue while the block runs."""
        self._queue.add(folder)
        self.gauges.show({"pool_queue": len(self._queue)})
        try:
            yield
        finally:
            self._queue.discard(folder)
            self.gauges.show({"pool_queue": len(self._queue)})


def _check_shared(version: VersionFolder) -> None:
    """Raises StorageError on a node that has no ledger, where each version would look withdrawn."""
    ledger = version.path.parent
    if not ledger.is_dir():
        raise StorageError(
            f"{ledger} is not on {socket.gethostname()}, where an index actor runs;"
            " name an --out in a folder that all nodes share"
        )


@contextlib.contextmanager
def _ignore_if_over(version: VersionFolder) -> Iterator[None]:
    """Ignores missing files of a version that was withdrawn or completed, which removes them."""
    try:
        yield
    except FileNotFoundError:
        if not (version.withdrawn or version.complete):
            raise


class NegativePool:
    """The actors of one run, created and ended by the driver.

    Args:
        run_id: names the actors.
        corpus: where the corpus is.
        data: section `data`.
        num_labels: L.
        spec: shards, threads, index.
        nice: how far the actors yield the CPU to the trainers.
        index_options: Ray's options that say where index actors go, also when they are restarted.
        coordinator_options: the same for the coordinator.
        shared_gpus: for each actor that searches on a trainer's GPU, options in place of
            `index_options`, and the number of the GPU on its node.
    """

    def __init__(
        self,
        *,
        run_id: str,
        corpus: CorpusSource,
        data: DataConfig,
        num_labels: int,
        spec: RefreshSpec,
        nice: int,
        index_options: Mapping[str, Any],
        coordinator_options: Mapping[str, Any],
        shared_gpus: Sequence[tuple[Mapping[str, Any], int]] = (),
    ) -> None:
        environment = {"env_vars": {"OMP_NUM_THREADS": str(spec.threads)}}
        self._actors = []
        for shard in range(spec.num_shards):
            shard_spec = spec
            options = index_options
            if shared_gpus:
                options, gpu = shared_gpus[shard]
                shard_spec = dataclasses.replace(spec, gpu=gpu, shares_gpu=True)
            index = start_actor(
                IndexShard,
                (shard, num_labels, corpus, data, shard_spec, nice),
                shard_name(run_id, shard),
                {"runtime_env": environment, **options},
            )
            self._actors.append(index)
        coordinator = start_actor(
            IndexCoordinator,
            (run_id, corpus, data, spec, nice),
            coordinator_name(run_id),
            # Calls overlap: a version may be started while another one still waits for its ranks.
            {"runtime_env": environment, "max_concurrency": 4, **coordinator_options},
        )
        self._actors.append(coordinator)

    def close(self) -> None:
        """Ends the actors."""
        kill_actors(self._actors)


class PoolRefresher:
    """Starts versions in the pool on behalf of a worker. Implements `refresh.Refresher`."""

    def __init__(self, run_id: str) -> None:
        self._name = coordinator_name(run_id)
        self._calls: list[Any] = []

    def start(self, folder: Path) -> None:
        """Starts a version without waiting for it."""
        self.check()
        coordinator = find_actor(self._name)
        self._calls.append(coordinator.run.remote(str(folder)))

    def check(self) -> None:
        """Raises the error of a version that failed, a user's mistake as it was in the actor."""
        self._calls = unfinished_calls(self._calls)

    def close(self) -> None:
        """Does nothing, because the driver owns the pool."""
