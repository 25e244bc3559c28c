"""Builds frozen dataclasses from YAML, with overrides by dotted name.

This module knows no particular section of a configuration.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import yaml

from xmcray.errors import ConfigError

T = TypeVar("T")
MAX_INT = 2**63 - 1
MAX_FLOAT = 1e30  # computing with more overflows float32


def build(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Builds a frozen dataclass from its defaults and the given values.

    A settings class lists the former names of its fields in a class attribute `RENAMED`: old name
    -> new name. Fields that moved to another section are in `MOVED`: old name -> new dotted name.

    Args:
        values: values by field name; the value of a section is a mapping.
        where: prefix of names in messages, such as "optim.".
    Raises:
        ConfigError: a key is unknown (the nearest name is given) or missing, or a value has another
            type.
    """
    # `from __future__ import annotations` makes annotations strings. This resolves them to types.
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(cast(Any, kind))}
    new_names = _new_names(kind, where)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{where}{key}"
        if key in new_names:
            raise ConfigError(f"setting {name!r} is now called {new_names[key]!r}; rename it")
        if key not in fields:
            choices = [where + field_name for field_name in fields]
            raise ConfigError(unknown("setting", name, choices))
        if isinstance(value, Mapping):
            value = _over_default(fields[key], value)
        arguments[key] = _convert(hints[key], value, name)
    for name, field in fields.items():
        if name not in arguments and not _has_default(field):
            raise ConfigError(f"setting {where + name!r} is required and was not given")
    return kind(**arguments)


def _new_names(kind: type[Any], where: str) -> dict[str, str]:
    """The dotted names of renamed and moved fields, by their former names in this section."""
    new_names = {}
    for old_name, new_name in getattr(kind, "RENAMED", {}).items():
        # A renamed field stays in its section. A moved one has a full dotted name.
        new_names[old_name] = f"{where}{new_name}"
    new_names.update(getattr(kind, "MOVED", {}))
    return new_names


def _has_default(field: dataclasses.Field[Any]) -> bool:
    """Whether a field may be left out: it has a default, or a factory if it is a section."""
    has_value = field.default is not dataclasses.MISSING
    has_factory = field.default_factory is not dataclasses.MISSING
    return has_value or has_factory


