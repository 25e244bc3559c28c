"""Seeded changes of bytes and of values, for each kind of file."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Change = Callable[[bytes, random.Random], bytes]
HUGE = (-1, 0, 1, 2**31, 2**32 - 1, 2**50, 2**63 - 1, 10**30)
MARKER = "XMCRAY_CODE_RAN"  # environment variable: the file that executed code would write


# --- Changes of bytes ---


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 3, 20))):
        place = draw.randrange(len(data))
        changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _truncate(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.choice((0, 1, len(data) - 1, draw.randrange(len(data))))]


def extend(data: bytes, draw: random.Random) -> bytes:
    return data + draw.randbytes(draw.choice((1, 8, 4096)))


def _overwrite(data: bytes, draw: random.Random) -> bytes:
    """A block of zeros, of ones or of noise."""
    width = min(len(data), draw.choice((1, 4, 8, 64)))
    start = draw.randrange(len(data) - width + 1)
    block = draw.choice((bytes(width), b"\xff" * width, draw.randbytes(width)))
    return data[:start] + block + data[start + width :]


def _huge(data: bytes, draw: random.Random) -> bytes:
    """A number of four or eight bytes becomes very large or negative, at the start more often."""
    width = draw.choice((4, 8))
    if len(data) < width:
        return data * 2
    limit = draw.choice((min(len(data), 256), len(data)))
    start = draw.randrange(max(1, limit - width + 1))
    number = draw.choice(HUGE[:-1]) % (1 << 8 * width)
    return data[:start] + number.to_bytes(width, "little") + data[start + width :]


BYTES: tuple[Change, ...] = (_flip, _truncate, extend, _overwrite, _huge)

# --- Changes of JSON ---

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**40, 2**63, 10**30, 0.5, float("inf"), float("nan"), "", "x", "\u0000", "\ud800", "..",
    "/etc/passwd", [], {}, [[]], {"a": {}}, "1" * 5000,
)  # fmt: skip


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Container and key of every value in a document."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return
    for key, item in list(items):
        yield value, key
        yield from _places(item)


def change_document(document: Any, draw: random.Random) -> None:
    """Deletes, replaces, renames or repeats one value of a JSON document."""
    places = list(_places(document))
    if not places:
        return
    container, key = draw.choice(places)
    way = draw.choice(("delete", "value", "value", "value", "swap", "rename"))
    if way == "delete":
        del container[key]
    elif way == "value":
        # A copy, because the next change may be inside of it.
        container[key] = copy.deepcopy(draw.choice(VALUES))
    elif way == "swap":
        other, other_key = draw.choice(places)
        with contextlib.suppress(KeyError, IndexError, TypeError):
            container[key] = json.loads(json.dumps(other[other_key]))
    elif isinstance(container, dict):
        container[f"{key}_"] = container.pop(key)
    else:
        container.append(container[key])


def _json(data: bytes, draw: random.Random) -> bytes:
    whole = draw.choice((*["change"] * 12, b"[" * 200_000, b"null", b"[]", b'{"a":1e999}'))
    if isinstance(whole, bytes):
        return whole
    document = json.loads(data)
    for _ in range(draw.choice((1, 1, 2))):
        change_document(document, draw)
    return json.dumps(document).encode()


def _json_lines(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines()
    place = draw.randrange(len(lines))
    lines[place] = _json(lines[place], draw)
    return b"\n".join(lines)


def _yaml(data: bytes, draw: random.Random) -> bytes:
    import yaml

    if not draw.randrange(6):
        return draw.choice((b"!!python/object/apply:os.system [id]", b"[]", b"1", b"a: &a [*a]"))
    document = yaml.safe_load(data)
    change_document(document, draw)
    with contextlib.suppress(ValueError, UnicodeError):
        return str(yaml.safe_dump(document)).encode()
    return b"{}"


# --- Changes of arrays and tables ---


class _Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (open, (os.environ[MARKER], "w"))


def _npy_bytes(array: Any) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array, allow_pickle=True)
    return sink.getvalue()


def _npy(data: bytes, draw: random.Random) -> bytes:
    array = np.load(io.BytesIO(data))
    way = draw.choice(("dtype", "value", "shape", "header", "pickle", "npz", "length"))
    if way == "dtype":
        kinds = ("<f4", "<f8", "<i2", ">i8", "<u8", "?", "<U3", "<M8[s]", "<c8", "<i4", "<f2")
        with np.errstate(all="ignore"):
            return _npy_bytes(array.astype(draw.choice(kinds)))
    if way == "value" and array.size:
        if array.dtype.kind == "f":
            values = [np.nan, np.inf, -1.0, 1e30, 0.0]
        else:
            info = np.iinfo(array.dtype)
            values = [info.min, info.max, info.max // 2, 0, len(array)]
        place = draw.randrange(array.size)
        array.flat[place] = draw.choice(values)
        return _npy_bytes(array)
    if way == "length":
        return _npy_bytes(draw.choice((array[:-1], array[:0], np.concatenate([array, array]))))
    if way == "shape":
        shapes = (array[None], array.ravel(), array[..., None], np.asfortranarray(array[:, None]))
        return _npy_bytes(draw.choice((*shapes, array.sum())))
    if way == "pickle":
        return _npy_bytes(np.array([_Bomb()] * 3, object))
    if way == "npz":
        sink = io.BytesIO()
        np.savez(sink, a=array)
        return sink.getvalue()
    shape = draw.choice(("(1125899906842624,)", "(-1,)", "(2,", "(1e9,)", "()", "((1,),)", "None"))
    kind = draw.choice(("'<i8'", "'|O'", "'|V9'", "None", "[('a', '<i4')]", "'<i4'", "'|S0'"))
    header = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    raw = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    return raw + array.tobytes()


def _npz(data: bytes, draw: random.Random) -> bytes:
    """Changes one of the arrays of a sparse matrix."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice(("data.npy", "indices.npy", "indptr.npy", "shape.npy"))
    members[name] = _npy(members[name], draw)
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for member, body in members.items():
            archive.writestr(member, body)
    return sink.getvalue()


