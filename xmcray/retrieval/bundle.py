"""The folder that serving needs, and nothing else: encoder, tokenizer, labels, vectors and their indexes.

    encoder/                    as Encoder.save writes it
    tokenizer/                  as TextTokenizer.save writes it
    labels.parquet              uid and text of each label, by source id
    label_order.npy             int64 [L], internal -> source id
    vectors/00000.safetensors   float32 "vectors", consecutive rows in internal order; the range is in the metadata
    index/00000.faiss           the FAISS index over the same rows; absent where a shard is searched exhaustively
    settings.json               how to search (Settings)
    manifest.json               sizes and SHA-256 (storage.py)

Rows are internal because contiguous ranges of that order are statistically alike; every answer has source ids.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from xmcray.data.tokens import TextTokenizer
from xmcray.errors import BundleError, DataError
from xmcray.nn.encoder import Encoder
from xmcray.retrieval.index import Index, IndexSpec, build_index
from xmcray.storage import Manifest, new_artifact
from xmcray.types import Float32Array, Int64Array

KIND = "bundle"
SHARD_ROWS = 1_000_000
LABEL_BLOCK = 65_536
LABEL_SCHEMA = pa.schema([("uid", pa.large_string()), ("text", pa.large_string())])


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of vectors.

    Attributes:
        start, stop: its rows of the internal order.
        indexed: whether index/ holds a FAISS index over them.
        candidates: candidates per answer that this index proposes.
    """

    start: int
    stop: int
    indexed: bool
    candidates: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What settings.json holds.

    Attributes:
        num_labels: L. dim: D, the width of vectors and queries.
        method: which method trained the bundle; for the reader only.
        normalise: divide query vectors by their length before the search; the stored vectors are as they are.
        factory: how indexes were asked for.
        predictor: what is made of the neighbours; {"kind": "labels"} answers with them.
        shards: the files of vectors, in internal order.
    """

    num_labels: int
    dim: int
    method: str = ""
    normalise: bool = False
    factory: str = "auto"
    predictor: Mapping[str, Any] = field(default_factory=lambda: {"kind": "labels"})
    shards: tuple[Shard, ...] = ()


def write_bundle(
    destination: str | Path,
    encoder: Path | Encoder,
    tokenizer: TextTokenizer,
    label_uids: Iterable[str],
    label_texts: Iterable[str],
    label_order: Int64Array,
    vectors: Iterable[Float32Array],
    spec: IndexSpec,
    about: Mapping[str, Any],
    *,
    method: str = "",
    normalise: bool = False,
    queries: Float32Array | None = None,
    shard_rows: int = SHARD_ROWS,
    threads: int = 1,
) -> None:
    """Writes a bundle; on failure nothing is left at `destination`. One shard of vectors is held in memory.

    Args:
        encoder: an encoder, or the folder it was saved in.
        label_uids, label_texts: L values each, by source id.
        label_order: int64 [L], a permutation: internal -> source id.
        vectors: float32 blocks [n, D], together L rows in internal order.
        spec: how each shard is indexed.
        about: what made the bundle, for its manifest.
        method, normalise: see Settings.
        queries: float32 [Q, D], a sample of query vectors by which the index is tuned; noisy rows if not given.
        shard_rows: rows per file.
        threads: of building.
    Raises:
        StorageError: the destination is not empty, or the disk is full.
        DataError: the numbers of uids, texts and vectors differ from L.
    """
    label_order = np.ascontiguousarray(label_order, np.int64)
    num_labels = len(label_order)
    assert np.array_equal(np.sort(label_order), np.arange(num_labels)), "label_order is not a permutation"
    with new_artifact(destination, KIND, about) as folder:
        if isinstance(encoder, Encoder):
            encoder.save(folder / "encoder")
        else:
            shutil.copytree(encoder, folder / "encoder")
        tokenizer.save(folder / "tokenizer")
        _write_labels(folder / "labels.parquet", label_uids, label_texts, num_labels)
        np.save(folder / "label_order.npy", label_order)
        (folder / "vectors").mkdir()
        shards: list[Shard] = []
        dim = 0
        for rows in _shards(vectors, shard_rows):
            start, dim = shards[-1].stop if shards else 0, rows.shape[1]
            shards.append(_write_shard(folder, len(shards), start, rows, spec, queries, threads))
        if not shards or shards[-1].stop != num_labels:
            raise DataError(f"{shards[-1].stop if shards else 0} label vectors were given, expected {num_labels}")
        settings = Settings(
            num_labels=num_labels,
            dim=dim,
            method=method,
            normalise=normalise,
            factory=spec.factory,
            shards=tuple(shards),
        )
        text = json.dumps(dataclasses.asdict(settings), indent=1, sort_keys=True)
        (folder / "settings.json").write_text(text + "\n", encoding="utf-8")


def read_settings(folder: Path) -> Settings:
    """The settings of a verified bundle.

    Raises:
        BundleError: they are malformed, or ask for a predictor that this release does not know.
    """
    try:
        values = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        shards = tuple(Shard(**shard) for shard in values.pop("shards"))
        settings = Settings(**values, shards=shards)
        kind = settings.predictor["kind"]
        ends = [0, *(shard.stop for shard in shards)]
        fits = [shard.start for shard in shards] == ends[:-1] and ends[-1] == settings.num_labels > 0
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{folder}/settings.json is malformed ({type(error).__name__}); export it again") from None
    if not fits:
        raise BundleError(f"{folder}/settings.json: its shards do not cover {settings.num_labels} labels; export again")
    if kind != "labels":
        raise BundleError(f"{folder} has predictor {kind!r}, this release knows 'labels'; use the release that made it")
    return settings


def open_shards(folder: Path, manifest: Manifest, settings: Settings, threads: int) -> Iterator[Index]:
    """One index per shard over memory-mapped vectors.

    Raises:
        BundleError: a file is malformed, or does not fit the settings.
    """
    for number, shard in enumerate(settings.shards):
        vectors = _read_vectors(folder / _vectors(number), shard.stop - shard.start, settings.dim)
        if not shard.indexed:
            yield Index(vectors, None, threads=threads)
            continue
        name = _index(number)
        if name not in manifest.files:
            raise BundleError(f"{folder}/{name} is missing, expected by settings.json; export it again")
        size = manifest.files[name].size
        yield Index.load(folder / name, size, vectors, candidates=shard.candidates, threads=threads)


def read_labels(folder: Path, num_labels: int) -> tuple[pa.Table, Int64Array]:
    """Label uids and texts by source id, and the order int64 [L] (internal -> source).

    Raises:
        BundleError: they are malformed or of another number of labels.
    """
    try:
        labels = pq.read_table(folder / "labels.parquet", schema=LABEL_SCHEMA, memory_map=True)
        order = np.load(folder / "label_order.npy")
        fits = labels.num_rows == num_labels and np.array_equal(np.sort(order), np.arange(num_labels))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BundleError(f"{folder}: labels cannot be read ({type(error).__name__}); export it again") from None
    if not fits:
        raise BundleError(
            f"{folder}: labels.parquet or label_order.npy does not hold {num_labels} labels; export again"
        )
    return labels, np.asarray(order, np.int64)


def _write_labels(path: Path, uids: Iterable[str], texts: Iterable[str], num_labels: int) -> None:
    uid, text, count = iter(uids), iter(texts), 0
    with pq.ParquetWriter(path, LABEL_SCHEMA, compression="zstd") as writer:
        while True:
            columns = [list(islice(uid, LABEL_BLOCK)), list(islice(text, LABEL_BLOCK))]
            if len(columns[0]) != len(columns[1]):
                raise DataError("numbers of label uids and label texts differ, expected one of each per label")
            if not columns[0]:
                break
            count += len(columns[0])
            writer.write_table(pa.table([pa.array(c, pa.large_string()) for c in columns], schema=LABEL_SCHEMA))
    if count != num_labels:
        raise DataError(f"{count} label uids were given, expected {num_labels}")


def _shards(blocks: Iterable[Float32Array], shard_rows: int) -> Iterator[Float32Array]:
    """The rows of `blocks` in pieces of `shard_rows`, the last one shorter."""
    held: list[Float32Array] = []
    for block in chain.from_iterable(_split(block, shard_rows) for block in blocks):
        room = shard_rows - sum(map(len, held))
        held.append(block[:room])
        if len(block) >= room:
            yield np.concatenate(held)
            held = [block[room:]]
    if sum(map(len, held)):
        yield np.concatenate(held)


def _split(block: Float32Array, rows: int) -> Iterator[Float32Array]:
    block = np.asarray(block, np.float32)
    for start in range(0, len(block), rows):
        yield block[start : start + rows]


def _write_shard(
    folder: Path,
    number: int,
    start: int,
    rows: Float32Array,
    spec: IndexSpec,
    queries: Float32Array | None,
    threads: int,
) -> Shard:
    stop = start + len(rows)
    # one entry of metadata: safetensors writes several in an order that changes from file to file
    save_file({"vectors": rows}, folder / _vectors(number), metadata={"rows": f"{start}:{stop}"})
    index = build_index(rows, spec.factory, spec.seed, threads=threads, spec=spec, queries=queries)
    if not index.is_exact:
        (folder / "index").mkdir(exist_ok=True)
        index.save(folder / _index(number))
    return Shard(start, stop, not index.is_exact, index.candidates)


def _read_vectors(path: Path, rows: int, dim: int) -> Tensor:
    """A read-only use of the file's pages: tensors of safetensors' torch reader are memory-mapped."""
    try:
        with safe_open(path, framework="pt") as file:
            vectors: Tensor = file.get_tensor("vectors")
    except (OSError, SafetensorError) as error:
        raise BundleError(f"{path} cannot be read ({' '.join(str(error).split())[:120]}); export it again") from None
    if tuple(vectors.shape) != (rows, dim) or str(vectors.dtype) != "torch.float32":
        raise BundleError(f"{path} holds {vectors.dtype} {tuple(vectors.shape)}, expected float32 {(rows, dim)}")
    return vectors


def _vectors(number: int) -> str:
    return f"vectors/{number:05d}.safetensors"


def _index(number: int) -> str:
    return f"index/{number:05d}.faiss"
