"""A memory of training queries, whose vectors are keys that vote for labels, with any encoder.

How keys vote is in votes.py. All settings can be changed with every request. The queries that vote
for a label are known, so an answer can name them. In a bundle:

    memory/vectors, memory/index     as in shards.py, one row per training query with a label that
                                     is not removed
    memory/labels.npy                int32, their positives (source ids), one query after another
    memory/label_offsets.npy         int64 [N + 1], where each query's positives begin
    memory/label_weights.npy         float32, their relevance / mean relevance; only if it counts
    memory/queries.parquet           uid and text
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xmcray import config as configs
from xmcray.data.checked_files import check_offsets, read_array
from xmcray.data.corpus import Corpus, Split
from xmcray.data.relevance import Relevance
from xmcray.errors import BundleError, DataError
from xmcray.retrieval.bundle import Settings
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.readable import readable
from xmcray.retrieval.shards import (
    ALL_SHARDS,
    SearchScope,
    ShardBuild,
    ShardedIndex,
    ShardSubset,
    VectorShard,
    checked_shards,
    write_shards,
)
from xmcray.retrieval.votes import MemoryConfig
from xmcray.types import (
    Float32Array,
    Int64Array,
    Ragged,
    TopLabels,
    WeightedRagged,
    are_ids,
    offsets_of,
    spans,
    weights_of,
)

_WEIGHTS = "label_weights.npy"
ROWS = 8192  # training queries that are encoded, written and read at once
_QUERY_SCHEMA = pa.schema([("uid", pa.large_string()), ("text", pa.large_string())])


@dataclass(frozen=True, eq=False)
class RememberedQueries:
    """The training queries of a memory without their vectors.

    Attributes:
        positives: source label ids of each row.
        file: Parquet file of uids and texts, if there is one.
        hidden: rows that do not vote, or None if all do.
    """

    positives: Ragged
    file: Path | None = None
    hidden: Int64Array | None = None

    @classmethod
    def load(cls, bundle: Path, num_queries: int, num_labels: int) -> RememberedQueries:
        """Opens the training queries of a verified bundle; positives stay on disk.

        Args:
            bundle: local folder of the bundle.
            num_queries: training queries.
            num_labels: labels of the bundle.
        Raises:
            BundleError: a file is malformed, or does not fit the settings.
        """
        folder = bundle / "memory"
        with readable(f"{bundle}: its memory cannot be read", "make it again"):
            labels = read_array(folder / "labels.npy", np.int32, mapped=True)
            offsets = read_array(folder / "label_offsets.npy", np.int64, mapped=True)
            check_offsets(offsets, num_queries, len(labels))
            # Every label id is one of the bundle's.
            fits = are_ids(labels, num_labels)
            weights = None
            if (folder / _WEIGHTS).is_file():
                weights = read_array(folder / _WEIGHTS, np.float32, mapped=True)
                can_weigh = bool(np.isfinite(weights).all() and weights.min(initial=0) >= 0)
                fits &= len(weights) == len(labels) and can_weigh
        if not fits:
            raise BundleError(
                f"{bundle}: the files of its memory do not fit settings.json; make it again"
            )
        # Plain arrays over the same memory: each look-up in a memory map costs microseconds more.
        positives = Ragged(np.asarray(labels), np.asarray(offsets))
        if weights is not None:
            positives = WeightedRagged(positives.values, positives.offsets, np.asarray(weights))
        return cls(positives, folder / "queries.parquet")

    def graded(self, row: int) -> Iterator[tuple[int, float]]:
        """The positives of a row, and how much each counts."""
        positives = self.positives.take(np.array([row]))
        weights = weights_of(positives)
        if weights is None:
            weights = np.ones(len(positives.values), np.float32)
        return zip(positives.values.tolist(), weights.tolist(), strict=True)

    def names(self, rows: Iterable[int]) -> dict[int, tuple[str, str]]:
        """Uid and text of some rows; reads only the blocks of the file that hold them.

        Raises:
            BundleError: the file is malformed.
        """
        assert self.file is not None, "only the memory of a bundle has texts"
        wanted = np.unique(np.fromiter(rows, np.int64))
        queries: dict[int, tuple[str, str]] = {}
        with (
            readable(f"{self.file} cannot be read", "make it again"),
            pq.ParquetFile(self.file) as file,
        ):
            for block in np.unique(wanted // ROWS).tolist():
                inside = wanted[wanted // ROWS == block]
                table = file.read_row_group(block).take(inside - block * ROWS)
                names = zip(table["uid"].to_pylist(), table["text"].to_pylist(), strict=True)
                queries.update(zip(inside.tolist(), names, strict=True))
        return queries


@dataclass(frozen=True, eq=False)
class Memory:
    """Training queries that can be searched.

    Attributes:
        config: how they vote if a request does not say otherwise.
        rows: their vectors.
        queries: their positives and names.
    """

    config: MemoryConfig
    rows: ShardedIndex
    queries: RememberedQueries

    @classmethod
    def load(
        cls,
        bundle: Path,
        settings: Settings,
        threads: int,
        subset: ShardSubset = ALL_SHARDS,
        queries: RememberedQueries | None = None,
    ) -> Memory:
        """Opens the memory of a verified bundle; vectors and positives stay on disk.

        Args:
            bundle: local folder of the bundle.
            settings: its settings.
            threads: threads of a search.
            subset: the shards that are going to be searched; the indexes of others are not read.
            queries: the training queries, if the folder holds only their vectors.
        Raises:
            BundleError: a file is malformed, or does not fit the settings.
        """
        predictor = settings.predictor
        folder = bundle / "memory"
        with readable(f"{bundle}: its memory cannot be read", "make it again"):
            # A fused bundle has settings of its own for the votes (parts.py).
            config = configs.build(MemoryConfig, predictor.get("config", {}), "memory.")
            num_queries = int(predictor["num_queries"])
            sections = [configs.build(VectorShard, values) for values in predictor["shards"]]
            shards = checked_shards(tuple(sections), num_queries)
        if queries is None:
            queries = RememberedQueries.load(bundle, num_queries, settings.num_labels)
        if not shards or len(queries.positives) != num_queries:
            raise BundleError(
                f"{bundle}: the files of its memory do not fit settings.json; make it again"
            )
        rows = ShardedIndex.load(folder, shards, settings.dim, threads, subset)
        return cls(config, rows, queries)

    @property
    def positives(self) -> Ragged:
        """Source label ids of each row."""
        return self.queries.positives

    def search(self, query_BD: Float32Array, config: MemoryConfig, scope: SearchScope) -> TopLabels:
        """The training queries that may vote; the ids of the result are rows of the memory."""
        width = min(config.keys, len(self.positives)) if config.weight > 0 else 0
        numbers = scope.subset.of(range(len(self.rows.shards)))
        names = None
        if self.queries.hidden is not None:
            names = np.arange(len(self.positives))
            names[self.queries.hidden] = -1
        return self.rows.search(query_BD, width, numbers=numbers, names=names, exact=scope.exact)


def memory_writer(
    corpus: Corpus,
    encode: Callable[[Ragged], Float32Array],
    config: MemoryConfig,
    spec: IndexSpec,
    threads: int = 1,
    relevance: Relevance | None = None,
) -> Callable[[Path], Mapping[str, Any]]:
    """Prepares a memory of the training queries: the argument `predictor` of `write_bundle`.

    Queries without a positive are left out: they could only take places from keys that vote. At
    most one shard of vectors is in memory.

    Args:
        corpus: its training queries are remembered.
        encode: token ids -> float32 [n, D] of length 1, by the encoder that will encode queries.
        config: how they vote if a request does not say otherwise.
        spec: how the vectors are indexed.
        threads: threads that build the index.
        relevance: of the positives, if votes are multiplied by it.
    Returns:
        A function that writes the memory into a bundle's folder and returns `Settings.predictor`.
    Raises:
        DataError: no query has a positive.
    """
    split = corpus.split("train")
    rows = remembered_rows(corpus)

    def write(bundle: Path) -> Mapping[str, Any]:
        folder = bundle / "memory"
        vectors = (encode(split.tokens(rows[span])) for span in spans(len(rows), ROWS))
        build = ShardBuild(spec=spec, threads=threads)
        shards, _ = write_shards(folder, vectors, len(rows), build)
        write_queries(folder, split, rows, relevance)
        return {
            "kind": "memory",
            "config": configs.dump(config),
            "num_queries": len(rows),
            "shards": [dataclasses.asdict(shard) for shard in shards],
        }

    return write


def remembered_rows(corpus: Corpus) -> Int64Array:
    """The rows of the training split that a memory holds: those with a label that is not removed.

    Raises:
        DataError: no query has one.
    """
    split = corpus.split("train")
    rows = np.flatnonzero(split.num_positives())
    if len(corpus.removed_labels):
        is_kept = np.zeros(len(rows), bool)
        for span in spans(len(rows), ROWS):
            positives = split.positives(rows[span])
            is_kept[span] = corpus.answerable(positives).lengths > 0
        rows = rows[is_kept]
    if not len(rows):
        raise DataError(
            f"no query of split {split.name} has a positive, expected some to remember;"
            " name another corpus"
        )
    return rows


def rows_of_memory(queries: RememberedQueries, corpus: Corpus) -> Int64Array:
    """The rows of the training split that a memory was made of, in its order.

    Raises:
        DataError: it was made of another corpus.
    """
    rows = remembered_rows(corpus)
    if len(rows) != len(queries.positives):
        # Earlier releases also remembered queries all of whose labels were removed.
        rows = np.flatnonzero(corpus.split("train").num_positives())
    if len(rows) != len(queries.positives):
        raise DataError(
            f"the memory holds {len(queries.positives):,} queries, the corpus {len(rows):,};"
            " make the bundle of this corpus anew"
        )
    return rows


def write_queries(
    folder: Path, split: Split, rows: Int64Array, relevance: Relevance | None = None
) -> None:
    """Writes the positives and names of training queries into a bundle's memory/."""
    if relevance is not None:
        weights = relevance.weights(relevance.positions(rows).values)
        np.save(folder / _WEIGHTS, weights.astype(np.float32))
    offsets = offsets_of(split.num_positives()[rows])
    np.save(folder / "label_offsets.npy", offsets)
    num_positives = int(offsets[-1])
    labels_file = folder / "labels.npy"
    labels = np.lib.format.open_memmap(labels_file, "w+", np.int32, (num_positives,))
    queries_file = folder / "queries.parquet"
    with pq.ParquetWriter(queries_file, _QUERY_SCHEMA, compression="zstd") as writer:
        for span in spans(len(rows), ROWS):
            block = rows[span]
            first = offsets[span.start]
            last = offsets[span.stop]
            labels[first:last] = split.positives(block).values
            columns = {"uid": split.uids(block), "text": split.texts(block)}
            writer.write_table(pa.table(columns, schema=_QUERY_SCHEMA), row_group_size=ROWS)
    labels.flush()
