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
from xmcray.training.run_config import RunConfig

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    """A file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def pages() -> list[Path]:
    return sorted((ROOT / "docs").rglob("*.md"))


def test_settings_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "settings.py"))
    generated = script["page"]()
    assert page("docs/settings.md") == generated, "run: python docs/settings.py"


def test_settings_page_has_the_defaults_of_each_method() -> None:
    settings_page = page("docs/settings.md")
    for method in method_names():
        # Up to the next method.
        section = settings_page.split(f"## `method` of {method}\n")[1].split("## `method` of ")[0]
        documented = re.findall(r"\| `method\.classifier\.lr` \| `(.*?)`", section)
        settings = RunConfig.resolve(method, {}).to_dict()["method"]
        defaults = [str(settings["classifier"]["lr"])] if "classifier" in settings else []
        assert documented == defaults, method


def test_settings_page_names_the_defaults_of_a_method_alone() -> None:
    first_lines = {}
    for method in ("astra", "rae", "renee"):
        section = page("docs/settings.md").split(f"## `method` of {method}\n\n")[1]
        first_lines[method] = section.splitlines()[0]
    assert first_lines == {
        "astra": "| setting | default | meaning |",
        "rae": "Defaults of its own: `data.augment_with_labels=False`, `negatives.uniform=0`.",
        "renee": "Defaults of its own: `negatives.uniform=0`, `negatives.hard=0`.",
    }


def file_links(path: Path) -> list[str]:
    """Targets of a page's links to files, without the part after "#"."""
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
    return [link for link in links if "://" not in link]


def dead_links(path: Path) -> list[str]:
    """Links to files that do not exist, in the view of a repository."""
    return [
        f"{path.name}: {link}" for link in file_links(path) if not (path.parent / link).exists()
    ]


def test_links_of_the_readme_lead_somewhere() -> None:
    readme = ROOT / "README.md"
    assert file_links(readme)
    assert dead_links(readme) == []


def test_links_of_the_pages_lead_somewhere() -> None:
    """A repository has no pages that the site generates."""
    dead = []
    for path in pages():
        dead += dead_links(path)
    assert dead == []


def cells_of(line: str) -> list[str]:
    """The cells of a row of a table, without bold type."""
    return [cell.strip() for cell in line.replace("*", "").strip().strip("|").split("|")]


def measured_rows() -> dict[tuple[str, str], list[str]]:
    """The metrics of each data set and method in the measured table."""
    rows = {}
    for line in page("benchmarks/results/methods.md").splitlines():
        cells = cells_of(line)
        if len(cells) > 5:
            data_set, method = cells[:2]
            rows[data_set, method] = cells[3:6]
    return rows


def test_numbers_of_the_readme_are_measured_or_quoted() -> None:
    """Each percentage of the results table stands in the measured table or among the floors."""
    measured = measured_rows()
    floors = runpy.run_path(str(ROOT / "benchmarks" / "floors.py"))
    results = page("README.md").split("## Results", 1)[1].split("In P@1", 1)[0]
    rows = [line for line in results.splitlines() if line.startswith("| ")]
    assert len(rows) == 9

    data_set = ""
    for row in rows[1:]:
        first_cell, name, *metrics = cells_of(row)
        # The first row of a data set names it in bold type.
        if row.startswith("| **"):
            data_set = first_cell
        if name.startswith("xmcray, "):
            method = name.removeprefix("xmcray, ").lower().replace("rae-xmc", "rae")
            assert metrics[:3] == measured[data_set, method]
        else:
            method = floors["LINEAR"] if name == "XR-Linear" else floors["BOTH"]
            assert [float(cell) for cell in metrics[:3]] == list(floors["FLOORS"][data_set][method])


def test_the_plot_shows_the_committed_table(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "results_plot.py"
    drawn = tmp_path / "plot.svg"
    subprocess.run([sys.executable, str(script), "--out", str(drawn)], check=True)
    committed = (ROOT / "docs" / "images" / "results.svg").read_bytes()
    assert drawn.read_bytes() == committed, f"run: python {script.name}"


def quoted_messages() -> list[str]:
    """What stands in backquotes in the first column of each table headed "message"."""
    messages = []
    for table in page("docs/troubleshooting.md").split("\n\n"):
        if table.startswith("| message"):
            for row in table.splitlines()[2:]:
                messages += quotes_of(row.split("|")[1])
    return messages


def test_troubleshooting_quotes_messages_that_there_are() -> None:
    """An ellipsis in a quoted message stands for anything."""
    texts: list[str] = []
    for path in sorted((ROOT / "xmcray").rglob("*.py")):
        texts += texts_of(path)
    said = " ".join(texts)
    messages = quoted_messages()
    assert len(messages) > 20
    for message in messages:
        for part in message.split("…"):
            assert part.strip() in said, message


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
    endings = "py|md|yaml|json|toml|svg|proto"
    # A path may be followed by the name of a test.
    pattern = re.compile(rf"`((?:{folders})/[\w./-]+\.(?:{endings}))(?:::\w+)?`")
    missing = []
    for text_page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages()]:
        paths = pattern.findall(text_page.read_text(encoding="utf-8"))
        missing += [f"{text_page.name}: {path}" for path in paths if not (ROOT / path).exists()]
    assert missing == []
