"""The cycle from what users did to a better bundle: continual.

    OUT/cycle-0001/raw/          events export
    OUT/cycle-0001/corpus/       prepare --append
    OUT/cycle-0001/run/          train --from
    OUT/cycle-0001/report.json   what came of it, after promote: the cycle is complete

Each step is a command of its own, whose result is complete or absent. So a cycle that ended in the
middle goes on with the step that it stopped at.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmcray import config
from xmcray.cli.arguments import add_config, merged_settings
from xmcray.cli.output import show_line
from xmcray.errors import ConfigError, XmcrayError, memory_errors, readable
from xmcray.storage.artifact import exclusive, refuse_artifact
from xmcray.storage.manifest import MANIFEST, read_manifest
from xmcray.storage.path_errors import disk_errors, system_errors
from xmcray.storage.whole_files import make_folder, read_json, write_json

REPORT = "report.json"
LEAST_HOURS = 0.01
MOST_HOURS = 24 * 365
_HOUR_S = 3600


@dataclass(frozen=True, kw_only=True)
class ContinualConfig:
    """Settings of the cycle.

    Attributes:
        data: the corpus that the first cycle appends to.
        run: the run that is served when the first cycle begins.
        state: state folder of the server, on this machine.
        model: name of the served model.
        url: address of the server; without one bundles are tested and not swapped in.
        token_file: token of the server's readers.
        admin_token_file: token of its administrators.
        every_hours: time from the beginning of a cycle to that of the next one.
        min_queries: training queries with feedback that a cycle waits for.
        events: further options of `events export`.
        train: further options of `train`.
        promote: further options of `promote`.
    """

    data: str
    run: str
    state: str
    model: str = "default"
    url: str | None = None
    token_file: str | None = None
    admin_token_file: str | None = None
    every_hours: float = 24.0
    min_queries: int = 100
    events: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    promote: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Python cannot wait for more than 292 years.
        config.check_range("every_hours", self.every_hours, LEAST_HOURS, MOST_HOURS)
        config.check_range("min_queries", self.min_queries, low=1)
        if self.url and not self.admin_token_file:
            raise ConfigError("a swap needs the administrator's token; set admin_token_file")


@dataclass(frozen=True, slots=True)
class _Standing:
    """Where a cycle begins.

    Attributes:
        number: of the cycle, from 1.
        corpus: the newest corpus.
        run: the run whose bundle is in use.
        after: number of the last event that the corpus has.
    """

    number: int
    corpus: str
    run: str
    after: int


class _TooLittleError(Exception):
    """What a cycle waits for."""


def continual_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("--out", required=True, metavar="DIR", help="folder of all cycles")
    add_config(verb, "YAML: data, run, state and other settings of the cycle")
    verb.add_argument("--once", action="store_true", help="one cycle, and no schedule")


def continual(options: argparse.Namespace) -> None:
    """Runs cycles on a schedule, or a single one."""
    settings = config.build(ContinualConfig, merged_settings(options))
    # Reports name corpora and runs below it, and the next command may run in another folder.
    out = Path(options.out).absolute()
    while True:
        begin = time.monotonic()
        try:
            with memory_errors(), system_errors():
                line = run_cycle(settings, out)
        except XmcrayError as error:
            if options.once:
                raise
            line = f"stopped: {' '.join(str(error).split())}; the next turn goes on with this step"
        # At once and in one line: it goes to the log of a job.
        show_line(line)
        if options.once:
            return
        left_s = _HOUR_S * settings.every_hours - (time.monotonic() - begin)
        threading.Event().wait(max(0.0, left_s))


def run_cycle(settings: ContinualConfig, out: Path) -> str:
    """Runs a cycle, or the rest of one that was stopped.

    Args:
        settings: of the cycle.
        out: folder of all cycles.
    Returns:
        What came of it, in one line.
    Raises:
        XmcrayError: a step failed. The bundle in use goes on answering.
    """
    from xmcray.training.promotion import NotPromotedError

    with disk_errors(out):
        refuse_artifact(out, "--out")
        make_folder(out)
    # Another job must not run the same cycle.
    with exclusive(out):
        start = _standing(settings, out)
        folder = out / f"cycle-{start.number:04}"
        try:
            raw = _export(settings, start, folder)
        except _TooLittleError as missing:
            # Of a cycle that waits nothing is kept.
            with contextlib.suppress(OSError):
                folder.rmdir()
            return f"cycle {start.number} waits for {missing}"
        corpus = folder / "corpus"
        words = ["prepare", str(folder / "raw"), "--append", start.corpus, "--out", str(corpus)]
        _step(corpus / MANIFEST, words)
        run = folder / "run"
        _step(run / "bundle" / MANIFEST, _train_command(settings, start, corpus, run))
        report = {**raw, "cycle": start.number, "corpus": str(corpus), "run": start.run}
        try:
            _run(_promote_command(settings, start, corpus, run))
            report["run"] = str(run)
            outcome = "promoted"
        except NotPromotedError as refusal:
            outcome = str(refusal)
        report["outcome"] = outcome
        write_json(folder / REPORT, report)
    return (
        f"cycle {start.number}: {raw['train']:,} training and {raw['test']:,} test queries of events"
        f" {raw['first']:,} to {raw['last']:,}: {outcome}"
    )


def _standing(settings: ContinualConfig, out: Path) -> _Standing:
    """Where the next cycle begins, by the report of the last one that is complete."""
    # By length first, because cycle-10000 comes after cycle-9999.
    reports = sorted(
        out.glob(f"cycle-*/{REPORT}"), key=lambda path: (len(path.parent.name), path.parent.name)
    )
    if not reports:
        return _Standing(1, settings.data, settings.run, 0)
    with readable(f"{reports[-1]} is damaged", "restore it, or choose another --out"):
        last = read_json(reports[-1])
        # A corpus is gone on with also if the bundle that was trained on it was refused.
        return _Standing(
            int(last["cycle"]) + 1, str(last["corpus"]), str(last["run"]), int(last["last"])
        )


def _export(settings: ContinualConfig, start: _Standing, folder: Path) -> Mapping[str, Any]:
    """What the raw files of the cycle consist of.

    Raises:
        _TooLittleError: there is too little feedback for a cycle.
    """
    from xmcray.data.corpus import Corpus
    from xmcray.serving.event_export import KIND, NoFeedbackError

    raw = folder / "raw"
    feedback = f"feedback after event {start.after:,}"
    words = ["events", "export", settings.state, "--model", settings.model, "--out", str(raw)]
    words += ["--data", start.corpus, "--after", str(start.after), *settings.events]
    with disk_errors(folder):
        folder.mkdir(exist_ok=True)
    try:
        _step(raw / MANIFEST, words)
    except NoFeedbackError:
        raise _TooLittleError(feedback) from None
    about = read_manifest(raw, KIND).about
    if (folder / "corpus" / MANIFEST).exists():
        return about  # a turn before this one found it enough
    missing = ""
    if about["train"] < settings.min_queries:
        missing = feedback
    # Without a test query `promote` could not compare the bundles, now and in every later turn.
    elif not about["test"] and not Corpus.open(start.corpus, verify=False).card.num_rows("test"):
        missing = f"a test query: {start.corpus} has none, and {feedback} gave none"
    if missing:
        # The next turn exports these events again, and those that came since. `_step` also removes
        # what is left under this name by a process that was killed here.
        unused = folder / f".{raw.name}.unused"
        raw.rename(unused)
        shutil.rmtree(unused)
        raise _TooLittleError(missing)
    return about


def _train_command(
    settings: ContinualConfig, start: _Standing, corpus: Path, run: Path
) -> list[str]:
    from xmcray.training.run import Run

    method = Run.open(start.run).config.method_name
    words = ["train", method, "--data", str(corpus), "--from", start.run, "--out", str(run)]
    # `promote` measures both bundles on the same queries.
    return [*words, "--no-evaluate", *settings.train]


def _promote_command(
    settings: ContinualConfig, start: _Standing, corpus: Path, run: Path
) -> list[str]:
    words = ["promote", start.run, str(run), "--data", str(corpus)]
    if settings.url:
        words += ["--url", settings.url, "--model", settings.model]
        for name in ("token_file", "admin_token_file"):
            value = getattr(settings, name)
            if value:
                words += [f"--{name.replace('_', '-')}", value]
    return [*words, *settings.promote]


def _step(result: Path, words: list[str]) -> None:
    """Runs a step, unless its result is there."""
    if result.exists():
        return
    # Left by a process that was killed here.
    for unfinished in result.parent.parent.glob(f".{result.parent.name}.*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    _run(words)


def _run(words: list[str]) -> None:
    """Runs a command of this program in this process."""
    from xmcray import cli

    show_line(f"$ {shlex.join(['xmcray', *words])}")
    options = cli.parser().parse_args(words)
    run: Callable[[argparse.Namespace], None] = options.run
    run(options)
