"""Raw files of a data set: which layout a folder has, and its queries, labels and filter pairs row by row.

`detect` names the layout from the files that are there; a `RawFiles` then streams validated rows. Layouts: see
`json_lines`, `texts` and `tables`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xmcray.data.formats.base import BadRow, Format, OnBad, Row, find, read_filters
from xmcray.data.formats.json_lines import JSONL, LF, TEVATRON
from xmcray.data.formats.tables import HUGGINGFACE, PARQUET
from xmcray.data.formats.texts import BOW, DEXML, PECOS, RENEE, SPARSE
from xmcray.errors import ConfigError, DataError
from xmcray.types import Int64Array

__all__ = ["FORMATS", "BadRow", "OnBad", "RawFiles", "Row", "detect"]

# In order of preference: a release of the XMC repository often holds texts and features side by side.
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
    """Raw files of one data set; nothing is read before it is asked for.

    Attributes:
        format: a key of `FORMATS`.
        splits: "train", and "test" where its files are there.
    """

    format: str
    path: Path
    splits: tuple[str, ...]

    def labels(self, on_bad: OnBad) -> Iterator[Row]:
        """All valid labels in file order; `on_bad` is called for each other one and may raise.

        Raises:
            DataError: the file cannot be read or has no valid row.
        """
        return self._some(FORMATS[self.format].labels(self.path, on_bad), "label")

    def queries(self, split: str, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
        """All valid queries of a split in file order; `on_bad` is called for each other one and may raise.

        Args:
            num_labels: rows of the label file, bad ones included: label ids count those rows.

        Raises:
            DataError: a file cannot be read, files contradict each other, or there is no valid row.
        """
        if split not in self.splits:
            raise DataError(f"{self.path} has no {split} split; found: {', '.join(self.splits)}")
        return self._some(
            FORMATS[self.format].queries(self.path, split, num_labels, on_bad), f"{split} query"
        )

    def filters(self, split: str) -> Int64Array:
        """Pairs (row of the split's file, row of the label file) that must not be answered; see `Row.row`.

        Returns:
            int64 [pairs, 2], none without a filter file.

        Raises:
            DataError: the file is malformed or names a row or label that does not exist.
        """
        return read_filters(self.path, split, lambda: FORMATS[self.format].shape(self.path, split))

    def _some(self, rows: Iterator[Row], what: str) -> Iterator[Row]:
        empty = True
        for row in rows:
            empty = False
            yield row
        if empty:
            raise DataError(
                f"{self.path} has no valid {what}; expected at least one (format {self.format})"
            )


def detect(path: str | Path, format: str | None = None) -> RawFiles:  # noqa: A002 - named as the option
    """The layout of a folder, from the files that are there or as named.

    Raises:
        ConfigError: no such format.
        DataError: no such folder, or its files fit no layout, or not the named one.
    """
    folder = Path(path)
    if format is not None and format not in FORMATS:
        near = difflib.get_close_matches(format, FORMATS, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(FORMATS)}"
        raise ConfigError(f"unknown format {format!r}; {hint}")
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{path} {found}, expected a folder of raw files")
    for name in [format] if format else FORMATS:
        layout = FORMATS[name]
        if all(find(folder, pattern) for pattern in layout.train):
            tested = all(find(folder, pattern) for pattern in layout.test)
            return RawFiles(name, folder, ("train", "test") if tested else ("train",))
    raise DataError(_no_layout(folder, format))


def _no_layout(folder: Path, name: str | None) -> str:
    """Names the layout of which most files are there, and what it lacks."""

    def missing(key: str) -> list[str]:
        return [p.replace("|", " or ") for p in FORMATS[key].train if not find(folder, p)]

    names = (
        [name] if name else [key for key in FORMATS if len(missing(key)) < len(FORMATS[key].train)]
    )
    if names:
        best = min(names, key=lambda key: len(missing(key)))
        return f"{folder} lacks {' and '.join(missing(best))} of format {best}; add it or name another --format"
    present = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
    return f"{folder} fits no known layout (found: {present}); expected files of one of {', '.join(FORMATS)}"
