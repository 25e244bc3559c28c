"""The folder that serving needs, and nothing else: models, labels, vectors and their indexes.

    encoder/                    as Encoder.save writes it
    head/                       as Head.save writes it: from the encoder's output to the vector that
                                is searched
    label_side/                 as LabelSide.save writes it: from the text of a label that joins
                                later to its vector
    tokenizer/                  as TextTokenizer.save writes it
    labels.parquet              uid and text of each label, by source id
    label_order.npy             int64 [rows], internal -> source id; -1 for a row not used yet
    attributes.parquet          by which answers can be filtered (attributes.py); absent if no label
                                has any
    removed.npy                 int64, ascending: source ids that are no answers any more; absent if
                                there are none
    vectors/00000.safetensors   float32 "vectors", consecutive rows in internal order; the range is
                                in the metadata
    index/00000.faiss           the FAISS index over the same rows; absent if all rows are searched
    memory/                     training queries that vote for their labels, if any (memory.py)
    calibration/                the probabilities of answers, if the bundle is calibrated
                                (calibration.py)
    words/                      the words of training queries and labels, if they count
                                (word_index.py)
    members/NAME/               encoder, head, label side, tokenizer, order and vectors of a further
                                trained model of a fused bundle, and its memory/vectors (fused.py)
    settings.json               how to search (Settings)
    manifest.json               sizes and SHA-256 (storage/)
    README.md                   the card (cards.py); not in the manifest

Rows are internal because contiguous ranges of that order are statistically alike; every answer has
source ids. Labels that joined later (labels.py) have rows, and shards, after those of the export.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from xmcray import config as configs
from xmcray.config import check_range
from xmcray.data.checked_files import read_array, read_texts
from xmcray.data.corpus import Card
from xmcray.data.tokens import TextTokenizer
from xmcray.errors import BundleError
from xmcray.retrieval.attributes import FILE as ATTRIBUTES
from xmcray.retrieval.attributes import LabelAttributes
from xmcray.retrieval.cards import bundle_card
from xmcray.retrieval.readable import readable
from xmcray.retrieval.shards import VectorShard, checked_shards
from xmcray.storage.artifact import new_artifact
from xmcray.storage.manifest import CARD, FileEntry, read_manifest
from xmcray.storage.remote import is_url
from xmcray.storage.whole_files import read_json, write_text
from xmcray.types import Int64Array, spans

KIND = "bundle"
LABELS: Mapping[str, Any] = {"kind": "labels"}
PREDICTORS = ("labels", "memory", "fused")
MAX_DIM = 1 << 20
LABEL_BLOCK = 65_536  # labels of a row group of labels.parquet
LABEL_SCHEMA = pa.schema([("uid", pa.large_string()), ("text", pa.large_string())])


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What settings.json holds.

    Attributes:
        num_labels: L, source ids given so far, also to labels removed since.
        dim: D, the width of vectors and queries.
        method: which method made the label vectors; those of "memory" have length 1.
        factory: the factory string by which indexes were built.
        predictor: what becomes of the neighbours: "labels" answers with them, "memory" lets them
            vote (memory.py), "fused" adds up several parts (parts.py).
        shards: the files of vectors, in internal order.
        first_added: the first source id of a label that joined after the export; None if none did.
    """

    num_labels: int
    dim: int
    method: str = ""
    factory: str = "auto"
    predictor: Mapping[str, Any] = field(default_factory=lambda: LABELS)
    shards: tuple[VectorShard, ...] = ()
    first_added: int | None = None

    @property
    def num_rows(self) -> int:
        """Rows of vectors, also those without a label; 0 if the shards do not fit each other."""
        return self.shards[-1].stop if self.shards else 0

    @property
    def has_memory(self) -> bool:
        """Whether training queries vote by their vectors."""
        # A fused bundle has a memory if that part has a weight (parts.py).
        return self.predictor["kind"] == "memory" or bool(self.predictor.get("shards"))

    @property
    def is_fused(self) -> bool:
        """Whether the scores of several parts add up."""
        return bool(self.predictor["kind"] == "fused")

    @property
    def normalises(self) -> bool:
        """Whether query vectors get length 1, whatever the head makes."""
        return self.has_memory or self.is_fused

    @property
    def normalises_labels(self) -> bool:
        """Whether the vectors of labels got length 1, whatever the head makes."""
        # A fused bundle has the label vectors, and the method, of the bundles that it was made of.
        return self.predictor["kind"] == "memory" or self.method == "memory"


@contextlib.contextmanager
def new_bundle(
    destination: str | Path,
    about: Mapping[str, Any],
    hashed_files: Mapping[str, FileEntry] | None = None,
    replacing: bool = False,
    metrics: Mapping[str, Any] | None = None,
) -> Iterator[Path]:
    """A folder to fill, as of `new_artifact`; the bundle also gets its card."""
    url = str(destination) if is_url(destination) else ""

    def add_card(folder: Path) -> None:
        write_text(folder / CARD, card_of(folder, url, metrics))

    with new_artifact(destination, KIND, about, hashed_files, replacing, add_card) as folder:
        yield folder


