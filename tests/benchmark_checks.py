"""What a process of its own does for tests/repo/test_benchmarks.py: benchmarks change its modules."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import traceback
from pathlib import Path


def failures_of(folder: Path) -> dict[str, str]:
    """What goes wrong by script."""
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


def sizes_of_a_synthetic_corpus(benchmarks: Path, folder: Path) -> tuple[int, int]:
    """Numbers of labels and training queries of a small corpus that is made in a folder."""
    sys.path.insert(0, str(benchmarks))
    importlib.import_module("data_sets").CACHE = folder
    corpus = importlib.import_module("synthetic").corpus(40, 60)
    return corpus.card.num_labels, len(corpus.split("train"))
