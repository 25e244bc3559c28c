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
    rows = {}
    for split in source.splits:
        queries = source.queries(split, len(labels), refuse)
        rows[split] = list(queries)
    return rows


def test_sizes(splits: dict[str, list[Row]], labels: list[Row]) -> None:
    assert 2000 < len(splits["train"]) < 3000
    assert 450 < len(splits["test"]) < 750
    assert 1500 < len(labels) < 2600


def test_every_label_is_trained_and_most_are_rare(
    splits: dict[str, list[Row]],
    labels: list[Row],
) -> None:
    counts: Counter[int] = Counter()
    for row in splits["train"]:
        counts.update(row.label_ids)

    assert len(counts) == len(labels)
    is_rare = np.array(list(counts.values())) <= 5
    assert 0.7 < is_rare.mean() < 0.95


def test_the_query_itself_is_filtered_and_no_answer(
    source: RawFiles,
    splits: dict[str, list[Row]],
    labels: list[Row],
) -> None:
    label_of_uid = {label.uid: number for number, label in enumerate(labels)}

    for split, rows in splits.items():
        expected = []
        for row in rows:
            if row.uid not in label_of_uid:
                continue
            own_label = label_of_uid[row.uid]
            assert own_label not in row.label_ids
            expected.append([row.row, own_label])
        assert source.filters(split).tolist() == expected

    train_uids = {row.uid for row in splits["train"]}
    test_uids = {row.uid for row in splits["test"]}
    assert not train_uids & test_uids


DOCSTRING = """solve(a, b)

Solve it.
Well.

More `words`.

See Also
--------
numpy.linalg.inv : Not a word of it.
lstsq, :func:`qr`
    Two.

Notes
-----
other : thing
"""


def test_text_ends_before_the_see_also_section() -> None:
    item = sample.Documented.parse("numpy.linalg.solve", DOCSTRING)

    assert item.description == "Solve it. Well. More words."
    assert item.see_also == ("numpy.linalg.inv", "lstsq", "qr")


def test_a_reader_could_know_each_answer_by_its_text(labels: list[Row]) -> None:
    texts = {label.uid: label.text for label in labels}

    assert "sorted copy of an array" in texts["numpy.sort"]
    for uid, text in texts.items():
        assert text.startswith(uid)
        # There is more to read than the name.
        assert len(text) > len(uid) + 3


def test_the_same_bytes_again(source: RawFiles, tmp_path: Path) -> None:
    sample.write_sample(tmp_path)

    for path in sorted(source.path.iterdir()):
        again = tmp_path / path.name
        assert again.read_bytes() == path.read_bytes(), path.name
