"""The negatives' files inside a run: what is needed to survive a kill at any moment of a refresh.

    negatives/v00002-0000/              version 2, attempt 0
        queries/00000340-0001.safetensors   ids and vectors that rank 1 collected up to step 340
        rows/0000065536.safetensors         label vectors from label 65536 on
        published-0001.json                 rank 1 has written all it has to write
        found/0000000000-0000065536/...     what was found among labels 0 .. 65535, a file per query block
        clusters.npy                        cluster of each query, where batches are made of clusters
        shortlist.npy, complete.json        the finished version

Files are written aside and renamed; a name that is there is whole, and two actors that do the same work do no harm. A
checkpoint lists the inputs that existed at its step. On resume, a version that had not been published by then starts a
new attempt with the listed query blocks, so that an index actor still busy with the old attempt finds its folder gone
and stops; everything else stays. Once a version is complete, and published at every kept checkpoint, its inputs are
removed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

from xmcray import storage
from xmcray.errors import ShortlistError, StorageError
from xmcray.parallel.partition import LabelPartition
from xmcray.types import Float32Array, Int64Array, Shortlist

ROW_BLOCK_BYTES = 64 << 20
_CLUSTERS = "clusters.npy"


class VersionFolder:
    """One attempt at one version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        version, attempt = path.name[1:].split("-")
        self.version, self.attempt = int(version), int(attempt)

    def write_queries(
        self, step: int, rank: int, ids: Int64Array, vectors: Float32Array, extra: Int64Array
    ) -> Path:
        """Adds a block of query vectors.

        Args:
            ids: int64 [B], query ids. vectors: float32 [B, D].
            step: last step whose queries are in the block.
            extra: int64 [B], the number of labels that each query may not have as a negative.
        """
        path = self.path / "queries" / f"{step:08d}-{rank:04d}.safetensors"
        _save(path, {"ids": ids, "vectors": vectors, "extra": extra})
        return path

    def write_rows(self, start: int, rows: Float32Array) -> list[Path]:
        """Adds label vectors float32 [S, D] of labels start .. start + S - 1, in blocks of at most 64 MB."""
        height = max(1, ROW_BLOCK_BYTES // (4 * max(1, rows.shape[1])))
        paths = []
        for low in range(0, len(rows), height):
            paths.append(self.path / "rows" / f"{start + low:010d}.safetensors")
            _save(paths[-1], {"rows": rows[low : low + height]})
        return paths

    def publish(self, rank: int, num_ranks: int, snapshot_step: int) -> Path:
        """Says that `rank` has written everything; the version can be built when all ranks have."""
        path = self.path / f"published-{rank:04d}.json"
        storage.write_json(path, {"num_ranks": num_ranks, "snapshot_step": snapshot_step})
        return path

    @property
    def published(self) -> bool:
        """Whether every rank has published."""
        marks = sorted(self.path.glob("published-*.json"))
        return bool(marks) and len(marks) == int(_read_json(marks[0])["num_ranks"])

    @property
    def complete(self) -> bool:
        """Whether the shortlist is finished."""
        return (self.path / "complete.json").is_file()

    @property
    def withdrawn(self) -> bool:
        """Whether a newer attempt has replaced this one."""
        return not self.path.is_dir()

    @property
    def query_blocks(self) -> list[str]:
        """Names of the query blocks, in order."""
        return sorted(p.stem for p in (self.path / "queries").glob("*.safetensors"))

    def read_queries(self, block: str) -> tuple[Int64Array, Float32Array, Int64Array]:
        """ids int64 [B], vectors float32 [B, D], extra int64 [B] of one block."""
        with safe_open(self.path / "queries" / f"{block}.safetensors", framework="numpy") as file:
            return file.get_tensor("ids"), file.get_tensor("vectors"), file.get_tensor("extra")

    def read_rows(self, start: int, stop: int) -> Float32Array:
        """Label vectors float32 [stop - start, D], read block by block."""
        parts = []
        for path in sorted((self.path / "rows").glob("*.safetensors")):
            first = int(path.stem)
            with safe_open(path, framework="numpy") as file:
                rows = file.get_slice("rows")
                low, high = max(start - first, 0), min(stop - first, rows.get_shape()[0])
                if low < high:
                    parts.append(rows[low:high])
        return np.concatenate(parts) if parts else np.empty((0, 1), np.float32)

    def write_found(
        self, part: LabelPartition, block: str, ids: Int64Array, scores: Float32Array
    ) -> None:
        """Keeps what one index shard found for one query block.

        The labels of the shard name it, not its number: a pool of another size does not take it for its own.
        """
        _save(self._found(part, block), {"ids": ids, "scores": scores})

    def has_found(self, part: LabelPartition, block: str) -> bool:
        """Whether that was done before."""
        return self._found(part, block).is_file()

    def read_found(self, part: LabelPartition, block: str) -> tuple[Int64Array, Float32Array]:
        """ids int64 [B, k] (internal labels, -1 padded) and scores float32 [B, k]."""
        with safe_open(self._found(part, block), framework="numpy") as file:
            return file.get_tensor("ids"), file.get_tensor("scores")

    def finish(self, labels: np.memmap[Any, np.dtype[np.int32]], about: Mapping[str, Any]) -> None:
        """Completes the version with a filled `new_shortlist`."""
        labels.flush()
        part = Path(str(labels.filename))
        entry = storage.hash_file(part)
        storage.fsync(part)
        part.replace(self.path / "shortlist.npy")
        if self.has_clusters:
            about = {**about, "clusters_sha256": storage.hash_file(self.path / _CLUSTERS).sha256}
        marks = [_read_json(path) for path in sorted(self.path.glob("published-*.json"))]
        snapshot_step = int(marks[0]["snapshot_step"])
        body = {**about, "snapshot_step": snapshot_step, "size": entry.size, "sha256": entry.sha256}
        storage.write_json(self.path / "complete.json", body)
        shutil.rmtree(self.path / "found", ignore_errors=True)

    def drop_inputs(self) -> None:
        """Removes query blocks and label vectors; for a version that is complete and that no checkpoint restarts."""
        for folder in ("queries", "rows"):
            shutil.rmtree(self.path / folder, ignore_errors=True)

    def new_shortlist(self, num_query_ids: int, width: int) -> np.memmap[Any, np.dtype[np.int32]]:
        """An int32 [num_query_ids, width] file filled with -1, to be filled and given to `finish`."""
        path = storage.aside(self.path / "shortlist.npy")
        labels: np.memmap[Any, np.dtype[np.int32]] = np.lib.format.open_memmap(
            path, mode="w+", dtype=np.int32, shape=(num_query_ids, width)
        )
        with (
            storage.disk_errors(path),
            path.open("r+b") as file,
        ):  # a full disk is a signal under a map without this
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        labels[:] = -1
        return labels

    def shortlist(self) -> Shortlist:
        """The finished version, memory-mapped, its bytes compared with the hash.

        Raises:
            ShortlistError: altered since it was written.
        """
        about = _read_json(self.path / "complete.json")
        labels = self._finished("shortlist.npy", str(about["sha256"]))
        return Shortlist(self.version, int(about["snapshot_step"]), labels, about.get("recall"))

    def write_clusters(self, cluster: npt.NDArray[np.int32]) -> None:
        """Keeps the cluster of each query id, int32 [num_query_ids], -1 for none."""
        path = self.path / _CLUSTERS
        temporary = storage.aside(path)
        with storage.disk_errors(path), temporary.open("wb") as file:
            np.save(file, cluster)
        storage.fsync(temporary)
        temporary.replace(path)

    @property
    def has_clusters(self) -> bool:
        """Whether they were written before."""
        return (self.path / _CLUSTERS).is_file()

    def clusters(self) -> npt.NDArray[np.int32]:
        """The clusters of the finished version, memory-mapped, their bytes compared with the hash.

        Raises:
            ShortlistError: altered since they were written.
        """
        return self._finished(
            _CLUSTERS, str(_read_json(self.path / "complete.json")["clusters_sha256"])
        )

    def _finished(self, name: str, sha256: str) -> npt.NDArray[np.int32]:
        path = self.path / name
        if storage.hash_file(path).sha256 != sha256:
            raise ShortlistError(
                f"{path} was altered after it was written; resume from an earlier copy of the run"
            )
        values: npt.NDArray[np.int32] = np.load(path, mmap_mode="r")
        return values

    def _found(self, part: LabelPartition, block: str) -> Path:
        return self.path / "found" / f"{part.start:010d}-{part.stop:010d}" / f"{block}.safetensors"


class Ledger:
    """All versions of a run. One writer: rank 0 starts, restores and retires; ranks add to started versions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def versions(self) -> list[VersionFolder]:
        """The newest attempt at each version, by version."""
        newest = {
            f.version: f for f in sorted(self._folders(), key=lambda f: (f.version, f.attempt))
        }
        return list(newest.values())

    def version(self, version: int) -> VersionFolder:
        """The newest attempt at a version, started if there is none."""
        for folder in self.versions():
            if folder.version == version:
                return folder
        return self._start(version, 0)

    def newest_complete(self) -> VersionFolder | None:
        """The finished version with the highest number."""
        return max(
            (f for f in self.versions() if f.complete), key=lambda f: f.version, default=None
        )

    def restore(self, inputs: Mapping[str, str], published: Sequence[int]) -> None:
        """Brings the files to the state of a checkpoint.

        Args:
            inputs: SHA-256 of the query blocks, rows and marks that existed then, by path relative to the ledger.
            published: versions that were published then; later ones start anew.
        Raises:
            StorageError: an input of a version that is not complete is gone or altered.
        """
        listed: dict[int, list[str]] = {}
        for name in inputs:
            listed.setdefault(VersionFolder(Path(name.split("/", 1)[0])).version, []).append(name)
        for folder in self.versions():
            if folder.version in published:
                if not folder.complete:
                    self._check(inputs, listed.get(folder.version, []))
                continue
            again = self._start(folder.version, folder.attempt + 1)
            for name in (name for name in listed.get(folder.version, []) if "/queries/" in name):
                target = again.path / "queries" / Path(name).name
                target.parent.mkdir(exist_ok=True)
                os.link(self._find(folder.version, Path(name).name, inputs[name]), target)
        for folder in self._folders():
            if folder.path not in [f.path for f in self.versions()]:
                shutil.rmtree(folder.path, ignore_errors=True)

    def name_of(self, path: Path) -> str:
        """A file's path relative to the ledger."""
        return path.relative_to(self.path).as_posix()

    def retire(self, before: int) -> None:
        """Removes versions lower than `before`."""
        for folder in self._folders():
            if folder.version < before:
                shutil.rmtree(folder.path, ignore_errors=True)

    def _find(self, version: int, block: str, sha256: str) -> Path:
        """A query block in whichever attempt an earlier restore from the same checkpoint left it."""
        for path in sorted(self.path.glob(f"v{version:05d}-*/queries/{block}")):
            if storage.hash_file(path).sha256 == sha256:
                return path
        raise StorageError(
            f"{self.path} lacks {block} of version {version}; resume from an earlier copy of the run"
        )

    def _check(self, inputs: Mapping[str, str], names: list[str]) -> None:
        for name in names:
            path = self.path / name
            if not path.is_file() or storage.hash_file(path).sha256 != inputs[name]:
                raise StorageError(
                    f"{path} is missing or altered; resume from an earlier copy of the run"
                )

    def _start(self, version: int, attempt: int) -> VersionFolder:
        folder = VersionFolder(self.path / f"v{version:05d}-{attempt:04d}")
        folder.path.mkdir(parents=True, exist_ok=True)
        return folder

    def _folders(self) -> Iterator[VersionFolder]:
        return (VersionFolder(path) for path in sorted(self.path.glob("v*-*")))


def _save(
    path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
    if (
        path.parent.parent.name == "found"
    ):  # never the version's own folder: a withdrawn attempt stays gone
        path.parent.parent.mkdir(exist_ok=True)
    path.parent.mkdir(exist_ok=True)
    temporary = storage.aside(path)
    with storage.disk_errors(path):
        save_file(
            {k: np.ascontiguousarray(v) for k, v in tensors.items()},
            temporary,
            metadata=dict(metadata or {}),
        )
        storage.fsync(temporary)
        temporary.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return body
