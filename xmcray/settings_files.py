"""Reads files of settings: those of users, presets, and spaces of `xmcray tune`.

A preset is a file `presets/METHOD/DATASET.yaml` of this package, or of another one with methods.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from xmcray.config import unknown
from xmcray.errors import ConfigError, one_line

METHODS_GROUP = "xmcray.methods"  # entry points of methods in other packages (methods/registry.py)


def load_yaml(source: str) -> dict[str, Any]:
    """Reads settings from a file, a preset ("preset:METHOD/DATASET"), or a space ("space:NAME").

    The settings of a preset include `method_name`.

    Raises:
        ConfigError: no such file, preset or space (names the nearest), or not a YAML mapping.
    """
    if source.startswith("preset:"):
        text = _text_of("preset", source, _preset_files())
    elif source.startswith("space:"):
        text = _text_of("space", source, _space_files())
    else:
        text = _text_of_file(source)
    with _yaml_errors(source):
        document = yaml.load(text, _UniqueKeys)
    values = _mapping(source, document)
    if source.startswith("preset:"):
        # With the name of its method, a preset is refused as a whole if another method is trained.
        # Without it, the message would be about one of its settings.
        method, _, _ = source.removeprefix("preset:").partition("/")
        return {"method_name": method, **values}
    return values


def load_yaml_documents(source: str) -> list[dict[str, Any]]:
    """Reads the documents of a file, which lines of `---` separate; empty ones are left out.

    Raises:
        ConfigError: no such file, or a document that is not a YAML mapping.
    """
    text = _text_of_file(source)
    with _yaml_errors(source):
        documents = list(yaml.load_all(text, _UniqueKeys))
    return [_mapping(source, document) for document in documents if document is not None]


def presets() -> list[str]:
    """Names of all presets, METHOD/DATASET."""
    return sorted(_preset_files())


def method_points() -> metadata.EntryPoints:
    """Entry points of the methods of other installed packages."""
    return _points_on(tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _points_on(_path: tuple[str, ...]) -> metadata.EntryPoints:
    """Entry points by the import path, cached: reading them opens a file of every package."""
    return metadata.entry_points(group=METHODS_GROUP)


def _text_of_file(source: str) -> str:
    """The content of a file that the user named."""
    try:
        return Path(source).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"file {source} does not exist, expected a YAML file; {_advice(source)}"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise ConfigError(
            f"file {source} cannot be read ({reason}), expected a YAML file; check it"
        ) from None


def _advice(source: str) -> str:
    """What to do about a file that does not exist."""
    for kind, files in (("preset", _preset_files()), ("space", _space_files())):
        if source in files:
            return f"the {kind} of that name is {kind}:{source}"
    return "check the path"


def _text_of(kind: str, source: str, files: Mapping[str, Traversable]) -> str:
    """The content of a preset or a space."""
    name = source.removeprefix(f"{kind}:")
    if name not in files:
        raise ConfigError(unknown(kind, name, sorted(files)))
    return files[name].read_text(encoding="utf-8")


def _preset_files() -> dict[str, Traversable]:
    """Presets by name: the files `presets/METHOD/DATASET.yaml` of all packages with methods."""
    packages = ["xmcray"]
    for point in method_points():
        # The top-level package of a method is found without importing the method.
        top_level, _, _ = point.module.partition(".")
        packages.append(top_level)
    files = {}
    for package in packages:
        files.update(_presets_of(package))
    return files


def _presets_of(package: str) -> dict[str, Traversable]:
    """The presets of one package by name."""
    try:
        root = resources.files(package).joinpath("presets")
    except ImportError:
        return {}  # the registry reports a broken entry point when the method is used
    files = {}
    for method in _entries(root):
        for name, file in _yaml_files(method).items():
            files[f"{method.name}/{name}"] = file
    return files


def _space_files() -> dict[str, Traversable]:
    """Spaces of `xmcray tune` by name."""
    return _yaml_files(resources.files("xmcray").joinpath("files", "spaces"))


def _yaml_files(folder: Traversable) -> dict[str, Traversable]:
    """The YAML files of a folder, by their names without the suffix."""
    files = {}
    for file in _entries(folder):
        name, _, suffix = file.name.rpartition(".")
        if suffix == "yaml":
            files[name] = file
    return files


def _entries(folder: Traversable) -> list[Traversable]:
    """The entries of a folder; none if it is a file or does not exist."""
    if not folder.is_dir():
        return []
    return list(folder.iterdir())


class _UniqueKeys(yaml.SafeLoader):
    """Refuses mappings that repeat a key. PyYAML would silently use the last value."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key_node, _ in node.value:
            # Keys that are not scalars are refused later.
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in keys:
                problem = f"found {key_node.value!r} twice, expected it once"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            keys.add(key_node.value)
        return node


@contextlib.contextmanager
def _yaml_errors(source: str) -> Iterator[None]:
    try:
        yield
    # PyYAML raises other errors for some values, such as a date that does not exist.
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid YAML: {one_line(error)}") from None


def _mapping(source: str, document: Any) -> dict[str, Any]:
    """The settings in a document. A document that is empty, or has comments only, has none."""
    if document is None:
        return {}
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise ConfigError(f"{source} holds a {kind}, expected a mapping of settings")
    return document
