"""Writes docs/settings.md from the configuration classes: `python docs/settings.py`. A test holds the page to them."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

from xmcray.methods.base import methods
from xmcray.training.run import RunConfig

PAGE = Path(__file__).with_name("settings.md")
HEAD = """# Settings

Every setting of `xmcray train`, by dotted name: `--set optim.epochs=20`, or the same sections in a YAML file given
with `--config`. All batch sizes, steps and learning rates are those of the global batch, whatever the number of
workers. Written by `python docs/settings.py`.
"""


def page() -> str:
    """The whole page."""
    sections: dict[str, Any] = {
        field.name: field.default_factory
        for field in dataclasses.fields(RunConfig)
        if field.name not in ("method", "method_name")
    }
    parts = [section(name, kind) for name, kind in sections.items()]
    for name, entry in methods().items():
        parts.append(section("method", entry.config_type, f"`method` of {name}"))
    return "\n".join([HEAD, *parts])


def section(name: str, kind: Any, title: str = "") -> str:
    """One table: setting, default, meaning; nested sections follow."""
    meanings = described(kind)
    rows, nested = [], []
    for field in dataclasses.fields(kind):
        default = (
            field.default if field.default is not dataclasses.MISSING else field.default_factory()
        )
        if dataclasses.is_dataclass(default):
            nested.append(section(f"{name}.{field.name}", type(default)))
            continue
        shown = "(empty)" if default == "" else f"`{default}`"
        rows.append(f"| `{name}.{field.name}` | {shown} | {meanings.get(field.name, '')} |")
    head = f"## {title or f'`{name}`'}\n\n| setting | default | meaning |\n|---|---|---|\n"
    return head + "\n".join(rows) + "\n" + "".join(f"\n{part}" for part in nested)


def described(kind: Any) -> dict[str, str]:
    """Meanings by setting, from the "Attributes" of a docstring."""
    text = " ".join(inspect.getdoc(kind).split("Attributes:", 1)[-1].split())
    names = "|".join(field.name for field in dataclasses.fields(kind))
    found = {}
    for match in re.finditer(
        rf"((?:(?:{names})(?:, )?)+): (.*?)(?=(?: |\. )(?:(?:{names})(?:, )?)+: |$)", text
    ):
        for name in match[1].split(", "):
            found[name] = match[2].strip().rstrip(".").replace("|", "\\|")
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
