"""The shard files of a corpus: packing rows into bytes, and reading rows of mapped files.

    NNNNN.tokens.npy, NNNNN.token_offsets.npy    uint16 or uint32 values, int64 offsets
    NNNNN.labels.npy, NNNNN.label_offsets.npy    int32 source label ids, int64 offsets
    NNNNN.vectors.npy                            float32 or float16 [rows, W], side vectors, if the
                                                 raw files have them
    NNNNN.parquet                                uid, text and, if the raw files have it, relevance

In a split, all files of a kind hold the same number of rows, except the last one. The same rows
always become the same bytes. `pack` makes the files of one shard. `array_files.py` joins the arrays
of many shards into one file, so that few files are mapped.
"""

from __future__ import annotations

import ctypes
import io
import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from xmcray.data.checked_files import array_header
from xmcray.errors import DataError, readable
from xmcray.types import Float32Array, Int64Array, Ragged, are_ids, offsets_of

Array = npt.NDArray[Any]
MAX_UINT16_VOCAB = 1 << 16
# What follows the number of a shard in the names of its array files.
VALUE_SUFFIXES = ("tokens", "labels")
OFFSET_SUFFIXES = ("token_offsets", "label_offsets")
VECTOR_SUFFIX = "vectors"
ARRAY_SUFFIXES = (*VALUE_SUFFIXES, *OFFSET_SUFFIXES, VECTOR_SUFFIX)
VALUE_TYPES = (np.uint16, np.uint32, np.int32)  # of token and label ids on disk
VECTOR_TYPES = (np.float32, np.float16)  # of side vectors
_ROWS_AT_ONCE = 1 << 16  # rows of a block; their offsets fit into a processor's cache


def shard_stem(shard: int) -> str:
    """First part of a shard's file names."""
    return f"{shard:05d}"


def pack(
    shard: int,
    texts: pa.Table,
    tokens: Ragged,
    vocab_size: int,
    labels: Ragged | None,
    vectors: Array | None = None,
) -> dict[str, bytes]:
    """The files of one shard, by name.

    Args:
        texts: columns uid, text and possibly relevance.
        labels: source label ids per row; None for a shard of label texts.
        vectors: float32 or float16 [rows, W], side vectors, or None.
    """
    stem = shard_stem(shard)
    # Two bytes per token, if ids fit, halve the largest files of a corpus.
    token_type = np.uint16 if vocab_size <= MAX_UINT16_VOCAB else np.uint32
    files = {
        f"{stem}.tokens.npy": _npy(tokens.values.astype(token_type)),
        f"{stem}.token_offsets.npy": _npy(tokens.offsets),
    }
    if labels is not None:
        # 2^31 labels are enough, and four bytes halve the file.
        files[f"{stem}.labels.npy"] = _npy(labels.values.astype(np.int32))
        files[f"{stem}.label_offsets.npy"] = _npy(labels.offsets)
    if vectors is not None:
        files[f"{stem}.{VECTOR_SUFFIX}.npy"] = _npy(vectors)
    sink = io.BytesIO()
    # The metadata of the schema may name the version of a library, which would change the bytes.
    pq.write_table(texts.replace_schema_metadata(None), sink, compression="zstd")
    files[f"{stem}.parquet"] = sink.getvalue()
    return files


