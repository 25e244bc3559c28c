"""Layouts of one text per line with a label matrix, and of features instead of texts."""

from __future__ import annotations

import io
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from corpora import corpus_of

from xmcray.data.formats import BadRow, Row, detect
from xmcray.errors import DataError

# The layouts have no uids: the number of a row is its name.
unnamed_row = partial(Row, has_uid=False)
Y = np.array([[0, 1, 0], [0, 0, 0], [2.5, 0, 1]], dtype=np.float32)
ROWS = [
    unnamed_row("0", "first", (1,)),
    unnamed_row("1", "", (), row=1),
    unnamed_row("2", "drei Äpfel", (0, 2), (2.5, 1.0), 2),
]
LABELS = [unnamed_row("0", "a"), unnamed_row("1", ""), unnamed_row("2", "c", row=2)]
TEXTS, LABEL_TEXTS = "first\n\n drei Äpfel \n", "a\n\nc\n"
Y_TXT = "3 3\n1:1.00000\n\n0:2.5 2:1\n"


def write(folder: Path, **files: str) -> Path:
    """Files by name; `__` stands for a dot, `raw_` for a folder."""
    for name, text in files.items():
        path = folder / name.replace("__", ".").replace("raw_", "raw/", 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def refuse(bad: BadRow) -> None:
    raise AssertionError(f"unexpected: {bad}")


def read(folder: Path, split: str = "train", on_bad=refuse) -> tuple[list[Row], list[Row]]:
    source = detect(folder)
    labels = list(source.labels(on_bad))
    return labels, list(source.queries(split, len(labels), on_bad))


def renumbered(labels: list[Row]) -> list[Row]:
    return [unnamed_row(str(n), label.text, row=n) for n, label in enumerate(labels)]


@pytest.mark.parametrize("kind", ["csr", "csc"])
def test_dexml(tmp_path: Path, kind: str) -> None:
    write(tmp_path, raw_trn_X__txt=TEXTS, raw_Y__txt=LABEL_TEXTS, filter_labels_train__txt="1 2\n")
    sp.save_npz(tmp_path / "Y.trn.npz", sp.csr_matrix(Y).asformat(kind))
    assert read(tmp_path) == (renumbered(LABELS), ROWS)
    assert detect(tmp_path).format == "dexml"
    assert detect(tmp_path).filters("train").tolist() == [[1, 2]]


def test_renee(tmp_path: Path) -> None:
    files = {f"{s}_X__txt": TEXTS for s in ("trn", "tst")} | {
        f"{s}_X_Y__txt": Y_TXT for s in ("trn", "tst")
    }
    write(tmp_path, Y__txt=LABEL_TEXTS, tst_filter_labels__txt="2 2\n", **files)
    for split in ("train", "test"):
        assert read(tmp_path, split) == (renumbered(LABELS), ROWS)
    assert detect(tmp_path).format == "renee"
    assert detect(tmp_path).filters("test").tolist() == [[2, 2]]


def test_pecos_with_a_matrix(tmp_path: Path) -> None:
    write(tmp_path, X__trn__txt=TEXTS, output_items__txt=LABEL_TEXTS)
    (tmp_path / "output_items.txt").rename(tmp_path / "output-items.txt")
    sp.save_npz(tmp_path / "Y.trn.npz", sp.csr_matrix(Y), compressed=False)
    assert read(tmp_path) == (renumbered(LABELS), ROWS)


def test_pecos_with_labels_before_a_tab(tmp_path: Path) -> None:
    write(
        tmp_path,
        Y__txt=LABEL_TEXTS,
        X__trn__txt="1\tfirst\n\t\n0::2.5,2\tdrei Äpfel\nno tab\nx\ty\n",
    )
    bad: list[BadRow] = []
    assert read(tmp_path, on_bad=bad.append) == (renumbered(LABELS), ROWS)
    assert [(b.line, b.reason.split(",")[0]) for b in bad] == [(4, "no tab"), (5, "found 'x'")]


def test_split_sparse_names_features_by_weight(tmp_path: Path) -> None:
    write(
        tmp_path,
        trn_X_Xf__txt="3 4\n0:0.1 1:0.5 3:0.5\n\n2:1\n",
        trn_X_Y__txt=Y_TXT,
        lbl_X_Xf__txt="3 4\n3:1 0:2\n\n1:1\n",
        Xf__txt="red\ngreen\nblue\n",
    )
    labels, queries = read(tmp_path)
    assert [row.text for row in queries] == ["green f3 red", "", "blue"]
    assert [label.text for label in labels] == ["red f3", "", "green"]
    assert [row.label_ids for row in queries] == [(1,), (), (0, 2)]


def test_header_shape_wins_over_the_labels_seen(tmp_path: Path) -> None:
    write(tmp_path, trn_X_Xf__txt="1 9\n0:1\n", trn_X_Y__txt="1 5\n0:1\n")
    labels, queries = read(tmp_path)
    assert len(labels) == 5
    assert {label.text for label in labels} == {""}
    assert queries == [unnamed_row("0", "f0", (0,))]


@pytest.mark.parametrize(
    "files",
    [
        {"trn_X_Xf__txt": "1 9\n0:1\n", "trn_X_Y__txt": f"1 {10**18 - 1}\n0:1\n"},
        {"train__txt": f"1 9 {10**18 - 1}\n0 0:1\n"},
    ],
)
def test_a_header_is_not_believed_that_says_more_labels_than_fit(
    tmp_path: Path, files: dict[str, str]
) -> None:
    write(tmp_path, **files)
    raw = detect(tmp_path)
    with pytest.raises(DataError, match=r"txt:1: the header says 999,999.* labels, expected fewer"):
        next(raw.labels(pytest.fail))


def test_bag_of_words_row_may_start_with_a_space(tmp_path: Path) -> None:
    write(
        tmp_path,
        train__txt="4 3 2\n0,1 0:1 2:3\n 1:1\n1:1\n1\n",
        test__txt="1 3 2\n0 0:1.5\n",
        Xf__txt="x\ny\nz\n",
    )
    labels, queries = read(tmp_path)
    assert [label.text for label in labels] == ["", ""]
    assert [(row.text, row.label_ids) for row in queries] == [
        ("z x", (0, 1)),
        ("y", ()),
        ("y", ()),
        ("", (1,)),
    ]
    assert read(tmp_path, "test")[1] == [unnamed_row("0", "x", (0,))]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("5 0:1", "label id 5 is out of range, there are 2 labels"),
        ("0 7:1", "feature id 7 is out of range, there are 3 features"),
        ("0 1:nan", "weight nan of feature 1 is not a finite number"),
        ("0 1:x", "found '1:x', expected index:value"),
        ("0 1", "found '1', expected index:value"),
        ("a 1:1", "found 'a', expected index:value"),
    ],
)
def test_bad_bag_of_words_row(tmp_path: Path, row: str, reason: str) -> None:
    write(tmp_path, train__txt=f"2 3 2\n{row}\n0 0:1\n")
    bad: list[BadRow] = []
    assert [r.row for r in read(tmp_path, on_bad=bad.append)[1]] == [1]
    assert [b.line for b in bad] == [2]
    assert reason in bad[0].reason


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"trn_X_Y__txt": "2 3\n\n\n"},
            r"/trn_X\.txt has more than 2 rows, expected 2 as .*trn_X_Y\.txt has",
        ),
        (
            {"trn_X_Y__txt": "4 3\n\n\n\n\n"},
            r"/trn_X\.txt has 3 rows, expected 4 as .*trn_X_Y\.txt has",
        ),
        ({"trn_X_Y__txt": "4 3\n\n\n\n"}, r"trn_X_Y\.txt has 3 rows, but its header says 4"),
        ({"trn_X_Y__txt": "4 3\n\n\n"}, r"trn_X_Y\.txt has 2 rows, but its header says 4"),
        (
            {"trn_X_Y__txt": "3 3\n\n\n\n\n"},
            r"trn_X_Y\.txt has more than 3 rows, but its header says 3",
        ),
        ({"trn_X_Y__txt": "3 9\n\n\n\n"}, "has 9 columns, but there are 3 labels"),
        (
            {"trn_X_Y__txt": "0:1\n1:1\n2:1\n"},
            "found '0:1', expected a header of 2 numbers: rows columns",
        ),
        ({"trn_X_Y__txt": ""}, "found '', expected a header"),
        ({"Y__txt": ""}, "has no valid label"),
    ],
)
def test_files_that_contradict_each_other(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    write(tmp_path, **({"trn_X__txt": TEXTS, "Y__txt": LABEL_TEXTS, "trn_X_Y__txt": Y_TXT} | files))
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_incomplete_bag_of_words(tmp_path: Path) -> None:
    write(tmp_path, train__txt="3 3 2\n0 0:1\n")
    with pytest.raises(DataError, match="has 1 rows, but its header says 3"):
        read(tmp_path)


def test_bad_rows_of_text_and_of_matrix_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, Y__txt="a\nb\n", trn_X_Y__txt="3 2\n0:1\n7:1\n0:inf\n")
    (tmp_path / "trn_X.txt").write_bytes(b"\xff\nx\ny\n")
    bad: list[BadRow] = []
    with pytest.raises(DataError, match="no valid train query"):
        read(tmp_path, on_bad=bad.append)
    assert [(Path(b.file).name, b.line) for b in bad] == [
        ("trn_X.txt", 1),
        ("trn_X_Y.txt", 3),
        ("trn_X_Y.txt", 4),
    ]


