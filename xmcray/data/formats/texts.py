"""Layouts of one text per line with a label matrix beside it, and of features instead of texts.

    layout   queries                labels                        label matrix
    dexml    raw/trn_X.txt          raw/Y.txt                     Y.trn.npz
    renee    trn_X.txt              Y.txt                         trn_X_Y.txt
    pecos    X.trn.txt              output-items.txt or Y.txt     Y.trn.npz, or "labels<TAB>text" lines
    sparse   trn_X_Xf.txt           lbl_X_Xf.txt, Yf.txt, Y.txt   trn_X_Y.txt
    bow      train.txt              as above                      in train.txt

A blank line is an empty text. Where there are only features, a text is their names (Xf.txt, else f<index>) by
descending weight. Rows have no uid: it is the row number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat, zip_longest
from pathlib import Path

from xmcray.data.formats.base import (
    BadRow,
    BadValue,
    OnBad,
    Row,
    check_labels,
    check_text,
    decode,
    find,
    find_one,
    read_lines,
)
from xmcray.data.formats.matrices import Entries, Matrix, open_matrix, parse_entries, read_header
from xmcray.errors import DataError

Texts = Iterator[str | BadValue]
_LABELS = "Y.txt|lbl_X_Xf.txt|Yf.txt"  # beside features


def _read_texts(path: Path) -> Texts:
    for line in read_lines(path):
        try:
            text = check_text(decode(line).strip())
        except BadValue as error:
            yield error
        else:
            yield text


def _feature_names(folder: Path) -> list[str]:
    names = []
    for path in find(folder, "Xf.txt")[:1]:
        names = [line.decode(errors="replace").strip() for line in read_lines(path)]
    return names


def _text_of(entries: Entries, num_features: int, names: list[str]) -> str:
    """Feature names by descending weight, ties by index."""
    ids, weights = entries
    check_labels(ids, weights, num_features)
    ordered = sorted(zip(weights, ids, strict=True), key=lambda entry: (-entry[0], entry[1]))
    return check_text(" ".join([names[i] if i < len(names) else f"f{i}" for _, i in ordered]))


def _feature_texts(matrix: Matrix, names: list[str]) -> Texts:
    for entries in matrix.rows:
        try:
            if isinstance(entries, BadValue):
                raise entries
            text = _text_of(entries, matrix.shape[1], names)
        except BadValue as error:
            yield BadValue(str(error).replace("label", "feature").replace("relevance", "weight"))
        else:
            yield text


def _join(
    texts: Texts, path: Path, first_line: int, matrix: Matrix, num_labels: int, on_bad: OnBad
) -> Iterator[Row]:
    """Texts and label rows side by side.

    Raises:
        DataError: more columns than labels, or not as many rows as the matrix says.
    """
    if matrix.shape[1] > num_labels:
        raise DataError(
            f"{matrix.path} has {matrix.shape[1]} columns, but there are {num_labels} labels; one is wrong"
        )
    number = -1
    for number, (text, entries) in enumerate(zip_longest(texts, matrix.rows)):
        if text is None or entries is None or number >= matrix.shape[0]:
            raise _mismatch(path, matrix, f"{'less' if text is None else 'more'} than {number}")
        file, line = path, first_line + number
        try:
            if isinstance(text, BadValue):
                raise text
            file, line = matrix.path, matrix.first_line + number
            if isinstance(entries, BadValue):
                raise entries
            ids, relevance = check_labels(entries[0], entries[1], num_labels)
        except BadValue as error:
            on_bad(BadRow(str(file), line, str(error)))
        else:
            yield Row(str(number), text, ids, relevance, number)
    if number + 1 != matrix.shape[0]:
        raise _mismatch(path, matrix, str(number + 1))


def _mismatch(path: Path, matrix: Matrix, found: str) -> DataError:
    return DataError(
        f"{path} and {matrix.path} differ: {found} rows, expected {matrix.shape[0]} as its header says"
    )


def _label_rows(texts: Texts, path: Path, first_line: int, on_bad: OnBad) -> Iterator[Row]:
    for number, text in enumerate(texts):
        if isinstance(text, BadValue):
            on_bad(BadRow(str(path), first_line + number, str(text)))
        else:
            yield Row(str(number), text, row=number)


@dataclass(frozen=True, slots=True)
class Lines:
    """A layout of texts or features by line with a label matrix."""

    queries_in: Mapping[
        str, str
    ]  # split -> pattern; texts by line, or a feature matrix if `features`
    labels_in: str  # texts by line, or a feature matrix where the first line is its header
    matrix_in: Mapping[str, str]
    features: bool = False
    labels_before_tab: bool = False  # without a matrix file a line is "labels<TAB>text" (PECOS)

    @property
    def train(self) -> tuple[str, ...]:
        """Patterns of the files that must be there."""
        labels = self.labels_in if self.labels_before_tab else self.matrix_in["train"]
        needed = (self.queries_in["train"], labels)
        return needed if self.features else (*dict.fromkeys((*needed, self.labels_in)),)

    @property
    def test(self) -> tuple[str, ...]:
        """Patterns of the files of the test split."""
        return (self.queries_in["test"],)

    def labels(self, folder: Path, on_bad: OnBad) -> Iterator[Row]:
        """All labels in file order; without a label file they have no text."""
        for path in find(folder, self.labels_in)[:1]:
            if self.features and _is_matrix(path):
                matrix = open_matrix(path)
                return _label_rows(_feature_texts(matrix, _feature_names(folder)), path, 2, on_bad)
            return _label_rows(_read_texts(path), path, 1, on_bad)
        path = find_one(folder, self.matrix_in["train"])
        return _label_rows(repeat("", open_matrix(path).shape[1]), path, 1, on_bad)

    def queries(self, folder: Path, split: str, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
        """All queries of a split in file order."""
        path = find_one(folder, self.queries_in[split])
        if self.labels_before_tab and not find(folder, self.matrix_in[split]):
            return _tab_rows(path, num_labels, on_bad)
        matrix = open_matrix(find_one(folder, self.matrix_in[split]))
        if not self.features:
            return _join(_read_texts(path), path, 1, matrix, num_labels, on_bad)
        features = open_matrix(path)
        if features.shape[0] != matrix.shape[0]:
            raise _mismatch(path, matrix, str(features.shape[0]))
        return _join(
            _feature_texts(features, _feature_names(folder)), path, 2, matrix, num_labels, on_bad
        )

    def shape(self, folder: Path, split: str) -> tuple[int, int]:
        """Rows of the split's file and number of labels."""
        labels = sum(1 for _ in self.labels(folder, lambda bad: None))
        path = find_one(folder, self.queries_in[split])
        return (
            open_matrix(path).shape[0] if self.features else sum(1 for _ in read_lines(path))
        ), labels


