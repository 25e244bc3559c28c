"""Many queries, a chunk at a time: files of texts become tables of answers. No Ray; xmcray/predict.py spreads chunks.

A chunk is a number of consecutive rows of the input, the same for the same input and settings. So order and
parallelism of the work cannot change an answer, and what was finished before a kill is kept:

    .OUT.predicting/job.json            what the chunks are of: bundle, queries, settings
    .OUT.predicting/00000000.parquet    the answers of one chunk
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xmcray import storage
from xmcray.data.formats.base import BadRow, BadValue, check_text
from xmcray.data.formats.json_lines import Fields, Record, read_records
from xmcray.data.formats.tables import count_rows, read_rows
from xmcray.errors import DataError, RunError, StorageError
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import MemoryConfig
from xmcray.types import TopLabels

CHUNK_ROWS, CHUNK_ANSWERS, CHUNK_CHARACTERS = (
    4096,
    1 << 22,
    1 << 24,
)  # a chunk ends at the first that is reached
TABLE_ROWS = 1_000_000  # rows of one file of answers
_FIELDS = Fields()
_TEXTS = (_FIELDS.text, *_FIELDS.parts)
_ANSWERS: list[tuple[str, pa.DataType]] = [
    ("label_id", pa.list_(pa.int64())),
    ("label_uid", pa.list_(pa.large_string())),
    ("score", pa.list_(pa.float32())),
]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive queries.

    Attributes:
        number: chunks are counted from 0 in the order of the input.
    """

    number: int
    uids: list[str]
    texts: list[str]


@dataclass(frozen=True, slots=True)
class End:
    """What comes after the last chunk: the numbers of chunks and rows of the whole input."""

    chunks: int
    rows: int


def find_queries(path: str | Path) -> list[Path]:
    """The files of queries at a path, in the order in which they are read; Parquet files are whole and have a text.

    Args:
        path: a file of rows with `text`, or `title` and `content`, and possibly `uid`; or a folder of such files of
            one kind: .parquet, or .jsonl, possibly packed (.gz).
    Raises:
        DataError: no such file, another kind of file, or a Parquet file that cannot be read or has no text.
    """
    path = Path(path).absolute()
    if not path.exists():
        raise DataError(
            f"{path} does not exist, expected a file or folder of queries (.parquet or .jsonl)"
        )
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    tables, lines = (
        [file for file in files if file.name.endswith(ends)]
        for ends in ((".parquet",), (".jsonl", ".jsonl.gz"))
    )
    if bool(tables) == bool(lines):
        found = "both .parquet and .jsonl files" if tables else "no .parquet or .jsonl file"
        raise DataError(f"{path} holds {found}, expected queries in files of one kind")
    for table in tables:
        count_rows(table)
    return tables or lines


def read_chunks(
    files: Sequence[Path], chunk_rows: int, done: Collection[int] = ()
) -> Iterator[Chunk | End]:
    """The queries of `files` in chunks, without those that are done; at last an End.

    Raises:
        DataError: a row is malformed (named), or there is none.
    """
    number, row, size = 0, 0, 0
    uids, texts = list[str](), list[str]()
    for path in files:
        records = read_rows(path) if path.suffix == ".parquet" else read_records(path)
        for line, record in enumerate(records, 1):
            try:
                uid, text = _query(record, row)
            except BadValue as error:
                raise DataError(f"{BadRow(str(path), line, str(error))}; repair the row") from None
            uids.append(uid)
            texts.append(text)
            row, size = row + 1, size + len(text)
            if len(uids) == chunk_rows or size >= CHUNK_CHARACTERS:
                if number not in done:
                    yield Chunk(number, uids, texts)
                number, size, uids, texts = number + 1, 0, [], []
    if not row:
        raise DataError(
            f"{files[0]} is empty, expected rows of queries with text, or title and content"
        )
    if uids and number not in done:
        yield Chunk(number, uids, texts)
    yield End(number + bool(uids), row)


def _query(record: Record | BadValue, row: int) -> tuple[str, str]:
    """Uid and text of a row by the rules of the readers of corpora; but a uid may occur twice: it is only passed on."""
    if isinstance(record, BadValue):
        raise record
    uid = record.get(_FIELDS.uid)
    if uid is not None and type(uid) not in (str, int):
        raise BadValue(f"{_FIELDS.uid} is {type(uid).__name__}, expected a string or an integer")
    if not any(name in record for name in _TEXTS):
        raise BadValue(f"no {_TEXTS[0]}, expected it, or {' and '.join(_TEXTS[1:])}")
    text = record.get(_FIELDS.text)
    try:
        text = (
            " ".join([record.get(part) or "" for part in _FIELDS.parts]) if text is None else text
        ).strip()
    except (TypeError, AttributeError):
        raise BadValue(f"{' or '.join(_TEXTS)} is not a string") from None
    return check_text(str(row if uid is None else uid), _FIELDS.uid), check_text(text)


