"""What is known of labels besides their texts, by which answers are filtered: a price, a language, a category.

    attributes.parquet    rows by source id; columns of string, bool, int64 or float64, null where a label has no such
                          attribute; the file is absent if no label has any

In memory a column is an array of values and one of what is there; strings are numbers of the distinct ones, so that a
condition compares 10^6 labels in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from xmcray.config import unknown
from xmcray.errors import ConfigError
from xmcray.types import Int64Array

FILE = "attributes.parquet"
MAX_NAMES = 128  # of a bundle: each costs every label some bytes
MAX_NAME = 100  # characters

Scalar = str | bool | int | float
BoolArray = npt.NDArray[np.bool_]

_TYPES: Mapping[str, tuple[pa.DataType, npt.DTypeLike]] = {
    "string": (pa.large_string(), np.int32),  # in memory numbers of words
    "bool": (pa.bool_(), np.bool_),
    "int64": (pa.int64(), np.int64),
    "float64": (pa.float64(), np.float64),
}
_NO_WORDS = pa.array([], pa.large_string())
_EXACT = 1 << 53  # integers up to here are float64 values
_INT64 = 1 << 63
# of integers, a bound between two of them is moved to the one that says the same
_BOUNDS = (
    ("gt", np.greater, math.floor),
    ("gte", np.greater_equal, math.ceil),
    ("lt", np.less, math.ceil),
    ("lte", np.less_equal, math.floor),
)


@runtime_checkable
class Bounds(Protocol):
    """Values of a number: every bound that is not None holds."""

    gt: float | None
    gte: float | None
    lt: float | None
    lte: float | None


Condition = Scalar | Sequence[Scalar] | Bounds


@dataclass(frozen=True, slots=True)
class _Column:
    """One attribute of all labels; `values` are numbers of `words` where kind is "string"."""

    kind: str
    values: npt.NDArray[Any]
    there: BoolArray
    words: pa.Array


class LabelAttributes:
    """The attributes of all labels of a bundle; never changes.

    Attributes:
        num_labels: L, also of labels removed since.
        names: of the attributes that a label has or had, sorted.
    """

    def __init__(self, num_labels: int, columns: Mapping[str, _Column] | None = None) -> None:
        """Of labels that have none; `load` and `with_rows` make others."""
        self.num_labels, self._columns = num_labels, dict(columns or {})
        self.names = tuple(sorted(self._columns))

    @classmethod
    def load(cls, path: Path) -> LabelAttributes:
        """Reads attributes.parquet.

        Raises:
            OSError, ValueError, pa.ArrowException: it is malformed.
        """
        table = pq.read_table(path).combine_chunks()
        if len(set(table.column_names)) < table.num_columns or len(table.column_names) > MAX_NAMES:
            raise ValueError("a name occurs twice, or there are too many")
        return cls(table.num_rows, {name: _from_arrow(table[name]) for name in table.column_names})

    def save(self, folder: Path) -> set[str]:
        """Writes the file into a bundle's folder, if any label has an attribute; returns the names of what it wrote."""
        if not self.names:
            return set()
        table = pa.table({name: _to_arrow(self._columns[name]) for name in self.names})
        pq.write_table(table, folder / FILE, compression="zstd")
        return {FILE}

    def of(self, label_ids: Int64Array | Sequence[int]) -> list[dict[str, Scalar]]:
        """The attributes of each of some labels, by source id."""
        ids = np.asarray(label_ids, np.int64)
        found: list[dict[str, Scalar]] = [{} for _ in ids]
        for name in self.names:
            column = self._columns[name]
            for place in np.flatnonzero(column.there[ids]):
                value = column.values[ids[place]].item()
                found[place][name] = (
                    column.words[value].as_py() if column.kind == "string" else value
                )
        return found

    def mask(self, conditions: Mapping[str, Condition]) -> BoolArray:
        """bool [L]: which labels fulfil all conditions; a label without an attribute fulfils none about it.

        Args:
            conditions: by name a value, several of which one is to be met, or bounds of a number.
        Raises:
            ConfigError: no label has such an attribute (the nearest is named), or it is of another type.
        """
        mask = np.ones(self.num_labels, bool)
        for name, wanted in conditions.items():
            if name not in self._columns:
                if not self.names:
                    raise ConfigError(
                        f"unknown attribute {name!r}; no label of this bundle has any"
                    )
                raise ConfigError(unknown("attribute", name, self.names))
            mask &= _meets(name, self._columns[name], wanted)
        return mask

    def with_rows(
        self, num_labels: int, rows: Mapping[int, Mapping[str, Scalar]]
    ) -> LabelAttributes:
        """The attributes of `num_labels` labels, some with another set; what is not given stays, new ones have none.

        Args:
            num_labels: at least as many as now.
            rows: by source id the whole set of a label, in place of the one before.
        Raises:
            ConfigError: a set is malformed, a value has another type than the same attribute of other labels, or there
                are too many attributes.
        """
        assert num_labels >= self.num_labels
        if not rows and num_labels == self.num_labels:
            return self
        sets = [attribute_set(row) for row in rows.values()]
        names = sorted({*self.names, *(name for row in sets for name in row)})
        if len(names) > MAX_NAMES:
            raise ConfigError(
                f"labels would have {len(names)} different attributes, expected at most {MAX_NAMES}"
            )
        ids = np.fromiter(rows, np.int64, len(rows))
        assert not len(ids) or 0 <= ids.min() <= ids.max() < num_labels
        columns = {}
        for name in names:
            given = {label: row[name] for label, row in zip(rows, sets, strict=True) if name in row}
            columns[name] = _changed(name, self._columns.get(name), num_labels, ids, given)
        return LabelAttributes(num_labels, columns)