def test_a_stored_zero_of_a_label_matrix_is_no_positive(tmp_path: Path) -> None:
    expected = [(), (), (2,)]
    lines = "3 3\n1:0\n\n0:0.0 2:1\n"
    write(tmp_path / "renee", trn_X__txt=TEXTS, Y__txt=LABEL_TEXTS, trn_X_Y__txt=lines)
    write(tmp_path / "dexml", raw_trn_X__txt=TEXTS, raw_Y__txt=LABEL_TEXTS)
    npz(tmp_path / "dexml" / "Y.trn.npz", data=np.array([0.0, 0.0, 1.0]))
    write(tmp_path / "pecos", Y__txt=LABEL_TEXTS, X__trn__txt="1:0\ta\n\tb\n0:0,2:1\tc\n")
    for layout in ("renee", "dexml", "pecos"):
        queries = read(tmp_path / layout)[1]
        assert [row.label_ids for row in queries] == expected
        assert [row.has_zeros for row in queries] == [True, False, True]
        # The relevance that is left is 1 for all.
        assert queries[2].relevance is None
    npz(tmp_path / "dexml" / "Y.trn.npz", data=np.array([False, False, True]))
    assert [row.label_ids for row in read(tmp_path / "dexml")[1]] == expected
    card = corpus_of(tmp_path / "renee", tmp_path / "corpus").card
    assert card.odd["train: labels of weight 0 left out"] == 2
    assert card.odd["train: no positives"] == 2


