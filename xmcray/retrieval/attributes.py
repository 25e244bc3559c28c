"""Attributes of labels, by which answers are filtered: a price, a language, a category.

    attributes.parquet    rows by source id; columns of string, bool, int64 or float64, null where a
                          label lacks the attribute; the file is absent if no label has any

In memory a column is an array of values and one that says which labels have the attribute. Strings
are numbers of the distinct ones, so that a condition compares 10^6 labels in milliseconds.
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
    "string": (pa.large_string(), np.int32),  # in memory numbers of distinct strings
    "bool": (pa.bool_(), np.bool_),
    "int64": (pa.int64(), np.int64),
    "float64": (pa.float64(), np.float64),
}
_NO_STRINGS = pa.array([], pa.large_string())
_NUMBERS = ("int64", "float64")
_EXACT = 1 << 53  # integers up to here are float64 values
_INT64 = 1 << 63
# Name of a bound, how values compare with it, and how a bound between two integers becomes the
# integer that means the same.
_BOUNDS = (
    ("gt", np.greater, math.floor),
    ("gte", np.greater_equal, math.ceil),
    ("lt", np.less, math.ceil),
    ("lte", np.less_equal, math.floor),
)


@runtime_checkable
class Bounds(Protocol):
    """A range of numbers: every bound that is not None holds."""

    gt: float | None
    gte: float | None
    lt: float | None
    lte: float | None


Condition = Scalar | Sequence[Scalar] | Bounds


@dataclass(frozen=True, slots=True)
class _Column:
    """One attribute of all labels.

    Attributes:
        kind: a key of _TYPES.
        values: of each label; places in `strings` if kind is "string".
        present: bool [L], which labels have the attribute.
        strings: the strings that labels have; a string may occur twice.
    """

    kind: str
    values: npt.NDArray[Any]
    present: BoolArray
    strings: pa.Array

    @property
    def is_number(self) -> bool:
        return self.kind in _NUMBERS


class LabelAttributes:
    """The attributes of all labels of a bundle; never changes.

    `load` and `with_rows` make others than that of labels without attributes.

    Attributes:
        num_labels: L, also of labels removed since.
        names: of the attributes that a label has or had, sorted.
    """

    def __init__(self, num_labels: int, columns: Mapping[str, _Column] | None = None) -> None:
        self.num_labels = num_labels
        self._columns = dict(columns or {})
        self.names = tuple(sorted(self._columns))

    @classmethod
    def load(cls, path: Path) -> LabelAttributes:
        """Reads attributes.parquet.

        Raises:
            OSError, ValueError, pa.ArrowException: it is malformed.
        """
        table = pq.read_table(path).combine_chunks()
        names = table.column_names
        if len(set(names)) < len(names) or len(names) > MAX_NAMES:
            raise ValueError("a name occurs twice, or there are too many")
        return cls(table.num_rows, {name: _from_arrow(table[name]) for name in names})

    def save(self, folder: Path) -> set[str]:
        """Writes the file into a bundle's folder, if any label has an attribute.

        Returns:
            The names of the files written.
        """
        if not self.names:
            return set()
        table = pa.table({name: _to_arrow(self._columns[name]) for name in self.names})
        pq.write_table(table, folder / FILE, compression="zstd")
        return {FILE}

    def of(self, label_ids: Int64Array | Sequence[int]) -> list[dict[str, Scalar]]:
        """The attributes of each of some labels, by source id."""
        ids = np.asarray(label_ids, np.int64)
        sets: list[dict[str, Scalar]] = [{} for _ in ids]
        for name in self.names:
            column = self._columns[name]
            for place in np.flatnonzero(column.present[ids]):
                value = column.values[ids[place]].item()
                if column.kind == "string":
                    value = column.strings[value].as_py()
                sets[place][name] = value
        return sets

    def mask(self, conditions: Mapping[str, Condition]) -> BoolArray:
        """Which labels meet all conditions; a label without an attribute meets none about it.

        Args:
            conditions: by attribute a value, several values of which one has to match, or bounds of
                a number.
        Returns:
            bool [L].
        Raises:
            ConfigError: no label has such an attribute (the nearest is named), or it is of another
                type.
        """
        mask = np.ones(self.num_labels, bool)
        for name, condition in conditions.items():
            if not self.names:
                raise ConfigError(f"unknown attribute {name!r}; no label of this bundle has any")
            if name not in self._columns:
                raise ConfigError(unknown("attribute", name, self.names))
            column = self._columns[name]
            if isinstance(condition, Bounds):
                mask &= _within(name, column, condition)
            else:
                mask &= _is_one_of(name, column, condition)
        return mask

    def with_rows(
        self, num_labels: int, rows: Mapping[int, Mapping[str, Scalar]]
    ) -> LabelAttributes:
        """A copy in which some labels have other attributes; labels that are not given keep theirs.

        Args:
            num_labels: at least as many as now; new labels have no attributes.
            rows: by source id all attributes of a label, in place of those before.
        Raises:
            ConfigError: a set is malformed, a value has another type than the same attribute of
                other labels, or there are too many attributes.
        """
        assert num_labels >= self.num_labels
        if not rows and num_labels == self.num_labels:
            return self
        names = set(self.names)
        for row in rows.values():
            names.update(attribute_set(row))
        if len(names) > MAX_NAMES:
            raise ConfigError(
                f"labels would have {len(names)} different attributes, expected at most {MAX_NAMES}"
            )
        ids = np.fromiter(rows, np.int64, len(rows))
        assert not len(ids) or 0 <= ids.min() <= ids.max() < num_labels
        columns = {}
        for name in sorted(names):
            given = {label_id: row[name] for label_id, row in rows.items() if name in row}
            columns[name] = _changed(name, self._columns.get(name), num_labels, ids, given)
        return LabelAttributes(num_labels, columns)


def attribute_set(value: object) -> dict[str, Scalar]:
    """Checks the attributes of one label as they come from outside.

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
        if not _is_utf8(name) or (isinstance(item, str) and not _is_utf8(item)):
            raise ConfigError(f"attribute {name!a} is not UTF-8 (a lone surrogate); write it anew")
    return dict(value)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _changed(
    name: str, column: _Column | None, num_labels: int, ids: Int64Array, given: Mapping[int, Scalar]
) -> _Column:
    """A column of `num_labels` labels, in which the labels `ids` have the given values only."""
    kind = _common_kind(name, column, list(given.values()))
    values = np.zeros(num_labels, _TYPES[kind][1])
    present = np.zeros(num_labels, bool)
    strings = _NO_STRINGS
    if column is not None:
        values[: len(column.values)] = column.values
        present[: len(column.present)] = column.present
        strings = column.strings
    # A label that gets new attributes loses those that are not among them.
    present[ids] = False
    if given:
        given_ids = list(given)
        given_values: Any = list(given.values())
        if kind == "string":
            # A string that other labels have already gets a second number, because looking for it
            # would cost more.
            encoded = pa.array(given_values, pa.large_string()).dictionary_encode()
            given_values = encoded.indices.to_numpy() + np.int32(len(strings))
            strings = pa.concat_arrays([strings, encoded.dictionary])
        values[given_ids] = given_values
        present[given_ids] = True
    return _Column(kind, values, present, strings)


