"""Columns with named fields: Parquet files, and Hugging Face datasets saved to disk.

    layout       train, test, labels
    parquet      train.parquet, train/*.parquet or train-*.parquet; test and labels likewise
    huggingface  train/, test/ and labels/, each with the Arrow files and the state.json of `save_to_disk`

The columns are those of plain JSON lines: uid, text or title and content, labels, relevance. A file may hold
strings, integers, floats and lists of those, nothing else: an extension type runs code of whoever registered it while
the schema is being read (CVE-2026-41486), so the raw bytes of the schema are searched before Arrow sees them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from xmcray.data.formats.base import BadValue, OnBad, Row, find, find_one
from xmcray.data.formats.json_lines import Fields, row_maker, rows_of
from xmcray.errors import DataError

_ROWS_AT_ONCE = 1024
_ERRORS = (OSError, ValueError, EOFError, pa.ArrowException)
_MARK = b"ARROW:extension:"
_FIELDS = Fields()
_COLUMNS = (_FIELDS.uid, _FIELDS.text, *_FIELDS.parts, _FIELDS.labels, _FIELDS.relevance)


def _in_base64(mark: bytes) -> tuple[bytes, ...]:
    """What base64 makes of `mark` wherever it stands in the encoded text: Parquet stores Arrow's schema so."""
    return tuple(
        base64.b64encode(b"\0" * shift + mark)[(0, 2, 3)[shift] : -4] for shift in range(3)
    )


_MARKS = (_MARK, *_in_base64(_MARK))


def _refuse_extensions(path: Path, schema: bytes) -> None:
    if any(mark in schema for mark in _MARKS):
        raise DataError(
            f"{path} has a column of an extension type, which can run code; save it with plain types"
        )


def _check_schema(path: Path, schema: Any) -> None:
    plain = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_null,
    )
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    for field in schema:
        inner = field.type.value_type if any(test(field.type) for test in lists) else field.type
        if not any(test(inner) for test in plain):
            raise DataError(
                f"{path}: column {field.name[:80]!r} is of type {str(field.type)[:80]}, "
                "expected strings, integers, floats or lists of those; drop or convert it"
            )
    if not set(schema.names) & set(_COLUMNS[1:4]):
        raise DataError(
            f"{path} has no column text, title or content (found: {', '.join(schema.names)[:200]})"
        )


def _parquet_footer(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 8))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or length + 12 > size:
            raise DataError(f"{path} is not a complete Parquet file; copy or write it again")
        file.seek(size - 8 - length)
        return file.read(length)


def _open_parquet(path: Path) -> Any:
    """A ParquetFile whose schema is allowed; to be closed by the caller."""
    try:
        _refuse_extensions(path, _parquet_footer(path))
        file = pq.ParquetFile(path)
    except _ERRORS as error:
        raise _unreadable(path, error) from None
    try:
        _check_schema(path, file.schema_arrow)
    except DataError:
        file.close()
        raise
    return file


def _parquet_batches(path: Path) -> Iterator[Any]:
    with _open_parquet(path) as file:
        names = [name for name in dict.fromkeys(file.schema_arrow.names) if name in _COLUMNS]
        try:
            yield from file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=names, use_threads=False)
        except _ERRORS as error:
            raise _unreadable(path, error) from None


def _arrow_batches(path: Path) -> Iterator[Any]:
    try:
        with pa.memory_map(str(path)) as file:
            message = pa.ipc.read_message(file)  # the schema's bytes, not yet understood
            _refuse_extensions(path, message.metadata.to_pybytes())
            file.seek(0)
            with pa.ipc.open_stream(file) as stream:
                _check_schema(path, stream.schema)
                names = [name for name in dict.fromkeys(stream.schema.names) if name in _COLUMNS]
                for batch in stream:
                    _check_offsets(batch)
                    for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                        yield batch.slice(start, _ROWS_AT_ONCE).select(names)
    except _ERRORS as error:
        raise _unreadable(path, error) from None


