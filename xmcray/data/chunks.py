"""Rows of raw files in chunks of one shard each, and the packing of a chunk: the part of `prepare` that needs no Ray.

A chunk becomes exactly one shard, whose files are named by its number. So order and parallelism of the tasks that
work on chunks cannot change a byte of the corpus.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from xmcray.data.formats import BadRow, Row, Source
from xmcray.data.shards import pack
from xmcray.data.tokens import TextTokenizer
from xmcray.errors import DataError
from xmcray.types import Int64Array, Ragged

SAMPLE_CHARACTERS = 2_000  # of one text, when the vocabulary is trained
SCHEMA = pa.schema(
    [
        ("uid", pa.large_string()),
        ("text", pa.large_string()),
        ("row", pa.int64()),
        ("label_ids", pa.large_list(pa.int32())),
        ("relevance", pa.large_list(pa.float32())),
    ]
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of one shard as a table of SCHEMA, or only what a read has to report.

    Attributes:
        split: "labels", "train" or "test".
        shard: its number within the split.
        rejected: rows left out since the previous chunk.
    """

    split: str
    shard: int
    rows: pa.Table
    rejected: list[BadRow]


@dataclass(slots=True)
class Shard:
    """A packed chunk: files to write, and what the card counts.

    Attributes:
        files: contents by file name.
        num_rows, num_tokens: sizes.
        label_ids: int64, the positives of all rows, one after another.
        filters: int64 [pairs, 2]: kept row of the split, source label id.
        odd: legal but unusual rows by reason.
    """

    split: str
    files: dict[str, bytes]
    num_rows: int
    num_tokens: int
    label_ids: Int64Array
    filters: Int64Array
    rejected: list[BadRow]
    odd: Counter[str] = field(default_factory=Counter)


class Rejects:
    """What becomes of malformed rows: the first one stops the reading, or all are collected."""

    def __init__(self, skip: bool) -> None:
        self.skip, self.pending, self.count = skip, list[BadRow](), 0

    def __call__(self, bad: BadRow) -> None:
        """Takes note of a malformed row.

        Raises:
            DataError: rows are not to be skipped.
        """
        if not self.skip:
            raise DataError(f"{bad}; repair the row, or leave such rows out with --on-error skip")
        self.pending.append(bad)
        self.count += 1

    def drain(self) -> list[BadRow]:
        """The rows collected since the last call."""
        taken, self.pending = self.pending, []
        return taken


def read_chunks(
    source: Source, split: str, num_labels: int, shard_rows: int, skip: bool
) -> Iterator[Chunk]:
    """All rows of a split (or "labels") in chunks of `shard_rows`.

    A label's id is its row in the raw file, so a rejected label leaves a row without text behind.

    Raises:
        DataError: a malformed row that is not to be skipped, or files that cannot be read.
    """
    rejects = Rejects(skip)
    if split == "labels":
        rows = _without_holes(source.labels(rejects), rejects)
    else:
        rows = source.queries(split, num_labels, rejects)
    for shard in itertools.count():
        block = list(itertools.islice(rows, shard_rows))
        if block or rejects.pending:
            yield Chunk(split, shard, _table(block), rejects.drain())
        if len(block) < shard_rows:
            return


def survey(
    source: Source, cap: int, seed: int, skip: bool, block_rows: int
) -> Iterator[tuple[int, list[str]]]:
    """A uniform sample of the texts of labels and training queries, the same for the same seed.

    Yields (rows read since the last time, no texts) as a sign of life, and at the end (0, at most `cap` texts).
    """
    rejects, rng = Rejects(skip), np.random.default_rng([seed, 1])
    sample: list[str] = []
    seen = num_labels = 0
    for split in ("labels", "train"):
        rows = (
            source.labels(rejects)
            if split == "labels"
            else source.queries(split, num_labels, rejects)
        )
        while block := [row.text[:SAMPLE_CHARACTERS] for row in itertools.islice(rows, block_rows)]:
            free = block[: cap - len(sample)]
            sample += free
            first = seen + len(free)
            seen += len(block)
            places = rng.integers(
                0, np.arange(first, seen) + 1
            )  # Algorithm R (Vitter, 1985), a block at a time
            for position in np.flatnonzero(places < cap).tolist():
                sample[places[position]] = block[len(free) + position]
            yield len(block), []
        if split == "labels":
            num_labels = seen + rejects.count
    yield 0, sample


