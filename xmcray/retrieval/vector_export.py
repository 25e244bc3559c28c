"""Label vectors for vector databases: in the files that Qdrant, Milvus and Vespa ingest, or as plain Parquet.

    parquet   labels-00000.parquet       label_id, uid, text, vector
    qdrant    points-00000.jsonl         a line is the body of one upsert; collection.json creates the collection
    milvus    labels-00000.parquet       for a bulk import; collection.json creates the collection
    vespa     documents-00000.jsonl      a line is one put; application/ is what to deploy

Beside them a README.md with the commands and a manifest.json. The score of all methods is the inner product, and so
is the distance that is set. Rows are in the order of the bundle, in which labels of a block are statistically alike;
the vectors of one block are in memory at a time, and uids and texts of all labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

from xmcray.config import check_choice
from xmcray.errors import BundleError
from xmcray.retrieval import vector_readme
from xmcray.retrieval.attributes import FILE as ATTRIBUTES
from xmcray.retrieval.bundle import KIND as BUNDLE
from xmcray.retrieval.bundle import Settings, read_labels, read_settings
from xmcray.retrieval.shards import vectors_name
from xmcray.retrieval.vector_systems import SYSTEMS, Block, Target
from xmcray.storage import new_artifact, open_artifact
from xmcray.types import Float32Array

KIND = "vectors"
BLOCK_BYTES = (
    8 << 20
)  # of the vectors in memory at a time; as JSON they take about five times as much


def export_vectors(bundle: str | Path, out: str | Path, system: str) -> int:
    """Writes the label vectors of a bundle for `system`; returns how many. On failure nothing is left at `out`.

    Args:
        bundle: folder or URL. A label that was removed is left out; of a memory only the labels' vectors are written.
        out: folder or URL that does not exist yet.
        system: parquet, qdrant, milvus or vespa.
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
    }
    about["distance"] = "inner product"
    with new_artifact(out, KIND, about) as made:
        attributes = pq.read_table(folder / ATTRIBUTES) if (folder / ATTRIBUTES).is_file() else None
        kind = None if attributes is None else pa.struct(attributes.schema)
        target = Target(made, settings.dim, kind, [])
        if settings.predictor["kind"] == "memory":
            target.notes.append(vector_readme.MEMORY)
        rows = SYSTEMS[system](target, _blocks(folder, settings, attributes))
        text = vector_readme.readme(system, rows, settings.dim, target.notes)
        (made / "README.md").write_text(text, encoding="utf-8")
        about["labels"], about["notes"] = rows, target.notes
    return rows


def _blocks(folder: Path, settings: Settings, attributes: pa.Table | None) -> Iterator[Block]:
    labels, order, removed = read_labels(folder, settings)
    size = max(1, BLOCK_BYTES // (4 * settings.dim))
    for number, shard in enumerate(settings.shards):
        for start in range(shard.start, shard.stop, size):
            ids = order[start : min(start + size, shard.stop)]
            used = (ids >= 0) & ~np.isin(ids, removed)
            if not used.any():
                continue
            vectors = _read(folder / vectors_name(number), start - shard.start, len(ids))[used]
            if not np.isfinite(vectors).all():
                raise BundleError(
                    f"{folder}/{vectors_name(number)} holds a number that is not finite; train again"
                )
            at = pa.array(ids[used])
            uids, texts = (labels[name].take(at).combine_chunks() for name in ("uid", "text"))
            more = (
                None
                if attributes is None
                else attributes.take(at).to_struct_array().combine_chunks()
            )
            yield Block(ids[used], uids, texts, vectors, more)


def _read(path: Path, start: int, rows: int) -> Float32Array:
    """Some rows of a file of vectors; opened anew each time, for pages of a file that stays mapped stay in memory."""
    try:
        with safe_open(path, framework="np") as file:
            vectors: Float32Array = file.get_slice("vectors")[start : start + rows]
    except (OSError, SafetensorError) as error:
        raise BundleError(
            f"{path} cannot be read ({' '.join(str(error).split())[:120]}); export it again"
        ) from None
    return vectors
