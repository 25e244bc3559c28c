"""Layouts of one text per line with a label matrix, and of features instead of texts.

    layout   queries                labels                        label matrix
    dexml    raw/trn_X.txt          raw/Y.txt                     Y.trn.npz
    renee    trn_X.txt              Y.txt                         trn_X_Y.txt
    pecos    X.trn.txt              output-items.txt or Y.txt     Y.trn.npz, or "labels<TAB>text" lines
    sparse   trn_X_Xf.txt           lbl_X_Xf.txt, Yf.txt, Y.txt   trn_X_Y.txt
    bow      train.txt              as above                      in train.txt

A blank line is an empty text. If there are only features, a text consists of their names (Xf.txt,
else f<index>) by descending weight. Rows have no uid: it is the row number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat, zip_longest
from pathlib import Path

from xmcray.data.formats.base import (
    BadRow,
    BadValue,
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
from xmcray.data.formats.matrices import Entries, Matrix, open_matrix, parse_entries, read_header
from xmcray.errors import DataError

Texts = Iterator[str | BadValue]
_FEATURE_LABELS = "Y.txt|lbl_X_Xf.txt|Yf.txt"  # label files of layouts with features


def _text_of(line: bytes) -> str:
    return check_text(decode(line).strip())


def _read_texts(path: Path) -> Texts:
    return parsed(read_lines(path), _text_of)


@dataclass(frozen=True, slots=True)
class FeatureNames:
    """Makes a text of weighted features.

    Attributes:
        num_features: how many there are.
        names: of the first features; the others are called f<index>.
    """

    num_features: int
    names: list[str]

    @classmethod
    def of_folder(cls, folder: Path, num_features: int) -> FeatureNames:
        """The names in Xf.txt, if the folder has it."""
        names = []
        for path in find(folder, "Xf.txt"):
            names = [line.decode(errors="replace").strip() for line in read_lines(path)]
        return cls(num_features, names)

    def text(self, entries: Entries) -> str:
        """Feature names by descending weight, ties by index.

        Raises:
            BadValue: the entries are malformed or name a feature that does not exist.
        """
        ids, weights = entries
        try:
            check_labels(ids, weights, self.num_features)
        except BadValue as error:
            reason = str(error).replace("label", "feature").replace("relevance", "weight")
            raise BadValue(reason) from None
        # The heaviest feature comes first, because a tokenizer keeps the start of a text.
        words = []
        for _, index in sorted(zip([-weight for weight in weights], ids, strict=True)):
            words.append(self.names[index] if index < len(self.names) else f"f{index}")
        return check_text(" ".join(words))

    def texts(self, matrix: Matrix) -> Texts:
        """The text of each row of a feature matrix."""
        return parsed(matrix.rows, self.text)


def _join(
    texts: Texts, path: Path, first_line: int, matrix: Matrix, num_labels: int, on_bad: OnBad
) -> Iterator[Row]:
    """Rows of texts and of their labels, which lie in two files.

    Raises:
        DataError: more columns than labels, or not as many rows as the matrix says.
    """
    num_rows, num_columns = matrix.shape
    if num_columns > num_labels:
        raise DataError(
            f"{matrix.path} has {num_columns} columns, but there are {num_labels} labels; one is wrong"
        )

    def checked(entries: Entries) -> Labels:
        return check_labels(*entries, num_labels)

    number = -1
    for number, (text, labels) in enumerate(zip_longest(texts, parsed(matrix.rows, checked))):
        # zip_longest fills up the shorter file with None.
        if text is None:
            raise _mismatch(path, matrix, f"less than {number}")
        if labels is None or number >= num_rows:
            raise _mismatch(path, matrix, f"more than {number}")
        if isinstance(text, BadValue):
            on_bad(BadRow(str(path), first_line + number, str(text)))
        elif isinstance(labels, BadValue):
            on_bad(BadRow(str(matrix.path), matrix.first_line + number, str(labels)))
        else:
            label_ids, relevance = labels
            yield Row(str(number), text, label_ids, relevance, number)
    if number + 1 != num_rows:
        raise _mismatch(path, matrix, str(number + 1))


def _mismatch(path: Path, matrix: Matrix, num_rows: str) -> DataError:
    return DataError(
        f"{path} and {matrix.path} differ: {num_rows} rows, expected {matrix.shape[0]} as its header says"
    )


def _label_rows(texts: Texts, path: Path, first_line: int, on_bad: OnBad) -> Iterator[Row]:
    def label(text: str, row: int) -> Row:
        return Row(str(row), text, row=row)

    return rows_of(texts, path, label, on_bad, first_line=first_line)


def _feature_labels(path: Path, folder: Path, on_bad: OnBad) -> Iterator[Row]:
    """Labels of a layout with features: a matrix if the first line is its header, or texts."""
    numbers = next(read_lines(path), b"").split()
    if len(numbers) == 2 and all(number.isdigit() for number in numbers):
        matrix = open_matrix(path)
        texts = FeatureNames.of_folder(folder, matrix.shape[1]).texts(matrix)
        return _label_rows(texts, path, 2, on_bad)
    return _label_rows(_read_texts(path), path, 1, on_bad)


@dataclass(frozen=True, slots=True)
class Lines:
    """A layout of texts or features by line with a label matrix.

    Attributes:
        queries_in: split -> pattern of texts by line, or of a feature matrix if `features`.
        labels_in: pattern of the label file.
        matrix_in: split -> pattern of the label matrix.
        features: rows hold features instead of texts.
        labels_before_tab: without a matrix file a line is "labels<TAB>text" (PECOS).
    """

    queries_in: Mapping[str, str]
    labels_in: str
    matrix_in: Mapping[str, str]
    features: bool = False
    labels_before_tab: bool = False

    @property
    def train(self) -> tuple[str, ...]:
        """Patterns of the files that must be there."""
        if self.labels_before_tab:  # the matrix may be missing
            return self.queries_in["train"], self.labels_in
        if self.features:  # labels may have no text
            return self.queries_in["train"], self.matrix_in["train"]
        return self.queries_in["train"], self.matrix_in["train"], self.labels_in

    @property
    def test(self) -> tuple[str, ...]:
        """Patterns of the files of the test split."""
        return (self.queries_in["test"],)

    def labels(self, folder: Path, on_bad: OnBad) -> Iterator[Row]:
        """All labels in file order; without a label file they have no text."""
        if files := find(folder, self.labels_in):
            if self.features:
                return _feature_labels(files[0], folder, on_bad)
            return _label_rows(_read_texts(files[0]), files[0], 1, on_bad)
        path = find_one(folder, self.matrix_in["train"])
        num_labels = open_matrix(path).shape[1]
        return _label_rows(repeat("", num_labels), path, 1, on_bad)

    def queries(self, folder: Path, split: str, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
        """All queries of a split in file order."""
        path = find_one(folder, self.queries_in[split])
        # The label matrix is preferred, because it has the relevance of each label.
        if self.labels_before_tab and not find(folder, self.matrix_in[split]):
            return _tab_rows(path, num_labels, on_bad)
        matrix = open_matrix(find_one(folder, self.matrix_in[split]))
        if not self.features:
            return _join(_read_texts(path), path, 1, matrix, num_labels, on_bad)
        features = open_matrix(path)
        if features.shape[0] != matrix.shape[0]:
            raise _mismatch(path, matrix, str(features.shape[0]))
        texts = FeatureNames.of_folder(folder, features.shape[1]).texts(features)
        return _join(texts, path, 2, matrix, num_labels, on_bad)

    def shape(self, folder: Path, split: str) -> tuple[int, int]:
        """Rows of the split's file and number of labels."""
        path = find_one(folder, self.queries_in[split])
        if self.features:
            num_rows = open_matrix(path).shape[0]
        else:
            num_rows = sum(1 for _ in read_lines(path))
        return num_rows, sum(1 for _ in self.labels(folder, lambda bad: None))


