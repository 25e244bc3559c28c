"""Many queries, a chunk at a time: files of texts become tables of answers.

Needs no Ray; xmcray/prediction.py spreads the chunks over processes.

A chunk is a number of consecutive rows of the input, the same for the same input and settings. So
order and parallelism of the work cannot change an answer, and what was finished before a kill is
kept:

    .OUT.predicting/job.json            what the chunks depend on: bundle, queries, settings
    .OUT.predicting/00000000.parquet    the answers of one chunk
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xmcray.data.formats.base import BadRow, BadValue, check_text, natural_key
from xmcray.data.formats.json_lines import Fields, Record, RowParser, read_records
from xmcray.data.formats.tables import count_rows, read_rows
from xmcray.errors import DataError, RunError, StorageError, one_line
from xmcray.nn.side import SETTINGS as MIXER
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import MemoryConfig
from xmcray.storage.artifact import exclusive
from xmcray.storage.cache import cache_folder
from xmcray.storage.path_errors import disk_errors
from xmcray.storage.remote import is_url
from xmcray.storage.whole_files import whole_file, write_json
from xmcray.types import Float32Array, TopLabels, offsets_of

# A chunk ends at the first of these that is reached.
CHUNK_ROWS = 4096
CHUNK_ANSWERS = 1 << 22
CHUNK_CHARACTERS = 1 << 24
TABLE_ROWS = 1_000_000  # rows of one file of answers
_FIELDS = Fields()
_PARSER = RowParser(_FIELDS, None, dict)
_TEXT_FIELDS = (_FIELDS.text, *_FIELDS.parts)
_VECTOR = "vector"  # field of a query's side vector
_CHUNKS = "[0-9]*.parquet"  # names of the files of chunks


@dataclass(frozen=True, slots=True)
class QueryChunk:
    """Consecutive queries.

    Attributes:
        number: chunks are counted from 0 in the order of the input.
        uids: uids of the queries.
        texts: texts of the queries.
        vectors: side vectors of the queries; None for a query without one.
    """

    number: int
    uids: list[str]
    texts: list[str]
    vectors: list[Float32Array | None] = field(default_factory=list)


# Uid, text, and side vector if there is one.
class BadQueryError(DataError):
    """A row of the queries is malformed, or there is none."""


_Query = tuple[str, str, Float32Array | None]


@dataclass(frozen=True, slots=True)
class QueriesEnd:
    """What comes after the last chunk.

    Attributes:
        chunks: number of chunks in the whole input.
        rows: number of queries in the whole input.
    """

    chunks: int
    rows: int


def mixes_side_vectors(names: Iterable[str]) -> bool:
    """Whether a bundle with files of these names mixes side vectors into those of texts."""
    return any(name.endswith(f"encoder/{MIXER}") for name in names)


def find_queries(path: str | Path) -> list[Path]:
    """The files of queries at a path, in the order in which they are read.

    Args:
        path: a file of rows with `text`, or `title` and `content`, and possibly `uid` and `vector`,
            a list of numbers; or a folder of such files of one kind: .parquet, or .jsonl, possibly
            packed (.gz).
    Raises:
        DataError: no such file, another kind of file, or a Parquet file that cannot be read or has
            no text.
    """
    path = Path(path).absolute()
    if not path.exists():
        raise DataError(
            f"{path} does not exist, expected a file or folder of queries (.parquet or .jsonl)"
        )
    files = [path]
    if path.is_dir():
        files = sorted((file for file in path.iterdir() if file.is_file()), key=natural_key)
    tables = [file for file in files if file.name.endswith(".parquet")]
    lines = [file for file in files if file.name.endswith((".jsonl", ".jsonl.gz"))]
    if bool(tables) == bool(lines):
        content = "both .parquet and .jsonl files" if tables else "no .parquet or .jsonl file"
        raise DataError(f"{path} holds {content}, expected queries in files of one kind")
    for table in tables:
        count_rows(table)  # it can be read and has a text
    return tables or lines


def read_chunks(
    files: Sequence[Path],
    chunk_rows: int,
    done: Collection[int] = (),
    *,
    vectors: bool = False,
) -> Iterator[QueryChunk | QueriesEnd]:
    """Reads queries in chunks, without those that are done; at last yields a QueriesEnd.

    Args:
        files: as `find_queries` returns them.
        chunk_rows: queries of a chunk, at most.
        done: numbers of the chunks to leave out.
        vectors: read side vectors; else a column of that name is ignored like any other.
    Raises:
        BadQueryError: a row is malformed (named), or there is none.
        DataError: a file cannot be read.
    """
    chunk = QueryChunk(0, [], [])
    num_characters = 0
    rows = 0
    for uid, text, vector in _read_queries(files, vectors):
        rows += 1
        chunk.uids.append(uid)
        chunk.texts.append(text)
        chunk.vectors.append(vector)
        num_characters += len(text)
        if len(chunk.uids) == chunk_rows or num_characters >= CHUNK_CHARACTERS:
            if chunk.number not in done:
                yield chunk
            chunk = QueryChunk(chunk.number + 1, [], [])
            num_characters = 0
    if not rows:
        raise BadQueryError(
            f"{files[0]} is empty, expected rows of queries with text, or title and content"
        )
    if chunk.uids and chunk.number not in done:
        yield chunk
    yield QueriesEnd(chunks=chunk.number + bool(chunk.uids), rows=rows)


def _read_queries(files: Sequence[Path], vectors: bool) -> Iterator[_Query]:
    """The queries of all files, with their side vectors if those are to be read."""
    row = 0
    for path in files:
        if path.suffix == ".parquet":
            records = read_rows(path, more=(_VECTOR,) if vectors else ())
        else:
            records = read_records(path)
        for line, record in enumerate(records, start=1):
            try:
                uid, text = _query(record, row)
                yield uid, text, _vector(record) if vectors else None
            except BadValue as error:
                raise BadQueryError(
                    f"{BadRow(str(path), line, str(error))}; repair the row"
                ) from None
            row += 1


def _query(record: Record | BadValue, row: int) -> tuple[str, str]:
    """Uid and text of a row by the rules of the readers of corpora.

    But a uid may occur twice, because it is only passed on, and a missing one is the row's number.
    """
    if isinstance(record, BadValue):
        raise record
    uid = _PARSER.uid(record, row)
    if not any(name in record for name in _TEXT_FIELDS):
        raise BadValue(f"no {_TEXT_FIELDS[0]}, expected it, or {' and '.join(_TEXT_FIELDS[1:])}")
    text = _PARSER.text(record)
    return check_text(uid, _FIELDS.uid), check_text(text)


def _vector(record: Record | BadValue) -> Float32Array | None:
    """float32 [W], the side vector of a row; None if it has none."""
    if isinstance(record, BadValue):
        raise record
    numbers = record.get(_VECTOR)
    if numbers is None:
        return None
    # bool is another type than int.
    if type(numbers) is list and set(map(type, numbers)) <= {int, float}:
        # A number that no float32 holds becomes infinity, or is an error if it is an integer.
        with contextlib.suppress(OverflowError), np.errstate(over="ignore"):
            vector = np.array(numbers, np.float32)
            if np.isfinite(vector).all():
                return vector
    raise BadValue(f"{_VECTOR} is no list of finite numbers")


def _side_vectors(retriever: Retriever, chunk: QueryChunk) -> Float32Array | None:
    """float32 [queries, W], zeros for queries without a vector; None if the bundle uses none.

    Raises:
        BadQueryError: a vector has another width than those that the bundle was trained with.
    """
    width = retriever.side_width
    if not width:
        return None
    vectors = np.zeros((len(chunk.texts), width), np.float32)
    for place, vector in enumerate(chunk.vectors):
        if vector is None:
            continue
        if len(vector) != width:
            raise BadQueryError(
                f"query {chunk.uids[place][:80]!r} has a {_VECTOR} of {len(vector)} numbers, expected"
                f" {width}; use the vectors that the bundle was trained with"
            )
        vectors[place] = vector
    return vectors


def answer_chunk(
    retriever: Retriever,
    chunk: QueryChunk,
    k: int,
    memory: MemoryConfig | None = None,
    texts: bool = False,
    min_probability: float | None = None,
) -> pa.Table:
    """Answers a chunk.

    Args:
        retriever: the bundle.
        chunk: the queries.
        k: answers per query; lists are shorter where there are fewer.
        memory: how training queries vote, in place of the bundle's own settings.
        texts: also return the queries' texts.
        min_probability: leave out answers that are less probable.
    Returns:
        A row per query: uid, maybe text, and lists label_id, label_uid, score and, if the bundle is
        calibrated, probability.
    """
    retriever.check_min_probability(min_probability, memory)
    vectors = _side_vectors(retriever, chunk)
    top = retriever.top_labels(chunk.texts, k, memory=memory, vectors=vectors)
    if min_probability is not None:
        top = top.at_least(min_probability)
    is_answer = top.ids >= 0
    label_ids = top.ids[is_answer]
    label_uids = retriever.labels.names_of(label_ids)["uid"].combine_chunks()
    # Where the answers of each query begin in the flat arrays of all answers.
    offsets = pa.array(offsets_of(is_answer.sum(axis=1)), pa.int32())
    columns: dict[str, Any] = {}
    columns["uid"] = pa.array(chunk.uids, pa.large_string())
    if texts:
        columns["text"] = pa.array(chunk.texts, pa.large_string())
    columns["label_id"] = pa.ListArray.from_arrays(offsets, pa.array(label_ids))
    columns["label_uid"] = pa.ListArray.from_arrays(offsets, label_uids)
    scores = pa.array(top.scores[is_answer])
    columns["score"] = pa.ListArray.from_arrays(offsets, scores)
    if top.probabilities is not None:
        probabilities = pa.array(top.probabilities[is_answer])
        columns["probability"] = pa.ListArray.from_arrays(offsets, probabilities)
    return pa.table(columns)


def collect(chunks: Sequence[Path], folder: Path, k: int) -> Iterator[TopLabels]:
    """Writes the answers of all chunks to predictions-00000.parquet ..., and yields them meanwhile.

    Args:
        chunks: files of the chunks, in order.
        folder: where to write.
        k: answers per query.
    """
    files = 0
    rows_in_file = 0
    writer = None
    with contextlib.ExitStack() as stack:
        for path in chunks:
            table = _read_chunk(path)
            if writer is None or rows_in_file + len(table) > TABLE_ROWS:
                stack.close()
                name = folder / f"predictions-{files:05d}.parquet"
                writer = pq.ParquetWriter(name, table.schema, compression="zstd")
                stack.enter_context(writer)
                files += 1
                rows_in_file = 0
            writer.write_table(table)
            rows_in_file += len(table)
            yield _top_labels(table, k)


def _read_chunk(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return file.read()
    except (OSError, pa.ArrowException) as error:
        raise StorageError(
            f"{path} cannot be read ({one_line(error, 120)}); remove it and run the same command again"
        ) from None


def _top_labels(table: pa.Table, k: int) -> TopLabels:
    """The answers in a table of `answer_chunk`."""
    label_ids = table["label_id"].combine_chunks()
    scores = table["score"].combine_chunks()
    num_answers = np.diff(np.asarray(label_ids.offsets))
    top = TopLabels.empty(len(table), k)
    # Lists are shorter than k where there are fewer answers: they fill their rows from the left.
    is_answer = np.arange(k) < num_answers[:, None]
    top.ids[is_answer] = np.asarray(label_ids.flatten())
    top.scores[is_answer] = np.asarray(scores.flatten())
    return top


class PredictionWork:
    """Finished chunks of one job. Make it with `opened`.

    Attributes:
        folder: where they are.
        done: their numbers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done = {int(path.stem) for path in folder.glob(_CHUNKS)}

    @classmethod
    @contextlib.contextmanager
    def opened(cls, out: str | Path, job: Mapping[str, Any]) -> Iterator[PredictionWork]:
        """Opens new or unfinished work for this process alone.

        Args:
            out: where the result will be.
            job: names everything that the chunks depend on; plain JSON.
        Raises:
            RunError: there is unfinished work of another job.
            StorageError: another process works on it, or the folder cannot be written.
        """
        folder = _folder(out)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder):
            if not (folder / "job.json").exists():
                # Chunks without it are what a killed removal left, of whatever job.
                for chunk in folder.glob(_CHUNKS):
                    chunk.unlink()
                write_json(folder / "job.json", dict(job))
            _check_same(folder, job)
            yield cls(folder)

    def path(self, number: int) -> Path:
        """The file of one chunk."""
        return self.folder / f"{number:08d}.parquet"

    def add(self, number: int, answers: pa.Table) -> None:
        """Keeps the answers of a chunk; they are there after a crash too."""
        with whole_file(self.path(number)) as temporary:
            pq.write_table(answers, temporary, compression="zstd", write_page_checksum=True)
        self.done.add(number)

    def remove(self) -> None:
        """Takes the folder away: the result is written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _folder(out: str | Path) -> Path:
    """Where unfinished work is kept: next to the destination; for a URL, in this user's cache."""
    if is_url(out):
        digest = hashlib.sha256(str(out).encode()).hexdigest()
        return cache_folder() / f"predicting-{digest[:32]}"
    path = Path(out).absolute()
    return path.with_name(f".{path.name}.predicting")


def _check_same(folder: Path, job: Mapping[str, Any]) -> None:
    """Checks that unfinished work is of the same job.

    Raises:
        RunError: it is not, or job.json is damaged.
    """
    try:
        before = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        changed = [name for name in job if before[name] != job[name]]
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{folder}/job.json is damaged; remove {folder} to begin anew") from None
    if changed:
        name = changed[0]
        # Hashes of a bundle or an input say nothing to a reader.
        what = {"bundle": "bundle", "queries": "input"}.get(name)
        if what is None:
            what = f"{name} ({before[name]}, now {job[name]})"
        raise RunError(
            f"{folder} is unfinished work with another {what}; give the same command as then, remove the folder, or"
            " choose another --out"
        )
