"""CONTRIBUTING's recipe for a new file format: one class, one entry in FORMATS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from corpora import corpus_of

from xmcray.data.formats import FORMATS, detect
from xmcray.data.formats.base import BadRow, OnBad, Row, read_lines


class TabFormat:
    """labels.tsv: uid, text. train.tsv and test.tsv: uid, text, label rows separated by commas."""

    train = ("train.tsv", "labels.tsv")
    test = ("test.tsv",)

    def labels(self, folder: Path, on_bad: OnBad) -> Iterator[Row]:
        for number, line in enumerate(read_lines(folder / "labels.tsv")):
            uid, text = line.decode().split("\t")
            yield Row(uid, text, row=number)

    def queries(self, folder: Path, split: str, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
        for number, line in enumerate(read_lines(folder / f"{split}.tsv")):
            uid, text, listed = line.decode().split("\t")
            label_ids = tuple(sorted(int(label) for label in listed.split(",")))
            if label_ids[-1] >= num_labels:
                on_bad(BadRow(f"{split}.tsv", number + 1, f"label {label_ids[-1]} is out of range"))
                continue
            yield Row(uid, text, label_ids, row=number)

    def shape(self, folder: Path, split: str) -> tuple[int, int]:
        num_queries = sum(1 for _ in read_lines(folder / f"{split}.tsv"))
        num_labels = sum(1 for _ in read_lines(folder / "labels.tsv"))
        return num_queries, num_labels


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "labels.tsv").write_text("a\tblue kettle\nb\tred kettle\n")
    (folder / "train.tsv").write_text("q0\tkettle for a camp fire\t0,1\nq1\tred\t1\n")
    (folder / "test.tsv").write_text("q2\tblue\t0\n")
    return folder


def test_a_new_format_is_recognised_and_prepared(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMATS, "tab", TabFormat())
    source = detect(str(raw), None)
    assert source.format == "tab"
    assert source.splits == ("train", "test")
    corpus = corpus_of(raw, tmp_path / "corpus", vocab_size=200)
    assert corpus.card.num_train == 2
    assert corpus.card.num_labels == 2
    positives = corpus.split("train").positives([0, 1])
    assert list(positives.values) == [0, 1, 1]


def test_its_malformed_rows_are_reported(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "tab", TabFormat())
    (raw / "test.tsv").write_text("q2\tblue\t7\nq3\tred\t1\n")
    rejected: list[BadRow] = []
    rows = list(detect(str(raw), None).queries("test", 2, rejected.append))
    assert [row.uid for row in rows] == ["q3"]
    assert [str(bad) for bad in rejected] == ["test.tsv:1: label 7 is out of range"]
