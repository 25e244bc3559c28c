"""Every benchmark can be imported and has a help page: the names that it uses exist.

Scripts of claims are only imported, because their variants prepare corpora.
"""

from __future__ import annotations

import ast
import multiprocessing
import re
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import pytest
from benchmark_checks import failures_of, sizes_of_a_synthetic_corpus
from documents import SETTING, setting_names

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def other_process() -> Iterator[Pool]:
    """The benchmarks import each other by their bare names, and change the modules of a process."""
    # No copy of this process, whose threads may hold locks at that moment.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


def test_every_benchmark_imports_and_has_help(other_process: Pool) -> None:
    failures = other_process.apply(failures_of, (BENCHMARKS,))
    assert failures == {}, "\n".join(failures.values())


def test_synthetic_corpora_are_written_as_prepare_writes_them(
    other_process: Pool, tmp_path: Path
) -> None:
    assert other_process.apply(sizes_of_a_synthetic_corpus, (BENCHMARKS, tmp_path)) == (40, 60)


def test_every_setting_of_the_benchmarks_exists() -> None:
    known = setting_names()
    unknown = []
    for path in sorted(BENCHMARKS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                match = re.match(SETTING.pattern + "=", node.value)
                if match and match[0][:-1] not in known:
                    unknown.append((path.name, match[0]))
    assert unknown == []
