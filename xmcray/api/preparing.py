"""Raw files, tables and what users did to a corpus: prepare, events."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from xmcray import config as configs
from xmcray import hub
from xmcray.api.settings_sources import Location
from xmcray.errors import ConfigError, DataError, readable

if TYPE_CHECKING:
    import pandas as pd

    from xmcray.data.corpus import Corpus
    from xmcray.serving.event_export import Exported

_TABLES = ("labels", "train", "test")


class PrepareOptions(TypedDict, total=False):
    """Options of `prepare`; see PrepareConfig."""

    max_len: int
    label_max_len: int
    tokenizer: str
    query_prompt: str
    label_prompt: str
    vocab_size: int
    propensity: tuple[float, float]
    on_error: Literal["fail", "skip"]
    on_leak: Literal["keep", "drop"]


def prepare(
    source: Location | Mapping[str, pd.DataFrame],
    out: Location,
    *,
    append_to: Location | None = None,
    format: str | None = None,  # noqa: A002 - named as the option
    columns: Mapping[str, str] | None = None,
    configuration: str | None = None,
    splits: Mapping[str, str] | None = None,
    name: str | None = None,
    licence: str | None = None,
    progress: bool = True,
    **options: Unpack[PrepareOptions],
) -> Corpus:
    """Turns raw files or tables into a corpus.

    Args:
        source: folder of raw files, also hf://datasets/OWNER/NAME; or tables by name: "labels"
            (uid, text), "train" and perhaps "test" (uid, text, labels: lists of label uids), on one
            machine. A corpus of an older release is written anew with few large files.
        out: folder or URL to write.
        append_to: corpus whose rows come first; labels are matched by uid.
        format: layout of the raw files; detected if not given. "datasets" is for tables of any layout
            that the package datasets opens, in a folder or on the Hub.
        columns: of "datasets": names of columns, see `data.hub_tables.Columns`.
        configuration: of "datasets": name of the configuration, if there are several.
        splits: of "datasets": its splits by "train", "test" and "labels", see
            `data.hub_tables.HubTables`.
        name: name in the card; that of `source` if not given.
        licence: licence in the card; "unknown" if not given.
        progress: show rows on stderr if that is a terminal.
        options: see PrepareConfig.
    Returns:
        The corpus, opened.
    Raises:
        ConfigError: an option is unknown or out of range.
        DataError: no layout fits the files, or a row is malformed.
        StorageError: `out` exists, or the disk is full.
    """
    of_datasets = {"columns": columns, "configuration": configuration, "splits": splits}
    if isinstance(source, Mapping):
        _refuse_options({"format": format, **of_datasets}, (), "is for raw files, not for tables")
    elif format != "datasets":
        _refuse_options(of_datasets, (), "is for format datasets")
    if format == "datasets" or isinstance(source, Mapping):
        with _raw_tables(source, columns, configuration, splits, progress) as folder:
            return prepare(
                folder,
                out,
                append_to=append_to,
                format="parquet",
                name=name,
                licence=licence,
                progress=progress,
                **options,
            )
    from xmcray.data.formats import detect
    from xmcray.data.regroup import is_corpus, regroup
    from xmcray.storage.artifact import refuse_existing

    is_on_hub = str(source).startswith(hub.PREFIX)
    folder = hub.downloaded_folder(str(source)) if is_on_hub else Path(source)
    target = os.fspath(out)
    all_options = {"format": format, "name": name, "licence": licence, **options}
    if append_to is not None:
        return _append(folder, target, os.fspath(append_to), all_options, progress)
    if is_corpus(folder):
        _refuse_options(all_options, (), f"is for raw files, but {source} is a corpus")
        return regroup(folder, target)
    raw = detect(folder, format)
    refuse_existing(target)
    # Ray is imported once the arguments are known to be right.
    from xmcray.data import pipeline

    name = name or _name_of(source)
    licence = licence or "unknown"
    return pipeline.prepare(raw, target, name=name, licence=licence, progress=progress, **options)


@contextlib.contextmanager
def _raw_tables(
    source: Location | Mapping[str, pd.DataFrame],
    columns: Mapping[str, str] | None,
    configuration: str | None,
    splits: Mapping[str, str] | None,
    progress: bool,
) -> Iterator[Path]:
    """A folder with tables as the raw files of a data set; removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="xmcray.") as temporary:
        # The name is part of the card, so it must not be random.
        if isinstance(source, Mapping):
            folder = Path(temporary) / "tables"
            folder.mkdir()
            for name in source:
                configs.check_choice("a table", name, _TABLES)
            for name in ("labels", "train"):
                if name not in source:
                    raise ConfigError(
                        f"there is no table {name}, expected labels, train and perhaps test; add it"
                    )
            for name, table in source.items():
                with readable(f"table {name} cannot be read", "give a column one type", DataError):
                    if "labels" in table:
                        uids = [_label_uids(cell, name) for cell in table["labels"]]
                        table = table.assign(labels=uids)
                    table.to_parquet(folder / f"{name}.parquet", index=False)
        else:
            from xmcray.data.hub_tables import Columns, HubTables

            names = configs.build(Columns, dict(columns or {}))
            tables = HubTables(str(source), names, configuration, splits)
            folder = Path(temporary) / _name_of(source)
            folder.mkdir()
            tables.write(folder, progress)
        with _names_of_tables(folder, "tables" if isinstance(source, Mapping) else str(source)):
            yield folder


