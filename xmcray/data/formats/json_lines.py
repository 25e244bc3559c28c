"""Records with named fields: LF (XMC repository), plain JSON lines, Tevatron JSON lines.

    layout    train, test, labels                    uid       text                  labels
    lf        trn.json, tst.json, lbl.json           uid       title [+ content]     target_ind, target_rel
    jsonl     train.jsonl, test.jsonl, labels.jsonl  uid       text | title+content  labels, relevance
    tevatron  train.jsonl, test.jsonl, corpus.jsonl  query_id  query_text            positive_document_ids

Each file may end in .gz. An integer label is a line of the label file, counted from 0; a string is
a label's uid.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmcray.data.formats.base import (
    MAX_TEXT,
    BadValue,
    FileStart,
    Labels,
    OnBad,
    Row,
    check_labels,
    check_text,
    decode,
    find_one,
    parsed,
    read_lines,
    rows_of,
)

Record = Mapping[str, Any]
_DECODE_JSON = json.JSONDecoder().raw_decode  # a third faster than json.loads
_FIRST_RECORDS = 100  # of a file, that are looked at before all are read
_JSON_KINDS = {list: "an array", str: "a string", type(None): "null", bool: "true or false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Names of the fields of a record.

    Attributes:
        uid: name of the row.
        text: preferred to `parts`.
        parts: fields that are joined by a blank if there is no text.
        labels: list of labels.
        relevance: list of one number per label.
        labels_are_uids: integers too are uids of labels, not lines of the label file.
    """

    uid: str = "uid"
    text: str = "text"
    parts: tuple[str, ...] = ("title", "content")
    labels: str = "labels"
    relevance: str = "relevance"
    labels_are_uids: bool = False


class RowParser:
    """Makes rows of the records of one split.

    Args:
        fields: names of the fields.
        num_labels: rows of the label file; None if the records are labels themselves, whose label
            fields are ignored.
        label_rows: gives label uid -> row; called at the first label that is a string.
    """

    def __init__(
        self,
        fields: Fields,
        num_labels: int | None,
        label_rows: Callable[[], dict[str, int]],
    ) -> None:
        self._fields = fields
        self._num_labels = num_labels
        self._read_label_rows = label_rows
        self._label_rows: dict[str, int] | None = None
        # 64-bit hashes instead of the uids take a third of the memory; a collision is unlikely
        # below 10^8 rows.
        self._seen_uids: set[int] = set()

    def parse(self, record: Record, row: int) -> Row:
        """The row of a record.

        Args:
            row: position in the raw file.
        Raises:
            BadValue: the record cannot be used.
        """
        uid = self.uid(record, row)
        text = self.text(record)
        # One test for nearly all rows; `check_text` then finds what is wrong with the others.
        is_short = len(text) <= MAX_TEXT and len(uid) <= MAX_TEXT
        if not (is_short and text.isascii() and uid.isascii()):
            check_text(text)
            check_text(uid, self._fields.uid)
        label_ids: tuple[int, ...] = ()
        relevance = None
        if self._num_labels is not None:
            label_ids, relevance = self._labels(record, self._num_labels)
        if not uid:
            raise BadValue(f"empty {self._fields.uid}")
        key = hash(uid)
        has_uid = record.get(self._fields.uid) is not None
        if key in self._seen_uids:
            # A row that has none is named by its number, which another row may be named by.
            of_row = (
                "" if has_uid else ", the number of this row, which has none; give one to all rows"
            )
            raise BadValue(f"duplicate {self._fields.uid} {uid[:80]!r}{of_row}")
        self._seen_uids.add(key)
        return Row(uid, text, label_ids, relevance, row, has_uid)

    def uid(self, record: Record, row: int) -> str:
        """The uid of a record; its row if it has none.

        Raises:
            BadValue: it is no string or integer.
        """
        uid = record.get(self._fields.uid)
        if uid is None:
            return str(row)
        if type(uid) not in (str, int):
            kind = type(uid).__name__
            raise BadValue(f"{self._fields.uid} is {kind}, expected a string or an integer")
        return str(uid)

    def text(self, record: Record) -> str:
        """The text of a record, without blanks at its ends; empty if it has none.

        Raises:
            BadValue: it is no string.
        """
        fields = self._fields
        try:
            text = record.get(fields.text)
            if text is None:
                text = " ".join([record.get(part) or "" for part in fields.parts])
            stripped: str = text.strip()
            return stripped
        except (TypeError, AttributeError):
            names = [name for name in (fields.text, *fields.parts) if name]
            raise BadValue(f"{' or '.join(names)} is not a string") from None

    def _labels(self, record: Record, num_labels: int) -> Labels:
        fields = self._fields
        labels = record.get(fields.labels)
        if labels is None:
            return (), None
        relevance = record.get(fields.relevance)
        if type(labels) is not list:
            raise BadValue(f"{fields.labels} is {type(labels).__name__}, expected a list")
        if type(relevance) not in (list, type(None)):
            raise BadValue(f"{fields.relevance} is {type(relevance).__name__}, expected a list")
        # Nearly all files have integers, which need no look-up. (bool is another type than int.)
        if fields.labels_are_uids or set(map(type, labels)) != {int}:
            labels = [self._label_id(label) for label in labels]
        label_ids, numbers = check_labels(labels, relevance, num_labels)
        if numbers is not None and min(numbers, default=0.0) < 0:
            raise BadValue(f"{fields.relevance} {min(numbers):g} is below 0, expected at least 0")
        return label_ids, numbers

    def _label_id(self, label: object) -> int:
        if type(label) is int and not self._fields.labels_are_uids:
            return label
        if type(label) is not str and type(label) is not int:
            raise BadValue(f"label {str(label)[:80]!r} is neither an integer nor a string")
        # The label file is read once more here, and only if a label is named by its uid.
        if self._label_rows is None:
            self._label_rows = self._read_label_rows()
        row = self._label_rows.get(str(label))
        if row is None:
            raise BadValue(
                f"label {str(label)[:80]!r} is not the uid of a label in this folder; add it to the"
                " label file, also if it is in a corpus that is appended to"
            )
        return row


