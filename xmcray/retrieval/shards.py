"""Vectors in files of a bounded number of rows, each with its index; searched as if they were one.

vectors/00000.safetensors   float32 "vectors", consecutive rows; the range is in the metadata
index/00000.faiss           the FAISS index over the same rows; absent if all rows are searched
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from xmcray.errors import BundleError, ConfigError, one_line
from xmcray.retrieval.answerable import AnswerableRows
from xmcray.retrieval.exact import as_tensor, empty_keys, from_keys, to_keys
from xmcray.retrieval.few_queries import MOST_QUERIES
from xmcray.retrieval.index import Index
from xmcray.retrieval.index_building import build_index
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.index_tuning import CODE_LOSS
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

logger = logging.getLogger(__name__)

SHARD_ROWS = 1_000_000
BUILD_FLOATS = 1 << 30  # vectors whose indexes are built at the same time


@dataclass(frozen=True, slots=True)
class VectorShard:
    """One file of vectors.

    Attributes:
        start: first row.
        stop: one past the last row.
        indexed: whether index/ holds a FAISS index over the rows.
        candidates: candidates per answer that this index proposes.
    """

    start: int
    stop: int
    indexed: bool
    candidates: int

    def __len__(self) -> int:
        """Number of rows."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardBuild:
    """How vectors are divided into shards and indexed.

    Attributes:
        spec: how each shard is indexed.
        queries: float32 [Q, D], a sample of query vectors by which an index is tuned; noisy rows
            if not given.
        shard_rows: rows per file.
        threads: threads that build the indexes.
    """

    spec: IndexSpec
    queries: Float32Array | None = None
    shard_rows: int = SHARD_ROWS
    threads: int = 1


@dataclass(frozen=True, slots=True)
class ShardSubset:
    """Every `count`-th shard: one of `count` disjoint parts that together are all shards.

    Attributes:
        index: number of this subset, 0 .. count - 1.
        count: number of subsets.
    """

    index: int
    count: int

    def of(self, numbers: Iterable[int]) -> list[int]:
        """Those of some shard numbers that are in the subset."""
        return [number for number in numbers if number % self.count == self.index]


ALL_SHARDS = ShardSubset(index=0, count=1)
NO_SHARDS = ShardSubset(index=-1, count=1)  # no number has the remainder -1


@dataclass(frozen=True, slots=True)
class SearchScope:
    """What a search looks at.

    Attributes:
        exclude: B lists of source label ids that are masked before the k best are taken.
        exact: compare all rows, whatever the index.
        subset: the shards to search.
    """

    exclude: Ragged | None = None
    exact: bool = False
    subset: ShardSubset = ALL_SHARDS

    @property
    def excludes(self) -> bool:
        """Whether any label is masked."""
        return self.exclude is not None and len(self.exclude.values) > 0

    @property
    def without_exclude(self) -> SearchScope:
        """The same with no label masked."""
        return dataclasses.replace(self, exclude=None)


EVERYTHING = SearchScope()