def _common_kind(name: str, column: _Column | None, given: Sequence[Scalar]) -> str:
    """The type that can hold the present and the given values.

    Integers become floats if both occur.

    Raises:
        ConfigError: there is none.
    """
    kind = None if column is None else column.kind
    for value in given:
        given_kind = _kind(value)
        if kind is None:
            kind = given_kind
        elif {kind, given_kind} == set(_NUMBERS):
            kind = "float64"
        elif kind != given_kind:
            raise ConfigError(
                f"attribute {name!r} of other labels is of type {kind}, found {value!r}: give it one type"
            )
    assert kind is not None
    if kind == "float64":
        integers = [value for value in given if isinstance(value, int)]
        if column is not None and column.kind == "int64":
            held = column.values[column.present]
            integers += held[np.abs(held) > _EXACT][:1].tolist()
        for value in integers:
            if abs(value) > _EXACT:
                raise ConfigError(
                    f"attribute {name!r} has fractions and {value}, which is no float: give it one type"
                )
    return kind


def _kind(value: Scalar) -> str:
    # A boolean is an integer to Python, so it is tested first.
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, str):
        return "string"
    return "int64" if isinstance(value, int) else "float64"


def _is_one_of(name: str, column: _Column, condition: Scalar | Sequence[Scalar]) -> BoolArray:
    """bool [L], the labels whose value is the wanted one, or one of several."""
    several = isinstance(condition, list | tuple | set | frozenset)
    wanted: list[Any] = list(condition) if several else [condition]  # type: ignore[arg-type]
    kinds = _NUMBERS if column.is_number else (column.kind,)
    for value in wanted:
        if not isinstance(value, str | bool | int | float) or _kind(value) not in kinds:
            raise ConfigError(
                f"attribute {name!r} is of type {column.kind}, found {value!r}: compare it with that type"
            )
    if column.kind == "string":
        # Compare each distinct string once, then look the labels' numbers up.
        chosen = pc.is_in(column.strings, value_set=pa.array(wanted, pa.large_string()))
        chosen = chosen.to_numpy(zero_copy_only=False)
        if not len(chosen):
            return np.zeros(len(column.values), bool)
        return np.asarray(chosen[column.values] & column.present, bool)
    # A value that the type cannot hold, such as 1999.5 for integers, matches no label.
    numbers = []
    for value in wanted:
        number = _as_kind(column.kind, value)
        if number is not None:
            numbers.append(number)
    return np.isin(column.values, np.array(numbers, column.values.dtype)) & column.present


