"""A server's memory while labels come and go as fast as it answers, without other load on the machine.

    python benchmarks/soak_changes.py                  # 16,000 rounds: more than four hours of soak_hours.py
    python benchmarks/soak_changes.py --rounds 400     # does it work?

A round is that of soak_hours.py: four searches, and in every fourth one a label that is added and
deleted; swaps and compactions in between. Flat is: from a quarter of the rounds to the last one,
memory without pages of files grows by less than 2 %, and open files and threads do not grow.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import data_sets
import psutil
from common import new_parser, refuse_if_busy, write_table
from soak_hours import MEMORY_LIMIT, Load, anonymous_mib
from xmcray_serve import Server

from xmcray.retrieval.labels import NewLabel, add_labels

sys.path.insert(0, str(data_sets.ROOT / "tests"))
from bundles import write_bundle_of
from replicas import client_of

POINTS = 16


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=16_000)
    arguments = parser.parse_args()
    load = refuse_if_busy(anyway=True)
    with tempfile.TemporaryDirectory(prefix="xmcray-soak.") as folder:
        rows, notes = soak(Path(folder), arguments.rounds)
    header = ["rounds", "changes of labels", "memory MiB", "files", "threads"]
    write_table(
        "soak_changes.md", "A server while labels come and go", header, rows, [*notes, load]
    )
    if not is_flat(rows):
        raise SystemExit("error: the server grows; see the table")


def soak(folder: Path, num_rounds: int) -> tuple[list[list[object]], list[str]]:
    """Plays the rounds; returns the table and its notes."""
    bundle = write_bundle_of(folder / "bundle", "texts")
    other = folder / "other"
    add_labels(bundle, [NewLabel("extra", "matrix vector norm")], other)
    server = Server(bundle, folder / "state")
    process = psutil.Process(server.process.pid)
    rows: list[list[object]] = []
    try:
        with client_of(f"http://127.0.0.1:{server.port}", folder / "state") as client:
            load = Load(client, [bundle, other], folder)
            for number in range(num_rounds):
                load.play(number)
                if (number + 1) % (num_rounds // POINTS) == 0:
                    memory = f"{anonymous_mib(process.pid):.1f}"
                    counts = [process.num_fds(), process.num_threads()]
                    rows.append([number + 1, load.changes, memory, *counts])
    finally:
        server.close()
    note = (
        f"{load.searches:,} searches, {load.changes:,} changes of labels, {load.swaps} swaps,"
        f" {load.compactions} compactions"
    )
    return rows, [note]


def is_flat(rows: list[list[object]]) -> bool:
    """Whether nothing grew after the first quarter, in which pools and caches fill."""
    _, _, memory, *counts = rows[POINTS // 4 - 1]
    _, _, last_memory, *last_counts = rows[-1]
    grown = float(str(last_memory)) / float(str(memory)) - 1
    pairs = zip(last_counts, counts, strict=True)
    return grown < MEMORY_LIMIT and all(int(str(b)) <= int(str(a)) for b, a in pairs)


if __name__ == "__main__":
    main()
