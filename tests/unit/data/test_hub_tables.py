"""Tables that the package datasets opens become raw files; no network is used."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from shell import Shell

from xmcray import api
from xmcray.data import pipeline
from xmcray.data.chunks import Rejects
from xmcray.data.formats import RawFiles, detect
from xmcray.data.hub_tables import Columns, HubTables
from xmcray.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")

CLASSES = datasets.ClassLabel(names=["red", "green", "blue"])
STRING = datasets.Value("string")


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def write_table(path: Path, rows: Mapping[str, list[Any]], **features: Any) -> None:
    """A Parquet file with the types of `datasets` in its schema; other columns are strings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = {name: features.get(name, STRING) for name in rows}
    table = datasets.Dataset.from_dict(dict(rows), features=datasets.Features(kinds))
    table.to_parquet(path)


def raw_files(source: Path, out: Path, tables: HubTables | None = None, **columns: str) -> RawFiles:
    out.mkdir()
    (tables or HubTables(str(source), Columns(**columns))).write(out)
    return detect(out, "parquet")


def refused(bad: object) -> None:
    raise AssertionError(bad)


def queries(raw: RawFiles, split: str = "train") -> list[tuple[str, str, list[str]]]:
    """Uid, text and label texts of all queries."""
    labels = [row.text for row in raw.labels(refused)]
    return [
        (row.uid, row.text, [labels[label] for label in row.label_ids])
        for row in raw.queries(split, len(labels), refused)
    ]


def test_numbers_of_classes_become_their_names(tmp_path: Path) -> None:
    rows = {"title": ["sky", "leaf", "void"], "tags": [[2, 0], [1], []]}
    write_table(tmp_path / "set" / "train.parquet", rows, tags=datasets.List(CLASSES))
    raw = raw_files(tmp_path / "set", tmp_path / "raw", text="title", labels="tags")
    # Labels keep the order of the classes, and those of no query are there too.
    assert [(row.uid, row.text) for row in raw.labels(refused)] == [
        ("red", "red"),
        ("green", "green"),
        ("blue", "blue"),
    ]
    assert queries(raw) == [
        ("0", "sky", ["red", "blue"]),
        ("1", "leaf", ["green"]),
        ("2", "void", []),
    ]
    assert raw.splits == ("train",)


def test_a_row_may_have_one_class_or_none(tmp_path: Path) -> None:
    rows = {"text": ["sky", "void"], "labels": [2, -1]}
    write_table(tmp_path / "set" / "train.parquet", rows, labels=CLASSES)
    raw = raw_files(tmp_path / "set", tmp_path / "raw")
    assert [labels for _, _, labels in queries(raw)] == [["blue"], []]


def test_label_texts_are_labels_of_all_splits(tmp_path: Path) -> None:
    names = datasets.List(STRING)
    train = {"text": ["a", "b"], "labels": [["y", "x"], None]}
    test = {"text": ["c"], "labels": [["z", "x"]]}
    write_table(tmp_path / "set" / "train.parquet", train, labels=names)
    write_table(tmp_path / "set" / "test.parquet", test, labels=names)
    raw = raw_files(tmp_path / "set", tmp_path / "raw")
    assert [row.uid for row in raw.labels(refused)] == ["y", "x", "z"]
    assert [labels for _, _, labels in queries(raw)] == [["y", "x"], []]
    assert queries(raw, "test") == [("0", "c", ["x", "z"])]


def test_texts_join_columns_and_rows_have_uids_and_relevance(tmp_path: Path) -> None:
    rows = {
        "id": [7, 9],
        "title": ["a", "b"],
        "body": ["x", None],
        "tag": ["red", "blue"],
        "clicks": [3, 2],
    }
    types = {"id": datasets.Value("uint32"), "clicks": datasets.Value("int64")}
    write_table(tmp_path / "set" / "train.parquet", rows, **types)
    columns = {"text": "title+body", "labels": "tag", "uid": "id", "relevance": "clicks"}
    raw = raw_files(tmp_path / "set", tmp_path / "raw", **columns)
    assert queries(raw) == [("7", "a x", ["red"]), ("9", "b", ["blue"])]
    assert [row.relevance for row in raw.queries("train", 2, refused)] == [(3.0,), (2.0,)]


