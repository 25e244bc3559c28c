"""What the functions of `import xmcray` take as paths and as settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from xmcray import config as configs
from xmcray.errors import ConfigError

# A folder or URL; corpora and runs are paths too.
Location = str | os.PathLike[str]
# Settings: a YAML file, "preset:METHOD/DATASET", values by dotted names or by sections, or several
# of these, the later over the earlier.
Settings = Location | Mapping[str, Any] | Sequence[Location | Mapping[str, Any]]


def text_of(path: Location | None) -> str | None:
    """A path as a text; None if there is none."""
    return None if path is None else os.fspath(path)


def texts_of(name: str, items: Sequence[Location]) -> list[str]:
    """A list of paths or uids as texts.

    Args:
        name: of the argument.
        items: the list.
    Raises:
        ConfigError: it is a single text, which would be taken for a list of its letters, or a path.
    """
    if isinstance(items, str | os.PathLike):
        text = os.fspath(items)
        raise ConfigError(f"{name} is {text!r}, expected a list; write [{text!r}]")
    return [os.fspath(item) for item in items]


def merged(config: Settings) -> dict[str, Any]:
    """The values of all sources of settings, the later over the earlier, by section.

    Raises:
        ConfigError: a file cannot be read, or a name goes through a value.
    """
    values: dict[str, Any] = {}
    for source in _sources(config):
        if isinstance(source, Mapping):
            values = _with_mapping(values, source)
        else:
            values = configs.overlay(values, configs.load_yaml(os.fspath(source)))
    return values


def _with_mapping(values: dict[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Values with those of a source over them, whose names may be dotted."""
    for name, value in source.items():
        setting: dict[str, Any] = {}
        # YAML has names of other types too; such a setting is unknown.
        configs.put(setting, str(name), value)
        values = configs.overlay(values, setting)
    return values


def merged_without_presets(config: Settings) -> dict[str, Any]:
    """The same of the user's own sources: of all but presets."""
    return merged([source for source in _sources(config) if not _is_preset(source)])


def set_one_by_one(config: Settings) -> dict[str, Any]:
    """The same of the sources that are no files: of values that were set by their names."""
    return merged([source for source in _sources(config) if isinstance(source, Mapping)])


def _is_preset(source: Location | Mapping[str, Any]) -> bool:
    return not isinstance(source, Mapping) and os.fspath(source).startswith("preset:")


def _sources(config: Settings) -> Sequence[Location | Mapping[str, Any]]:
    """Sources of settings as a list, also if there is only one."""
    if isinstance(config, str | os.PathLike | Mapping):
        return [config]
    return config
