"""How `vector_export` writes labels, one function per system."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from xmcray.errors import BundleError
from xmcray.retrieval import vector_readme
from xmcray.types import Float32Array, Int64Array

# The most of one request. By default Qdrant takes 32 MB.
POINTS = 128
LINE_BYTES = 8 << 20
FILE_ROWS = 100_000  # labels of one file
MAX_VARCHAR = 65_535  # bytes of a string in Milvus


def label_block(
    label_ids: Int64Array, names: pa.Table, vectors: Float32Array, attributes: pa.Table | None
) -> pa.Table:
    """Labels that can be answered, in the order of the bundle: the rows that all systems get.

    Args:
        label_ids: int64 [n], source ids.
        names: uid and text of the same labels.
        vectors: float32 [n, D].
        attributes: a column per attribute, null where a label lacks it; None if no label has any.
    Returns:
        The columns label_id, uid, text, vector and, if any label has them, attributes.
    """
    num_labels, dim = vectors.shape
    ends = pa.array(np.arange(num_labels + 1) * dim, pa.int32())
    columns = {
        "label_id": pa.array(label_ids),
        "uid": names["uid"],
        "text": names["text"],
        "vector": pa.ListArray.from_arrays(ends, pa.array(vectors.ravel())),
    }
    if attributes is not None:
        columns["attributes"] = attributes.to_struct_array()
    return pa.table(columns)


@dataclass(slots=True)
class ExportTarget:
    """Where a system's files go.

    Attributes:
        folder: the folder to fill.
        dim: D.
        attributes: the attributes that labels have; None if no label has any.
        notes: what a reader of the README must know, a sentence each.
    """

    folder: Path
    dim: int
    attributes: pa.Schema | None
    notes: list[str]

    def write_lines(
        self, name: str, blocks: Iterable[pa.Table], to_lines: Callable[[pa.Table], Iterator[str]]
    ) -> None:
        """Writes lines of ASCII to files such as points-00000.jsonl."""

        def open_lines(path: Path, block: pa.Table) -> Any:
            return path.open("w", encoding="ascii")

        for file, block in self._files(name, blocks, open_lines):
            file.writelines(f"{line}\n" for line in to_lines(block))

    def write_tables(self, blocks: Iterable[pa.Table]) -> None:
        """Writes labels-00000.parquet and further files."""

        def open_table(path: Path, block: pa.Table) -> Any:
            # Vectors do not gain by dictionaries, and every reader knows snappy.
            return pq.ParquetWriter(path, block.schema, compression="snappy", use_dictionary=False)

        for file, block in self._files("labels-{}.parquet", blocks, open_table):
            file.write_table(block)

    def _files(
        self, name: str, blocks: Iterable[pa.Table], open_file: Callable[[Path, pa.Table], Any]
    ) -> Iterator[tuple[Any, pa.Table]]:
        """Yields each block with the file to write it to; a file gets about FILE_ROWS labels.

        Args:
            name: name of the files, with {} for the number.
            blocks: what to write.
            open_file: opens a file whose first block is given.
        """
        num_files = 0
        rows_in_file = FILE_ROWS
        file = None
        with contextlib.ExitStack() as stack:
            for block in blocks:
                if rows_in_file >= FILE_ROWS:
                    stack.close()
                    path = self.folder / name.format(f"{num_files:05d}")
                    file = stack.enter_context(open_file(path, block))
                    num_files += 1
                    rows_in_file = 0
                yield file, block
                rows_in_file += len(block)

    def write_text(self, name: str, template: str) -> None:
        """Writes a small file, with the width of the vectors in place of DIM."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(template.replace("DIM", str(self.dim)), encoding="utf-8")


def _parquet(target: ExportTarget, blocks: Iterable[pa.Table]) -> None:
    target.write_tables(blocks)


