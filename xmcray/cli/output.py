"""The output of commands: tables and lines on stdout, JSON for programs, and the next command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any


def show(content: Any) -> None:
    """Prints a table or a line on stdout; a pipe gets lines that are not wrapped."""
    from rich.console import Console

    # rich would colour numbers and paths, and wrap lines at 80 columns in a pipe.
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    # In a plain text, [brackets] are no markup.
    if isinstance(content, str):
        console.print(content, markup=False)
    else:
        console.print(content)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table of texts."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(Text(name), justify="right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    show(table)


def show_metrics(runs: dict[str, dict[str, Any]], deciles: bool = False) -> None:
    """Prints the metrics of runs side by side, and those of the first run by label frequency.

    Args:
        runs: contents of metrics.json by name of the run.
        deciles: whether to print the contribution of each tenth of the labels.
    """
    from xmcray.evaluation import table

    show(table.metrics_table(runs))
    measured = next(iter(runs.values()))
    show(table.segment_table(measured))
    if deciles:
        show(table.decile_table(measured))
    if measured.get("index_recall"):
        show(table.index_table(measured))
    if measured.get("slices"):
        show(table.slice_table(measured))
    if measured.get("calibration"):
        show(table.calibration_table(measured))


def show_json(value: object) -> None:
    """Prints a value for programs."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def show_next(command: Sequence[str]) -> None:
    """Prints the command that usually comes next."""
    print(f"next: {shlex.join(command)}")