def _over_default(field: dataclasses.Field[Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The given values of a section over the values that its field has by default."""
    if field.default_factory is dataclasses.MISSING:
        return values
    default = field.default_factory()
    if not dataclasses.is_dataclass(default):
        return values
    return {**dump(default), **values}


def merge(base: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Applies overrides such as "optim.epochs=3" to a copy of `base`; values are read as YAML.

    Raises:
        ConfigError: an override without "=", or a section where a value was expected.
    """
    merged = copy.deepcopy(dict(base))
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name:
            raise ConfigError(f"override {override!r} is not of the form section.name=value")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, TypeError, RecursionError):
            raise ConfigError(f"override {override!r}: {text!r} is not a YAML value") from None
        try:
            put(merged, name, value)
        except ConfigError as error:
            raise ConfigError(f"override {override!r}: {error}") from None
    return merged


def put(settings: dict[str, Any], name: str, value: Any) -> None:
    """Sets a value by its dotted name. Missing sections are created.

    Raises:
        ConfigError: a part of the name is a value.
    """
    section = settings
    *path, last = name.split(".")
    for part in path:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{part!r} is a value, not a section")
    section[last] = value


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `top` in place of its own, section by section.

    Raises:
        ConfigError: `base` has a value where `top` has a section.
    """
    merged = copy.deepcopy(dict(base))
    for key, value in top.items():
        # A section is merged into that of `base`. Any other value replaces what is there.
        if not isinstance(value, Mapping):
            merged[key] = value
            continue
        section = merged.get(key)
        if section is None:
            section = {}
        if not isinstance(section, dict):
            raise ConfigError(f"{key!r} is a value, not a section")
        merged[key] = overlay(section, value)
    return merged


def dump(config: Any) -> dict[str, Any]:
    """Turns a dataclass into plain YAML values, from which `build` makes an equal object."""
    return cast(dict[str, Any], _plain(dataclasses.asdict(config)))


def _plain(value: Any) -> Any:
    """`value` with lists in place of tuples, which YAML does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def unknown(what: str, name: str, choices: Sequence[str]) -> str:
    """The message for a name that is not among `choices`. It says the nearest one, or else all."""
    nearest = difflib.get_close_matches(name, choices, n=1)
    if nearest:
        return f"unknown {what} {name!r}; did you mean {nearest[0]!r}?"
    return f"unknown {what} {name!r}; known: {', '.join(choices)}"


def check_range(
    name: str,
    value: float,
    low: float,
    high: float | None = None,
) -> None:
    """Raises ConfigError unless low <= value <= high; NaN and infinity are in no range.

    If `high` is not given, a float may be as large as MAX_FLOAT.
    """
    # Twelve digits, because the default of `g` would print 1048576 as 1.04858e+06.
    expected = f"at least {low:.12g}"
    # Comparisons with NaN are false, so it is outside of every range.
    is_inside = low <= value < math.inf
    if high is not None:
        is_inside = is_inside and value <= high
        expected += f" and at most {high:.12g}"
    elif value == math.inf:
        expected += " and finite"
    elif isinstance(value, float) and value > MAX_FLOAT:
        is_inside = False
        expected += f" and at most {MAX_FLOAT:g}"
    if not is_inside:
        raise ConfigError(f"{name} is {value}, expected {expected}")


def check_ranges(
    settings: Any,
    section: str = "",
    /,
    **bounds: float | tuple[float, float],
) -> None:
    """Raises ConfigError unless each of some fields lies within its bounds.

    Args:
        settings: an instance of a settings class.
        section: dotted name of the section, for messages; "" leaves it out.
        bounds: by name of the field, the lowest value, or the lowest and the highest value.
    """
    prefix = f"{section}." if section else ""
    for name, bound in bounds.items():
        value = getattr(settings, name)
        if isinstance(bound, tuple):
            low, high = bound
            check_range(f"{prefix}{name}", value, low, high)
        else:
            check_range(f"{prefix}{name}", value, low=bound)


def check_decay(rate_name: str, lr: float, decay_name: str, weight_decay: float) -> None:
    """Raises ConfigError unless decoupled weight decay leaves a positive share of a parameter.

    A step multiplies parameters by 1 - lr * weight_decay, which must stay above 0.
    """
    if lr * weight_decay >= 1:
        raise ConfigError(
            f"{rate_name} * {decay_name} is {lr:g} * {weight_decay:g}, expected less than 1, because"
            " a step multiplies parameters by 1 minus that; lower one of them"
        )


def check_choices(settings: Any, section: str = "") -> None:
    """Raises ConfigError unless every field annotated as a `Literal` has one of its values.

    Args:
        settings: an instance of a settings class.
        section: dotted name of the section, for messages; "" leaves it out.
    """
    prefix = f"{section}." if section else ""
    for name, hint in typing.get_type_hints(type(settings)).items():
        if typing.get_origin(hint) is typing.Literal:
            check_choice(
                f"{prefix}{name}",
                getattr(settings, name),
                choices=typing.get_args(hint),
            )


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raises ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        expected = ", ".join(str(choice) for choice in choices)
        raise ConfigError(f"{name} is {value!r}, expected one of {expected}")


def differences(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    where: str = "",
) -> Iterator[str]:
    """Yields the differences of two configurations, such as "optim.epochs = 3, now 5"."""
    # A setting that only one of the two configurations has is a difference too.
    for key in sorted({*before, *now}):
        old = before.get(key)
        new = now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{where}{key}.")
        elif old != new:
            yield f"{where}{key} = {old}, now {new}"


def _convert(hint: Any, value: Any, name: str) -> Any:
    """Converts `value` to the annotated type `hint`.

    YAML reads 1e-4 as a string and 3 as an integer; both may stand for a float.

    Raises:
        ConfigError: `value` does not fit the type; the message names the setting `name`.
    """
    # tuple[int, ...] has the origin `tuple` and the arguments (int, ...).
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if hint in (Any, object):
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(hint, value, name)
    if origin is typing.Literal:
        check_choice(name, value, inner)
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} is {value!r}, expected a section with settings")
        return build(cast(type[Any], hint), value, f"{name}.")
    if origin is tuple:
        # A single item may be written without brackets.
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(inner[0], item, name) for item in items)
    is_mapping_hint = isinstance(origin, type) and issubclass(origin, Mapping)
    if is_mapping_hint and isinstance(value, Mapping):
        return _convert_mapping(inner, value, name)
    if hint in (int, float):
        return _convert_number(hint, value, name)
    if origin is None and isinstance(value, hint):
        return value
    raise ConfigError(f"{name} is {value!r}, expected {_described(hint)}")


def _convert_mapping(hints: tuple[Any, ...], value: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    """Converts keys and values to the two types of a mapping."""
    key_hint, item_hint = hints
    converted = {}
    for key, item in value.items():
        converted_key = _convert(key_hint, key, name)
        converted[converted_key] = _convert(item_hint, item, f"{name}.{key}")
    return converted


def _convert_number(hint: type[int] | type[float], value: Any, name: str) -> int | float:
    """Converts `value` to an integer or a float."""
    # bool is a subclass of int in Python, but `true` is no number for a user.
    if isinstance(value, bool) or (hint is int and not isinstance(value, int)):
        raise ConfigError(f"{name} is {value!r}, expected {hint.__name__}")
    if hint is float:
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{name} is {value!r}, expected a number") from None
    # Integers of more than 64 bits overflow in libraries.
    if abs(value) > MAX_INT:
        raise ConfigError(f"{name} is an integer beyond 64 bits, expected a smaller one")
    return int(value)


def _convert_union(hint: Any, value: Any, name: str) -> Any:
    """Converts `value` to the first type of the union that it fits."""
    options = list(typing.get_args(hint))
    if type(None) in options:
        if value is None:
            return None
        options.remove(type(None))
    if len(options) == 1:
        # A message about the one type is clearer than a message about the union.
        return _convert(options[0], value, name)
    for option in options:
        try:
            return _convert(option, value, name)
        except ConfigError:
            continue
    expected = ", ".join(_described(option) for option in options)
    raise ConfigError(f"{name} is {value!r}, expected one of {expected}")


def _described(hint: Any) -> str:
    """A type for messages: the values of a `Literal`, or else the name of the type."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(str(choice) for choice in typing.get_args(hint))
    return getattr(hint, "__name__", str(hint))
