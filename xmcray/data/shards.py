"""The shard files of a corpus: packing a block of rows into bytes, and reading rows out of many mapped files.

    NNNNN.tokens.npy, NNNNN.token_offsets.npy    uint16 or uint32 values, int64 offsets
    NNNNN.labels.npy, NNNNN.label_offsets.npy    int32 source label ids, int64 offsets
    NNNNN.parquet                                uid, text and, if the raw files have it, relevance

All shards of a split hold the same number of rows but the last. The same rows give the same bytes.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from xmcray.types import Int64Array, Ragged

Array = npt.NDArray[Any]
MAX_UINT16_VOCAB = 1 << 16


def shard_stem(shard: int) -> str:
    """First part of a shard's file names."""
    return f"{shard:05d}"


def pack(
    shard: int,
    texts: pa.Table,
    tokens: Ragged,
    vocab_size: int,
    labels: Ragged | None,
) -> dict[str, bytes]:
    """The files of one shard, by name.

    Args:
        texts: columns uid, text and possibly relevance.
        labels: source label ids per row; None for a shard of label texts.
    """
    token_type = np.uint16 if vocab_size <= MAX_UINT16_VOCAB else np.uint32
    arrays: dict[str, Array] = {
        "tokens": tokens.values.astype(token_type),
        "token_offsets": tokens.offsets,
    }
    if labels is not None:
        arrays |= {"labels": labels.values.astype(np.int32), "label_offsets": labels.offsets}
    stem = shard_stem(shard)
    files = {f"{stem}.{name}.npy": _npy(array) for name, array in arrays.items()}
    sink = io.BytesIO()
    pq.write_table(texts.replace_schema_metadata(None), sink, compression="zstd")
    return {**files, f"{stem}.parquet": sink.getvalue()}


class ShardedRows:
    """Ragged rows of one split, opened shard by shard as they are asked for; `kind` is "token" or "label"."""

    def __init__(self, folder: Path, kind: str, num_rows: int, shard_rows: int) -> None:
        self._folder, self._kind, self._num_rows, self._shard_rows = (
            folder,
            kind,
            num_rows,
            shard_rows,
        )
        self._shards: dict[int, tuple[Array, Array]] = {}

    def take(self, rows: Int64Array) -> Ragged:
        """The chosen rows in the chosen order.

        Index arithmetic is done once for all rows; per shard there are only the reads themselves, because a batch of
        random rows meets nearly every shard.
        """
        ids = np.asarray(rows, np.int64)
        order = np.argsort(ids, kind="stable")
        groups = by_shard(ids[order], self._num_rows, self._shard_rows)
        starts, stops = np.empty((2, len(ids)), np.int64)
        for shard, span, local in groups:
            offsets = self._open(shard)[1]
            starts[span] = offsets[local]
            stops[span] = offsets[local + 1]
        lengths = stops - starts
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        index = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], lengths)
        values = np.empty(len(index), np.int64)
        for shard, span, _ in groups:
            part = slice(bounds[span.start], bounds[span.stop])
            values[part] = self._open(shard)[0][index[part]]
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return Ragged(values, bounds).take(inverse)

    def lengths(self) -> Int64Array:
        """int64 [rows], length of every row."""
        shards = range(-(-self._num_rows // self._shard_rows))
        return np.concatenate(
            [np.zeros(0, np.int64), *(np.diff(self._open(shard)[1]) for shard in shards)]
        )

    def _open(self, shard: int) -> tuple[Array, Array]:
        pair = self._shards.get(shard)
        if pair is None:
            stem = self._folder / shard_stem(shard)
            pair = (
                _map(Path(f"{stem}.{self._kind}s.npy")),
                _map(Path(f"{stem}.{self._kind}_offsets.npy")),
            )
            self._shards[shard] = pair
        return pair


def by_shard(
    sorted_rows: Int64Array, num_rows: int, shard_rows: int
) -> Sequence[tuple[int, slice, Int64Array]]:
    """(shard, its slice of `sorted_rows`, row numbers inside the shard) for every shard the rows touch.

    Raises:
        IndexError: a row is out of range.
    """
    if len(sorted_rows) == 0:
        return []
    if sorted_rows[0] < 0 or sorted_rows[-1] >= num_rows:
        raise IndexError(
            f"rows {sorted_rows[0]} .. {sorted_rows[-1]} asked for, there are {num_rows}"
        )
    shards = sorted_rows // shard_rows
    cuts = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(shards)]
    local = sorted_rows - shards * shard_rows
    return [
        (int(shards[start]), slice(start, stop), local[start:stop])
        for start, stop in itertools.pairwise(cuts)
    ]


def _npy(array: Array) -> bytes:
    sink = io.BytesIO()
    np.lib.format.write_array(sink, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return sink.getvalue()


def _map(path: Path) -> Array:
    """A read-only view of an .npy file that keeps no file descriptor: thousands of shards may be open at once.

    `numpy.memmap` holds one descriptor per file, and the usual limit is 1,024.
    """
    import torch

    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        start = file.tell()
    data = torch.from_file(
        str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8
    ).numpy()
    view: Array = data[start:].view(dtype).reshape(shape)
    view.flags.writeable = False
    return view
