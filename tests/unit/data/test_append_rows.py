"""Rows without uids, and rows that were left out, when new raw files are appended to a corpus."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import appended, corpus_of

from xmcray.data.corpus import Corpus
from xmcray.errors import DataError

LABELS = [{"uid": "red", "text": "red"}, {"uid": "blue", "text": "blue"}]


def write_json_lines(folder: Path, **files: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir()
    for name, rows in files.items():
        lines = [json.dumps(row) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def query_uids(corpus: Corpus) -> list[str]:
    return corpus.split("train").uids(np.arange(corpus.card.num_train))


def test_queries_without_uids_are_numbered_on(tmp_path: Path) -> None:
    old_rows = [{"text": "a", "labels": ["red"]}, {"text": "b", "labels": [9]}, {"text": "c"}]
    old_raw = write_json_lines(tmp_path / "old", labels=LABELS, train=old_rows)
    corpus = corpus_of(old_raw, tmp_path / "c1", on_error="skip")
    assert query_uids(corpus) == ["0", "2"]
    new_rows = [{"text": "d", "labels": ["blue"]}, {"uid": "e", "text": "e"}, {"text": "f"}]
    new_raw = write_json_lines(tmp_path / "new", labels=LABELS, train=new_rows)
    grown = appended(corpus, new_raw, tmp_path / "c2")
    # The rejected row counts, as if all rows had been in one file.
    assert query_uids(grown) == ["0", "2", "3", "e", "5"]
    assert grown.split("train").positives(np.array([2])).values.tolist() == [1]


def test_a_number_that_is_a_uid_of_the_corpus_is_refused(tmp_path: Path) -> None:
    old_raw = write_json_lines(tmp_path / "old", labels=LABELS, train=[{"uid": 1, "text": "a"}])
    corpus = corpus_of(old_raw, tmp_path / "c1")
    new_raw = write_json_lines(tmp_path / "new", labels=LABELS, train=[{"text": "b"}])
    with pytest.raises(DataError, match="uid '1' is that of a query of the corpus"):
        appended(corpus, new_raw, tmp_path / "c2")