def _is_matrix(path: Path) -> bool:
    numbers = next(read_lines(path), b"").split()
    return len(numbers) == 2 and all(number.isdigit() for number in numbers)


def _tab_rows(path: Path, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path)):
        labels, tab, rest = line.partition(b"\t")
        try:
            if not tab:
                raise BadValue("no tab, expected labels<TAB>text; or add Y.trn.npz and Y.tst.npz")
            positives, values = parse_entries(
                labels.replace(b"::", b":").replace(b",", b" "), default=1.0
            )
            ids, relevance = check_labels(positives, values, num_labels)
            text = check_text(decode(rest).strip())
        except BadValue as error:
            on_bad(BadRow(str(path), number + 1, str(error)))
        else:
            yield Row(str(number), text, ids, relevance, number)


class BagOfWords:
    """train.txt and test.txt: a header "points features labels", then rows "l1,l2 f1:v1 f2:v2"."""

    train: tuple[str, ...] = ("train.txt",)
    test: tuple[str, ...] = ("test.txt",)

    def labels(self, folder: Path, on_bad: OnBad) -> Iterator[Row]:
        """All labels; without a label file they have no text."""
        if find(folder, _LABELS):
            return Lines({}, _LABELS, {}, features=True).labels(folder, on_bad)
        path, _, shape = self._open(folder, "train")
        return _label_rows(repeat("", shape[2]), path, 1, on_bad)

    def queries(self, folder: Path, split: str, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
        """All queries of a split in file order."""
        path, lines, (points, features, labels) = self._open(folder, split)
        if labels > num_labels:
            raise DataError(
                f"{path}:1: the header says {labels} labels, but there are {num_labels}"
            )
        names = _feature_names(folder)
        number = -1
        for number, line in enumerate(lines):
            try:
                head, _, rest = line.partition(b" ")
                if b":" in head:  # no label, and not even the blank that stands for it
                    head, rest = b"", line
                ids, _ = parse_entries(head.replace(b",", b" "), default=1.0)
                kept, _ = check_labels(ids, None, num_labels)
                text = next(
                    _feature_texts(Matrix(path, (1, features), iter([_entries(rest)]), 1), names)
                )
                if isinstance(text, BadValue):
                    raise text
            except BadValue as error:
                on_bad(BadRow(str(path), number + 2, str(error)))
            else:
                yield Row(str(number), text, kept, None, number)
        if number + 1 != points:
            raise DataError(
                f"{path} has {number + 1} rows, but its header says {points}; the file is not complete"
            )

    def shape(self, folder: Path, split: str) -> tuple[int, int]:
        """Rows and labels as the headers say."""
        return self._open(folder, split)[2][0], sum(
            1 for _ in self.labels(folder, lambda bad: None)
        )

    def _open(self, folder: Path, split: str) -> tuple[Path, Iterator[bytes], tuple[int, ...]]:
        path = find_one(folder, getattr(self, split)[0])
        lines = read_lines(path)
        return path, lines, read_header(path, lines, ("points", "features", "labels"))


def _entries(line: bytes) -> Entries | BadValue:
    try:
        return parse_entries(line)
    except BadValue as error:
        return error


DEXML = Lines(
    {"train": "raw/trn_X.txt", "test": "raw/tst_X.txt"},
    "raw/Y.txt",
    {"train": "Y.trn.npz", "test": "Y.tst.npz"},
)
RENEE = Lines(
    {"train": "trn_X.txt", "test": "tst_X.txt"},
    "Y.txt",
    {"train": "trn_X_Y.txt|trn_X_Y.npz", "test": "tst_X_Y.txt|tst_X_Y.npz"},
)
PECOS = Lines(
    {"train": "X.trn.txt", "test": "X.tst.txt"},
    "output-items.txt|Y.txt",
    {"train": "Y.trn.npz", "test": "Y.tst.npz"},
    labels_before_tab=True,
)
SPARSE = Lines(
    {"train": "trn_X_Xf.txt", "test": "tst_X_Xf.txt"},
    _LABELS,
    {"train": "trn_X_Y.txt", "test": "tst_X_Y.txt"},
    features=True,
)
BOW = BagOfWords()
