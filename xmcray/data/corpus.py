"""A prepared corpus: tokens, positives, filters, texts and counts, mapped and read by row.

    card.yaml                         Card: counts, averages, histogram, odd rows, propensity constants
    {train,test,labels}/NNNNN.*       token ids, positives (not in labels/), texts and perhaps side
                                      vectors; see data/shards.py
    filters/{train,test}.npy          int64 [pairs, 2]: row, source label id; sorted
    label_order.npy                   int64 [L]: internal id -> source id, a seeded permutation
    label_rank.npy                    int64 [L]: source id -> internal id, its inverse
    removed_labels.npy                int64, ascending: source ids of labels that are no answers any
                                      more; absent if there are none
    train_counts.npy                  int64 [L] by source id: training queries that carry the label
    tokenizer/                        see data/tokens.py

A *source* label id is the label's place in the raw files. The reader opens a shard when one of its
rows is read first. Arrays with a value for each row or label are mapped, so the processes of a
machine share one copy. Older corpora, without label_rank.npy and with one array file for each
shard of texts, are read too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from xmcray import config as configs
from xmcray.config import check_range
from xmcray.data.checked_files import read_array, read_texts
from xmcray.data.shards import ShardedRows, ShardedVectors, by_shard, rows_of_shard, shard_stem
from xmcray.data.tokens import TextTokenizer
from xmcray.errors import DataError, readable
from xmcray.storage.artifact import open_artifact
from xmcray.storage.remote import is_url
from xmcray.types import Float32Array, Int64Array, Ragged, are_ids, find_sorted, spans

KIND = "corpus"
REMOVED = "removed_labels.npy"
# Lowest number of training queries of each bin of the frequency histogram, and the bin's name.
FREQUENCY_BINS = {
    0: "0",
    1: "1",
    2: "2-5",
    6: "6-10",
    11: "11-50",
    51: "51-100",
    101: "101-1000",
    1001: ">1000",
}
OPEN_TEXT_SHARDS = 8
_LABELS_AT_ONCE = 1 << 20  # whose order is checked at once
# More than any corpus has: a card with more is damaged.
MAX_ROWS = 1 << 40
MAX_VOCAB = 1 << 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a corpus holds.

    Attributes:
        source: name of the raw files.
        format: how they were read.
        num_train: training queries that were kept.
        num_test: test queries that were kept.
        num_labels: labels, rejected ones included.
        propensity_a: constant A of the propensity model (Jain et al., KDD 2016).
        propensity_b: its constant B.
        tokenizer: "wordpiece" or "transformer".
        tokenizer_name: the tokenizer as the user named it.
        seed: of the label permutation and the vocabulary sample.
        shard_rows: rows of every file of texts but a split's last.
        array_rows: the same of files of token and label ids; 0 in older corpora: as shard_rows.
        side_width: numbers of a side vector; 0 if the corpus has none, which the file leaves out.
        averages: labels per query, queries per label, tokens per query and per label.
        frequency: number of labels by number of training queries, bins as "2-5".
        odd: kept rows that are legal but unusual, by reason.
        rejected: rows left out under on_error="skip", by split; the reasons are in rejected.jsonl.
    """

    name: str
    source: str
    format: str
    licence: str
    num_train: int
    num_test: int
    num_labels: int
    propensity_a: float
    propensity_b: float
    max_len: int
    label_max_len: int
    tokenizer: str
    tokenizer_name: str
    vocab_size: int
    pad_id: int
    seed: int
    shard_rows: int
    array_rows: int = 0
    side_width: int = 0
    averages: dict[str, float]
    frequency: dict[str, int]
    odd: dict[str, int]
    rejected: dict[str, int]

    def save(self, path: Path) -> None:
        """Writes the card as YAML, fields in the order of this class."""
        values = dataclasses.asdict(self)
        if not self.side_width:
            # As before there were side vectors, so that equal corpora keep equal hashes.
            del values["side_width"]
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        path.write_text(text, "utf-8")

    @classmethod
    def load(cls, path: Path) -> Card:
        """Reads what `save` wrote.

        Raises:
            DataError: the card lacks a field or has an unknown one.
        """
        failure = f"{path} is not a corpus card of this release"
        with readable(failure, "prepare the corpus again", DataError):
            card = configs.build(cls, yaml.safe_load(path.read_text("utf-8")))
            for name in ("num_train", "num_test"):
                check_range(name, getattr(card, name), 0, MAX_ROWS)
            check_range("num_labels", card.num_labels, 1, MAX_ROWS)
            check_range("shard_rows", card.shard_rows, 1, MAX_ROWS)
            check_range("array_rows", card.array_rows, 0, MAX_ROWS)
            check_range("side_width", card.side_width, 0)
            check_range("vocab_size", card.vocab_size, 1, MAX_VOCAB)
        return card

    def num_rows(self, split: str) -> int:
        """Rows of "train", "test" or "labels"."""
        return {"train": self.num_train, "test": self.num_test, "labels": self.num_labels}[split]

    @property
    def rows_per_array_file(self) -> int:
        """Rows of every file of token or label ids but a split's last."""
        return self.array_rows or self.shard_rows


