"""How `vector_export` writes a block of labels for each system; one function per system at the end of the file."""

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

POINTS, LINE_BYTES = 128, 8 << 20  # of one upsert; Qdrant takes 32 MB unless told otherwise
FILE_ROWS = 100_000
MAX_VARCHAR = 65_535  # bytes of a string in Milvus


@dataclass(frozen=True, slots=True)
class Block:
    """Labels that can be answered, in the order of the bundle.

    Attributes:
        ids: int64 [n], source ids. uids, texts: of the same labels. vectors: float32 [n, D].
        attributes: structs, null where a label lacks one; None where no label has any.
    """

    ids: Int64Array
    uids: pa.Array
    texts: pa.Array
    vectors: Float32Array
    attributes: pa.StructArray | None

    def json_vectors(self) -> list[str]:
        """Each vector as a JSON array, with the digits that give the same float32 back."""
        rows, dim = self.vectors.shape
        numbers = pc.cast(pa.array(self.vectors.ravel()), pa.string())
        lists = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1) * dim, pa.int32()), numbers)
        return [f"[{row}]" for row in pc.binary_join(lists, ",").to_pylist()]

    def attribute_sets(self) -> list[dict[str, Any]]:
        """What each label has of attributes."""
        if self.attributes is None:
            return [{} for _ in self.ids]
        return [
            {k: v for k, v in row.items() if v is not None} for row in self.attributes.to_pylist()
        ]


