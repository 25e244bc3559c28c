"""What `prepare --append` reads: rows of a corpus that are packed again, then those of new raw files.

Rows keep their places and labels their ids: new rows follow the old ones. Files whose shards are
full are linked (continued_writer.py). The last shard of a split, which may have room, is packed
again: its rows come first in what `AppendedFiles` reads, and the new rows follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet as pq

from xmcray.data.corpus import Card, Corpus, Split
from xmcray.data.formats import BadRow, OnBad, RawFiles, Row
from xmcray.data.shards import shard_stem
from xmcray.data.writer import PrepareConfig
from xmcray.errors import DataError
from xmcray.types import Int64Array, id_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendedFiles(RawFiles):
    """Reads the rows of unfinished shards of a corpus, then the new raw files.

    The format is that of the corpus, whose card keeps it; `path` and `splits` are those of the new
    files.

    Attributes:
        new: the new raw files.
        corpus: local folder of the corpus.
        card: of the corpus.
        label_ids: int64, source id of each row of the new label file.
    """

    new: RawFiles
    corpus: Path
    card: Card
    label_ids: Int64Array

    @property
    def name(self) -> str:
        """The name of the folder that the corpus was made from."""
        return self.card.source

    @property
    def num_labels(self) -> int:
        """Labels of the corpus and new ones, which have the ids after those of the corpus."""
        return max(self.card.num_labels, int(self.label_ids.max()) + 1)

    @property
    def appended_splits(self) -> tuple[str, ...]:
        """The splits that may get rows."""
        return ("labels", *self.splits)

    def first_shard(self, split: str, shard_rows: int) -> int:
        """Number of the first shard to pack: those before it are full."""
        return self.card.num_rows(split) // shard_rows

    def labels(self, on_bad: OnBad) -> Iterator[Row]:
        """The labels of the unfinished shard and the new ones; `row` is the source id."""
        yield from self._unfinished_labels()
        # The row of the new file that is read next, valid or not.
        next_row = 0

        def on_bad_label(bad: BadRow) -> None:
            nonlocal next_row
            # The corpus has reported those that it left out itself.
            if self._is_new_label(next_row):
                on_bad(bad)
            next_row += 1

        for label in self.new.labels(on_bad_label):
            next_row = label.row + 1
            if self._is_new_label(label.row):
                source_id = int(self.label_ids[label.row])
                yield dataclasses.replace(label, row=source_id)

    def _is_new_label(self, row: int) -> bool:
        """Whether the corpus lacks the label in a row of the new label file."""
        return bool(self.label_ids[row] >= self.card.num_labels)

    def queries(self, split: str, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
        """The queries of the unfinished shard, with negative rows, and the new ones."""
        num_old = self.card.num_rows(split)
        old_hashes = np.empty(0, np.int64)
        if num_old:
            old = self._open().split(split)
            yield from self._unfinished_queries(old)
            old_hashes = _uid_hashes(old)
        # Rows without names are named by their numbers in all raw files, one after the other.
        first_number = num_old + self.card.rejected.get(split, 0)
        places = self.new.places(split)
        for query in self.new.queries(split, len(self.label_ids), on_bad):
            if not query.has_uid:
                query = dataclasses.replace(query, uid=str(first_number + query.row))
            if _is_among(query.uid, old_hashes):
                reason = f"uid {query.uid[:80]!r} is that of a query of the corpus"
                on_bad(places.bad(query.row, reason))
                continue
            yield self._with_source_ids(query)

    def filters(self, split: str) -> Int64Array:
        """int64 [pairs, 2]: row of the split's new file, source label id."""
        pairs = self.new.filters(split)
        rows = pairs[:, 0]
        source_ids = self.label_ids[pairs[:, 1]]
        return np.stack([rows, source_ids], axis=1)

    def side_vectors(self, split: str) -> None:
        """None: `appended_files` refuses side vectors."""

    def side_width(self) -> int:
        """0, as there are none."""
        return 0

    def _open(self) -> Corpus:
        # A task of Ray Data opens the corpus in its own process. The driver has verified it before.
        return Corpus.open(self.corpus, verify=False)

    def unfinished(self, split: str) -> Int64Array:
        """Rows of the corpus in the shard that is not full, ascending."""
        shard_rows = self.card.shard_rows
        first_row = self.first_shard(split, shard_rows) * shard_rows
        return np.arange(first_row, self.card.num_rows(split))

    def _unfinished_labels(self) -> Iterator[Row]:
        """The labels of the shard that is not full."""
        labels = self._open().labels
        source_ids = self.unfinished("labels")
        uids = labels.uids(source_ids)
        texts = labels.texts(source_ids)
        for source_id, uid, text in zip(source_ids.tolist(), uids, texts, strict=True):
            yield Row(uid, text, row=source_id)

    def _unfinished_queries(self, split: Split) -> Iterator[Row]:
        """The queries of the shard that is not full."""
        rows = self.unfinished(split.name)
        if not len(rows):
            return
        uids = split.uids(rows)
        texts = split.texts(rows)
        positives = split.positives(rows)
        relevance = self._unfinished_relevance(split.name, len(rows))
        for place, (uid, text) in enumerate(zip(uids, texts, strict=True)):
            label_ids = tuple(positives[place].tolist())
            # Filter pairs name rows of the new file. Negative numbers keep them off these rows.
            row = place - len(rows)
            yield Row(uid, text, label_ids, relevance[place], row)

    def _unfinished_relevance(self, split: str, num_rows: int) -> list[tuple[float, ...] | None]:
        """The relevance of each query's positives in the shard that is not full, as in `Row`."""
        shard = self.first_shard(split, self.card.shard_rows)
        path = self.corpus / split / f"{shard_stem(shard)}.parquet"
        if "relevance" not in pq.read_schema(path).names:
            return [None] * num_rows
        column = pq.read_table(path, columns=["relevance"])["relevance"]
        relevance: list[tuple[float, ...] | None] = []
        for grades in column.to_pylist():
            is_graded = any(grade != 1 for grade in grades)
            relevance.append(tuple(grades) if is_graded else None)
        return relevance

    def _with_source_ids(self, query: Row) -> Row:
        """A query of the new files whose label ids are those of the corpus, ascending."""
        new_ids = np.asarray(query.label_ids, np.int64)
        source_ids = self.label_ids[new_ids]
        order = np.argsort(source_ids)
        label_ids = tuple(source_ids[order].tolist())
        # Each grade stays with its label.
        relevance = query.relevance
        if relevance is not None:
            relevance = tuple(relevance[place] for place in order)
        return dataclasses.replace(query, label_ids=label_ids, relevance=relevance)


