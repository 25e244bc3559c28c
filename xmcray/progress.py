"""What a user sees on stderr while something runs: a bar on a terminal, else one line per epoch.

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
Show = Callable[[Record], None]


@contextlib.contextmanager
def watch_training(run: Run) -> Iterator[None]:
    """Shows the run's records until the block ends."""
    console = Console(stderr=True)
    if logs.as_json():
        display = _json(run)
    elif console.is_terminal:
        display = _bar(run, console)
    else:
        display = _lines(run)
    records = run.path / "metrics.jsonl"
    # The display is opened first and closed last: records that arrive at the end are still shown.
    with display as show, logs.about(run.id), following(records, show):
        yield


@contextlib.contextmanager
def counting(what: str, total: int, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar for work that knows how many of `total` items are done; silent unless on a terminal."""
    console = Console(stderr=True)
    silent = not shown or logs.as_json() or not console.is_terminal
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=silent,
        transient=True,
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextlib.contextmanager
def _bar(run: Run, console: Console) -> Iterator[Show]:
    newest = _NewestValues()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task(_name(run), total=None, figures="starting")

        def show(record: Record) -> None:
            if newest.is_rewound_by(record):
                # Through the bar's console, which prints above the bar instead of into it.
                progress.console.print(_rewound(run, record), highlight=False)
            newest.add(record)
            # Unknown until the first record that has it; until then the bar pulses.
            total = newest.values.get("last_step")
            progress.update(task, completed=record["step"], total=total, figures=newest.text())

        yield show


@contextlib.contextmanager
def _lines(run: Run) -> Iterator[Show]:
    """One line per epoch: written when the next one begins, and at the end."""
    newest = _NewestValues()

    def print_epoch() -> None:
        if "epoch" in newest.values:
            epoch = newest.values["epoch"] + 1
            print(f"{_name(run)}: epoch {epoch}, {newest.text()}", file=sys.stderr, flush=True)

    def show(record: Record) -> None:
        epoch = record["epoch"]
        if newest.is_rewound_by(record):
            # The epoch that is repeated gets its line when it ends the second time.
            print(_rewound(run, record), file=sys.stderr, flush=True)
        elif epoch != newest.values.get("epoch", epoch):
            print_epoch()
        newest.add(record)

    yield show
    print_epoch()


@contextlib.contextmanager
def _json(run: Run) -> Iterator[Show]:
    """Every record, for programs."""
    newest = _NewestValues()

    def show(record: Record) -> None:
        if newest.is_rewound_by(record):
            logger.warning(_rewound(run, record))
        newest.add(record)
        # Only the records of training steps have a loss.
        kind = "step" if "loss" in record else "validation"
        logs.log_values(kind, record)

    yield show


class _NewestValues:
    """The newest value of each field of the records so far.

    Steps and validations are records of their own and have different fields.
    """

    def __init__(self) -> None:
        self.values: Record = {}

    def add(self, record: Record) -> None:
        # Values of steps that are trained again would be shown as if they were new.
        if self.is_rewound_by(record):
            self.values.clear()
        self.values.update(record)

    def is_rewound_by(self, record: Record) -> bool:
        """Whether a record lies before those seen: training went back to a checkpoint."""
        return bool(record["step"] < self.values.get("step", 0))

    def text(self) -> str:
        values = self.values
        parts = [f"step {values['step']:,}"]
        if "loss" in values:
            parts.append(f"loss {values['loss']:.4g}")
            parts.append(f"{values['queries_per_s']:,.0f} queries/s")
        # None as long as no mined negatives are in use.
        age = values.get("negatives_age")
        if age is not None:
            parts.append(f"negatives {age:,} steps old")
        late_step = values.get("schedule_broken_at_step")
        if late_step is not None:
            parts.append(f"late since step {late_step:,}: the run cannot be repeated exactly")
        if "P@1" in values:
            parts.append(f"validation P@1 {100 * values['P@1']:.1f}")
        return ", ".join(parts)


def _rewound(run: Run, record: Record) -> str:
    return (
        f"{_name(run)}: a worker was lost and replaced;"
        f" continued from its checkpoint, now at step {record['step']:,}"
    )


def _name(run: Run) -> str:
    """The method, and which of the two trainings of a refit this is."""
    method = run.config.method_name
    # A refit first trains in a folder of that name within the run, which holds the lock.
    if run.path.name == SELECTION and (run.path.parent / "lock").exists():
        return f"{method} (choosing epochs)"
    if (run.path / SELECTION).is_dir():
        return f"{method} (refit)"
    return method