@dataclass(frozen=True, eq=False)
class ShardedIndex:
    """All shards of one set of vectors, each with its index.

    Attributes:
        shards: the rows of each shard, without gaps.
        indexes: one per shard.
        changed: numbers of the shards whose vectors are not those of the bundle's files.
    """

    shards: tuple[VectorShard, ...]
    indexes: tuple[Index, ...]
    changed: frozenset[int] = frozenset()

    @classmethod
    def load(
        cls,
        folder: Path,
        shards: Sequence[VectorShard],
        dim: int,
        threads: int,
        subset: ShardSubset = ALL_SHARDS,
    ) -> ShardedIndex:
        """Opens the shards of a verified bundle over memory-mapped vectors.

        Args:
            folder: holds vectors/ and index/.
            shards: the shards by settings.json.
            dim: D.
            threads: threads of a search.
            subset: the shards that are going to be searched; the indexes of others are not read.
        Raises:
            BundleError: a file is malformed, or does not fit the settings.
        """
        searched = set(subset.of(range(len(shards))))
        indexes = []
        for number, shard in enumerate(shards):
            vectors = _read_vectors(folder / vectors_name(number), len(shard), dim)
            if shard.indexed and number in searched:
                path = folder / _index_name(number)
                indexes.append(Index.load(path, vectors, shard.candidates, threads))
            else:
                indexes.append(Index(vectors, None, threads=threads))
        return cls(tuple(shards), tuple(indexes))

    @property
    def is_exact(self) -> bool:
        """Whether every query is compared with every row."""
        return all(index.is_exact for index in self.indexes)

    def search(
        self,
        query_BD: Float32Array,
        k: int,
        *,
        numbers: Sequence[int] | None = None,
        names: Int64Array | None = None,
        hidden: Ragged | None = None,
        exact: bool = False,
    ) -> TopLabels:
        """The k best rows, best first, equal scores by lower id.

        Args:
            query_BD: float32 [B, D].
            k: answers per query; 0 is legal.
            numbers: numbers of the shards to search; all if not given.
            names: int64 [rows], ids of the rows in the answer, -1 for those that are no answers;
                row numbers if not given.
            hidden: B lists of row numbers that are masked before the k best are taken.
            exact: compare all rows, whatever the index.
        Returns:
            Ids and inner products; -1 and -inf where no row is left.
        """
        num_queries = len(query_BD)
        if not k:
            return TopLabels.empty(num_queries)
        ids = self._row_numbers if names is None else names
        searched = range(len(self.shards)) if numbers is None else numbers
        if len(searched) == len(self.indexes) == 1:
            return self.indexes[0].search(query_BD, k, ids, hidden, exact)
        rows = AnswerableRows.of(len(ids), num_queries, ids, hidden)

        def shard_keys(number: int) -> Tensor:
            shard = self.shards[number]
            index = self.indexes[number]
            shard_rows = rows.between(shard.start, shard.stop)
            return index.search_keys(query_BD, min(k, len(index)), shard_rows, exact)

        threads = min(torch.get_num_threads(), len(searched))
        # Shards have no ids in common, so the k best keys of all of them are the answer.
        if threads > 1 and num_queries <= MOST_QUERIES:
            # One thread searches a shard for few queries, so shards are searched in parallel.
            keys = list(_pool(threads).map(shard_keys, searched))
        else:
            keys = [shard_keys(number) for number in searched]
        num_rows = sum(len(self.indexes[number]) for number in searched)
        if num_rows < k:
            # Empty keys fill the places of missing rows.
            keys.append(empty_keys(num_queries, k))
        return _best(keys, k)

    @functools.cached_property
    def _row_numbers(self) -> Int64Array:
        return np.arange(self.shards[-1].stop)

    def vectors(self, number: int) -> Float32Array:
        """float32 [rows, D] of one shard."""
        vectors: Float32Array = self.indexes[number].vectors.cpu().numpy()
        return vectors

    def with_vectors(
        self, shards: Sequence[VectorShard], vectors: Mapping[int, Float32Array]
    ) -> ShardedIndex:
        """A view with other vectors in some shards, which are then searched exhaustively.

        Args:
            shards: all shards of the view.
            vectors: float32 [rows of the shard, D] of the new or changed shards, by number.
        """
        first = self.indexes[0]
        indexes = []
        for number in range(len(shards)):
            if number in vectors:
                rows = torch.from_numpy(vectors[number]).to(first.vectors.device)
                indexes.append(Index(rows, None, threads=first.threads))
            else:
                indexes.append(self.indexes[number])
        return ShardedIndex(tuple(shards), tuple(indexes), self.changed | vectors.keys())

    def move_to(self, device: torch.device) -> None:
        """Moves the vectors to the device on which exhaustive searches run."""
        for index in self.indexes:
            index.move_to(device)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    # Not the threads of few_queries.py, for which these threads wait.
    return ThreadPoolExecutor(threads, thread_name_prefix="xmcray-shards")


def merge(parts: Sequence[TopLabels]) -> TopLabels:
    """The best of several answers to the same queries; equal scores by lower id.

    The result is as wide as the first part.
    """
    keys = [
        to_keys(as_tensor(part.scores), as_tensor(np.maximum(part.ids, 0), np.int64))
        for part in parts
    ]
    return _best(keys, parts[0].width)


