"""Damaged and hostile files of a corpus, bundles, a run and a state folder: what reading them leads to.

    python benchmarks/soak_files.py                  # thousands of changes of each kind of file
    python benchmarks/soak_files.py --trials 10      # of each file

tests/damage.py makes the changes, in a process of its own for each kind, because a library may crash.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from common import write_table

DAMAGE = Path(__file__).parents[1] / "tests" / "damage.py"
KINDS = (".json", ".jsonl", ".yaml", ".npy", ".safetensors", ".parquet", ".faiss", ".sqlite")
OUTCOMES = ("same", "other", "refused")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=500, help="of each file (default: 500)")
    options = parser.parse_args()
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(DAMAGE), folder, "--kind", kind]
            command += ["--trials", str(options.trials)]
            process = subprocess.run(command, capture_output=True, text=True)
        counts = Counter[str]()
        for line in process.stdout.splitlines():
            if not line.startswith('["tried"'):
                continue
            *place, outcome = json.loads(line)
            counts[outcome["kind"]] += 1
            if outcome["is_fault"]:
                print(place, outcome, flush=True)
        if process.returncode:
            print(process.stdout.splitlines()[-1:], process.stderr[-2000:], flush=True)
        faults = counts.total() - sum(counts[name] for name in OUTCOMES)
        crashes = int(process.returncode != 0)
        rows.append([kind, counts.total(), *(counts[name] for name in OUTCOMES), faults, crashes])
        print(rows[-1], flush=True)
    header = ["file", "changes", "same answer", "other answer", "refused", "faults", "crashes"]
    note = "Other answers are right only where the manifest was made to fit the changed file."
    write_table("soak_files.md", "Damaged and hostile files", header, rows, [note])


if __name__ == "__main__":
    main()
