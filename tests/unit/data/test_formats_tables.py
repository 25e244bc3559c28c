"""Parquet files and Hugging Face datasets saved to disk; what a schema may hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xmcray.data.formats import BadRow, Row, detect
from xmcray.errors import DataError

LABELS = pa.table({"uid": ["a", "b"], "text": ["apple", None]})
TRAIN = pa.table(
    {
        "uid": [10, 11, 12],
        "title": ["one", "two", None],
        "content": [None, "zwei Äpfel", "three"],
        "labels": [[1], [0, 1], None],
        "relevance": [[1.0], [0.5, 1.0], None],
        "other": [0.0, 1.0, 2.0],
    }
)
ROWS = [
    Row("10", "one", (1,)),
    Row("11", "two zwei Äpfel", (0, 1), (0.5, 1.0), 1),
    Row("12", "three", row=2),
]


def save_parquet(folder: Path, name: str, table: Any) -> None:
    pq.write_table(table, folder / f"{name}.parquet", row_group_size=2)


def save_arrow(folder: Path, name: str, table: Any) -> None:
    """As `datasets.save_to_disk` does: an Arrow stream and a state.json."""
    (folder / name).mkdir()
    path = str(folder / name / "data-00000-of-00001.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": name}
    (folder / name / "state.json").write_text(json.dumps(state))


SAVERS = {"parquet": save_parquet, "huggingface": save_arrow}


def read(folder: Path, bad: list[BadRow]) -> tuple[list[Row], list[Row]]:
    source = detect(folder)
    labels = list(source.labels(bad.append))
    return labels, list(source.queries("train", len(labels), bad.append))


@pytest.mark.parametrize("name", SAVERS)
def test_round_trip(tmp_path: Path, name: str) -> None:
    SAVERS[name](tmp_path, "labels", LABELS)
    SAVERS[name](tmp_path, "train", TRAIN)
    (tmp_path / "filter_labels_train.txt").write_text("2 1\n")
    bad: list[BadRow] = []
    labels, queries = read(tmp_path, bad)
    assert labels == [Row("a", "apple"), Row("b", "", row=1)]
    assert queries == ROWS
    assert bad == []
    assert detect(tmp_path).format == name
    assert detect(tmp_path).filters("train").tolist() == [[2, 1]]


def test_parquet_in_several_files_and_labels_by_uid(tmp_path: Path) -> None:
    save_parquet(tmp_path, "labels", LABELS)
    (tmp_path / "train").mkdir()
    for part, label in enumerate(["b", "nope", "a"]):
        table = pa.table({"text": [f"q{part}"] * 2, "labels": [[label], ["a"]]})
        save_parquet(tmp_path / "train", f"{part}", table)
    bad: list[BadRow] = []
    _, queries = read(tmp_path, bad)
    assert [(row.uid, row.row, row.label_ids) for row in queries] == [
        ("0", 0, (1,)),
        ("1", 1, (0,)),
        ("3", 3, (0,)),
        ("4", 4, (0,)),
        ("5", 5, (0,)),
    ]
    assert [str(b) for b in bad] == [
        f"{tmp_path}/train/1.parquet:1: label 'nope' is not the uid of a label in this folder;"
        " add it to the label file, also if it is in a corpus that is appended to"
    ]


@pytest.mark.parametrize("name", SAVERS)
def test_bad_rows(tmp_path: Path, name: str) -> None:
    text = pa.array([b"fine", b"\xff\xfe", b"dup", b"range"], pa.binary()).cast(
        pa.string(), safe=False
    )
    SAVERS[name](tmp_path, "labels", LABELS)
    table = pa.table({"uid": ["0", "1", "0", "3"], "text": text, "labels": [[0], [0], [0], [2]]})
    SAVERS[name](tmp_path, "train", table)
    bad: list[BadRow] = []
    _, queries = read(tmp_path, bad)
    assert [row.uid for row in queries] == ["0"]
    reasons = [
        "not UTF-8",
        "duplicate uid '0'",
        "label id 2 is out of range, there are 2 labels in this folder (0 to 1)",
    ]
    assert [(b.line, b.reason) for b in bad] == list(zip((2, 3, 4), reasons, strict=True))


class Canary(pa.ExtensionType):
    """Notes that its code ran while a schema was read."""

    woken = False

    def __init__(self) -> None:
        super().__init__(pa.int64(), "test.canary")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"payload"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, payload: bytes) -> Canary:
        cls.woken = True
        return cls()


@pytest.mark.parametrize("name", SAVERS)
@pytest.mark.parametrize("pad", range(3))
def test_extension_types_are_refused_before_their_code_runs(
    tmp_path: Path, name: str, pad: int
) -> None:
    SAVERS[name](tmp_path, "labels", LABELS)
    column = pa.ExtensionArray.from_storage(Canary(), pa.array([1]))
    table = pa.table({"text": ["q"], "x" * (pad + 1): column}).replace_schema_metadata(
        {"k" * pad: "v"}
    )
    SAVERS[name](tmp_path, "train", table)
    pa.register_extension_type(Canary())
    Canary.woken = False
    try:
        with pytest.raises(DataError, match="a column of an extension type, which can run code"):
            read(tmp_path, [])
        assert not Canary.woken
    finally:
        pa.unregister_extension_type("test.canary")


@pytest.mark.parametrize("name", SAVERS)
@pytest.mark.parametrize(
    "column",
    [
        pa.array([{"a": 1}]),
        pa.array([[[1]]]),
        pa.array([b"x"]),
        pa.array([True]),
        pa.array(["x"]).dictionary_encode(),
        pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        pa.array([0], pa.timestamp("s")),
    ],
    ids=lambda column: str(column.type)[:20],
)
def test_other_types_are_refused(tmp_path: Path, name: str, column: Any) -> None:
    SAVERS[name](tmp_path, "labels", LABELS)
    SAVERS[name](tmp_path, "train", pa.table({"text": ["q"], "odd": column}))
    with pytest.raises(
        DataError, match=r"column 'odd' is of type .*expected strings, integers, floats or lists"
    ):
        read(tmp_path, [])


@pytest.mark.parametrize("name", SAVERS)
def test_no_text_column(tmp_path: Path, name: str) -> None:
    SAVERS[name](tmp_path, "labels", LABELS)
    SAVERS[name](tmp_path, "train", pa.table({"question": ["q"], "labels": [[0]]}))
    with pytest.raises(
        DataError, match=r"no column text, title or content \(found: question, labels\)"
    ):
        read(tmp_path, [])


@pytest.mark.parametrize("name", SAVERS)
def test_damaged_file(tmp_path: Path, name: str) -> None:
    for split, table in (("labels", LABELS), ("train", TRAIN)):
        SAVERS[name](tmp_path, split, table)
    path = next(
        p for p in tmp_path.rglob("*") if "train" in str(p) and p.suffix in (".parquet", ".arrow")
    )
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[:9],
        whole[: len(whole) // 2],
        b"\0" * 80,
        whole[: len(whole) // 3] + b"\xff" * 200,
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"(cannot be read|not a complete Parquet file).*again"):
            read(tmp_path, [])


def test_saved_selection_and_foreign_paths_are_refused(tmp_path: Path) -> None:
    for split, table in (("labels", LABELS), ("train", TRAIN)):
        save_arrow(tmp_path, split, table)
    for state, message in (
        (
            {"_data_files": [{"filename": "../labels/data-00000-of-00001.arrow"}]},
            "names other folders",
        ),
        (
            {"_data_files": [{"filename": "x"}], "_indices_data_files": [{"filename": "i"}]},
            "selects rows by an index",
        ),
        ({"files": []}, "is not the state.json of a saved dataset"),
    ):
        (tmp_path / "train/state.json").write_text(json.dumps(state))
        with pytest.raises(DataError, match=message):
            read(tmp_path, [])


@pytest.mark.parametrize("name", ["train/part-{}", "train-{}", "train_{}", "train{}"])
def test_files_of_a_split_are_in_the_order_of_their_numbers(tmp_path: Path, name: str) -> None:
    save_parquet(tmp_path, "labels", LABELS)
    (tmp_path / "train").mkdir()
    for number in (10, 2, 1):
        save_parquet(tmp_path, name.format(number), pa.table({"text": [f"q{number}"]}))
    _, queries = read(tmp_path, [])
    assert [row.text for row in queries] == ["q1", "q2", "q10"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train-00000-of-00003", "train-00002-of-00003"], "2 parts like train-00000-of-00003"),
        (["train-00000-of-00001", "train-00001-of-00002"], "2 parts like .*, expected 1"),
        (["train", "train-00000-of-00001"], "has train.parquet and train-00000-of-00001.parquet"),
    ],
)
def test_files_of_a_split_that_may_be_missing_or_of_another_set_are_refused(
    tmp_path: Path, names: list[str], message: str
) -> None:
    save_parquet(tmp_path, "labels", LABELS)
    for name in names:
        save_parquet(tmp_path, name, TRAIN)
    with pytest.raises(DataError, match=message):
        read(tmp_path, [])


def test_a_file_of_a_split_without_the_column_of_labels_is_refused(tmp_path: Path) -> None:
    save_parquet(tmp_path, "labels", LABELS)
    save_parquet(tmp_path, "train-0", pa.table({"text": ["q0"], "labels": [["a"]]}))
    save_parquet(tmp_path, "train-1", pa.table({"text": ["q1"], "label": [["a"]]}))
    message = r"train-1\.parquet has no column labels, but .*train-0\.parquet has one; add it"
    with pytest.raises(DataError, match=message):
        read(tmp_path, [])
