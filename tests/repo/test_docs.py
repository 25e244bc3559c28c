"""Pages that are written by a command are what the command writes."""

import ast
import errno
import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_settings_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "settings.py"))
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == script["page"](), (
        "run: python docs/settings.py"
    )


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [part.split(")", 1)[0] for part in text.split("](")[1:]]
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_troubleshooting_quotes_messages_that_there_are() -> None:
    """What stands in backquotes in the first column of a table headed "message"; an ellipsis is anything."""
    said = " ".join(" ".join(texts_of(path)) for path in sorted((ROOT / "xmcray").rglob("*.py")))
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    tables = [table for table in page.split("\n\n") if table.startswith("| message")]
    quoted = [
        quote
        for table in tables
        for row in table.splitlines()[2:]
        for quote in quotes_of(row.split("|")[1])
    ]
    assert len(quoted) > 20
    strange = [quote for quote in quoted for part in quote.split("…") if part.strip() not in said]
    assert strange == []


def quotes_of(cell: str) -> list[str]:
    """Text in backquotes, but for what the system says itself."""
    return [quote for quote in re.findall(r"`([^`]+)`", cell) if quote != os.strerror(errno.ENOSPC)]


def texts_of(path: Path) -> Iterator[str]:
    """String constants, those between the braces of f-strings too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