def _tab_rows(path: Path, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
    def query(line: bytes, row: int) -> Row:
        labels, tab, text = line.partition(b"\t")
        if not tab:
            raise BadValue("no tab, expected labels<TAB>text; or add Y.trn.npz and Y.tst.npz")
        # PECOS writes "label::value" in some releases and separates labels by commas.
        labels = labels.replace(b"::", b":").replace(b",", b" ")
        positives = check_labels(*parse_entries(labels, default=1.0), num_labels)
        return Row(str(row), _text_of(text), *positives, row)

    return rows_of(read_lines(path), path, query, on_bad)


class BagOfWords:
    """train.txt and test.txt: a header "points features labels", then rows "l1,l2 f1:v1 f2:v2"."""

    train: tuple[str, ...] = ("train.txt",)
    test: tuple[str, ...] = ("test.txt",)

    def labels(self, folder: Path, on_bad: OnBad) -> Iterator[Row]:
        """All labels; without a label file they have no text."""
        if files := find(folder, _FEATURE_LABELS):
            return _feature_labels(files[0], folder, on_bad)
        path, _, (_, _, num_labels) = self._open(folder, "train")
        return _label_rows(repeat("", num_labels), path, 1, on_bad)

    def queries(self, folder: Path, split: str, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
        """All queries of a split in file order."""
        path, lines, (num_rows, num_features, num_columns) = self._open(folder, split)
        # Fewer is fine: the label file may hold labels that no query carries.
        if num_columns > num_labels:
            raise DataError(
                f"{path}:1: the header says {num_columns} labels, but there are {num_labels}"
            )
        names = FeatureNames.of_folder(folder, num_features)

        def query(line: bytes, row: int) -> Row:
            labels, _, features = line.partition(b" ")
            if b":" in labels:  # no label, and the blank that stands for it is missing too
                labels = b""
                features = line
            listed, _ = parse_entries(labels.replace(b",", b" "), default=1.0)
            label_ids, _ = check_labels(listed, None, num_labels)
            return Row(str(row), names.text(parse_entries(features)), label_ids, row=row)

        return rows_of(_counted(lines, path, num_rows), path, query, on_bad, first_line=2)

    def shape(self, folder: Path, split: str) -> tuple[int, int]:
        """Rows and labels as the headers say."""
        _, _, (num_rows, _, _) = self._open(folder, split)
        return num_rows, sum(1 for _ in self.labels(folder, lambda bad: None))

    def _open(self, folder: Path, split: str) -> tuple[Path, Iterator[bytes], tuple[int, ...]]:
        """Path, rows, and the numbers of rows, features and labels that the header says."""
        path = find_one(folder, f"{split}.txt")
        lines = read_lines(path)
        return path, lines, read_header(path, lines, ("points", "features", "labels"))


def _counted(lines: Iterator[bytes], path: Path, num_rows: int) -> Iterator[bytes]:
    """The lines; raises DataError at the end if there are not `num_rows`."""
    num_read = 0
    for line in lines:
        num_read += 1
        yield line
    if num_read != num_rows:
        raise DataError(
            f"{path} has {num_read} rows, but its header says {num_rows}; the file is not complete"
        )


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
BOW = BagOfWords()
