"""The computation of one refresh, as functions on a version's folder. The pool runs them in actors,
a laptop in a thread.

Each function may be killed and called again at any point: finished files are not made twice.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmcray import draws
from xmcray.data.batches import TrainingData
from xmcray.negatives.clusters import balanced_clusters
from xmcray.negatives.false_negatives import (
    Teacher,
    best_candidates,
    false_negatives,
    open_teacher,
)
from xmcray.negatives.hits import Hits, reach
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.version_folder import MergedBlock, VersionFolder
from xmcray.parallel.partition import LabelPartition
from xmcray.retrieval.exact import (
    empty_keys,
    exact_search,
    from_keys,
    row_slots,
    to_keys,
    with_new_keys,
)
from xmcray.retrieval.index import Index
from xmcray.retrieval.index_building import build_index
from xmcray.retrieval.index_spec import IndexSpec, device_bytes
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels, find_sorted, pairs_of, spans

logger = logging.getLogger(__name__)

_TUNING_QUERIES = 256  # an approximate index chooses its settings on these
_BLOCKS_AT_ONCE = 8  # blocks of queries of one search; more queries make larger products
_POLL_S = 0.05


class Refresher(Protocol):
    """Finishes versions. The trainer only starts them and looks for complete ones in the ledger."""

    def start(self, folder: Path) -> None:
        """Starts a version and returns at once; it may be called again for the same version."""

    def check(self) -> None:
        """Raises the error of a version that was started and failed."""

    def close(self) -> None:
        """Ends what `start` began."""


@dataclass(frozen=True, slots=True)
class RefreshSpec:
    """Settings of a refresh.

    Attributes:
        num_shards: index shards, one per classifier shard of the run at its largest; the number of
            workers that publish a version may be another one.
        negatives: section `negatives`.
        seed: of the training of indexes.
        threads: of each index.
        gpu: device number for the index, or None.
        shares_gpu: whether a trainer uses that device too. The index is then there only while it
            is searched, and on the CPU if the device lacks the room.
        matmul: as `optim.matmul`; an index actor computes its products as the trainer does.
    """

    num_shards: int
    negatives: NegativesConfig
    seed: int
    threads: int = 1
    gpu: int | None = None
    shares_gpu: bool = False
    matmul: Literal["float32", "bf16"] = "float32"

    def parts(self, num_labels: int) -> list[LabelPartition]:
        """Returns the labels of each index shard."""
        num_shards = self.num_shards
        return [LabelPartition(num_labels, num_shards, shard) for shard in range(num_shards)]


def search_shard(folder: VersionFolder, shard: int, num_labels: int, spec: RefreshSpec) -> None:
    """Builds the index of one shard and searches all query blocks of a version with it."""
    if not spec.negatives.hard:
        return
    part = spec.parts(num_labels)[shard]
    # An actor that was killed and restarted goes on where the files of the first one end.
    missing = [block for block in folder.query_blocks if not folder.has_hits(part, block)]
    if not missing:
        return
    rows = folder.read_rows(part.start, part.stop)
    gpu = _free_gpu(rows, spec)
    try:
        _search_missing(folder, part, rows, missing, spec, gpu)
        return
    except torch.OutOfMemoryError:
        if gpu is None or not spec.shares_gpu:
            raise
    # Here, and not in the handler: while the error lives, so do the tensors of the attempt.
    logger.warning(
        "an index of hard negatives is searched on the CPU: a trainer has taken the memory of device %d",
        gpu,
    )
    torch.cuda.empty_cache()
    _search_missing(folder, part, rows, missing, spec, None)


def _search_missing(
    folder: VersionFolder,
    part: LabelPartition,
    rows: Float32Array,
    missing: list[str],
    spec: RefreshSpec,
    gpu: int | None,
) -> None:
    """Builds an index, and searches the query blocks that have no hits yet.

    Args:
        folder: the version.
        part: labels of the shard.
        rows: float32 [S, D], their vectors.
        missing: names of these blocks.
        spec: settings.
        gpu: device of the index; None for the CPU.
    """
    tuning_queries = _sample(folder, _TUNING_QUERIES, spec.seed)
    index = build_index(
        rows,
        IndexSpec(factory=spec.negatives.index, seed=spec.seed),
        threads=spec.threads,
        gpu=gpu,
        queries=tuning_queries,
    )
    names = folder.query_blocks
    for span in spans(len(names), _BLOCKS_AT_ONCE):
        # The last bits of scores depend on which queries are searched together. So those of blocks
        # that are there already are searched with the others again.
        together = names[span]
        if not set(together).isdisjoint(missing):
            _search_blocks(folder, part, together, index, spec)
    # A version that was withdrawn meanwhile has no query blocks any more.
    if spec.negatives.recall_queries and folder.query_blocks:
        _measure_recall(folder, part, rows, index, spec)


def _search_blocks(
    folder: VersionFolder,
    part: LabelPartition,
    names: list[str],
    index: Index,
    spec: RefreshSpec,
) -> None:
    """Searches some query blocks together, and writes the hits that are not there yet."""
    blocks = [folder.read_queries(name) for name in names]
    vectors = np.concatenate([block.vectors for block in blocks])
    widths = [np.minimum(reach(block.extra, spec.negatives), part.size) for block in blocks]
    hits = Hits.search(index, vectors, np.concatenate(widths))
    start = 0
    for name, width_B in zip(names, widths, strict=True):
        stop = start + len(width_B)
        if not folder.has_hits(part, name):
            of_block = hits.slice(start, stop)
            rows = of_block.labels.values
            # The index counts rows of the shard; -1 for no answer stays -1.
            label_ids = np.where(rows >= 0, part.to_global(rows), -1)
            labels = Ragged(label_ids, of_block.labels.offsets)
            folder.write_hits(part, name, Hits(labels, of_block.scores))
        start = stop


def _free_gpu(rows: Float32Array, spec: RefreshSpec) -> int | None:
    """Returns the device on which rows are searched; None for the CPU."""
    if spec.gpu is None or not spec.shares_gpu:
        return spec.gpu
    missing = ""
    if spec.gpu >= torch.cuda.device_count():
        missing = f"a device {spec.gpu}"
    else:
        # Trainers have taken an epoch of steps, so their memory has reached its peak.
        free_bytes, _ = torch.cuda.mem_get_info(spec.gpu)
        num_bytes = device_bytes(spec.negatives.index, *rows.shape)
        if free_bytes < num_bytes:
            missing = (
                f"{num_bytes / 1e9:.1f} GB on device {spec.gpu}, {free_bytes / 1e9:.1f} GB are free"
            )
    if missing:
        logger.warning("an index of hard negatives is searched on the CPU: it lacks %s", missing)
        return None
    return spec.gpu


def merge_blocks(folder: VersionFolder, shard: int, data: TrainingData, spec: RefreshSpec) -> None:
    """Merges the hits of all shards for a share of the query blocks; each shard has one share.

    All shards have searched all query blocks before.
    """
    if not spec.negatives.hard:
        return
    # Another share may begin at any time, so no block depends on what is merged in others.
    share = folder.query_blocks[shard :: spec.num_shards]
    missing = [block for block in share if not folder.has_merged(spec.num_shards, block)]
    if not missing:
        return
    teacher = open_teacher(spec.negatives.teacher, data) if spec.negatives.teacher else None
    with ThreadPoolExecutor(spec.threads) as pool:
        merges = [
            pool.submit(_merge_block, folder, block, data, spec, teacher) for block in missing
        ]
        for merge in merges:
            merge.result()


def _merge_block(
    folder: VersionFolder,
    block: str,
    data: TrainingData,
    spec: RefreshSpec,
    teacher: Teacher | None,
) -> None:
    """Keeps the best labels that are allowed for each query of one block."""
    queries = folder.read_queries(block)
    hits = [folder.read_hits(part, block) for part in spec.parts(data.num_labels)]
    labels = np.empty((len(queries.ids), spec.negatives.hard), np.int32)
    left_out = np.empty(len(queries.ids), np.int64)
    reach_B = reach(queries.extra, spec.negatives)
    # Lists are as long as the reach of their query, so those of one reach make a table.
    for width in np.unique(reach_B):
        rows = np.flatnonzero(reach_B == width)
        tables = [of_shard.table(rows) for of_shard in hits]
        labels[rows], left_out[rows] = _merge_tables(
            tables, queries.ids[rows], int(width), data, spec, teacher
        )
    folder.write_merged(spec.num_shards, block, MergedBlock(queries.ids, labels, left_out))


def _merge_tables(
    tables: list[TopLabels],
    ids: Int64Array,
    width: int,
    data: TrainingData,
    spec: RefreshSpec,
    teacher: Teacher | None,
) -> tuple[npt.NDArray[np.int32], Int64Array]:
    """Merges what all shards found for some queries.

    Args:
        tables: hits of the queries by shard, not yet by score over all shards.
        ids: int64 [B], query ids.
        width: labels that were searched for each of them.
        data: of the run.
        spec: settings.
        teacher: finds false negatives, if there is one.
    Returns:
        int32 [B, h], hard negatives; int64 [B], candidates that were left out.
    """
    candidate_BC = np.concatenate([table.ids for table in tables], axis=1)
    score_BC = np.concatenate([table.scores for table in tables], axis=1)
    positives = data.positives(ids)
    excluded = data.excluded(ids)
    left_out = np.zeros(len(ids), np.int64)
    share = spec.negatives.max_relative_score
    if share:
        best = best_candidates(candidate_BC, score_BC, np.full(len(ids), width))
        is_false_BC = false_negatives(
            ids, best, positives, excluded, share, data.num_labels, teacher
        )
        candidate_BC = np.where(is_false_BC, -1, best.ids)
        score_BC = best.scores
        left_out = is_false_BC.sum(axis=1)
    labels = best_allowed(
        candidate_BC,
        score_BC,
        [positives, excluded],
        data.num_labels,
        spec.negatives.hard,
    )
    return labels, left_out


def complete_version(folder: VersionFolder, data: TrainingData, spec: RefreshSpec) -> None:
    """Joins the merged query blocks to a shortlist, clusters the queries, completes the version."""
    # Once another actor has completed the version, the inputs may be gone; a shortlist of nothing
    # would replace it.
    if folder.complete:
        return
    blocks = folder.query_blocks
    num_left_out = 0
    with folder.new_shortlist(data.num_query_ids, spec.negatives.hard) as labels:
        if spec.negatives.hard:
            for block in blocks:
                merged = folder.read_merged(spec.num_shards, block)
                labels[merged.ids] = merged.labels
                num_left_out += int(merged.left_out.sum())
        # A newer attempt may have withdrawn this one meanwhile, and half a shortlist must not get
        # its name.
        if not blocks or folder.query_blocks != blocks:
            raise FileNotFoundError(
                f"query blocks of {folder.path} vanished while they were joined"
            )
    if spec.negatives.cluster_size and not folder.has_clusters:
        cluster = _cluster_queries(folder, blocks, data.num_query_ids, spec)
        folder.write_clusters(cluster)
    recall = folder.read_recall(spec.parts(data.num_labels))
    about = {"recall": recall, "blocks": len(blocks)}
    if spec.negatives.max_relative_score:
        about["left_out"] = num_left_out
    folder.finish(about)


def _cluster_queries(
    folder: VersionFolder,
    blocks: list[str],
    num_query_ids: int,
    spec: RefreshSpec,
) -> npt.NDArray[np.int32]:
    """Returns int32 [num_query_ids], the cluster of each collected query, -1 for others.

    The clusters are as small as the first epoch of the version wants them.
    """
    # A query is collected once in an epoch, so its id is in one block only.
    ids_of_blocks = [folder.read_queries(block).ids for block in blocks]
    ids = np.sort(np.concatenate(ids_of_blocks))
    first_block = folder.read_queries(blocks[0])
    dim = first_block.vectors.shape[1]
    # Blocks are read a second time, one at a time, so that all vectors are in memory only once.
    vectors = np.empty((len(ids), dim), np.float32)
    for name in blocks:
        block = folder.read_queries(name)
        # In the order of ids, because which query is in which block depends on the number of ranks.
        rows = np.searchsorted(ids, block.ids)
        vectors[rows] = block.vectors
    epoch = spec.negatives.schedule_of.use_epoch(folder.version)
    num_clusters = spec.negatives.num_clusters_at(epoch, len(ids))
    cluster = np.full(num_query_ids, -1, np.int32)
    cluster[ids] = balanced_clusters(vectors, num_clusters, spec.seed)
    return cluster


def best_allowed(
    candidate_BC: Int64Array,
    score_BC: Float32Array,
    forbidden: list[Ragged],
    num_labels: int,
    width: int,
) -> npt.NDArray[np.int32]:
    """Returns the best candidates of each query that are not forbidden; ties by the lower label.

    Args:
        candidate_BC: int64 label ids, -1 for none.
        score_BC: float32.
        forbidden: labels of each query that are not allowed.
        num_labels: L.
        width: labels per query.
    Returns:
        int32 [B, width], padded with -1.
    """
    is_candidate = (candidate_BC >= 0) & np.isfinite(score_BC)
    score_BC = np.where(is_candidate, score_BC, np.float32(-np.inf))
    # So many that enough of them are allowed for every query; the others need no look-up.
    num_forbidden_B = np.sum([labels.lengths for labels in forbidden], axis=0)
    num_best = width + int(num_forbidden_B.max(initial=0))
    num_best = min(num_best, candidate_BC.shape[1])
    best = _best_candidates(torch.from_numpy(candidate_BC), torch.from_numpy(score_BC), num_best)
    forbidden_pairs = np.concatenate([labels.pairs(num_labels) for labels in forbidden])
    # As `np.isin`, at half of its time if most of both are in ascending order.
    _, is_in = find_sorted(np.sort(forbidden_pairs), pairs_of(best.ids, num_labels))
    is_forbidden = is_in & (best.ids >= 0)
    # A stable sort moves forbidden labels to the end, and leaves the order of the others.
    order = np.argsort(is_forbidden, axis=1, kind="stable")[:, :width]
    allowed_ids = np.where(is_forbidden, -1, best.ids)
    best_ids = np.take_along_axis(allowed_ids, order, 1)
    # There may be fewer candidates than `width`.
    padded = np.full((len(best_ids), width), -1, np.int32)
    padded[:, : best_ids.shape[1]] = best_ids
    return padded


def _best_candidates(candidate_BC: Tensor, score_BC: Tensor, width: int) -> TopLabels:
    """The best candidates, ties by the lower id; those with score -inf are none."""
    # A selection by score alone is fast, and leaves few candidates to be ordered by score and id.
    bar_B = score_BC.topk(width, dim=1).values[:, -1]
    is_best_BC = (score_BC >= bar_B[:, None]) & (score_BC > -torch.inf)
    row_P, column_P = is_best_BC.nonzero(as_tuple=True)
    key_P = to_keys(score_BC[row_P, column_P], candidate_BC[row_P, column_P])
    num_rows = len(candidate_BC)
    best_BK = empty_keys(num_rows, width)
    return from_keys(with_new_keys(best_BK, key_P, row_P, row_slots(row_P, num_rows)))


class ThreadRefresher:
    """Refreshes in a background thread of the trainer: for one process, notebooks and tests."""

    def __init__(self, data: TrainingData, spec: RefreshSpec) -> None:
        self.data = data
        self.spec = spec
        self._threads: dict[Path, threading.Thread] = {}
        self._errors: list[BaseException] = []
        self._closing = threading.Event()

    def start(self, folder: Path) -> None:
        """Starts a thread for a version unless one is running."""
        self.check()
        # A long run starts thousands of versions. One that has ended may be started again.
        running = {path: thread for path, thread in self._threads.items() if thread.is_alive()}
        self._threads = running
        if folder not in self._threads:
            version = VersionFolder(folder)
            # A daemon thread does not keep an interrupted process alive.
            thread = threading.Thread(target=self._run, args=(version,), daemon=True)
            self._threads[folder] = thread
            thread.start()

    def check(self) -> None:
        """Raises the first error of a thread."""
        if self._errors:
            raise self._errors[0]

    def close(self) -> None:
        """Waits for the threads, but not for versions that the trainer has not published."""
        self._closing.set()
        for thread in self._threads.values():
            thread.join()

    def _run(self, folder: VersionFolder) -> None:
        try:
            wait_published(folder, self._closing)
            if folder.published:
                run_version(folder, self.data, self.spec)
        except BaseException as error:
            # Files of a withdrawn or finished version vanish under its thread, which is no error.
            if not (folder.withdrawn or folder.complete):
                self._errors.append(error)


def run_version(folder: VersionFolder, data: TrainingData, spec: RefreshSpec) -> None:
    """Runs a whole refresh in this process."""
    if folder.complete:
        return
    for shard in range(spec.num_shards):
        search_shard(folder, shard, data.num_labels, spec)
    for shard in range(spec.num_shards):
        merge_blocks(folder, shard, data, spec)
    complete_version(folder, data, spec)


def wait_published(folder: VersionFolder, closing: threading.Event | None = None) -> None:
    """Waits until all ranks have written their part, or the version is withdrawn or complete.

    Args:
        closing: set when the trainer has ended, which will then write nothing more.
    """
    while not (folder.withdrawn or folder.complete or folder.published):
        if closing is not None and closing.is_set():
            return
        time.sleep(_POLL_S)


def _sample(folder: VersionFolder, count: int, seed: int) -> Float32Array:
    """Draws up to `count` query vectors of a version from its first block."""
    vectors = folder.read_queries(folder.query_blocks[0]).vectors
    # Seeded, so that a search that starts again measures and tunes on the same queries.
    order = draws.generator(seed, "recall").permutation(len(vectors))
    return vectors[order[:count]]


def _measure_recall(
    folder: VersionFolder,
    part: LabelPartition,
    rows: Float32Array,
    index: Index,
    spec: RefreshSpec,
) -> None:
    """Counts how many of the exact nearest rows of some queries the index finds."""
    sample = _sample(folder, spec.negatives.recall_queries, spec.seed)
    width = min(spec.negatives.hard, len(rows))
    if not width:
        return
    exact = exact_search(rows, sample, width).ids
    answered = index.search(sample, width).ids
    # The order within a list does not matter, because all of it is used as negatives.
    num_hits = 0
    for exact_ids, answered_ids in zip(exact, answered, strict=True):
        num_hits += len(np.intersect1d(exact_ids, answered_ids))
    folder.write_recall(part, num_hits, len(sample) * width)
