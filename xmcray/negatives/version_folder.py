"""The folder of one attempt at one version of the hard negatives; ledger.py keeps all of them.

queries/00000340-0001.safetensors       ids and vectors that rank 1 collected up to step 340
rows/0000065536.safetensors             label vectors from label 65536 on
published-0001.json                     rank 1 has written all that it has to write
found/0000000000-0000065536/...         best labels among labels 0 .. 65535, by query block
found/merged-0002/...                   best labels of both shards, by query block
clusters.npy                            cluster of each query, if batches are made of clusters
shortlist.npy, complete.json            the finished version
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from xmcray.errors import ShortlistError, readable
from xmcray.negatives.hits import Hits
from xmcray.parallel.partition import LabelPartition
from xmcray.storage.manifest import hash_file
from xmcray.storage.whole_files import read_json, whole_file, write_json
from xmcray.types import Float32Array, Int64Array, Shortlist

ROW_BLOCK_BYTES = 64 << 20
_CLUSTERS = "clusters.npy"
_SHORTLIST = "shortlist.npy"
_COMPLETE = "complete.json"
_PUBLISHED = "published-*.json"
_FOUND = "found"

ShortlistFile = np.memmap[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class MergedBlock:
    """Hard negatives of the queries of one block. Its fields are stored under their names.

    Attributes:
        ids: int64 [B], query ids.
        labels: int32 [B, h], internal label ids, padded with -1.
        left_out: int64 [B], candidates that were left out as probable right answers.
    """

    ids: Int64Array
    labels: npt.NDArray[np.int32]
    left_out: Int64Array

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the fields by name."""
        return {"ids": self.ids, "labels": self.labels, "left_out": self.left_out}


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Query vectors that one rank has collected. Its fields are stored under their names.

    Attributes:
        ids: int64 [B], query ids.
        vectors: float32 [B, D].
        extra: int64 [B], number of labels that may not be negatives of the query; so many more
            labels are searched.
    """

    ids: Int64Array
    vectors: Float32Array
    extra: Int64Array

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> QueryBlock:
        """Makes a block of what `arrays` returned.

        Raises:
            ValueError: the arrays are not those of a block.
        """
        types = {name: str(array.dtype) for name, array in arrays.items()}
        if types != {"ids": "int64", "vectors": "float32", "extra": "int64"}:
            raise ValueError(f"found {types}, expected ids, vectors and extra of a query block")
        block = cls(**arrays)
        has_axes = (block.ids.ndim, block.vectors.ndim, block.extra.ndim) == (1, 2, 1)
        if not has_axes or not len(block.ids) == len(block.vectors) == len(block.extra):
            raise ValueError("ids, vectors and extra have different lengths")
        return block

    @classmethod
    def concatenate(cls, blocks: Sequence[QueryBlock]) -> QueryBlock:
        """Joins blocks, of which there is at least one."""
        ids = np.concatenate([block.ids for block in blocks])
        vectors = np.concatenate([block.vectors for block in blocks])
        extra = np.concatenate([block.extra for block in blocks])
        return cls(ids, vectors, extra)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the fields by name."""
        return {"ids": self.ids, "vectors": self.vectors, "extra": self.extra}


