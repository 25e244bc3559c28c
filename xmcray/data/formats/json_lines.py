"""Records with named fields: the LF layout of the XMC repository, plain JSON lines, Tevatron JSON lines.

    layout    train, test, labels                  uid        text                  labels
    lf        trn.json, tst.json, lbl.json         uid        title [+ content]     target_ind, target_rel
    jsonl     train.jsonl, test.jsonl, labels.jsonl  uid      text | title+content  labels, relevance
    tevatron  train.jsonl, test.jsonl, corpus.jsonl  query_id query_text            positive_document_ids

Each file may end in .gz. An integer label is a line of the label file, counted from 0; a string is a label's uid.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmcray.data.formats.base import (
    MAX_TEXT,
    BadRow,
    BadValue,
    OnBad,
    Row,
    check_labels,
    check_text,
    decode,
    find_one,
    read_lines,
)

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Names of the fields of a record; `text` is preferred to the parts, which are joined by a blank."""

    uid: str = "uid"
    text: str = "text"
    parts: tuple[str, ...] = ("title", "content")
    labels: str = "labels"
    relevance: str = "relevance"
    labels_are_uids: bool = False  # integers too


def row_maker(
    fields: Fields, num_labels: int | None, label_rows: Callable[[], dict[str, int]]
) -> Callable[[Record, int], Row]:
    """A function from a record and its row number to a `Row`.

    Args:
        num_labels: None where the records are labels themselves, whose label fields are ignored.
        label_rows: gives label uid -> row; asked at the first label that is a string.
    Returns:
        The function; it raises BadValue for a record that cannot be used.
    """
    uid_field, text_field, parts = fields.uid, fields.text, fields.parts
    seen: set[int] = (
        set()
    )  # 64-bit hashes instead of the uids: a third of the memory, no collision below 10^8 rows
    known: dict[str, int] | None = None

    def lookup(labels: list[Any]) -> list[int]:
        nonlocal known
        ids = []
        for label in labels:
            if type(label) is int and not fields.labels_are_uids:
                ids.append(label)
            elif type(label) is str or type(label) is int:
                known = label_rows() if known is None else known
                if (found := known.get(str(label))) is None:
                    raise BadValue(f"label {str(label)[:80]!r} is not the uid of a label")
                ids.append(found)
            else:
                raise BadValue(f"label {str(label)[:80]!r} is neither an integer nor a string")
        return ids

    def make(record: Record, row: int) -> Row:
        get = record.get
        uid = get(uid_field)
        if type(uid) is not str:
            if uid is not None and type(uid) is not int:
                raise BadValue(
                    f"{uid_field} is {type(uid).__name__}, expected a string or an integer"
                )
            uid = str(row if uid is None else uid)
        try:
            text = get(text_field)
            if text is None:
                text = " ".join([get(part) or "" for part in parts])
            text = text.strip()
        except (TypeError, AttributeError):
            raise BadValue(
                f"{' or '.join(filter(None, (text_field, *parts)))} is not a string"
            ) from None
        if len(text) > MAX_TEXT or len(uid) > MAX_TEXT or not (text.isascii() and uid.isascii()):
            check_text(text)
            check_text(uid, uid_field)
        ids: tuple[int, ...] = ()
        relevance = None
        if num_labels is not None and (labels := get(fields.labels)):
            values = get(fields.relevance)
            if type(labels) is not list or not (values is None or type(values) is list):
                raise BadValue(f"{fields.labels} or {fields.relevance} is not a list")
            if fields.labels_are_uids or set(map(type, labels)) != {int}:
                labels = lookup(labels)
            ids, relevance = check_labels(labels, values, num_labels)
        key = hash(uid)
        if key in seen or not uid:
            raise BadValue(f"duplicate {uid_field} {uid[:80]!r}" if uid else f"empty {uid_field}")
        seen.add(key)
        return Row(uid, text, ids, relevance, row)

    return make


