"""Builds the batches of the next steps while the current step computes.

A batch depends on its step, its rank and the clusters of its epoch alone, so a batch built ahead
equals the one that the step would have built itself.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from xmcray.data.batches import BatchSampler, QueryClusters
from xmcray.types import Batch

_AHEAD = 2  # batches that wait; more would only take memory


class BatchPrefetcher:
    """Gives a rank its batches in the order of the steps.

    Args:
        sampler: Draws the batches; from then on only the prefetcher's thread uses it.
        rank: The rank that encodes the slice.
        num_ranks: Ranks in all.
        last_step: One past the last step, beyond which nothing is built.
    """

    def __init__(self, sampler: BatchSampler, rank: int, num_ranks: int, last_step: int) -> None:
        self._sampler = sampler
        self._rank = rank
        self._num_ranks = num_ranks
        self._last_step = last_step
        # One thread, because the sampler keeps the order of one epoch at a time.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._pending: dict[tuple[int, int], Future[Batch]] = {}

    def batch(self, step: int, clusters: QueryClusters | None) -> Batch:
        """Returns the batch of a step, and starts to build those that follow.

        Args:
            step: Counted over the whole run.
            clusters: Those of the step's epoch.
        """
        future = self._build(step, clusters)
        for next_step in range(step + 1, min(step + 1 + _AHEAD, self._last_step)):
            # The next epoch may have other clusters, and its order would be drawn in vain.
            if clusters is None or self._epoch(next_step) == self._epoch(step):
                self._build(next_step, clusters)
        batch = future.result()
        self._forget_until(step)
        return batch

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _build(self, step: int, clusters: QueryClusters | None) -> Future[Batch]:
        version = -1 if clusters is None else clusters.version
        key = (step, version)
        if key not in self._pending:
            self._pending[key] = self._thread.submit(
                self._sampler.batch,
                step,
                self._rank,
                self._num_ranks,
                clusters,
            )
        return self._pending[key]

    def _forget_until(self, step: int) -> None:
        """Drops batches of steps that are over, and those that were built for other clusters."""
        for key in list(self._pending):
            if key[0] <= step:
                del self._pending[key]

    def _epoch(self, step: int) -> int:
        return step // self._sampler.steps_per_epoch
