"""Finds the commands, settings, presets and tests that the documents name."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmcray.methods.registry import method_names
from xmcray.training.run_config import RunConfig
from xmcray.tuning.inference import FAMILIES

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "cluster/README.md",
    "tune/README.md",
    "benchmarks/README.md",
]
FILE_SUFFIXES = (".json", ".jsonl", ".md", ".py", ".yaml")
_FENCE = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?:(?: {4}|\t)[^\n]*\n)+)")
_INLINE = re.compile(r"`([^`]+)`")
_PRESET = re.compile(r"preset:([a-z]+/[A-Za-z0-9.\-]+)")
SETTING = re.compile(
    r"(?:data|encoder|negatives|optim|cluster|log|method|memory|fusion|index)"
    r"(?:\.[a-z_][a-z0-9_]*)+"
)


def table_rows(page: Path, header: list[str]) -> list[list[str]]:
    """The cells of each row of each table of a page, all of which have the same header."""
    rows = []
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            assert len(cells) == len(header), line
            if cells != header:
                rows.append(cells)
    return rows


@functools.cache
def names_in(file: Path) -> set[str]:
    """Functions, classes and methods of a module, a method as Class.method."""
    names = set()
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, definitions):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = [member for member in node.body if isinstance(member, definitions)]
            names |= {f"{node.name}.{member.name}" for member in members}
    return names


def is_there(reference: str) -> bool:
    """Whether a path exists and, if a name follows `::`, whether the module defines it."""
    path, _, name = reference.partition("::")
    file = ROOT / path
    return file.exists() and (not name or name in names_in(file))


@dataclass(frozen=True)
class Command:
    """One command of a document.

    Attributes:
        page: path of the document, relative to the repository.
        words: the command's words, "xmcray" or "python" first.
        complete: it stands in a block that a reader copies. An inline one may leave out arguments.
    """

    page: str
    words: tuple[str, ...]
    complete: bool

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def pages() -> list[Path]:
    """All documents that name commands, and the job scripts, whose docstrings do."""
    named = [ROOT / page for page in PAGES]
    written = sorted((ROOT / "docs").rglob("*.md"))
    return [*named, *written, *sorted((ROOT / "jobs").glob("*.py"))]


def commands() -> list[Command]:
    """Every `xmcray ...` and `python jobs/...` command, each once per document."""
    found = {}
    for path in pages():
        page = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        for code, complete in _pieces(text):
            for line in code.replace("\\\\\n", " ").replace("\\\n", " ").splitlines():
                words = command_words(line)
                for chosen in [tuple(words)] if complete else _alternatives(words):
                    if chosen:
                        command = Command(page, chosen, complete)
                        found[str(command)] = command
    return list(found.values())


def setting_names() -> set[str]:
    """Dotted names of all settings of trainings, of all methods, and of finished bundles."""
    names = set()
    for method in method_names():
        names |= set(_dotted(RunConfig.resolve(method, {}).to_dict()))
    for section, kind in FAMILIES.items():
        names |= {f"{section}.{field.name}" for field in dataclasses.fields(kind)}
    return names


def named_settings() -> list[tuple[str, str]]:
    """(page, dotted name) of every setting in inline code."""
    names = []
    for path in pages():
        for code in _INLINE.findall(_without_blocks(path.read_text(encoding="utf-8"))):
            match = re.match(SETTING.pattern + r"(?=$|=)", code)
            if match and Path(match[0]).suffix not in FILE_SUFFIXES:
                names.append((path.relative_to(ROOT).as_posix(), match[0]))
    return names


def named_presets() -> list[tuple[str, str]]:
    """(page, METHOD/DATASET) of every preset."""
    names = []
    for path in pages():
        page = path.relative_to(ROOT).as_posix()
        found = _PRESET.findall(path.read_text(encoding="utf-8"))
        names.extend((page, name.rstrip(".")) for name in found)
    return names


def blocks(page: str, language: str = "") -> list[str]:
    """The fenced blocks of a page, given relative to the repository, that name a language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [code for name, code in _FENCE.findall(text) if name == language]


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Code of a document, and whether it is a block."""
    for match in _FENCE.finditer(text):
        yield match[2], True
    without_fences = _FENCE.sub("\n", text)
    for match in _INDENTED.finditer(without_fences):
        yield match[1], True
    for code in _INLINE.findall(_without_blocks(text)):
        yield " ".join(code.split()), False


def _without_blocks(text: str) -> str:
    return _INDENTED.sub("\n", _FENCE.sub("\n", text))


def command_words(line: str) -> list[str]:
    """The words of our command in a line of shell, without what the shell itself reads."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # prose with an apostrophe
        return []
    for start, word in enumerate(words):
        if _begins(words, start):
            break
        if "=" not in word and word != "--" and "--" not in words[start:]:
            return []  # another program, to which "xmcray" is an argument
    else:
        return []
    command = []
    for word in words[start:]:
        if word in ("|", ">", "2>", "&&", ";"):
            break
        command.append(word)
    return command


def _begins(words: list[str], start: int) -> bool:
    if words[start] == "xmcray":
        return len(words) > start + 1
    is_python = words[start] == "python" and len(words) > start + 1
    return is_python and words[start + 1].startswith("jobs/")


def _alternatives(words: list[str]) -> Iterator[tuple[str, ...]]:
    """A synopsis as commands: brackets are optional and left in, "a|b" is a or b, "..." goes."""
    choices = []
    for word in words:
        plain = word.strip("[]") if word.startswith("[") or word.endswith("]") else word
        if plain in ("...", "…"):
            continue
        choices.append(plain.split("|") if re.fullmatch(r"[\w.-]+(\|[\w.-]+)+", plain) else [plain])
    if choices:
        yield from itertools.product(*choices)


def _dotted(values: dict[str, Any], before: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield f"{before}{key}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{before}{key}.")
