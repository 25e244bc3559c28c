"""Turns docs/ into a site. The pages stay plain Markdown that the viewer of a repository shows correctly.

* Links that leave docs/ are correct in the repository. The site has copies of the tables and pictures in
  benchmarks/results; for all other targets it shows the path instead of a link.
* The generated page measurements.md lists the tables.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
TABLES = "benchmarks/results"
_LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#\s]+)(?P<anchor>#[^)]*)?\)"
)
_SHOWN = (".md", ".png", ".svg")
_HEAD = """# Measurements

Each table names the command that printed it and the machine that it ran on.

| table | what |
|---|---|
"""


def on_files(files: Files, config: Any) -> Files:
    """Adds the tables and the page that lists them."""
    rows = []
    for path in sorted((ROOT / TABLES).iterdir()):
        name = f"results/{path.name}"
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            files.append(File.generated(config, name, content=text))
            rows.append(f"| [{path.stem}]({name}) | {_title(text, path.stem)} |\n")
        elif path.suffix in _SHOWN:
            files.append(File.generated(config, name, content=path.read_bytes()))
    files.append(File.generated(config, "measurements.md", content=_HEAD + "".join(rows)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links that leave docs/."""
    folder = posixpath.dirname(page.file.src_uri)
    if folder == "results":
        return _LINK.sub(lambda match: f"`{match['text']}`", markdown)

    def rewritten(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match["target"]))
        if path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: {match['target']} does not exist")
        name = posixpath.basename(path)
        if posixpath.dirname(path) == TABLES and path.endswith(_SHOWN):
            target = posixpath.relpath(f"results/{name}", folder or ".")
            return f"{match['image']}[{match['text']}]({target}{match['anchor'] or ''})"
        if match["text"].strip("`") in (path, name):
            return f"`{path}`"
        return f"{match['text'].strip('`')} (`{path}`)"

    return _LINK.sub(rewritten, markdown)


def _title(text: str, otherwise: str) -> str:
    """The first heading of a Markdown text."""
    for line in text.splitlines():
        if line.startswith("#"):
            return line.lstrip("# ")
    return otherwise