def appended_files(
    corpus: Corpus,
    new: RawFiles,
    label_ids: Int64Array,
    titles_only: bool | None = None,
) -> AppendedFiles:
    """What is read to append new raw files to a corpus.

    Args:
        corpus: the corpus.
        new: the new raw files.
        label_ids: see `match_labels`.
        titles_only: whether the texts of the corpus are titles without contents, as its manifest
            says; None if it does not.

    Raises:
        DataError: there are side vectors, or texts of another kind.
    """
    card = corpus.card
    if card.side_width or new.side_width():
        owner = corpus.path if card.side_width else new.path
        raise DataError(
            f"{owner} has side vectors, which --append does not carry; prepare all raw files anew"
        )
    if card.format == new.format and new.titles_only is not None:
        _check_titles(corpus, new, titles_only)
    return AppendedFiles(
        format=card.format,
        path=new.path,
        splits=new.splits,
        new=new,
        corpus=corpus.path,
        card=card,
        label_ids=label_ids,
    )


def _check_titles(corpus: Corpus, new: RawFiles, titles_only: bool | None) -> None:
    """Raises DataError if either the corpus or the new files have titles without contents."""
    if titles_only is None and "title" in corpus.card.source.lower():
        titles_only = True
    # A corpus of an older release does not say it, and its source has a name without "title".
    if titles_only is None or titles_only == new.titles_only:
        return
    if titles_only:
        raise DataError(
            f"{corpus.path} has titles alone, but {new.path} would be read with contents; put 'titles'"
            " into the name of the folder"
        )
    raise DataError(
        f"{corpus.path} has titles with contents, but {new.path} would be read by titles alone, as its"
        " name says; take 'title' out of the name of the folder"
    )


def _uid_hashes(split: Split) -> Int64Array:
    """int64 [N], hashes of the uids of all rows, ascending: eight bytes each."""
    hashes = np.empty(len(split), np.int64)
    for rows in id_blocks(len(split)):
        hashes[rows] = [hash(uid) for uid in split.uids(rows)]
    hashes.sort()
    return hashes


def _is_among(uid: str, hashes: Int64Array) -> bool:
    """Whether the hash of a uid is among some, which are ascending."""
    uid_hash = hash(uid)
    place = int(np.searchsorted(hashes, uid_hash))
    return place < len(hashes) and int(hashes[place]) == uid_hash


def settings_of(card: Card, on_error: Literal["fail", "skip"]) -> PrepareConfig:
    """The settings that a corpus was prepared with; prompts are those of its tokenizer."""
    return PrepareConfig(
        max_len=card.max_len,
        label_max_len=card.label_max_len,
        tokenizer=card.tokenizer_name,
        vocab_size=card.vocab_size,
        on_error=on_error,
        seed=card.seed,
        propensity=(card.propensity_a, card.propensity_b),
        shard_rows=card.shard_rows,
        array_rows=card.rows_per_array_file,
    )
