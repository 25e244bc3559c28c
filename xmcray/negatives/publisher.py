"""One rank's way into the ledger: vectors are collected here and written in a background thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from xmcray.negatives.ledger import Ledger
from xmcray.negatives.version_folder import QueryBlock
from xmcray.parallel import collectives
from xmcray.storage.manifest import hash_file
from xmcray.types import Float32Array, Int64Array

_BLOCK_BYTES = 16 << 20  # vectors that are collected before they are written


@dataclass(frozen=True, slots=True)
class _StepQueries:
    """A query block whose vectors are still on their device.

    Attributes:
        ids: as in `QueryBlock`.
        vectors: float32 [B, D].
        extra: as in `QueryBlock`.
    """

    ids: Int64Array
    vectors: Tensor
    extra: Int64Array


class Publisher:
    """Collects query vectors for one version at a time and publishes it.

    Args:
        ledger: of the run.
        index_rows: returns the vectors of this rank's labels, [S, D]; None if no index is built
            from them.
        first_label: first label of this rank.
    """

    def __init__(
        self,
        ledger: Ledger,
        index_rows: Callable[[], Tensor] | None,
        first_label: int,
    ) -> None:
        self.ledger = ledger
        self.index_rows = index_rows
        self.first_label = first_label
        self.writer = BackgroundWriter(ledger)
        self._collected: list[_StepQueries | QueryBlock] = []

    def collect(self, ids: Int64Array, vectors: Tensor, extra: Int64Array) -> None:
        """Adds the query vectors of a step, without waiting for their device.

        Args:
            ids: int64 [B], query ids.
            vectors: [B, D].
            extra: as in `QueryBlock`.
        """
        # A copy, because vectors may be part of a tensor that is much larger, and which the step frees.
        own_vectors = vectors.detach().to(torch.float32, copy=True)
        self._collected.append(_StepQueries(ids, own_vectors, extra))

    def restore(self, block: QueryBlock) -> None:
        """Adds a block that was pending at a checkpoint."""
        self._collected.append(block)

    @property
    def full(self) -> bool:
        """Whether so many vectors are collected that `flush` should write them."""
        num_bytes = sum(block.vectors.nbytes for block in self._collected)
        return num_bytes > _BLOCK_BYTES

    @property
    def pending(self) -> QueryBlock | None:
        """What is collected and not yet given to the writer; None if there is nothing."""
        return _joined(self._collected) if self._collected else None

    def flush(self, version: int, step: int) -> None:
        """Queues what is collected up to a step to be written, without waiting for its device."""
        collected = self._collected
        self._collected = []
        folder = self.ledger.version(version)
        rank = collectives.rank()
        if any(len(queries.ids) for queries in collected):
            self.writer.put(lambda: [folder.write_queries(step, rank, _joined(collected))])

    def publish(self, version: int, step: int) -> Path:
        """Queues all that a version needs from this rank, and then the mark that it is there.

        Returns:
            The folder of the version.
        """
        self.flush(version, step)
        folder = self.ledger.version(version)
        rank = collectives.rank()
        num_ranks = collectives.num_ranks()
        if self.index_rows is not None:
            # Copied here and not in the background thread, because the next step changes the rows.
            rows = to_numpy(self.index_rows())
            self.writer.put(lambda: folder.write_rows(self.first_label, rows))
        # Jobs run in their order, so the mark is written after all that it announces.
        self.writer.put(lambda: [folder.publish(rank, num_ranks, step + 1)])
        return folder.path


class BackgroundWriter:
    """Runs write jobs in their order in one thread.

    Args:
        ledger: of the run.
    Attributes:
        hashes: SHA-256 of each file that was written and is not forgotten, by path relative to the
            ledger.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.hashes: dict[str, str] = {}
        self._ledger = ledger
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._last: Future[None] | None = None

    def put(self, job: Callable[[], Sequence[Path]]) -> None:
        """Queues a job that returns what it has written; raises the error of an earlier one."""
        if self._last is not None and self._last.done():
            self._last.result()  # training is not to go on for long after a failed write
        self._last = self._thread.submit(self._run, job, self._last)

    def drain(self) -> None:
        """Waits until all jobs are done; raises the error of the first that failed."""
        if self._last is not None:
            self._last.result()

    def forget_all_but(self, folders: Collection[str]) -> None:
        """Drops the hashes of files in other folders of the ledger; only after `drain`."""
        for name in list(self.hashes):
            folder, _, _ = name.partition("/")
            if folder not in folders:
                del self.hashes[name]

    def close(self) -> None:
        """Finishes the jobs and ends the thread."""
        self._thread.shutdown()

    def _run(self, job: Callable[[], Sequence[Path]], previous: Future[None] | None) -> None:
        if previous is not None:
            previous.result()  # after an error no later job runs: the ledger stays as it is
        for path in job():
            self.hashes[self._ledger.name_of(path)] = hash_file(path).sha256


def _joined(collected: Sequence[_StepQueries | QueryBlock]) -> QueryBlock:
    """All that is collected, as one block on the host."""
    return QueryBlock.concatenate([_on_host(queries) for queries in collected])


def _on_host(queries: _StepQueries | QueryBlock) -> QueryBlock:
    """The block of a step; waits for its device."""
    if isinstance(queries, QueryBlock):
        return queries
    return QueryBlock(queries.ids, queries.vectors.cpu().numpy(), queries.extra)


def to_numpy(tensor: Tensor) -> Float32Array:
    """Copies a tensor that training goes on to change."""
    # One copy, whether the tensor comes from a device or not.
    copied = tensor.detach().to("cpu", torch.float32, copy=True)
    array: Float32Array = copied.numpy()
    return array