def attribute_set(value: object) -> dict[str, Scalar]:
    """The attributes of one label as they come from outside.

    Raises:
        ConfigError: it is not a mapping from names to strings, booleans and finite numbers.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"attributes are {str(value)[:80]!r}, expected an object of names and values"
        )
    for name, item in value.items():
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
            raise ConfigError(
                f"attribute {str(name)[:80]!r} has no name of 1 to {MAX_NAME} characters"
            )
        if isinstance(item, float) and not math.isfinite(item):
            raise ConfigError(f"attribute {name!r} is {item}, expected a finite number")
        if isinstance(item, int) and not -_INT64 <= item < _INT64:
            raise ConfigError(
                f"attribute {name!r} is an integer of {item.bit_length()} bits, expected at most 63"
            )
        if not isinstance(item, str | bool | int | float):
            raise ConfigError(
                f"attribute {name!r} is {str(item)[:80]!r}, expected a string, true, false or a number"
            )
        if not all(_is_text(part) for part in (name, item) if isinstance(part, str)):
            raise ConfigError(f"attribute {name!a} is not UTF-8 (a lone surrogate); write it anew")
    return dict(value)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _changed(
    name: str, column: _Column | None, num_labels: int, ids: Int64Array, given: Mapping[int, Scalar]
) -> _Column:
    """A longer column, in which the labels `ids` have what is given and nothing else."""
    kind = _common_kind(name, column, given.values())
    values, there = np.zeros(num_labels, _TYPES[kind][1]), np.zeros(num_labels, bool)
    words = _NO_WORDS
    if column is not None:
        values[: len(column.values)], there[: len(column.there)], words = (
            column.values,
            column.there,
            column.words,
        )
    there[ids] = False
    if given:
        at, new = list(given), list(given.values())
        if kind == "string":
            words, values[at] = _numbered(words, new)
        else:
            values[at] = new
        there[at] = True
    return _Column(kind, values, there, words)


def _common_kind(name: str, column: _Column | None, given: Any) -> str:
    """The type that holds the values there are and those that come: integers become floats where both meet."""
    kind = None if column is None else column.kind
    for value in given:
        more = _kind(value)
        if kind in (None, more):
            kind = more
        elif {kind, more} == {"int64", "float64"}:
            kind = "float64"
        else:
            raise ConfigError(
                f"attribute {name!r} of other labels is of type {kind}, found {value!r}: give it one type"
            )
    assert kind is not None
    if kind == "float64":
        held = (
            column.values[column.there]
            if column is not None and column.kind == "int64"
            else np.empty(0)
        )
        for value in [*given, *(held[np.abs(held) > _EXACT][:1].tolist())]:
            if isinstance(value, int) and abs(value) > _EXACT:
                raise ConfigError(
                    f"attribute {name!r} has fractions and {value}, which is no float: give it one type"
                )
    return kind


def _kind(value: Scalar) -> str:
    if isinstance(value, bool):
        return "bool"
    return "string" if isinstance(value, str) else "int64" if isinstance(value, int) else "float64"


def _numbered(words: pa.Array, new: list[Any]) -> tuple[pa.Array, npt.NDArray[np.int32]]:
    """The words and those of `new`, and the numbers of these; one may come twice, as to look for it costs more."""
    told = pa.array(new, pa.large_string()).dictionary_encode()
    return pa.concat_arrays([words, told.dictionary]), told.indices.to_numpy() + np.int32(
        len(words)
    )


def _meets(name: str, column: _Column, wanted: Condition) -> BoolArray:
    """bool [L] of one condition."""
    if isinstance(wanted, Bounds):
        return _within(name, column, wanted)
    choice: list[Any] = (
        list(wanted) if isinstance(wanted, list | tuple | set | frozenset) else [wanted]
    )
    for value in choice:
        expected = {"int64", "float64"} if column.kind in ("int64", "float64") else {column.kind}
        if not isinstance(value, str | bool | int | float) or _kind(value) not in expected:
            raise ConfigError(
                f"attribute {name!r} is of type {column.kind}, found {value!r}: compare it with that type"
            )
    if column.kind == "string":
        chosen = pc.is_in(column.words, value_set=pa.array(choice, pa.large_string())).to_numpy(
            zero_copy_only=False
        )
        met = chosen[column.values] if len(chosen) else np.zeros(len(column.values), bool)
    else:
        same = [number for value in choice if (number := _number(column.kind, value)) is not None]
        found = np.array(same, column.values.dtype)
        met = column.values == found if len(found) == 1 else np.isin(column.values, found)
    return np.asarray(met & column.there, bool)


def _within(name: str, column: _Column, bounds: Bounds) -> BoolArray:
    if column.kind not in ("int64", "float64"):
        raise ConfigError(
            f"attribute {name!r} is of type {column.kind}, and a range of numbers was asked for"
        )
    met = column.there.copy()
    for bound, compare, to_integer in _BOUNDS:
        limit = getattr(bounds, bound)
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, int | float) or limit != limit:
            raise ConfigError(
                f"bound {bound!r} of attribute {name!r} is {limit!r}, expected a number"
            )
        if column.kind == "int64":
            limit = limit if isinstance(limit, int) or math.isinf(limit) else to_integer(limit)
        elif (limit := _number("float64", limit)) is None:  # beyond all floats
            limit = math.inf if getattr(bounds, bound) > 0 else -math.inf
        met &= compare(column.values, limit)
    return met


def _number(kind: str, value: Any) -> float | None:
    """The value of that type which equals another one; None if there is none."""
    if kind == "int64":
        same = int(value) if isinstance(value, int) or value.is_integer() else _INT64
        return same if -_INT64 <= same < _INT64 else None
    try:
        return float(value)
    except OverflowError:
        return None


def _from_arrow(column: pa.ChunkedArray) -> _Column:
    array = column.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    if pa.types.is_string(array.type):
        array = array.cast(pa.large_string())
    kind = next((kind for kind, (arrow, _) in _TYPES.items() if array.type == arrow), None)
    if kind is None:
        raise ValueError(f"a column of type {array.type}")
    there = array.is_valid().to_numpy(zero_copy_only=False)
    words, held = _NO_WORDS, array
    if kind == "string":
        encoded = array.dictionary_encode()
        words, held = encoded.dictionary, encoded.indices
    blank = pa.scalar(False if kind == "bool" else 0, held.type)
    values = held.fill_null(blank).to_numpy(zero_copy_only=False).astype(_TYPES[kind][1])
    if kind == "float64" and not np.isfinite(values).all():
        raise ValueError("not a number")
    return _Column(kind, values, there, words)


def _to_arrow(column: _Column) -> pa.Array:
    if column.kind == "string":
        return column.words.take(pa.array(column.values, mask=~column.there))
    return pa.array(column.values, _TYPES[column.kind][0], mask=~column.there)
