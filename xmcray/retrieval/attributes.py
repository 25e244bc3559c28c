"""Attributes of labels, by which answers are filtered: a price, a language, a category.

    attributes.parquet    rows by source id; columns of string, bool, int64 or float64, null where a
                          label lacks the attribute; the file is absent if no label has any

In memory a column is an Arrow array. Columns of strings are dictionary-encoded. A condition compares
each distinct string only once, which takes milliseconds for 10^6 labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from xmcray.config import unknown
from xmcray.errors import ConfigError
from xmcray.types import BoolArray, Int64Array

FILE = "attributes.parquet"
MAX_NAMES = 128  # names in a bundle, because each costs every label some bytes
MAX_NAME = 100  # characters

Scalar = str | bool | int | float

# The type of a column in memory, by the name of the type in messages.
_TYPES = {
    "string": pa.dictionary(pa.int32(), pa.large_string()),
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "float64": pa.float64(),
}
# The other way round: the name of the type of a column.
_KINDS = {arrow_type: kind for kind, arrow_type in _TYPES.items()}
_NUMBERS = ("int64", "float64")
_EXACT = 1 << 53  # float64 represents all integers up to this one exactly
_INT64 = 1 << 63
# Name, comparison and rounding of each bound. Bounds of integers are rounded so that the same integers are
# within: x > 1.5 is x > 1, and x >= 1.5 is x >= 2.
_BOUNDS = (
    ("gt", np.greater, math.floor),
    ("gte", np.greater_equal, math.ceil),
    ("lt", np.less, math.ceil),
    ("lte", np.less_equal, math.floor),
)


@runtime_checkable
class Bounds(Protocol):
    """A range of numbers. A bound that is None does not restrict it."""

    gt: float | None
    gte: float | None
    lt: float | None
    lte: float | None


Condition = Scalar | Sequence[Scalar] | Bounds


class LabelAttributes:
    """The attributes of all labels of a bundle. Immutable.

    Without columns no label has an attribute. `load` and `with_rows` make other objects.

    Args:
        num_labels: L, also of labels removed since.
        columns: by name one value per label, null where the label lacks the attribute.

    Attributes:
        num_labels: L.
        names: names of the attributes that a label has, sorted.
    """

    def __init__(self, num_labels: int, columns: Mapping[str, pa.Array] | None = None) -> None:
        self.num_labels = num_labels
        self._columns = dict(sorted((columns or {}).items()))
        self.names = tuple(self._columns)

    @classmethod
    def load(cls, path: Path) -> LabelAttributes:
        """Reads attributes.parquet.

        Raises:
            OSError, ValueError, pa.ArrowException: it is malformed.
        """
        table = pq.read_table(path)
        names = table.column_names
        if len(set(names)) < len(names) or len(names) > MAX_NAMES:
            raise ValueError("a name occurs twice, or there are too many")
        return cls(table.num_rows, {name: _checked(table[name]) for name in names})

    def save(self, folder: Path) -> set[str]:
        """Writes the file into a bundle's folder, if any label has an attribute.

        Returns:
            Its name, even if it was not written: a file of that name is one of an earlier bundle, whose
            attributes are outdated.
        """
        if not self.names:
            return {FILE}
        plain_columns = {}
        for name, column in self._columns.items():
            is_string = isinstance(column, pa.DictionaryArray)
            plain_columns[name] = column.dictionary_decode() if is_string else column
        pq.write_table(pa.table(plain_columns), folder / FILE, compression="zstd")
        return {FILE}

    def of(self, label_ids: Int64Array | Sequence[int]) -> list[dict[str, Scalar]]:
        """The attributes of each of some labels, by source id."""
        ids = pa.array(np.asarray(label_ids, np.int64))
        sets: list[dict[str, Scalar]] = [{} for _ in ids]
        for name, column in self._columns.items():
            values = column.take(ids).to_pylist()
            for attributes, value in zip(sets, values, strict=True):
                if value is not None:
                    attributes[name] = value
        return sets

    def mask(self, conditions: Mapping[str, Condition]) -> BoolArray:
        """The labels that meet all conditions. A label that lacks an attribute meets no condition on it.

        Args:
            conditions: by attribute a value, several values of which one must match, or bounds of a
                number.
        Returns:
            bool [L].
        Raises:
            ConfigError: no label has such an attribute (the nearest name is given), or the attribute is
                of another type.
        """
        mask = np.ones(self.num_labels, bool)
        for name, condition in conditions.items():
            if not self.names:
                raise ConfigError(f"unknown attribute {name!r}; no label of this bundle has any")
            if name not in self._columns:
                raise ConfigError(unknown("attribute", name, self.names))
            column = self._columns[name]
            mask &= column.is_valid().to_numpy(zero_copy_only=False)
            if isinstance(condition, Bounds):
                mask &= _within(name, column, condition)
            else:
                mask &= _is_one_of(name, column, condition)
        return mask

    def with_rows(
        self,
        num_labels: int,
        rows: Mapping[int, Mapping[str, Scalar]],
        widened: Container[str] = (),
    ) -> LabelAttributes:
        """A copy in which some labels have other attributes; labels that are not given keep theirs.

        Args:
            num_labels: at least as many as now; new labels have no attributes.
            rows: by source id all attributes of a label, in place of those before.
            widened: names of attributes whose integers become floats in any case (`ColumnTypes`).
        Raises:
            ConfigError: a set is malformed, a value has another type than the same attribute of
                labels that keep theirs, or there are too many attributes.
        """
        assert num_labels >= self.num_labels
        if not rows and num_labels == self.num_labels:
            return self
        replaced_ids = pa.array([label for label in rows if label < self.num_labels], pa.int64())
        kept_columns = {}
        for name, column in self._columns.items():
            kept = _column_without(column, replaced_ids)
            # An attribute that no kept label has is dropped; the new values choose its type.
            if kept.null_count < len(kept):
                kept_columns[name] = kept
        names = set(kept_columns)
        for row in rows.values():
            names.update(checked_attributes(row))
        if len(names) > MAX_NAMES:
            raise ConfigError(
                f"labels would have {len(names)} different attributes, expected at most {MAX_NAMES}"
            )
        # A column is made of its old values, followed by the new ones. `place_L` says where the value of
        # each label is in this sequence. The place -1 of a new label without attributes becomes null.
        place_L = np.full(num_labels, -1)
        place_L[: self.num_labels] = np.arange(self.num_labels)
        place_L[list(rows)] = self.num_labels + np.arange(len(rows))
        places = pa.array(place_L, mask=place_L < 0)
        columns = {}
        for name in names:
            old = kept_columns.get(name)
            new = [row.get(name) for row in rows.values()]
            arrow_type = _TYPES[_common_kind(name, old, new, name in widened)]
            if old is None:
                old = pa.nulls(self.num_labels, arrow_type)
            # `_common_kind` has refused integers that float64 cannot represent.
            old = old.cast(arrow_type, safe=False)
            old_and_new = pa.concat_arrays([old, pa.array(new, arrow_type)])
            columns[name] = old_and_new.take(places)
        return LabelAttributes(num_labels, columns)

    def without(self, label_ids: Int64Array) -> LabelAttributes:
        """A copy in which some labels have no attributes."""
        empty_rows: dict[int, dict[str, Scalar]] = {label_id: {} for label_id in label_ids.tolist()}
        return self.with_rows(self.num_labels, empty_rows)


class ColumnTypes:
    """The types of attributes while changes of labels are applied one after the other.

    An attribute that had integers and fractions is float64, and stays so as long as a label has it.
    `LabelAttributes.with_rows` for all changes at once does not see values that were removed since.

    Args:
        attributes: those before the first change.
    """

    def __init__(self, attributes: LabelAttributes) -> None:
        self._attributes = attributes
        self._kinds: dict[str, str] = {}
        self._num_labels: dict[str, int] = {}  # that have an attribute, by its name
        for name, column in attributes._columns.items():
            self._kinds[name] = _KINDS[column.type]
            self._num_labels[name] = len(column) - column.null_count
        self._names: dict[int, Collection[str]] = {}  # attributes of labels that have changed

    @property
    def widened(self) -> set[str]:
        """Names of the attributes that are float64."""
        return {name for name, kind in self._kinds.items() if kind == "float64"}

    def apply(self, rows: Mapping[int, Mapping[str, Scalar]]) -> None:
        """Applies a change.

        Args:
            rows: as of `LabelAttributes.with_rows`, which has accepted them.
        """
        for label_id in rows:
            for name in self._names_of(label_id):
                self._num_labels[name] -= 1
                if not self._num_labels[name]:
                    del self._kinds[name]
        for label_id, row in rows.items():
            self._names[label_id] = tuple(row)
            for name, value in row.items():
                self._num_labels[name] = self._num_labels.get(name, 0) + 1
                kind = _kind(value)
                # Other types than these of numbers were refused.
                self._kinds[name] = kind if self._kinds.get(name, kind) == kind else "float64"

    def _names_of(self, label_id: int) -> Collection[str]:
        if label_id in self._names:
            return self._names[label_id]
        if label_id >= self._attributes.num_labels:
            return ()
        return self._attributes.of([label_id])[0]


def _column_without(column: pa.Array, label_ids: pa.Array) -> pa.Array:
    """A column in which some labels lack the attribute."""
    values = column.take(label_ids)
    # Mostly they lack it already, and the column need not be copied.
    if values.null_count == len(values):
        return column
    is_removed = np.zeros(len(column), bool)
    is_removed[label_ids.to_numpy()] = True
    return column.take(pa.array(np.arange(len(column)), mask=is_removed))


def checked_attributes(value: object) -> dict[str, Scalar]:
    """Checks the attributes of one label from an untrusted source.

    Raises:
        ConfigError: `value` is not a mapping from names to strings, booleans and finite numbers.
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