def test_a_value_below_zero_of_a_label_matrix_is_malformed(tmp_path: Path) -> None:
    lines = "3 3\n0:1 1:-1\n\n0:-0.5 2:1\n"
    write(tmp_path / "renee", trn_X__txt=TEXTS, Y__txt=LABEL_TEXTS, trn_X_Y__txt=lines)
    write(tmp_path / "dexml", raw_trn_X__txt=TEXTS, raw_Y__txt=LABEL_TEXTS)
    npz(tmp_path / "dexml" / "Y.trn.npz", data=np.array([-1.0, -0.5, 1.0]))
    write(tmp_path / "pecos", Y__txt=LABEL_TEXTS, X__trn__txt="0:1,1:-1\ta\n\tb\n0:-0.5\tc\n")
    for layout in ("renee", "dexml", "pecos"):
        bad: list[BadRow] = []
        queries = read(tmp_path / layout, on_bad=bad.append)[1]
        assert [row.label_ids for row in queries] == [()]
        reasons = [row.reason for row in bad]
        assert "label 1 has the value -1, expected a number above 0" in reasons
        assert any("has the value -0.5, expected" in reason for reason in reasons)


def test_a_label_that_is_positive_and_negative_in_one_row_is_malformed(tmp_path: Path) -> None:
    write(
        tmp_path / "renee",
        trn_X__txt=TEXTS,
        Y__txt=LABEL_TEXTS,
        trn_X_Y__txt="3 3\n1:-1 1:1\n\n0:1 2:1 0:-1\n",
    )
    write(tmp_path / "pecos", Y__txt=LABEL_TEXTS, X__trn__txt="1:-1,1:1\ta\n\tb\n0:1,0:-1\tc\n")
    write(tmp_path / "dexml", raw_trn_X__txt=TEXTS, raw_Y__txt=LABEL_TEXTS)
    twice = sp.csr_matrix(([-1, 1, 1, -1], [1, 1, 0, 0], [0, 2, 2, 4]), (3, 3))
    sp.save_npz(tmp_path / "dexml" / "Y.trn.npz", twice)
    for layout in ("renee", "pecos", "dexml"):
        bad: list[BadRow] = []
        queries = read(tmp_path / layout, on_bad=bad.append)[1]
        assert [row.label_ids for row in queries] == [()]
        assert [row.reason for row in bad] == [
            "label 1 has the value -1, expected a number above 0",
            "label 0 has the value -1, expected a number above 0",
        ]


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ("tst_X.txt", r"tst_X_Y\.txt or tst_X_Y\.npz"),
        ("tst_X_Y.txt", r"tst_X\.txt"),
        # They have nothing to belong to.
        ("filter_labels_test.txt", r"tst_X\.txt and tst_X_Y\.txt or tst_X_Y\.npz"),
        ("test.vectors.npy", r"tst_X\.txt and tst_X_Y\.txt or tst_X_Y\.npz"),
    ],
)
def test_a_test_split_that_is_there_in_part_is_refused(
    tmp_path: Path, present: str, missing: str
) -> None:
    write(tmp_path, trn_X__txt=TEXTS, Y__txt=LABEL_TEXTS, trn_X_Y__txt=Y_TXT)
    assert detect(tmp_path).splits == ("train",)
    (tmp_path / present).write_text("")
    with pytest.raises(DataError, match=f"has {present}, but lacks {missing} of format renee"):
        detect(tmp_path)