def card_of(
    folder: Path,
    url: str = "",
    metrics: Mapping[str, Any] | None = None,
    corpus: Card | None = None,
) -> str:
    """The card of a bundle.

    Args:
        folder: of the bundle.
        url: where the bundle goes, if that is no local folder.
        metrics: content of metrics.json; left out if they are those of another bundle.
        corpus: what it was trained on, for bundles of releases that did not record that.
    """
    manifest = read_manifest(folder, KIND)
    if corpus is not None:
        about_corpus = {"corpus": corpus.name, "corpus_licence": corpus.licence}
        manifest = dataclasses.replace(manifest, about={**about_corpus, **manifest.about})
    max_len = TextTokenizer.load(folder / "tokenizer").max_len
    return bundle_card(read_settings(folder), manifest, max_len, url, metrics)


def write_settings(folder: Path, settings: Settings) -> None:
    """Writes settings.json."""
    text = json.dumps(dataclasses.asdict(settings), indent=1, sort_keys=True)
    (folder / "settings.json").write_text(text + "\n", encoding="utf-8")


def read_settings(folder: Path) -> Settings:
    """The settings of a verified bundle.

    Raises:
        BundleError: they are malformed, or ask for a predictor that this release does not know.
    """
    with readable(f"{folder}/settings.json is malformed"):
        settings = configs.build(Settings, read_json(folder / "settings.json"))
        kind = settings.predictor["kind"]
        last = settings.shards[-1].stop
        # Without gaps, or else there would be rows that are in no shard.
        settings = dataclasses.replace(settings, shards=checked_shards(settings.shards, last))
        check_range("num_labels", settings.num_labels, 1)
        check_range("dim", settings.dim, 1, MAX_DIM)
        if settings.first_added is not None:
            check_range("first_added", settings.first_added, 0, settings.num_labels)
    if settings.num_rows < settings.num_labels:
        raise BundleError(
            f"{folder}/settings.json: its shards do not cover {settings.num_labels} labels; export again"
        )
    if kind not in PREDICTORS:
        supported = ", ".join(map(repr, PREDICTORS))
        raise BundleError(
            f"{folder} has predictor {kind!r}, this release knows {supported}; use the release that made it"
        )
    return settings


def read_labels(folder: Path, settings: Settings) -> tuple[pa.Table, Int64Array, Int64Array]:
    """Reads the labels of a verified bundle.

    Returns:
        Uids and texts by source id; int64 [rows], the source id of each row, or -1; int64, the
        source ids of labels removed since the export.
    Raises:
        BundleError: they are malformed or of another number of labels.
    """
    num_labels = settings.num_labels
    removed = np.empty(0, np.int64)
    with readable(f"{folder}: labels cannot be read"):
        labels = read_texts(folder / "labels.parquet", ("uid", "text"), num_labels)
        if (folder / "removed.npy").is_file():
            removed = read_array(folder / "removed.npy", np.int64)
        ascending = np.unique(removed.clip(0, num_labels - 1))
    if not np.array_equal(removed, ascending):
        raise BundleError(
            f"{folder}: removed.npy does not name labels of {num_labels}; export again"
        )
    return labels, read_row_labels(folder, settings), removed


def read_row_labels(folder: Path, settings: Settings) -> Int64Array:
    """int64 [rows], the source id of each row, or -1; mapped, so that processes share it.

    Raises:
        BundleError: the file is malformed or of another number of labels.
    """
    with readable(f"{folder}: labels cannot be read"):
        mapped = read_array(folder / "label_order.npy", np.int64, mapped=True)
        # A plain array over the same memory: each slice of NumPy's own type for maps costs more.
        row_labels: Int64Array = mapped.view(np.ndarray)
        has_each = names_each_once(row_labels, settings.num_labels)
    if row_labels.shape != (settings.num_rows,) or not has_each:
        raise BundleError(
            f"{folder}: label_order.npy does not hold {settings.num_labels} labels; export again"
        )
    return row_labels


def names_each_once(row_labels: Int64Array, num_labels: int) -> bool:
    """Whether each of 0 .. num_labels - 1 is there once; takes no sort of 10^8 ids, and no copy.

    Args:
        row_labels: int64 [rows]; negative ones do not count.
        num_labels: L.
    """
    # Before memory is taken for a number of labels that is wrong.
    if len(row_labels) < num_labels:
        return False
    is_named = np.zeros(num_labels, bool)
    num_used = 0
    for span in spans(len(row_labels), LABEL_BLOCK):
        block = row_labels[span]
        label_ids = block[block >= 0]
        if label_ids.max(initial=-1) >= num_labels:
            return False
        is_named[label_ids] = True
        num_used += len(label_ids)
    return num_used == num_labels and bool(is_named.all())


def read_attributes(folder: Path, settings: Settings, removed: Int64Array) -> LabelAttributes:
    """The attributes of all labels of a verified bundle; none if it has no file of them.

    Args:
        folder: of the bundle.
        settings: its settings.
        removed: source ids of labels removed since the export, which have no attributes any more.
    Raises:
        BundleError: they are malformed or of another number of labels.
    """
    path = folder / ATTRIBUTES
    if not path.is_file():
        return LabelAttributes(settings.num_labels)
    with readable(f"{path} cannot be read", "annotate the labels again"):
        attributes = LabelAttributes.load(path)
    if attributes.num_labels != settings.num_labels:
        raise BundleError(
            f"{path} has {attributes.num_labels} rows, expected {settings.num_labels}; annotate again"
        )
    return attributes.without(removed)
