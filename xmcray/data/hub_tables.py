"""Converts tables that the library `datasets` opens, on the Hub or in a folder, to raw files.

One column holds the texts of the queries and another their labels. A cell of labels is a name, a number
of a `ClassLabel`, or a list of either. The rows are written in batches as raw files of the layout
`parquet`, because the pipeline reads them several times and from several processes. The library runs
no code of a data set: since release 4 it refuses data sets that need code.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from xmcray import config, hub
from xmcray.data.appended_labels import REMOVED_UIDS
from xmcray.data.formats.base import FILTER_NAMES, find
from xmcray.errors import ConfigError, DataError, readable
from xmcray.storage.path_errors import disk_errors

logger = logging.getLogger(__name__)

SPLITS = ("train", "test", "labels")
_BATCH_ROWS = 16_384
# In CSV, only a blank cell is empty. The default also drops texts and labels such as "NA" and "None".
_CSV_OPTIONS = {"keep_default_na": False, "na_values": [""]}
# By default, if the first row has one field more than the header, all cells move by one column.
_NO_INDEX = {"index_col": False}
# How pandas warns of rows with more fields than the header, whose last fields it leaves out.
_LONG_ROWS = "Length of header or names"
# Files that describe a data set, with any suffix.
_ABOUT_DATA = ("LICENCE", "LICENSE", "README", "dataset_infos")
_QUERY_FIELDS = {"uid": pa.string(), "text": pa.string(), "labels": pa.list_(pa.string())}
_LABEL_SCHEMA = pa.schema({"uid": pa.string(), "text": pa.string()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of the columns of a table.

    Attributes:
        text: texts of queries; "title+body" joins two columns.
        labels: labels of queries: names, numbers of a ClassLabel, or uids of the table of labels.
        uid: uids of queries; if it is None, queries are numbered.
        relevance: lists with a number for each label.
        label_uid: uids in the table of labels.
        label_text: texts in the table of labels; "name+description" joins two columns.
    """

    text: str = "text"
    labels: str = "labels"
    uid: str | None = None
    relevance: str | None = None
    label_uid: str = "uid"
    label_text: str = "text"


