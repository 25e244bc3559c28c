"""How `vector_export` writes labels, one function per system."""

from __future__ import annotations

import functools
import json
import re
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from xmcray.errors import BundleError
from xmcray.retrieval import vector_readme
from xmcray.retrieval.export_target import ExportTarget

# The most of one request. By default Qdrant takes 32 MB.
POINTS = 128
LINE_BYTES = 8 << 20
MAX_VARCHAR = 65_535  # bytes of a string in Milvus


def _parquet(target: ExportTarget, blocks: Iterable[pa.Table]) -> None:
    target.write_tables(blocks)


def _milvus(target: ExportTarget, blocks: Iterable[pa.Table]) -> None:
    target.write_tables(_milvus_tables(target, blocks))
    field = vector_readme.MILVUS_ATTRIBUTES if target.attributes else ""
    collection = vector_readme.MILVUS_COLLECTION.replace("ATTRIBUTES", field)
    target.write_text("collection.json", collection)
    # Milvus imports a list of groups of files; each file is a group of its own.
    paths = sorted(target.folder.glob("*.parquet"))
    groups = [[f"labels/{path.name}"] for path in paths]
    request = json.dumps({"collectionName": "labels", "files": groups}, indent=1)
    target.write_text("import.json", request + "\n")


def _milvus_tables(target: ExportTarget, blocks: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Blocks with strings that fit a VarChar and attributes as JSON; notes how many texts were cut.

    Raises:
        BundleError: a uid does not fit.
    """
    num_cut = 0
    for block in blocks:
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
            rows = block["attributes"].to_pylist()
            texts = [_json(_present(attributes)) for attributes in rows]
            columns["attributes"] = pa.array(texts, pa.string())
        yield pa.table(columns)
    if num_cut:
        target.notes.append(
            f"{num_cut:,} texts were cut to {MAX_VARCHAR:,} bytes, the most that a VarChar of Milvus holds."
        )


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
    return _batches("points", _points(block))


def _points(block: pa.Table) -> Iterator[str]:
    for row in _rows(block):
        payload = {"uid": row["uid"], "text": row["text"]}
        if row["attributes"]:
            payload["attributes"] = row["attributes"]
        label_id = row["label_id"]
        vector = row["vector"]
        yield f'{{"id":{label_id},"vector":{vector},"payload":{_json(payload)}}}'


def _with_vector(json_object: str, vector: str) -> str:
    """A JSON object with a further field, the vector, whose digits are those of `_rows`."""
    return f'{json_object[:-1]},"vector":{vector}}}'


def _batches(name: str, items: Iterable[str]) -> Iterator[str]:
    """Bodies of requests with a bounded number of items and bytes, as a list of this name."""
    batch: list[str] = []
    size = 0
    for item in items:
        is_full = len(batch) == POINTS or size + len(item) > LINE_BYTES
        if batch and is_full:
            yield _body(name, batch)
            batch = []
            size = 0
        batch.append(item)
        size += len(item)
    yield _body(name, batch)


def _body(name: str, items: Iterable[str]) -> str:
    """A JSON object with one list, whose items are JSON."""
    return f'{{"{name}":[{",".join(items)}]}}'


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
        uid = _QUOTED.sub(_percent_encoded, row["uid"])
        fields = _fields(row, names)
        for name, value in fields.items():
            if isinstance(value, str):
                fields[name] = _NO_TEXT.sub(" ", value)
        put = _json({"put": f"id:xmcray:label::{uid}", "fields": fields})
        # The vector is one of the fields, so it comes before the brace that closes the put.
        yield _with_vector(put[:-1], f'{{"values":{row["vector"]}}}') + "}"


def _percent_encoded(match: re.Match[str]) -> str:
    return urllib.parse.quote(match[0], safe="")


def _lancedb(target: ExportTarget, blocks: Iterable[pa.Table]) -> None:
    target.write_tables(_fixed_width(block, target.dim) for block in blocks)


def _fixed_width(block: pa.Table, dim: int) -> pa.Table:
    """A block with vectors of a fixed width, which alone LanceDB can search."""
    numbers = block["vector"].combine_chunks().flatten()
    column = block.column_names.index("vector")
    vectors = pa.FixedSizeListArray.from_arrays(numbers, dim)
    return block.set_column(column, "vector", vectors)


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
    return _batches("objects", _weaviate_objects(names, block))


def _weaviate_objects(names: Mapping[str, str], block: pa.Table) -> Iterator[str]:
    for row in _rows(block):
        # Weaviate takes UUIDs alone: the same one for the same label in each export.
        key = uuid.uuid5(uuid.NAMESPACE_URL, f"xmcray:label:{row['label_id']}")
        label = {"class": "Label", "id": str(key), "properties": _fields(row, names)}
        yield _with_vector(_json(label), row["vector"])


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