def test_cells_may_be_empty(tmp_path: Path) -> None:
    rows = {
        "id": [7, None, 9],
        "text": ["a", "b", "c"],
        "tags": [["red", None, "blue"], ["", "red"], []],
        "clicks": [[3, 1, 2], None, None],
    }
    numbers = datasets.Value("int64")
    lists = {"tags": datasets.List(STRING), "clicks": datasets.List(numbers)}
    write_table(tmp_path / "set" / "train.parquet", rows, id=numbers, **lists)
    columns = {"text": "text", "labels": "tags", "uid": "id", "relevance": "clicks"}
    raw = raw_files(tmp_path / "set", tmp_path / "raw", **columns)
    assert queries(raw) == [("7", "a", ["red", "blue"]), ("1", "b", ["red"]), ("9", "c", [])]
    relevance = [row.relevance for row in raw.queries("train", 2, refused)]
    assert relevance == [(3.0, 2.0), None, None]


def test_labels_come_from_a_table_of_another_configuration(tmp_path: Path) -> None:
    source = tmp_path / "set"
    rows = {"text": list("abcd"), "labels": [[11], [12, 11], [12], [11]]}
    write_table(source / "pairs.parquet", rows, labels=datasets.List(datasets.Value("int32")))
    labels = {"_id": [12, 11], "name": ["kettle", "pan"]}
    write_table(source / "names.parquet", labels, _id=datasets.Value("int32"))
    (source / "README.md").write_text(
        "---\nconfigs:\n- config_name: pairs\n  data_files: pairs.parquet\n"
        "- config_name: names\n  data_files: [{split: rows, path: names.parquet}]\n---\n"
    )
    splits = {"train": "train[:75%]", "test": "train[75%:]", "labels": "names/rows"}
    columns = Columns(label_uid="_id", label_text="name")
    tables = HubTables(str(source), columns, "pairs", splits)
    raw = raw_files(source, tmp_path / "raw", tables)
    assert [labels for _, _, labels in queries(raw)] == [["pan"], ["kettle", "pan"], ["kettle"]]
    assert queries(raw, "test") == [("0", "d", ["pan"])]


def test_rows_are_written_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmcray.data.hub_tables._BATCH_ROWS", 3)
    rows = {"text": [f"t{row}" for row in range(8)], "labels": ["x"] * 8}
    write_table(tmp_path / "set" / "train.parquet", rows)
    raw = raw_files(tmp_path / "set", tmp_path / "raw")
    assert [uid for uid, _, _ in queries(raw)] == [str(row) for row in range(8)]
    assert pq.ParquetFile(tmp_path / "raw" / "train.parquet").num_row_groups == 3


def test_mistakes_are_one_line(tmp_path: Path, shell: Shell) -> None:
    source = tmp_path / "set"
    rows = {"title": ["a"], "tags": [[1]], "year": [1999]}
    numbers = datasets.Value("int64")
    write_table(source / "train.parquet", rows, tags=datasets.List(numbers), year=numbers)
    prepare = f"prepare {source} --out {tmp_path}/corpus --format datasets"
    mistakes = {
        "": "has no column 'text' for train (found: title, tags, year); name it with --columns",
        "--columns text=year": "column 'year' for train is of type Value('int64'), expected string",
        "--columns text=title,labels=tags": "integers without names need a table of labels",
        "--columns txt=title": "did you mean 'text'?",
        "--columns title": "--columns has 'title', expected NAME=VALUE",
        "--splits train=dev": "Unknown split",
        "--splits test=train": "splits lack train",
        "--splits dev=train": "a split is 'dev', expected one of train, test, labels",
        "--configuration en": "'en' not found",
    }
    for options, message in mistakes.items():
        assert message in shell.error(f"{prepare} {options}")
    assert "is for format datasets" in shell.error(
        f"prepare {source} --out {tmp_path}/corpus --columns text=title"
    )
    assert "does not exist" in shell.error(f"prepare none --out {tmp_path}/c --format datasets")
    assert not (tmp_path / "corpus").exists()


def test_no_code_of_a_data_set_runs(tmp_path: Path) -> None:
    source = tmp_path / "set"
    write_table(source / "train.parquet", {"text": ["a"], "labels": ["b"]})
    (source / "set.py").write_text("open('ran', 'w')")
    with pytest.raises(DataError, match="scripts are no longer supported"):
        raw_files(source, tmp_path / "raw")


