"""Vectors in files of a bounded number of rows, each with its index; searched as if they were one.

vectors/00000.safetensors   float32 "vectors", consecutive rows; the range is in the metadata
index/00000.faiss           the FAISS index over the same rows; absent where a shard is searched exhaustively
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from xmcray.errors import BundleError
from xmcray.retrieval.exact import as_tensor, from_keys, nothing, to_keys
from xmcray.retrieval.index import Index, IndexSpec, build_index
from xmcray.storage import Manifest
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

SHARD_ROWS = 1_000_000


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of vectors.

    Attributes:
        start, stop: its rows.
        indexed: whether index/ holds a FAISS index over them.
        candidates: candidates per answer that this index proposes.
    """

    start: int
    stop: int
    indexed: bool
    candidates: int


def write_shards(
    folder: Path,
    blocks: Iterable[Float32Array],
    spec: IndexSpec,
    queries: Float32Array | None = None,
    shard_rows: int = SHARD_ROWS,
    threads: int = 1,
) -> tuple[tuple[Shard, ...], int]:
    """Writes vectors/ and index/ into `folder`, one shard in memory at a time; returns the shards and D.

    Args:
        blocks: float32 [n, D] each, the rows in order. Others as for `bundle.write_bundle`.
    """
    (folder / "vectors").mkdir(parents=True)
    shards: list[Shard] = []
    dim = 0
    for number, rows in enumerate(_pieces(blocks, shard_rows)):
        start, dim = shards[-1].stop if shards else 0, rows.shape[1]
        stop = start + len(rows)
        save_vectors(folder, number, rows, start)
        index = build_index(
            rows, spec.factory, spec.seed, threads=threads, spec=spec, queries=queries
        )
        if not index.is_exact:
            (folder / "index").mkdir(exist_ok=True)
            index.save(folder / _index(number))
        shards.append(Shard(start, stop, not index.is_exact, index.candidates))
    return tuple(shards), dim


def save_vectors(folder: Path, number: int, rows: Float32Array, start: int) -> None:
    """Writes the vectors of one shard, whose rows begin at `start`."""
    # one entry of metadata: safetensors writes several in an order that changes from file to file
    save_file(
        {"vectors": rows},
        folder / vectors_name(number),
        metadata={"rows": f"{start}:{start + len(rows)}"},
    )


def read_shards(values: Sequence[Mapping[str, Any]], rows: int) -> tuple[Shard, ...] | None:
    """Shards from plain values; None where they do not cover `rows` rows, at least one, without a gap."""
    shards = tuple(Shard(**value) for value in values)
    ends = [0, *(shard.stop for shard in shards)]
    return (
        shards if [shard.start for shard in shards] == ends[:-1] and ends[-1] == rows > 0 else None
    )


def open_shards(
    bundle: Path,
    manifest: Manifest,
    shards: Sequence[Shard],
    dim: int,
    threads: int,
    within: str = "",
    part: tuple[int, int] = (0, 1),
) -> Iterator[Index]:
    """One index per shard over memory-mapped vectors.

    Args:
        within: folder inside the bundle, such as "memory/".
        part: (i, n): only shards i, i + n, i + 2 n ... are going to be searched, the indexes of others are not read.
    Raises:
        BundleError: a file is malformed, or does not fit the settings.
    """
    for number, shard in enumerate(shards):
        vectors = _read_vectors(
            bundle / within / vectors_name(number), shard.stop - shard.start, dim
        )
        if not shard.indexed or number % part[1] != part[0]:
            yield Index(vectors, None, threads=threads)
            continue
        name = within + _index(number)
        if name not in manifest.files:
            raise BundleError(
                f"{bundle}/{name} is missing, expected by settings.json; export it again"
            )
        size = manifest.files[name].size
        yield Index.load(bundle / name, size, vectors, candidates=shard.candidates, threads=threads)


def search_shards(
    shards: Sequence[Shard],
    indexes: Sequence[Index],
    query_BD: Float32Array,
    k: int,
    *,
    names: Int64Array | None = None,
    hidden: Ragged | None = None,
    exact: bool = False,
) -> TopLabels:
    """The k best rows of all shards, best first, equal scores by lower id.

    Args:
        names: int64 [rows], what rows are called in the answer, -1 for those that are no answers; their numbers if not
            given.
        hidden: B lists of row numbers that are masked before the k best are taken.
        exact: compare all rows, whatever the index.
    Returns:
        Ids and inner products; -1 and -inf where no row is left.
    """
    if not k:
        return TopLabels.nothing(len(query_BD))
    keys = [nothing(len(query_BD), k)]
    for shard, index in zip(shards, indexes, strict=True):
        known = (
            np.arange(shard.start, shard.stop) if names is None else names[shard.start : shard.stop]
        )
        hide = None if hidden is None else _inside(hidden, shard)
        scores, ids = index.search(query_BD, min(k, len(index)), known, hide, exact)
        keys.append(to_keys(as_tensor(scores), as_tensor(np.maximum(ids, 0), np.int64)))
    return _best(keys, k)


def merge(parts: Sequence[TopLabels]) -> TopLabels:
    """The best of several answers to the same queries, as wide as the first; equal scores by lower id."""
    keys = [
        to_keys(as_tensor(part.scores), as_tensor(np.maximum(part.ids, 0), np.int64))
        for part in parts
    ]
    return _best(keys, parts[0].width)


def _best(keys: Sequence[torch.Tensor], k: int) -> TopLabels:
    scores, ids = from_keys(torch.cat(list(keys), dim=1).topk(k, dim=1).values)
    return TopLabels(ids, scores)


def _inside(rows: Ragged, shard: Shard) -> Ragged:
    """Those of the listed rows that lie in a shard, counted from its start."""
    inside = (rows.values >= shard.start) & (rows.values < shard.stop)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(inside)])
    return Ragged(rows.values[inside] - shard.start, before[rows.offsets])


def _pieces(blocks: Iterable[Float32Array], shard_rows: int) -> Iterator[Float32Array]:
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


def _read_vectors(path: Path, rows: int, dim: int) -> Tensor:
    """A read-only use of the file's pages: tensors of safetensors' torch reader are memory-mapped."""
    try:
        with safe_open(path, framework="pt") as file:
            vectors: Tensor = file.get_tensor("vectors")
    except (OSError, SafetensorError) as error:
        raise BundleError(
            f"{path} cannot be read ({' '.join(str(error).split())[:120]}); export it again"
        ) from None
    if tuple(vectors.shape) != (rows, dim) or str(vectors.dtype) != "torch.float32":
        raise BundleError(
            f"{path} holds {vectors.dtype} {tuple(vectors.shape)}, expected float32 {(rows, dim)}"
        )
    return vectors


def vectors_name(number: int) -> str:
    """The file of the vectors of one shard."""
    return f"vectors/{number:05d}.safetensors"


def _index(number: int) -> str:
    return f"index/{number:05d}.faiss"