class VersionFolder:
    """One attempt at one version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        version, attempt = path.name.removeprefix("v").split("-")
        self.version = int(version)
        self.attempt = int(attempt)

    def write_queries(self, step: int, rank: int, block: QueryBlock) -> Path:
        """Adds a block of query vectors.

        Args:
            step: last step whose queries are in the block.
            rank: the rank that has collected them.
            block: ids and vectors.
        """
        path = self.path / "queries" / f"{step:08d}-{rank:04d}.safetensors"
        _save(path, block.arrays())
        return path

    def write_rows(self, start: int, rows: Float32Array) -> list[Path]:
        """Adds label vectors, in files of at most 64 MB.

        Args:
            start: label of the first row.
            rows: float32 [S, D].
        """
        row_bytes = 4 * max(1, rows.shape[1])
        rows_per_file = max(1, ROW_BLOCK_BYTES // row_bytes)
        paths = []
        for low in range(0, len(rows), rows_per_file):
            # Named by the first label, so readers find rows whatever the number of ranks.
            path = self.path / "rows" / f"{start + low:010d}.safetensors"
            block = rows[low : low + rows_per_file]
            _save(path, {"rows": block})
            paths.append(path)
        return paths

    def publish(self, rank: int, num_ranks: int, snapshot_step: int) -> Path:
        """Marks that a rank has written everything. All ranks have to, before the index is built."""
        path = self.path / f"published-{rank:04d}.json"
        write_json(path, {"num_ranks": num_ranks, "snapshot_step": snapshot_step})
        return path

    @property
    def published(self) -> bool:
        """Whether every rank has published.

        Raises:
            ShortlistError: a rank's mark is malformed.
        """
        marks = sorted(self.path.glob(_PUBLISHED))
        if not marks:
            return False
        # Every mark says how many there have to be.
        num_ranks = _read_number(marks[0], "num_ranks")
        return len(marks) == num_ranks

    @property
    def complete(self) -> bool:
        """Whether the shortlist is finished."""
        return (self.path / _COMPLETE).is_file()

    @property
    def withdrawn(self) -> bool:
        """Whether a newer attempt has replaced this one."""
        return not self.path.is_dir()

    @property
    def query_blocks(self) -> list[str]:
        """Names of the query blocks, in order."""
        # The names begin with the step, so the order is that of time.
        paths = (self.path / "queries").glob("*.safetensors")
        return sorted(path.stem for path in paths)

    def read_queries(self, block: str) -> QueryBlock:
        """Reads one query block."""
        path = self.path / "queries" / f"{block}.safetensors"
        return QueryBlock(**load_file(path))

    def read_rows(self, start: int, stop: int) -> Float32Array:
        """Reads the vectors of labels start .. stop - 1, float32 [stop - start, D]."""
        parts = []
        # The names are padded with zeros, so the order of names is that of labels.
        for path in sorted((self.path / "rows").glob("*.safetensors")):
            first = int(path.stem)
            with safe_open(path, framework="numpy") as file:
                rows = file.get_slice("rows")
                # The part of the file that lies within start .. stop - 1, counted from its start.
                low = max(start - first, 0)
                high = min(stop - first, rows.get_shape()[0])
                if low < high:
                    parts.append(rows[low:high])
        # A rank without labels publishes no rows, and their width is not known here.
        if not parts:
            return np.empty((0, 1), np.float32)
        return np.concatenate(parts)

    def write_hits(self, part: LabelPartition, block: str, hits: Hits) -> None:
        """Keeps the best labels of one index shard for one query block.

        Args:
            part: labels of the shard. They name the file, and not the shard's number, so that a
                pool of another size does not take it for its own.
            block: name of the query block.
            hits: internal label ids.
        """
        _save(self._hits_path(part, block), hits.arrays())

    def has_hits(self, part: LabelPartition, block: str) -> bool:
        """Returns whether the best labels of a shard for a query block are there."""
        return self._hits_path(part, block).is_file()

    def read_hits(self, part: LabelPartition, block: str) -> Hits:
        """Reads what `write_hits` has written."""
        path = self._hits_path(part, block)
        return Hits.from_arrays(load_file(path))

    def write_merged(self, num_shards: int, block: str, merged: MergedBlock) -> None:
        """Keeps the hard negatives of one query block.

        Args:
            num_shards: index shards whose hits were merged. They name the file, because an
                approximate index of other shards finds other labels.
            block: name of the query block.
            merged: internal label ids.
        """
        _save(self._merged_path(num_shards, block), merged.arrays())

    def has_merged(self, num_shards: int, block: str) -> bool:
        """Returns whether the hard negatives of a query block are there."""
        return self._merged_path(num_shards, block).is_file()

    def read_merged(self, num_shards: int, block: str) -> MergedBlock:
        """Reads what `write_merged` has written."""
        return MergedBlock(**load_file(self._merged_path(num_shards, block)))

    def write_recall(self, part: LabelPartition, num_found: int, num_exact: int) -> None:
        """Keeps how many of the exact neighbours of a sample the index of a shard has found."""
        path = self._hits_path(part, "recall-counts")
        _save(path, {"counts": np.array([num_found, num_exact])})

    def read_recall(self, parts: Sequence[LabelPartition]) -> float | None:
        """Returns the share of exact neighbours that all shards have found; None if not measured."""
        num_found = 0
        num_exact = 0
        for part in parts:
            path = self._hits_path(part, "recall-counts")
            if path.is_file():
                counts = load_file(path)["counts"]
                num_found += int(counts[0])
                num_exact += int(counts[1])
        if not num_exact:
            return None
        return num_found / num_exact

    @contextlib.contextmanager
    def new_shortlist(self, num_query_ids: int, width: int) -> Iterator[ShortlistFile]:
        """Gives an int32 [num_query_ids, width] file of -1, to be filled in the block."""
        with whole_file(self.path / _SHORTLIST) as temporary:
            labels: ShortlistFile = np.lib.format.open_memmap(
                temporary,
                mode="w+",
                dtype=np.int32,
                shape=(num_query_ids, width),
            )
            # Without reserved space, a full disk would end the process by a signal when the map is
            # written.
            with temporary.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, temporary.stat().st_size)
            labels[:] = -1
            yield labels
            labels.flush()

    def finish(self, about: Mapping[str, Any]) -> None:
        """Completes the version, whose shortlist has been written.

        Args:
            about: figures to keep with it.
        """
        entry = hash_file(self.path / _SHORTLIST)
        first_mark = min(self.path.glob(_PUBLISHED))
        body = {
            **about,
            "snapshot_step": _read_number(first_mark, "snapshot_step"),
            "size": entry.size,
            "sha256": entry.sha256,
        }
        if self.has_clusters:
            body["clusters_sha256"] = hash_file(self.path / _CLUSTERS).sha256
        # The last file to be written: its presence means that all others are whole.
        write_json(self.path / _COMPLETE, body)
        shutil.rmtree(self.path / _FOUND, ignore_errors=True)

    def drop_inputs(self) -> None:
        """Removes the inputs, once the version is complete and no checkpoint would restart it."""
        for folder in ("queries", "rows"):
            shutil.rmtree(self.path / folder, ignore_errors=True)

    def check(self) -> None:
        """Compares the bytes of the finished version with their hashes.

        Raises:
            ShortlistError: altered since it was written.
        """
        about = _read_json(self.path / _COMPLETE)
        for name, key in ((_SHORTLIST, "sha256"), (_CLUSTERS, "clusters_sha256")):
            if key in about and hash_file(self.path / name).sha256 != about[key]:
                raise ShortlistError(
                    f"{self.path / name} was altered after it was written;"
                    " resume from an earlier copy of the run"
                )

    def shortlist(self) -> Shortlist:
        """Opens the finished version, memory-mapped; `check` compares its bytes.

        Raises:
            ShortlistError: malformed.
        """
        about = _read_json(self.path / _COMPLETE)
        with _readable(self.path / _COMPLETE):
            labels = np.load(self.path / _SHORTLIST, mmap_mode="r")
            snapshot_step = int(about["snapshot_step"])
        return Shortlist(
            self.version, snapshot_step, labels, about.get("recall"), about.get("left_out")
        )

    def write_clusters(self, cluster: npt.NDArray[np.int32]) -> None:
        """Keeps the cluster of each query id, int32 [num_query_ids], -1 for none."""
        with (
            whole_file(self.path / _CLUSTERS) as temporary,
            temporary.open("wb") as file,
        ):
            np.save(file, cluster)

    @property
    def has_clusters(self) -> bool:
        """Whether the clusters are there."""
        return (self.path / _CLUSTERS).is_file()

    def clusters(self) -> npt.NDArray[np.int32]:
        """Opens the clusters of the finished version, memory-mapped; `check` compares its bytes."""
        values: npt.NDArray[np.int32] = np.load(self.path / _CLUSTERS, mmap_mode="r")
        return values

    def _hits_path(self, part: LabelPartition, block: str) -> Path:
        labels = f"{part.start:010d}-{part.stop:010d}"
        return self.path / _FOUND / labels / f"{block}.safetensors"

    def _merged_path(self, num_shards: int, block: str) -> Path:
        return self.path / _FOUND / f"merged-{num_shards:04d}" / f"{block}.safetensors"


def _save(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    # The version's own folder is never made here, because a withdrawn attempt has to stay gone.
    if path.parent.parent.name == _FOUND:
        path.parent.parent.mkdir(exist_ok=True)
    path.parent.mkdir(exist_ok=True)
    # safetensors writes the memory behind an array as it lies there.
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with whole_file(path) as temporary:
        save_file(contiguous, temporary)


def _read_json(path: Path) -> dict[str, Any]:
    with _readable(path):
        return read_json(path)


def _read_number(path: Path, name: str) -> int:
    with _readable(path):
        return int(read_json(path)[name])


def _readable(path: Path) -> contextlib.AbstractContextManager[None]:
    remedy = "resume from an earlier copy of the run"
    return readable(f"{path} is damaged", remedy, ShortlistError)
