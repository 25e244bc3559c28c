"""Any frozen dataclass from YAML, with overrides by dotted name. Knows no section of any configuration itself."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from xmcray.errors import ConfigError

T = TypeVar("T")


def build(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """An instance of the frozen dataclass `kind` with `values` in place of its defaults, sections included.

    A settings class lists former names of its fields in a class attribute `RENAMED`: old name -> new name.

    Raises:
        ConfigError: an unknown key (names the nearest), a missing one, or a value of another type.
    """
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(cast(Any, kind))}
    renamed: Mapping[str, str] = getattr(kind, "RENAMED", {})
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{where}{key}"
        if key in renamed:
            raise ConfigError(f"setting {name!r} is now called {where + renamed[key]!r}; rename it")
        if key not in fields:
            raise ConfigError(unknown("setting", name, [f"{where}{f}" for f in fields]))
        arguments[key] = _convert(hints[key], value, name)
    missing = [
        f"{where}{f.name}" for f in fields.values() if _required(f) and f.name not in arguments
    ]
    if missing:
        raise ConfigError(f"setting {missing[0]!r} is required and was not given")
    return kind(**arguments)


def merge(base: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`base` with overrides such as "optim.epochs=3"; values are read as YAML.

    Raises:
        ConfigError: an override without "=", or a section where a value was expected.
    """
    merged = _copy(base)
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name:
            raise ConfigError(f"override {override!r} is not of the form section.name=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"override {override!r}: {text!r} is not a YAML value") from None
        section = merged
        *path, last = name.split(".")
        for part in path:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(f"override {override!r}: {part!r} is a value, not a section")
        section[last] = value
    return merged


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `top` over it, section by section."""
    merged = _copy(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = (
            overlay(below, value)
            if isinstance(below, dict) and isinstance(value, Mapping)
            else value
        )
    return merged


def load_yaml(source: str) -> dict[str, Any]:
    """Settings from a file, or from a shipped preset when `source` is "preset:METHOD/DATASET".

    Raises:
        ConfigError: no such file or preset (names the nearest), or not a YAML mapping.
    """
    if source.startswith("preset:"):
        name = source.removeprefix("preset:")
        if name not in presets():
            raise ConfigError(unknown("preset", name, presets()))
        text = (
            resources.files("xmcray")
            .joinpath("presets", f"{name}.yaml")
            .read_text(encoding="utf-8")
        )
    else:
        try:
            text = Path(source).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(
                f"configuration file {source} does not exist; presets are named preset:METHOD/DATASET"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"configuration file {source} cannot be read: {error}") from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{source} holds a {type(values).__name__}, expected a mapping of settings"
        )
    return values


def presets() -> list[str]:
    """Names of the shipped presets, METHOD/DATASET."""
    root = resources.files("xmcray").joinpath("presets")
    names = []
    for method in root.iterdir():
        if method.is_dir():
            names += [
                f"{method.name}/{f.name[:-5]}" for f in method.iterdir() if f.name.endswith(".yaml")
            ]
    return sorted(names)


def dump(config: Any) -> dict[str, Any]:
    """A dataclass as plain YAML values; `build` reads it back to an equal object."""
    return cast(dict[str, Any], _plain(dataclasses.asdict(config)))


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """The message for a name that is not among `known`: with the nearest one, or all if there are few."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown {what} {name!r}; {hint}"


def check_range(
    name: str, value: float, low: float | None = None, high: float | None = None
) -> None:
    """Raises ConfigError unless low <= value <= high; not a number is in no range."""
    if not ((low is None or low <= value) and (high is None or value <= high)):
        bounds = " and ".join(
            f"{word} {x:g}" for word, x in (("at least", low), ("at most", high)) if x is not None
        )
        raise ConfigError(f"{name} is {value}, expected {bounds}")


def check_choices(settings: Any, section: str) -> None:
    """Raises ConfigError unless every field annotated as a `Literal` has one of its values."""
    for name, hint in typing.get_type_hints(type(settings)).items():
        if typing.get_origin(hint) is typing.Literal:
            check_choice(f"{section}.{name}", getattr(settings, name), typing.get_args(hint))


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _convert(hint: Any, value: Any, name: str) -> Any:
    """`value` as the annotated type: YAML reads 1e-4 as a string and 3 as an integer; both may mean a float."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        for option in (o for o in inner if o is not type(None)):
            try:
                return _convert(option, value, name)
            except ConfigError:
                continue
        raise ConfigError(f"{name} is {value!r}, expected {hint}")
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} is {value!r}, expected a section with settings")
        return build(cast(type[Any], hint), value, f"{name}.")
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]  # one item needs no brackets
        return tuple(_convert(inner[0], item, name) for item in items)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {
            _convert(inner[0], key, name): _convert(inner[1], v, f"{name}.{key}")
            for key, v in value.items()
        }
    if origin is typing.Literal:
        if value not in inner:
            raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(map(str, inner))}")
        return value
    if hint is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{name} is {value!r}, expected a number") from None
    if hint in (Any, object):
        return value
    if origin is None and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"{name} is {value!r}, expected {getattr(hint, '__name__', hint)}")
