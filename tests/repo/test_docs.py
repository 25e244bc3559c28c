"""Pages that are written by a command are what the command writes."""

import ast
import errno
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from xmcray.methods.registry import method_names
from xmcray.training.run import RunConfig

ROOT = Path(__file__).parents[2]


def test_settings_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "settings.py"))
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == script["page"](), (
        "run: python docs/settings.py"
    )


def test_settings_page_has_the_defaults_of_each_method() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    for method in method_names():
        # Up to the next method.
        section = page.split(f"## `method` of {method}\n")[1].split("## `method` of ")[0]
        rates = re.findall(r"\| `method\.classifier\.lr` \| `(.*?)`", section)
        settings = RunConfig.resolve(method, {}).to_dict()["method"]
        own = [str(settings["classifier"]["lr"])] if "classifier" in settings else []
        assert rates == own, method


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [re.split("[)#]", part, maxsplit=1)[0] for part in text.split("](")[1:]]
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_links_of_the_pages_lead_somewhere() -> None:
    """In the view of a repository, which has no pages that the site generates."""
    dead = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        own = [link for link in links if "://" not in link]
        dead += [f"{page.name}: {link}" for link in own if not (page.parent / link).exists()]
    assert dead == []


def test_numbers_of_the_readme_are_measured_or_quoted() -> None:
    """Each percentage of the results table stands in the measured table or among the floors."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.split("## Results", 1)[1].split("In P@1", 1)[0]
    measured = (ROOT / "benchmarks/results/methods.md").read_text(encoding="utf-8")
    measured_rows = {}
    for line in measured.replace("*", "").splitlines():
        parts = [cell.strip() for cell in line.split("|")]
        if len(parts) > 7:
            measured_rows[parts[1], parts[2]] = parts[4:7]
    floors = runpy.run_path(str(ROOT / "benchmarks" / "floors.py"))
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    data_set = ""
    for row in rows[1:]:
        first = row[1].strip()
        data_set = first.strip("*") if first.startswith("**") else data_set
        name = row[2].strip()
        cells = [cell.replace("*", "").strip() for cell in row[3:6]]
        if name.startswith("xmcray, "):
            assert cells == measured_rows[data_set, name.removeprefix("xmcray, ").lower()]
        else:
            method = floors["LINEAR"] if name == "XR-Linear" else floors["BOTH"]
            assert [float(cell) for cell in cells] == list(floors["FLOORS"][data_set][method])
    assert len(rows) == 9


def test_the_plot_shows_the_committed_table(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "results_plot.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path / "plot.svg")], check=True)
    committed = (ROOT / "docs" / "images" / "results.svg").read_bytes()
    assert (tmp_path / "plot.svg").read_bytes() == committed, f"run: python {script.name}"


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


def test_every_path_in_the_text_exists() -> None:
    """Paths in inline code that start with a folder of this repository."""
    folders = "xmcray|tests|benchmarks|docs|jobs|serve|tune|cluster"
    pattern = re.compile(
        rf"`((?:{folders})/[\w./-]+\.(?:py|md|yaml|json|toml|svg|proto))(?:::\w+)?`"
    )
    missing = []
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]:
        text = page.read_text(encoding="utf-8")
        missing += [
            (page.name, path) for path in pattern.findall(text) if not (ROOT / path).exists()
        ]
    assert missing == []