def test_a_file_that_is_there_plain_and_packed_is_refused(tmp_path: Path) -> None:
    write(tmp_path, trn_X__txt=TEXTS, Y__txt=LABEL_TEXTS, trn_X_Y__txt=Y_TXT)
    write(tmp_path, filter_labels_train__txt="1 2\n")
    source = detect(tmp_path)
    (tmp_path / "filter_labels_train.txt.gz").touch()
    with pytest.raises(
        DataError, match=r"filter_labels_train\.txt and filter_labels_train\.txt\.gz"
    ):
        source.filters("train")
    (tmp_path / "trn_X.txt.gz").touch()
    with pytest.raises(DataError, match=r"has trn_X\.txt and trn_X\.txt\.gz, expected one of them"):
        detect(tmp_path)


def test_two_label_matrices_of_a_split_are_refused(tmp_path: Path) -> None:
    write(tmp_path, trn_X__txt=TEXTS, Y__txt=LABEL_TEXTS, trn_X_Y__txt=Y_TXT)
    npz(tmp_path / "trn_X_Y.npz")
    message = r"has trn_X_Y\.txt and trn_X_Y\.npz, expected one of them"
    with pytest.raises(DataError, match=message):
        detect(tmp_path)


def test_two_filter_files_of_a_split_are_refused_if_they_differ(tmp_path: Path) -> None:
    write(tmp_path, trn_X__txt=TEXTS, Y__txt=LABEL_TEXTS, trn_X_Y__txt=Y_TXT)
    write(tmp_path, filter_labels_train__txt="1 2\n", trn_filter_labels__txt="1 2\n")
    assert detect(tmp_path).filters("train").tolist() == [[1, 2]]
    write(tmp_path, trn_filter_labels__txt="2 2\n")
    message = r"has filter_labels_train\.txt and trn_filter_labels\.txt, expected one of them"
    with pytest.raises(DataError, match=message):
        detect(tmp_path).filters("train")


