"""Writes docs/settings.md from the classes of settings: `python docs/settings.py`.

A test compares the committed page with the classes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from xmcray.config import dump
from xmcray.methods.registry import method_entry, method_names
from xmcray.retrieval.index_spec import answer_spec
from xmcray.serving.settings import ServeConfig
from xmcray.training.run_config import OPTIONAL_SECTIONS, RunConfig
from xmcray.training.settings_schema import meanings_of

NOT_SHARED = ("method", "method_name", *OPTIONAL_SECTIONS)
PAGE = Path(__file__).with_name("settings.md")
HEAD = """# Settings

Every setting of `xmcray train` by its dotted name: `--set optim.epochs=20`, or the same sections in a YAML file for
`--config`. Batch sizes, steps and learning rates are those of the global batch, whatever the number of workers. Some
methods have other defaults than the first tables; they are named above the settings of the method. At the end are the
settings of `xmcray export` and `xmcray serve`. `python docs/settings.py` writes this page.
"""
# The bundles are arguments of the command, and the options are Ray Serve's.
NOT_SET = ("bundles", "options")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    shared = [f for f in dataclasses.fields(RunConfig) if f.name not in NOT_SHARED]
    parts += [section(field.name, field.default_factory()) for field in shared]
    for name, kind in OPTIONAL_SECTIONS.items():
        methods = [method for method in method_names() if name in method_entry(method).sections]
        parts.append(section(name, kind(), f"`{name}` of {', '.join(methods)}"))
    for name in method_names():
        config = RunConfig.resolve(name, {})
        parts.append(section("method", config.method, f"`method` of {name}", own_defaults(config)))
    parts.append(section("index", answer_spec({}), "`index` of `xmcray export --set`"))
    served = ServeConfig(bundles={"name": "folder"})
    parts.append(section("", served, "Settings of `xmcray serve --set`"))
    return "\n".join(parts)


def own_defaults(config: RunConfig) -> str:
    """A sentence with the shared settings whose default differs for a method; empty if none does.

    Args:
        config: the method's defaults.
    """
    values = config.to_dict()
    differing = []
    for field in dataclasses.fields(RunConfig):
        if field.name in NOT_SHARED:
            continue
        for name, default in dump(field.default_factory()).items():
            own = values[field.name][name]
            if own != default:
                differing.append(f"`{field.name}.{name}={own}`")
    return f"Defaults of its own: {', '.join(differing)}." if differing else ""


def section(name: str, defaults: Any, title: str = "", note: str = "") -> str:
    """One table of setting, default and meaning; nested sections follow it.

    Args:
        name: of the section; empty if its settings have no other name before theirs.
        defaults: settings of the section. Those of a nested section may differ from its class's own.
        title: heading; the name if not given.
        note: sentence above the table.
    """
    meanings = meanings_of(type(defaults))
    lines = [f"## {title or f'`{name}`'}", ""]
    if note:
        lines += [note, ""]
    lines += ["| setting | default | meaning |", "|---|---|---|"]
    nested = []
    for field in dataclasses.fields(defaults):
        if field.name in NOT_SET:
            continue
        dotted = f"{name}.{field.name}" if name else field.name
        default = getattr(defaults, field.name)
        if dataclasses.is_dataclass(default):
            nested.append(section(dotted, default))
            continue
        shown = "(empty)" if default == "" else f"`{default}`"
        # A bar would end the cell.
        meaning = meanings.get(field.name, "").replace("|", "\\|")
        lines.append(f"| `{dotted}` | {shown} | {meaning} |")
    table = "\n".join(lines) + "\n"
    return "\n".join([table, *nested])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
