"""How `vector_export` writes labels, one function per system."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from xmcray.errors import BundleError
from xmcray.retrieval import vector_readme
from xmcray.types import Float32Array, Int64Array

# Of one upsert; Qdrant takes 32 MB by default.
POINTS = 128
LINE_BYTES = 8 << 20
FILE_ROWS = 100_000
MAX_VARCHAR = 65_535  # bytes of a string in Milvus
_VECTOR = pa.list_(pa.float32())


@dataclass(frozen=True, slots=True)
class LabelBlock:
    """Labels that can be answered, in the order of the bundle.

    Attributes:
        ids: int64 [n], source ids.
        uids: strings of the same labels.
        texts: strings of the same labels.
        vectors: float32 [n, D].
        attributes: structs, null where a label lacks one; None if no label has any.
    """

    ids: Int64Array
    uids: pa.Array
    texts: pa.Array
    vectors: Float32Array
    attributes: pa.StructArray | None

    def vector_lists(self, values: pa.Array) -> pa.ListArray:
        """One list per label of `values`, which are those of all vectors one after another."""
        num_labels, dim = self.vectors.shape
        offsets = pa.array(np.arange(num_labels + 1) * dim, pa.int32())
        return pa.ListArray.from_arrays(offsets, values)

    def attribute_sets(self) -> list[dict[str, Any]]:
        """The attributes of each label, without those that it lacks."""
        if self.attributes is None:
            return [{} for _ in self.ids]
        sets: list[dict[str, Any]] = self.attributes.to_pylist()
        for attributes in sets:
            for name in [name for name, value in attributes.items() if value is None]:
                del attributes[name]
        return sets

    def rows(self) -> Iterator[LabelRow]:
        """Each label by itself."""
        # Arrow prints the shortest digits that give the same float32 back.
        numbers = pc.cast(pa.array(self.vectors.ravel()), pa.string())
        vectors = pc.binary_join(self.vector_lists(numbers), ",").to_pylist()
        uids = self.uids.to_pylist()
        texts = self.texts.to_pylist()
        attributes = self.attribute_sets()
        for i, label_id in enumerate(self.ids.tolist()):
            yield LabelRow(label_id, uids[i], texts[i], f"[{vectors[i]}]", attributes[i])


@dataclass(frozen=True, slots=True)
class LabelRow:
    """One label; `vector` is a JSON array."""

    label_id: int
    uid: str
    text: str
    vector: str
    attributes: dict[str, Any]


@dataclass(slots=True)
class ExportTarget:
    """Where a system's files go.

    Attributes:
        folder: the folder to fill.
        dim: D.
        attributes: the struct type of labels' attributes; None if no label has any.
        notes: what a reader of the README must know, a sentence each.
    """

    folder: Path
    dim: int
    attributes: pa.DataType | None
    notes: list[str]

    def write(
        self,
        name: str,
        blocks: Iterator[LabelBlock],
        open_file: Callable[[Path], Any],
        add: Callable[[Any, LabelBlock], None],
    ) -> int:
        """Writes all blocks to files of about FILE_ROWS labels, such as points-00000.jsonl.

        Args:
            name: of the files, with {} for the number.
            blocks: what to write.
            open_file: opens one file.
            add: writes a block to a file.
        Returns:
            The number of labels.
        """
        rows = 0
        files = 0
        rows_in_file = FILE_ROWS
        file = None
        with contextlib.ExitStack() as stack:
            for block in blocks:
                if rows_in_file >= FILE_ROWS:
                    stack.close()
                    path = self.folder / name.format(f"{files:05d}")
                    file = stack.enter_context(open_file(path))
                    files += 1
                    rows_in_file = 0
                add(file, block)
                rows += len(block.ids)
                rows_in_file += len(block.ids)
        return rows

    def write_lines(
        self,
        name: str,
        blocks: Iterator[LabelBlock],
        to_lines: Callable[[LabelBlock], Iterator[str]],
    ) -> int:
        """As `write`, for lines of ASCII."""

        def add(file: TextIO, block: LabelBlock) -> None:
            file.writelines(f"{line}\n" for line in to_lines(block))

        return self.write(name, blocks, lambda path: path.open("w", encoding="ascii"), add)

    def write_tables(
        self, blocks: Iterator[LabelBlock], strings: pa.DataType, attributes_as_json: bool = False
    ) -> int:
        """As `write`, for Parquet with label_id, uid, text, vector and, if any, attributes.

        Args:
            blocks: what to write.
            strings: type of uid and text.
            attributes_as_json: attributes are such strings too, not structs.
        """
        types = {"label_id": pa.int64(), "uid": strings, "text": strings, "vector": _VECTOR}
        if self.attributes is not None:
            types["attributes"] = strings if attributes_as_json else self.attributes
        schema = pa.schema(types)

        def add(file: pq.ParquetWriter, block: LabelBlock) -> None:
            columns = {
                "label_id": pa.array(block.ids),
                "uid": block.uids.cast(strings),
                "text": block.texts.cast(strings),
                "vector": block.vector_lists(pa.array(block.vectors.ravel())).cast(_VECTOR),
            }
            if self.attributes is not None and attributes_as_json:
                columns["attributes"] = pa.array(map(_json, block.attribute_sets()), strings)
            elif self.attributes is not None:
                columns["attributes"] = block.attributes
            file.write_table(pa.table(columns, schema=schema))

        # Vectors do not gain by dictionaries, and every reader knows snappy.
        open_file = functools.partial(
            pq.ParquetWriter, schema=schema, compression="snappy", use_dictionary=False
        )
        return self.write("labels-{}.parquet", blocks, open_file, add)

    def write_text(self, name: str, template: str) -> None:
        """Writes a small file, with the width of the vectors in place of DIM."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(template.replace("DIM", str(self.dim)), encoding="utf-8")


