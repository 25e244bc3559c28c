"""Writes labels for other systems, one function per system; `vector_export` chooses the function.

Some systems read Parquet files, which hold the blocks of labels almost unchanged. The others read
lines of JSON, each of which is a document or the body of a request. For speed, vectors never become
Python numbers: Arrow formats all vectors of a block at once, and the text of each vector is
inserted into the JSON of its label.
"""

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

# The most that one request to Qdrant or Weaviate holds. By default Qdrant accepts 32 MB.
REQUEST_ITEMS = 128
REQUEST_BYTES = 8 << 20
# The most bytes of a string and of a JSON field in Milvus.
MAX_VARCHAR = 65_535
MAX_JSON = 65_536


# Systems that read Parquet files.


def _write_lancedb(target: ExportTarget, blocks: Iterable[pa.Table]) -> None:
    target.write_tables(_fixed_width(block, target.dim) for block in blocks)


def _fixed_width(block: pa.Table, dim: int) -> pa.Table:
    """A block with vectors of a fixed width. LanceDB cannot search lists of variable length."""
    numbers = block["vector"].combine_chunks().flatten()
    vectors = pa.FixedSizeListArray.from_arrays(numbers, dim)
    return _with_vectors(block, vectors)


def _with_vectors(block: pa.Table, vectors: pa.Array) -> pa.Table:
    """The block with other values in the column of vectors."""
    column = block.column_names.index("vector")
    return block.set_column(column, "vector", vectors)


def _write_milvus(target: ExportTarget, blocks: Iterable[pa.Table]) -> None:
    target.write_tables(_milvus_tables(target, blocks))
    attribute_field = vector_readme.MILVUS_ATTRIBUTES if target.attributes else ""
    template = target.filled(vector_readme.MILVUS_COLLECTION)
    collection = template.replace("ATTRIBUTES", attribute_field)
    target.write_text("collection.json", collection)
    # Milvus imports groups of files. Here each file is a group of its own.
    paths = sorted(target.folder.glob("*.parquet"))
    groups = [[f"labels/{path.name}"] for path in paths]
    request = {"collectionName": "labels", "files": groups}
    target.write_text("import.json", _indented_json(request))