@dataclass(frozen=True, slots=True)
class HubTables:
    """The tables of one data set.

    Attributes:
        source: hf://datasets/OWNER/NAME, or a folder.
        columns: names of their columns.
        configuration: of the data set; None if it has only one.
        splits: for "train", "test" and "labels", the split to read, or a part of it such as
            "train[:90%]". A split of another configuration is "CONFIGURATION/SPLIT". None reads train
            and, if there is one, test.
    """

    source: str
    columns: Columns
    configuration: str | None = None
    splits: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name in self.splits or ():
            config.check_choice("a split", name, SPLITS)
        if self.splits and "train" not in self.splits:
            raise ConfigError("splits lack train; name the split with the training queries")

    def write(self, folder: Path, progress: bool = True) -> None:
        """Writes the raw files.

        Args:
            folder: an empty one.
            progress: show downloads on stderr if that is a terminal.
        Raises:
            ConfigError: the package datasets is missing, or a column is missing or of another type.
            DataError: the data set cannot be opened.
        """
        with tempfile.TemporaryDirectory(prefix="xmcray.") as cache:
            tables = self._open(progress, cache)
            with disk_errors(folder):
                self._write_tables(tables, folder)

    def _write_tables(self, tables: Mapping[str, Any], folder: Path) -> None:
        """Writes the raw files of the table of each split."""
        has_label_table = "labels" in tables
        # The labels of all queries. A dictionary drops repeated keys and keeps their order.
        label_uids: dict[str, None] = {}
        schema = pa.schema(_QUERY_FIELDS)
        if self.columns.relevance:
            grades = pa.list_(pa.float64())
            schema = schema.append(pa.field("relevance", grades))
        for split in ("train", "test"):
            if split not in tables:
                continue
            queries = self._queries(tables[split], split, has_label_table, label_uids)
            _write(folder / f"{split}.parquet", schema, queries)
        labels: Iterable[Mapping[str, Any]]
        if has_label_table:
            labels = self._labels(tables["labels"])
        elif label_uids and all(map(_is_written_list, label_uids)):
            raise DataError(
                f"{self.source}: column {self.columns.labels!r} holds texts such as"
                f" {next(iter(label_uids))[:40]!r}, expected lists of labels; save the table as Parquet or"
                " JSON lines"
            )
        else:
            # Without a table of labels, the name of a label is its text.
            names = list(label_uids)
            labels = [{"uid": names, "text": names}]
        _write(folder / "labels.parquet", _LABEL_SCHEMA, labels)
        for removed in find(Path(self.source), REMOVED_UIDS):
            shutil.copyfile(removed, folder / removed.name)

    def _open(self, progress: bool, cache: str) -> dict[str, Any]:
        """The table of each split. Its rows are mapped, not read.

        Args:
            progress: show downloads.
            cache: folder for the library's copies of local files.
        """
        try:
            from datasets import load_dataset_builder
            from datasets.exceptions import DatasetGenerationError
        except ImportError:
            raise ConfigError(
                "format datasets needs the package datasets, which is not installed; run"
                " pip install 'xmcray[datasets]'"
            ) from None
        path, options = self._location(cache)
        network = ", the network and HF_TOKEN" if self.source.startswith(hub.PREFIX) else ""
        remedy = f"check the name, the files, --configuration, --splits{network}"
        builders: dict[str | None, Any] = {}

        def builder_of(configuration: str | None) -> Any:
            """The builder of a configuration, which is downloaded once."""
            if configuration in builders:
                return builders[configuration]
            builder = load_dataset_builder(path, configuration, **options)
            # Only the configuration of CSV files has this setting.
            if hasattr(builder.config, "keep_default_na"):
                csv_options = {**options, **self._csv_options(builder.config)}
                builder = load_dataset_builder(path, configuration, **csv_options)
            try:
                _download(builder, cache)
            except DatasetGenerationError as error:
                # The message of the error does not say what is wrong. That of its cause does.
                raise error.__cause__ or error from None
            builders[configuration] = builder
            return builder

        failure = f"{self.source} cannot be opened by datasets"
        with _progress_bars(progress), readable(failure, remedy, DataError):
            splits = self.splits
            if splits is None:
                splits = {"train": "train"}
                if "test" in builder_of(self.configuration).info.splits:
                    splits["test"] = "test"
            tables = {}
            for name, split in splits.items():
                configuration, _, part = split.rpartition("/")
                builder = builder_of(configuration or self.configuration)
                tables[name] = builder.as_dataset(split=part)
        if Path(self.source).is_dir():
            self._warn_of_unread_files(builders.values())
        return tables

    def _csv_options(self, csv_config: Any) -> dict[str, Any]:
        """Options for `datasets` to read CSV files, over those of a data set's own configuration."""
        if not csv_config.keep_default_na:
            # The data set says itself which cells are empty.
            return dict(_NO_INDEX)
        columns = [self.columns.uid, self.columns.label_uid]
        # Without a table of labels, this column is not read as text, so that labels that are numbers are
        # refused. Their texts would be digits.
        if "labels" in (self.splits or ()):
            columns.append(self.columns.labels)
        # Uids are read as texts. Otherwise a uid such as 007 would become the number 7.
        as_texts = {column: _cell_as_text for column in columns if column}
        return {**_NO_INDEX, **_CSV_OPTIONS, "converters": as_texts}

    def _location(self, cache: str) -> tuple[str, dict[str, Any]]:
        """The path and the options for `load_dataset_builder`."""
        if self.source.startswith(hub.PREFIX):
            place = hub.HubPath.parse(self.source)
            # The scheme is kept. Without it the library would prefer a local folder of the same name.
            path = f"{hub.PREFIX}datasets/{place.repo_id}"
            return path, {"revision": place.revision, "data_dir": place.path or None}
        folder = Path(self.source)
        if not folder.is_dir():
            raise DataError(f"{self.source} does not exist, expected a folder that datasets opens")
        self._refuse_files_by_row(folder)
        # The path is absolute, because names such as "csv" have a meaning of their own. The cache is our
        # own, because that of the library identifies a file by name and time. Both may stay the same
        # when the content changes.
        return str(folder.absolute()), {"cache_dir": cache}

    def _refuse_files_by_row(self, folder: Path) -> None:
        """Raises DataError if there are filter pairs or side vectors, which refer to rows of raw files."""
        for pattern in (*FILTER_NAMES.values(), "*.vectors.npy"):
            if files := find(folder, pattern):
                raise DataError(
                    f"{files[0]} counts rows of raw files, but --format datasets reads tables; take the file"
                    " away, or name the columns as another format does"
                )

    def _warn_of_unread_files(self, builders: Iterable[Any]) -> None:
        """Warns of files next to the tables that are in none of the opened configurations."""
        read_files: set[Path] = set()
        for builder in builders:
            files_of_split = builder.config.data_files or {}
            for file in itertools.chain(*files_of_split.values()):
                # A file inside an archive is called NAME::ARCHIVE.
                *_, on_disk = str(file).split("::")
                read_files.add(Path(on_disk).resolve())
        for path in find(Path(self.source), REMOVED_UIDS):
            read_files.add(path.resolve())
        unread = []
        for path in sorted(Path(self.source).iterdir()):
            is_data = path.suffix not in ("", ".md") and path.stem not in _ABOUT_DATA
            if is_data and path.is_file() and path.resolve() not in read_files:
                unread.append(path.name)
        if unread:
            logger.warning(
                "%s has files that datasets does not read: %s; a table is read if a configuration lists it,"
                " and --configuration or --splits names that",
                self.source,
                ", ".join(unread[:5]),
            )

    def _queries(
        self,
        table: Any,
        split: str,
        has_label_table: bool,
        label_uids: dict[str, None],
    ) -> Iterator[dict[str, list[Any]]]:
        """The queries of a split in batches. Adds the uids of their labels to `label_uids`."""
        columns = self.columns
        text_columns = columns.text.split("+")
        self._check_query_columns(table, split, has_label_table)
        label_type = _item(table.features[columns.labels])
        names = getattr(label_type, "names", None)
        # All names of a ClassLabel are labels, even if no query has them.
        label_uids.update(dict.fromkeys(names or ()))
        columns_read = {*text_columns, columns.labels}
        if columns.uid:
            columns_read.add(columns.uid)
        if columns.relevance:
            columns_read.add(columns.relevance)
        for batch in table.select_columns(sorted(columns_read)).iter(_BATCH_ROWS):
            labels = [_label_uids(cell, names) for cell in batch[columns.labels]]
            rows: dict[str, list[Any]] = {}
            rows["text"] = _texts(batch, text_columns)
            if columns.relevance:
                grades = batch[columns.relevance]
                rows["relevance"] = list(map(_grades_of_labels, grades, labels))
            rows["labels"] = [[uid for uid in uids if uid is not None] for uids in labels]
            for uids in rows["labels"]:
                label_uids.update(dict.fromkeys(uids))
            # Rows without a uid are numbered when the raw files are read.
            rows["uid"] = [None] * len(labels)
            if columns.uid:
                rows["uid"] = _uids(batch[columns.uid])
            yield rows

    def _check_query_columns(self, table: Any, split: str, has_label_table: bool) -> None:
        """Raises ConfigError if a table of queries lacks a column, or if it is of another type."""
        columns = self.columns
        for column in columns.text.split("+"):
            self._check(table, split, "text", column, ("string",))
        kinds = ("string", "class", "int") if has_label_table else ("string", "class")
        self._check(table, split, "labels", columns.labels, kinds, lists=True)
        if columns.uid:
            self._check(table, split, "uid", columns.uid, ("string", "int"))
        if columns.relevance:
            kinds = ("int", "float")
            self._check(table, split, "relevance", columns.relevance, kinds, lists=True)

    def _labels(self, table: Any) -> Iterator[dict[str, list[Any]]]:
        """The rows of the table of labels in batches."""
        uid_column = self.columns.label_uid
        text_columns = self.columns.label_text.split("+")
        self._check(table, "labels", "label_uid", uid_column, ("string", "int"))
        for column in text_columns:
            self._check(table, "labels", "label_text", column, ("string",))
        columns_read = sorted({uid_column, *text_columns})
        for batch in table.select_columns(columns_read).iter(_BATCH_ROWS):
            yield {"uid": _uids(batch[uid_column]), "text": _texts(batch, text_columns)}

    def _check(
        self,
        table: Any,
        split: str,
        option: str,
        column: str,
        kinds: tuple[str, ...],
        lists: bool = False,
    ) -> None:
        """Raises ConfigError if a table lacks a column, or if the column is of another type.

        Args:
            table: of `datasets`.
            split: "train", "test" or "labels".
            option: field of `Columns` that names the column.
            column: name of the column.
            kinds: allowed types, by the start of their names.
            lists: whether lists of these types are allowed too.
        """
        if column not in table.features:
            column_names = ", ".join(table.features)[:200]
            raise ConfigError(
                f"{self.source} has no column {column!r} for {split} (found: {column_names}); name it with"
                f" --columns {option}=COLUMN"
            )
        feature = table.features[column]
        item = _item(feature) if lists else feature
        # A ClassLabel holds integers, and the names that they stand for.
        kind = "class" if hasattr(item, "names") else str(getattr(item, "dtype", ""))
        # "large_string" is a string, and "uint8" an integer.
        kind = kind.removeprefix("large_").replace("uint", "int")
        if not kind.startswith(kinds):
            expected = " or ".join(kinds)
            hint = f"; name another column with --columns {option}=COLUMN"
            if option == "labels" and kind.startswith("int"):
                hint = "; integers without names need a table of labels: --splits labels=SPLIT"
            raise ConfigError(
                f"{self.source}: column {column!r} for {split} is of type {str(feature)[:80]},"
                f" expected {expected}{hint}"
            )


