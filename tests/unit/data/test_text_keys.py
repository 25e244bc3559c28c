"""Equal texts are counted, and training queries with the text of a test query can be left out."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from corpora import appended, corpus_of

from xmcray.data import text_keys
from xmcray.data.corpus import KIND, Corpus
from xmcray.data.text_keys import LEAKS, TextKeys, keys_by_name
from xmcray.storage.manifest import read_manifest

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


def write_raw(folder: Path, label: int = 3, **splits: list[str]) -> Path:
    """Raw files of some texts; each query has the same label."""
    folder.mkdir()
    for split, texts in splits.items():
        lines = []
        for number, text in enumerate(texts):
            row: dict[str, object] = {
                "uid": f"{folder.name}{split}{number}",
                "text": text,
            }
            if split != "labels":
                row["labels"] = [label]
            lines.append(json.dumps(row) + "\n")
        file = folder / f"{split}.jsonl"
        file.write_text("".join(lines))
    return folder


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_raw(
        tmp_path / "raw",
        labels=LABELS,
        train=TRAIN,
        test=TEST,
    )


def odd_texts(corpus: Corpus) -> dict[str, int]:
    """The counts of equal texts on the card of a corpus."""
    odd = corpus.card.odd
    return {name: odd[name] for name in odd if name in text_keys.COUNTED}


def test_equal_texts_are_counted_and_leaks_are_warned_of(
    raw: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    corpus = corpus_of(raw, tmp_path / "corpus", shard_rows=2)

    assert odd_texts(corpus) == EXPECTED
    assert "2 of 3 test queries have the text of a training query" in caplog.text
    assert corpus.card.num_train == len(TRAIN)


def test_leaks_can_be_left_out_of_the_training_queries(
    raw: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    corpus = corpus_of(raw, tmp_path / "corpus", on_leak="drop", shard_rows=2)

    assert LEAKS not in corpus.card.odd
    assert not caplog.records
    assert corpus.card.num_test == len(TEST)
    train = corpus.split("train")
    texts = train.texts(np.arange(len(train)))
    assert texts == [text for text in TRAIN if text != "camp fire"]
    assert corpus.card.rejected == {"train": 1}
    rejected = json.loads((corpus.path / "rejected.jsonl").read_text())
    assert rejected["file"] == "train.jsonl"
    assert rejected["line"] == 3
    assert rejected["reason"] == "its text is that of a test query"


def test_appended_rows_are_compared_with_those_before(tmp_path: Path) -> None:
    first = write_raw(
        tmp_path / "first",
        labels=LABELS,
        train=TRAIN[:3],
        test=TEST[:1],
    )
    # Its only label is number 0 of its own file.
    second = write_raw(
        tmp_path / "second",
        label=0,
        labels=["pan"],
        train=TRAIN[3:],
        test=TEST[1:],
    )

    corpus = corpus_of(first, tmp_path / "a", shard_rows=2)
    grown = appended(corpus, second, tmp_path / "b")

    assert odd_texts(grown) == EXPECTED


def test_a_corpus_on_nfs_lists_no_nameless_file(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = corpus_of(raw, tmp_path / "here")
    # NFS gives a file without a name one of its own as long as it is open.
    monkeypatch.setattr(tempfile, "TemporaryFile", tempfile.NamedTemporaryFile)
    on_nfs = corpus_of(raw, tmp_path / "nfs")
    names = read_manifest(here.path, KIND).files.keys()
    assert read_manifest(on_nfs.path, KIND).files.keys() == names


def test_keys_are_counted_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_keys, "_KEYS_AT_ONCE", 3)
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 50, (2, 40))
    train, test = numbers.astype(str).tolist()

    keys = TextKeys(tmp_path)
    for start in range(0, 40, 7):
        keys.add(keys_by_name("train", train[start : start + 7]))
    for start in range(0, 40, 7):
        keys.add(keys_by_name("test", test[start : start + 7]))
    odd = keys.odd_rows()

    assert odd["train: text of an earlier training query"] == 40 - len(set(train))
    leaks = [text for text in test if text in train]
    assert odd[LEAKS] == len(leaks)
    assert list(tmp_path.iterdir()) == []
