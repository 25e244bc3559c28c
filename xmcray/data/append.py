"""Appends new raw files to a corpus: what `prepare --append` reads and what it keeps.

Rows keep their places and labels their ids: new rows follow the old ones. Files whose shards are
full are linked. The last shard of a split, which may have room, is packed again: its rows come
first in what `AppendedFiles` reads, and the new rows follow.

A label of the new files is the one of the corpus that has its uid, or a new one. Labels that
`removed_labels.jsonl` next to the new files names by uid keep their ids, but no bundle answers them
any more.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet as pq

from xmcray.data.array_files import ArrayFiles
from xmcray.data.checked_files import read_array
from xmcray.data.chunks import Rejects, rejected_uid
from xmcray.data.corpus import REMOVED, Card, Corpus, Split
from xmcray.data.formats import BadRow, OnBad, RawFiles, Row
from xmcray.data.formats.base import find, read_lines
from xmcray.data.rejected import SPLITS, earlier_rejected
from xmcray.data.shards import ARRAY_SUFFIXES, shard_stem
from xmcray.data.text_keys import COUNTED, keys_by_name
from xmcray.data.writer import CorpusWriter, PrepareConfig
from xmcray.errors import DataError, readable
from xmcray.types import Int64Array, id_blocks

REMOVED_UIDS = "removed_labels.jsonl"
# Counts of odd rows that depend on all queries; the writer counts them anew.
_COUNTED_ANEW = ("labels: never seen", "labels: seen only in test", *COUNTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendedFiles(RawFiles):
    """Reads the rows of unfinished shards of a corpus, then the new raw files.

    Format and path are those of the corpus, whose card keeps them; `splits` are those of the new files.

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
        old = self._open().labels
        old_ids = self.unfinished("labels")
        uids = old.uids(old_ids)
        texts = old.texts(old_ids)
        for row, uid, text in zip(old_ids.tolist(), uids, texts, strict=True):
            yield Row(uid, text, row=row)
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
            yield from self._unfinished_rows(old)
            old_hashes = _uid_hashes(old)
        # Rows without names are named by their numbers in all raw files, one after the other.
        first_number = num_old + self.card.rejected.get(split, 0)
        for query in self.new.queries(split, len(self.label_ids), on_bad):
            if not query.has_uid:
                query = dataclasses.replace(query, uid=str(first_number + query.row))
            if _is_among(query.uid, old_hashes):
                file = str(self.new.path / split)
                reason = f"uid {query.uid[:80]!r} is that of a query of the corpus"
                on_bad(BadRow(file, query.row + 1, reason))
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

    def _unfinished_rows(self, split: Split) -> Iterator[Row]:
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


def appended_files(corpus: Corpus, new: RawFiles, label_ids: Int64Array) -> AppendedFiles:
    """What is read to append new raw files to a corpus.

    Args:
        corpus: the corpus.
        new: the new raw files.
        label_ids: see `match_labels`.

    Raises:
        DataError: there are side vectors.
    """
    card = corpus.card
    if card.side_width or new.side_width():
        owner = corpus.path if card.side_width else new.path
        raise DataError(
            f"{owner} has side vectors, which --append does not carry; prepare all raw files anew"
        )
    return AppendedFiles(
        format=card.format,
        path=Path(card.source),
        splits=new.splits,
        new=new,
        corpus=corpus.path,
        card=card,
        label_ids=label_ids,
    )


