"""Layouts with named fields: LF, plain JSON lines, Tevatron."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xmcray.data.formats import BadRow, Row, detect
from xmcray.errors import ConfigError, DataError


def write(path: Path, *records: Any) -> Path:
    """One record per line, packed if the name says so; text goes as it is."""
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    data = "".join(line + "\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def refuse(bad: BadRow) -> None:
    raise AssertionError(f"unexpected: {bad}")


def read(folder: Path, split: str = "train") -> tuple[list[Row], list[Row]]:
    source = detect(folder)
    labels = list(source.labels(refuse))
    return labels, list(source.queries(split, len(labels), refuse))


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_lf_joins_both_parts(tmp_path: Path, ending: str) -> None:
    write(
        tmp_path / f"lbl{ending}",
        {"uid": "a", "title": "Äpfel", "content": ""},
        {"uid": "b", "title": "pears"},
    )
    write(
        tmp_path / f"trn{ending}",
        {
            "uid": "q",
            "title": " red",
            "content": "fruit ",
            "target_ind": [1, 0, 1],
            "target_rel": [1.0, 1.0, 1.0],
        },
        {"uid": 7, "content": "no title", "target_ind": [], "target_rel": []},
        {"uid": "r", "title": "weighted", "target_ind": [1, 0], "target_rel": [0.5, 1]},
    )
    labels, queries = read(tmp_path)
    assert labels == [Row("a", "Äpfel"), Row("b", "pears", row=1)]
    assert queries == [
        Row("q", "red fruit", (0, 1), None, 0),
        Row("7", "no title", (), None, 1),
        Row("r", "weighted", (0, 1), (1.0, 0.5), 2),
    ]
    assert detect(tmp_path).splits == ("train",)


def test_lf_takes_titles_only_where_the_folder_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "LF-AmazonTitles-131K"
    write(folder / "lbl.json", {"uid": "a", "title": "label", "content": "not read"})
    write(
        folder / "trn.json",
        {"uid": "q", "title": "query", "content": "not read", "target_ind": [0]},
    )
    labels, queries = read(folder)
    assert [labels[0].text, queries[0].text] == ["label", "query"]


def test_string_labels_are_uids(tmp_path: Path) -> None:
    write(tmp_path / "lbl.json", {"uid": "10", "title": "ten"}, {"uid": "11", "title": "eleven"})
    write(tmp_path / "trn.json", {"uid": "q", "title": "t", "target_ind": ["11", 0]})
    assert read(tmp_path)[1][0].label_ids == (0, 1)


def test_json_lines_by_text_or_parts_and_uid_from_row(tmp_path: Path) -> None:
    write(tmp_path / "labels.jsonl", {"text": "one"}, {"title": "two", "content": "three"})
    write(tmp_path / "train.jsonl.gz", {"text": "q", "labels": [1]})
    write(tmp_path / "test.jsonl", {"uid": "t", "text": "", "labels": ["0"], "relevance": [2]})
    labels, train = read(tmp_path)
    assert [(label.uid, label.text) for label in labels] == [("0", "one"), ("1", "two three")]
    assert train == [Row("0", "q", (1,), has_uid=False)]
    assert read(tmp_path, "test")[1] == [Row("t", "", (0,), (2.0,))]
    assert detect(tmp_path).splits == ("train", "test")


def test_tevatron(tmp_path: Path) -> None:
    write(
        tmp_path / "corpus.jsonl",
        {"docid": "d9", "document_text": "x"},
        {"docid": 4, "title": "y", "text": "z"},
    )
    write(
        tmp_path / "train.jsonl",
        {
            "query_id": "q",
            "query_text": "x?",
            "positive_document_ids": [4, "d9"],
            "negative_document_ids": ["n"],
        },
    )
    labels, queries = read(tmp_path)
    assert [(label.uid, label.text) for label in labels] == [("d9", "x"), ("4", "y z")]
    assert queries == [Row("q", "x?", (0, 1))]


@pytest.mark.parametrize(
    "name", ["filter_labels_train.txt", "filter_labels_trn.txt", "trn_filter_labels.txt"]
)
def test_filters_under_every_name(tmp_path: Path, name: str) -> None:
    write(tmp_path / "labels.jsonl", {"text": "a"}, {"text": "b"})
    write(tmp_path / "train.jsonl", {"text": "q"}, {"text": "r"}, {"text": "s"})
    source = detect(tmp_path)
    assert source.filters("train").shape == (0, 2)
    write(tmp_path / name, "2 1", "", "0 0")
    found = source.filters("train")
    assert found.dtype == np.int64
    assert found.tolist() == [[2, 1], [0, 0]]


def test_rows_keep_their_number_when_others_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "labels.jsonl", {"text": "a"})
    write(
        tmp_path / "train.jsonl",
        "{",
        {"text": "kept", "labels": [0]},
        {"text": "bad", "labels": [1]},
    )
    write(tmp_path / "filter_labels_train.txt", "2 0")
    bad: list[BadRow] = []
    source = detect(tmp_path)
    assert [row.row for row in source.queries("train", 1, bad.append)] == [1]
    assert [b.line for b in bad] == [1, 3]
    assert source.filters("train").tolist() == [[2, 0]]


def test_detect_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist, expected a folder"):
        detect(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is a file, expected a folder"):
        detect(write(tmp_path / "file", "x"))
    with pytest.raises(DataError, match=r"fits no known layout \(found: file\)"):
        detect(tmp_path)
    write(tmp_path / "lbl.json", {"uid": "a"})
    with pytest.raises(DataError, match=r"lacks trn\.json of format lf"):
        detect(tmp_path)
    with pytest.raises(DataError, match=r"lacks train\.jsonl and labels\.jsonl of format jsonl"):
        detect(tmp_path, "jsonl")
    with pytest.raises(ConfigError, match="unknown format 'jsonll'; did you mean 'jsonl'"):
        detect(tmp_path, "jsonll")


def test_named_format_beats_detection(tmp_path: Path) -> None:
    for name in ("labels.jsonl", "corpus.jsonl"):
        write(tmp_path / name, {"docid": "d", "text": "x"})
    write(tmp_path / "train.jsonl", {"query_id": "q", "query_text": "x"})
    assert detect(tmp_path).format == "jsonl"
    assert detect(tmp_path, "tevatron").format == "tevatron"


@pytest.mark.parametrize("empty", ["labels.jsonl", "train.jsonl"])
def test_an_empty_file_fails(tmp_path: Path, empty: str) -> None:
    write(tmp_path / "labels.jsonl", {"text": "a"})
    write(tmp_path / "train.jsonl", {"text": "q"})
    (tmp_path / empty).write_bytes(b"")
    with pytest.raises(
        DataError, match=f"has no valid {'label' if empty == 'labels.jsonl' else 'train query'}"
    ):
        read(tmp_path)


def test_a_split_that_is_not_there_fails(tmp_path: Path) -> None:
    write(tmp_path / "labels.jsonl", {"text": "a"})
    write(tmp_path / "train.jsonl", {"text": "q"})
    with pytest.raises(DataError, match="no test split; found: train"):
        read(tmp_path, "test")


@pytest.mark.parametrize(
    ("uids", "labels", "is_warned"),
    [
        ([7, 9], [1, 0], True),
        ([1, 0], [1], True),
        ([0, 1], [1, 0], False),
        (["7", "9"], [1, 0], False),
        ([7, 9], ["7", "9"], False),
        ([7, None], None, False),
        ([7, 9], 7, False),
    ],
)
def test_integers_that_may_be_uids_are_warned_of(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    uids: list[Any],
    labels: Any,
    is_warned: bool,
) -> None:
    write(tmp_path / "labels.jsonl", *({"uid": uid, "text": "a"} for uid in uids))
    write(tmp_path / "train.jsonl", {"text": "q", "labels": labels})
    detect(tmp_path).warn_of_integer_labels()
    assert ("if uids are meant, write them as texts" in caplog.text) == is_warned