def test_labels_before_tabs_next_to_a_label_matrix_are_refused(tmp_path: Path) -> None:
    write(tmp_path, X__trn__txt="1::1\tfirst\n\t\n0,2\tthird\n", Y__txt=LABEL_TEXTS)
    npz(tmp_path / "Y.trn.npz")
    with pytest.raises(DataError, match=r"X\.trn\.txt has lines labels<TAB>text, but"):
        read(tmp_path)
    # Texts may have tabs, and begin with numbers.
    write(tmp_path, X__trn__txt="2\tfirst\nx\ty\n0,2\tthird\n")
    assert [row.text for row in read(tmp_path)[1]] == ["2\tfirst", "x\ty", "0,2\tthird"]


def test_a_label_matrix_of_a_test_split_without_texts_is_refused(tmp_path: Path) -> None:
    write(tmp_path, X__trn__txt=TEXTS, Y__txt=LABEL_TEXTS)
    npz(tmp_path / "Y.trn.npz")
    npz(tmp_path / "Y.tst.npz")
    with pytest.raises(DataError, match=r"has Y\.tst\.npz, but lacks X\.tst\.txt of format pecos"):
        detect(tmp_path)
    (tmp_path / "X.tst.txt").write_text(TEXTS)
    assert detect(tmp_path).splits == ("train", "test")


def npz(path: Path, **changes: np.ndarray) -> None:
    parts = {
        "indptr": np.array([0, 1, 1, 3]),
        "indices": np.array([1, 0, 2]),
        "data": np.ones(3),
        "shape": np.array([3, 3]),
        "format": np.array(b"csr"),
    }
    np.savez(path, **(parts | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"indices": np.array([1, 0, 3])},
        {"indices": np.array([1, 0, -1])},
        {"indices": np.array([1.0, 0, 2])},
        {"indptr": np.array([0, 2, 1, 3])},
        {"indptr": np.array([0, 1, 3])},
        {"indptr": np.array([0, 1, 1, 9])},
        {"indptr": np.array([0, 1, 1, -9], np.int32)},
        {"indptr": np.array([-1, 1, 1, 3], np.int32)},
        {"data": np.ones(2)},
        {"data": np.array(["a", "b", "c"])},
        {"data": np.array([{}, {}, {}], dtype=object)},
        {"shape": np.array([-3, 3])},
        {"shape": np.array([-1, 3]), "indptr": np.empty(0, np.int64)},
        {"shape": np.array([3, 3, 3])},
        {"format": np.array(b"coo")},
    ],
    ids=str,
)
def test_damaged_npz(tmp_path: Path, changes: dict[str, np.ndarray]) -> None:
    write(tmp_path, raw_trn_X__txt=TEXTS, raw_Y__txt=LABEL_TEXTS)
    npz(tmp_path / "Y.trn.npz")
    assert read(tmp_path)[1][2].label_ids == (0, 2)
    npz(tmp_path / "Y.trn.npz", **changes)
    with pytest.raises(DataError, match=r"Y\.trn\.npz is not a sparse matrix"):
        read(tmp_path)


def test_npz_that_claims_more_than_it_holds(tmp_path: Path) -> None:
    write(tmp_path, raw_trn_X__txt=TEXTS, raw_Y__txt=LABEL_TEXTS)
    npz(tmp_path / "whole.npz")
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        huge, {"descr": "<f8", "fortran_order": False, "shape": (10**13,)}
    )
    with (
        zipfile.ZipFile(tmp_path / "whole.npz") as old,
        zipfile.ZipFile(tmp_path / "Y.trn.npz", "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, huge.getvalue() if name == "data.npy" else old.read(name))
    with pytest.raises(DataError, match="expected numbers that fit its 128 bytes"):
        read(tmp_path)
    (tmp_path / "Y.trn.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:300])
    with pytest.raises(DataError, match="not a complete npz file"):
        read(tmp_path)