def read_records(path: Path) -> Iterator[Record | BadValue]:
    """JSON objects of a file, one per line; a line that is none is yielded as the reason."""
    return parsed(read_lines(path), _parse_json)


def _parse_json(line: bytes) -> Record:
    """The JSON object of a line. NaN and infinity are accepted; `check_labels` refuses them.

    Raises:
        BadValue: the line is something else.
    """
    text = decode(line).strip()
    if not text:
        raise BadValue("broken JSON: the line is blank")
    try:
        record, end = _DECODE_JSON(text)
    except (ValueError, RecursionError) as error:
        raise BadValue(f"broken JSON ({error})") from None
    if end != len(text):
        raise BadValue(f"broken JSON (more text after the object at character {end})")
    if type(record) is dict:
        return record
    kind = _JSON_KINDS.get(type(record), "a number")
    raise BadValue(f"found {kind}, expected a JSON object")


@dataclass(frozen=True, slots=True)
class FileKind:
    """How records of one kind of file are read.

    Attributes:
        paths: the files of a folder for a pattern, which must be there.
        records: yields the records of a file; for a bad one, the reason.
        count: number of records of a file, bad ones included.
    """

    paths: Callable[[Path, str], list[Path]]
    records: Callable[[Path], Iterator[Record | BadValue]]
    count: Callable[[Path], int]


