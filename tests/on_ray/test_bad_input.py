"""Raw files that are wrong in every way a user's may be, through `xmcray prepare`: one line, and nothing is left."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planted import write_planted
from shell import run_command

pytestmark = pytest.mark.usefixtures("cluster")

AT = 5  # rows before the bad one


def line(row: bytes) -> Callable[[Path], None]:
    """Puts a row among good ones."""

    def spoil(raw: Path) -> None:
        rows = (raw / "train.jsonl").read_bytes().splitlines()
        (raw / "train.jsonl").write_bytes(b"\n".join([*rows[:AT], row, *rows[AT:]]) + b"\n")

    return spoil


def packed(data: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Replaces train.jsonl by train.jsonl.gz with what `data` makes of its bytes."""

    def spoil(raw: Path) -> None:
        content = (raw / "train.jsonl").read_bytes()
        (raw / "train.jsonl").unlink()
        (raw / "train.jsonl.gz").write_bytes(data(content))

    return spoil


def filters(text: str) -> Callable[[Path], None]:
    """Replaces the filter file of the training queries."""

    def spoil(raw: Path) -> None:
        (raw / "filter_labels_train.txt").write_text(text)

    return spoil


def extension_type(raw: Path) -> None:
    """Replaces everything by Parquet files of which one has a column of an extension type."""
    for path in raw.iterdir():
        path.unlink()
    pq.write_table(pa.table({"uid": ["a"], "text": ["apple"]}), raw / "labels.parquet")
    tensor = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), [1]), pa.array([[1]], pa.list_(pa.int32(), 1))
    )
    pq.write_table(pa.table({"text": ["q"], "labels": [[0]], "odd": tensor}), raw / "train.parquet")


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing file": (
        lambda raw: (raw / "labels.jsonl").unlink(),
        "lacks labels.jsonl of format jsonl",
    ),
    "truncated gzip": (
        packed(lambda data: gzip.compress(data)[:-20]),
        "train.jsonl.gz is not a complete gzip file",
    ),
    "unreadable gzip": (packed(lambda data: data), "train.jsonl.gz is not a complete gzip file"),
    "bomb": (
        packed(lambda _: gzip.compress(bytes(80 << 20), 1)),
        "train.jsonl.gz unpacks to more than 200 times its size",
    ),
    "broken JSON": (line(b'{"uid": "x", '), "train.jsonl:6: broken JSON"),
    "label id": (
        line(b'{"uid": "x", "text": "x", "labels": [10]}'),
        "train.jsonl:6: label id 10 is out of range",
    ),
    "duplicate uid": (
        line(b'{"uid": "train0", "text": "x"}'),
        "train.jsonl:6: duplicate uid 'train0'",
    ),
    "NaN relevance": (
        line(b'{"uid": "x", "labels": [0], "relevance": [NaN]}'),
        "train.jsonl:6: relevance nan",
    ),
    "not UTF-8": (line(b'{"uid": "x", "text": "\xff"}'), "train.jsonl:6: not UTF-8"),
    "10 MB": (
        line(b'{"uid": "x", "text": "' + b"a" * 10_000_000 + b'"}'),
        "train.jsonl:6: text has 10,000,000 char",
    ),
    "filter of no row": (filters("0 1\n30 0\n"), "filter_labels_train.txt:2: names row 30"),
    "filter of no label": (filters("0 1\n3 10\n"), "filter_labels_train.txt:2: names label 10"),
    "extension type": (extension_type, "a column of an extension type, which can run code"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_raw_files(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spoil, message = BAD[kind]
    write_planted(tmp_path / "raw", num_queries=30, num_labels=10)
    spoil(tmp_path / "raw")
    before = {path.name: path.read_bytes() for path in (tmp_path / "raw").iterdir()}
    assert run_command(f"prepare {tmp_path}/raw --out {tmp_path}/corpus") == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "raw").iterdir()} == before
