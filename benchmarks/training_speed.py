"""Queries a second of a static encoder's training, compared with a former state of the project.

    git worktree add FORMER 774f559
    python benchmarks/training_speed.py --former FORMER [--set msdocs-links] [--rounds 3]

Both checkouts prepare a corpus of their own, because its layout may differ, and train one epoch of
ASTRA with their own preset of the set, in one process. They take turns, so that other processes and
the frequency of the processor disturb both alike. A round's figure is the median of the speeds that
the run wrote down.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import data_sets
import numpy as np
from common import new_parser, refuse_if_busy, set_options, write_table

HEADER = ["set", "checkout", "queries/s, median", "lowest", "highest", "times the former"]
# The entry point had another name once.
COMMAND = "import xmcray.cli as cli; raise SystemExit(getattr(cli, 'command', cli.main)())"
SETTINGS = ("optim.epochs=1", "data.validation=0", "log.validate_every=0", "log.every=10")


def main() -> None:
    parser = new_parser(__doc__, out="training_speed.md", threads=2, anyway=True)
    parser.add_argument("--former", type=Path, required=True, help="folder of the other checkout")
    parser.add_argument("--set", dest="name", default="msdocs-links")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    load = refuse_if_busy(options.anyway)
    checkouts = {"former": options.former.resolve(), "now": data_sets.ROOT}
    speeds: dict[str, list[float]] = {side: [] for side in checkouts}
    for _ in range(options.rounds):
        for side, checkout in checkouts.items():
            speed = queries_per_s(side, checkout, options.name, options.threads)
            speeds[side].append(speed)
            print(f"{side}: {speed:.0f} queries/s", flush=True)
    former = float(np.median(speeds["former"]))
    table: list[list[object]] = []
    for side, checkout in checkouts.items():
        median = float(np.median(speeds[side]))
        name = f"{side} ({commit_of(checkout)})"
        lowest = min(speeds[side])
        highest = max(speeds[side])
        table.append([options.name, name, median, lowest, highest, median / former])
    notes = [
        f"one epoch of ASTRA with the preset of the set, in one process with {options.threads} threads;"
        f" {options.rounds} rounds, taken in turns",
        "goal: 1.5 times the queries/s of 774f559 on msdocs-links",
        load,
    ]
    write_table(options.out, "The speed of static training", HEADER, table, notes)


def queries_per_s(side: str, checkout: Path, name: str, threads: int) -> float:
    """The speed of one training by a checkout's own code."""
    folder = data_sets.CACHE / "training_speed" / side
    corpus = folder / name
    run = folder / "run"
    if not corpus.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        command(checkout, ["prepare", data_sets.DATA / name, "--out", corpus])
    shutil.rmtree(run, ignore_errors=True)
    words: list[str | Path] = ["train", "astra", "--data", corpus, "--out", run]
    words += ["--config", f"preset:astra/{name}", "--workers", "0"]
    words += set_options([*SETTINGS, f"cluster.threads_per_process={threads}"])
    command(checkout, words)
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return float(np.median([record["queries_per_s"] for record in records if "step" in record]))


def command(checkout: Path, words: list[str | Path]) -> None:
    """Runs `xmcray` of a checkout."""
    settings = {**os.environ, "PYTHONPATH": str(checkout)}
    subprocess.run([sys.executable, "-c", COMMAND, *words], env=settings, check=True)


def commit_of(checkout: Path) -> str:
    git = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    main()