@contextlib.contextmanager
def _progress_bars(progress: bool) -> Iterator[None]:
    """Shows or hides the progress bars of the library, and restores its setting afterwards."""
    import datasets

    if datasets.are_progress_bars_disabled() or (progress and sys.stderr.isatty()):
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _download(builder: Any, cache: str) -> None:
    """Reads the files of a builder of `datasets`.

    Args:
        builder: of a configuration.
        cache: folder for extracted copies of local files.
    Raises:
        DataError: a row of a CSV file has more fields than the header.
    """
    from datasets.exceptions import DatasetGenerationError

    try:
        # As an error, so that the library does not keep a table without the last fields of its rows.
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=_LONG_ROWS)
            builder.download_and_prepare()
    except DatasetGenerationError as error:
        if not str(error.__cause__).startswith(_LONG_ROWS):
            raise
        _refuse_long_rows(builder.config, cache)
        # Only blank fields are too many, as of a row that ends with commas.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_LONG_ROWS)
            builder.download_and_prepare()


def _refuse_long_rows(csv_config: Any, cache: str) -> None:
    """Raises DataError if a row of a CSV file has fields beyond the header that are not blank."""
    from datasets import DownloadConfig, DownloadManager

    manager = DownloadManager(download_config=DownloadConfig(cache_dir=cache))
    # The default limit is 131,072 characters in a field, and texts may be longer.
    csv.field_size_limit(sys.maxsize)
    for file in itertools.chain(*csv_config.data_files.values()):
        # An archive is a folder of files.
        for path in manager.iter_files(manager.download_and_extract(file)):
            encoding = csv_config.encoding or "utf-8-sig"
            with Path(path).open(encoding=encoding, newline="") as stream:
                _refuse_long_rows_of(stream, csv_config, str(file))