@contextlib.contextmanager
def _names_of_tables(folder: Path, source: str) -> Iterator[None]:
    """Lets a DataError name the tables of the user, not the temporary files made of them.

    Args:
        folder: of the temporary files.
        source: what the user passed.
    """

    def table_and_row(match: re.Match[str]) -> str:
        row = f" row {match['row']}" if match["row"] else ""
        return f"{source} ({match['table']}{row})"

    try:
        yield
    except DataError as error:
        path = re.escape(str(folder))
        pattern = rf"{path}/(?P<table>{'|'.join(_TABLES)})\.parquet(:(?P<row>[0-9]+))?"
        message = re.sub(pattern, table_and_row, str(error))
        raise DataError(message.replace(str(folder), source)) from error


def _label_uids(cell: Any, table: str) -> Any:
    """A list of label uids as texts, because integers in a file are numbers of rows.

    Raises:
        DataError: it is a set, which has no order that `relevance` could follow.
    """
    import numpy as np  # here, because help and mistakes of the command line do without it

    if isinstance(cell, set | frozenset):
        raise DataError(
            f"table {table} has a {type(cell).__name__} of labels, expected a list; use sorted(labels)"
        )
    if not isinstance(cell, list | tuple | np.ndarray):
        return cell
    return [label if label is None else str(label) for label in cell]


def _name_of(source: Location) -> str:
    """The name of a data set: of its repository on the hub, or of its folder."""
    if str(source).startswith(hub.PREFIX):
        # The folder of the download is named by a commit.
        return hub.HubPath.parse(str(source)).repo_id.split("/")[1]
    from xmcray.data.formats.base import folder_name

    return folder_name(Path(source))


def _append(
    source: Path,
    out: str,
    append_to: str,
    options: Mapping[str, Any],
    progress: bool,
) -> Corpus:
    """Writes a corpus that has the rows of another one and those of new raw files."""
    from xmcray.data.corpus import KIND, Corpus
    from xmcray.data.formats import detect
    from xmcray.storage.artifact import open_artifact, refuse_existing

    if options.get("on_leak") == "drop":
        raise ConfigError(
            "on_leak is drop, expected keep with rows that are appended, because earlier rows stay;"
            " leave it out"
        )
    allowed = ("format", "on_error", "on_leak")
    _refuse_options(options, allowed, f"is as in {append_to}, which the rows are appended to")
    raw = detect(source, options["format"])
    refuse_existing(out)
    folder, manifest = open_artifact(append_to, KIND)
    corpus = Corpus(append_to, folder, manifest.sha256, verify=True)
    from xmcray.data import pipeline

    on_error = options.get("on_error", "fail")
    return pipeline.append(corpus, manifest, raw, out, on_error=on_error, progress=progress)


def _refuse_options(options: Mapping[str, Any], allowed: Sequence[str], why: str) -> None:
    """Raises ConfigError if an option was passed that has no effect here."""
    for name, value in options.items():
        if value is not None and name not in allowed:
            raise ConfigError(f"{name} {why}; leave it out")


def events(
    state_dir: Location,
    out: Location,
    *,
    model: str = "default",
    data: Location | None = None,
    after: int = 0,
    hold_out: float = 0.1,
    grades: Mapping[str, float] | None = None,
    texts: Location | None = None,
) -> Exported:
    """Writes what a server with collected events has kept as raw files.

    Args:
        state_dir: state folder of the server, which may run.
        out: folder of raw files to write.
        model: its model.
        data: corpus that the files will be appended to: texts of its labels are left out, and
            queries with a text of its own stay in the split of that text.
        after: leave out the events that an earlier export ended with.
        hold_out: share of the texts that become test queries.
        grades: relevance of "click", "accept" and "purchase", in place of 1, 2 and 3.
        texts: file of texts, one a line, that redacted searches may have had.
    Returns:
        Counts of queries, and the numbers of the first and the last event.
    Raises:
        ConfigError: a number is out of range, or the file of texts cannot be read.
        NoFeedbackError: there is no feedback after that event.
        StorageError: the log is missing or damaged, or `out` exists.
    """
    if after < 0 or not 0 <= hold_out < 1:
        raise ConfigError(
            f"after is {after} and hold_out {hold_out:g}, expected a number of an event and a share"
            " below 1"
        )
    import numpy as np

    from xmcray.data.corpus import Corpus
    from xmcray.data.text_splits import TextSplits
    from xmcray.serving.event_export import GRADES, export_events

    for name, grade in (grades or {}).items():
        if name not in GRADES or not 0 < grade < float("inf"):
            raise ConfigError(
                f"a grade is {name}={grade:g}, expected one of {', '.join(GRADES)} and a number"
                " above 0, such as click=0.5"
            )
    texts_read: list[str] = []
    if texts is not None:
        with readable(f"{texts} cannot be read", "name a file of texts", ConfigError):
            # Other characters than these also end a line of `splitlines`.
            lines = Path(texts).read_text(encoding="utf-8-sig").split("\n")
            texts_read = [line for line in lines if line]
    known_labels: Container[str] = ()
    gone_labels: Container[str] = ()
    split_of = TextSplits(hold_out)
    if data is not None:
        corpus = Corpus.open(os.fspath(data), verify=False)
        known_labels = set(corpus.label_uids(np.arange(corpus.card.num_labels)))
        gone_labels = set(corpus.label_uids(corpus.removed_labels))
        split_of = TextSplits.of(corpus, hold_out)
    return export_events(
        Path(state_dir),
        model,
        Path(out),
        split_of=split_of,
        after=after,
        grades=grades,
        known_labels=known_labels,
        gone_labels=gone_labels,
        texts=texts_read,
    )
