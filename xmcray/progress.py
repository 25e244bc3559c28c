"""What a user sees while something runs: one bar on a terminal, one line per epoch elsewhere; always on stderr.

Programs get every record (logs.py).
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from xmcray import logs
from xmcray.training.records import Record, following
from xmcray.training.run import SELECTION, Run

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def watch_training(run: Run) -> Iterator[None]:
    """Shows the run's records until the block ends."""
    console = Console(stderr=True)
    how = (
        _json(run) if logs.as_json() else _bar(run, console) if console.is_terminal else _lines(run)
    )
    with how as show, logs.about(run.id), following(run.path / "metrics.jsonl", show):
        yield


@contextlib.contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar for something that knows how many of `total` it has done; silent unless stderr is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    silent = logs.as_json() or not console.is_terminal
    with Progress(*columns, console=console, disable=silent, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextlib.contextmanager
def _bar(run: Run, console: Console) -> Iterator[Callable[[Record], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    figures = _Figures()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(_name(run), total=None, figures="starting")

        def show(record: Record) -> None:
            if figures.goes_back(record):
                progress.console.print(_back(run, record), highlight=False)
            figures.add(record)
            total = figures.values.get("last_step")
            progress.update(task, completed=record["step"], total=total, figures=figures.text())

        yield show


@contextlib.contextmanager
def _lines(run: Run) -> Iterator[Callable[[Record], None]]:
    """One line per epoch: written when the next one begins, and at the end."""
    figures = _Figures()

    def line() -> None:
        if "epoch" in figures.values:
            print(
                f"{_name(run)}: epoch {figures.values['epoch'] + 1}, {figures.text()}",
                file=sys.stderr,
                flush=True,
            )

    def show(record: Record) -> None:
        if figures.goes_back(record):
            print(_back(run, record), file=sys.stderr, flush=True)
        elif record["epoch"] != figures.values.get("epoch", record["epoch"]):
            line()
        figures.add(record)

    yield show
    line()


@contextlib.contextmanager
def _json(run: Run) -> Iterator[Callable[[Record], None]]:
    """Every record, for programs."""
    figures = _Figures()

    def show(record: Record) -> None:
        if figures.goes_back(record):
            logger.warning(_back(run, record))
        figures.add(record)
        logs.tell("step" if "loss" in record else "validation", record)

    yield show


class _Figures:
    """The newest value of everything records tell."""

    def __init__(self) -> None:
        self.values: Record = {}

    def add(self, record: Record) -> None:
        if self.goes_back(record):
            self.values.clear()
        self.values.update(record)

    def goes_back(self, record: Record) -> bool:
        return bool(record["step"] < self.values.get("step", 0))

    def text(self) -> str:
        values = self.values
        parts = [f"step {values['step']:,}"]
        if "loss" in values:
            parts += [f"loss {values['loss']:.4g}", f"{values['queries_per_s']:,.0f} queries/s"]
        if values.get("negatives_age") is not None:
            parts.append(f"negatives {values['negatives_age']:,} steps old")
        if values.get("schedule_broken_at_step") is not None:
            parts.append(
                f"late since step {values['schedule_broken_at_step']:,}: the run cannot be repeated exactly"
            )
        if "P@1" in values:
            parts.append(f"validation P@1 {100 * values['P@1']:.1f}")
        return ", ".join(parts)


def _back(run: Run, record: Record) -> str:
    return f"{_name(run)}: a worker was lost and replaced; continued from its checkpoint, now at step {record['step']:,}"


def _name(run: Run) -> str:
    """The method, and which part of a refit this is."""
    if run.path.name == SELECTION and (run.path.parent / "lock").exists():
        return f"{run.config.method_name} (choosing epochs)"
    return (
        f"{run.config.method_name} (refit)"
        if (run.path / SELECTION).is_dir()
        else run.config.method_name
    )
