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
    return {
        int(word.split("x")[0][1:]) for word in row.text.split() if re.fullmatch(r"w\d+x\d", word)
    }


@pytest.mark.parametrize("seed", [0, 1])
def test_words_name_the_positives_and_the_filtered_label(tmp_path: Path, seed: int) -> None:
    write_planted(tmp_path, 300, 40, seed, only_in_test=2)
    source = detect(tmp_path)
    labels = list(source.labels(refuse))
    assert [labels_named(label) for label in labels] == [{n} for n in range(40)]
    for split, size in (("train", 300), ("test", 60)):
        rows = list(source.queries(split, 40, refuse))
        filters = dict(source.filters(split).tolist())
        assert len(rows) == size
        assert filters
        for row in rows:
            own = {filters[row.row]} if row.row in filters else set()
            assert not own & set(row.label_ids)
            assert labels_named(row) == own | set(row.label_ids)
            assert len(row.label_ids) <= MAX_POSITIVES
    assert {38, 39} <= {label for row in rows for label in row.label_ids}


def test_train_has_rare_unseen_and_missing_labels(tmp_path: Path) -> None:
    write_planted(tmp_path, 1000, 60, seed=3, only_in_test=3)
    rows = list(detect(tmp_path).queries("train", 60, refuse))
    counts = Counter(label for row in rows for label in row.label_ids)
    assert not {57, 58, 59} & counts.keys()
    assert counts[0] > 3 * counts[50] > 0
    assert 0 < sum(not row.label_ids for row in rows) < 100


def test_seed_decides_the_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_planted(tmp_path / name, 50, 10, seed)
    a, b, c = ((tmp_path / name / "train.jsonl").read_bytes() for name in "abc")
    assert a == b != c
