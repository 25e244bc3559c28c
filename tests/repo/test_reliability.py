"""The table of what is promised under faults names tests that exist, in each of its rows."""

from __future__ import annotations

import re
from pathlib import Path

from documents import is_there, table_rows

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
HEADER = ["property", "promise", "test", "what it injects", "last figures"]
_REFERENCE = re.compile(r"`((?:tests|benchmarks)/[^`]+)`")


def test_every_promise_has_a_test_of_make_test() -> None:
    assert len(table_rows(PAGE, HEADER)) > 35
    for cells in table_rows(PAGE, HEADER):
        references = _REFERENCE.findall(cells[2])
        assert any(reference.startswith("tests/") for reference in references), cells
        missing = [reference for reference in references if not is_there(reference)]
        assert missing == [], cells


def test_what_is_not_promised_is_said() -> None:
    text = PAGE.read_text(encoding="utf-8")
    limits = text.partition("## What is not promised")[2]
    assert "Byte-equality on CUDA" in limits
    assert "reliability.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
