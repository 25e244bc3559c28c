"""Damaged and hostile files of a corpus, bundles, a run and a state folder: what reading them leads to.

    python benchmarks/soak_files.py                              # 5,000 changes of each kind of file
    python benchmarks/soak_files.py --kind .npy --changes 100    # some of one kind

tests/damage.py makes the changes, in a process of its own for each call and kind, because a library
may crash. What each of them did is one line in a ledger in the benchmarks' cache. The next call goes
on from there, and the table sums the lines; `--fresh` forgets those of the chosen kinds. A kind without
lines keeps its row of the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import data_sets
from common import RESULTS, commit, write_table

DAMAGE = Path(__file__).parents[1] / "tests" / "damage.py"
KINDS = (
    ".json",
    ".jsonl",
    ".yaml",
    ".npy",
    ".npz",
    ".safetensors",
    ".parquet",
    ".faiss",
    ".sqlite",
)
TABLE = "soak_files.md"
LEDGER = data_sets.CACHE / "soak_files.jsonl"
GOAL = 5000  # changes of each kind
OUTCOMES = ("same", "other", "refused")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--changes", type=int, default=GOAL, metavar="N", help="of each kind")
    parser.add_argument("--fresh", action="store_true", help="forget earlier changes of the kinds")
    options = parser.parse_args()
    LEDGER.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        kept = [json.dumps(line) + "\n" for line in lines() if line["kind"] not in options.kind]
        LEDGER.write_text("".join(kept))
    for kind in options.kind:
        earlier = [line for line in lines() if line["kind"] == kind]
        num_left = options.changes - sum(sum(line["counts"].values()) for line in earlier)
        if num_left > 0:
            line = change_files(kind, num_left, first=sum(line["changes"] for line in earlier))
            with LEDGER.open("a") as file:
                file.write(json.dumps(line) + "\n")
            write_results()
    if write_results():
        raise SystemExit(1)


def change_files(kind: str, num_changes: int, first: int) -> dict[str, Any]:
    """Changes files of one kind, with seeds from `first` on; returns a line of the ledger."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(DAMAGE), folder, "--kind", kind]
        command += ["--changes", str(num_changes), "--first", str(first)]
        process = subprocess.run(command, capture_output=True, text=True)
    counts = Counter[str]()
    faults = []
    for line in process.stdout.splitlines():
        if not line.startswith('["tried"'):
            continue
        *place, outcome = json.loads(line)
        counts[outcome["kind"]] += 1
        if outcome["is_fault"]:
            print(place, outcome, flush=True)
            faults.append(f"{place}: {outcome['change']}: {outcome['kind']}")
    crashes = int(process.returncode != 0)
    if crashes:
        print(process.stdout.splitlines()[-1:], process.stderr[-2000:], flush=True)
    print(kind, dict(counts), flush=True)
    return {
        "kind": kind,
        "changes": num_changes,
        "counts": counts,
        "faults": faults,
        "crashes": crashes,
        "commit": commit(),
    }


def lines() -> list[dict[str, Any]]:
    """What earlier calls did."""
    if not LEDGER.is_file():
        return []
    return [json.loads(line) for line in LEDGER.read_text().splitlines()]


def earlier_rows() -> dict[str, Sequence[object]]:
    """The rows of the table as it is, by kind."""
    rows: dict[str, Sequence[object]] = {}
    for line in (RESULTS / TABLE).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in KINDS:
            rows[cells[0]] = cells
    return rows


def write_results() -> int:
    """Writes the table of everything in the ledger; returns the number of faults and crashes."""
    earlier = earlier_rows()
    rows: list[Sequence[object]] = []
    num_wrong = 0
    for kind in KINDS:
        of_kind = [line for line in lines() if line["kind"] == kind]
        counts = sum((Counter(line["counts"]) for line in of_kind), Counter[str]())
        faults = sum(len(line["faults"]) for line in of_kind)
        crashes = sum(line["crashes"] for line in of_kind)
        num_wrong += faults + crashes
        if counts:
            outcomes = [counts[name] for name in OUTCOMES]
            newest = of_kind[-1]["commit"]
            rows.append([kind, counts.total(), *outcomes, faults, crashes, newest])
        elif kind in earlier:
            rows.append(earlier[kind])
    header = ["file", "changes", "same answer", "other answer", "refused"]
    header += ["faults", "crashes", "commit"]
    notes = [
        "Other answers are right only where the manifest was made to fit the changed file.",
        "commit: of the row's newest changes; rows of another commit may be of other machines",
    ]
    write_table(TABLE, "Damaged and hostile files", header, rows, notes)
    return num_wrong


if __name__ == "__main__":
    main()
