"""The embedded sample is real, readable, useful and gives nothing away."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from xmcray.data import sample
from xmcray.data.formats import BadRow, RawFiles, Row, detect


def refuse(bad: BadRow) -> None:
    raise AssertionError(f"unexpected: {bad}")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RawFiles:
    folder = tmp_path_factory.mktemp("sample")
    sample.write_sample(folder)
    return detect(folder)


@pytest.fixture(scope="module")
def labels(source: RawFiles) -> list[Row]:
    return list(source.labels(refuse))


@pytest.fixture(scope="module")
def splits(source: RawFiles, labels: list[Row]) -> dict[str, list[Row]]:
    return {split: list(source.queries(split, len(labels), refuse)) for split in source.splits}


def test_sizes(splits: dict[str, list[Row]], labels: list[Row]) -> None:
    assert 2000 < len(splits["train"]) < 3000
    assert 450 < len(splits["test"]) < 750
    assert 1500 < len(labels) < 2600


def test_every_label_is_trained_and_most_are_rare(
    splits: dict[str, list[Row]], labels: list[Row]
) -> None:
    counts = Counter(label for row in splits["train"] for label in row.label_ids)
    assert len(counts) == len(labels)
    assert 0.7 < np.mean([count <= 5 for count in counts.values()]) < 0.95


def test_the_query_itself_is_filtered_and_no_answer(
    source: RawFiles, splits: dict[str, list[Row]], labels: list[Row]
) -> None:
    ids = {label.uid: n for n, label in enumerate(labels)}
    for split, rows in splits.items():
        expected = [[row.row, ids[row.uid]] for row in rows if row.uid in ids]
        assert source.filters(split).tolist() == expected
        assert not any(ids.get(row.uid) in row.label_ids for row in rows)
    assert not {row.uid for row in splits["train"]} & {row.uid for row in splits["test"]}


def test_text_ends_before_the_see_also_section() -> None:
    doc = "solve(a, b)\n\nSolve it.\nWell.\n\nMore `words`.\n\nSee Also\n--------\n"
    doc += "numpy.linalg.inv : Not a word of it.\nlstsq, :func:`qr`\n    Two.\n\nNotes\n-----\nother : thing\n"
    item = sample.Documented.parse("numpy.linalg.solve", doc)
    assert item.description == "Solve it. Well. More words."
    assert item.see_also == ("numpy.linalg.inv", "lstsq", "qr")


def test_a_reader_could_know_each_answer_by_its_text(labels: list[Row]) -> None:
    texts = {label.uid: label.text for label in labels}
    assert "sorted copy of an array" in texts["numpy.sort"]
    assert all(text.startswith(uid) and len(text) > len(uid) + 3 for uid, text in texts.items())


def test_the_same_bytes_again(source: RawFiles, tmp_path: Path) -> None:
    sample.write_sample(tmp_path)
    for path in sorted(source.path.iterdir()):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name