@dataclass(slots=True)
class Target:
    """Where a system's files go.

    Attributes:
        folder: the folder to fill.
        dim: D.
        attributes: the struct type of labels' attributes; None where no label has any.
        notes: what a reader of the README must know, a sentence each.
    """

    folder: Path
    dim: int
    attributes: pa.DataType | None
    notes: list[str]

    def write(
        self,
        name: str,
        blocks: Iterator[Block],
        opened: Callable[[Path], Any],
        add: Callable[[Any, Block], None],
    ) -> int:
        """Writes all blocks to files of about FILE_ROWS labels, such as points-00000.jsonl; returns how many labels.

        Args:
            name: of the files, with {} for the number. opened: opens one of them. add: writes a block to it.
        """
        rows = files = in_file = 0
        with contextlib.ExitStack() as stack:
            file = None
            for block in blocks:
                if file is None or in_file >= FILE_ROWS:
                    stack.close()
                    file = stack.enter_context(opened(self.folder / name.format(f"{files:05d}")))
                    files, in_file = files + 1, 0
                add(file, block)
                rows, in_file = rows + len(block.ids), in_file + len(block.ids)
        return rows

    def write_lines(
        self, name: str, blocks: Iterator[Block], to_lines: Callable[[Block], Iterator[str]]
    ) -> int:
        """As `write`, for lines of ASCII."""

        def add(file: TextIO, block: Block) -> None:
            file.writelines(f"{line}\n" for line in to_lines(block))

        return self.write(name, blocks, lambda path: path.open("w", encoding="ascii"), add)

    def write_tables(
        self, name: str, blocks: Iterator[Block], strings: pa.DataType, as_json: bool = False
    ) -> int:
        """As `write`, for Parquet with label_id, uid, text, vector and, where there are any, attributes.

        Args:
            strings: type of uid and text. as_json: attributes are such strings too, not structs.
        """
        vectors = pa.list_(pa.float32())
        columns = [
            ("label_id", pa.int64()),
            ("uid", strings),
            ("text", strings),
            ("vector", vectors),
        ]
        if self.attributes is not None:
            columns.append(("attributes", strings if as_json else self.attributes))
        schema = pa.schema(columns)

        def add(file: Any, block: Block) -> None:
            rows, dim = block.vectors.shape
            offsets = pa.array(np.arange(rows + 1) * dim, pa.int32())
            lists = pa.ListArray.from_arrays(offsets, pa.array(block.vectors.ravel()), type=vectors)
            values = [
                pa.array(block.ids),
                block.uids.cast(strings),
                block.texts.cast(strings),
                lists,
            ]
            if self.attributes is not None:
                values.append(
                    pa.array(map(_json, block.attribute_sets()), strings)
                    if as_json
                    else block.attributes
                )
            file.write_table(pa.table(values, schema=schema))

        # no dictionaries, which vectors do not gain by, and the packing that every reader knows
        how = {"compression": "snappy", "use_dictionary": False}
        return self.write(name, blocks, lambda path: pq.ParquetWriter(path, schema, **how), add)

    def write_json(self, name: str, value: object) -> None:
        """Writes a small JSON file."""
        (self.folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _parquet(target: Target, blocks: Iterator[Block]) -> int:
    return target.write_tables("labels-{}.parquet", blocks, pa.large_string())


def _milvus(target: Target, blocks: Iterator[Block]) -> int:
    cut = 0

    def fitting(block: Block) -> Block:
        nonlocal cut
        too_long = [
            pc.sum(pc.greater(pc.binary_length(s), MAX_VARCHAR)).as_py()
            for s in (block.uids, block.texts)
        ]
        if too_long[0]:
            raise BundleError(
                f"a uid has more than {MAX_VARCHAR:,} bytes, the most in Milvus; choose another system"
            )
        if not too_long[1]:
            return block
        cut += too_long[1]
        texts = [
            text.encode()[:MAX_VARCHAR].decode(errors="ignore") for text in block.texts.to_pylist()
        ]
        return dataclasses.replace(block, texts=pa.array(texts, pa.large_string()))

    strings = pa.string()  # it knows no large ones
    rows = target.write_tables("labels-{}.parquet", map(fitting, blocks), strings, as_json=True)
    if cut:
        target.notes.append(
            f"{cut:,} texts were cut to {MAX_VARCHAR:,} bytes, the most that a VarChar of Milvus holds."
        )
    text = {"dataType": "VarChar", "elementTypeParams": {"max_length": MAX_VARCHAR}}
    fields = [
        {"fieldName": "label_id", "dataType": "Int64", "isPrimary": True},
        {"fieldName": "uid", **text},
        {"fieldName": "text", **text},
        {
            "fieldName": "vector",
            "dataType": "FloatVector",
            "elementTypeParams": {"dim": target.dim},
        },
        *([{"fieldName": "attributes", "dataType": "JSON"}] if target.attributes else []),
    ]
    index = {
        "fieldName": "vector",
        "indexName": "vector",
        "metricType": "IP",
        "indexType": "AUTOINDEX",
    }
    name = {"collectionName": "labels"}
    target.write_json(
        "collection.json", {**name, "schema": {"fields": fields}, "indexParams": [index]}
    )
    paths = [[f"labels/{path.name}"] for path in sorted(target.folder.glob("*.parquet"))]
    target.write_json("import.json", {**name, "files": paths})
    return rows


def _qdrant(target: Target, blocks: Iterator[Block]) -> int:
    target.write_json("collection.json", {"vectors": {"size": target.dim, "distance": "Dot"}})
    return target.write_lines("points-{}.jsonl", blocks, _upserts)


def _upserts(block: Block) -> Iterator[str]:
    points, size = list[str](), 0
    for label_id, uid, text, vector, attributes in _rows(block):
        payload = _json(
            {"uid": uid, "text": text, **({"attributes": attributes} if attributes else {})}
        )
        point = f'{{"id":{label_id},"vector":{vector},"payload":{payload}}}'
        if points and (len(points) == POINTS or size + len(point) > LINE_BYTES):
            yield f'{{"points":[{",".join(points)}]}}'
            points, size = [], 0
        points.append(point)
        size += len(point)
    yield f'{{"points":[{",".join(points)}]}}'


def _vespa(target: Target, blocks: Iterator[Block]) -> int:
    application = target.folder / "application"
    (application / "schemas").mkdir(parents=True)
    names = _vespa_names(target.attributes)
    fields = [
        vector_readme.vespa_field(names[part.name], _VESPA_TYPES[str(part.type)])
        for part in target.attributes or ()
    ]
    schema = vector_readme.VESPA_SCHEMA.replace("DIM", str(target.dim)).replace(
        "ATTRIBUTES", "".join(fields)
    )
    (application / "schemas" / "label.sd").write_text(schema, encoding="utf-8")
    (application / "services.xml").write_text(vector_readme.VESPA_SERVICES, encoding="utf-8")
    return target.write_lines("documents-{}.jsonl", blocks, functools.partial(_puts, names))


_VESPA_TYPES = {
    "string": "string",
    "large_string": "string",
    "bool": "bool",
    "int64": "long",
    "double": "double",
}


def _vespa_names(attributes: pa.DataType | None) -> dict[str, str]:
    """The field of each attribute; letters that no name of a field has become _, and so may two names become one."""
    names: dict[str, str] = {}
    for part in attributes or ():
        name = "attribute_" + re.sub("[^a-zA-Z0-9_]", "_", part.name)
        while name in names.values():
            name += "_"
        names[part.name] = name
    return names


# Code points that Vespa accepts nowhere: most control characters and those that Unicode reserves (com.yahoo.text.Text).
_PLANES = "".join(
    f"{chr(plane << 16 | 0xFFFE)}{chr(plane << 16 | 0xFFFF)}" for plane in range(1, 17)
)
_NO_TEXT = re.compile(f"[\0-\b\v\f\x0e-\x1f\ufdd0-\ufddf{_PLANES}]")
_QUOTED = re.compile(f"{_NO_TEXT.pattern}|%")


def _puts(names: Mapping[str, str], block: Block) -> Iterator[str]:
    for label_id, uid, text, vector, attributes in _rows(block):
        name = _json(
            f"id:xmcray:label::{_QUOTED.sub(lambda found: urllib.parse.quote(found[0], safe=''), uid)}"
        )
        fields = {
            "label_id": label_id,
            "uid": uid,
            "text": text,
            **{names[k]: v for k, v in attributes.items()},
        }
        plain = {
            key: _NO_TEXT.sub(" ", v) if isinstance(v, str) else v for key, v in fields.items()
        }
        yield f'{{"put":{name},"fields":{{{_json(plain)[1:-1]},"vector":{{"values":{vector}}}}}}}'


def _rows(block: Block) -> Iterator[tuple[int, str, str, str, dict[str, Any]]]:
    columns = (
        block.uids.to_pylist(),
        block.texts.to_pylist(),
        block.json_vectors(),
        block.attribute_sets(),
    )
    return zip(block.ids.tolist(), *columns, strict=True)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


SYSTEMS: Mapping[str, Callable[[Target, Iterator[Block]], int]] = {
    "parquet": _parquet,
    "qdrant": _qdrant,
    "milvus": _milvus,
    "vespa": _vespa,
}
