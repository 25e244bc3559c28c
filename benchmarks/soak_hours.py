"""Hours of serving and of training under Ray: memory, open files and threads of each process must stay flat.

    python benchmarks/soak_hours.py                  # two hours
    python benchmarks/soak_hours.py --minutes 5      # does it work?

A server in one process gets searches, new and deleted labels, hot swaps and compactions. What a
compaction writes is swapped in, as an operator would do it: until then a server remembers every
change, which is growth that is meant. At the same time a training with hard negatives runs, with
two workers and its index actors. Every 15 seconds each process is measured: its memory without
pages of files, open files and threads. The first
quarter is left out, because pools and caches fill. A straight line through the medians of ten equal
spans of the rest is the trend. Flat is: memory grows by less than 2 % or 4 MiB an hour, whichever is
more; open files and threads by less than one an hour.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
import psutil
from common import refuse_if_busy, write_table
from planted import write_planted
from soak import OF_METHOD, SETTINGS
from soak_serving import Server

from xmcray.retrieval.labels import NewLabel, add_labels
from xmcray.serving.schema import Operation

sys.path.insert(0, str(data_sets.ROOT / "tests"))
from bundles import TEXTS, WORDS, write_bundle_of
from processes import descendants, kill_family, last_step
from replicas import client_of

EVERY_S = 15.0  # between two measurements of a process
ROUND_S = 0.5  # between two searches
SWAP_ROUNDS = 240
COMPACT_ROUNDS = 300
SPANS = 10
MEMORY_LIMIT = 0.02  # of its size, in an hour
MEMORY_LIMIT_MIB = 4.0
COUNT_LIMIT = 1.0  # files or threads in an hour
KINDS = {
    "RayTrainWorker": "training: worker",
    "IndexShard": "training: index actor",
    "IndexCoordinator": "training: coordinator of the index",
    "Controller": "training: controller of Ray Train",
    "gcs_server": "Ray: GCS",
    "raylet": "Ray: raylet",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """A process at a moment.

    Attributes:
        hours: since the beginning.
        memory_mib: resident and swapped memory without pages of files.
        files: number of open files.
        threads: number of threads.
    """

    hours: float
    memory_mib: float
    files: int
    threads: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    arguments = parser.parse_args()
    load = refuse_if_busy(anyway=True)
    with tempfile.TemporaryDirectory(prefix="xmcray-soak.") as folder:
        rows, notes = soak(Path(folder), arguments.minutes)
    header = ["process", "hours", "memory MiB", "MiB an hour", "files", "threads", "flat"]
    notes.append(load)
    write_table("soak_hours.md", "Hours of serving and training", header, rows, notes)
    if not rows:
        raise SystemExit("error: too short a time for a trend; give more --minutes")
    if any(row[-1] != "yes" for row in rows):
        raise SystemExit("error: a process grows; see the table")


def soak(folder: Path, minutes: float) -> tuple[list[list[object]], list[str]]:
    """Serves and trains at the same time; returns the table and its notes."""
    training = start_training(folder)
    bundle = write_bundle_of(folder / "bundle", "texts")
    other = folder / "other"
    add_labels(bundle, [NewLabel("extra", "matrix vector norm")], other)
    server = Server(bundle, folder / "state")
    samples: dict[tuple[int, str], list[Sample]] = defaultdict(list)
    began = time.monotonic()
    measured = -EVERY_S
    rounds = 0
    try:
        with client_of(f"http://127.0.0.1:{server.port}", folder / "state") as client:
            load = Load(client, [bundle, other], folder)
            while (elapsed := time.monotonic() - began) < 60 * minutes:
                if training.poll() is not None:
                    raise SystemExit(f"error: training ended with code {training.returncode}")
                load.play(rounds)
                rounds += 1
                if elapsed - measured >= EVERY_S:
                    measured = elapsed
                    measure(samples, server.process.pid, training.pid, elapsed / 3600)
                time.sleep(ROUND_S)
        steps = last_step(folder / "run")
    finally:
        server.close()
        family = descendants(training.pid)
        training.send_signal(signal.SIGTERM)
        try:
            training.wait(60)
        except subprocess.TimeoutExpired:
            training.kill()
        kill_family(family)
    notes = [
        f"{load.searches:,} searches, {load.changes:,} changes of labels, {load.swaps} swaps,"
        f" {load.compactions} compactions; {steps:,} steps of training",
        "MiB an hour: slope of a line through the medians of ten spans, without the first quarter",
        "memory, files and threads: median of the first and of the last span",
    ]
    return table(samples, minutes / 60), notes


class Load:
    """What clients and operators of the server do.

    Attributes:
        searches: number so far.
        changes: number of operations on labels so far.
        swaps: number so far.
        compactions: number so far.
    """

    def __init__(self, client: object, bundles: Sequence[Path], folder: Path) -> None:
        self.searches = 0
        self.changes = 0
        self.swaps = 0
        self.compactions = 0
        self._client: Any = client
        self._bundles = bundles
        self._folder = folder
        self._draw = random.Random(0)

    def play(self, number: int) -> None:
        """One round; `number` counts them from 0."""
        for _ in range(4):
            texts = self._draw.sample(TEXTS, 3)
            assert len(self._client.search(texts, 10).results) == 3
            self.searches += 1
        if number % 4 == 0:
            uid = f"n{number}"
            text = " ".join(self._draw.sample(WORDS, 3))
            self._client.change_labels([Operation(op="add", uid=uid, text=text)])
            self._client.change_labels([Operation(op="delete", uid=uid)])
            self.changes += 2
        if number % SWAP_ROUNDS == SWAP_ROUNDS - 1:
            self.swaps += 1
            self._client.swap(str(self._bundles[self.swaps % 2]))
        if number % COMPACT_ROUNDS == COMPACT_ROUNDS - 1:
            compacted = self._folder / f"compacted-{number}"
            self._client.compact(str(compacted))
            # Later swaps are between the two newest bundles.
            self._bundles = [self._bundles[1], compacted]
            self.compactions += 1


def start_training(folder: Path) -> subprocess.Popen[bytes]:
    """A training that does not end in the time of the soak, with a refresh in every epoch."""
    corpus = data_sets.prepared(
        "soak", lambda raw: write_planted(raw, num_queries=6000, num_labels=2000)
    ).path
    command = [str(Path(sys.executable).parent / "xmcray"), "train", "astra", "--no-evaluate"]
    command += ["--data", str(corpus), "--out", str(folder / "run")]
    for setting in [*SETTINGS, *OF_METHOD["astra"], "optim.epochs=100000"]:
        command += ["--set", setting]
    with (folder / "training.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    deadline = time.monotonic() + 300
    while last_step(folder / "run") == 0:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise SystemExit((folder / "training.log").read_text()[-2000:])
        time.sleep(0.5)
    return process


def measure(
    samples: dict[tuple[int, str], list[Sample]], server: int, training: int, hours: float
) -> None:
    """Adds a sample of each process that is of interest."""
    names = {server: "server", training: "training: driver"}
    for pid, command in descendants(training).items():
        for word, name in KINDS.items():
            if word in command:
                names.setdefault(pid, name)
    for pid, name in names.items():
        try:
            process = psutil.Process(pid)
            memory_mib = anonymous_mib(pid)
            sample = Sample(hours, memory_mib, process.num_fds(), process.num_threads())
        except (psutil.NoSuchProcess, OSError):
            continue
        samples[pid, name].append(sample)


def anonymous_mib(pid: int) -> float:
    """Memory of a process that no file backs, also where it is swapped out.

    Mapped files count as memory of a process as long as the kernel has room for their pages.
    """
    num_kib = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name in ("Anonymous", "Swap"):
            num_kib += int(value.split()[0])
    return num_kib / 1024


def table(samples: Mapping[tuple[int, str], Sequence[Sample]], hours: float) -> list[list[object]]:
    """A row for each process that lived through the whole time."""
    rows: list[list[object]] = []
    for (_, name), all_samples in samples.items():
        later = [sample for sample in all_samples if sample.hours >= hours / 4]
        if len(later) < len(all_samples) / 2 or len(later) < SPANS:
            continue
        spans = np.array_split(np.arange(len(later)), SPANS)
        cells: list[object] = [name, f"{later[-1].hours:.2f}"]
        flat = True
        for measure_name in ("memory_mib", "files", "threads"):
            values = np.array([getattr(sample, measure_name) for sample in later], float)
            times = np.array([sample.hours for sample in later])
            medians = [float(np.median(values[span])) for span in spans]
            middles = [float(np.median(times[span])) for span in spans]
            slope = float(np.polyfit(middles, medians, 1)[0])
            cells.append(f"{medians[0]:.0f} → {medians[-1]:.0f}")
            if measure_name == "memory_mib":
                cells.append(f"{slope:+.2f}")
                flat &= slope < max(MEMORY_LIMIT * medians[0], MEMORY_LIMIT_MIB)
            else:
                flat &= slope < COUNT_LIMIT
        rows.append([*cells, "yes" if flat else "no"])
    return rows


if __name__ == "__main__":
    main()
