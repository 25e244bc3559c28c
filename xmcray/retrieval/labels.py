"""Labels that join or leave a finished bundle without training.

Other labels keep their scores bit for bit.

A label that joins gets the vector that its method's label side makes of its text (new_vectors.py).
Its row lies in a shard of ROOM rows that exists before its labels do. So products keep their shapes
and their bits, and an index over the rows of the export is left alone; added rows are compared with
every query. A label that leaves keeps its row and loses its name: it is scored as before and never
answered. In a memory it stays a key, but gets no votes. Attributes (attributes.py) come with a
label that joins, or are given to one that is there.

Source ids stay what they are: labels that join are numbered from L on, and no number is given
twice. Exporting again makes one index of all rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xmcray.data.formats.base import BadRow, BadValue, Row
from xmcray.data.formats.json_lines import Fields, Record, RowParser, read_records
from xmcray.errors import ConfigError, DataError, StorageError
from xmcray.nn.label_side import LabelSide, load_label_side
from xmcray.retrieval.attributes import FILE as ATTRIBUTES
from xmcray.retrieval.attributes import LabelAttributes, Scalar, checked_attributes
from xmcray.retrieval.bundle import (
    KIND,
    LABEL_BLOCK,
    LABEL_SCHEMA,
    Settings,
    new_bundle,
    read_attributes,
    write_settings,
)
from xmcray.retrieval.fused import other_members
from xmcray.retrieval.new_vectors import new_vectors
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.shards import VectorShard, save_vectors, vectors_name
from xmcray.retrieval.uid_index import UidIndex
from xmcray.storage.artifact import exclusive, link_files, open_artifact, refuse_existing
from xmcray.storage.manifest import FileEntry, Manifest, read_manifest
from xmcray.storage.remote import is_url
from xmcray.types import Float32Array, Int64Array, spans

ROOM = 1024  # rows of a shard for labels that join
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NewLabel:
    """A label that joins."""

    uid: str
    text: str
    attributes: Mapping[str, Scalar] = field(default_factory=dict)


def read_new_labels(paths: Iterable[str | Path]) -> list[NewLabel]:
    """Reads labels from JSON lines.

    A line has `uid`, `text` or `title` and `content`, and maybe `attributes`.

    Raises:
        DataError: a line is malformed, repeats a uid or has no text; naming file and line.
    """

    def make(row: Row, record: Record) -> NewLabel:
        if not row.text:
            raise BadValue(
                f"label {row.uid[:80]!r} has no text, expected some: its vector is made of it"
            )
        attributes = record.get("attributes")
        checked = {} if attributes is None else checked_attributes(attributes)
        return NewLabel(row.uid, row.text, checked)

    return _read(paths, "uid and text", make)


def read_attribute_sets(
    paths: Iterable[str | Path], subject: str = "label"
) -> dict[str, dict[str, Scalar]]:
    """Reads attributes by uid from JSON lines with `uid` and `attributes`.

    Args:
        paths: the files.
        subject: what a uid names, for messages.
    Raises:
        DataError: a line is malformed or repeats a uid; naming file and line.
    """

    def make(row: Row, record: Record) -> tuple[str, dict[str, Scalar]]:
        if "attributes" not in record:
            raise BadValue("no attributes, expected an object of names and values, {} for none")
        return row.uid, checked_attributes(record["attributes"])

    return dict(_read(paths, "uid and attributes", make, subject))


def _read(
    paths: Iterable[str | Path],
    fields: str,
    make: Callable[[Row, Record], T],
    subject: str = "label",
) -> list[T]:
    """Makes one object of each line of files about labels, or about what `subject` says.

    Args:
        paths: the files.
        fields: what a line needs, for messages.
        make: makes the object; its BadValue or ConfigError is a fault of the line.
        subject: what a uid names, for messages.
    """
    parser = RowParser(Fields(), None, dict)  # also refuses a uid that occurred before
    objects: list[T] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise DataError(
                f"{path} is no file, expected JSON lines with {fields}, one per {subject}"
            )
        line = 0
        for line, record in enumerate(read_records(path), start=1):
            try:
                if isinstance(record, BadValue):
                    raise record
                if record.get("uid") is None:
                    raise BadValue(f"no uid, expected that of a {subject}")
                objects.append(make(parser.parse(record, line), record))
            except (BadValue, ConfigError) as error:
                raise DataError(str(BadRow(str(path), line, str(error)))) from None
        if not line:
            raise DataError(
                f"{path} is empty, expected JSON lines with {fields}, one per {subject}"
            )
    return objects


def add_labels(bundle: str | Path, new: Sequence[NewLabel], out: str | Path | None = None) -> int:
    """Adds labels to a bundle, which changes at one moment, or writes another one.

    Args:
        bundle: folder or URL.
        new: the labels.
        out: folder or URL of the new bundle; the bundle itself if not given.
    Returns:
        The number of labels that the bundle then has.
    Raises:
        DataError: a uid is taken, or a text has no token.
        ConfigError: the bundle is at a URL and there is no `out`; or attributes do not fit those of
            other labels.
        StorageError: the bundle is damaged or being changed, `out` is not empty, or the disk is
            full.
    """
    with open_for_change(bundle, out) as source:
        retriever = source.retriever
        taken = retriever.labels.ids_of(label.uid for label in new)
        if taken:
            raise DataError(
                f"label {min(taken)!r} is in {bundle} already; remove it first, or choose another uid"
            )
        label_sides = load_label_sides(source.folder, retriever.settings)
        changed = with_labels(retriever, label_sides, new)
        # New labels are numbered from L on, in their order.
        numbered = enumerate(new, start=retriever.settings.num_labels)
        rows = {label_id: label.attributes for label_id, label in numbered if label.attributes}
        attributes = source.attributes().with_rows(changed.settings.num_labels, rows)
        source.publish({"added": len(new)}, changed, attributes)
        return changed.num_labels


def annotate_labels(
    bundle: str | Path, sets: Mapping[str, Mapping[str, Scalar]], out: str | Path | None = None
) -> int:
    """Gives labels of a bundle new attributes in place of all they had; as `add_labels`.

    Args:
        bundle: folder or URL.
        sets: attributes by uid.
        out: see `add_labels`.
    Returns:
        The number of labels that the bundle has.
    Raises:
        DataError: a uid is unknown.
    """
    with open_for_change(bundle, out) as source:
        retriever = source.retriever
        ids = _known_ids(retriever, sets, bundle)
        rows = {ids[uid]: attributes for uid, attributes in sets.items()}
        attributes = source.attributes().with_rows(retriever.settings.num_labels, rows)
        source.publish({"annotated": len(sets)}, retriever, attributes)
        return retriever.num_labels


def carry_attributes(old: str | Path, new: str | Path) -> int:
    """Gives a bundle without attributes those that labels of the same uids have in another one.

    Args:
        old: folder or URL of the bundle with attributes.
        new: folder of the bundle that gets them. One that has attributes is left as it is.
    Returns:
        The number of labels that got attributes.
    Raises:
        ConfigError: `new` is at a URL and would get some.
        StorageError: a bundle is damaged, or `new` is being changed.
    """
    old_folder, _ = open_artifact(old, KIND, contents=False)
    new_folder, _ = open_artifact(new, KIND, contents=False)
    if not (old_folder / ATTRIBUTES).is_file() or (new_folder / ATTRIBUTES).is_file():
        return 0
    if is_url(new):
        raise ConfigError(
            f"{new} has no attributes, and filters by those of {old} would fail: give them to a copy"
            " (`xmcray labels annotate --out`), and name that"
        )
    labels = Retriever.load(old_folder).labels
    attributes = read_attributes(old_folder, labels.settings, labels.removed)
    with open_for_change(new, None) as target:
        retriever = target.retriever
        new_index = UidIndex(retriever.labels)
        rows: dict[int, dict[str, Scalar]] = {}
        for span in spans(labels.settings.num_labels, LABEL_BLOCK):
            old_ids = np.arange(span.start, span.stop)
            uids = labels.names_of(old_ids)["uid"].to_pylist()
            pairs = zip(uids, attributes.of(old_ids), strict=True)
            sets = {uid: attribute_values for uid, attribute_values in pairs if attribute_values}
            for uid, label_id in new_index.ids_of(sets, retriever.labels).items():
                rows[label_id] = sets[uid]
        if rows:
            num_labels = retriever.settings.num_labels
            carried = LabelAttributes(num_labels).with_rows(num_labels, rows)
            target.publish({"annotated": len(rows)}, retriever, carried)
        return len(rows)


def remove_labels(bundle: str | Path, uids: Sequence[str], out: str | Path | None = None) -> int:
    """Removes labels from a bundle; as `add_labels`.

    Raises:
        DataError: a uid is unknown, or no label would be left.
    """
    with open_for_change(bundle, out) as source:
        retriever = source.retriever
        ids = _known_ids(retriever, uids, bundle)
        removed = np.array(list(ids.values()), np.int64)
        num_labels = retriever.num_labels
        if len(removed) == num_labels:
            raise DataError(
                f"these are all {num_labels:,} labels of {bundle}, expected some to be left"
            )
        source.publish({"removed": len(removed)}, retriever.without(removed))
        return num_labels - len(removed)


def _known_ids(retriever: Retriever, uids: Collection[str], bundle: str | Path) -> dict[str, int]:
    """Source ids by uid.

    Raises:
        DataError: one of `uids` is no label.
    """
    ids = retriever.labels.ids_of(uids)
    for uid in uids:
        if uid not in ids:
            raise DataError(
                f"label {uid!r} is not in {bundle}, expected a label's uid; look for it with search"
            )
    return ids


def load_label_sides(bundle: Path, settings: Settings) -> list[LabelSide]:
    """The label side of each member of a verified bundle (fused.py).

    Raises:
        BundleError: a file is missing, as in bundles of earlier releases, or damaged.
    """
    folders = [bundle, *other_members(bundle, settings)]
    return [load_label_side(folder / "label_side") for folder in folders]


def with_labels(
    retriever: Retriever, label_sides: Sequence[LabelSide], new: Sequence[NewLabel]
) -> Retriever:
    """A view of a bundle with labels that join, numbered from L on; their rows are held in memory.

    Args:
        retriever: the bundle.
        label_sides: how the method of each member makes a label's vector.
        new: the labels.
    Raises:
        DataError: a text has no token.
    """
    others = []
    for other, label_side in zip(retriever.others, label_sides[1:], strict=True):
        others.append(with_labels(other, [label_side], new))
    labels = retriever.labels
    settings = labels.settings
    texts = [label.text for label in new]
    vectors = new_vectors(retriever, label_sides[0], texts)
    rows, shards = _rows_for(len(new), labels.row_labels, settings.shards)
    num_rows = shards[-1].stop
    # Rows of a further shard are unused until a label gets them.
    row_labels = np.full(num_rows, -1)
    row_labels[: len(labels.row_labels)] = labels.row_labels
    row_labels[rows] = settings.num_labels + np.arange(len(new))
    changed: dict[int, Float32Array] = {}
    for number, shard in enumerate(shards):
        # Rows are ascending, so those of a shard are next to each other.
        first, last = np.searchsorted(rows, [shard.start, shard.stop])
        if first == last:
            continue
        # Vectors of a loaded bundle are mapped and read-only, so the shard is copied.
        shard_vectors = np.zeros((len(shard), settings.dim), np.float32)
        if number < len(settings.shards):
            shard_vectors[:] = labels.rows.vectors(number)
        shard_vectors[rows[first:last] - shard.start] = vectors[first:last]
        changed[number] = shard_vectors
    uids = [label.uid for label in new]
    names = pa.table({"uid": uids, "text": texts}, schema=LABEL_SCHEMA)
    first_added = settings.first_added
    if first_added is None:
        first_added = settings.num_labels
    num_labels = settings.num_labels + len(new)
    grown = dataclasses.replace(
        settings, num_labels=num_labels, shards=shards, first_added=first_added
    )
    more_labels = labels.with_rows(grown, names, row_labels, changed)
    fusion = retriever.fusion and retriever.fusion.with_labels(texts)
    return dataclasses.replace(retriever, labels=more_labels, fusion=fusion, others=tuple(others))


def _rows_for(
    count: int, row_labels: Int64Array, shards: Sequence[VectorShard]
) -> tuple[Int64Array, tuple[VectorShard, ...]]:
    """Rows for `count` labels, ascending: rows not used yet, then those of further shards.

    Each further shard has ROOM rows, however many labels join at once. So a later label copies no
    more than ROOM rows. Processes that each search some of the shards agree about them, although
    one may apply label operations one by one and another all at once.
    """
    free = np.flatnonzero(row_labels < 0)[:count]
    missing = count - len(free)
    start = len(row_labels)
    rows = np.concatenate([free, start + np.arange(missing)])
    starts = range(start, start + missing, ROOM)
    more = [VectorShard(first, first + ROOM, indexed=False, candidates=1) for first in starts]
    return rows, (*shards, *more)


def write_changes(before: Retriever, after: Retriever, target: Path) -> set[str]:
    """Writes the files of a bundle in which a view of it differs; returns their names.

    Args:
        before: the bundle; it may have been loaded again since the view was made.
        after: the view.
        target: folder of the new bundle.
    """
    labels = after.labels
    written: set[str] = set()
    if after.settings != before.settings:
        names_file = target / "labels.parquet"
        pq.write_table(labels.table, names_file, row_group_size=LABEL_BLOCK, compression="zstd")
        written.add("labels.parquet")
    if after.calibration is not None and after.calibration is not before.calibration:
        written |= after.calibration.save(target)
    if len(labels.removed):
        np.save(target / "removed.npy", labels.removed)
        written.add("removed.npy")
    written |= _write_rows(before, after, target)
    members = other_members(target, after.settings)
    for old, new, folder in zip(before.others, after.others, members, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        prefix = folder.relative_to(target).as_posix()
        written |= {f"{prefix}/{name}" for name in _write_rows(old, new, folder)}
    return written


def _write_rows(before: Retriever, after: Retriever, folder: Path) -> set[str]:
    """Writes what changed in one member's rows; returns names relative to its folder."""
    written: set[str] = set()
    if after.settings != before.settings:
        np.save(folder / "label_order.npy", after.labels.row_labels)
        write_settings(folder, after.settings)
        written |= {"label_order.npy", "settings.json"}
    rows = after.labels.rows
    (folder / "vectors").mkdir(exist_ok=True)
    for number in sorted(rows.changed):
        start = after.settings.shards[number].start
        save_vectors(folder, number, rows.vectors(number), start)
        written.add(vectors_name(number))
    return written


