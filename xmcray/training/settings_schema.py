"""What settings mean: from the docstrings of their classes, as texts and as a JSON Schema."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from typing import Any

from pydantic import TypeAdapter

from xmcray.training.run_config import RunConfig

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def settings_schema(method_name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a method's configuration files.

    Editors that read it complete names and mark wrong ones. It knows names, types and meanings;
    ranges are checked when a run starts.

    Raises:
        ConfigError: unknown method.
    """
    # A method may have other defaults than the classes of the sections.
    config = RunConfig.resolve(method_name, {})
    properties: dict[str, Any] = {"method_name": {"const": method_name}}
    for field in dataclasses.fields(config):
        settings = getattr(config, field.name)
        # Sections that the method does not have are None.
        if dataclasses.is_dataclass(settings):
            properties[field.name] = _section_schema(settings)
    return {
        "$schema": _DIALECT,
        "title": f"Settings of xmcray train {method_name}",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _section_schema(defaults: Any) -> dict[str, Any]:
    """The schema of a settings class, with those of the classes in it.

    Args:
        defaults: its settings. Those of a nested section may differ from its class's own.
    """
    kind = type(defaults)
    types = typing.get_type_hints(kind)
    meanings = meanings_of(kind)
    properties = {}
    for field in dataclasses.fields(kind):
        field_type = types[field.name]
        default = getattr(defaults, field.name)
        if dataclasses.is_dataclass(field_type):
            properties[field.name] = _section_schema(default)
            continue
        schema = TypeAdapter(field_type).json_schema()
        if field.name in meanings:
            schema["description"] = meanings[field.name]
        schema["default"] = default
        properties[field.name] = schema
    return {
        "type": "object",
        "description": (inspect.getdoc(kind) or "").partition("\n")[0],
        "properties": properties,
        "additionalProperties": False,
    }


def meanings_of(kind: Any) -> dict[str, str]:
    """Meaning of each setting, from the "Attributes" section of the docstring.

    An entry starts with one or several field names and a colon, and ends where the next entry starts.
    """
    docstring = inspect.getdoc(kind) or ""
    text = " ".join(docstring.split("Attributes:", 1)[-1].split())
    any_field = "|".join(field.name for field in dataclasses.fields(kind))
    names = rf"(?:(?:{any_field})(?:, )?)+"
    entry = re.compile(rf"({names}): (.*?)(?=(?: |\. ){names}: |$)")
    meanings = {}
    for match in entry.finditer(text):
        meaning = match[2].strip().rstrip(".")
        for name in match[1].split(", "):
            meanings[name] = meaning
    return meanings
