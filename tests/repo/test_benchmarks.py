"""Every benchmark can be imported and has a help page: the names that it uses exist.

Scripts of claims are only imported, because their variants prepare corpora.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import multiprocessing
import re
import sys
import traceback
from pathlib import Path

from documents import SETTING, setting_names

ROOT = Path(__file__).parents[2]


def failures_of(folder: Path) -> dict[str, str]:
    """What goes wrong by script; changes the modules and arguments of the process."""
    sys.path[:0] = [str(folder), str(folder / "claims")]
    failures = {}
    for path in [*sorted(folder.glob("*.py")), *sorted(folder.glob("claims/*.py"))]:
        help_text = io.StringIO()
        try:
            module = importlib.import_module(path.stem)
            if Path(str(module.__file__)) != path:
                raise ImportError(f"its name belongs to {module.__file__}")
            if getattr(getattr(module, "main", None), "__module__", "claim") != "claim":
                sys.argv = [str(path), "--help"]
                with contextlib.redirect_stdout(help_text):
                    module.main()
                failures[path.name] = "--help did not end it"
        except SystemExit as end:
            if end.code or not help_text.getvalue().startswith("usage:"):
                failures[path.name] = f"--help ended with {end.code}"
        except Exception:
            failures[path.name] = traceback.format_exc(limit=-3)
    return failures


def test_every_benchmark_imports_and_has_help() -> None:
    # In a copy of this process, because the benchmarks import each other by their bare names.
    with multiprocessing.get_context("fork").Pool(1) as copy:
        failures = copy.apply(failures_of, (ROOT / "benchmarks",))
    assert failures == {}, "\n".join(failures.values())


def sizes_of_a_synthetic_corpus(folder: Path) -> tuple[int, int]:
    """Makes a small corpus in a folder; changes the modules of the process."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    importlib.import_module("data_sets").CACHE = folder
    corpus = importlib.import_module("synthetic").corpus(40, 60)
    return corpus.card.num_labels, len(corpus.split("train"))


def test_synthetic_corpora_are_written_as_prepare_writes_them(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as copy:
        assert copy.apply(sizes_of_a_synthetic_corpus, (tmp_path,)) == (40, 60)


def test_every_setting_of_the_benchmarks_exists() -> None:
    known = setting_names()
    unknown = []
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                match = re.match(SETTING.pattern + "=", node.value)
                if match and match[0][:-1] not in known:
                    unknown.append((path.name, match[0]))
    assert unknown == []
