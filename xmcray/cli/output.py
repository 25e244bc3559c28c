"""What commands print: tables and lines on stdout, JSON for programs, and what to type next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any


def show(what: Any) -> None:
    """A table or a line on stdout; a pipe gets lines long enough not to be wrapped."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(what, markup=False) if isinstance(what, str) else console.print(what)


def show_metrics(runs: dict[str, dict[str, Any]], deciles: bool = False) -> None:
    """The metrics of runs side by side, and by label frequency."""
    from xmcray.evaluation import table

    show(table.metrics_table(runs))
    measured = next(iter(runs.values()))
    show(table.segment_table(measured))
    if deciles:
        show(table.decile_table(measured))
    if measured.get("index_recall"):
        show(table.index_table(measured))


def show_json(value: object) -> None:
    """For programs."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def show_next(command: Sequence[str]) -> None:
    """What to type now."""
    print(f"next: {shlex.join(command)}")