def test_no_network_and_a_folder_of_the_same_name(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder here is not taken for the repository.
    write_table(tmp_path / "acme" / "words" / "train.parquet", {"text": ["a"], "labels": ["b"]})
    monkeypatch.chdir(tmp_path)
    url = "hf://datasets/acme/words"
    error = shell.error(f"prepare {url} --out {tmp_path}/corpus --format datasets")
    assert error.startswith(f"{url} cannot be opened by datasets (ConnectionError")
    assert "the network" in error


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'xmcray\[datasets\]'"):
        raw_files(tmp_path, tmp_path / "raw")


def test_prepare_names_the_corpus_by_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[tuple[str, str, list[tuple[str, str, list[str]]]]] = []

    def prepare(source: RawFiles, out: str, name: str, **_: Any) -> None:
        prepared.append((source.path.name, name, queries(source)))

    monkeypatch.setattr(pipeline, "prepare", prepare)
    write_table(tmp_path / "words" / "train.parquet", {"title": ["a"], "tag": ["b"]})
    columns = {"text": "title", "labels": "tag"}
    source = tmp_path / "words"
    api.prepare(source, tmp_path / "out", format="datasets", columns=columns)
    assert prepared == [("words", "words", [("0", "a", ["b"])])]


def test_files_next_to_the_tables_are_not_ignored_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "set"
    write_table(source / "train.parquet", {"text": ["a"], "labels": ["b"]})
    for name in ("LICENSE", "LICENSE.txt", "dataset_infos.json"):
        (source / name).write_text("{}")
    (source / "removed_labels.jsonl").write_text('{"uid": "b"}\n')
    raw_files(source, tmp_path / "raw")
    assert not caplog.records
    # Uids mean the same in any layout.
    assert (tmp_path / "raw" / "removed_labels.jsonl").read_text() == '{"uid": "b"}\n'
    write_table(source / "labels.parquet", {"uid": ["b"], "text": ["blue"]})
    (source / "names.csv").write_text("uid,text\n")
    raw_files(source, tmp_path / "raw2")
    (message,) = [record.getMessage() for record in caplog.records]
    assert "files that datasets does not read: labels.parquet, names.csv;" in message


def test_a_mistake_in_a_row_names_the_data_set_and_the_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(source: RawFiles, *_: Any, **__: Any) -> None:
        list(source.queries("train", 1, Rejects(skip=False)))

    monkeypatch.setattr(pipeline, "prepare", prepare)
    source = tmp_path / "set"
    write_table(
        source / "train.parquet", {"id": ["7", "7"], "text": ["a", "b"], "labels": ["x", "x"]}
    )
    with pytest.raises(DataError) as raised:
        api.prepare(source, tmp_path / "out", format="datasets", columns={"uid": "id"})
    message = "(train row 2): duplicate uid '7'; repair the row, or leave such rows out"
    assert str(raised.value).startswith(f"{source} {message}")


@pytest.mark.parametrize(
    "name", ["filter_labels_train.txt", "tst_filter_labels.txt", "train.vectors.npy"]
)
def test_files_that_count_rows_are_refused(tmp_path: Path, name: str) -> None:
    source = tmp_path / "set"
    write_table(source / "train.parquet", {"text": ["a"], "labels": ["b"]})
    (source / name).write_text("0 0\n")
    with pytest.raises(DataError, match=f"{name} counts rows of raw files"):
        raw_files(source, tmp_path / "raw")


def test_a_table_of_labels_may_lack_a_uid_and_queries_may_have_no_label(tmp_path: Path) -> None:
    source = tmp_path / "set"
    numbers = datasets.Value("int64")
    rows = {"text": ["a", "b"], "labels": [5, -1]}
    write_table(source / "queries" / "train.parquet", rows, labels=numbers)
    labels = {"uid": [5, None], "text": ["five", "no name"]}
    write_table(source / "labels" / "train.parquet", labels, uid=numbers)
    (source / "README.md").write_text(
        "---\nconfigs:\n- {config_name: queries, data_dir: queries}\n"
        "- {config_name: labels, data_dir: labels}\n---\n"
    )
    splits = {"train": "train", "labels": "labels/train"}
    tables = HubTables(str(source), Columns(), "queries", splits)
    raw = raw_files(source, tmp_path / "raw", tables)
    assert queries(raw) == [("0", "a", ["five"]), ("1", "b", [])]
    assert [(row.uid, row.has_uid) for row in raw.labels(refused)] == [("5", True), ("1", False)]


def test_a_file_that_keeps_its_name_and_time_is_read_anew(tmp_path: Path) -> None:
    source = tmp_path / "set"
    for text in ("old", "new"):
        write_table(source / "train.parquet", {"text": [text], "labels": ["a"]})
        os.utime(source / "train.parquet", (0, 0))
        raw = raw_files(source, tmp_path / text)
        assert [query for _, query, _ in queries(raw)] == [text]


def test_a_folder_above_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[tuple[str, str]] = []

    def prepare(source: RawFiles, out: str, name: str, **_: Any) -> None:
        prepared.append((source.name, name))

    monkeypatch.setattr(pipeline, "prepare", prepare)
    write_table(tmp_path / "words" / "train.parquet", {"text": ["a"], "labels": ["b"]})
    write_table(tmp_path / "words" / "labels.parquet", {"uid": ["b"], "text": ["b"]})
    (tmp_path / "words" / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "words" / "inside")
    for options in ({"format": "datasets"}, {}):
        api.prepare("..", tmp_path / "out", **options)
    monkeypatch.chdir(tmp_path / "words")
    api.prepare(".", tmp_path / "out")
    assert prepared == [("words", "words")] * 3


def test_words_of_csv_that_look_like_no_value_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "set"
    source.mkdir()
    lines = ["text,labels,clicks", "None,NA,1", "windhoek,,2", "nan,null,", ""]
    (source / "train.csv").write_text("\n".join(lines))
    raw = raw_files(source, tmp_path / "raw", relevance="clicks")
    assert queries(raw) == [("0", "None", ["NA"]), ("1", "windhoek", []), ("2", "nan", ["null"])]


@pytest.mark.parametrize("commas", ["", ",", ",,"])
def test_rows_of_csv_may_end_with_commas(tmp_path: Path, commas: str) -> None:
    source = tmp_path / "set"
    source.mkdir()
    (source / "train.csv").write_text(f"text,labels\na,b{commas}\nx,y{commas}\n")
    assert queries(raw_files(source, tmp_path / "raw")) == [("0", "a", ["b"]), ("1", "x", ["y"])]


def test_a_data_set_may_say_itself_which_cells_are_empty(tmp_path: Path) -> None:
    source = tmp_path / "set"
    source.mkdir()
    lines = ["configs:", "- config_name: a", "  data_files: a.csv", "  keep_default_na: false"]
    (source / "README.md").write_text("\n".join(["---", *lines, "  na_values: '-'", "---", ""]))
    (source / "a.csv").write_text("text,labels\na,-,\nNA,y,\n")
    assert queries(raw_files(source, tmp_path / "raw")) == [("0", "a", []), ("1", "NA", ["y"])]


def test_uids_of_csv_stay_texts(tmp_path: Path) -> None:
    source = tmp_path / "set"
    source.mkdir()
    configurations = [
        "configs:",
        "- config_name: queries",
        "  data_files: queries.csv",
        "- config_name: labels",
        "  data_files: labels.csv",
    ]
    (source / "README.md").write_text("\n".join(["---", *configurations, "---", ""]))
    (source / "queries.csv").write_text("uid,text,labels\n007,bond,01\n7,seven,1\n,none,\n")
    (source / "labels.csv").write_text("uid,text\n01,agent\n1,number\n")
    splits = {"train": "train", "labels": "labels/train"}
    tables = HubTables(str(source), Columns(uid="uid"), "queries", splits)
    raw = raw_files(source, tmp_path / "raw", tables)
    assert [row.uid for row in raw.labels(refused)] == ["01", "1"]
    assert queries(raw)[:2] == [("007", "bond", ["agent"]), ("7", "seven", ["number"])]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "EmptyDataError: No columns to parse from file"),
        (b"text,labels\na,b\nx,y,z\n", "Expected 2 fields in line 3, saw 3"),
        (b"text,labels\na, b,c\nx,y\n", r"train\.csv, line 2: the row has 3 fields, expected 2"),
        (b"text,labels\na,b,,\nx,y,,z\n", r"train\.csv, line 3: the row has 4 fields, expected 2"),
        (b"text,labels\n\xe9,a\n", "can't decode byte 0xe9"),
        (
            b"text,labels\nq,\"['a', 'b']\"\nr,[]\n",
            r"holds texts such as .*, expected lists of labels",
        ),
    ],
)
def test_what_is_wrong_with_a_csv_file_is_said(
    tmp_path: Path, content: bytes, message: str
) -> None:
    source = tmp_path / "set"
    source.mkdir()
    (source / "train.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        raw_files(source, tmp_path / "raw")