def read_records(path: Path) -> Iterator[Record | BadValue]:
    """JSON objects of a file, one per line; a line that is none comes as the reason."""
    parse = json.JSONDecoder().raw_decode  # a third faster than json.loads
    for line in read_lines(path):
        try:
            text = decode(line).strip()
            record, end = parse(text)
            if end != len(text):
                raise ValueError(f"more text after the object at character {end}")
        except BadValue as error:
            yield error
        except (ValueError, RecursionError) as error:
            yield BadValue(
                "broken JSON" + (f" ({error})" if line.strip() else ": the line is blank")
            )
        else:
            yield (
                record
                if type(record) is dict
                else BadValue(f"found {_kind(record)}, expected a JSON object")
            )


def rows_of(
    records: Iterable[Record | BadValue],
    path: Path,
    make: Callable[[Record, int], Row],
    on_bad: OnBad,
    first: int = 0,
) -> Iterator[Row]:
    """The valid rows of a file; `first` is the row number of its first record."""
    for number, record in enumerate(records):
        try:
            if isinstance(record, BadValue):
                raise record
            row = make(record, first + number)
        except BadValue as error:
            on_bad(BadRow(str(path), number + 1, str(error)))
        else:
            yield row


def _kind(value: object) -> str:
    return {list: "an array", str: "a string", type(None): "null", bool: "true or false"}.get(
        type(value), "a number"
    )


@dataclass(frozen=True, slots=True)
class JsonLines:
    """A layout of JSON lines: the files of both splits and of the labels, and their fields."""

    files: Mapping[str, str]  # "train", "test", "labels" -> pattern
    query_fields: Fields
    label_fields: Fields
    title_rule: bool = False  # titles only where the folder's name says so (NGAME, ELMO)

    @property
    def train(self) -> tuple[str, ...]:
        """Patterns of the files that must be there."""
        return self.files["train"], self.files["labels"]

    @property
    def test(self) -> tuple[str, ...]:
        """Patterns of the files of the test split."""
        return (self.files["test"],)

    def labels(self, folder: Path, on_bad: OnBad) -> Iterator[Row]:
        """All labels in file order."""
        path = find_one(folder, self.files["labels"])
        make = row_maker(self._fields(self.label_fields, folder), None, dict)
        return rows_of(read_records(path), path, make, on_bad)

    def queries(self, folder: Path, split: str, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
        """All queries of a split in file order."""
        path = find_one(folder, self.files[split])

        def label_rows() -> dict[str, int]:
            return {label.uid: label.row for label in self.labels(folder, lambda bad: None)}

        make = row_maker(self._fields(self.query_fields, folder), num_labels, label_rows)
        return rows_of(read_records(path), path, make, on_bad)

    def shape(self, folder: Path, split: str) -> tuple[int, int]:
        """Rows of the split's file and of the label file."""
        rows, labels = (
            sum(1 for _ in read_lines(find_one(folder, self.files[key])))
            for key in (split, "labels")
        )
        return rows, labels

    def _fields(self, fields: Fields, folder: Path) -> Fields:
        if self.title_rule and "title" in folder.resolve().name.lower():
            return Fields(text="title", parts=(), labels=fields.labels, relevance=fields.relevance)
        return fields


_LF_FIELDS = Fields(text="", labels="target_ind", relevance="target_rel")
LF = JsonLines(
    {"train": "trn.json", "test": "tst.json", "labels": "lbl.json"},
    _LF_FIELDS,
    _LF_FIELDS,
    title_rule=True,
)
JSONL = JsonLines(
    {"train": "train.jsonl", "test": "test.jsonl", "labels": "labels.jsonl"}, Fields(), Fields()
)
TEVATRON = JsonLines(
    {"train": "train.jsonl", "test": "test.jsonl|dev.jsonl", "labels": "corpus.jsonl"},
    Fields(
        uid="query_id",
        text="query_text",
        labels="positive_document_ids",
        relevance="",
        labels_are_uids=True,
    ),
    Fields(uid="docid", text="document_text", parts=("title", "text")),
)
