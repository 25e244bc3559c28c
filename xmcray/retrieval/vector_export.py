"""Label vectors in the files that vector databases ingest, or as plain Parquet.

    parquet   labels-00000.parquet       label_id, uid, text, vector
    qdrant    points-00000.jsonl         a line is one upsert; collection.json creates the collection
    milvus    labels-00000.parquet       for a bulk import; collection.json creates the collection
    vespa     documents-00000.jsonl      a line is one put; application/ is what to deploy
    lancedb   labels-00000.parquet       as plain Parquet, with vectors of a fixed width
    weaviate  objects-00000.jsonl        a line is one batch; collection.json creates the collection

A README.md has the commands, a manifest.json the hashes. The score of all methods is the inner
product, and so is the distance that is set. Rows are in the order of the bundle, in which labels of
a block are statistically alike. The vectors of one block are in memory at a time, and uids and
texts of all labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xmcray.config import check_choice
from xmcray.errors import BundleError
from xmcray.retrieval import vector_readme
from xmcray.retrieval.attributes import FILE as ATTRIBUTES
from xmcray.retrieval.bundle import KIND as BUNDLE
from xmcray.retrieval.bundle import Settings, read_labels, read_settings
from xmcray.retrieval.export_target import ExportTarget, label_block
from xmcray.retrieval.fused import other_members
from xmcray.retrieval.shards import open_vectors, vectors_name
from xmcray.retrieval.vector_systems import SYSTEMS
from xmcray.storage.artifact import new_artifact, open_artifact
from xmcray.types import Float32Array, Int64Array

KIND = "vectors"
# Vectors in memory at a time; as JSON they take about five times as much.
BLOCK_BYTES = 8 << 20


def export_vectors(bundle: str | Path, out: str | Path, system: str) -> int:
    """Writes the label vectors of a bundle for another system. On failure nothing is left at `out`.

    Args:
        bundle: folder or URL. Removed labels are left out; of a memory only the labels' vectors are
            written.
        out: folder or URL that does not exist yet.
        system: one of `vector_systems.SYSTEMS`.
    Returns:
        The number of labels.
    Raises:
        ConfigError: another system.
        BundleError: the bundle is malformed, or a vector is not finite.
        StorageError: the bundle is damaged, `out` exists, or the disk is full.
    """
    check_choice("--to", system, tuple(SYSTEMS))
    folder, manifest = open_artifact(bundle, BUNDLE)
    settings = read_settings(folder)
    about: dict[str, Any] = {
        "command": "export",
        "to": system,
        "bundle": manifest.sha256,
        "dim": settings.dim,
        "distance": "inner product",
    }
    labels, row_labels, removed = read_labels(folder, settings)
    # Each `take` would join the blocks of the table anew.
    labels = labels.combine_chunks()
    answers = np.where(np.isin(row_labels, removed), -1, row_labels)
    num_labels = settings.num_labels - len(removed)
    attributes = None
    if (folder / ATTRIBUTES).is_file():
        attributes = pq.read_table(folder / ATTRIBUTES)
    with new_artifact(out, KIND, about) as made:
        target = ExportTarget(made, settings.dim, attributes and attributes.schema, [])
        if settings.is_fused:
            target.notes.append(vector_readme.FUSED)
            if other_members(folder, settings):
                target.notes.append(vector_readme.SEVERAL.replace("DIM", str(settings.dim)))
        elif settings.has_memory:
            target.notes.append(vector_readme.MEMORY)
        SYSTEMS[system](target, _blocks(folder, settings, labels, answers, attributes))
        text = vector_readme.readme(system, num_labels, settings.dim, target.notes)
        (made / "README.md").write_text(text, encoding="utf-8")
        about["labels"] = num_labels
        about["notes"] = target.notes
    return num_labels


def _blocks(
    folder: Path,
    settings: Settings,
    labels: pa.Table,
    row_labels: Int64Array,
    attributes: pa.Table | None,
) -> Iterator[pa.Table]:
    """The labels that can be answered, in rows of at most BLOCK_BYTES of vectors.

    Args:
        folder: the bundle.
        settings: its settings.
        labels: uid and text of each label by source id.
        row_labels: int64 [rows], source id of each row; -1 for rows that are no answers.
        attributes: attributes of each label by source id, if any label has some.
    """
    block_rows = max(1, BLOCK_BYTES // (4 * settings.dim))
    for number, shard in enumerate(settings.shards):
        path = folder / vectors_name(number)
        for start in range(shard.start, shard.stop, block_rows):
            label_ids = row_labels[start : min(start + block_rows, shard.stop)]
            is_answer = label_ids >= 0
            if not is_answer.any():
                continue
            vectors = _read_rows(path, start - shard.start, len(label_ids))[is_answer]
            if not np.isfinite(vectors).all():
                raise BundleError(f"{path} holds a number that is not finite; train again")
            answered_ids = label_ids[is_answer]
            names = labels.take(answered_ids)
            block_attributes = attributes and attributes.take(answered_ids)
            yield label_block(answered_ids, names, vectors, block_attributes)


def _read_rows(path: Path, start: int, rows: int) -> Float32Array:
    """Reads some rows of a file of vectors.

    The file is opened anew each time, because pages of a file that stays mapped stay in memory.
    """
    with open_vectors(path, "np") as file:
        vectors: Float32Array = file.get_slice("vectors")[start : start + rows]
    return vectors
