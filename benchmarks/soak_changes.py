"""A server's memory while labels come and go as fast as it answers, without other load on the machine.

    python benchmarks/soak_changes.py                  # 16,000 rounds: more than four hours of soak_hours.py
    python benchmarks/soak_changes.py --rounds 400     # does it work?

A round is that of soak_hours.py: four searches, and in every fourth one a label that is added and
deleted; swaps and compactions in between. The first quarter is left out, because pools and caches
fill. Flat is what it is there: along a straight line, memory without pages of files grows by less
than 2 % or 4 MiB in as many rounds as it plays in an hour, whichever is more. Open files and threads
must not grow at all.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import data_sets
import numpy as np
import psutil
from common import new_parser, refuse_if_busy, write_table
from soak_hours import MEMORY_LIMIT, MEMORY_LIMIT_MIB, Load, anonymous_mib
from xmcray_serve import Server

from xmcray.retrieval.labels import NewLabel, add_labels
from xmcray.types import Float64Array

sys.path.insert(0, str(data_sets.ROOT / "tests"))
from bundles import write_bundle_of
from replicas import client_of

POINTS = 16
ROUNDS_AN_HOUR = 3700  # of soak_hours.py


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=16_000)
    arguments = parser.parse_args()
    load = refuse_if_busy(anyway=True)
    with tempfile.TemporaryDirectory(prefix="xmcray-soak.") as folder:
        counts, note = soak(Path(folder), arguments.rounds)
    later = counts[POINTS // 4 :]
    slope = float(np.polyfit(later[:, 0], later[:, 2], 1)[0]) * ROUNDS_AN_HOUR
    notes = [
        note,
        f"{slope:+.2f} MiB in {ROUNDS_AN_HOUR:,} rounds, which soak_hours.py plays in an hour",
        load,
    ]
    header = ["rounds", "changes of labels", "memory MiB", "files", "threads"]
    rows = [
        [f"{rounds:,.0f}", f"{changes:,.0f}", f"{memory:.1f}", f"{files:.0f}", f"{threads:.0f}"]
        for rounds, changes, memory, files, threads in counts
    ]
    write_table("soak_changes.md", "A server while labels come and go", header, rows, notes)
    limit = max(MEMORY_LIMIT * later[0, 2], MEMORY_LIMIT_MIB)
    if slope >= limit or np.any(later[-1, 3:] > later[0, 3:]):
        raise SystemExit("error: the server grows; see the table")


def soak(folder: Path, num_rounds: int) -> tuple[Float64Array, str]:
    """Plays the rounds.

    Returns:
        float64 [POINTS, 5], rounds, changes of labels, MiB of memory, open files and threads so
        far; and what was played.
    """
    bundle = write_bundle_of(folder / "bundle", "texts")
    other = folder / "other"
    add_labels(bundle, [NewLabel("extra", "matrix vector norm")], other)
    server = Server(bundle, folder / "state")
    process = psutil.Process(server.process.pid)
    counts = []
    try:
        with client_of(f"http://127.0.0.1:{server.port}", folder / "state") as client:
            load = Load(client, [bundle, other], folder)
            for number in range(num_rounds):
                load.play(number)
                if (number + 1) % (num_rounds // POINTS) == 0:
                    memory = anonymous_mib(process.pid)
                    point = [load.changes, memory, process.num_fds(), process.num_threads()]
                    counts.append([number + 1, *point])
    finally:
        server.close()
    note = (
        f"{load.searches:,} searches, {load.changes:,} changes of labels, {load.swaps} swaps,"
        f" {load.compactions} compactions"
    )
    return np.array(counts[:POINTS], np.float64), note


if __name__ == "__main__":
    main()
