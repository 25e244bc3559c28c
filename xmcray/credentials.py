"""Secrets in URLs: refused in settings, masked in messages.

A run keeps its settings and the URL of its corpus in files that people share; a command line is
visible to every user of a machine. Stores take their credentials from the environment or from files
of their own (docs/security.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from xmcray.errors import ConfigError

MASK = "***"
_PASSWORD = re.compile(
    r"(?P<before>[a-z][a-z0-9+.-]*://[^/\s:@]*:)(?P<secret>[^/\s@]+)(?=@)", re.IGNORECASE
)
_PARAMETER = re.compile(
    r"(?P<before>[?&](?:sig|signature|token|access_token|api_?key|secret|password|x-(?:amz|goog)-[a-z-]+)=)(?P<secret>[^&\s]+)",
    re.IGNORECASE,
)


def mask(text: str) -> str:
    """Replaces passwords and signatures in URLs by ***."""
    return _PARAMETER.sub(_hidden, _PASSWORD.sub(_hidden, text))


def refuse(values: Iterable[str], where: str) -> None:
    """Raises ConfigError if one of the values has a URL with a secret in it; the message shows it
    masked.

    Args:
        values: texts that may contain URLs.
        where: name of the values in the message, such as "the command line".
    """
    for value in values:
        if mask(value) != value:
            raise ConfigError(
                f"{where} has a URL with a secret, {mask(value)}, expected one without; give credentials by environment"
                " variables or the store's own file (docs/security.md)"
            )


def texts(values: Mapping[str, Any]) -> Iterable[str]:
    """All strings in nested settings."""
    for value in values.values():
        if isinstance(value, Mapping):
            yield from texts(value)
        elif isinstance(value, str):
            yield value
        elif isinstance(value, list | tuple):
            yield from (part for part in value if isinstance(part, str))


def _hidden(match: re.Match[str]) -> str:
    return match["before"] + MASK