@dataclass(frozen=True)
class Records:
    """A layout whose rows are records.

    Attributes:
        kind: of its files.
        patterns: of the files "train", "test" and "labels".
        query_fields: fields of queries.
        label_fields: fields of labels.
        title_rule: texts are titles only if the folder's name says so (NGAME, ELMO).
    """

    kind: FileKind
    patterns: Mapping[str, str]
    query_fields: Fields = Fields()
    label_fields: Fields = Fields()
    title_rule: bool = False

    @property
    def train(self) -> tuple[str, ...]:
        """Patterns of the files that must be there."""
        return self.patterns["train"], self.patterns["labels"]

    @property
    def test(self) -> tuple[str, ...]:
        """Patterns of the files of the test split."""
        return (self.patterns["test"],)

    def labels(self, folder: Path, on_bad: OnBad) -> Iterator[Row]:
        """All labels in file order."""
        parser = RowParser(self._fields(folder, self.label_fields), None, dict)
        return self._rows(folder, "labels", parser.parse, on_bad)

    def queries(self, folder: Path, split: str, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
        """All queries of a split in file order."""

        def label_rows() -> dict[str, int]:
            return self._label_rows(folder)

        parser = RowParser(self._fields(folder, self.query_fields), num_labels, label_rows)
        return self._rows(folder, split, parser.parse, on_bad)

    def _label_rows(self, folder: Path) -> dict[str, int]:
        """The row of each label by its uid.

        A bad label is there too, if its uid can be read and no other label has it: queries that name
        it keep their other labels, as those do that name it by its row.
        """
        parser = RowParser(self._fields(folder, self.label_fields), None, dict)
        bad_rows: dict[str, int] = {}

        def parse(record: Record, row: int) -> Row:
            try:
                return parser.parse(record, row)
            except BadValue:
                bad_rows.setdefault(parser.uid(record, row), row)
                raise

        # Bad labels were reported when the labels were read.
        good = self._rows(folder, "labels", parse, lambda bad: None)
        return bad_rows | {label.uid: label.row for label in good}

    def files(self, folder: Path, split: str) -> Iterator[FileStart]:
        """The files of "train", "test" or "labels", in order."""
        first_row = 0
        last_path = None
        for path in self.kind.paths(folder, self.patterns[split]):
            if last_path is not None:  # counted only if needed: most layouts have a single file
                first_row += self.kind.count(last_path)
            yield FileStart(path, first_row)
            last_path = path

    def shape(self, folder: Path, split: str) -> tuple[int, int]:
        """Rows of the split and of the labels, bad ones included."""
        return self._num_rows(folder, split), self._num_rows(folder, "labels")

    def may_mean_uids(self, folder: Path) -> bool:
        """Whether integers in the labels of queries are rows, but may be meant as uids of labels.

        The first records tell: the uids of labels are integers too, and not the numbers of the rows.
        """
        # The field of other layouts says whether it holds uids or rows.
        if self.query_fields != Fields():
            return False
        uids = self._first_values(folder, "labels", self.label_fields.uid)
        if not any(type(uid) is int and uid != row for row, uid in enumerate(uids)):
            return False
        for labels in self._first_values(folder, "train", self.query_fields.labels):
            # Something else than a list is reported when all records are read.
            if isinstance(labels, list) and int in map(type, labels):
                return True
        return False

    def _first_values(self, folder: Path, name: str, field: str) -> Iterator[Any]:
        """The values of a field in the first records of "train" or "labels"; None if it is bad."""
        path = self.kind.paths(folder, self.patterns[name])[0]
        for record in itertools.islice(self.kind.records(path), _FIRST_RECORDS):
            yield None if isinstance(record, BadValue) else record.get(field)

    def titles_only(self, folder: Path) -> bool | None:
        """Whether texts are titles without contents; None if the layout has no such rule."""
        return is_named_by_titles(folder) if self.title_rule else None

    def _fields(self, folder: Path, fields: Fields) -> Fields:
        # Releases for titles contain the same file with contents, which the papers do not use.
        if self.titles_only(folder):
            return Fields(text="title", parts=(), labels=fields.labels, relevance=fields.relevance)
        return fields

    def _rows(
        self, folder: Path, name: str, parse: Callable[[Record, int], Row], on_bad: OnBad
    ) -> Iterator[Row]:
        """All valid rows of "train", "test" or "labels" in file order."""
        for start in self.files(folder, name):
            records = self.kind.records(start.path)
            yield from rows_of(
                records,
                start.path,
                parse,
                on_bad,
                first_row=start.row,
                first_line=start.line,
            )

    def _num_rows(self, folder: Path, name: str) -> int:
        paths = self.kind.paths(folder, self.patterns[name])
        return sum(map(self.kind.count, paths))


def _one_file(folder: Path, pattern: str) -> list[Path]:
    return [find_one(folder, pattern)]


def _count_lines(path: Path) -> int:
    return sum(1 for _ in read_lines(path))


_JSON_LINES = FileKind(_one_file, read_records, _count_lines)
_LF_FIELDS = Fields(text="", labels="target_ind", relevance="target_rel")
LF = Records(
    _JSON_LINES,
    {"train": "trn.json", "test": "tst.json", "labels": "lbl.json"},
    query_fields=_LF_FIELDS,
    label_fields=_LF_FIELDS,
    title_rule=True,
)
JSONL = Records(
    _JSON_LINES, {"train": "train.jsonl", "test": "test.jsonl", "labels": "labels.jsonl"}
)
TEVATRON = Records(
    _JSON_LINES,
    {"train": "train.jsonl", "test": "test.jsonl|dev.jsonl", "labels": "corpus.jsonl"},
    query_fields=Fields(
        uid="query_id",
        text="query_text",
        labels="positive_document_ids",
        relevance="",
        labels_are_uids=True,
    ),
    label_fields=Fields(uid="docid", text="document_text", parts=("title", "text")),
)


def is_named_by_titles(folder: Path) -> bool:
    """Whether the name of a data set has "title" in it, also behind a link or on the hub."""
    names = [folder.absolute().name, folder.resolve().name]
    if folder.parent.name == "snapshots":
        # The hub's cache: the repository's name, "snapshots", a commit.
        names.append(folder.parent.parent.name)
    return any("title" in name.lower() for name in names)