def match_labels(corpus: Corpus, new: RawFiles, skip: bool) -> Int64Array:
    """The source id of each row of the new label file.

    A row with the uid of a label of the corpus is that label. All others, malformed ones included,
    get the ids after those of the corpus, in their order. A file without uids repeats the labels of
    the corpus, so a malformed row that the corpus left out is the same one.

    Args:
        skip: leave malformed rows out instead of raising an error.
    Raises:
        DataError: a label of the corpus has another text in the new file, or a row is malformed.
    """
    rejects = Rejects(skip)
    new_labels: dict[str, Row] = {}
    for label in new.labels(rejects):
        rejects.drain()  # they are reported when the rows are read for good
        new_labels[label.uid] = label
    num_rows = len(new_labels) + rejects.count
    rows = {uid: label.row for uid, label in new_labels.items()}
    if not any(label.has_uid for label in new_labels.values()):
        malformed_rows = set(range(num_rows)) - set(rows.values())
        rows.update({rejected_uid(row): row for row in malformed_rows})
    label_ids = np.full(num_rows, -1, np.int64)
    for source_id, uid in _labels_by_id(corpus):
        if uid in rows:
            label_ids[rows[uid]] = source_id
    _check_texts(corpus, new, new_labels, label_ids)
    is_new = label_ids < 0
    label_ids[is_new] = corpus.card.num_labels + np.arange(is_new.sum())
    return label_ids


