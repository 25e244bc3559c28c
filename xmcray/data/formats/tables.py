"""Columns with named fields: Parquet files, and Hugging Face datasets saved to disk.

    layout       train, test, labels
    parquet      train.parquet, train/*.parquet, train-*.parquet or train_0.parquet and so on; test and
                 labels likewise
    huggingface  train/, test/ and labels/, each with the Arrow files and the state.json of `save_to_disk`

The columns are those of plain JSON lines: uid, text or title and content, labels, relevance. A file
may only hold strings, integers, floats and lists of those. While Arrow reads a schema with an
extension type, it runs code that some library registered for the type (CVE-2026-41486). So the raw
bytes of the schema are searched for extension types before Arrow reads them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from xmcray.data.formats.base import BadValue, find, find_one
from xmcray.data.formats.json_lines import Fields, FileKind, Record, Records
from xmcray.errors import DataError, one_line

_ROWS_AT_ONCE = 1024
_EXTENSION_KEY = b"ARROW:extension:"
_LIST_TYPES = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_PLAIN_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_null,
)
_BYTES_OF = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
_FIELDS = Fields()
_TEXT_COLUMNS = (_FIELDS.text, *_FIELDS.parts)
_COLUMNS = (_FIELDS.uid, *_TEXT_COLUMNS, _FIELDS.labels, _FIELDS.relevance)
# The end of a file name of the library datasets: number of the file, number of files, perhaps a hash.
_PART = re.compile(r"-[0-9]+-of-(?P<all>[0-9]+)(-[0-9a-f]+)?\.parquet$")


def _base64_fragments(key: bytes) -> list[bytes]:
    """The three texts of which a base64 text contains one if its content contains `key`.

    Parquet stores Arrow's schema as base64, which encodes three bytes as four characters. So the text of
    the key depends on where it begins within three bytes. The first and last characters also depend on
    the neighbouring bytes and are cut off.
    """
    fragments = []
    # How many of the first characters depend on the 0, 1 or 2 bytes before the key.
    num_cut_by_shift = (0, 2, 3)
    for shift, num_cut in enumerate(num_cut_by_shift):
        zeros = bytes(shift)
        encoded = base64.b64encode(zeros + key)
        fragments.append(encoded[num_cut:-4])
    return fragments


_EXTENSION_MARKS = [_EXTENSION_KEY, *_base64_fragments(_EXTENSION_KEY)]


def _refuse_extensions(path: Path, schema: bytes) -> None:
    if any(mark in schema for mark in _EXTENSION_MARKS):
        raise DataError(
            f"{path} has a column of an extension type, which can run code; save it with plain types"
        )


def _check_schema(path: Path, schema: Any) -> None:
    for field in schema:
        if not _is_allowed(field.type):
            raise DataError(
                f"{path}: column {field.name[:80]!r} is of type {str(field.type)[:80]}, "
                "expected strings, integers, floats or lists of those; drop or convert it"
            )
    if not set(schema.names) & set(_TEXT_COLUMNS):
        columns = ", ".join(schema.names)[:200]
        raise DataError(
            f"{path} has no column text, title or content (found: {columns}); rename one of them"
        )


def _is_allowed(column_type: Any) -> bool:
    if any(is_list(column_type) for is_list in _LIST_TYPES):
        column_type = column_type.value_type
    return any(is_plain(column_type) for is_plain in _PLAIN_TYPES)


def _parquet_footer(path: Path) -> bytes:
    """The metadata at the end of a Parquet file, which holds its schema."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        # The last eight bytes are the length of the metadata and a mark.
        file.seek(max(0, size - 8))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or length + 12 > size:
            raise DataError(f"{path} is not a complete Parquet file; copy or write it again")
        file.seek(size - 8 - length)
        return file.read(length)


@contextlib.contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """Turns errors of Arrow into a DataError that names the file."""
    try:
        yield
    except (OSError, ValueError, EOFError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read ({one_line(error)}); copy or write it again"
        ) from None


@contextlib.contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    """A ParquetFile whose schema is allowed."""
    with _arrow_errors(path):
        # The raw bytes are searched first, because Arrow reads the schema when it opens the file.
        _refuse_extensions(path, _parquet_footer(path))
        with pq.ParquetFile(path) as file:
            _check_schema(path, file.schema_arrow)
            yield file


def _parquet_batches(path: Path, more: tuple[str, ...]) -> Iterator[Any]:
    with _open_parquet(path) as file:
        names = _known_columns(file.schema_arrow, more)
        # One thread is enough, because the tasks of the pipeline run in parallel.
        yield from file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=names, use_threads=False)


def _known_columns(schema: Any, more: tuple[str, ...] = ()) -> list[str]:
    """The columns to read. A schema may repeat a name, and each name is read once."""
    known_names = {*_COLUMNS, *more}
    distinct_names = dict.fromkeys(schema.names)
    return [name for name in distinct_names if name in known_names]


