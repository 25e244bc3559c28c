"""Reads our docstrings for the API page.

In them sections follow each other without a blank line, and short items share one ("path: of the file. step: from 0.").
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Function, Object

_SECTION = re.compile(r"(?<!\n)\n(?=(?:Args|Attributes|Raises|Returns|Yields):\n)")


class OneItemALine(Extension):
    """Puts a blank line before each section, and each item on a line of its own."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrites one docstring."""
        if obj.docstring is None:
            return
        names = {str(name) for name in obj.members}
        if isinstance(obj, Function):
            names = {parameter.name for parameter in obj.parameters}
        elif isinstance(obj, Class):
            names |= {parameter.name for parameter in obj.parameters}
        text = _SECTION.sub("\n\n", obj.docstring.value)
        if names:
            item = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
            two = re.compile(rf"(?m)^(    \S.*?[.;]) (?=(?:(?:{item}), )*(?:{item}): )")
            while two.search(text):
                text = two.sub(r"\1\n    ", text)
        obj.docstring.value = text