def _milvus(target: ExportTarget, blocks: Iterable[pa.Table]) -> None:
    num_cut = 0

    def to_milvus(block: pa.Table) -> pa.Table:
        """The block with strings that fit a VarChar; attributes are JSON."""
        nonlocal num_cut
        if _num_too_long(block["uid"]):
            raise BundleError(
                f"a uid has more than {MAX_VARCHAR:,} bytes, the most in Milvus; choose another system"
            )
        num_cut += _num_too_long(block["text"])
        texts = [_cut(text) for text in block["text"].to_pylist()]
        # Milvus knows no large strings.
        columns = {
            "label_id": block["label_id"],
            "uid": block["uid"].cast(pa.string()),
            "text": pa.array(texts, pa.string()),
            "vector": block["vector"],
        }
        if target.attributes is not None:
            attributes = map(_present, block["attributes"].to_pylist())
            columns["attributes"] = pa.array(map(_json, attributes), pa.string())
        return pa.table(columns)

    target.write_tables(map(to_milvus, blocks))
    if num_cut:
        target.notes.append(
            f"{num_cut:,} texts were cut to {MAX_VARCHAR:,} bytes, the most that a VarChar of Milvus holds."
        )
    field = vector_readme.MILVUS_ATTRIBUTES if target.attributes else ""
    collection = vector_readme.MILVUS_COLLECTION.replace("ATTRIBUTES", field)
    target.write_text("collection.json", collection)
    paths = [[f"labels/{path.name}"] for path in sorted(target.folder.glob("*.parquet"))]
    files = json.dumps({"collectionName": "labels", "files": paths}, indent=1)
    target.write_text("import.json", files + "\n")


def _cut(text: str) -> str:
    """What a VarChar of Milvus holds of a text; a character that the limit divides is left out."""
    return text.encode()[:MAX_VARCHAR].decode(errors="ignore")


def _num_too_long(strings: pa.ChunkedArray) -> int:
    is_too_long = pc.greater(pc.binary_length(strings), MAX_VARCHAR)
    num_too_long: int = pc.sum(is_too_long).as_py()
    return num_too_long


def _rows(block: pa.Table) -> Iterator[dict[str, Any]]:
    """Each label as a dict, whose vector is the text of a JSON array."""
    vectors = block["vector"].combine_chunks()
    # Arrow prints the shortest digits that give the same float32 back.
    numbers = pc.cast(vectors.flatten(), pa.string())
    number_lists = pa.ListArray.from_arrays(vectors.offsets, numbers)
    joined = pc.binary_join(number_lists, ",")
    column = block.column_names.index("vector")
    for row in block.set_column(column, "vector", joined).to_pylist():
        row["vector"] = f"[{row['vector']}]"
        row["attributes"] = _present(row.get("attributes", {}))
        yield row


def _present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a label without those that it lacks."""
    return {name: value for name, value in attributes.items() if value is not None}


def _qdrant(target: ExportTarget, blocks: Iterable[pa.Table]) -> None:
    target.write_text("collection.json", vector_readme.QDRANT_COLLECTION)
    target.write_lines("points-{}.jsonl", blocks, _upserts)


def _upserts(block: pa.Table) -> Iterator[str]:
    """Bodies of upserts."""

    def to_point(row: dict[str, Any]) -> str:
        payload = {"uid": row["uid"], "text": row["text"]}
        if row["attributes"]:
            payload["attributes"] = row["attributes"]
        return f'{{"id":{row["label_id"]},"vector":{row["vector"]},"payload":{_json(payload)}}}'

    return _batches("points", map(to_point, _rows(block)))


def _batches(name: str, items: Iterable[str]) -> Iterator[str]:
    """Bodies of requests with a bounded number of items and bytes, as a list of this name."""
    batch: list[str] = []
    size = 0
    for item in items:
        is_full = len(batch) == POINTS or size + len(item) > LINE_BYTES
        if batch and is_full:
            yield f'{{"{name}":[{",".join(batch)}]}}'
            batch = []
            size = 0
        batch.append(item)
        size += len(item)
    yield f'{{"{name}":[{",".join(batch)}]}}'


def _vespa(target: ExportTarget, blocks: Iterable[pa.Table]) -> None:
    names = _field_names(target.attributes)
    fields = ""
    for attribute in target.attributes or ():
        kind = _VESPA_TYPES[str(attribute.type)]
        fields += vector_readme.vespa_field(names[attribute.name], kind)
    schema = vector_readme.VESPA_SCHEMA.replace("ATTRIBUTES", fields)
    target.write_text("application/schemas/label.sd", schema)
    target.write_text("application/services.xml", vector_readme.VESPA_SERVICES)
    target.write_lines("documents-{}.jsonl", blocks, functools.partial(_puts, names))


_VESPA_TYPES = {
    "string": "string",
    "large_string": "string",
    "bool": "bool",
    "int64": "long",
    "double": "double",
}


def _field_names(attributes: pa.Schema | None) -> dict[str, str]:
    """The field of each attribute.

    Characters that a field's name cannot have become _. Where two names become one, the later one
    gets a further _.
    """
    names: dict[str, str] = {}
    for attribute in attributes or ():
        name = "attribute_" + re.sub("[^a-zA-Z0-9_]", "_", attribute.name)
        while name in names.values():
            name += "_"
        names[attribute.name] = name
    return names


def _fields(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A label without its vector, each attribute by the name of its field."""
    fields = {name: row[name] for name in ("label_id", "uid", "text")}
    for name, value in row["attributes"].items():
        fields[names[name]] = value
    return fields


