"""Text for a terminal, without the characters that it would obey instead of showing them.

Manifests, corpora and paths come from anywhere. Their escape sequences could rename a window, move
the cursor over earlier output, or make a terminal answer as if its user had typed.
"""

from __future__ import annotations

import json
import re

# The control characters of ASCII and Latin-1, and surrogates, which no encoding can write.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# The same without the tab and the end of a line.
_CONTROL_IN_LINES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    r"""A text in which control characters, ends of lines among them, are escapes such as \x1b."""
    return _CONTROL.sub(_escaped, text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines, which keeps its tabs and ends of lines."""
    return _CONTROL_IN_LINES.sub(_escaped, text)


def printable_json(value: object, ascii_only: bool = False) -> str:
    """A value as indented JSON that a terminal shows and a program reads as any other JSON.

    Args:
        value: what JSON can hold.
        ascii_only: write all other characters as escapes of JSON.
    """
    # JSON escapes the control characters of ASCII except DEL. Outside of texts it has none of the
    # others, and inside a text an escape means the same character.
    text = json.dumps(value, indent=1, ensure_ascii=ascii_only)
    return _CONTROL_IN_LINES.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
