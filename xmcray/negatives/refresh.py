"""What one refresh computes, as functions on a version's folder. The pool runs them in actors, a laptop in a thread.

Each function may be killed at any point and called again: finished files are not made twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from xmcray import draws
from xmcray.data.batches import TrainingData
from xmcray.negatives.clusters import balanced_clusters
from xmcray.negatives.ledger import VersionFolder
from xmcray.negatives.plan import NegativesConfig
from xmcray.parallel.partition import LabelPartition
from xmcray.retrieval.exact import exact_search
from xmcray.retrieval.index import Index, build_index
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

_TUNING_QUERIES = 256  # an approximate index chooses its settings on these


class Refresher(Protocol):
    """Whoever finishes versions. The trainer only starts them and looks for complete ones in the ledger."""

    def start(self, folder: Path) -> None:
        """Asks for a version; returns at once, and may be called again for the same one."""

    def check(self) -> None:
        """Raises what went wrong in a version that was started."""

    def close(self) -> None:
        """Ends what `start` began."""


@dataclass(frozen=True, slots=True)
class RefreshSpec:
    """What a refresh needs to know besides its folder.

    Attributes:
        num_shards: index shards, one per classifier shard of the run at its largest; the number of workers that
            publish a version may be another one. threads: per index.
        negatives: section `negatives`. seed: of index training. gpu: device number for the index, or None.
        matmul: as `optim.matmul`; an index actor computes its products as the trainer does.
    """

    num_shards: int
    negatives: NegativesConfig
    seed: int
    threads: int = 1
    gpu: int | None = None
    matmul: Literal["float32", "bf16"] = "float32"

    def parts(self, num_labels: int) -> list[LabelPartition]:
        """The labels of each index shard."""
        return [
            LabelPartition(num_labels, self.num_shards, shard) for shard in range(self.num_shards)
        ]


def search_shard(folder: VersionFolder, shard: int, num_labels: int, spec: RefreshSpec) -> None:
    """Builds the index of one shard and searches all query blocks of a version with it."""
    if not spec.negatives.hard:
        return
    part = spec.parts(num_labels)[shard]
    blocks = [block for block in folder.query_blocks if not folder.has_found(part, block)]
    if not blocks:
        return
    rows = folder.read_rows(part.start, part.stop)
    sample = _sample(folder, _TUNING_QUERIES, spec.seed)
    index = build_index(
        rows, spec.negatives.index, spec.seed, threads=spec.threads, gpu=spec.gpu, queries=sample
    )
    for block in blocks:
        _, vectors, extra = folder.read_queries(block)
        top = _search(
            index, vectors, np.minimum(spec.negatives.hard + _rounded_up(extra), part.size)
        )
        label_ids = np.where(top.ids >= 0, part.to_global(top.ids), -1)
        folder.write_found(part, block, label_ids, top.scores)
    if spec.negatives.recall_queries and folder.query_blocks:
        _write_recall(folder, part, rows, index.search, spec)


def _search(index: Index, vectors: Float32Array, width_B: Int64Array) -> TopLabels:
    """The `width_B[i]` best rows of query i, padded to the largest width: few queries need many more than the rest."""
    padded = TopLabels.empty(len(vectors), int(width_B.max(initial=1)))
    for width in np.unique(width_B):
        at = np.flatnonzero(width_B == width)
        top = index.search(vectors[at], int(width))
        padded.ids[at, :width] = top.ids
        padded.scores[at, :width] = top.scores
    return padded


def _rounded_up(extra: Int64Array) -> Int64Array:
    """To 4, 8, 16, 32 ...: few widths, so that many queries are searched at once."""
    return 1 << np.ceil(np.log2(np.maximum(extra, 4))).astype(np.int64)


def merge_shards(folder: VersionFolder, data: TrainingData, spec: RefreshSpec) -> None:
    """Merges what all shards found: positives and filter pairs out, the h best of each query in; clusters; complete."""
    if (
        folder.complete
    ):  # by someone else: the inputs may be gone, and a merge of nothing would pass for a version
        return
    labels = folder.new_shortlist(data.num_query_ids, spec.negatives.hard)
    blocks = folder.query_blocks
    for block in blocks if spec.negatives.hard else []:
        ids, _, _ = folder.read_queries(block)
        found = [folder.read_found(part, block) for part in spec.parts(data.num_labels)]
        candidate = np.concatenate([ids_ for ids_, _ in found], axis=1)
        score = np.concatenate([scores for _, scores in found], axis=1)
        forbidden = [data.positives(ids), data.excluded(ids)]
        labels[ids] = best_allowed(
            candidate, score, forbidden, data.num_labels, spec.negatives.hard
        )
    if not blocks or folder.query_blocks != blocks:
        raise FileNotFoundError(f"query blocks of {folder.path} vanished while they were merged")
    if spec.negatives.cluster_size and not folder.has_clusters:
        folder.write_clusters(_cluster_queries(folder, blocks, data.num_query_ids, spec))
    folder.finish(
        labels, {"recall": _read_recall(folder, spec.parts(data.num_labels)), "blocks": len(blocks)}
    )


def _cluster_queries(
    folder: VersionFolder, blocks: list[str], num_query_ids: int, spec: RefreshSpec
) -> npt.NDArray[np.int32]:
    """int32 [num_query_ids], the cluster of each collected query as small as the version's first epoch wants them."""
    ids = np.sort(np.concatenate([folder.read_queries(block)[0] for block in blocks]))
    vectors = np.empty((len(ids), folder.read_queries(blocks[0])[1].shape[1]), np.float32)
    for block in blocks:  # by id: what is in which block depends on the number of ranks
        some, rows, _ = folder.read_queries(block)
        vectors[np.searchsorted(ids, some)] = rows
    epoch = spec.negatives.schedule_of.use_epoch(folder.version)
    cluster = np.full(num_query_ids, -1, np.int32)
    cluster[ids] = balanced_clusters(
        vectors, spec.negatives.num_clusters_at(epoch, len(ids)), spec.seed
    )
    return cluster