def _check_texts(
    corpus: Corpus,
    new: RawFiles,
    new_labels: dict[str, Row],
    label_ids: Int64Array,
) -> None:
    """Raises DataError if a label that the corpus has comes with another text; it may have none."""
    repeated = []
    source_ids = []
    for label in new_labels.values():
        source_id = int(label_ids[label.row])
        if label.text and source_id >= 0:
            repeated.append(label)
            source_ids.append(source_id)
    old_texts = corpus.label_texts(np.array(source_ids, np.int64))
    for label, old_text in zip(repeated, old_texts, strict=True):
        if label.text != old_text:
            raise DataError(
                f"{new.path}: label {label.uid[:80]!r} has another text than in {corpus.path},"
                " expected the same or none; give a label with a new text a new uid"
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


def _labels_by_id(corpus: Corpus) -> Iterator[tuple[int, str]]:
    """Source id and uid of each label of a corpus."""
    for source_ids in id_blocks(corpus.card.num_labels):
        yield from zip(source_ids.tolist(), corpus.label_uids(source_ids), strict=True)


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


def changed_files(names: Iterable[str], source: AppendedFiles, config: PrepareConfig) -> set[str]:
    """Names of the files of the corpus that cannot be linked.

    Linked are full shards, and all of a split that gets no rows.
    """
    return {name for name in names if _is_changed(name, source, config)}


def _is_changed(name: str, source: AppendedFiles, config: PrepareConfig) -> bool:
    """Whether a file of the corpus will have another content."""
    split, _, file_name = name.partition("/")
    if split not in SPLITS:
        return True
    if split not in source.appended_splits:
        return False
    number, _, suffix = file_name.partition(".")
    num_full_shards = source.first_shard(split, config.shard_rows)
    if suffix.removesuffix(".npy") in ARRAY_SUFFIXES:
        # An array file has the rows of several shards.
        return int(number) >= num_full_shards // config.shards_per_array_file
    return int(number) >= num_full_shards


def continued_writer(
    folder: Path, corpus: Corpus, source: AppendedFiles, config: PrepareConfig
) -> CorpusWriter:
    """A writer that has counted all rows of the corpus but those that are packed again.

    Args:
        folder: of the new corpus.
        corpus: the corpus whose rows come first.
        source: what will be added.
        config: settings of the corpus.
    """
    card = corpus.card
    removed_ids = _removed_labels(corpus, source)
    if len(removed_ids):
        np.save(folder / REMOVED, removed_ids)
    writer = CorpusWriter(folder, source, config, card.name, card.licence)
    writer.odd = Counter(card.odd)
    for reason in _COUNTED_ANEW:
        writer.odd.pop(reason, None)
    writer.earlier_rejected = earlier_rejected(corpus.path, card)
    for name in SPLITS:
        old = Split(corpus.path, name, card)
        if name in source.appended_splits:
            _continue_split(writer, source, old)
        else:
            writer.num_rows[name] = len(old)
        num_kept = writer.num_rows[name]
        for rows in id_blocks(num_kept):
            writer.keys.add(keys_by_name(name, old.texts(rows)))
        if name != "labels" and len(old):
            writer.counts[name] = _positives_by_label(old, num_kept, source.num_labels)
            writer.filters[name] = [_filter_pairs(corpus.path, name)]
    return writer


def _continue_split(writer: CorpusWriter, source: AppendedFiles, old: Split) -> None:
    """Counts the full shards of a split, which are linked, and opens its array files."""
    card = source.card
    name = old.name
    folder = writer.folder / name
    folder.mkdir(exist_ok=True)
    num_shards = source.first_shard(name, card.shard_rows)
    writer.arrays[name] = ArrayFiles(folder, writer.config.shards_per_array_file)
    writer.arrays[name].keep(source.corpus / name, num_shards, card.shard_rows)
    writer.num_rows[name] = num_shards * card.shard_rows
    unfinished = source.unfinished(name)
    writer.odd.subtract(_odd_rows(old, unfinished))
    if name == "test":
        # The card has no average of test queries.
        return
    average_name = "tokens per label" if name == "labels" else "tokens per training query"
    # The card has the average alone; times the rows it is the sum again, but for rounding.
    num_tokens = round(card.averages[average_name] * len(old))
    num_packed_again = len(old.tokens(unfinished).values)
    writer.num_tokens[name] = num_tokens - num_packed_again


def _removed_labels(corpus: Corpus, source: AppendedFiles) -> Int64Array:
    """Source ids of the removed labels: those of the corpus, and those that new files name."""
    removed_uids = _removed_uids(source.new.path)
    if not removed_uids:
        return corpus.removed_labels
    removed_ids = set(corpus.removed_labels.tolist())
    for source_id, uid in _labels_by_id(corpus):
        if uid in removed_uids:
            removed_ids.add(source_id)
    # A label may join and be removed at once. Malformed rows were judged by `match_labels`.
    for label in source.new.labels(lambda bad: None):
        if label.uid in removed_uids:
            removed_ids.add(int(source.label_ids[label.row]))
    if len(removed_ids) == source.num_labels:
        raise DataError(
            f"{source.new.path}/{REMOVED_UIDS} names all labels of {corpus.path}, expected some to be"
            " left"
        )
    return np.array(sorted(removed_ids), np.int64)


def _removed_uids(folder: Path) -> set[str]:
    """Uids of the labels that a folder of raw files removes."""
    uids = set()
    for path in find(folder, REMOVED_UIDS):
        with readable(f"{path} cannot be read", 'write {"uid": ...} a line', DataError):
            for line in read_lines(path):
                if not line.strip():
                    continue
                uid = json.loads(line)["uid"]
                if type(uid) not in (str, int):
                    raise TypeError(f"a uid is {str(uid)[:40]}, expected a text")
                uids.add(str(uid))
    return uids


def _odd_rows(split: Split, rows: Int64Array) -> Counter[str]:
    """What the packing of some rows of a split counts as odd."""
    odd: Counter[str] = Counter()
    odd[f"{split.name}: no text"] = sum(not text.strip() for text in split.texts(rows))
    if split.name != "labels":
        # Filter pairs were taken from the positives before the corpus counted them.
        num_positives = split.positives(rows).lengths
        odd[f"{split.name}: no positives"] = int((num_positives == 0).sum())
    return odd


def _filter_pairs(folder: Path, split: str) -> Int64Array:
    """int64 [pairs, 2], the filter pairs of a split of a corpus."""
    path = folder / "filters" / f"{split}.npy"
    with readable(f"{path} cannot be read", "prepare the corpus again", DataError):
        return np.asarray(read_array(path, np.int64, ndim=2))


def _positives_by_label(split: Split, num_rows: int, num_labels: int) -> Int64Array:
    """int64 [L], how many of the first rows of a split carry each label."""
    counts = np.zeros(num_labels, np.int64)
    for rows in id_blocks(num_rows):
        counts += np.bincount(split.positives(rows).values, minlength=num_labels)
    return counts
