"""Labels of new raw files that are appended to a corpus, matched with its own by uid; removed labels.

A label of the new files is the one of the corpus that has its uid, or a new one. Labels that
`removed_labels.jsonl` next to the raw files names by uid keep their ids, but no bundle answers them
any more.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from xmcray.data.chunks import Rejects, rejected_uid
from xmcray.data.corpus import Corpus
from xmcray.data.formats import RawFiles, Row
from xmcray.data.formats.base import find, read_lines
from xmcray.errors import DataError, readable
from xmcray.types import Int64Array, id_blocks

logger = logging.getLogger(__name__)

REMOVED_UIDS = "removed_labels.jsonl"


def match_labels(corpus: Corpus, new: RawFiles, skip: bool) -> Int64Array:
    """The source id of each row of the new label file.

    A row with the uid of a label of the corpus is that label. All others, malformed ones included,
    get the ids after those of the corpus, in their order.

    Args:
        skip: leave malformed rows out instead of raising an error.
    Raises:
        DataError: a label of the corpus has another text in the new file, or a row is malformed.
    """
    rejects = Rejects(skip)
    new_labels: list[Row] = []
    for label in new.labels(rejects):
        rejects.drain()  # they are reported when the rows are read for good
        new_labels.append(label)
    num_rows = len(new_labels) + rejects.count
    rows = _rows_by_uid(new_labels, num_rows)
    label_ids = np.full(num_rows, -1, np.int64)
    for source_id, uid in _labels_by_id(corpus):
        if uid in rows:
            label_ids[rows[uid]] = source_id
    _check_texts(corpus, new, new_labels, label_ids)
    is_new = label_ids < 0
    label_ids[is_new] = corpus.card.num_labels + np.arange(is_new.sum())
    return label_ids


def _rows_by_uid(new_labels: list[Row], num_rows: int) -> dict[str, int]:
    """The row of each new label, by the uid that the label has in a corpus."""
    rows = {label.uid: label.row for label in new_labels}
    if any(label.has_uid for label in new_labels):
        return rows
    # A file without uids repeats the labels of the corpus, so malformed rows are the same ones too.
    valid_rows = set(rows.values())
    for row in range(num_rows):
        if row not in valid_rows:
            rows[rejected_uid(row)] = row
    return rows


def _check_texts(
    corpus: Corpus,
    new: RawFiles,
    new_labels: list[Row],
    label_ids: Int64Array,
) -> None:
    """Raises DataError if a label that the corpus has comes with another text; it may have none."""
    repeated = [label for label in new_labels if label.text and label_ids[label.row] >= 0]
    rows = np.array([label.row for label in repeated], np.int64)
    old_texts = corpus.label_texts(label_ids[rows])
    for label, old_text in zip(repeated, old_texts, strict=True):
        if label.text != old_text:
            raise DataError(
                f"{new.path}: label {label.uid[:80]!r} has another text than in {corpus.path},"
                " expected the same or none; give a label with a new text a new uid"
            )


def removed_labels(corpus: Corpus, new: RawFiles, label_ids: Int64Array) -> Int64Array:
    """Source ids of the removed labels, ascending: those of the corpus, and those that new files name.

    Args:
        label_ids: see `match_labels`.
    Raises:
        DataError: the file of removed labels is malformed, or no label is left.
    """
    removed_uids = _removed_uids(new.path)
    if not removed_uids:
        return corpus.removed_labels
    removed_ids = set(corpus.removed_labels.tolist())
    for source_id, uid in _labels_by_id(corpus):
        if uid in removed_uids:
            removed_ids.add(source_id)
    # A label may join and be removed at once. Malformed rows were judged by `match_labels`.
    for label in new.labels(lambda bad: None):
        if label.uid in removed_uids:
            source_id = int(label_ids[label.row])
            removed_ids.add(source_id)
    num_labels = max(corpus.card.num_labels, int(label_ids.max()) + 1)
    if len(removed_ids) == num_labels:
        raise DataError(
            f"{new.path}/{REMOVED_UIDS} names all labels of {corpus.path}, expected some to be left"
        )
    return np.array(sorted(removed_ids), np.int64)


def removed_rows(raw: RawFiles) -> Int64Array:
    """Rows of the label file that the file of removed labels names, ascending.

    Warns of uids that no label has. Files of events may have some, but they are appended.

    Raises:
        DataError: the file of removed labels is malformed, or no label is left.
    """
    removed_uids = _removed_uids(raw.path)
    if not removed_uids:
        return np.empty(0, np.int64)
    rows = []
    num_labels = 0
    # Malformed rows are reported when the rows are read for good.
    for label in raw.labels(lambda bad: None):
        num_labels += 1
        if label.uid in removed_uids:
            rows.append(label.row)
            removed_uids.remove(label.uid)
    if len(rows) == num_labels:
        raise DataError(f"{raw.path}/{REMOVED_UIDS} names all labels, expected some to be left")
    if removed_uids:
        logger.warning(
            "%s has %d uids of no label, such as %r; correct them, or those labels stay answers",
            REMOVED_UIDS,
            len(removed_uids),
            min(removed_uids)[:80],
        )
    return np.array(rows, np.int64)


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


def _labels_by_id(corpus: Corpus) -> Iterator[tuple[int, str]]:
    """Source id and uid of each label of a corpus."""
    for source_ids in id_blocks(corpus.card.num_labels):
        yield from zip(source_ids.tolist(), corpus.label_uids(source_ids), strict=True)
