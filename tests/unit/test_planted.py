"""Planted data hold what they promise."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from planted import MAX_POSITIVES, write_planted

from xmcray.data.formats import BadRow, Row, detect


def refuse(bad: BadRow) -> None:
    raise AssertionError(f"unexpected: {bad}")


def labels_named(row: Row) -> set[int]:
    """Labels whose words are in the text; "w7x2" is a word of label 7."""
    named = set()
    for word in row.text.split():
        match = re.fullmatch(r"w(\d+)x\d", word)
        if match is not None:
            named.add(int(match[1]))
    return named


@pytest.mark.parametrize("seed", [0, 1])
def test_words_name_the_positives_and_the_filtered_label(tmp_path: Path, seed: int) -> None:
    write_planted(
        tmp_path,
        300,
        40,
        seed,
        only_in_test=2,
    )
    source = detect(tmp_path)

    labels = list(source.labels(refuse))
    assert len(labels) == 40
    for number, label in enumerate(labels):
        assert labels_named(label) == {number}

    size_of_split = {"train": 300, "test": 60}
    for split, size in size_of_split.items():
        rows = list(source.queries(split, 40, refuse))
        filters = dict(source.filters(split).tolist())
        assert len(rows) == size
        assert filters
        for row in rows:
            positives = set(row.label_ids)
            filtered = {filters[row.row]} if row.row in filters else set()
            assert not filtered & positives
            assert labels_named(row) == filtered | positives
            assert len(row.label_ids) <= MAX_POSITIVES

    tested = set()
    for row in source.queries("test", 40, refuse):
        tested.update(row.label_ids)
    assert {38, 39} <= tested


def test_train_has_rare_unseen_and_missing_labels(tmp_path: Path) -> None:
    write_planted(
        tmp_path,
        1000,
        60,
        seed=3,
        only_in_test=3,
    )

    source = detect(tmp_path)
    rows = list(source.queries("train", 60, refuse))

    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(row.label_ids)
    only_in_test = {57, 58, 59}
    assert not only_in_test & counts.keys()
    assert counts[0] > 3 * counts[50] > 0
    without_positive = [row for row in rows if not row.label_ids]
    assert 0 < len(without_positive) < 100


def test_seed_decides_the_bytes(tmp_path: Path) -> None:
    def written(name: str, seed: int) -> bytes:
        write_planted(tmp_path / name, 50, 10, seed)
        return (tmp_path / name / "train.jsonl").read_bytes()

    first = written("a", seed=1)
    again = written("b", seed=1)
    other = written("c", seed=2)

    assert first == again
    assert first != other
