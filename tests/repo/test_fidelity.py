"""The table of what the papers say names code and tests that exist, in each of its rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import is_there, table_rows

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "methods" / "fidelity.md"
_REFERENCE = re.compile(r"`((?:xmcray|tests|benchmarks)/[^`]+)`")
HEADER = ["paper", "what", "code", "fails without it", "departure, and why"]


def test_every_row_has_code_and_a_test() -> None:
    papers = PAGE.read_text(encoding="utf-8").count("\n## ")
    assert papers == 8  # six papers, what all share, and the evaluation
    for cells in table_rows(PAGE, HEADER):
        code = _REFERENCE.findall(cells[2])
        tests = _REFERENCE.findall(cells[3])
        assert code, f"no code: {cells}"
        assert tests, f"no test: {cells}"
        assert all(reference.startswith("xmcray/") for reference in code), cells
        for reference in tests:
            path, _, name = reference.partition("::")
            is_test = path.startswith("tests/") and name.startswith("test_")
            is_experiment = path.startswith("benchmarks/claims/")
            assert is_test or is_experiment, reference
        assert cells[4], f"say whether it departs from the paper: {cells}"


def test_everything_named_exists() -> None:
    references = _REFERENCE.findall(PAGE.read_text(encoding="utf-8"))
    missing = [reference for reference in references if not is_there(reference)]
    assert len(references) > 100
    assert missing == []


@pytest.mark.parametrize(
    "reference",
    [
        "xmcray/losses/bce.py::no_such_loss",
        "xmcray/losses/none.py::full_bce",
        "xmcray/methods/dexml.py::Dexml.none",
    ],
)
def test_a_name_that_does_not_exist_is_noticed(reference: str) -> None:
    assert not is_there(reference)


def test_the_page_is_linked() -> None:
    assert "(fidelity.md)" in (PAGE.parent / "README.md").read_text(encoding="utf-8")
    assert "methods/fidelity.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
