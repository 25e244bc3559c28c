"""Rows of raw files in chunks of one shard each, and the packing of a chunk: `prepare` without Ray.

A chunk becomes exactly one shard, whose files are named by its number. So the order and parallelism
of the tasks that work on chunks cannot change a byte of the corpus.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from xmcray.data.formats import BadRow, RawFiles, Row
from xmcray.data.formats.base import Places
from xmcray.data.shards import Array, pack
from xmcray.data.text_keys import NO_KEYS, Keys, keys_by_name, text_keys
from xmcray.data.tokens import TextTokenizer
from xmcray.errors import DataError
from xmcray.types import BoolArray, Int64Array, Ragged

MAX_PENDING = 500_000  # rejected rows of one chunk, which are in memory with their reasons
SAMPLE_CHARACTERS = 2_000  # of one text, when the vocabulary is trained
NO_PAIRS: Int64Array = np.empty((0, 2), np.int64)
SCHEMA = pa.schema(
    [
        ("uid", pa.large_string()),
        ("text", pa.large_string()),
        ("row", pa.int64()),
        ("label_ids", pa.large_list(pa.int32())),
        ("relevance", pa.large_list(pa.float32())),
        ("has_zeros", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class RawChunk:
    """The rows of one shard as they were read; a table without rows only reports rejected ones.

    Attributes:
        split: "labels", "train" or "test".
        shard: its number within the split.
        rows: table of SCHEMA.
        rejected: rows left out since the previous chunk.
        vectors: float32 or float16 [rows, W], side vectors, if the raw files have them.
    """

    split: str
    shard: int
    rows: pa.Table
    rejected: list[BadRow]
    vectors: Array | None = None


@dataclass(slots=True)
class PackedShard:
    """A packed chunk: files to write, and what the card counts.

    Attributes:
        split: "labels", "train" or "test".
        number: of the shard within the split.
        files: contents by file name.
        num_rows: rows of the shard.
        num_tokens: tokens of all its rows.
        rejected: rows left out since the previous chunk.
        odd: legal but unusual rows by reason.
        keys: keys of texts by name, for `TextKeys.add`.
        label_ids: int64, the positives of all rows, one after another.
        filters: int64 [pairs, 2]: kept row of the split, source label id.
    """

    split: str
    number: int
    files: dict[str, bytes]
    num_rows: int
    num_tokens: int
    rejected: list[BadRow]
    odd: Counter[str]
    keys: dict[str, Keys]
    label_ids: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    filters: Int64Array = field(default_factory=lambda: NO_PAIRS)


class Rejects:
    """Handles malformed rows: raises at the first one, or collects all.

    Args:
        skip: collect them.
    """

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.pending: list[BadRow] = []
        self.count = 0

    def __call__(self, bad: BadRow) -> None:
        """Takes a malformed row.

        Raises:
            DataError: rows are not to be skipped, or there are too many since the last `drain`.
        """
        if not self.skip:
            raise DataError(f"{bad}; repair the row, or leave such rows out with --on-error skip")
        self.leave_out(bad)

    def leave_out(self, bad: BadRow) -> None:
        """Takes a row that is left out in any case.

        Raises:
            DataError: there are too many since the last `drain`.
        """
        if len(self.pending) >= MAX_PENDING:
            raise DataError(
                f"{bad}; so were {MAX_PENDING:,} other rows among the last ones, which is too many to leave"
                " out; is this the right format?"
            )
        self.pending.append(bad)
        self.count += 1

    def drain(self) -> list[BadRow]:
        """The rows collected since the last call."""
        drained = self.pending
        self.pending = []
        return drained


def read_chunks(
    source: RawFiles,
    split: str,
    num_labels: int,
    shard_rows: int,
    skip: bool,
    leaks: Keys = NO_KEYS,
) -> Iterator[RawChunk]:
    """All rows of a split (or "labels") in chunks of `shard_rows`.

    A label's id is its row in the raw file, so a rejected label leaves a row without text behind.

    Args:
        skip: leave malformed rows out instead of raising an error.
        leaks: keys of texts whose rows are left out.

    Raises:
        DataError: a malformed row that is not to be skipped, or files that cannot be read.
    """
    rejects = Rejects(skip)
    first_shard = source.first_shard(split, shard_rows)
    rows = _rows_of(source, split, num_labels, rejects)
    if split == "labels":
        rows = _without_holes(rows, rejects, first_shard * shard_rows)
    if len(leaks):
        rows = _without_leaks(rows, set(leaks.tolist()), source.places(split), rejects)
    raw_vectors = source.side_vectors(split)
    num_kept = 0
    for shard in itertools.count(first_shard):
        # A chunk is in memory as a whole; the reader goes on when the next one is wanted.
        block = list(itertools.islice(rows, shard_rows))
        vectors = None
        if raw_vectors is not None:
            file_rows = np.array([row.row for row in block], np.int64)
            vectors = raw_vectors.take(file_rows)
        num_kept += len(block)
        if len(block) < shard_rows and raw_vectors is not None:
            # Rejected labels are among the kept rows.
            num_rejected = 0 if split == "labels" else rejects.count
            raw_vectors.check_num_rows(num_kept + num_rejected)
        if block or rejects.pending:
            yield RawChunk(split, shard, _table(block), rejects.drain(), vectors)
        if len(block) < shard_rows:
            return


def _rows_of(source: RawFiles, split: str, num_labels: int, rejects: Rejects) -> Iterator[Row]:
    if split == "labels":
        return source.labels(rejects)
    return source.queries(split, num_labels, rejects)


def test_keys(source: RawFiles, num_labels: int, skip: bool, block_rows: int) -> Iterator[Keys]:
    """Yields the keys of the texts of all test queries, a block at a time.

    Args:
        skip: leave malformed rows out instead of raising an error.
        block_rows: queries of a block.
    """
    rejects = Rejects(skip)
    rows = _rows_of(source, "test", num_labels, rejects)
    while block := [row.text for row in itertools.islice(rows, block_rows)]:
        rejects.drain()  # they are reported when the rows are read for good
        yield text_keys(block)


def _without_leaks(
    rows: Iterator[Row], leaks: set[int], places: Places, rejects: Rejects
) -> Iterator[Row]:
    """The rows whose texts are not among some others."""
    for row in rows:
        if leaks.isdisjoint(text_keys([row.text]).tolist()):
            yield row
        else:
            reason = "its text is that of a test query"
            rejects.leave_out(places.bad(row.row, reason))


def _without_holes(labels: Iterator[Row], rejects: Rejects, first_row: int) -> Iterator[Row]:
    """The labels, with an empty one in the place of each rejected one."""
    expected_row = first_row
    num_valid = 0
    for label in labels:
        for row in range(expected_row, label.row):
            yield _rejected_label(row)
        yield label
        expected_row = label.row + 1
        num_valid += 1
    # Rejected labels at the end of the file.
    for row in range(expected_row, first_row + num_valid + rejects.count):
        yield _rejected_label(row)


def _rejected_label(row: int) -> Row:
    # Nothing of its raw row is kept, such as its side vector.
    return Row(uid=rejected_uid(row), text="", row=-1)


def rejected_uid(row: int) -> str:
    """The uid of a label in place of a malformed row."""
    return f"rejected:{row}"


def _table(rows: list[Row]) -> pa.Table:
    columns = {}
    for name in SCHEMA.names:
        columns[name] = [getattr(row, name) for row in rows]
    return pa.table(columns, schema=SCHEMA)


def survey(
    source: RawFiles,
    cap: int,
    seed: int,
    skip: bool,
    block_rows: int,
) -> Iterator[tuple[int, list[str]]]:
    """A uniform sample of the texts of labels and training queries, the same for the same seed.

    Yields (rows read since the last time, no texts) to show progress, and at the end (0, sample).

    Args:
        cap: largest number of texts in the sample.
        block_rows: rows read between two progress reports.
    """
    rejects = Rejects(skip)
    rng = np.random.default_rng([seed, 1])
    sample: list[str] = []
    num_seen = 0
    num_labels = 0
    for split in ("labels", "train"):
        rows = _rows_of(source, split, num_labels, rejects)
        while block := [row.text[:SAMPLE_CHARACTERS] for row in itertools.islice(rows, block_rows)]:
            rejects.drain()  # they are reported when the rows are read for good
            # The first `cap` texts fill the sample.
            num_free = min(cap - len(sample), len(block))
            sample += block[:num_free]
            # Algorithm R (Vitter, 1985), a block at a time: text i replaces a uniform place of
            # [0, i] if that lies in the sample.
            first = num_seen + num_free
            num_seen += len(block)
            places = rng.integers(0, np.arange(first, num_seen) + 1)
            for position in np.flatnonzero(places < cap).tolist():
                sample[places[position]] = block[num_free + position]
            yield len(block), []
        if split == "labels":
            num_labels = num_seen + rejects.count
    yield 0, sample


def pack_chunk(
    chunk: RawChunk,
    tokenizer: TextTokenizer,
    filters: Int64Array,
    num_labels: int,
    shard_rows: int,
) -> PackedShard:
    """Tokenises a chunk, takes filter pairs out of its positives and packs its files.

    Args:
        filters: int64 [pairs, 2] of the split: row of the raw file, source label id; sorted.
        shard_rows: rows of every shard but the last.
    """
    # Labels have a length limit of their own and neither positives nor filter pairs.
    texts: list[str] = chunk.rows["text"].to_pylist()
    is_labels = chunk.split == "labels"
    tokens = tokenizer.encode_labels(texts) if is_labels else tokenizer.encode(texts)
    num_empty = sum(not text.strip() for text in texts)
    shard = PackedShard(
        split=chunk.split,
        number=chunk.shard,
        files={},
        num_rows=len(texts),
        num_tokens=len(tokens.values),
        rejected=chunk.rejected,
        odd=Counter({f"{chunk.split}: no text": num_empty}),
        keys=keys_by_name(chunk.split, texts),
    )
    table = chunk.rows.select(["uid", "text"])
    positives = None
    if not is_labels:
        pairs = _filter_pairs(chunk.rows, filters)
        raw_positives = _raw_positives(chunk.rows)
        keep = _not_filtered(raw_positives, pairs, num_labels)
        positives = raw_positives.where(keep)
        shard.label_ids = positives.values
        # Places within the chunk become rows of the split.
        shard.filters = pairs + np.array([chunk.shard * shard_rows, 0])
        had_none = raw_positives.lengths == 0
        shard.odd[f"{chunk.split}: no positives"] = int(had_none.sum())
        all_filtered = ~had_none & (positives.lengths == 0)
        shard.odd[f"{chunk.split}: all positives filtered"] = int(all_filtered.sum())
        has_zeros = np.asarray(chunk.rows["has_zeros"])
        shard.odd[f"{chunk.split}: labels of weight 0 left out"] = int(has_zeros.sum())
        table = _with_relevance(table, chunk.rows, raw_positives, keep, positives)
    if texts:
        # A chunk without rows only reports rejected ones.
        shard.files = pack(
            chunk.shard, table, tokens, tokenizer.vocab_size, positives, chunk.vectors
        )
    return shard


def _raw_positives(rows: pa.Table) -> Ragged:
    """The label ids of the raw file, filter pairs included."""
    lists = rows["label_ids"].combine_chunks()
    values = np.asarray(lists.flatten()).astype(np.int64)
    return Ragged(values, np.asarray(lists.offsets).astype(np.int64))


def _filter_pairs(rows: pa.Table, filters: Int64Array) -> Int64Array:
    """int64 [pairs, 2], filter pairs of a chunk: place within the chunk, source label id."""
    file_rows = np.asarray(rows["row"])
    if len(file_rows) == 0:
        return NO_PAIRS
    # Pairs and rows of the chunk are both sorted by row of the raw file, so two searches find the
    # pairs of the chunk among those of the whole split.
    first = np.searchsorted(filters[:, 0], file_rows[0], side="left")
    last = np.searchsorted(filters[:, 0], file_rows[-1], side="right")
    nearby = filters[first:last]
    places = np.searchsorted(file_rows, nearby[:, 0])
    # A rejected row has no place in the chunk, and its pairs go with it.
    present = file_rows[places] == nearby[:, 0]
    return np.stack([places[present], nearby[present, 1]], axis=1)


def _not_filtered(
    raw_positives: Ragged,
    pairs: Int64Array,
    num_labels: int,
) -> BoolArray:
    """bool per raw positive: whether it is no filter pair."""
    # One number per (row, label) pair makes membership a single look-up. Neither array has a row
    # or label out of range, so no two pairs have the same number.
    positive_keys = raw_positives.pairs(num_labels)
    pair_keys = pairs[:, 0] * num_labels + pairs[:, 1]
    return ~np.isin(positive_keys, pair_keys)


def _with_relevance(
    table: pa.Table,
    rows: pa.Table,
    raw_positives: Ragged,
    keep: BoolArray,
    positives: Ragged,
) -> pa.Table:
    """`table` with the relevance of each remaining positive, if any row of the chunk has it."""
    relevance = rows["relevance"].combine_chunks()
    if relevance.null_count == len(relevance):
        return table
    # In a row without relevance each positive counts as 1.
    values = np.ones(len(keep), np.float32)
    is_graded_row = np.asarray(relevance.is_valid())
    is_graded = np.repeat(is_graded_row, raw_positives.lengths)
    values[is_graded] = np.asarray(relevance.flatten())
    column = pa.LargeListArray.from_arrays(
        pa.array(positives.offsets),
        pa.array(values[keep]),
    )
    return table.append_column("relevance", column)
