"""ASHA against training every trial to its end: training steps and the best validation P@1 of the same trials.

    python benchmarks/asha.py                        # 16 trials of ASTRA on the sample, minutes
    python benchmarks/asha.py --trials 4 --set optim.epochs=4 --anyway     # does it work?

Both sweeps draw the same settings from tune/spaces/astra.yaml (a function of seed and trial number), so the difference
is the scheduler's alone. Steps are those recorded, also of trials that trained on for a moment after they were stopped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import data_sets
from common import new_parser, refuse_if_busy, set_options, write_table

from xmcray.data.sample import write_sample
from xmcray.tuning.sweep import Sweep

SPACE = data_sets.ROOT / "tune" / "spaces" / "astra.yaml"
SETTINGS = ("data.validation=0.2", "log.every=1")  # 480 queries held out: one of them is 0.2 points
MAIN = "import sys; from xmcray.cli import main; sys.exit(main(sys.argv[1:]))"
MAX_SHARE = 0.5
MAX_LOSS = 0.5


def main() -> None:
    parser = new_parser(__doc__, out="asha.md", anyway=True)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="settings of all trials"
    )
    arguments = parser.parse_args()
    load = refuse_if_busy(arguments.anyway)
    corpus = data_sets.prepared("sample", write_sample).path
    folder = Path(tempfile.mkdtemp(dir=data_sets.CACHE))
    rows: list[list[object]] = []
    shares = []
    losses = []
    try:
        for seed in range(arguments.seeds):
            steps = {}
            best = {}
            for scheduler in ("none", "asha"):
                started = time.perf_counter()
                out = folder / f"{scheduler}-{seed}"
                words = [
                    "--seed",
                    str(seed),
                    "--scheduler",
                    scheduler,
                    "--trials",
                    str(arguments.trials),
                ]
                sweep = run(corpus, out, [*words, *settings(arguments.set)])
                states = [trial.state for trial in sweep.trials()]
                steps[scheduler] = sum(trial.steps for trial in sweep.trials())
                best[scheduler] = 100 * (sweep.ranked()[0].score or 0.0)
                seconds = f"{time.perf_counter() - started:.0f}"
                counts = [states.count(state) for state in ("finished", "stopped", "failed")]
                rows.append(
                    [seed, scheduler, *counts, steps[scheduler], f"{best[scheduler]:.2f}", seconds]
                )
                print(*rows[-1], sep=" | ", flush=True)
            shares.append(steps["asha"] / steps["none"])
            losses.append(best["none"] - best["asha"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    notes = [
        f"ASHA trained {' and '.join(f'{share:.2f}' for share in shares)} of the steps (at most {MAX_SHARE} wanted) and"
        f" lost {' and '.join(f'{loss:.2f}' for loss in losses)} points (at most {MAX_LOSS} wanted)",
        f"ASTRA on the sample, preset astra/sample with {' '.join([*SETTINGS, *arguments.set])}, space"
        " tune/spaces/astra.yaml; P@1 of a trial is that of its best validation; as many trials at a time as CPUs",
        load,
    ]
    header = [
        "seed",
        "scheduler",
        "finished",
        "stopped",
        "failed",
        "training steps",
        "best P@1",
        "seconds",
    ]
    write_table(arguments.out, "ASHA against training all trials", header, rows, notes)
    if max(shares) > MAX_SHARE or max(losses) > MAX_LOSS:
        raise SystemExit("error: ASHA trained more, or lost more, than is wanted")


def settings(extra: list[str]) -> list[str]:
    """Options of a command."""
    return set_options([*SETTINGS, *extra])


def run(corpus: Path, out: Path, options: list[str]) -> Sweep:
    """One sweep, in a process of its own; it begins without what another left in memory."""
    words = [
        "tune",
        "astra",
        "--data",
        str(corpus),
        "--space",
        str(SPACE),
        "--out",
        str(out),
        "--metric",
        "P@1",
    ]
    command = [sys.executable, "-c", MAIN, *words, "--config", "preset:astra/sample", *options]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return Sweep.open(out)


if __name__ == "__main__":
    main()
