"""Labels that join or leave a finished bundle without training. Every other label keeps its score, bit for bit.

A label that joins gets the vector that its method's label side makes of its text (`LabelSide`). Its row lies in a shard
of ROOM rows that exists before its labels do: products have the shapes they had, so they have the same bits, and an
index over the rows of the export is left alone; rows beside it meet every query. A label that leaves keeps its row and
loses its name: it is scored as ever and never answered. In a memory it goes on to be a key, but gets no votes.
Attributes (attributes.py) come with a label that joins, or are given to one that is there.

Source ids stay what they are: labels that join are numbered from L on, and no number is given twice. Exporting again is
what makes one index of all rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from xmcray import storage
from xmcray.data.formats.base import BadRow, BadValue, Row
from xmcray.data.formats.json_lines import Fields, Record, RowParser, read_records, rows_of
from xmcray.errors import ConfigError, DataError
from xmcray.nn.label_side import LabelSide, load_label_side
from xmcray.retrieval.attributes import LabelAttributes, Scalar, attribute_set
from xmcray.retrieval.bundle import KIND, LABEL_BLOCK, LABEL_SCHEMA, read_attributes, write_settings
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import VectorShard, save_vectors, vectors_name
from xmcray.storage import Manifest
from xmcray.types import Float32Array, Int64Array

ROOM = 1024  # rows of a shard for labels that join
SAMPLE = 4096  # labels of the export by which the row of a new one is placed
RIDGE = 0.3  # of that map, in mean squares of the texts' coordinates
_TINY = 1e-12
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NewLabel:
    """A label that joins."""

    uid: str
    text: str
    attributes: Mapping[str, Scalar] = field(default_factory=dict)


def read_new_labels(paths: Iterable[str | Path]) -> list[NewLabel]:
    """Labels of files of JSON lines with `uid`, `text` or `title` and `content`, and maybe `attributes`.

    Raises:
        DataError: a line is malformed, repeats a uid or has no text; naming file and line.
    """

    def make(row: Row, record: Record) -> NewLabel:
        if not row.text:
            raise BadValue(
                f"label {row.uid[:80]!r} has no text, expected some: its vector is made of it"
            )
        attributes = record.get("attributes")
        return NewLabel(row.uid, row.text, {} if attributes is None else attribute_set(attributes))

    return _read(paths, "uid and text", make)


def read_attribute_sets(paths: Iterable[str | Path]) -> dict[str, dict[str, Scalar]]:
    """Attributes by uid of files of JSON lines with `uid` and `attributes`.

    Raises:
        DataError: a line is malformed or repeats a uid; naming file and line.
    """

    def make(row: Row, record: Record) -> tuple[str, dict[str, Scalar]]:
        if "attributes" not in record:
            raise BadValue("no attributes, expected an object of names and values, {} for none")
        return row.uid, attribute_set(record["attributes"])

    return dict(_read(paths, "uid and attributes", make))


def _read(paths: Iterable[str | Path], fields: str, make: Callable[[Row, Record], T]) -> list[T]:
    """What is made of each line of files, about one label each."""
    known = RowParser(Fields(), None, dict).parse
    made: list[T] = []

    def keep(record: Record, number: int) -> Row:
        if record.get("uid") is None:
            raise BadValue("no uid, expected one that names the label in answers")
        row = known(record, number)
        try:
            made.append(make(row, record))
        except ConfigError as error:
            raise BadValue(str(error)) from None
        return row

    def refuse(bad: BadRow) -> NoReturn:
        raise DataError(str(bad))

    for path in map(Path, paths):
        if not path.is_file():
            raise DataError(f"{path} is no file, expected JSON lines with {fields}, one per label")
        if not list(rows_of(read_records(path), path, keep, refuse)):
            raise DataError(f"{path} is empty, expected JSON lines with {fields}, one per label")
    return made


def add_labels(bundle: str | Path, new: Sequence[NewLabel], out: str | Path | None = None) -> int:
    """Adds labels to a bundle, which changes at one moment, or writes another one; returns how many it then has.

    Args:
        out: folder or URL of the new bundle; the bundle itself if not given.
    Raises:
        DataError: a uid is taken, or a text has no token.
        ConfigError: the bundle is at a URL and there is no `out`; or attributes do not fit those of other labels.
        StorageError: the bundle is damaged or being changed, `out` is not empty, or the disk is full.
    """
    with _opened(bundle, out) as (retriever, folder, manifest):
        settings = retriever.settings
        taken = {label.uid for label in new} & retriever.labels.ids_by_uid().keys()
        if taken:
            raise DataError(
                f"label {min(taken)!r} is in {bundle} already; remove it first, or choose another uid"
            )
        changed = with_labels(retriever, load_label_side(folder / "label_side"), new)
        rows = {
            i: label.attributes
            for i, label in enumerate(new, settings.num_labels)
            if label.attributes
        }
        attributes = read_attributes(folder, settings).with_rows(changed.settings.num_labels, rows)
        _publish(bundle, out, folder, manifest, {"added": len(new)}, retriever, changed, attributes)
        return changed.num_labels


def annotate_labels(
    bundle: str | Path, sets: Mapping[str, Mapping[str, Scalar]], out: str | Path | None = None
) -> int:
    """Gives labels of a bundle new attributes in place of all they had; returns how many it has. As `add_labels`.

    Args:
        sets: by uid.
    Raises:
        DataError: a uid is unknown.
    """
    with _opened(bundle, out) as (retriever, folder, manifest):
        known, settings = _known(retriever, sets, bundle), retriever.settings
        rows = {known[uid]: attributes for uid, attributes in sets.items()}
        attributes = read_attributes(folder, settings).with_rows(settings.num_labels, rows)
        _publish(
            bundle,
            out,
            folder,
            manifest,
            {"annotated": len(sets)},
            retriever,
            retriever,
            attributes,
        )
        return retriever.num_labels


def remove_labels(bundle: str | Path, uids: Sequence[str], out: str | Path | None = None) -> int:
    """Removes labels from a bundle; as `add_labels`.

    Raises:
        DataError: a uid is unknown, or no label would be left.
    """
    with _opened(bundle, out) as (retriever, folder, manifest):
        known = _known(retriever, uids, bundle)
        gone = np.array([known[uid] for uid in set(uids)], np.int64)
        if len(gone) == len(known):
            raise DataError(
                f"these are all {len(known):,} labels of {bundle}, expected some to be left"
            )
        _publish(
            bundle,
            out,
            folder,
            manifest,
            {"removed": len(gone)},
            retriever,
            retriever.without(gone),
        )
        return len(known) - len(gone)


def _known(retriever: Retriever, uids: Iterable[str], bundle: str | Path) -> dict[str, int]:
    """Source ids by uid, of all labels; each of `uids` must be one.

    Raises:
        DataError: one is not.
    """
    known = retriever.labels.ids_by_uid()
    for uid in uids:
        if uid not in known:
            raise DataError(
                f"label {uid!r} is not in {bundle}, expected a label's uid; look for it with search"
            )
    return known


def with_labels(retriever: Retriever, side: LabelSide, new: Sequence[NewLabel]) -> Retriever:
    """A view of a bundle with labels that join, numbered from L on; their rows are held in memory.

    Raises:
        DataError: a text has no token.
    """
    settings = retriever.settings
    vectors = label_vectors(retriever, side, [label.text for label in new])
    ids = settings.num_labels + np.arange(len(new))
    rows, shards = _rows_for(len(new), retriever.labels.row_labels, settings.shards)
    order = np.concatenate(
        [
            retriever.labels.row_labels,
            np.full(shards[-1].stop - len(retriever.labels.row_labels), -1),
        ]
    )
    order[rows] = ids
    changed: dict[int, Float32Array] = {}
    for number in [i for i, shard in enumerate(shards) if len(rows) and rows[0] < shard.stop]:
        shard = shards[number]
        held = np.zeros((shard.stop - shard.start, settings.dim), np.float32)
        if number < len(settings.shards):
            held[:] = retriever.labels.rows.vectors(number)
        inside = (rows >= shard.start) & (rows < shard.stop)
        held[rows[inside] - shard.start] = vectors[inside]
        changed[number] = held
    columns = [
        pa.array([getattr(n, name) for n in new], pa.large_string()) for name in ("uid", "text")
    ]
    first = settings.first_added if settings.first_added is not None else settings.num_labels
    grown = dataclasses.replace(
        settings, num_labels=settings.num_labels + len(new), shards=shards, first_added=first
    )
    names = pa.table(columns, schema=LABEL_SCHEMA)
    labels = retriever.labels.with_rows(grown, names, order, changed)
    return dataclasses.replace(retriever, labels=labels)


def write_changes(before: Retriever, after: Retriever, target: Path) -> set[str]:
    """Writes the files of a bundle in which a view of it differs; returns their names."""
    written: set[str] = set()
    if after.settings != before.settings:
        pq.write_table(
            after.labels.table,
            target / "labels.parquet",
            row_group_size=LABEL_BLOCK,
            compression="zstd",
        )
        np.save(target / "label_order.npy", after.labels.row_labels)
        write_settings(target, after.settings)
        written |= {"labels.parquet", "label_order.npy", "settings.json"}
    if len(after.labels.removed):
        np.save(target / "removed.npy", after.labels.removed)
        written.add("removed.npy")
    (target / "vectors").mkdir(exist_ok=True)
    for number in after.labels.rows.new_shards(before.labels.rows):
        vectors = after.labels.rows.vectors(number)
        save_vectors(target, number, vectors, after.settings.shards[number].start)
        written.add(vectors_name(number))
    return written


def label_vectors(retriever: Retriever, side: LabelSide, texts: Sequence[str]) -> Float32Array:
    """float32 [n, D], the vectors of labels that join.

    Raises:
        DataError: a text has no token.
    """
    tokenizer = retriever.tokenizer
    tokens = tokenizer.encode(texts, tokenizer.label_max_len)
    if not tokens.lengths.all():
        raise DataError(
            f"text {texts[int(tokens.lengths.argmin())][:80]!r} of a label has no token; reword it"
        )
    vectors = retriever.encode(tokens)
    if side.prototypes is not None:
        assert side.cluster_L is not None
        # The centroid of a label without queries is its text's vector, in training too; it joins the cluster, and so
        # gets the free vector, of the label whose prototype is nearest to its text.
        near = torch.from_numpy(
            retriever.labels.label_rows[retriever.labels.search_exported(vectors, 1).ids[:, 0]]
        )
        text_UD = torch.from_numpy(vectors).to(side.prototypes.bank.weight)
        with torch.inference_mode():
            prototype_UD = side.prototypes(text_UD, text_UD, side.cluster_L[near])
            made: Float32Array = prototype_UD.float().numpy()
        return made
    if side.row_columns:
        vectors[:, -side.row_columns :] = _rows(
            retriever, side.row_columns, vectors[:, -side.row_columns :]
        )
    return vectors


def _rows(retriever: Retriever, columns: int, text_UC: Float32Array) -> Float32Array:
    """Rows of a classifier for labels it was not trained with.

    A text's vector is no row: all rows have a common part, which says how rare labels are, and training made them long;
    the text's vector itself, at that length, would be an answer to almost every query. So a new row is the mean row
    and a step from it, as long as a known label's, in the direction that a linear map fitted to known labels makes of
    the text: from the text's deviation from the mean text to the row's from the mean row. The map is ridge regression
    towards a multiple of the identity, which it is where few labels are known (benchmarks/added_labels.py compares).
    """
    exported = retriever.settings.first_added or retriever.settings.num_labels
    sample = np.random.default_rng(0).choice(exported, min(SAMPLE, exported), replace=False)
    tokens = retriever.tokenizer.encode(
        retriever.labels.texts(sample), retriever.tokenizer.label_max_len
    )
    told = np.flatnonzero(tokens.lengths)
    if not len(told):
        raise DataError(
            "no label of the bundle has a text, expected some: by theirs the row of a new one is placed"
        )
    text_MC = retriever.encode(tokens.take(told))[:, -columns:].astype(np.float64)
    row_MC = retriever.labels.vectors_of(sample[told])[:, -columns:].astype(np.float64)
    text_C, row_C, lengths = (
        text_MC.mean(axis=0),
        row_MC.mean(axis=0),
        np.linalg.norm(row_MC, axis=1),
    )
    text_MC, row_MC = text_MC - text_C, row_MC - row_C
    step = np.median(np.linalg.norm(row_MC, axis=1))
    scale = step / max(np.median(np.linalg.norm(text_MC, axis=1)), _TINY)
    gram_CC = text_MC.T @ text_MC
    ridge_CC = (RIDGE * np.trace(gram_CC) / columns + _TINY) * np.eye(columns)
    map_CC = np.linalg.solve(gram_CC + ridge_CC, text_MC.T @ row_MC + scale * ridge_CC)
    step_UC = (text_UC - text_C) @ map_CC
    row_UC = row_C + step_UC * (
        step / np.maximum(np.linalg.norm(step_UC, axis=1, keepdims=True), _TINY)
    )
    if np.ptp(lengths) < 1e-3 * lengths.max():  # UniDEC's have length 1
        row_UC *= lengths.mean() / np.maximum(np.linalg.norm(row_UC, axis=1, keepdims=True), _TINY)
    return np.asarray(row_UC, np.float32)


def _rows_for(
    count: int, order: Int64Array, shards: Sequence[VectorShard]
) -> tuple[Int64Array, tuple[VectorShard, ...]]:
    """Rows for `count` labels, ascending: those not used yet, then those of a further shard."""
    free = np.flatnonzero(order < 0)[:count]
    missing = count - len(free)
    if not missing:
        return free, tuple(shards)
    start = len(order)
    more = VectorShard(start, start + -(-missing // ROOM) * ROOM, indexed=False, candidates=1)
    return np.concatenate([free, start + np.arange(missing)]), (*shards, more)


@contextlib.contextmanager
def _opened(
    bundle: str | Path, out: str | Path | None
) -> Iterator[tuple[Retriever, Path, Manifest]]:
    """The bundle, every byte compared, in the hands of this process alone if it is to change."""
    if out is None and storage.is_url(bundle):
        raise ConfigError(
            f"{bundle} is a URL, where a bundle cannot be replaced at one moment; choose another with --out"
        )
    if out is not None:
        storage.refuse_existing(out)
    folder, _ = storage.open_artifact(bundle, KIND, contents=False)
    with storage.exclusive(folder) if out is None else contextlib.nullcontext():
        yield Retriever.load(folder), folder, storage.read_manifest(folder, KIND)


def _publish(
    bundle: str | Path,
    out: str | Path | None,
    folder: Path,
    manifest: Manifest,
    change: dict[str, Any],
    before: Retriever,
    after: Retriever,
    attributes: LabelAttributes | None = None,
) -> None:
    """Writes some files anew, the others get a second name; the manifest says what was changed since the export."""
    about = {
        **manifest.about,
        "changes": [*manifest.about.get("changes", []), {**change, "of": manifest.sha256}],
    }
    known: dict[str, storage.FileEntry] = {}
    with storage.new_artifact(out or bundle, KIND, about, known, replacing=out is None) as target:
        written = write_changes(before, after, target)
        if attributes is not None:
            written |= attributes.save(target)
        known |= storage.link_files(folder, manifest, target, written)
