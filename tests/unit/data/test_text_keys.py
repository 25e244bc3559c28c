"""Equal texts are counted, and training queries with the text of a test query can be left out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from corpora import appended, corpus_of

from xmcray.data import text_keys
from xmcray.data.text_keys import LEAKS, TextKeys, keys_by_name

LABELS = ["Blue kettle", "blue  kettle", "Blue kettle", "pot", ""]
TRAIN = ["a kettle", "A  kettle", "camp fire", "tea", "", ""]
TEST = ["Camp Fire", "camp fire", "cup"]
EXPECTED = {
    "labels: text of another label": 1,
    "labels: text differs from another label only in case": 1,
    "train: text of an earlier training query": 1,
    "test: text of an earlier test query": 1,
    LEAKS: 2,
}


def write_raw(folder: Path, **splits: list[str]) -> Path:
    folder.mkdir()
    for split, texts in splits.items():
        rows = []
        for number, text in enumerate(texts):
            row = {"uid": f"{folder.name}{split}{number}", "text": text}
            rows.append(row if split == "labels" else {**row, "labels": [3]})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)
    return folder


def odd_texts(odd: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in odd.items() if name in text_keys.COUNTED}


def test_equal_texts_are_counted_and_leaks_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = write_raw(tmp_path / "raw", labels=LABELS, train=TRAIN, test=TEST)
    corpus = corpus_of(raw, tmp_path / "corpus", shard_rows=2)
    assert odd_texts(corpus.card.odd) == EXPECTED
    assert "2 of 3 test queries have the text of a training query" in caplog.text
    assert corpus.card.num_train == len(TRAIN)


def test_leaks_can_be_left_out_of_the_training_queries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = write_raw(tmp_path / "raw", labels=LABELS, train=TRAIN, test=TEST)
    corpus = corpus_of(raw, tmp_path / "corpus", on_leak="drop", shard_rows=2)
    assert LEAKS not in corpus.card.odd
    assert not caplog.records
    assert corpus.card.num_test == len(TEST)
    train = corpus.split("train")
    assert train.texts(np.arange(len(train))) == [text for text in TRAIN if text != "camp fire"]
    assert corpus.card.rejected == {"train": 1}
    rejected = json.loads((corpus.path / "rejected.jsonl").read_text())
    assert rejected["line"] == 3
    assert rejected["reason"] == "its text is that of a test query"


def test_appended_rows_are_compared_with_those_before(tmp_path: Path) -> None:
    first = write_raw(tmp_path / "first", labels=LABELS, train=TRAIN[:3], test=TEST[:1])
    second = write_raw(tmp_path / "second", labels=["pan"], train=TRAIN[3:], test=TEST[1:])
    for row in ("train", "test"):
        path = second / f"{row}.jsonl"
        path.write_text(path.read_text().replace("[3]", "[0]"))
    grown = appended(corpus_of(first, tmp_path / "a", shard_rows=2), second, tmp_path / "b")
    assert odd_texts(grown.card.odd) == EXPECTED


def test_keys_are_counted_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_keys, "_KEYS_AT_ONCE", 3)
    numbers = np.random.default_rng(0).integers(0, 50, (2, 40))
    texts = {"train": [str(n) for n in numbers[0]], "test": [str(n) for n in numbers[1]]}
    keys = TextKeys(tmp_path)
    for split, split_texts in texts.items():
        for start in range(0, 40, 7):
            keys.add(keys_by_name(split, split_texts[start : start + 7]))
    odd = keys.odd_rows()
    assert odd["train: text of an earlier training query"] == 40 - len(set(texts["train"]))
    assert odd[LEAKS] == sum(text in texts["train"] for text in texts["test"])
    assert list(tmp_path.iterdir()) == []
