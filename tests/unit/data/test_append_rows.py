"""Rows without uids, and rows that were left out, when new raw files are appended to a corpus."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import appended, corpus_of

from xmcray.data import pipeline
from xmcray.data.append import appended_files
from xmcray.data.appended_labels import match_labels, removed_rows
from xmcray.data.corpus import Corpus
from xmcray.data.formats import BadRow, detect
from xmcray.data.rejected import RejectedRows
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
    train = [{"uid": 1, "text": "a", "labels": ["red"]}]
    old_raw = write_json_lines(tmp_path / "old", labels=LABELS, train=train)
    corpus = corpus_of(old_raw, tmp_path / "c1")
    new_raw = write_json_lines(tmp_path / "new", labels=LABELS, train=[{"text": "b"}])
    with pytest.raises(DataError, match="uid '1' is that of a query of the corpus"):
        appended(corpus, new_raw, tmp_path / "c2")


def test_a_row_that_cannot_be_appended_is_named_by_its_file(tmp_path: Path) -> None:
    old_raw = write_json_lines(
        tmp_path / "old", labels=LABELS, train=[{"uid": "q", "text": "a", "labels": ["red"]}]
    )
    corpus = corpus_of(old_raw, tmp_path / "c1")
    new_rows = [{"uid": "r", "text": "b"}, {"uid": "q", "text": "c"}]
    new_raw = write_json_lines(tmp_path / "new", labels=LABELS, train=new_rows)
    with pytest.raises(DataError, match=r"new/train\.jsonl:2: uid 'q' is that of a query"):
        appended(corpus, new_raw, tmp_path / "c2")
    # Of several files, the row is that of its own.
    parts = tmp_path / "parts"
    (parts / "train").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(LABELS), parts / "labels.parquet")
    for number, row in enumerate(new_rows, 1):
        pq.write_table(pa.Table.from_pylist([row]), parts / "train" / f"{number}.parquet")
    with pytest.raises(DataError, match=r"parts/train/2\.parquet:1: uid 'q'"):
        appended(corpus, parts, tmp_path / "c3")


def test_an_appended_row_with_an_unknown_label_says_where_labels_belong(tmp_path: Path) -> None:
    """The label file of new rows repeats labels of the corpus that they name."""
    old_raw = write_json_lines(
        tmp_path / "old", labels=LABELS, train=[{"uid": "q", "text": "a", "labels": ["red"]}]
    )
    corpus = corpus_of(old_raw, tmp_path / "c1")
    for label, message in (
        (
            "red",
            "'red' is not the uid of a label in this folder; add it to the label file, also if",
        ),
        (1, "label id 1 is out of range, there are 1 labels in this folder"),
    ):
        folder = tmp_path / f"new-{label}"
        row = {"uid": "r", "text": "b", "labels": [label]}
        new_raw = write_json_lines(folder, labels=LABELS[1:], train=[row])
        with pytest.raises(DataError, match=message):
            appended(corpus, new_raw, tmp_path / "c2")


def write_lines(folder: Path, labels: bytes, label_of_query: list[int]) -> Path:
    """The layout "renee", which has no uids."""
    folder.mkdir()
    (folder / "Y.txt").write_bytes(labels)
    num_queries = len(label_of_query)
    texts = [f"about label {label}\n" for label in label_of_query]
    (folder / "trn_X.txt").write_text("".join(texts))
    entries = [f"{label}:1\n" for label in label_of_query]
    num_labels = labels.count(b"\n")
    header = f"{num_queries} {num_labels}\n"
    (folder / "trn_X_Y.txt").write_text(header + "".join(entries))
    return folder


def test_labels_after_a_malformed_one_keep_their_ids(tmp_path: Path) -> None:
    old_labels = b"zero\n\xff\xfe\ntwo\n"
    new_labels = old_labels + b"three\n\xff\nfive\n"
    old_raw = write_lines(tmp_path / "old", old_labels, [0, 2])
    new_raw = write_lines(tmp_path / "new", new_labels, [3, 2, 5])
    all_raw = write_lines(tmp_path / "all", new_labels, [0, 2, 3, 2, 5])
    old = corpus_of(old_raw, tmp_path / "c1", on_error="skip")
    grown = appended(old, new_raw, tmp_path / "c2", on_error="skip")
    expected = corpus_of(all_raw, tmp_path / "c3", on_error="skip")
    for corpus in (grown, expected):
        label_ids = np.arange(6)
        assert corpus.label_texts(label_ids) == ["zero", "", "two", "three", "", "five"]
        positives = corpus.split("train").positives(np.arange(5))
        assert positives.values.tolist() == [0, 2, 3, 2, 5]
        # The row that the corpus left out is counted once.
        assert corpus.card.rejected == {"labels": 2}
    rejected = [path / "rejected.jsonl" for path in (grown.path, expected.path)]
    assert rejected[0].read_text() == rejected[1].read_text()
    # Nothing changes if all labels are repeated, the malformed ones at the end as well.
    again = appended(grown, write_lines(tmp_path / "2", new_labels, [1]), tmp_path / "c4", "skip")
    assert again.card.num_labels == 6


def test_a_malformed_label_of_a_file_with_uids_is_another_one(tmp_path: Path) -> None:
    """Its row says nothing about the labels of the corpus."""
    train = [{"uid": "q", "text": "a", "labels": ["red"]}]
    old_raw = write_json_lines(tmp_path / "old", labels=[{"uid": "red"}, {"uid": []}], train=train)
    old = corpus_of(old_raw, tmp_path / "c1", on_error="skip")
    labels = [{"uid": "red"}, {"uid": []}, {"uid": "blue"}]
    train = [{"uid": "r", "text": "a", "labels": ["blue"]}]
    new_raw = write_json_lines(tmp_path / "new", labels=labels, train=train)
    grown = appended(old, new_raw, tmp_path / "c2", on_error="skip")
    assert grown.label_uids(np.arange(4)) == ["red", "rejected:1", "rejected:2", "blue"]
    assert grown.card.rejected == {"labels": 2}


def test_rejected_rows_come_in_the_order_of_the_files_however_a_folder_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    valid = {"text": "a", "labels": ["red"]}
    rows = {"a": [valid, {"text": 1}], "b": [{"text": 2}, valid]}
    for name, train in rows.items():
        write_json_lines(tmp_path / name, labels=LABELS, train=train)
    monkeypatch.chdir(tmp_path)
    old = corpus_of(Path("a"), tmp_path / "c1", on_error="skip")
    contents = []
    for spelling in (Path("b"), tmp_path / "b"):
        grown = appended(old, spelling, tmp_path / f"grown{len(contents)}", "skip")
        contents.append((grown.path / "rejected.jsonl").read_text())
    assert contents[0] == contents[1]
    assert [json.loads(line)["line"] for line in contents[0].splitlines()] == [2, 1]


def test_rejected_rows_of_shards_are_written_by_split_and_shard(tmp_path: Path) -> None:
    """Shards arrive in any order; rows of one keep the order of the file."""
    rejected = RejectedRows(tmp_path)
    shards = [("train", 10, [7]), ("labels", 0, [3]), ("train", 2, [5, 4]), ("test", 0, [])]
    for split, shard, lines in shards:
        rows = [BadRow(f"folder/{split}.jsonl", line, "lone \ud83d é") for line in lines]
        rejected.add(split, shard, rows)
    earlier = [("labels", BadRow("old.jsonl", 9, "broken")), ("test", BadRow("old.jsonl", 8, "x"))]
    assert rejected.write(earlier) == {"labels": 2, "test": 1, "train": 3}
    text = (tmp_path / "rejected.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    assert [(record["split"], record["line"]) for record in records] == [
        ("labels", 9),
        ("labels", 3),
        ("test", 8),
        ("train", 5),
        ("train", 4),
        ("train", 7),
    ]
    assert records[1] == {"split": "labels", "file": "labels.jsonl", "line": 3} | {
        "reason": "lone \ud83d é"
    }


def test_malformed_labels_are_not_kept_while_labels_are_matched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xmcray.data.chunks.MAX_PENDING", 2)
    train = [{"text": "a", "labels": ["red"]}]
    old = corpus_of(write_json_lines(tmp_path / "old", labels=LABELS, train=train), tmp_path / "c1")
    malformed = [{"uid": []}] * 2
    labels = [{"uid": "red"}, *malformed, {"uid": "blue"}, *malformed]
    new_raw = write_json_lines(tmp_path / "new", labels=labels, train=train)
    label_ids = match_labels(old, detect(new_raw), skip=True)
    assert label_ids.tolist() == [0, 2, 3, 1, 4, 5]


@pytest.mark.parametrize(
    ("row", "missing"),
    [
        ({"query": "a", "labels": ["red"]}, "text"),
        ({"text": "a", "tags": ["red"]}, "labels"),
    ],
)
def test_fields_of_another_name_are_refused(
    tmp_path: Path, row: dict[str, Any], missing: str
) -> None:
    good = {"text": "a", "labels": ["red"]}
    splits = {"training": {"train": [row, row]}, "test": {"train": [good], "test": [row, row]}}
    for kind, files in splits.items():
        raw = write_json_lines(tmp_path / kind, labels=LABELS, **files)
        with pytest.raises(DataError, match=f"no {kind} query has {missing}, expected some"):
            corpus_of(raw, tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


def test_appended_queries_with_fields_of_another_name_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = [{"text": "a", "labels": ["red"]}]
    old = corpus_of(write_json_lines(tmp_path / "old", labels=LABELS, train=train), tmp_path / "c")
    for number, row in enumerate(
        [{"query": "b", "labels": ["red"]}, {"text": "c", "tags": ["red"]}]
    ):
        new = write_json_lines(tmp_path / f"new{number}", labels=LABELS, train=[row])
        appended(old, new, tmp_path / f"grown{number}")
    assert ["no new training query has text" in m for m in caplog.messages] == [True, False]
    assert ["no new training query has labels" in m for m in caplog.messages] == [False, True]


REMOVED = b'{"uid": "red"}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("removed_labels.jsonl", REMOVED),
        ("removed_labels.jsonl", b"\xef\xbb\xbf" + REMOVED),
        ("removed_labels.jsonl", REMOVED.replace(b"\n", b"\r\n\r\n")),
        ("removed_labels.jsonl.gz", gzip.compress(REMOVED, mtime=0)),
    ],
)
def test_removed_labels_are_read_as_other_text_files(
    tmp_path: Path, name: str, content: bytes
) -> None:
    train = [{"text": "a", "labels": ["red"]}]
    old = corpus_of(write_json_lines(tmp_path / "old", labels=LABELS, train=train), tmp_path / "c1")
    new_raw = write_json_lines(tmp_path / "new", labels=LABELS, train=train)
    (new_raw / name).write_bytes(content)
    grown = appended(old, new_raw, tmp_path / "c2")
    assert grown.removed_labels.tolist() == [0]
    (new_raw / name).write_text('{"uid": null}')
    with pytest.raises(DataError, match=r'write {"uid": \.\.\.} a line|gzip'):
        appended(old, new_raw, tmp_path / "c3")


def test_uids_of_removed_labels_that_no_label_has_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = write_json_lines(tmp_path / "raw", labels=LABELS, train=[{"text": "a"}])
    for uids, num_unknown in ((["red"], 0), (["red", "rde"], 1)):
        lines = [json.dumps({"uid": uid}) for uid in uids]
        (raw / "removed_labels.jsonl").write_text("\n".join(lines))
        assert removed_rows(detect(raw)).tolist() == [0]
        assert len(caplog.messages) == num_unknown
    assert "removed_labels.jsonl has 1 uids of no label, such as 'rde'" in caplog.text


def lf_folder(folder: Path, label: str) -> Path:
    """Raw files of the layout lf, whose query has a title and a content."""
    query = {"uid": folder.name, "title": "a", "content": "long", "target_ind": [0]}
    write_json_lines(folder, lbl=[{"uid": label, "title": label}], trn=[query])
    for path in folder.iterdir():
        path.rename(path.with_suffix(".json"))
    return folder


def test_contents_are_not_appended_to_titles(tmp_path: Path) -> None:
    old, contents, titles = (
        lf_folder(tmp_path / name, "red") for name in ("LF-Titles", "new", "new-titles")
    )
    # The manifest of a corpus of an older release says nothing, so its name decides.
    corpus = corpus_of(old, tmp_path / "c1")
    with pytest.raises(DataError, match=r"has titles alone, but .* would be read with contents"):
        appended(corpus, contents, tmp_path / "c2")
    grown = appended(corpus, titles, tmp_path / "c2")
    assert grown.split("train").texts(np.arange(2)) == ["a", "a"]


@pytest.mark.parametrize("titles_only", [True, False])
def test_a_manifest_says_whether_texts_are_titles_alone(titles_only: bool, tmp_path: Path) -> None:
    # The name of the first raw files says nothing, as that of a link or a commit on the hub.
    raw, contents, titles = (
        lf_folder(tmp_path / name, "red") for name in ("raw", "new", "new-titles")
    )
    corpus = corpus_of(raw, tmp_path / "corpus")
    alike, other = (titles, contents) if titles_only else (contents, titles)
    label_ids = np.array([0])
    source = appended_files(corpus, detect(alike), label_ids, titles_only)
    assert (source.path, source.name) == (alike, corpus.card.source)
    # The rows of a corpus of an older release may be of either kind.
    appended_files(corpus, detect(other), label_ids, None)
    message = "has titles alone" if titles_only else "has titles with contents"
    with pytest.raises(DataError, match=message):
        appended_files(corpus, detect(other), label_ids, titles_only)


def test_prepare_notes_in_the_manifest_whether_texts_are_titles_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BegunError(Exception):
        """Raised in place of writing a corpus."""

    def begin(_out: object, _kind: str, about: dict[str, Any]) -> None:
        raise BegunError(about.get("titles_only"))

    monkeypatch.setattr(pipeline, "pipeline_session", contextlib.nullcontext)
    monkeypatch.setattr(pipeline, "new_artifact", begin)
    titles = lf_folder(tmp_path / "LF-Titles", "red")
    # The link's own name says nothing, and that is the one in the card.
    (tmp_path / "link").symlink_to(titles)
    contents = lf_folder(tmp_path / "contents", "red")
    lines = write_json_lines(tmp_path / "titles", labels=LABELS, train=[{"text": "a"}])
    noted = {titles: True, tmp_path / "link": True, contents: False, lines: None}
    for folder, titles_only in noted.items():
        with pytest.raises(BegunError, match=f"^{titles_only}$"):
            pipeline.prepare(detect(folder), tmp_path / "corpus", name="corpus")
