"""The output of commands: tables and lines on stdout, JSON for programs, and the next command."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from xmcray.errors import StorageError
from xmcray.terminal import printable, printable_json, printable_lines


def show(content: Any) -> None:
    """Prints a table, or what else rich can render, on stdout."""
    from rich.console import Console

    # rich would colour numbers and paths, take [brackets] for markup and :names: for emoji, and
    # squeeze tables into 80 columns in a pipe.
    width = None if Console().is_terminal else 160
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    with output_errors():
        console.print(_Printable(content))


class _Printable:
    """Content of rich whose texts a terminal shows and does not obey."""

    def __init__(self, content: Any) -> None:
        self._content = content

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Called by rich; gives the content's segments, in which all text is."""
        from rich.segment import Segment

        for segment in console.render(self._content, options):
            if segment.control:
                # A code of rich itself, such as one that moves the cursor.
                yield segment
            else:
                yield Segment(printable_lines(segment.text), segment.style)


def show_line(text: str) -> None:
    """Prints one line on stdout at once, without wrapping it."""
    with output_errors():
        print(printable(text), flush=True)


def show_text(text: str) -> None:
    """Prints a text of our own as it is, such as a file."""
    with output_errors():
        print(text, end="")


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
    text = printable_json(value)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        # stdout would write escapes of Python, which are not those of JSON.
        text = printable_json(value, ascii_only=True)
    show_text(f"{text}\n")


def show_next(command: Sequence[str]) -> None:
    """Prints the command that usually comes next."""
    show_line(f"next: {shlex.join(command)}")


@contextlib.contextmanager
def output_errors() -> Iterator[None]:
    """Turns a failure to write stdout, as on a full disk, into a StorageError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        raise StorageError(
            f"the output cannot be written ({error.strerror}); free some space, or write it elsewhere"
        ) from error


def drop_output() -> None:
    """Discards what stdout still holds. Python would complain when it flushes that at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