def _arrow_batches(path: Path) -> Iterator[Any]:
    with _arrow_errors(path), pa.memory_map(str(path)) as file:
        message = pa.ipc.read_message(file)  # the schema's bytes, not parsed yet
        _refuse_extensions(path, message.metadata.to_pybytes())
        # The schema is read again, now by Arrow.
        file.seek(0)
        with pa.ipc.open_stream(file) as stream:
            _check_schema(path, stream.schema)
            names = _known_columns(stream.schema)
            for batch in stream:
                _check_offsets(batch)
                # A saved dataset may hold a million rows in one batch.
                for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                    yield batch.slice(start, _ROWS_AT_ONCE).select(names)


def _check_offsets(batch: Any) -> None:
    """Raises an error if an offset points outside of its column.

    Strings are checked as bytes: a text that is not UTF-8 makes only its own row bad.
    """
    for column in batch.columns:
        if column.type in _BYTES_OF:
            column = column.view(_BYTES_OF[column.type])
        column.validate(full=True)


def _records(batches: Iterator[Any]) -> Iterator[Record | BadValue]:
    """Rows as dictionaries. A row with text that is not UTF-8 becomes a BadValue."""
    for batch in batches:
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            # One bad row must not cost the other rows of its batch, so they are read one by one.
            for place in range(batch.num_rows):
                row = batch.slice(place, 1)
                try:
                    yield from row.to_pylist()
                except UnicodeDecodeError:
                    yield BadValue("not UTF-8")


def read_rows(path: Path, more: tuple[str, ...] = ()) -> Iterator[Record | BadValue]:
    """Rows of a Parquet file as dictionaries of the known columns. A bad row becomes the reason.

    Args:
        path: the file.
        more: further columns to read, if the file has them.

    Raises:
        DataError: no Parquet file, or one with other types than are allowed, or without text.
    """
    return _records(_parquet_batches(path, more))


def count_rows(path: Path) -> int:
    """Rows of a Parquet file; raises as `read_rows`."""
    with _open_parquet(path) as file:
        return int(file.metadata.num_rows)


def _parquet_files(folder: Path, pattern: str) -> list[Path]:
    """The files of a split.

    Raises:
        DataError: there is none, a part is missing, or files are named in several ways.
    """
    find_one(folder, pattern)  # raises an error if there is none
    # The files of each way to name them.
    groups = []
    for name in pattern.split("|"):
        files = find(folder, name)
        if files:
            groups.append(files)
    if len(groups) > 1:
        first, second = (files[0].relative_to(folder) for files in groups[:2])
        raise DataError(
            f"{folder} has {first} and {second}, expected one of them: files of a split are named in"
            " one way; take the others out of the folder"
        )
    files = groups[0]
    _check_parts(files)
    _check_columns(files)
    return files


def _check_parts(files: list[Path]) -> None:
    """Raises DataError if names such as train-00000-of-00002 say that a file is missing."""
    parts = [match for path in files if (match := _PART.search(path.name))]
    for part in parts:
        num_parts = int(part["all"])
        if len(parts) != num_parts:
            raise DataError(
                f"{files[0].parent} has {len(parts)} parts like {part.string}, expected {num_parts};"
                " copy the missing ones, or take those of another set out of the folder"
            )


def _check_columns(files: list[Path]) -> None:
    """Raises DataError if only some files of a split have labels."""
    if len(files) == 1:
        return
    with_labels: list[Path] = []
    without_labels: list[Path] = []
    for path in files:
        with _open_parquet(path) as file:
            if _FIELDS.labels in file.schema_arrow.names:
                with_labels.append(path)
            else:
                without_labels.append(path)
    if with_labels and without_labels:
        raise DataError(
            f"{without_labels[0]} has no column {_FIELDS.labels}, but {with_labels[0]} has one; add it,"
            " or take the file out of the folder"
        )


def _read_arrow(path: Path) -> Iterator[Record | BadValue]:
    return _records(_arrow_batches(path))


def _count_arrow(path: Path) -> int:
    return sum(batch.num_rows for batch in _arrow_batches(path))


def _dataset_files(folder: Path, pattern: str) -> list[Path]:
    """The Arrow files that the state.json of a saved dataset names."""
    state_file = find_one(folder, pattern)
    try:
        state = json.loads(state_file.read_text(encoding="utf-8"))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
        indices = state.get("_indices_data_files") or state.get("_indices_files")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DataError(
            f"{state_file} is not the state.json of a saved dataset; save it again"
        ) from None
    if indices or any(Path(name).name != name for name in names):
        raise DataError(
            f"{state_file} selects rows by an index or names other folders; call flatten_indices() and save"
        )
    return [state_file.parent / name for name in names]


_PARQUET_KIND = FileKind(_parquet_files, read_rows, count_rows)
_ARROW_KIND = FileKind(_dataset_files, _read_arrow, _count_arrow)
_PARQUET_NAMES = "{0}.parquet|{0}/*.parquet|{0}-*.parquet|{0}_[0-9]*.parquet|{0}[0-9]*.parquet"
_PARQUET_PATTERNS = {key: _PARQUET_NAMES.format(key) for key in ("train", "test", "labels")}
_STATE_FILES = {key: f"{key}/state.json" for key in _PARQUET_PATTERNS}
PARQUET = Records(_PARQUET_KIND, _PARQUET_PATTERNS)
HUGGINGFACE = Records(_ARROW_KIND, _STATE_FILES)
