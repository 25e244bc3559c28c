"""Training and serving under random sequences of faults, checked against simple models of what must hold.

    python benchmarks/state_machines.py                              # 300 sequences of each that are not done yet
    python benchmarks/state_machines.py training --sequences 20      # some of one machine
    python benchmarks/state_machines.py serving --minutes 10         # as many as fit
    python benchmarks/state_machines.py training --seed 17 --sequences 1   # one sequence again

tests/training_machine.py and tests/serving_machine.py say what the sequences do and what must hold. The number of a
sequence is its seed. What each call did is one line in a ledger in the benchmarks' cache; the table sums the lines.
Disks are filled where this process may mount one. Correctness only: it may run on a busy machine.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import data_sets
from common import new_parser, refuse_if_busy, write_table
from serving_machine import ServingMachine
from training_machine import TrainingMachine, small_disk

LEDGER = data_sets.CACHE / "state_machines"
GOAL = 300  # sequences of each machine
DISK_MB = 64
MACHINES = {"training": TrainingMachine, "serving": ServingMachine}
TITLES = {
    "training": "training: ASTRA, DEXML and PRIME, 1 to 3 ranks",
    "serving": "serving: one model, two bundles and their compactions",
}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("machine", nargs="*", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--sequences", type=int, default=GOAL, metavar="N")
    parser.add_argument("--seed", type=int, metavar="S", help="of the first sequence")
    parser.add_argument("--minutes", type=float, default=float("inf"), metavar="M")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier calls did")
    options = parser.parse_args()
    refuse_if_busy(anyway=True)
    LEDGER.mkdir(parents=True, exist_ok=True)
    for name in options.machine:
        ledger = LEDGER / f"{name}.jsonl"
        if options.fresh:
            ledger.unlink(missing_ok=True)
        first = options.seed
        last = first + options.sequences if first is not None else options.sequences
        # A call goes on where the last one ended.
        played = {line["seed"] for line in lines_of(name)} if first is None else set()
        seeds = [seed for seed in range(first or 0, last) if seed not in played]
        play(name, ledger, seeds, time.monotonic() + 60 * options.minutes)
    if write_results():
        raise SystemExit(1)


def play(name: str, ledger: Path, seeds: list[int], deadline: float) -> None:
    """Plays sequences until a time, and adds each of them to the ledger."""
    with (
        tempfile.TemporaryDirectory(prefix="xmcray-machine.") as folder,
        small_disk(Path(folder) / "disk", DISK_MB) as disk,
    ):
        machine = MACHINES[name](Path(folder), disk)
        empty = machine.tally
        for seed in seeds:
            if time.monotonic() > deadline:
                break
            machine.tally = type(empty)()
            began = time.monotonic()
            machine.run_sequence(seed)
            line = {"seed": seed, "seconds": time.monotonic() - began, **vars(machine.tally)}
            line["has_disk"] = disk is not None
            with ledger.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(name, seed, machine.tally.faults or "holds", flush=True)


def lines_of(name: str) -> list[dict[str, Any]]:
    """What earlier calls did."""
    path = LEDGER / f"{name}.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_results() -> int:
    """Writes the table of everything in the ledger; returns the number of faults."""
    rows: list[list[object]] = []
    notes = []
    num_faults = 0
    for name, title in TITLES.items():
        lines = lines_of(name)
        if not lines:
            continue
        total = sum_of(lines)
        faults = [fault for line in lines for fault in line["faults"]]
        num_faults += len(faults)
        rows.append(
            [title, len(lines), sum(total["events"].values()), figures(name, total), len(faults)]
        )
        events = [f"{event} {count}" for event, count in sorted(total["events"].items())]
        outcomes = [f"{outcome} {count}" for outcome, count in sorted(total["outcomes"].items())]
        notes.append(f"{name}, what happened: {', '.join(events)}")
        notes.append(f"{name}, how it ended: {', '.join(outcomes)}")
        notes += [f"{name}, fault: {fault[:300]}" for fault in faults]
    header = ["machine", "sequences", "events", "checked", "promises broken"]
    write_table("state_machines.md", "State machines under faults", header, rows, notes)
    return num_faults


def sum_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums of all numbers and counters of some lines."""
    total: dict[str, Any] = {}
    for line in lines:
        for key, value in line.items():
            if isinstance(value, dict):
                total[key] = total.get(key, Counter()) + Counter(value)
            elif isinstance(value, int):
                total[key] = total.get(key, 0) + value
    return total


def figures(name: str, total: dict[str, Any]) -> str:
    """What was compared, in words."""
    if name == "training":
        return (
            f"{total['attempts']:,} starts; {total['byte_equal']:,} runs byte-equal,"
            f" {total['close']:,} equal up to rounding (other number of ranks)"
        )
    return (
        f"{total['acknowledged']:,} acknowledged operations, none lost;"
        f" {total['labels_compared']:,} labels compared, {total['searches']:,} searches"
    )


if __name__ == "__main__":
    main()