def _refuse_long_rows_of(stream: TextIO, csv_config: Any, name: str) -> None:
    """The same for one file, whose name is for the message."""
    reader = csv.reader(stream, delimiter=csv_config.sep, quotechar=csv_config.quotechar)
    # The header is the first line that is not empty.
    header = csv_config.names or next(filter(None, reader), [])
    for row in reader:
        if any(field.strip() for field in row[len(header) :]):
            raise DataError(
                f"{name}, line {reader.line_num}: the row has {len(row)} fields, expected"
                f" {len(header)} as in the header; quote fields that hold {csv_config.sep!r}, or name"
                " each column"
            )


def _item(feature: Any) -> Any:
    """The type of the items if a column holds lists, otherwise the type of the column."""
    return getattr(feature, "feature", feature)


def _is_written_list(label: str) -> bool:
    """Whether a label is a list that was written as a text, as pandas does in CSV files."""
    return label.startswith("[") and label.endswith("]")


def _cell_as_text(cell: str) -> str | None:
    """A cell of a CSV file as it is; None if it is blank."""
    return cell or None


def _uids(cells: list[Any]) -> list[str | None]:
    """Uids as texts; None where a row has none."""
    return [None if uid is None else str(uid) for uid in cells]


def _label_uids(cell: Any, names: list[str] | None) -> list[str | None]:
    """The uids of the labels in a cell. None stands for an item that is no label.

    Args:
        cell: of the labels column: one label or a list of labels.
        names: of a ClassLabel; None if the cell holds the uids themselves.
    """
    labels = _as_list(cell)
    # The library writes -1 if a row has no class.
    if names is None:
        return [None if label in (None, "", -1) else str(label) for label in labels]
    return [None if number is None or number < 0 else names[number] for number in labels]


def _grades_of_labels(cell: Any, labels: list[str | None]) -> list[Any] | None:
    """The grades in a cell, without those of items that are no labels; None if the row has none."""
    if cell is None:
        return None
    grades = _as_list(cell)
    if len(grades) != len(labels):
        # The reader of the raw files refuses such a row as malformed.
        return grades
    return [grade for grade, label in zip(grades, labels, strict=True) if label is not None]


def _as_list(cell: Any) -> list[Any]:
    """The list in a cell. A single value becomes a list of one."""
    return cell if isinstance(cell, list) else [cell]


def _texts(batch: Mapping[str, list[Any]], columns: list[str]) -> list[str]:
    """The texts of rows. If there are several text columns, they are joined by blanks."""
    text_columns = [batch[column] for column in columns]
    texts = []
    for row in zip(*text_columns, strict=True):
        # A row may lack a text.
        present = [text or "" for text in row]
        texts.append(" ".join(present))
    return texts


def _write(path: Path, schema: pa.Schema, batches: Iterable[Mapping[str, Any]]) -> None:
    with pq.ParquetWriter(path, schema) as writer:
        for batch in batches:
            writer.write_batch(pa.RecordBatch.from_pydict(batch, schema=schema))