def write_shards(
    folder: Path,
    blocks: Iterable[Float32Array],
    num_rows: int,
    build: ShardBuild,
) -> tuple[tuple[VectorShard, ...], int]:
    """Writes vectors/ and index/; some indexes are built at the same time, in bounded memory.

    Args:
        folder: where vectors/ and index/ are made.
        blocks: float32 [n, D] each, the rows in order.
        num_rows: how many rows that is; a guess is enough.
        build: how the rows are divided and indexed.
    Returns:
        The shards, and D.
    """
    (folder / "vectors").mkdir(parents=True)
    (folder / "index").mkdir()
    groups = _regrouped(blocks, build.shard_rows)
    first_group = next(groups, np.empty((0, 1), np.float32))
    dim = first_group.shape[1]
    at_once = min(
        math.ceil(num_rows / build.shard_rows),
        max(1, BUILD_FLOATS // (build.shard_rows * dim)),
        build.threads,
    )
    index_threads = build.threads // at_once
    futures: list[Future[VectorShard]] = []
    start = 0
    with _build_pool(at_once, index_threads) as pool:
        for number, rows in enumerate(itertools.chain([first_group], groups)):
            save_vectors(folder, number, rows, start)
            shard = VectorShard(start, start + len(rows), indexed=False, candidates=1)
            if number >= at_once:
                # Vectors are not made faster than they are indexed.
                futures[number - at_once].result()
            future = pool.submit(_write_index, folder, number, shard, dim, build, index_threads)
            futures.append(future)
            start = shard.stop
        shards = tuple(future.result() for future in futures)
    if not any(shard.indexed for shard in shards):
        (folder / "index").rmdir()
    return shards, dim


@contextlib.contextmanager
def _build_pool(at_once: int, index_threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that build an index each, with a few threads of torch of their own.

    A thread on each shard takes less time than all threads on one shard after another.
    """
    threads_before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(
            at_once,
            thread_name_prefix="xmcray-build",
            initializer=torch.set_num_threads,
            initargs=(index_threads,),
        ) as pool:
            yield pool
    finally:
        # The number of one thread becomes the default of threads that start later.
        torch.set_num_threads(threads_before)


def _warn_of_recall(index: Index, spec: IndexSpec) -> None:
    """Says that an index misses the wanted recall, unless its breadth was given."""
    least = spec.recall - CODE_LOSS if index.num_lists else spec.recall
    if index.recall < least and not (spec.nprobe or spec.ef_search or spec.candidates):
        logger.warning(
            "the index %s finds %.3f of the nearest labels, index.recall=%g wanted more;"
            " index.factory=Flat finds all",
            spec.factory,
            index.recall,
            spec.recall,
        )


def _write_index(
    folder: Path, number: int, shard: VectorShard, dim: int, build: ShardBuild, threads: int
) -> VectorShard:
    """Builds the index of a shard whose vectors are written; returns the shard with its index.

    The last of several shards gets no index if it has too few rows for one.
    """
    rows = _read_vectors(folder / vectors_name(number), len(shard), dim).numpy()
    is_short = number > 0 and len(shard) < build.shard_rows
    try:
        index = build_index(rows, build.spec, threads=threads, queries=build.queries)
    except ConfigError as error:
        # A factory string that fits no shard is refused by the first one.
        if not is_short:
            raise
        logger.warning("the last %d vectors are searched without an index: %s", len(shard), error)
        return shard
    if index.is_exact:
        return shard
    _warn_of_recall(index, build.spec)
    index.save(folder / _index_name(number))
    return dataclasses.replace(shard, indexed=True, candidates=index.candidates)


def save_vectors(folder: Path, number: int, rows: Float32Array, start: int) -> None:
    """Writes the vectors of one shard, whose rows begin at `start`."""
    # One entry of metadata: safetensors writes several in an order that changes from file to file.
    metadata = {"rows": f"{start}:{start + len(rows)}"}
    save_file({"vectors": rows}, folder / vectors_name(number), metadata=metadata)


def checked_shards(shards: tuple[VectorShard, ...], rows: int) -> tuple[VectorShard, ...]:
    """The same shards; none if they do not cover `rows` rows (at least 1) without gaps."""
    starts = [shard.start for shard in shards]
    stops = [shard.stop for shard in shards]
    is_complete = [*starts, rows] == [0, *stops] and rows > 0
    # An index must propose at least as many candidates as there are answers.
    is_ordered = all(len(shard) > 0 and shard.candidates > 0 for shard in shards)
    return shards if is_complete and is_ordered else ()


def vectors_name(number: int) -> str:
    """The file of the vectors of one shard."""
    return f"vectors/{number:05d}.safetensors"


def _index_name(number: int) -> str:
    return f"index/{number:05d}.faiss"


def _best(keys: Sequence[Tensor], k: int) -> TopLabels:
    all_keys = torch.cat(list(keys), dim=1)
    return from_keys(all_keys.topk(k, dim=1).values)


def _regrouped(blocks: Iterable[Float32Array], shard_rows: int) -> Iterator[Float32Array]:
    """The rows of `blocks` in groups of `shard_rows`; the last group may be shorter."""
    pending: list[Float32Array] = []
    num_pending = 0
    for block in blocks:
        rows = np.asarray(block, np.float32)
        while num_pending + len(rows) >= shard_rows:
            room = shard_rows - num_pending
            yield np.concatenate([*pending, rows[:room]])
            rows = rows[room:]
            pending = []
            num_pending = 0
        if len(rows):
            pending.append(rows)
            num_pending += len(rows)
    if pending:
        yield np.concatenate(pending)


@contextlib.contextmanager
def open_vectors(path: Path, framework: str) -> Iterator[Any]:
    """A file of vectors; its tensors are those of a framework by safetensors' name, "pt" or "np".

    Raises:
        BundleError: it cannot be read.
    """
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (OSError, ValueError, SafetensorError) as error:
        reason = one_line(error, 120)
        raise BundleError(f"{path} cannot be read ({reason}); export it again") from None


def _read_vectors(path: Path, rows: int, dim: int) -> Tensor:
    """Maps a file of vectors: tensors of safetensors' torch reader are read from disk on use."""
    with open_vectors(path, "pt") as file:
        vectors: Tensor = file.get_tensor("vectors")
    if tuple(vectors.shape) != (rows, dim) or str(vectors.dtype) != "torch.float32":
        raise BundleError(
            f"{path} holds {vectors.dtype} {tuple(vectors.shape)}, expected float32 {(rows, dim)}"
        )
    return vectors