def _within(name: str, column: _Column, bounds: Bounds) -> BoolArray:
    """bool [L], the labels whose number is within all bounds."""
    if not column.is_number:
        raise ConfigError(
            f"attribute {name!r} is of type {column.kind}, expected a number for a range;"
            " compare it with a value"
        )
    mask = column.present.copy()
    for bound, compare, to_integer in _BOUNDS:
        limit = getattr(bounds, bound)
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, int | float) or limit != limit:
            raise ConfigError(
                f"bound {bound!r} of attribute {name!r} is {limit!r}, expected a number"
            )
        if column.kind == "float64":
            number = _as_kind("float64", limit)
            if number is None:  # beyond all floats
                number = math.inf if limit > 0 else -math.inf
            limit = number
        elif isinstance(limit, float) and not math.isinf(limit):
            limit = to_integer(limit)
        mask &= compare(column.values, limit)
    return mask


def _as_kind(kind: str, value: Any) -> float | None:
    """The number of a type that equals a value; None if there is none."""
    if kind == "float64":
        try:
            return float(value)
        except OverflowError:
            return None
    if kind == "int64" and isinstance(value, float):
        if not value.is_integer():
            return None
        value = int(value)
    return value if -_INT64 <= value < _INT64 else None


def _from_arrow(column: pa.ChunkedArray) -> _Column:
    """A column of the file.

    Raises:
        ValueError: it has another type, or a value that is no number.
    """
    array = column.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    if pa.types.is_string(array.type):
        array = array.cast(pa.large_string())
    kinds = [kind for kind, (arrow_type, _) in _TYPES.items() if array.type == arrow_type]
    if not kinds:
        raise ValueError(f"a column of type {array.type}")
    kind = kinds[0]
    present = array.is_valid().to_numpy(zero_copy_only=False)
    strings = _NO_STRINGS
    if kind == "string":
        encoded = array.dictionary_encode()
        strings = encoded.dictionary
        array = encoded.indices
    blank = pa.scalar(False if kind == "bool" else 0, array.type)
    values = array.fill_null(blank).to_numpy(zero_copy_only=False).astype(_TYPES[kind][1])
    if kind == "float64" and not np.isfinite(values).all():
        raise ValueError("not a number")
    return _Column(kind, values, present, strings)


def _to_arrow(column: _Column) -> pa.Array:
    missing = ~column.present
    if column.kind == "string":
        return column.strings.take(pa.array(column.values, mask=missing))
    return pa.array(column.values, _TYPES[column.kind][0], mask=missing)