def _milvus_tables(target: ExportTarget, blocks: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Converts blocks to the types that Milvus reads. Adds a note if texts had to be cut.

    Raises:
        BundleError: a uid or the attributes of a label do not fit.
    """
    num_cut = 0
    for block in blocks:
        # Only texts are cut, because a uid could then equal that of another label.
        if _num_too_long(block["uid"]) > 0:
            raise BundleError(
                f"a uid has more than {MAX_VARCHAR:,} bytes, the most in Milvus;"
                " choose another system"
            )
        num_cut += _num_too_long(block["text"])
        yield _milvus_table(block)
    # The number is known after the last block. The README, which lists the notes, is written later.
    if num_cut:
        target.notes.append(
            f"{num_cut:,} texts were cut to {MAX_VARCHAR:,} bytes,"
            " the most that a VarChar of Milvus holds."
        )


def _milvus_table(block: pa.Table) -> pa.Table:
    """A block with texts that fit a VarChar, and attributes as JSON."""
    texts = [_cut(text) for text in block["text"].to_pylist()]
    # Milvus does not know Arrow's type large_string.
    columns = {
        "label_id": block["label_id"],
        "uid": block["uid"].cast(pa.string()),
        "text": pa.array(texts, pa.string()),
        "vector": block["vector"],
    }
    if "attributes" in block.column_names:
        columns["attributes"] = _milvus_attributes(block["attributes"])
    return pa.table(columns)


def _milvus_attributes(attributes: pa.ChunkedArray) -> pa.Array:
    """The attributes of each label as the text of a JSON object."""
    objects = [_compact_json(_present(row)) for row in attributes.to_pylist()]
    # The JSON is ASCII, so its length is its number of bytes.
    largest_bytes = max(len(text) for text in objects)
    if largest_bytes > MAX_JSON:
        raise BundleError(
            f"attributes of a label have more than {MAX_JSON:,} bytes of JSON, the most in Milvus;"
            " choose another system"
        )
    return pa.array(objects, pa.string())


def _num_too_long(strings: pa.ChunkedArray) -> int:
    """How many strings have more bytes than a VarChar of Milvus holds."""
    is_too_long = pc.greater(pc.binary_length(strings), MAX_VARCHAR)
    return int(pc.sum(is_too_long).as_py())


def _cut(text: str) -> str:
    """The longest start of a text that a VarChar of Milvus holds."""
    start = text.encode()[:MAX_VARCHAR]
    # The limit may divide a character. "ignore" drops the part of it that is left.
    return start.decode(errors="ignore")


# Systems that read lines of JSON.


def _write_qdrant(target: ExportTarget, blocks: Iterable[pa.Table]) -> None:
    target.write_text("collection.json", target.filled(vector_readme.QDRANT_COLLECTION))
    target.write_lines("points-{}.jsonl", blocks, _qdrant_upserts)


def _qdrant_upserts(block: pa.Table) -> Iterator[str]:
    """Bodies of requests that add points."""
    return _request_bodies("points", _qdrant_points(block))


def _qdrant_points(block: pa.Table) -> Iterator[str]:
    for label in _labels(block):
        payload = {"uid": label["uid"], "text": label["text"]}
        if label["attributes"]:
            payload["attributes"] = label["attributes"]
        point = {
            "id": str(label["label_id"]),
            "vector": label["vector"],
            "payload": _compact_json(payload),
        }
        yield _json_object(point)


# Weaviate's type of an attribute, by its Arrow type.
_WEAVIATE_TYPES = {
    "string": "text",
    "large_string": "text",
    "bool": "boolean",
    "int64": "int",
    "double": "number",
}


def _write_weaviate(target: ExportTarget, blocks: Iterable[pa.Table]) -> None:
    field_names = _field_names(target.attributes)
    collection = _weaviate_collection(target.attributes, field_names)
    target.write_text("collection.json", _indented_json(collection))
    to_lines = functools.partial(_weaviate_batches, field_names)
    target.write_lines("objects-{}.jsonl", blocks, to_lines)


def _weaviate_collection(
    attributes: pa.Schema | None, field_names: Mapping[str, str]
) -> dict[str, Any]:
    """The definition of the collection to which the objects are added."""
    properties = [
        {"name": "label_id", "dataType": ["int"]},
        # The tokenization "field" makes Weaviate match a uid as a whole, not by its words.
        {"name": "uid", "dataType": ["text"], "tokenization": "field"},
        {"name": "text", "dataType": ["text"]},
    ]
    for attribute in attributes or ():
        name = field_names[attribute.name]
        data_type = _WEAVIATE_TYPES[str(attribute.type)]
        properties.append({"name": name, "dataType": [data_type]})
    return {
        "class": "Label",
        "vectorizer": "none",
        "vectorIndexConfig": {"distance": "dot"},
        "properties": properties,
    }


def _weaviate_batches(field_names: Mapping[str, str], block: pa.Table) -> Iterator[str]:
    """Bodies of requests that add objects."""
    return _request_bodies("objects", _weaviate_objects(field_names, block))


def _weaviate_objects(field_names: Mapping[str, str], block: pa.Table) -> Iterator[str]:
    for label in _labels(block):
        # Ids in Weaviate are UUIDs. This UUID is a hash of the label's id, so a label gets the same
        # UUID in every export.
        name_of_label = f"xmcray:label:{label['label_id']}"
        uuid_of_label = uuid.uuid5(uuid.NAMESPACE_URL, name_of_label)
        weaviate_object = {
            "class": _compact_json("Label"),
            "id": _compact_json(str(uuid_of_label)),
            "properties": _compact_json(_fields(label, field_names)),
            "vector": label["vector"],
        }
        yield _json_object(weaviate_object)


# Vespa's type of an attribute, by its Arrow type.
_VESPA_TYPES = {
    "string": "string",
    "large_string": "string",
    "bool": "bool",
    "int64": "long",
    "double": "double",
}


def _write_vespa(target: ExportTarget, blocks: Iterable[pa.Table]) -> None:
    field_names = _field_names(target.attributes)
    attribute_fields = ""
    for attribute in target.attributes or ():
        name = field_names[attribute.name]
        field_type = _VESPA_TYPES[str(attribute.type)]
        attribute_fields += vector_readme.vespa_field(name, field_type)
    template = target.filled(vector_readme.VESPA_SCHEMA)
    schema = template.replace("ATTRIBUTES", attribute_fields)
    target.write_text("application/schemas/label.sd", schema)
    target.write_text("application/services.xml", vector_readme.VESPA_SERVICES)
    to_lines = functools.partial(_vespa_puts, field_names)
    target.write_lines("documents-{}.jsonl", blocks, to_lines)


# The code points that Vespa refuses in every text (com.yahoo.text.Text): most control characters,
# U+FDD0 to U+FDDF, and U+nFFFE and U+nFFFF of every plane n of Unicode except the first, plane 0.
_PLANE_ENDS = "".join(rf"\U{plane:04x}fffe-\U{plane:04x}ffff" for plane in range(1, 17))
_NOT_IN_TEXT = re.compile(rf"[\x00-\x08\x0b\x0c\x0e-\x1f\ufdd0-\ufddf{_PLANE_ENDS}]")
# In a document id these code points are percent-encoded. The percent sign is encoded too, so that
# different uids have different document ids.
_ESCAPED_IN_ID = re.compile(f"{_NOT_IN_TEXT.pattern}|%")


def _vespa_puts(field_names: Mapping[str, str], block: pa.Table) -> Iterator[str]:
    """One put operation per label."""
    for label in _labels(block):
        fields = {}
        for name, value in _fields(label, field_names).items():
            if isinstance(value, str):
                value = _NOT_IN_TEXT.sub(" ", value)
            fields[name] = _compact_json(value)
        fields["vector"] = _json_object({"values": label["vector"]})
        uid = _ESCAPED_IN_ID.sub(_percent_encoded, label["uid"])
        put = {
            "put": _compact_json(f"id:xmcray:label::{uid}"),
            "fields": _json_object(fields),
        }
        yield _json_object(put)


def _percent_encoded(match: re.Match[str]) -> str:
    return urllib.parse.quote(match[0], safe="")


# Labels as JSON.


def _labels(block: pa.Table) -> Iterator[dict[str, Any]]:
    """Each label as a dict. Its "vector" is the text of a JSON array."""
    vectors = block["vector"].combine_chunks()
    # Arrow formats the numbers of all labels in one flat array. Each gets the fewest digits from
    # which the same float32 can be read.
    number_texts = pc.cast(vectors.flatten(), pa.string())
    # The offsets of the vectors divide the flat array into the numbers of each label again.
    number_lists = pa.ListArray.from_arrays(vectors.offsets, number_texts)
    joined_numbers = pc.binary_join(number_lists, ",")
    for label in _with_vectors(block, joined_numbers).to_pylist():
        label["vector"] = f"[{label['vector']}]"
        label["attributes"] = _present(label.get("attributes", {}))
        yield label


def _present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that a label has. In Arrow, those that it lacks have the value None."""
    return {name: value for name, value in attributes.items() if value is not None}


def _field_names(attributes: pa.Schema | None) -> dict[str, str]:
    """The name of each attribute's field in a system that restricts the names of fields.

    Characters that are not allowed become _. If that makes two names equal, the later one gets one
    more _.
    """
    field_names: dict[str, str] = {}
    for attribute in attributes or ():
        name = "attribute_" + re.sub("[^a-zA-Z0-9_]", "_", attribute.name)
        while name in field_names.values():
            name += "_"
        field_names[attribute.name] = name
    return field_names


def _fields(label: Mapping[str, Any], field_names: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a label, except for its vector. Each attribute is a field of its own."""
    fields = {name: label[name] for name in ("label_id", "uid", "text")}
    for attribute, value in label["attributes"].items():
        fields[field_names[attribute]] = value
    return fields


def _request_bodies(name: str, items: Iterable[str]) -> Iterator[str]:
    """Joins items into requests of at most REQUEST_ITEMS items and about REQUEST_BYTES bytes.

    An item of more than REQUEST_BYTES has a request of its own.

    Args:
        name: the field of the body that lists the items.
        items: the JSON of each of at least one item. It is ASCII, so its length is its number of
            bytes.
    """
    batch: list[str] = []
    size = 0
    for item in items:
        fits = len(batch) < REQUEST_ITEMS and size + len(item) <= REQUEST_BYTES
        if batch and not fits:
            yield _request_body(name, batch)
            batch = []
            size = 0
        batch.append(item)
        size += len(item)
    yield _request_body(name, batch)


def _request_body(name: str, items: Iterable[str]) -> str:
    joined_items = ",".join(items)
    return _json_object({name: f"[{joined_items}]"})


def _json_object(fields: Mapping[str, str]) -> str:
    """A JSON object whose values are JSON already. The names need no escapes."""
    members = [f'"{name}":{value}' for name, value in fields.items()]
    return "{" + ",".join(members) + "}"


_compact_json = json.JSONEncoder(separators=(",", ":")).encode


def _indented_json(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"


SYSTEMS: Mapping[str, Callable[[ExportTarget, Iterable[pa.Table]], None]] = {
    "parquet": ExportTarget.write_tables,
    "qdrant": _write_qdrant,
    "milvus": _write_milvus,
    "vespa": _write_vespa,
    "lancedb": _write_lancedb,
    "weaviate": _write_weaviate,
}