def _check_offsets(batch: Any) -> None:
    """Refuses offsets that point outside; strings count as bytes, for one that is not UTF-8 is a matter of its row."""
    for column in batch.columns:
        if pa.types.is_string(column.type):
            column = column.view(pa.binary())
        elif pa.types.is_large_string(column.type):
            column = column.view(pa.large_binary())
        column.validate(full=True)


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read ({' '.join(str(error).split())[:200]}); copy or write it again"
    )


def _records(batches: Iterator[Any]) -> Iterator[Mapping[str, Any] | BadValue]:
    """Rows as dictionaries; a batch with text that is not UTF-8 is taken row by row."""
    for batch in batches:
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            for start in range(batch.num_rows):
                try:
                    yield from batch.slice(start, 1).to_pylist()
                except UnicodeDecodeError:
                    yield BadValue("not UTF-8")


def read_rows(path: Path) -> Iterator[Mapping[str, Any] | BadValue]:
    """Rows of a Parquet file as dictionaries of the columns that are known here; one that is none as the reason.

    Raises:
        DataError: no Parquet file, or one with other types than are allowed, or without text.
    """
    return _records(_parquet_batches(path))


def count_rows(path: Path) -> int:
    """Rows of a Parquet file; raises as `read_rows`."""
    with _open_parquet(path) as file:
        return int(file.metadata.num_rows)


@dataclass(frozen=True, slots=True)
class Tables:
    """A layout of column files: patterns for "train", "test" and "labels"."""

    files: Mapping[str, str]
    arrow: bool = False

    @property
    def train(self) -> tuple[str, ...]:
        """Patterns of the files that must be there."""
        return self.files["train"], self.files["labels"]

    @property
    def test(self) -> tuple[str, ...]:
        """Patterns of the files of the test split."""
        return (self.files["test"],)

    def labels(self, folder: Path, on_bad: OnBad) -> Iterator[Row]:
        """All labels in file order."""
        return self._rows(folder, "labels", None, on_bad)

    def queries(self, folder: Path, split: str, num_labels: int, on_bad: OnBad) -> Iterator[Row]:
        """All queries of a split in file order."""
        return self._rows(folder, split, num_labels, on_bad)

    def shape(self, folder: Path, split: str) -> tuple[int, int]:
        """Rows of the split and of the labels."""
        rows, labels = (
            sum(self._num_rows(path) for path in self._paths(folder, key))
            for key in (split, "labels")
        )
        return rows, labels

    def _rows(self, folder: Path, key: str, num_labels: int | None, on_bad: OnBad) -> Iterator[Row]:
        def label_rows() -> dict[str, int]:
            return {label.uid: label.row for label in self.labels(folder, lambda bad: None)}

        make = row_maker(_FIELDS, num_labels, label_rows)
        first = 0
        for path in self._paths(folder, key):
            yield from rows_of(_records(self._batches(path)), path, make, on_bad, first)
            first += self._num_rows(path)

    def _batches(self, path: Path) -> Iterator[Any]:
        return _arrow_batches(path) if self.arrow else _parquet_batches(path)

    def _num_rows(self, path: Path) -> int:
        if self.arrow:
            return sum(batch.num_rows for batch in _arrow_batches(path))
        return count_rows(path)

    def _paths(self, folder: Path, key: str) -> list[Path]:
        if not self.arrow:
            find_one(folder, self.files[key])
            return find(folder, self.files[key])
        path = find_one(folder, self.files[key])
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            names = [str(entry["filename"]) for entry in state["_data_files"]]
            indices = state.get("_indices_data_files") or state.get("_indices_files")
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise DataError(
                f"{path} is not the state.json of a saved dataset; save it again"
            ) from None
        if indices or any(Path(name).name != name for name in names):
            raise DataError(
                f"{path} selects rows by an index or names other folders; call flatten_indices() and save"
            )
        return [path.parent / name for name in names]


PARQUET = Tables(
    {key: f"{key}.parquet|{key}/*.parquet|{key}-*.parquet" for key in ("train", "test", "labels")}
)
HUGGINGFACE = Tables({key: f"{key}/state.json" for key in ("train", "test", "labels")}, arrow=True)
