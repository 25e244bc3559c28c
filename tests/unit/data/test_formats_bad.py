"""Every malformed row is named with file, line and reason; every malformed file is one line of DataError."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xmcray.data.formats import FORMATS, BadRow, Row, base, detect
from xmcray.errors import DataError

GOOD = b'{"uid": "good", "text": "a", "labels": [0]}\n'


def folder_with(
    tmp_path: Path, train: bytes, labels: bytes = b'{"uid": "a"}\n{"uid": "b"}\n'
) -> Path:
    (tmp_path / "labels.jsonl").write_bytes(labels)
    (tmp_path / "train.jsonl").write_bytes(train)
    return tmp_path


def read(folder: Path, bad: list[BadRow]) -> list[Row]:
    return list(detect(folder).queries("train", 2, bad.append))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"uid": "x", ', "broken JSON (Expecting property name"),
        (b'{"uid": "x"} {}', "broken JSON (more text after the object"),
        (b"", "broken JSON: the line is blank"),
        (b"[" * 100_000, "broken JSON (maximum recursion depth"),
        (b"[1]", "found an array, expected a JSON object"),
        (b"null", "found null, expected a JSON object"),
        (
            b'{"uid": "x", "labels": [0, 2]}',
            "label id 2 is out of range, there are 2 labels in this folder (0 to 1)",
        ),
        (b'{"uid": "x", "labels": [-1]}', "label id -1 is out of range"),
        (b'{"uid": "x", "labels": [true]}', "label 'True' is neither an integer nor a string"),
        (b'{"uid": "x", "labels": [0.0]}', "label '0.0' is neither an integer nor a string"),
        (b'{"uid": "x", "labels": ["c"]}', "label 'c' is not the uid of a label"),
        (b'{"uid": "x", "labels": "a"}', "labels is str, expected a list"),
        (b'{"uid": "x", "labels": {"a": 1}}', "labels is dict, expected a list"),
        (b'{"uid": "x", "labels": [0], "relevance": 1}', "relevance is int, expected a list"),
        (b'{"uid": "good"}', "duplicate uid 'good'"),
        (b'{"uid": ""}', "empty uid"),
        (b'{"uid": [1]}', "uid is list, expected a string or an integer"),
        (b'{"uid": "x", "text": 5}', "text or title or content is not a string"),
        (b'{"uid": "x", "title": ["t"]}', "text or title or content is not a string"),
        (
            b'{"uid": "x", "labels": [0], "relevance": [NaN]}',
            "relevance nan of label 0 is not a finite number",
        ),
        (
            b'{"uid": "x", "labels": [0], "relevance": [-Infinity]}',
            "relevance -inf of label 0 is not a finite",
        ),
        (b'{"uid": "x", "labels": [0], "relevance": [1e300]}', "is not a finite number"),
        (b'{"uid": "x", "labels": [0], "relevance": [-1]}', "relevance -1 is below 0, expected at"),
        (b'{"uid": "x", "labels": [0], "relevance": ["1"]}', "is not a finite number"),
        (b'{"uid": "x", "labels": [0, 1], "relevance": [1.0]}', "1 relevance values for 2 labels"),
        (b'{"uid": "x", "text": "\xff"}', "not UTF-8 (byte 0xff at position 22)"),
        (b'{"uid": "x", "text": "\\ud800"}', "text is not UTF-8 (lone surrogate at position 0)"),
        (b'{"uid": "\\udfff"}', "uid is not UTF-8 (lone surrogate"),
        (
            b'{"uid": "x", "text": "' + b"a" * 10_000_000 + b'"}',
            "text has 10,000,000 characters, the limit is 1,000,000",
        ),
    ],
    ids=lambda value: value[:45] if isinstance(value, str) else "",
)
def test_bad_row_is_named_and_left_out(tmp_path: Path, line: bytes, reason: str) -> None:
    bad: list[BadRow] = []
    rows = read(folder_with(tmp_path, GOOD + line + b"\n" + GOOD.replace(b"good", b"after")), bad)
    assert [(row.uid, row.row) for row in rows] == [("good", 0), ("after", 2)]
    assert len(bad) == 1
    assert (bad[0].file, bad[0].line) == (str(tmp_path / "train.jsonl"), 2)
    assert bad[0].reason.startswith(reason) or reason in bad[0].reason
    assert "\n" not in str(bad[0])


def test_a_rejected_row_does_not_claim_its_uid(tmp_path: Path) -> None:
    bad: list[BadRow] = []
    rows = read(
        folder_with(tmp_path, b'{"uid": "x", "labels": [9]}\n{"uid": "x", "labels": [1]}\n'), bad
    )
    assert [(row.uid, row.label_ids) for row in rows] == [("x", (1,))]


def test_queries_that_name_a_malformed_label_keep_their_labels(tmp_path: Path) -> None:
    queries = b'{"uid": "q", "labels": ["a", "b", "c"]}\n{"uid": "r", "labels": ["", "d"]}\n'
    folder = folder_with(tmp_path, queries)
    (folder / "labels.jsonl").write_text(
        '{"uid": "a"}\n{"uid": "b", "text": 1}\n{"uid": "c", "text": 1}\n{"uid": "c"}\n{"uid": []}\n'
    )
    bad: list[BadRow] = []
    rows = list(detect(folder).queries("train", 5, bad.append))
    # The label "c" is the well-formed one.
    assert [(row.uid, row.label_ids) for row in rows] == [("q", (0, 1, 3))]
    assert [row.line for row in bad] == [2]


def test_a_number_of_a_row_that_is_the_uid_of_another_is_said(tmp_path: Path) -> None:
    bad: list[BadRow] = []
    read(folder_with(tmp_path, b'{"uid": "1"}\n{"text": "no uid"}\n'), bad)
    assert [b.reason for b in bad] == [
        "duplicate uid '1', the number of this row, which has none; give one to all rows"
    ]


def test_on_bad_may_stop_the_reading(tmp_path: Path) -> None:
    def stop(bad: BadRow) -> None:
        raise DataError(str(bad))

    source = detect(folder_with(tmp_path, GOOD + b"{\n"))
    with pytest.raises(DataError, match=r"train\.jsonl:2: broken JSON"):
        list(source.queries("train", 2, stop))


def test_byte_order_mark_and_windows_line_ends_are_no_mistake(tmp_path: Path) -> None:
    bad: list[BadRow] = []
    rows = read(folder_with(tmp_path, b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n")), bad)
    assert (len(rows), bad) == (1, [])


def test_lines_of_a_file_whatever_its_end(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for data in (b"", b"a", b"a\n", b"\n", b"a\n\nbb\n", b"\xef\xbb\xbf", b"x" * 9**6 + b"\nz"):
        path.write_bytes(data)
        lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        if not lines[-1]:  # the end of the last line starts no further one
            lines.pop()
        assert list(base.read_lines(path)) == lines


def gzipped(tmp_path: Path, data: bytes) -> Path:
    folder_with(tmp_path, b"").joinpath("train.jsonl").unlink()
    (tmp_path / "train.jsonl.gz").write_bytes(data)
    return tmp_path


@pytest.mark.parametrize(
    "cut", [lambda d: d[:-20], lambda d: d[:5], lambda d: b"plain", lambda d: d[:40] + b"\0" * 9]
)
def test_truncated_or_unreadable_gzip(tmp_path: Path, cut: Any) -> None:
    data = gzip.compress(b"".join(b'{"uid": "%d", "text": "%x"}\n' % (n, n**9) for n in range(999)))
    with pytest.raises(DataError, match=r"train\.jsonl\.gz is not a complete gzip file"):
        read(gzipped(tmp_path, cut(data)), [])


def test_a_line_without_an_end_is_stopped_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "FREE_BYTES", 1 << 30)
    with pytest.raises(DataError, match="has a line of more than 64 MB"):
        read(gzipped(tmp_path, gzip.compress(bytes(80 << 20), 6)), [])


def test_a_bomb_of_short_lines_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "FREE_BYTES", 1 << 18)
    with pytest.raises(DataError, match="more than 200 times its size: a decompression bomb"):
        read(gzipped(tmp_path, gzip.compress(b"{}\n" * (1 << 18), 9)), [])


def test_missing_file(tmp_path: Path) -> None:
    source = detect(folder_with(tmp_path, GOOD))
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(DataError, match=r"has no train\.jsonl"):
        list(source.queries("train", 2, [].append))


def test_filters_count_labels_that_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "Y.txt").write_bytes(b"a\nb\n\xff\nd\ne\n")
    (tmp_path / "trn_X.txt").write_text("q0\nq1\n")
    (tmp_path / "trn_X_Y.txt").write_text("2 5\n0:1 4:1\n3:1\n")
    (tmp_path / "filter_labels_train.txt").write_text("0 4\n")
    assert detect(tmp_path).filters("train").tolist() == [[0, 4]]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1 0", "names row 1, but there are only 1, counted from 0"),
        ("0 2", "names label 2, but there are only 2"),
        ("-1 0", "names row -1"),
        ("0 x", "found '0 x', expected a row and a label id"),
        ("0 1 2", "found '0 1 2', expected a row and a label id"),
    ],
)
def test_filter_file_naming_what_is_not_there(tmp_path: Path, line: str, reason: str) -> None:
    source = detect(folder_with(tmp_path, GOOD))
    (tmp_path / "filter_labels_train.txt").write_text(f"0 1\n{line}\n")
    with pytest.raises(DataError, match=r"filter_labels_train\.txt:2: ") as caught:
        source.filters("train")
    assert reason in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = [
    "uid",
    "text",
    "title",
    "content",
    "labels",
    "relevance",
    "target_ind",
    "target_rel",
    "query_id",
    "docid",
    "",
]
RECORD = st.dictionaries(st.sampled_from(KEYS), JSON | st.lists(st.integers(-1, 3), max_size=3))
JSON_LINE = RECORD.map(lambda record: json.dumps(record).encode())
SPARSE_LINE = st.text("0123 :,-.e\t", max_size=20).map(str.encode)
CONTENTS = st.binary(max_size=60) | st.lists(
    JSON_LINE | SPARSE_LINE | st.binary(max_size=9), max_size=5
).map(b"\n".join)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=st.sampled_from(sorted(FORMATS)), contents=st.lists(CONTENTS, min_size=4, max_size=4))
def test_arbitrary_bytes_raise_nothing_but_data_errors(
    tmp_path: Path, name: str, contents: list[bytes]
) -> None:
    folder = tmp_path / name
    layout = FORMATS[name]
    files = dict.fromkeys([p.split("|")[0] for p in (*layout.train, "filter_labels_train.txt")])
    extra = {"sparse": "Y.txt", "bow": "Y.txt", "huggingface": "train/data.arrow"}.get(name)
    for file, data in zip([*files, *([extra] if extra else [])], contents, strict=False):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
    if name == "huggingface":
        (folder / "train/state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    source = detect(folder, name)
    for rows in (
        lambda: source.labels([].append),
        lambda: source.queries("train", 2, [].append),
        lambda: source.filters("train"),
    ):
        with contextlib.suppress(DataError):
            for row in rows():
                assert not isinstance(row, Row) or (set(row.label_ids) <= {0, 1} and row.uid)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_utf_16_is_named(tmp_path: Path, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / ("lines.gz" if pack is gzip.compress else "lines")
    path.write_bytes(pack("\ufeffone\ntwo\n".encode(encoding)))
    with pytest.raises(DataError, match="is UTF-16, expected UTF-8"):
        list(base.read_lines(path))
