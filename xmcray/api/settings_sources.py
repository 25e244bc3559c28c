"""What the functions of `import xmcray` take as paths and as settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from xmcray import config as configs
from xmcray import settings_files
from xmcray.errors import ConfigError

# A folder, file or URL, also of a corpus or a run.
Location = str | os.PathLike[str]
# A YAML file, "preset:METHOD/DATASET", or a mapping. Their outermost names may be dotted.
_Source = Location | Mapping[str, Any]
# Settings from one source, or from several: values of the later ones replace those of the earlier.
Settings = _Source | Sequence[_Source]


def text_of(path: Location | None) -> str | None:
    """The path as a str; None stays None."""
    return None if path is None else os.fspath(path)


def texts_of(name: str, items: Sequence[Location]) -> list[str]:
    """A list of paths or uids as strings.

    Args:
        name: name of the argument, for the message.
        items: paths or uids.
    Raises:
        ConfigError: `items` is a single string or path. A string would be read as a list of letters.
    """
    if isinstance(items, str | os.PathLike):
        text = os.fspath(items)
        raise ConfigError(f"{name} is {text!r}, expected a list; write [{text!r}]")
    return [os.fspath(item) for item in items]


def merged(config: Settings) -> dict[str, Any]:
    """The values of all sources by section. Later sources replace earlier ones.

    Raises:
        ConfigError: a file cannot be read.
    """
    values: dict[str, Any] = {}
    for source in _sources(config):
        if not isinstance(source, Mapping):
            source = settings_files.load_yaml(os.fspath(source))
        for name, value in source.items():
            section: dict[str, Any] = {}
            # A name that is no string, such as a number in YAML, is refused later as unknown.
            configs.put(section, str(name), value)
            values = configs.overlay(values, section)
    return values


def merged_without_presets(config: Settings) -> dict[str, Any]:
    """`merged` of all sources but presets: what the user wrote."""
    own_sources = [source for source in _sources(config) if not _is_preset(source)]
    return merged(own_sources)


def merged_mappings(config: Settings) -> dict[str, Any]:
    """`merged` of the mappings alone, without files and presets."""
    mappings = [source for source in _sources(config) if isinstance(source, Mapping)]
    return merged(mappings)


def _is_preset(source: _Source) -> bool:
    return not isinstance(source, Mapping) and os.fspath(source).startswith("preset:")


def _sources(config: Settings) -> Sequence[_Source]:
    """The sources one by one. A single source becomes a list of one."""
    if isinstance(config, str | os.PathLike | Mapping):
        return [config]
    return config