def _common_kind(
    name: str, column: pa.Array | None, new: Sequence[Scalar | None], is_widened: bool
) -> str:
    """The type that can hold the old values of an attribute and the new ones.

    If both integers and floats occur, the integers become floats; so they do if `is_widened`.

    Raises:
        ConfigError: there is no such type.
    """
    kind = None if column is None else _KINDS[column.type]
    new_values = [value for value in new if value is not None]
    for value in new_values:
        new_kind = _kind(value)
        if kind is None:
            kind = new_kind
        elif {kind, new_kind} == set(_NUMBERS):
            kind = "float64"
        elif kind != new_kind:
            raise ConfigError(
                f"attribute {name!r} of other labels is of type {kind}, found {value!r}: give it one type"
            )
    assert kind is not None
    if kind == "int64" and is_widened:
        kind = "float64"
    if kind == "float64":
        _check_exact(name, column, new_values)
    return kind


def _check_exact(name: str, column: pa.Array | None, new_values: Sequence[Scalar]) -> None:
    """Raises ConfigError if float64 cannot represent an integer of an attribute."""
    integers = [value for value in new_values if isinstance(value, int)]
    if column is not None and column.type == pa.int64():
        integers += column.drop_null().to_pylist()
    for value in integers:
        if abs(value) > _EXACT:
            raise ConfigError(
                f"attribute {name!r} has fractions and the integer {value}, which is no float64:"
                " give it one type"
            )


