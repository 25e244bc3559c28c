"""Fills the templates of HTML pages and SVG charts, which lie in the package's folder `templates`.

Every page is one self-contained file: no script, no font and no image from elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, **values: Any) -> Markup:
    """Fills a template.

    Args:
        template: file name, such as "run_report.html.j2".
        values: variables of the template. Text is escaped; `Markup` is inserted as it is.

    Returns:
        The filled template. It is `Markup`, so another template can contain it.
    """
    return Markup(_environment().get_template(template).render(**values))


def pixels(value: float) -> str:
    """A coordinate of a drawing, rounded to a tenth of a pixel."""
    return f"{value:.1f}"


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("xmcray"),
        autoescape=True,
        undefined=StrictUndefined,  # a misspelt variable is an error, not an empty string
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["px"] = pixels
    return environment