def best_allowed(
    candidate: Int64Array, score: Float32Array, forbidden: list[Ragged], num_labels: int, width: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """The `width` best candidates of each row that are not forbidden; ties by the lower label, -1 padded.

    Args:
        candidate: int64 [B, k] label ids, -1 for none. score: float32 [B, k].
        forbidden: lists of labels per row.
    """
    score = np.where(candidate >= 0, score, -np.inf)
    row = np.arange(len(candidate))[:, None]
    banned = np.unique(
        np.concatenate([part.row_ids * num_labels + part.values for part in forbidden])
    )
    if len(banned):
        key = row * num_labels + candidate
        at = np.minimum(np.searchsorted(banned, key), len(banned) - 1)
        score = np.where(banned[at] == key, -np.inf, score)
    order = np.lexsort((candidate, -score))[:, :width]
    best = np.where(
        np.isfinite(np.take_along_axis(score, order, 1)),
        np.take_along_axis(candidate, order, 1),
        -1,
    )
    out = np.full((len(candidate), width), -1, np.int32)
    out[:, : best.shape[1]] = best
    return out


class ThreadRefresher:
    """Refreshes in a background thread of the trainer: for one process, notebooks and tests."""

    def __init__(self, data: TrainingData, spec: RefreshSpec) -> None:
        self.data, self.spec = data, spec
        self._threads: dict[Path, threading.Thread] = {}
        self._errors: list[BaseException] = []

    def start(self, folder: Path) -> None:
        """Starts a thread for a version unless there is one."""
        self.check()
        if folder not in self._threads:
            self._threads[folder] = threading.Thread(
                target=self._run, args=(VersionFolder(folder),), daemon=True
            )
            self._threads[folder].start()

    def check(self) -> None:
        """Raises what a thread raised."""
        if self._errors:
            raise self._errors[0]

    def close(self) -> None:
        """Waits for the threads."""
        for thread in self._threads.values():
            thread.join()

    def _run(self, folder: VersionFolder) -> None:
        try:
            wait_published(folder)
            run_version(folder, self.data, self.spec)
        except BaseException as error:
            if not (folder.withdrawn or folder.complete):
                self._errors.append(error)


def run_version(folder: VersionFolder, data: TrainingData, spec: RefreshSpec) -> None:
    """A whole refresh in this process."""
    if not folder.complete:
        for shard in range(spec.num_shards):
            search_shard(folder, shard, data.num_labels, spec)
        merge_shards(folder, data, spec)


def wait_published(folder: VersionFolder, poll_s: float = 0.05) -> None:
    """Returns when all ranks have written their part, or the version is withdrawn or complete."""
    while not (folder.withdrawn or folder.complete or folder.published):
        time.sleep(poll_s)


def _sample(folder: VersionFolder, count: int, seed: int) -> Float32Array:
    """Up to `count` of a version's query vectors, drawn from its first block."""
    _, vectors, _ = folder.read_queries(folder.query_blocks[0])
    return vectors[draws.generator(seed, "recall").permutation(len(vectors))[:count]]


def _write_recall(
    folder: VersionFolder,
    part: LabelPartition,
    rows: Float32Array,
    search: Callable[[Float32Array, int], TopLabels],
    spec: RefreshSpec,
) -> None:
    """Share of the exact `hard` nearest rows that the index finds, on a seeded sample of queries."""
    sample = _sample(folder, spec.negatives.recall_queries, spec.seed)
    width = min(spec.negatives.hard, len(rows))
    if not width:
        return
    exact = exact_search(rows, sample, width)
    found = search(sample, width)
    hits = sum(len(np.intersect1d(a, b)) for a, b in zip(exact.ids, found.ids, strict=True))
    folder.write_found(
        part, "recall", np.array([hits, len(sample) * width]), np.empty(0, np.float32)
    )


def _read_recall(folder: VersionFolder, parts: list[LabelPartition]) -> float | None:
    counts = [
        folder.read_found(part, "recall")[0] for part in parts if folder.has_found(part, "recall")
    ]
    hits, total = np.sum(counts, axis=0) if counts else (0, 0)
    return float(hits / total) if total else None
