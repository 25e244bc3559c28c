"""Refreshing the hard negatives must not hold up training: msdocs-seealso, `scheduled`, a refresh in every epoch.

    python benchmarks/refresh.py
    python benchmarks/refresh.py --data sample --quick    # does it work?

Records come every 5 steps; this process notes when each appears and when a version is published and complete. A
record counts as "while a build runs" if a version was being built for all of its steps, as "otherwise" if for none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
from common import new_parser, refuse_if_busy, write_table

from xmcray.training.launch import train
from xmcray.training.records import read_records
from xmcray.training.run import Run

LIMIT_BLOCKED = 0.01
LIMIT_SLOWER = 1.3
EVERY = 5


@dataclass
class Watcher:
    """What happened when, in seconds since the epoch.

    Attributes:
        seen: when each record appeared. builds: by folder of a version, from published to complete. recall: by version.
    """

    seen: dict[int, float] = field(default_factory=dict)
    builds: dict[str, list[float]] = field(default_factory=dict)
    recall: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def watch(self, run: Run) -> Iterator[None]:
        stop = threading.Event()
        thread = threading.Thread(target=self._follow, args=(run, stop), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _follow(self, run: Run, stop: threading.Event) -> None:
        ended = False
        while not ended:
            ended = stop.wait(0.02)
            path = run.path / "metrics.jsonl"
            if path.is_file():
                for number in range(len(self.seen), path.read_bytes().count(b"\n")):
                    self.seen[number] = time.time()
            for folder in run.negatives.glob("v*"):
                with contextlib.suppress(FileNotFoundError):
                    self._look(folder)

    def _look(self, folder: Path) -> None:
        """Versions that are no longer needed are removed while training goes on; here they stay known."""
        if folder.name not in self.builds:
            marks = list(folder.glob("published-*.json"))
            if marks and len(marks) == json.loads(marks[0].read_text())["num_ranks"]:
                self.builds[folder.name] = [max(mark.stat().st_mtime for mark in marks)]
        if len(self.builds.get(folder.name, [0, 0])) == 1 and (folder / "complete.json").is_file():
            self.builds[folder.name].append((folder / "complete.json").stat().st_mtime)
            self.recall[folder.name] = json.loads((folder / "complete.json").read_text())["recall"]


def main() -> None:
    parser = new_parser(__doc__, out="refresh.md", anyway=True)
    parser.add_argument("--data", default="msdocs-seealso", metavar="CORPUS")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--workers",
        type=int,
        default=max(1, (os.cpu_count() or 2) - 1),
        help="a core is the index's",
    )
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings laid over the preset"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small batches and vectors, printed only"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.out = Path(os.devnull)
        arguments.epochs = 4
        arguments.override += ["optim.batch_size=64", "encoder.dim=32"]
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    corpus = data_sets.corpus(arguments.data)
    if corpus is None:
        raise SystemExit(2)
    overrides = [
        f"optim.epochs={arguments.epochs}",
        "negatives.hard=50",
        "negatives.start_epoch=2",
        "negatives.refresh_every=1",
        "negatives.schedule=scheduled",
        f"cluster.workers={arguments.workers}",
        "cluster.threads_per_process=1",
        "data.validation=0",
        f"log.every={EVERY}",
        "log.validate_every=0",
        *arguments.override,
    ]
    config = data_sets.preset(corpus.card.name, overrides)
    watcher = Watcher()
    folder = Path(tempfile.mkdtemp(dir=data_sets.CACHE))
    try:
        train(corpus.path, folder / "run", config, watch=watcher.watch)
        records = read_records(folder / "run" / "metrics.jsonl")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(
        arguments,
        records,
        watcher,
        [f"{corpus.card.name}: {corpus.card.num_labels:,} labels", load],
    )


def report(
    arguments: argparse.Namespace, records: list[dict[str, Any]], watcher: Watcher, notes: list[str]
) -> None:
    steps = np.diff([0, *(record["step"] for record in records)])
    seconds = np.array([record["step_s"] for record in records]) * steps
    blocked = np.array([record["blocked_s"] for record in records])
    shares = np.array([building(watcher, i, float(seconds[i])) for i in range(len(records))])
    warm = np.arange(len(records)) >= len(records) // 10
    step_ms = np.array([record["step_s"] for record in records]) * 1e3
    rows: list[list[object]] = []
    for name, chosen in (("while a build runs", shares > 0.99), ("otherwise", shares < 0.01)):
        values = step_ms[chosen & warm & (steps == EVERY)]
        spread = (
            f"{np.quantile(values, 0.1):.1f} - {np.quantile(values, 0.9):.1f}"
            if len(values)
            else "-"
        )
        rows.append([name, len(values), float(np.median(values)) if len(values) else "-", spread])
    during = rows[0][2]
    otherwise = rows[1][2]
    is_known = isinstance(during, float) and isinstance(otherwise, float)
    took = [build[1] - build[0] for build in watcher.builds.values() if len(build) == 2]
    recall = [value for value in watcher.recall.values() if value is not None]
    ratio = f"{during / otherwise:.2f} x" if is_known else "not known: a build ran always or never,"  # type: ignore[operator]
    write_table(
        arguments.out,
        "Training while negatives are refreshed",
        ["steps", "records", "step, ms (median)", "10 % - 90 %"],
        rows,
        [
            f"trainer blocked {blocked.sum():.2f} s of {seconds.sum():.0f} s: {blocked.sum() / seconds.sum():.2%}"
            f" (at most {100 * LIMIT_BLOCKED:g} %)",
            f"a step while a build runs takes {ratio} the time of another (at most {LIMIT_SLOWER})",
            f"{len(took)} versions, {np.mean(took) if took else 0:.1f} s each from published to complete;"
            f" recall of the index {min(recall, default=float('nan')):.3f} at least",
            f"{arguments.epochs} epochs on {arguments.workers} workers of 1 thread, and as many index actors",
            *notes,
        ],
    )
    if not is_known:
        print(
            "error: no comparison; more epochs or another --workers may give one", file=sys.stderr
        )


def building(watcher: Watcher, number: int, seconds: float) -> float:
    """Share of a record's time in which some version was being built."""
    stop = watcher.seen.get(number, 0.0)
    spans = [(b[0], b[1] if len(b) == 2 else stop) for b in watcher.builds.values()]
    return sum(max(0.0, min(stop, b) - max(stop - seconds, a)) for a, b in spans) / max(
        seconds, 1e-9
    )


if __name__ == "__main__":
    main()
