"""Builds the batches of the next steps, and what their losses need of them, during a step.

A batch depends on its step, its rank and the clusters of its epoch alone, and the inputs of its loss
on the batch and the hard negatives in use. So what is built ahead equals what the step would have
built itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from xmcray.data.batches import BatchSampler, QueryClusters
from xmcray.types import Batch, Shortlist

_NO_VERSION = -1
_AHEAD = 2  # batches that wait; more would only take memory


class BatchPrefetcher:
    """Gives a rank its batches in the order of the steps.

    Args:
        sampler: Draws the batches; from then on only the prefetcher's thread uses it.
        prepare: Returns the inputs of the loss of a batch (`Method.prepare`).
        rank: The rank that encodes the slice.
        num_ranks: Ranks in all.
        last_step: One past the last step, beyond which nothing is built.
    """

    def __init__(
        self,
        sampler: BatchSampler,
        prepare: Callable[[Batch, Shortlist | None], Any],
        rank: int,
        num_ranks: int,
        last_step: int,
    ) -> None:
        self._sampler = sampler
        self._prepare = prepare
        self._rank = rank
        self._num_ranks = num_ranks
        self._last_step = last_step
        # One thread, because the sampler keeps the order of one epoch at a time.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        # By step, and by the versions of clusters and hard negatives.
        self._pending: dict[tuple[int, int, int], Future[Batch]] = {}

    def batch(
        self, step: int, clusters: QueryClusters | None, shortlist: Shortlist | None
    ) -> Batch:
        """Returns the batch of a step with its inputs, and starts to build those that follow.

        Args:
            step: Counted over the whole run.
            clusters: Those of the step's epoch.
            shortlist: Hard negatives of the step.
        """
        future = self._build(step, clusters, shortlist)
        is_refreshed = clusters is not None or shortlist is not None
        for next_step in range(step + 1, min(step + 1 + _AHEAD, self._last_step)):
            # The next epoch may have other clusters and negatives, and would be built in vain.
            if not is_refreshed or self._epoch(next_step) == self._epoch(step):
                self._build(next_step, clusters, shortlist)
        batch = future.result()
        self._forget_until(step)
        return batch

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _build(
        self, step: int, clusters: QueryClusters | None, shortlist: Shortlist | None
    ) -> Future[Batch]:
        clusters_version = _NO_VERSION if clusters is None else clusters.version
        shortlist_version = _NO_VERSION if shortlist is None else shortlist.version
        key = (step, clusters_version, shortlist_version)
        if key not in self._pending:
            self._pending[key] = self._thread.submit(self._built, step, clusters, shortlist)
        return self._pending[key]

    def _built(
        self, step: int, clusters: QueryClusters | None, shortlist: Shortlist | None
    ) -> Batch:
        batch = self._sampler.batch(step, self._rank, self._num_ranks, clusters)
        return dataclasses.replace(batch, inputs=self._prepare(batch, shortlist))

    def _forget_until(self, step: int) -> None:
        """Drops batches of steps that are over, and those that were built for other clusters."""
        for key in list(self._pending):
            if key[0] <= step:
                del self._pending[key]

    def _epoch(self, step: int) -> int:
        return step // self._sampler.steps_per_epoch
