"""Layouts with one text per line and a label matrix, or with features instead of texts.

    layout   queries                labels                        label matrix
    dexml    raw/trn_X.txt          raw/Y.txt                     Y.trn.npz
    renee    trn_X.txt              Y.txt                         trn_X_Y.txt
    pecos    X.trn.txt              output-items.txt or Y.txt     Y.trn.npz, or "labels<TAB>text" lines
    sparse   trn_X_Xf.txt           lbl_X_Xf.txt, Yf.txt, Y.txt   trn_X_Y.txt
    bow      train.txt              as above                      in train.txt

A blank line is an empty text. If there are only features, the text of a row lists their names by
descending weight. The names are in Xf.txt; without it they are f<index>. Rows have no uids, so the row
number is the uid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat, zip_longest
from pathlib import Path

from xmcray.data.formats.base import (
    FREE_BYTES,
    MAX_RATIO,
    BadRow,
    BadValue,
    FileStart,
    Labels,
    OnBad,
    Row,
    check_labels,
    check_text,
    decode,
    find,
    find_one,
    parsed,
    read_lines,
    rows_of,
)
from xmcray.data.formats.matrices import Entries, Matrix, open_bag, open_matrix, parse_entries
from xmcray.errors import DataError

_FEATURE_LABELS = "Y.txt|lbl_X_Xf.txt|Yf.txt"  # label files of layouts with features


@dataclass(frozen=True, slots=True)
class TextFile:
    """The texts of a file. They can be iterated once.

    Attributes:
        path: the file.
        texts: read lazily. A bad text is replaced by the reason why it is bad.
        first_line: line of the first text in the file.
    """

    path: Path
    texts: Iterator[str | BadValue]
    first_line: int


def _text_of(line: bytes) -> str:
    return check_text(decode(line).strip())


def _text_lines(path: Path) -> TextFile:
    """A file with one text per line."""
    return TextFile(path, parsed(read_lines(path), _text_of), 1)


def _feature_texts(matrix: Matrix, folder: Path) -> TextFile:
    """The texts of a feature matrix: names of features by descending weight, then by index."""
    num_features = matrix.shape[1]
    names: list[str] = []
    for path in find(folder, "Xf.txt"):
        names = [line.decode(errors="replace").strip() for line in read_lines(path)]

    def text(entries: Entries) -> str:
        ids, weights = entries
        try:
            check_labels(ids, weights, num_features)
        except BadValue as error:
            reason = str(error).replace("label", "feature").replace("relevance", "weight")
            raise BadValue(reason) from None
        # The heaviest feature comes first, because a tokenizer keeps the start of a text.
        falling_weights = [-weight for weight in weights]
        words = []
        for _, index in sorted(zip(falling_weights, ids, strict=True)):
            word = names[index] if index < len(names) else f"f{index}"
            words.append(word)
        return check_text(" ".join(words))

    return TextFile(matrix.path, parsed(matrix.rows, text), matrix.first_line)


def _label_rows(file: TextFile, on_bad: OnBad) -> Iterator[Row]:
    def label(text: str, row: int) -> Row:
        return Row(str(row), text, row=row, has_uid=False)

    return rows_of(file.texts, file.path, label, on_bad, first_line=file.first_line)


def _query_rows(file: TextFile, matrix: Matrix, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
    """Joins texts with the rows of their labels.

    Raises:
        DataError: the matrix has more columns than there are labels, or the file, the matrix and the
            header of the matrix disagree about the number of rows.
    """
    num_rows, num_columns = matrix.shape
    # Fewer columns are fine, because the label file may have labels that no query has.
    if num_columns > num_labels:
        raise DataError(
            f"{matrix.path} has {num_columns} columns, but there are {num_labels} labels; one is wrong"
        )

    def positives(entries: Entries) -> tuple[Labels, bool]:
        return _positives_of(entries, num_labels)

    number = -1
    # `zip_longest` pads the shorter file with None.
    pairs = zip_longest(file.texts, parsed(matrix.rows, positives))
    for number, (text, labels) in enumerate(pairs):
        if labels is not None and number >= num_rows:
            raise _wrong_header(matrix, f"more than {number}")
        if labels is None and number < num_rows:
            raise _wrong_header(matrix, str(number))
        if labels is None:
            raise _mismatch(file.path, matrix, f"more than {number}")
        if text is None:
            raise _mismatch(file.path, matrix, str(number))
        if isinstance(text, BadValue):
            on_bad(BadRow(str(file.path), file.first_line + number, str(text)))
        elif isinstance(labels, BadValue):
            on_bad(BadRow(str(matrix.path), matrix.first_line + number, str(labels)))
        else:
            (label_ids, relevance), has_zeros = labels
            yield Row(
                str(number),
                text,
                label_ids,
                relevance,
                number,
                has_uid=False,
                has_zeros=has_zeros,
            )
    if number + 1 != num_rows:
        raise _wrong_header(matrix, str(number + 1))


def _positives_of(entries: Entries, num_labels: int) -> tuple[Labels, bool]:
    """The labels of a matrix row without those of value 0, and whether there were any of these.

    A sparse matrix may store zeros. It is equal to the matrix without them.

    Raises:
        BadValue: an entry is below 0, or `check_labels` refuses it.
    """
    label_ids, relevance = check_labels(*entries, num_labels)
    if relevance is None:
        return (label_ids, None), False
    # All entries are compared: of a label that is listed twice, `relevance` has the larger value.
    ids, values = entries
    lowest = min(values)
    if lowest < 0:
        label = ids[values.index(lowest)]
        raise BadValue(f"label {label} has the value {lowest:g}, expected a number above 0")
    if min(relevance) > 0:
        return (label_ids, relevance), False
    kept_ids = []
    weights = []
    for label_id, weight in zip(label_ids, relevance, strict=True):
        if weight != 0:
            kept_ids.append(label_id)
            weights.append(weight)
    if all(weight == 1 for weight in weights):
        return (tuple(kept_ids), None), True
    return (tuple(kept_ids), tuple(weights)), True


def _mismatch(path: Path, matrix: Matrix, num_rows: str) -> DataError:
    return DataError(
        f"{path} has {num_rows} rows, expected {matrix.shape[0]} as {matrix.path} has; blank lines are"
        " rows too: correct the wrong file, or copy it again"
    )


def _wrong_header(matrix: Matrix, num_rows: str) -> DataError:
    return DataError(
        f"{matrix.path} has {num_rows} rows, but its header says {matrix.shape[0]}; blank lines are rows"
        " too: correct it, or copy it again"
    )


def _check_num_labels(matrix: Matrix) -> None:
    """Raises DataError if a header announces far more labels than its file can have.

    Labels without a file are as many as the header says, and the number may be damaged.
    """
    num_labels = matrix.shape[1]
    num_bytes = matrix.path.stat().st_size
    # A label takes at least two bytes, which may be packed.
    if num_labels > max(FREE_BYTES, MAX_RATIO * num_bytes):
        raise DataError(
            f"{matrix.path}:1: the header says {num_labels:,} labels, expected fewer in {num_bytes:,}"
            " bytes; correct it, or copy the file again"
        )


def _tab_rows(path: Path, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
    def query(line: bytes, row: int) -> Row:
        labels, tab, text = line.partition(b"\t")
        if not tab:
            raise BadValue("no tab, expected labels<TAB>text; or add Y.trn.npz and Y.tst.npz")
        entries = _entries_before_tab(labels)
        positives, has_zeros = _positives_of(entries, num_labels)
        return Row(str(row), _text_of(text), *positives, row, has_uid=False, has_zeros=has_zeros)

    return rows_of(read_lines(path), path, query, on_bad)


def _entries_before_tab(labels: bytes) -> Entries:
    """The labels of a line "labels<TAB>text"; raises BadValue if they are none."""
    # PECOS writes "label::value" in some releases and separates labels by commas.
    return parse_entries(labels.replace(b"::", b":").replace(b",", b" "), default=1.0)


def _without_labels_in_texts(rows: Iterator[Row], path: Path) -> Iterator[Row]:
    """Yields the rows. Raises DataError if the text of the first row with labels begins with them.

    Such a file has lines "labels<TAB>text" although there is a label matrix. Its texts would reveal the
    answers.
    """
    is_first = True
    for row in rows:
        if is_first and row.label_ids:
            is_first = False
            labels, tab, _ = row.text.partition("\t")
            ids: list[int] = []
            with contextlib.suppress(BadValue):
                ids, _ = _entries_before_tab(labels.encode())
            if tab and sorted(set(ids)) == list(row.label_ids):
                raise DataError(
                    f"{path} has lines labels<TAB>text, but there is a label matrix too, expected one of"
                    " them; take the matrix out of the folder, or the labels out of the texts"
                )
        yield row


@dataclass(frozen=True, slots=True)
class Lines:
    """A layout of texts or features by line with a label matrix.

    Attributes:
        queries_in: split -> pattern of texts by line, or of a feature matrix if `features`.
        labels_in: pattern of the label file.
        matrix_in: split -> pattern of the label matrix.
        features: whether rows hold features instead of texts. If features and labels are in the same
            file, the file is a bag of words.
        labels_before_tab: whether lines are "labels<TAB>text" if there is no label matrix (PECOS).
    """

    queries_in: Mapping[str, str]
    labels_in: str
    matrix_in: Mapping[str, str]
    features: bool = False
    labels_before_tab: bool = False

    @property
    def train(self) -> tuple[str, ...]:
        """Patterns of the files that must be there."""
        patterns = self._of_split("train")
        if not self.features:  # otherwise labels may have no text
            patterns.append(self.labels_in)
        return tuple(patterns)

    @property
    def test(self) -> tuple[str, ...]:
        """Patterns of the files of the test split."""
        return tuple(self._of_split("test"))

    @property
    def more_test(self) -> tuple[str, ...]:
        """Pattern of the label matrix, if queries may have their labels in their own file."""
        return (self.matrix_in["test"],) if self.labels_before_tab else ()

    def _of_split(self, split: str) -> list[str]:
        patterns = [self.queries_in[split]]
        # Queries of a bag of words are in the file of their labels.
        if not self.labels_before_tab and not self._is_bag:
            patterns.append(self.matrix_in[split])
        return patterns

    def labels(self, folder: Path, on_bad: OnBad) -> Iterator[Row]:
        """All labels in file order; without a label file they have no text."""
        files = find(folder, self.labels_in)
        if not files:
            matrix = self._label_matrix(folder, "train")
            _check_num_labels(matrix)
            no_texts = TextFile(matrix.path, repeat("", matrix.shape[1]), 1)
            return _label_rows(no_texts, on_bad)
        first_line = next(read_lines(files[0]), b"").split()
        is_header = len(first_line) == 2 and all(word.isdigit() for word in first_line)
        # In a layout with features, the labels are a matrix if the first line is a header.
        if self.features and is_header:
            return _label_rows(_feature_texts(open_matrix(files[0]), folder), on_bad)
        return _label_rows(_text_lines(files[0]), on_bad)

    def queries(self, folder: Path, split: str, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
        """All queries of a split in file order."""
        path = find_one(folder, self.queries_in[split])
        # A label matrix is preferred to labels before a tab, because it has relevances.
        if self.labels_before_tab and not find(folder, self.matrix_in[split]):
            return _tab_rows(path, num_labels, on_bad)
        matrix = self._label_matrix(folder, split)
        if not self.features:
            rows = _query_rows(_text_lines(path), matrix, num_labels, on_bad)
            return _without_labels_in_texts(rows, path) if self.labels_before_tab else rows
        features = self._feature_matrix(path)
        if features.shape[0] != matrix.shape[0]:
            raise _mismatch(path, matrix, str(features.shape[0]))
        return _query_rows(_feature_texts(features, folder), matrix, num_labels, on_bad)

    def files(self, folder: Path, split: str) -> list[FileStart]:
        """The file of the queries of a split."""
        path = find_one(folder, self.queries_in[split])
        # A matrix of features has a header.
        return [FileStart(path, line=2 if self.features else 1)]

    def shape(self, folder: Path, split: str) -> tuple[int, int]:
        """Rows of the split's file and of the labels', bad ones included."""
        path = find_one(folder, self.queries_in[split])
        if self.features:
            num_rows = self._feature_matrix(path).shape[0]
        else:
            num_rows = sum(1 for _ in read_lines(path))
        num_bad = 0

        def count_bad(bad: BadRow) -> None:
            nonlocal num_bad
            num_bad += 1

        num_valid = sum(1 for _ in self.labels(folder, count_bad))
        return num_rows, num_valid + num_bad

    @property
    def _is_bag(self) -> bool:
        return self.queries_in == self.matrix_in

    def _feature_matrix(self, path: Path) -> Matrix:
        return open_bag(path, "features") if self._is_bag else open_matrix(path)

    def _label_matrix(self, folder: Path, split: str) -> Matrix:
        path = find_one(folder, self.matrix_in[split])
        return open_bag(path, "labels") if self._is_bag else open_matrix(path)


_NPZ_MATRICES = {"train": "Y.trn.npz", "test": "Y.tst.npz"}
DEXML = Lines({"train": "raw/trn_X.txt", "test": "raw/tst_X.txt"}, "raw/Y.txt", _NPZ_MATRICES)
RENEE = Lines(
    {"train": "trn_X.txt", "test": "tst_X.txt"},
    "Y.txt",
    {"train": "trn_X_Y.txt|trn_X_Y.npz", "test": "tst_X_Y.txt|tst_X_Y.npz"},
)
PECOS = Lines(
    {"train": "X.trn.txt", "test": "X.tst.txt"},
    "output-items.txt|Y.txt",
    _NPZ_MATRICES,
    labels_before_tab=True,
)
SPARSE = Lines(
    {"train": "trn_X_Xf.txt", "test": "tst_X_Xf.txt"},
    _FEATURE_LABELS,
    {"train": "trn_X_Y.txt", "test": "tst_X_Y.txt"},
    features=True,
)
_BAGS = {"train": "train.txt", "test": "test.txt"}
BOW = Lines(_BAGS, _FEATURE_LABELS, _BAGS, features=True)
