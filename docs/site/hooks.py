"""Makes the pages of docs/ a site, without a mark in them that a plain viewer of the repository would show.

* A link out of docs/ (to a table or picture of benchmarks/results, to source) is right in the repository. The site has
  pages of the tables; of anything else it shows the path.
* measurements.md lists the tables.
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

Every table was printed by the command it names, on the machine it names.

| table | what |
|---|---|
"""


def on_files(files: Files, config: Any) -> Files:
    """Adds the tables, and the page that lists them."""
    rows = []
    for path in sorted((ROOT / TABLES).glob("*.md")):
        text = path.read_text(encoding="utf-8")
        files.append(File.generated(config, f"results/{path.name}", content=text))
        title = next(
            (line.lstrip("# ") for line in text.splitlines() if line.startswith("#")), path.stem
        )
        rows.append(f"| [{path.stem}](results/{path.name}) | {title} |\n")
    for path in sorted(path for path in (ROOT / TABLES).iterdir() if path.suffix in _SHOWN[1:]):
        files.append(File.generated(config, f"results/{path.name}", content=path.read_bytes()))
    files.append(File.generated(config, "measurements.md", content=_HEAD + "".join(rows)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces links that leave docs/."""
    folder = posixpath.dirname(page.file.src_uri)
    if folder == "results":
        return _LINK.sub(lambda match: f"`{match['text']}`", markdown)

    def moved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match["target"]))
        if path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: {match['target']} leads nowhere")
        if posixpath.dirname(path) == TABLES and path.endswith(_SHOWN):
            here = posixpath.relpath(f"results/{posixpath.basename(path)}", folder or ".")
            return f"{match['image']}[{match['text']}]({here}{match['anchor'] or ''})"
        text = match["text"].strip("`")
        return (
            f"`{path}`"
            if text in (path, posixpath.basename(path))
            else f"{match['text']} (`{path}`)"
        )

    return _LINK.sub(moved, markdown)