def answer_chunk(
    retriever: Retriever,
    chunk: Chunk,
    k: int,
    memory: MemoryConfig | None = None,
    texts: bool = False,
) -> pa.Table:
    """The answers of a chunk, a row per query: uid, text if asked for, and lists label_id, label_uid and score.

    Args:
        k: answers per query; lists are shorter where there are fewer.
        memory: how training queries vote, in place of the bundle's own settings.
    """
    top = retriever.top_labels(retriever.tokenizer.encode(chunk.texts), k, memory=memory)
    found = top.ids >= 0
    offsets = pa.array(np.concatenate([[0], np.cumsum(found.sum(axis=1))]), pa.int32())
    ids = pa.array(top.ids[found])
    uids = retriever.labels.table["uid"].take(ids).combine_chunks()
    values = [ids, uids, pa.array(top.scores[found])]
    columns: dict[str, Any] = {"uid": pa.array(chunk.uids, pa.large_string())}
    if texts:
        columns["text"] = pa.array(chunk.texts, pa.large_string())
    for (name, kind), value in zip(_ANSWERS, values, strict=True):
        columns[name] = pa.ListArray.from_arrays(offsets, value, type=kind)
    return pa.table(columns)


def collect(chunks: Sequence[Path], folder: Path, k: int) -> Iterator[TopLabels]:
    """Writes the answers of all chunks to predictions-00000.parquet ... in `folder`, and hands them on meanwhile."""
    rows, files = 0, 0
    with contextlib.ExitStack() as stack:
        writer = None
        for path in chunks:
            table = _read_chunk(path)
            if writer is None or rows + len(table) > TABLE_ROWS:
                stack.close()
                name = folder / f"predictions-{files:05d}.parquet"
                writer = stack.enter_context(
                    pq.ParquetWriter(name, table.schema, compression="zstd")
                )
                rows, files = 0, files + 1
            writer.write_table(table)
            rows += len(table)
            yield _top_labels(table, k)


def _read_chunk(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return file.read()
    except (OSError, pa.ArrowException) as error:
        found = " ".join(str(error).split())[:120]
        raise StorageError(
            f"{path} cannot be read ({found}); remove it and run the same command again"
        ) from None


def _top_labels(table: pa.Table, k: int) -> TopLabels:
    ids, scores = (table[name].combine_chunks() for name in ("label_id", "score"))
    lengths = np.diff(np.asarray(ids.offsets))
    found = np.arange(k) < lengths[:, None]
    top = TopLabels(np.full(found.shape, -1, np.int64), np.full(found.shape, -np.inf, np.float32))
    top.ids[found], top.scores[found] = np.asarray(ids.flatten()), np.asarray(scores.flatten())
    return top


class Work:
    """Finished chunks of one job. Make it with `opened`.

    Attributes:
        folder: where they are.
        done: their numbers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done = {int(path.stem) for path in folder.glob("[0-9]*.parquet")}

    @classmethod
    @contextlib.contextmanager
    def opened(cls, out: str | Path, job: Mapping[str, Any]) -> Iterator[Work]:
        """The work of a job whose result will be at `out`, in the hands of this process alone; new or half done.

        Args:
            job: names everything that the chunks depend on; plain JSON.
        Raises:
            RunError: there is unfinished work of another job.
            StorageError: another process is at it, or the folder cannot be written.
        """
        folder = _folder(out)
        with storage.disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with storage.exclusive(folder):
            if not (folder / "job.json").exists():
                storage.write_json(folder / "job.json", dict(job))
            _check_same(folder, job)
            yield cls(folder)

    def path(self, number: int) -> Path:
        """The file of one chunk."""
        return self.folder / f"{number:08d}.parquet"

    def add(self, number: int, answers: pa.Table) -> None:
        """Keeps the answers of a chunk; they are there after a crash too."""
        path = self.path(number)
        temporary = storage.aside(path)
        with storage.disk_errors(path):
            pq.write_table(answers, temporary, compression="zstd", write_page_checksum=True)
            storage.fsync(temporary)
            temporary.replace(path)
            storage.fsync(self.folder)
        self.done.add(number)

    def remove(self) -> None:
        """Takes the folder away: the result is written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _folder(out: str | Path) -> Path:
    """Where unfinished work is kept: beside the destination; of a URL, in this user's cache."""
    if storage.is_url(out):
        cache = Path(os.environ.get("XMCRAY_CACHE", Path.home() / ".cache" / "xmcray"))
        return cache / f"predicting-{hashlib.sha256(str(out).encode()).hexdigest()[:32]}"
    path = Path(out).absolute()
    return path.with_name(f".{path.name}.predicting")


def _check_same(folder: Path, job: Mapping[str, Any]) -> None:
    try:
        known = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        changed = next((name for name in job if known[name] != job[name]), None)
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{folder}/job.json is damaged; remove {folder} to begin anew") from None
    if changed is not None:
        values = f"{changed} ({known[changed]}, now {job[changed]})"
        what = {"bundle": "bundle", "queries": "input"}.get(changed, values)
        raise RunError(
            f"{folder} is unfinished work with another {what}; give the same command as then, remove the folder, or"
            " choose another --out"
        )