def _safetensors(data: bytes, draw: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    body = bytearray(data[8 + length :])
    if not draw.randrange(4) and len(body) >= 4:
        # Not a number, or infinity.
        start = draw.randrange(len(body) // 4) * 4
        body[start : start + 4] = draw.choice(
            (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff" * 4)
        )
    else:
        names = [name for name in header if name != "__metadata__"]
        entry = header[draw.choice(names)]
        way = draw.choice(("dtype", "shape", "reshape", "any"))
        if way == "dtype":
            entry["dtype"] = draw.choice(
                ("F16", "BF16", "I32", "F64", "I64", "U8", "F8_E4M3", "C64")
            )
        elif way == "shape":
            entry["shape"] = [draw.choice(HUGE), *entry["shape"][1:]]
        elif way == "reshape":
            entry["shape"] = draw.choice((entry["shape"][::-1], [1, *entry["shape"]], []))
        else:
            change_document(header, draw)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(body)


def _parquet(data: bytes, draw: random.Random) -> bytes:
    table = pq.read_table(io.BytesIO(data))
    name = draw.choice(table.column_names)
    at = table.column_names.index(name)
    length = len(table)
    way = draw.choice(("nulls", "type", "drop", "rows", "rename", "twice", "order"))
    with contextlib.suppress(pa.ArrowException):
        if way == "nulls":
            column = pa.array([None] * length, table.schema.field(at).type)
            table = table.set_column(at, name, column)
        elif way == "type":
            numbers = pa.array(range(length))
            columns = (
                numbers,
                pa.array([b"\xff\xfe"] * length),
                pa.array([[1]] * length),
                pa.array([{"a": 1}] * length),
                pa.array(["x"] * length).dictionary_encode(),
                pa.array([str(number) for number in range(length)], pa.string()),
                pa.nulls(length),
            )
            table = table.set_column(at, name, draw.choice(columns))
        elif way == "drop":
            table = table.drop_columns([name])
        elif way == "rows":
            table = draw.choice((table.slice(0, length - 1), pa.concat_tables([table] * 2)))
        elif way == "rename":
            names = [draw.choice(("x", other)) for other in table.column_names]
            table = table.rename_columns(names)
        elif way == "twice":
            table = table.append_column(name, table[name])
        else:
            table = table.take(pa.array(np.arange(length)[::-1]))
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=draw.choice((1 << 20, max(1, length // 3))))
    return sink.getvalue()


OF_SUFFIX: dict[str, tuple[Change, ...]] = {
    ".json": (_json,),
    ".jsonl": (_json_lines,),
    ".yaml": (_yaml,),
    ".npy": (_npy,),
    ".npz": (_npz,),
    ".safetensors": (_safetensors,),
    ".parquet": (_parquet,),
    ".faiss": (_huge,),
}