class Corpus:
    """A corpus on disk; see the module's text for its files.

    Attributes:
        origin: where it was opened, an absolute path or a URL; any node can open it there.
        path: local folder (a URL was copied to the cache).
        sha256: names the content.
        labels: the rows of "labels", by source id.
        label_order: int64 [L], internal id -> source id.
        label_rank: int64 [L], source id -> internal id.
        train_counts: int64 [L] by source id, training queries that carry the label; label texts do
            not count.
        removed_labels: int64, ascending: source ids of labels that are no answers any more.
    """

    def __init__(self, origin: str, path: Path, sha256: str, verify: bool = False) -> None:
        self.origin = origin
        self.path = path
        self.sha256 = sha256
        self.card = Card.load(path / "card.yaml")
        num_labels = self.card.num_labels
        self.label_order = _label_array(path / "label_order.npy", num_labels)
        self.train_counts = _label_array(path / "train_counts.npy", num_labels)
        self.removed_labels = _removed_labels(path, num_labels)
        rank_path = path / "label_rank.npy"
        if not rank_path.is_file():
            with _readable(path / "label_order.npy"):
                self.label_rank = inverse_permutation(self.label_order)
        else:
            self.label_rank = _label_array(rank_path, num_labels)
            if verify:
                _check_inverse(self.label_order, self.label_rank, path)
        if verify and self.train_counts.min() < 0:
            raise DataError(f"{path}/train_counts.npy has a negative count; prepare it again")
        self.labels = Split(path, "labels", self.card)
        self._splits: dict[str, Split] = {}
        if verify:
            for name in ("labels", "train", "test"):
                Split(path, name, self.card).check_num_rows()

    @classmethod
    def open(cls, path: str | Path, verify: bool = True) -> Corpus:
        """Opens a corpus folder or URL.

        Args:
            verify: compare every file's SHA-256; without it only presence and sizes. Workers skip
                it because the driver has verified the corpus.
        Raises:
            StorageError: not a complete corpus, or a file was altered.
        """
        # A URL is copied to the cache first; the origin stays the URL, which every node can open.
        folder, manifest = open_artifact(path, KIND, contents=verify)
        origin = str(path) if is_url(path) else str(folder)
        return cls(origin, folder, manifest.sha256, verify)

    def __fspath__(self) -> str:
        return self.origin

    def split(self, name: str) -> Split:
        """The rows of "train" or "test".

        Raises:
            DataError: the corpus has no such split.
        """
        present = [split for split in ("train", "test") if self.card.num_rows(split)]
        if name not in present:
            raise DataError(f"corpus {self.path} has no split {name!r}; it has {present}")
        # A split is opened at its first use: many commands need only one of them.
        if name not in self._splits:
            self._splits[name] = Split(self.path, name, self.card)
        return self._splits[name]

    def answerable(self, labels: Ragged) -> Ragged:
        """Lists of source ids without the labels that were removed."""
        if not len(self.removed_labels):
            return labels
        return labels.where(~np.isin(labels.values, self.removed_labels))

    def label_tokens(self, source_ids: Int64Array) -> Ragged:
        """Token ids of label texts."""
        return self.labels.tokens(source_ids)

    @functools.cached_property
    def _labels_without_tokens(self) -> Int64Array:
        return self.labels.short_texts(self.tokenizer().num_special_tokens)

    def labels_without_tokens(self) -> Int64Array:
        """int64, source ids of labels whose text has no token, ascending.

        The special tokens that a transformer's tokenizer adds to each text do not count.
        """
        return self._labels_without_tokens

    def label_texts(self, source_ids: Int64Array) -> list[str]:
        """Texts of labels."""
        return self.labels.texts(source_ids)

    def label_uids(self, source_ids: Int64Array) -> list[str]:
        """Names of labels in the raw files."""
        return self.labels.uids(source_ids)

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer the corpus was made with."""
        tokenizer = TextTokenizer.load(self.path / "tokenizer")
        if tokenizer.vocab_size != self.card.vocab_size:
            raise DataError(
                f"the tokenizer of {self.path} has {tokenizer.vocab_size} tokens, its card says"
                f" {self.card.vocab_size}; prepare the corpus again"
            )
        return tokenizer


class Split:
    """The rows of one split, by row number: kept rows of the raw file, counted from 0."""

    def __init__(self, corpus: Path, name: str, card: Card) -> None:
        self.name = name
        self._corpus = corpus
        self._num_rows = card.num_rows(name)
        self._num_labels = card.num_labels
        self._shard_rows = card.shard_rows
        folder = corpus / name
        array_rows = card.rows_per_array_file
        self._tokens = ShardedRows(
            folder, "token", self._num_rows, array_rows, limit=card.vocab_size
        )
        self._labels = ShardedRows(
            folder, "label", self._num_rows, array_rows, limit=card.num_labels
        )
        self._vectors: ShardedVectors | None = None
        # Some splits may have none.
        if card.side_width and (folder / f"{shard_stem(0)}.vectors.npy").is_file():
            self._vectors = ShardedVectors(folder, self._num_rows, array_rows, card.side_width)
        # A cache of its own: a shard of texts is large, so only the last few stay open.
        self._table = functools.lru_cache(maxsize=OPEN_TEXT_SHARDS)(self._read_table)

    def __len__(self) -> int:
        return self._num_rows

    def tokens(self, rows: Int64Array) -> Ragged:
        """Token ids of rows, in the order of `rows`, with their side vectors if there are any."""
        return self._tokens.take(rows).with_vectors(self.side_vectors(rows))

    def side_vectors(self, rows: Int64Array) -> Float32Array | None:
        """float32 [rows, W], side vectors of rows, in their order; None if the split has none."""
        return None if self._vectors is None else self._vectors.take(rows)

    def check_num_rows(self) -> None:
        """Raises DataError if the files have another number of rows than the card says."""
        self._tokens.check_num_rows()

    def num_positives(self) -> Int64Array:
        """int64 [rows], positives of every row, without reading them."""
        return self._labels.lengths()

    def short_texts(self, max_tokens: int) -> Int64Array:
        """int64, rows whose text has at most so many tokens, ascending."""
        return self._tokens.short_rows(max_tokens)

    @functools.cached_property
    def rows_without_positives(self) -> Int64Array:
        """int64, rows without a positive, ascending."""
        return self._labels.short_rows()

    def positives(self, rows: Int64Array) -> Ragged:
        """Source label ids of rows, ascending, without filter pairs."""
        return self._labels.take(rows)

    def relevance(self) -> Float32Array | None:
        """float32, of every positive of every row, in order; None if the raw files have none.

        A positive without a number counts as 1.
        """
        num_positives = self.num_positives()
        values: list[Float32Array] = []
        is_graded = False
        num_shards = math.ceil(self._num_rows / self._shard_rows)
        for shard in range(num_shards):
            first = shard * self._shard_rows
            count = int(num_positives[first : first + self._shard_rows].sum())
            own_values = np.ones(count, np.float32)
            path = self._corpus / self.name / f"{shard_stem(shard)}.parquet"
            with _readable(path):
                if "relevance" in pq.read_schema(path).names:
                    is_graded = True
                    column = pq.read_table(path, columns=["relevance"])["relevance"]
                    own_values = np.asarray(column.combine_chunks().flatten(), np.float32)
                    if len(own_values) != count or not np.isfinite(own_values).all():
                        raise ValueError(f"expected {count} finite numbers of relevance")
            values.append(own_values)
        return np.concatenate(values) if is_graded else None

    @property
    def has_filters(self) -> bool:
        """Whether any row has a filter."""
        filtered_U, _ = self._filters
        return len(filtered_U) > 0

    def filters(self, rows: Int64Array) -> Ragged:
        """Source ids of labels that must not be answered for these rows, ascending.

        Such a label is the query itself.
        """
        if not self.has_filters:
            return Ragged.empty(len(rows))
        filtered_U, labels_U = self._filters
        # `np.isin` would read all of `filtered_U` for each batch.
        places, is_filtered = find_sorted(filtered_U, rows)
        # Rows without a filter share the empty row at the end.
        places[~is_filtered] = len(filtered_U)
        return labels_U.take(places)

    def texts(self, rows: Int64Array) -> list[str]:
        """Raw texts of rows."""
        return self._column("text", rows)

    def uids(self, rows: Int64Array) -> list[str]:
        """Names of rows in the raw files."""
        return self._column("uid", rows)

    @functools.cached_property
    def _filters(self) -> tuple[Int64Array, Ragged]:
        """The rows that have filters, ascending, and the labels of each; then one row of none.

        Their size is that of the pairs, because most corpora have millions of rows and no filter.
        """
        path = self._corpus / "filters" / f"{self.name}.npy"
        if not path.is_file():
            return np.empty(0, np.int64), Ragged.empty(1)
        with _readable(path):
            rows, labels = read_array(path, np.int64, ndim=2).T
            # Sorted rows are not negative if the first one is not.
            are_rows = np.all(np.diff(rows) >= 0) and not np.any(rows[:1] < 0)
            if not are_rows or not are_ids(labels, self._num_labels):
                raise ValueError("expected pairs of a row and a label, sorted")
        filtered_U, first_pair_U = np.unique(rows, return_index=True)
        # Two ends: that of the last row, and that of the row of none after it.
        offsets = np.append(first_pair_U, [len(rows), len(rows)])
        return filtered_U, Ragged(labels, offsets)

    def _column(self, name: str, rows: Int64Array) -> list[str]:
        """Values of a text column, in the order of `rows`."""
        ids = np.asarray(rows, np.int64)
        order = np.argsort(ids, kind="stable")
        # Rows are read in ascending order, shard by shard, and put back into the caller's order.
        values = np.empty(len(ids), object)
        for piece in by_shard(ids[order], self._num_rows, self._shard_rows):
            column = self._table(piece.shard)[name].take(piece.local_rows)
            values[order[piece.span]] = column.to_pylist()
        texts: list[str] = values.tolist()
        return texts

    def _read_table(self, shard: int) -> pa.Table:
        path = self._corpus / self.name / f"{shard_stem(shard)}.parquet"
        num_rows = rows_of_shard(shard, self._num_rows, self._shard_rows)
        with _readable(path):
            return read_texts(path, ("uid", "text"), num_rows)


def _readable(path: Path) -> contextlib.AbstractContextManager[None]:
    return readable(f"{path} cannot be read", "prepare the corpus again", DataError)


def _label_array(path: Path, num_labels: int) -> Int64Array:
    """An int64 number for each label, in pages that all processes of the machine share."""
    with _readable(path):
        array = read_array(path, np.int64, mapped=True)
        if array.shape != (num_labels,):
            raise ValueError(f"found {array.shape}, expected {num_labels} numbers")
    return np.asarray(array)


def _removed_labels(folder: Path, num_labels: int) -> Int64Array:
    """Source ids of labels that are no answers any more."""
    path = folder / REMOVED
    if not path.is_file():
        return np.empty(0, np.int64)
    with _readable(path):
        removed = read_array(path, np.int64)
        if not np.array_equal(removed, np.unique(removed.clip(0, num_labels - 1))):
            raise ValueError(f"expected ascending ids below {num_labels}")
    return np.asarray(removed)


def _check_inverse(order: Int64Array, rank: Int64Array, folder: Path) -> None:
    """Raises DataError unless two arrays of equal length are permutations, each the other's inverse."""
    num_labels = len(order)
    for span in spans(num_labels, _LABELS_AT_ONCE):
        numbers = order[span]
        is_in_range = are_ids(numbers, num_labels)
        # Numbers that have an inverse are distinct.
        places = np.arange(span.start, span.stop)
        if not is_in_range or not np.array_equal(rank[numbers], places):
            raise DataError(
                f"{folder}: label_rank.npy is not the inverse of label_order.npy; prepare it again"
            )


def inverse_permutation(order: Int64Array) -> Int64Array:
    """The inverse of a permutation. Sorting would take longer, and there may be millions of labels.

    Raises:
        ValueError, IndexError: a number occurs twice or is out of range.
    """
    rank = np.full(len(order), -1, np.int64)
    if order.min() >= 0:
        rank[order] = np.arange(len(order))
    # A number that occurs twice leaves another one out.
    if rank.min() < 0:
        raise ValueError(f"expected a permutation of {len(order)} numbers")
    return rank


def frequency_histogram(counts: Int64Array) -> dict[str, int]:
    """Number of labels per bin of training queries: {"0": ..., "1": ..., "2-5": ..., ">1000": ...}."""
    lowest = np.array(list(FREQUENCY_BINS))
    # The bin of a count is the last one whose lowest number is not above it.
    bins = np.searchsorted(lowest, counts, side="right") - 1
    totals = np.bincount(bins, minlength=len(lowest)).tolist()
    return dict(zip(FREQUENCY_BINS.values(), totals, strict=True))