def pack_chunk(
    chunk: Chunk, tokenizer: TextTokenizer, filters: Int64Array, num_labels: int, shard_rows: int
) -> Shard:
    """Tokenises a chunk, takes filter pairs out of its positives and packs its files.

    Args:
        filters: int64 [pairs, 2] of the split: row of the raw file, source label id; sorted.
    """
    texts: list[str] = chunk.rows["text"].to_pylist()
    empty = sum(not text.strip() for text in texts)
    if chunk.split == "labels":
        tokens = tokenizer.encode(texts, tokenizer.label_max_len)
        shard = Shard(chunk.split, {}, len(texts), len(tokens.values), *_nothing(), chunk.rejected)
        shard.odd["labels: no text"] = empty
        table, labels = chunk.rows.select(["uid", "text"]), None
    else:
        tokens = tokenizer.encode(texts)
        labels, keep, pairs = _positives(chunk.rows, filters, num_labels)
        had = np.diff(np.asarray(chunk.rows["label_ids"].combine_chunks().offsets))
        pairs[:, 0] += chunk.shard * shard_rows
        shard = Shard(
            chunk.split, {}, len(texts), len(tokens.values), labels.values, pairs, chunk.rejected
        )
        shard.odd[f"{chunk.split}: no text"] = empty
        shard.odd[f"{chunk.split}: no positives"] = int((had == 0).sum())
        shard.odd[f"{chunk.split}: all positives filtered"] = int(
            ((had > 0) & (labels.lengths == 0)).sum()
        )
        table = _with_relevance(chunk.rows, keep, labels)
    if texts:
        shard.files = pack(chunk.shard, table, tokens, tokenizer.vocab_size, labels)
    return shard


def _nothing() -> tuple[Int64Array, Int64Array]:
    return np.empty(0, np.int64), np.empty((0, 2), np.int64)


def _without_holes(rows: Iterator[Row], rejects: Rejects) -> Iterator[Row]:
    expected = kept = 0
    for row in rows:
        yield from map(_hole, range(expected, row.row))
        yield row
        expected, kept = row.row + 1, kept + 1
    yield from map(_hole, range(expected, kept + rejects.count))


def _hole(row: int) -> Row:
    return Row(uid=f"rejected:{row}", text="", row=row)


def _table(rows: list[Row]) -> pa.Table:
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    return pa.table(columns, schema=SCHEMA)


def _positives(
    rows: pa.Table, filters: Int64Array, num_labels: int
) -> tuple[Ragged, np.ndarray, Int64Array]:
    """Positives without filter pairs, which of the raw ones remain, and the filter pairs as (place, label)."""
    lists = rows["label_ids"].combine_chunks()
    raw = Ragged(
        np.asarray(lists.flatten()).astype(np.int64), np.asarray(lists.offsets).astype(np.int64)
    )
    file_rows = np.asarray(rows["row"])
    pairs = np.empty((0, 2), np.int64)
    if len(file_rows):
        first, last = np.searchsorted(filters[:, 0], [file_rows[0], file_rows[-1] + 1])
        near = filters[first:last]
        places = np.searchsorted(file_rows, near[:, 0])
        kept = file_rows[places] == near[:, 0]  # pairs of rejected rows go with their row
        pairs = np.stack([places[kept], near[kept, 1]], axis=1)
    row_ids = raw.row_ids
    keep = ~np.isin(row_ids * num_labels + raw.values, pairs[:, 0] * num_labels + pairs[:, 1])
    lengths = np.bincount(row_ids[keep], minlength=len(raw))
    return (
        Ragged(raw.values[keep], np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])),
        keep,
        pairs,
    )


def _with_relevance(rows: pa.Table, keep: np.ndarray, labels: Ragged) -> pa.Table:
    """uid and text, and relevance per remaining positive if any row of the chunk has it."""
    relevance = rows["relevance"].combine_chunks()
    table = rows.select(["uid", "text"])
    if relevance.null_count == len(relevance):
        return table
    lengths = np.diff(np.asarray(rows["label_ids"].combine_chunks().offsets))
    graded = np.repeat(np.asarray(relevance.is_valid()), lengths)
    values = np.ones(len(keep), np.float32)  # a row without relevance counts each positive as 1
    values[graded] = np.asarray(relevance.flatten())
    column = pa.LargeListArray.from_arrays(pa.array(labels.offsets), pa.array(values[keep]))
    return table.append_column("relevance", column)
