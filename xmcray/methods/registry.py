"""The only list of methods. Imports neither torch nor a method before one is used.

An installed package adds a method with an entry point:

    [project.entry-points."xmcray.methods"]
    seventh = "their_package.seventh:ENTRY"

`ENTRY` is a `methods.base.MethodEntry`. Presets of a method are the files
`presets/METHOD/*.yaml` in the top-level package of its entry: `their_package/presets/seventh/`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from xmcray import config, settings_files
from xmcray.errors import ConfigError

if TYPE_CHECKING:
    from xmcray.methods.base import MethodEntry

_BUILT_IN = {
    "astra": "xmcray.methods.astra:ENTRY",
    "dexml": "xmcray.methods.dexml:ENTRY",
    "prime": "xmcray.methods.prime:ENTRY",
    "rae": "xmcray.methods.rae:ENTRY",
    "renee": "xmcray.methods.renee:ENTRY",
    "unidec": "xmcray.methods.unidec:ENTRY",
}


def method_names() -> list[str]:
    """Names of all methods, those of this package first.

    Raises:
        ConfigError: two packages register the same name.
    """
    return list(_locations())


def method_entry(name: str) -> MethodEntry:
    """The entry of a method; imports its module.

    Raises:
        ConfigError: no method has this name, or its entry point is broken.
    """
    locations = _locations()
    if name not in locations:
        raise ConfigError(config.unknown("method", name, list(locations)))
    from xmcray.methods.base import MethodEntry

    location = locations[name]
    module, _, attribute = location.partition(":")
    try:
        entry = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        # Code of another package may fail in any way; the user needs to know which package it is.
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"method {name} cannot be loaded from {location!r} ({reason});"
            " repair or uninstall the package that registers it"
        ) from error
    if not isinstance(entry, MethodEntry):
        raise ConfigError(
            f"method {name}: {location!r} is a {type(entry).__name__}, expected a MethodEntry;"
            " correct the entry point of the package that registers it"
        )
    return entry


def check_method_name(name: str) -> None:
    """Raises ConfigError unless a method has this name; does not import it."""
    names = method_names()
    if name not in names:
        raise ConfigError(config.unknown("method", name, names))


def _locations() -> dict[str, str]:
    """Where the entry of each method is, as "module:attribute", by name."""
    locations = dict(_BUILT_IN)
    for point in settings_files.method_points():
        # The same installed package may be found twice on the path; that is no clash.
        if locations.setdefault(point.name, point.value) != point.value:
            raise ConfigError(
                f"method {point.name} is registered as {locations[point.name]!r} and as"
                f" {point.value!r}; uninstall one of the packages"
            )
    return locations