# Code points that Vespa accepts nowhere (com.yahoo.text.Text): most control characters, and those
# that Unicode reserves, which are the last two of each plane and a range.
_PLANE_ENDS = "".join(
    chr(plane << 16 | 0xFFFE) + chr(plane << 16 | 0xFFFF) for plane in range(1, 17)
)
_NO_TEXT = re.compile(f"[\0-\b\v\f\x0e-\x1f\ufdd0-\ufddf{_PLANE_ENDS}]")
_QUOTED = re.compile(f"{_NO_TEXT.pattern}|%")


def _puts(names: Mapping[str, str], block: pa.Table) -> Iterator[str]:
    """One put per label.

    Args:
        names: the field of each attribute.
        block: the labels.
    """
    for row in _rows(block):
        uid = _QUOTED.sub(lambda match: urllib.parse.quote(match[0], safe=""), row["uid"])
        fields = _fields(row, names)
        for name, value in fields.items():
            if isinstance(value, str):
                fields[name] = _NO_TEXT.sub(" ", value)
        put = _json({"put": f"id:xmcray:label::{uid}", "fields": fields})
        # The vector's digits are inserted before the two braces that close fields and put.
        yield f'{put[:-2]},"vector":{{"values":{row["vector"]}}}}}}}'


def _lancedb(target: ExportTarget, blocks: Iterable[pa.Table]) -> None:
    def to_lance(block: pa.Table) -> pa.Table:
        """The block with vectors of a fixed width, which alone can be searched."""
        vectors = block["vector"].combine_chunks().flatten()
        column = block.column_names.index("vector")
        fixed = pa.FixedSizeListArray.from_arrays(vectors, target.dim)
        return block.set_column(column, "vector", fixed)

    target.write_tables(map(to_lance, blocks))


def _weaviate(target: ExportTarget, blocks: Iterable[pa.Table]) -> None:
    names = _field_names(target.attributes)
    properties = [
        {"name": "label_id", "dataType": ["int"]},
        {"name": "uid", "dataType": ["text"], "tokenization": "field"},
        {"name": "text", "dataType": ["text"]},
    ]
    for attribute in target.attributes or ():
        kind = _WEAVIATE_TYPES[str(attribute.type)]
        properties.append({"name": names[attribute.name], "dataType": [kind]})
    collection = {
        "class": "Label",
        "vectorizer": "none",
        "vectorIndexConfig": {"distance": "dot"},
        "properties": properties,
    }
    target.write_text("collection.json", json.dumps(collection, indent=1) + "\n")
    target.write_lines("objects-{}.jsonl", blocks, functools.partial(_objects, names))


_WEAVIATE_TYPES = {
    "string": "text",
    "large_string": "text",
    "bool": "boolean",
    "int64": "int",
    "double": "number",
}


def _objects(names: Mapping[str, str], block: pa.Table) -> Iterator[str]:
    """Bodies of batches of objects.

    Args:
        names: the property of each attribute.
        block: the labels.
    """

    def to_object(row: dict[str, Any]) -> str:
        # Weaviate takes UUIDs alone: the same one for the same label in each export.
        key = uuid.uuid5(uuid.NAMESPACE_URL, f"xmcray:label:{row['label_id']}")
        start = _json({"class": "Label", "id": str(key), "properties": _fields(row, names)})
        # The vector's digits are inserted before the brace that closes the object.
        return f'{start[:-1]},"vector":{row["vector"]}}}'

    return _batches("objects", map(to_object, _rows(block)))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


SYSTEMS: Mapping[str, Callable[[ExportTarget, Iterable[pa.Table]], None]] = {
    "parquet": _parquet,
    "qdrant": _qdrant,
    "milvus": _milvus,
    "vespa": _vespa,
    "lancedb": _lancedb,
    "weaviate": _weaviate,
}