def _kind(value: Scalar) -> str:
    # A boolean is an integer to Python, so it is tested first.
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, str):
        return "string"
    return "int64" if isinstance(value, int) else "float64"


def _is_one_of(name: str, column: pa.Array, condition: Any) -> BoolArray:
    """bool [L], the labels whose value equals the condition, or one of the values that it lists."""
    is_list = isinstance(condition, list | tuple | set | frozenset)
    wanted = list(condition) if is_list else [condition]
    kind = _KINDS[column.type]
    kinds = _NUMBERS if kind in _NUMBERS else (kind,)
    for value in wanted:
        if not isinstance(value, str | bool | int | float) or _kind(value) not in kinds:
            raise ConfigError(
                f"attribute {name!r} is of type {kind}, found {value!r}: compare it with that type"
            )
    if kind in _NUMBERS:
        wanted_numbers = []
        for value in wanted:
            number = _as_kind(kind, value)
            # A value that the type cannot represent, such as 1999.5 for integers, matches no label.
            if number is not None:
                wanted_numbers.append(number)
        values = _values(column)
        return np.isin(values, np.array(wanted_numbers, values.dtype))
    if kind == "bool":
        is_wanted = pc.is_in(column, value_set=pa.array(wanted, column.type))
    else:
        # Each distinct string is compared once. Each label then looks up the result of its string.
        strings = pa.array(wanted, pa.large_string())
        is_wanted_string = pc.is_in(column.dictionary, value_set=strings)
        is_wanted = is_wanted_string.take(column.indices)
    # A label that lacks the attribute is null and matches no value.
    mask = is_wanted.fill_null(False).to_numpy(zero_copy_only=False)
    return np.asarray(mask, bool)