def _parquet(target: ExportTarget, blocks: Iterator[LabelBlock]) -> int:
    return target.write_tables(blocks, pa.large_string())


def _milvus(target: ExportTarget, blocks: Iterator[LabelBlock]) -> int:
    num_cut = 0

    def cut(block: LabelBlock) -> LabelBlock:
        """The block with texts that fit a VarChar."""
        nonlocal num_cut
        if _num_too_long(block.uids):
            raise BundleError(
                f"a uid has more than {MAX_VARCHAR:,} bytes, the most in Milvus; choose another system"
            )
        num_too_long = _num_too_long(block.texts)
        if not num_too_long:
            return block
        num_cut += num_too_long
        # A character that the limit divides is left out.
        texts = [
            text.encode()[:MAX_VARCHAR].decode(errors="ignore") for text in block.texts.to_pylist()
        ]
        return dataclasses.replace(block, texts=pa.array(texts, pa.large_string()))

    # Milvus knows no large strings.
    rows = target.write_tables(map(cut, blocks), pa.string(), attributes_as_json=True)
    if num_cut:
        target.notes.append(
            f"{num_cut:,} texts were cut to {MAX_VARCHAR:,} bytes, the most that a VarChar of Milvus holds."
        )
    field = vector_readme.MILVUS_ATTRIBUTES if target.attributes else ""
    target.write_text(
        "collection.json", vector_readme.MILVUS_COLLECTION.replace("ATTRIBUTES", field)
    )
    paths = [[f"labels/{path.name}"] for path in sorted(target.folder.glob("*.parquet"))]
    files = json.dumps({"collectionName": "labels", "files": paths}, indent=1)
    target.write_text("import.json", files + "\n")
    return rows


def _num_too_long(strings: pa.Array) -> int:
    too_long: int = pc.sum(pc.greater(pc.binary_length(strings), MAX_VARCHAR)).as_py()
    return too_long


def _qdrant(target: ExportTarget, blocks: Iterator[LabelBlock]) -> int:
    target.write_text("collection.json", vector_readme.QDRANT_COLLECTION)
    return target.write_lines("points-{}.jsonl", blocks, _upserts)


def _upserts(block: LabelBlock) -> Iterator[str]:
    """Bodies of upserts, each of a bounded number of points and bytes."""
    points: list[str] = []
    size = 0
    for row in block.rows():
        payload: dict[str, Any] = {"uid": row.uid, "text": row.text}
        if row.attributes:
            payload["attributes"] = row.attributes
        point = f'{{"id":{row.label_id},"vector":{row.vector},"payload":{_json(payload)}}}'
        if points and (len(points) == POINTS or size + len(point) > LINE_BYTES):
            yield f'{{"points":[{",".join(points)}]}}'
            points = []
            size = 0
        points.append(point)
        size += len(point)
    yield f'{{"points":[{",".join(points)}]}}'


def _vespa(target: ExportTarget, blocks: Iterator[LabelBlock]) -> int:
    names = _vespa_names(target.attributes)
    fields = ""
    for attribute in target.attributes or ():
        kind = _VESPA_TYPES[str(attribute.type)]
        fields += vector_readme.vespa_field(names[attribute.name], kind)
    schema = vector_readme.VESPA_SCHEMA.replace("ATTRIBUTES", fields)
    target.write_text("application/schemas/label.sd", schema)
    target.write_text("application/services.xml", vector_readme.VESPA_SERVICES)
    return target.write_lines("documents-{}.jsonl", blocks, functools.partial(_puts, names))


_VESPA_TYPES = {
    "string": "string",
    "large_string": "string",
    "bool": "bool",
    "int64": "long",
    "double": "double",
}


def _vespa_names(attributes: pa.DataType | None) -> dict[str, str]:
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


# Code points that Vespa accepts nowhere (com.yahoo.text.Text): most control characters, and those
# that Unicode reserves, which are the last two of each plane and a range.
_PLANE_ENDS = "".join(
    chr(plane << 16 | 0xFFFE) + chr(plane << 16 | 0xFFFF) for plane in range(1, 17)
)
_NO_TEXT = re.compile(f"[\0-\b\v\f\x0e-\x1f\ufdd0-\ufddf{_PLANE_ENDS}]")
_QUOTED = re.compile(f"{_NO_TEXT.pattern}|%")


def _puts(names: Mapping[str, str], block: LabelBlock) -> Iterator[str]:
    """One put per label.

    Args:
        names: the field of each attribute.
        block: the labels.
    """
    for row in block.rows():
        uid = _QUOTED.sub(lambda match: urllib.parse.quote(match[0], safe=""), row.uid)
        fields: dict[str, Any] = {"label_id": row.label_id, "uid": row.uid, "text": row.text}
        for name, value in row.attributes.items():
            fields[names[name]] = value
        for name, value in fields.items():
            if isinstance(value, str):
                fields[name] = _NO_TEXT.sub(" ", value)
        put = _json({"put": f"id:xmcray:label::{uid}", "fields": fields})
        # The vector's digits are inserted before the two braces that close fields and put.
        yield f'{put[:-2]},"vector":{{"values":{row.vector}}}}}}}'


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


SYSTEMS: Mapping[str, Callable[[ExportTarget, Iterator[LabelBlock]], int]] = {
    "parquet": _parquet,
    "qdrant": _qdrant,
    "milvus": _milvus,
    "vespa": _vespa,
}
