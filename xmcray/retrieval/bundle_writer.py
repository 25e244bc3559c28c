"""Writes a bundle from its parts (bundle.py says which files they become)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xmcray.data.tokens import TextTokenizer
from xmcray.errors import DataError
from xmcray.nn.encoder import ADAPTERS, Encoder
from xmcray.nn.heads import Head
from xmcray.nn.label_side import LabelSide
from xmcray.retrieval.attributes import LabelAttributes
from xmcray.retrieval.bundle import (
    LABEL_BLOCK,
    LABEL_SCHEMA,
    LABELS,
    Settings,
    names_each_once,
    new_bundle,
    write_settings,
)
from xmcray.retrieval.calibration import Calibration
from xmcray.retrieval.shards import ShardBuild, write_shards
from xmcray.types import Float32Array, Int64Array


@dataclass(frozen=True, kw_only=True, eq=False)
class BundleModel:
    """What makes vectors of texts.

    Attributes:
        encoder: an encoder, or the folder it was saved in.
        head: maps the encoder's vectors to those that are searched.
        tokenizer: makes token ids of queries and of label texts.
        label_side: makes vectors of labels that join later; if not given, the encoder alone.
        method: see `Settings.method`.
    """

    encoder: Path | Encoder
    head: Head
    tokenizer: TextTokenizer
    label_side: LabelSide | None = None
    method: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class BundleLabels:
    """The L labels of a bundle.

    Attributes:
        uids: L strings by source id.
        texts: L strings by source id.
        order: int64 [L], a permutation: internal -> source id.
        vectors: float32 blocks [n, D], together L rows in internal order.
        removed: int64, ascending: source ids of labels that are no answers.
    """

    uids: Iterable[str]
    texts: Iterable[str]
    order: Int64Array
    vectors: Iterable[Float32Array]
    removed: Int64Array | None = None


def write_bundle(
    destination: str | Path,
    model: BundleModel,
    labels: BundleLabels,
    build: ShardBuild,
    about: Mapping[str, Any],
    *,
    predictor: Callable[[Path], Mapping[str, Any]] | None = None,
    calibration: Callable[[Path], Calibration | None] | None = None,
    metrics: Mapping[str, Any] | None = None,
    attributes: LabelAttributes | None = None,
) -> None:
    """Writes a bundle with few shards of vectors in memory; on failure nothing is left there.

    Args:
        destination: folder or URL that does not exist yet.
        model: makes vectors of queries and of labels that join later.
        labels: names, order and vectors of the labels.
        build: how the label vectors are divided into shards and indexed.
        about: what made the bundle, for its manifest.
        predictor: writes the files of a memory and returns `Settings.predictor`.
        calibration: makes the probabilities of answers from the bundle without them.
        metrics: see `card_of`.
        attributes: of all labels.
    Raises:
        StorageError: the destination is not empty, or the disk is full.
        DataError: the numbers of uids, texts and vectors differ from L.
    """
    num_labels = len(labels.order)
    with new_bundle(destination, about, metrics=metrics) as folder:
        _write_model(folder, model)
        _write_texts(folder / "labels.parquet", labels.uids, labels.texts, num_labels)
        _write_ids(folder, labels.order, labels.removed)
        shards, dim = write_shards(folder, labels.vectors, num_labels, build)
        settings = Settings(
            num_labels=num_labels,
            dim=dim,
            method=model.method,
            factory=build.spec.factory,
            predictor=LABELS if predictor is None else predictor(folder),
            shards=shards,
        )
        if settings.num_rows != num_labels:
            raise DataError(f"{settings.num_rows} label vectors were given, expected {num_labels}")
        write_settings(folder, settings)
        if attributes is not None:
            attributes.save(folder)
        probabilities = None if calibration is None else calibration(folder)
        if probabilities is not None:
            probabilities.save(folder)


def _write_model(folder: Path, model: BundleModel) -> None:
    if isinstance(model.encoder, Encoder):
        model.encoder.save(folder / "encoder")
    else:
        # Adapters are merged into the weights; what training goes on from stays in the run.
        without_adapters = shutil.ignore_patterns(ADAPTERS)
        shutil.copytree(model.encoder, folder / "encoder", ignore=without_adapters)
    model.head.save(folder / "head")
    label_side = model.label_side or LabelSide()
    label_side.save(folder / "label_side")
    model.tokenizer.save(folder / "tokenizer")


def _write_texts(path: Path, uids: Iterable[str], texts: Iterable[str], num_labels: int) -> None:
    """Writes uids and texts in blocks of bounded size."""
    remaining_uids = iter(uids)
    remaining_texts = iter(texts)
    count = 0
    with pq.ParquetWriter(path, LABEL_SCHEMA, compression="zstd") as writer:
        while True:
            block_uids = list(islice(remaining_uids, LABEL_BLOCK))
            block_texts = list(islice(remaining_texts, LABEL_BLOCK))
            if len(block_uids) != len(block_texts):
                raise DataError(
                    "numbers of label uids and label texts differ, expected one of each per label"
                )
            if not block_uids:
                break
            count += len(block_uids)
            columns = {"uid": block_uids, "text": block_texts}
            writer.write_table(pa.table(columns, schema=LABEL_SCHEMA))
    if count != num_labels:
        raise DataError(f"{count} label uids were given, expected {num_labels}")


def _write_ids(folder: Path, order: Int64Array, removed: Int64Array | None) -> None:
    """Writes the source id of each label in the order of its vector, and those that were removed."""
    assert names_each_once(order, len(order)), "the order of labels is not a permutation"
    np.save(folder / "label_order.npy", np.asarray(order, np.int64))
    if removed is not None and len(removed):
        np.save(folder / "removed.npy", removed)