def _npy(array: Array) -> bytes:
    sink = io.BytesIO()
    # np.save would accept objects, which need pickle.
    np.lib.format.write_array(sink, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return sink.getvalue()


class ShardedRows:
    """Ragged rows of one split. A file is opened when one of its rows is read for the first time.

    Args:
        folder: folder of the split.
        kind: "token" or "label".
        num_rows: rows of the split.
        shard_rows: rows of every file but the last.
        limit: number of labels, or size of the vocabulary; values are 0 to limit - 1.
    """

    def __init__(self, folder: Path, kind: str, num_rows: int, shard_rows: int, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._kind = kind
        self._num_rows = num_rows
        self._shard_rows = shard_rows
        self._open_shards: dict[int, Ragged] = {}

    def take(self, rows: Int64Array) -> Ragged:
        """The given rows in the given order.

        A batch of random rows touches nearly every shard. So index arithmetic is done once for all
        rows, and the loops over shards only read.
        """
        ids = np.asarray(rows, np.int64)
        order = np.argsort(ids, kind="stable")
        pieces = by_shard(ids[order], self._num_rows, self._shard_rows)
        starts, lengths = self._locate(pieces, len(ids))
        offsets = offsets_of(lengths)
        # `places` says where each value is in its shard. A row starts at `offsets[:-1]` in the
        # result and at `starts` in its shard, so its values are shifted by the difference.
        shifts = starts - offsets[:-1]
        places = np.arange(offsets[-1]) + np.repeat(shifts, lengths)
        values = np.empty(len(places), np.int64)
        for piece in pieces:
            first = offsets[piece.span.start]
            last = offsets[piece.span.stop]
            shard_values = self._opened(piece.shard).values
            values[first:last] = shard_values[places[first:last]]
        if not are_ids(values, self._limit):
            raise self._damaged(f"{self._kind} ids outside 0 to {self._limit - 1}")
        # The rows were read in ascending order. The inverse permutation restores the given order.
        inverse = np.argsort(order)
        return Ragged(values, offsets).take(inverse)

    def _locate(self, pieces: Sequence[ShardPiece], num_rows: int) -> tuple[Int64Array, Int64Array]:
        """Where each of some sorted rows starts in its shard, and its length.

        Only the offsets of these rows are checked. Checking a file when it is opened would read all
        of it.

        Args:
            pieces: the rows by shard.
            num_rows: the number of these rows.
        """
        starts = np.empty(num_rows, np.int64)
        stops = np.empty(num_rows, np.int64)
        num_values = np.empty(num_rows, np.int64)
        for piece in pieces:
            opened = self._opened(piece.shard)
            starts[piece.span] = opened.offsets[piece.local_rows]
            stops[piece.span] = opened.offsets[piece.local_rows + 1]
            num_values[piece.span] = len(opened.values)
        lengths = stops - starts
        is_damaged = np.any(starts < 0) or np.any(lengths < 0) or np.any(stops > num_values)
        if is_damaged:
            raise self._damaged("offsets that are not those of its rows")
        return starts, lengths

    @property
    def _num_shards(self) -> int:
        return math.ceil(self._num_rows / self._shard_rows)

    def check_num_rows(self) -> None:
        """Checks that the last file is complete, and that there is no further file.

        Earlier files are checked when they are opened.

        Raises:
            DataError: the files have another number of rows than `num_rows`.
        """
        num_shards = self._num_shards
        if num_shards:
            self._opened(num_shards - 1)
        # If there is one more file, the split has more rows than its card says.
        if self._values_path(num_shards).exists():
            raise self._damaged(f"more than the {self._num_rows:,} rows that its card says")

    def lengths(self) -> Int64Array:
        """int64 [rows], length of every row."""
        lengths = np.empty(self._num_rows, np.int64)
        for start, offsets in self._offset_blocks():
            stop = start + len(offsets) - 1
            lengths[start:stop] = self._lengths_of(offsets)
        return lengths

    def short_rows(self, max_values: int = 0) -> Int64Array:
        """int64, the rows with at most so many values, ascending. It allocates no array of all rows."""
        short_rows = [np.empty(0, np.int64)]
        for start, offsets in self._offset_blocks():
            # In most blocks no row is short, and one comparison of all offsets shows that.
            if not np.all(offsets[:-1] + max_values < offsets[1:]):
                is_short = self._lengths_of(offsets) <= max_values
                short_rows.append(start + np.flatnonzero(is_short))
        return np.concatenate(short_rows)

    def _offset_blocks(self) -> Iterator[tuple[int, Int64Array]]:
        """For each block of rows its first row, and int64 [rows + 1], the offsets of its rows.

        The files are read, because their mappings are tuned for access at random places.
        """
        for shard in range(self._num_shards):
            # Opening the shard also checks the first and the last of its offsets.
            num_rows = len(self._opened(shard))
            path = self._offsets_path(shard)
            first_byte = array_header(path, (np.int64,)).start
            for start in range(0, num_rows, _ROWS_AT_ONCE):
                # There is one more offset than rows: the end of the last row.
                count = min(_ROWS_AT_ONCE, num_rows - start) + 1
                place = first_byte + start * np.dtype(np.int64).itemsize
                offsets = np.fromfile(path, np.int64, count, offset=place)
                yield shard * self._shard_rows + start, offsets

    def _lengths_of(self, offsets: Int64Array) -> Int64Array:
        """The lengths of the rows with these offsets."""
        lengths = np.diff(offsets)
        if lengths.min() < 0:
            raise self._damaged("offsets that are not those of its rows")
        return lengths

    def _values_path(self, shard: int) -> Path:
        return self._folder / f"{shard_stem(shard)}.{self._kind}s.npy"

    def _offsets_path(self, shard: int) -> Path:
        return self._folder / f"{shard_stem(shard)}.{self._kind}_offsets.npy"

    def _damaged(self, what: str) -> DataError:
        return DataError(f"{self._folder} has {what}; prepare the corpus again")

    def _opened(self, shard: int) -> Ragged:
        """The mapped rows of one shard. The values keep the type in which they are stored."""
        opened = self._open_shards.get(shard)
        if opened is None:
            path = self._values_path(shard)
            with readable(f"{path} cannot be read", "prepare the corpus again", DataError):
                values = _map(path, VALUE_TYPES)
                offsets = _map(self._offsets_path(shard), (np.int64,))
                num_rows = rows_of_shard(shard, self._num_rows, self._shard_rows)
                # Only the first and the last offset are checked here, the others when they are read.
                is_complete = offsets.shape == (num_rows + 1,) and offsets[0] == 0
                if not is_complete or offsets[-1] != len(values):
                    raise ValueError(f"the offsets are not those of {num_rows} rows")
            opened = Ragged(values, offsets)
            self._open_shards[shard] = opened
        return opened


class ShardedVectors:
    """Side vectors of one split. A file is opened when one of its rows is read for the first time.

    Args:
        folder: folder of the split.
        num_rows: rows of the split.
        shard_rows: rows of every file but the last.
        width: W.
    """

    def __init__(self, folder: Path, num_rows: int, shard_rows: int, width: int) -> None:
        self._folder = folder
        self._num_rows = num_rows
        self._shard_rows = shard_rows
        self._width = width
        self._open_shards: dict[int, Array] = {}

    def take(self, rows: Int64Array) -> Float32Array:
        """float32 [rows, W], the vectors of the given rows in the given order."""
        ids = np.asarray(rows, np.int64)
        order = np.argsort(ids, kind="stable")
        vectors = np.empty((len(ids), self._width), np.float32)
        for piece in by_shard(ids[order], self._num_rows, self._shard_rows):
            opened = self._opened(piece.shard)
            vectors[order[piece.span]] = opened[piece.local_rows]
        if not np.isfinite(vectors).all():
            raise DataError(
                f"{self._folder} has side vectors with NaN or infinity; prepare the corpus again"
            )
        return vectors

    def _opened(self, shard: int) -> Array:
        """[rows, W], the mapped vectors of one file, in the type in which they are stored."""
        opened = self._open_shards.get(shard)
        if opened is None:
            path = self._folder / f"{shard_stem(shard)}.{VECTOR_SUFFIX}.npy"
            with readable(f"{path} cannot be read", "prepare the corpus again", DataError):
                opened = _map(path, VECTOR_TYPES, ndim=2)
                num_rows = rows_of_shard(shard, self._num_rows, self._shard_rows)
                if opened.shape != (num_rows, self._width):
                    raise ValueError(f"found {opened.shape}, expected {(num_rows, self._width)}")
            self._open_shards[shard] = opened
        return opened


def rows_of_shard(shard: int, num_rows: int, shard_rows: int) -> int:
    """Rows of one shard; only the last one may have fewer than `shard_rows`."""
    return min(shard_rows, num_rows - shard * shard_rows)


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """The part of some sorted rows that lies in one shard.

    Attributes:
        shard: number of the shard.
        span: positions of these rows among the sorted rows.
        local_rows: int64, row numbers inside the shard.
    """

    shard: int
    span: slice
    local_rows: Int64Array


def by_shard(sorted_rows: Int64Array, num_rows: int, shard_rows: int) -> list[ShardPiece]:
    """Cuts sorted row numbers where one shard ends and the next begins.

    Raises:
        IndexError: a row is out of range.
    """
    if len(sorted_rows) == 0:
        return []
    if sorted_rows[0] < 0 or sorted_rows[-1] >= num_rows:
        raise IndexError(
            f"found rows {sorted_rows[0]} to {sorted_rows[-1]}, expected 0 to {num_rows - 1}"
        )
    shards = sorted_rows // shard_rows
    local_rows = sorted_rows - shards * shard_rows
    # The rows are sorted, so the rows of one shard are neighbours.
    cuts = np.flatnonzero(np.diff(shards)) + 1
    pieces = []
    start = 0
    for stop in [*cuts.tolist(), len(shards)]:
        span = slice(start, stop)
        pieces.append(ShardPiece(int(shards[start]), span, local_rows[span]))
        start = stop
    return pieces


def _map(path: Path, dtypes: tuple[npt.DTypeLike, ...], ndim: int = 1) -> Array:
    """A read-only view of an .npy file that keeps no file descriptor open.

    `numpy.memmap` keeps one descriptor per file. Thousands of shards of an older corpus may be open
    at once, and the usual limit is 1,024 descriptors.

    Args:
        dtypes: the types that are accepted.
        ndim: number of axes.
    """
    # Imported here, because preparing a corpus needs no torch.
    import torch

    shape, dtype, start = array_header(path, dtypes, ndim)
    size = path.stat().st_size
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    _advise_random(data)
    view: Array = data[start:].view(dtype).reshape(shape)
    # Writing into the private mapping would silently change this process's copy only.
    view.flags.writeable = False
    return view


def _advise_random(data: Array) -> None:
    """Tells the operating system that a mapping is read at random places.

    Otherwise each access reads megabytes ahead. If the corpus is larger than the memory, these
    pages replace others that are still needed.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        address = ctypes.c_void_p(data.ctypes.data)
        # A failure is ignored, because the advice changes no result.
        madvise(address, ctypes.c_size_t(data.nbytes), mmap.MADV_RANDOM)
