"""Raw files of a data set: the layout of a folder, and its queries, labels and filter pairs by row.

`detect` finds the layout from the files that are there; `RawFiles` then streams validated rows. The
layouts are described in `json_lines`, `texts` and `tables`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xmcray.config import unknown
from xmcray.data.formats.base import (
    FILTER_NAMES,
    BadRow,
    Format,
    OnBad,
    Places,
    Row,
    find,
    find_any,
    folder_name,
    read_filters,
)
from xmcray.data.formats.json_lines import JSONL, LF, TEVATRON, Records
from xmcray.data.formats.tables import HUGGINGFACE, PARQUET
from xmcray.data.formats.texts import BOW, DEXML, PECOS, RENEE, SPARSE, Lines
from xmcray.data.side_vectors import RawVectors, file_name, side_width
from xmcray.errors import ConfigError, DataError
from xmcray.types import Int64Array

logger = logging.getLogger(__name__)

__all__ = ["FORMATS", "BadRow", "OnBad", "RawFiles", "Row", "detect"]

# In order of preference: a release of the XMC repository often holds texts and features side by
# side.
FORMATS: dict[str, Format] = {
    "lf": LF,
    "jsonl": JSONL,
    "tevatron": TEVATRON,
    "dexml": DEXML,
    "renee": RENEE,
    "pecos": PECOS,
    "parquet": PARQUET,
    "huggingface": HUGGINGFACE,
    "sparse": SPARSE,
    "bow": BOW,
}


@dataclass(frozen=True, slots=True)
class RawFiles:
    """Raw files of one data set; a file is read when its rows are iterated.

    Attributes:
        format: a key of `FORMATS`.
        path: their folder.
        splits: "train", and "test" if its files are there.
    """

    format: str
    path: Path
    splits: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of their folder."""
        return folder_name(self.path)

    @property
    def titles_only(self) -> bool | None:
        """Whether texts are titles without contents; None if the layout does not tell them apart."""
        layout = FORMATS[self.format]
        return layout.titles_only(self.path) if isinstance(layout, Records) else None

    def first_shard(self, split: str, shard_rows: int) -> int:
        """Number of the shard that the first row of a split (or of "labels") belongs to."""
        return 0

    def labels(self, on_bad: OnBad) -> Iterator[Row]:
        """All valid labels in file order; `on_bad` is called for each other one and may raise.

        Raises:
            DataError: the file cannot be read or has no valid row.
        """
        return self._not_empty(FORMATS[self.format].labels(self.path, on_bad), "label")

    def queries(self, split: str, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
        """All valid queries of a split in file order; `on_bad` gets each other one and may raise.

        Args:
            num_labels: rows of the label file, bad ones included: label ids count those rows.

        Raises:
            DataError: a file cannot be read, files contradict each other, or there is no valid row.
        """
        if split not in self.splits:
            raise DataError(f"{self.path} has no {split} split; found: {', '.join(self.splits)}")
        rows = FORMATS[self.format].queries(self.path, split, num_labels, on_bad)
        return self._not_empty(rows, f"{split} query")

    def filters(self, split: str) -> Int64Array:
        """Pairs (row of the split's file, row of the label file) that are no answers; see `Row.row`.

        Returns:
            int64 [pairs, 2], none without a filter file.

        Raises:
            DataError: the file is malformed or names a row or label that does not exist.
        """
        return read_filters(self.path, split, lambda: FORMATS[self.format].shape(self.path, split))

    def places(self, split: str) -> Places:
        """Where the rows of a split's files are."""
        return Places(lambda: FORMATS[self.format].files(self.path, split))

    def side_vectors(self, split: str) -> RawVectors | None:
        """The side vectors of the rows of a split, or of "labels"; None without a file of them."""
        return RawVectors.find(self.path, split)

    def side_width(self) -> int:
        """W, the width of all side vectors; 0 if there are none.

        Raises:
            DataError: a file is malformed, or the files contradict each other.
        """
        return side_width(self.path, self.splits)

    def warn_of_integer_labels(self) -> None:
        """Warns if labels of queries are integers, and uids of labels are too."""
        layout = FORMATS[self.format]
        if isinstance(layout, Records) and layout.may_mean_uids(self.path):
            logger.warning(
                "%s: integers in the labels of queries are taken for rows of the label file, counted from 0,"
                " although uids of labels are integers too; if uids are meant, write them as texts",
                self.path,
            )

    def _not_empty(self, rows: Iterator[Row], what: str) -> Iterator[Row]:
        empty = True
        for row in rows:
            empty = False
            yield row
        if empty:
            raise DataError(
                f"{self.path} has no valid {what}, expected at least one (format {self.format}); write its"
                " file again, or name another --format"
            )


def detect(path: str | Path, format: str | None = None) -> RawFiles:  # noqa: A002 - named as the option
    """The layout of a folder, from the files that are there or as named.

    Raises:
        ConfigError: no such format.
        DataError: no such folder, or its files fit no layout, or not the named one; the test split is
            there in part, or a file twice.
    """
    folder = Path(path)
    if format is not None and format not in FORMATS:
        raise ConfigError(unknown("format", format, [*FORMATS, "datasets"]))
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{path} {state}, expected a folder of raw files")
    # What the layouts lack that are there in part, or that were named.
    missing: dict[str, list[str]] = {}
    for name in [format] if format else FORMATS:
        layout = FORMATS[name]
        missing_files = _missing(folder, layout.train)
        if not missing_files:
            splits = ("train", "test") if _has_test(folder, name) else ("train",)
            for pattern in (*layout.train, *layout.test, *_more_test(layout)):
                find(folder, pattern)  # raises an error if a file is there twice
            return RawFiles(name, folder, splits)
        if format or len(missing_files) < len(layout.train):
            missing[name] = missing_files
    if missing:
        # Of several, the message is about the one that lacks least.
        nearest = min(missing, key=lambda name: len(missing[name]))
        lacking = " and ".join(missing[nearest])
        raise DataError(
            f"{folder} lacks {lacking} of format {nearest}; add it or name another --format"
        )
    names = sorted(path.name for path in folder.iterdir())
    present = ", ".join(names[:5]) or "nothing"
    raise DataError(
        f"{folder} fits no known layout (found: {present}); expected files of one of"
        f" {', '.join(FORMATS)}, or --format datasets for a table with other columns"
    )


def _has_test(folder: Path, name: str) -> bool:
    """Whether the files of a test split are there; raises DataError if only some are."""
    layout = FORMATS[name]
    missing_files = _missing(folder, layout.test)
    # A filter file and side vectors belong to the rows of the split.
    patterns = (
        *layout.test,
        *_more_test(layout),
        *FILTER_NAMES["test"].split("|"),
        file_name("test"),
    )
    present = [path.name for pattern in patterns for path in find_any(folder, pattern)]
    if missing_files and present:
        lacking = " and ".join(missing_files)
        raise DataError(
            f"{folder} has {' and '.join(present)}, but lacks {lacking} of format {name}; add it, or take"
            " the others out of the folder"
        )
    return not missing_files


def _more_test(layout: Format) -> tuple[str, ...]:
    """Patterns of files that a test split may have, and that are nothing without the others."""
    return layout.more_test if isinstance(layout, Lines) else ()


def _missing(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    """The patterns that no file fits, in words."""
    missing = [pattern for pattern in patterns if not find_any(folder, pattern)]
    return [pattern.replace("|", " or ") for pattern in missing]