@dataclass(frozen=True)
class OpenBundle:
    """A bundle that is being changed.

    Attributes:
        retriever: the bundle as it is.
        folder: its local folder.
        manifest: its manifest.
        destination: where the changed bundle goes.
        replacing: whether that is the bundle itself.
    """

    retriever: Retriever
    folder: Path
    manifest: Manifest
    destination: str | Path
    replacing: bool

    def attributes(self) -> LabelAttributes:
        """The attributes of all labels."""
        removed = self.retriever.labels.removed
        return read_attributes(self.folder, self.retriever.settings, removed)

    def publish(
        self, change: dict[str, Any], after: Retriever, attributes: LabelAttributes | None = None
    ) -> None:
        """Writes the files that changed; the others get a second name.

        Args:
            change: what the manifest says of it, in the list of changes since the export.
            after: the bundle as it is now.
            attributes: those of all labels, if they changed.
        """
        about = dict(self.manifest.about)
        # The hash of the bundle that was changed makes the list a chain.
        entry = {**change, "of": self.manifest.sha256}
        about["changes"] = [*about.get("changes", []), entry]
        # Files with a second name keep their hashes: only new files are hashed.
        linked: dict[str, FileEntry] = {}
        with new_bundle(self.destination, about, linked, self.replacing) as target:
            written = write_changes(self.retriever, after, target)
            if attributes is not None:
                written |= attributes.save(target)
            linked |= link_files(self.folder, self.manifest, target, written)
            if read_manifest(self.folder, KIND).sha256 != self.manifest.sha256:
                raise StorageError(
                    f"{self.folder} has changed while it was read; give the command again"
                )


@contextlib.contextmanager
def open_for_change(bundle: str | Path, out: str | Path | None) -> Iterator[OpenBundle]:
    """Opens a bundle and compares every byte; only this process may change it in the meantime."""
    if out is None and is_url(bundle):
        raise ConfigError(
            f"{bundle} is a URL, where a bundle cannot be replaced at one moment; choose another with --out"
        )
    if out is not None:
        refuse_existing(out)
    folder, _ = open_artifact(bundle, KIND, contents=False)
    if out is None:
        # A link stays one: the folder that it names is replaced.
        folder = folder.resolve()
    with exclusive(folder) if out is None else contextlib.nullcontext():
        manifest = read_manifest(folder, KIND)
        retriever = Retriever.load(folder)
        yield OpenBundle(retriever, folder, manifest, out or folder, replacing=out is None)