def _within(name: str, column: pa.Array, bounds: Bounds) -> BoolArray:
    """bool [L], the labels whose number is within all bounds."""
    kind = _KINDS[column.type]
    if kind not in _NUMBERS:
        raise ConfigError(
            f"attribute {name!r} is of type {kind}, expected a number for a range;"
            " compare it with a value"
        )
    values = _values(column)
    mask = np.ones(len(values), bool)
    for bound, compare, to_integer in _BOUNDS:
        limit = getattr(bounds, bound)
        if limit is None:
            continue
        # A boolean is an integer to Python.
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        is_nan = limit != limit
        if not is_number or is_nan:
            raise ConfigError(
                f"bound {bound!r} of attribute {name!r} is {limit!r}, expected a number"
            )
        if kind == "float64":
            limit = _float_bound(limit, to_integer)
        elif isinstance(limit, float) and not math.isinf(limit):
            limit = to_integer(limit)
        mask &= compare(values, limit)
    return mask


def _float_bound(limit: float, to_integer: Callable[[float], int]) -> float:
    """A bound as a float that has the same floats within.

    Args:
        limit: a large integer may lie between two floats, or beyond all of them.
        to_integer: how the bound is rounded.
    """
    try:
        nearest = float(limit)
    except OverflowError:
        return math.inf if limit > 0 else -math.inf
    if to_integer is math.ceil and nearest < limit:
        return math.nextafter(nearest, math.inf)
    if to_integer is math.floor and nearest > limit:
        return math.nextafter(nearest, -math.inf)
    return nearest


def _values(column: pa.Array) -> npt.NDArray[Any]:
    """The numbers of all labels, 0 where a label lacks the attribute."""
    return np.asarray(column.fill_null(0).to_numpy())


def _as_kind(kind: str, value: Any) -> float | None:
    """The number of a type that equals `value`; None if the type cannot represent it."""
    if kind == "float64":
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if number == value else None
    if kind == "int64" and isinstance(value, float):
        if not value.is_integer():
            return None
        value = int(value)
    return value if -_INT64 <= value < _INT64 else None


def _checked(column: pa.ChunkedArray) -> pa.Array:
    """A column of the file, converted to its type in memory.

    Raises:
        ValueError: the column has a type that attributes do not have, or a number that is not finite.
    """
    array = column.combine_chunks()
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array = array.cast(pa.large_string()).dictionary_encode()
    if array.type not in _KINDS:
        raise ValueError(f"a column of type {array.type}")
    if array.type == pa.float64() and not np.isfinite(_values(array)).all():
        raise ValueError("not a number")
    return array
