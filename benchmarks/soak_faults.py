"""Several faults in one run under Ray, one after the other; the run must end byte for byte as the undisturbed one.

    python benchmarks/soak_faults.py                    # 12 sequences, half an hour; finished ones are kept
    python benchmarks/soak_faults.py --sequences 3      # a part; the next call goes on from there

Each run meets two to five faults: a SIGKILL of a worker, an index actor, the driver, the GCS or the raylet, or a SIGKILL
of the driver and a flipped bit in its newest checkpoint. Each comes at a random moment of a step later than the one
before. Whenever the driver has ended, the same command is started again, next to everything that was left behind. The
corpus, the settings and the moments are those of soak.py.

benchmarks/state_machines.py plays longer sequences, with more kinds of faults, in runs without Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import data_sets
import soak
from common import refuse_if_busy, write_table
from planted import write_planted
from processes import descendants, last_step

from xmcray.storage.whole_files import write_json
from xmcray.training.run import Run

METHODS = ("astra", "dexml", "unidec")
DAMAGE = "driver and a checkpoint"
TARGETS = (*soak.TARGETS, DAMAGE)
MOMENTS = ("any step", "collecting", "building", "searching", "switching")
MOST_FAULTS = 5
EXTRA_STARTS = 2  # more than faults that may end a driver


@dataclass
class Played:
    """What became of a run.

    Attributes:
        met: each fault, what it met and at which step.
        starts: of the command.
        end: "" or what was wrong.
    """

    met: list[str] = field(default_factory=list)
    starts: int = 0
    end: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("soak_faults.md"))
    arguments = parser.parse_args()
    load = refuse_if_busy(anyway=True)
    corpus = data_sets.prepared(
        "soak", lambda raw: write_planted(raw, num_queries=6000, num_labels=2000)
    ).path
    kept = data_sets.CACHE / "soak" / "faults.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    done = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    folder = Path(tempfile.mkdtemp(dir=data_sets.CACHE))
    undisturbed: dict[str, tuple[int, dict[str, str]]] = {}
    for number in range(arguments.sequences):
        if str(number) in done:
            continue
        method = METHODS[number % len(METHODS)]
        if method not in undisturbed:
            soak.wait(soak.start(method, corpus, folder / method))
            steps = Run.open(folder / method).result()["steps"]
            undisturbed[method] = steps, soak.final_weights(folder / method)
        steps, expected = undisturbed[method]
        run = folder / f"run-{number}"
        began = time.perf_counter()
        played = play(method, faults(number, method, steps), corpus, run)
        if not played.end and soak.final_weights(run) != expected:
            played.end = "other weights"
        seconds = f"{time.perf_counter() - began:.0f}"
        row = [number, method, "; ".join(played.met), played.starts, seconds, played.end or "yes"]
        print(*row, sep=" | ", flush=True)
        # The folder of a run that went wrong stays.
        if not played.end:
            shutil.rmtree(run)
        done[str(number)] = row
        write_json(kept, done)
    rows = [done[str(number)] for number in range(arguments.sequences)]
    equal = sum(row[-1] == "yes" for row in rows)
    if equal == len(rows):
        shutil.rmtree(folder)
    notes = [
        f"{equal} of {len(rows)} runs ended with the weights of the undisturbed run, byte for byte",
        "planted corpus of 2,000 labels, 2 workers, scheduled, CPU, a refresh in every epoch",
        load,
    ]
    header = ["sequence", "method", "faults and what they met", "starts", "seconds", "byte-equal"]
    write_table(arguments.out, "Several faults in one run under Ray", header, rows, notes)
    if equal < len(rows):
        raise SystemExit(f"error: {len(rows) - equal} runs are not as expected: {folder}")


def faults(number: int, method: str, steps: int) -> list[soak.Trial]:
    """The faults of a sequence, by their steps."""
    draw = random.Random(number)
    per_epoch = steps // soak.EPOCHS
    chosen = sorted(draw.sample(range(1, steps - 2 * per_epoch), draw.randint(2, MOST_FAULTS)))
    return [
        soak.Trial(method, draw.choice(TARGETS), draw.choice(MOMENTS), step, per_epoch)
        for step in chosen
    ]


def play(method: str, planned: list[soak.Trial], corpus: Path, run: Path) -> Played:
    """Trains a run while faults happen, until it is finished or something is wrong."""
    played = Played()
    left = list(planned)
    family: dict[int, str] = {}
    try:
        while played.starts <= len(planned) + EXTRA_STARTS:
            num_left = len(left)
            driver = soak.start(method, corpus, run)
            played.starts += 1
            if not strike_until_it_ends(driver, left, run, family, played):
                played.end = "hangs"
                return played
            if driver.returncode == 0:
                played.met += [f"{fault.target}: the run had ended" for fault in left]
                return played
            if num_left == len(left):
                played.end = f"ended with {driver.returncode} without a fault"
                return played
        played.end = "too many starts"
        return played
    finally:
        soak.end(family)


def strike_until_it_ends(
    driver: subprocess.Popen[bytes],
    left: list[soak.Trial],
    run: Path,
    family: dict[int, str],
    played: Played,
) -> bool:
    """Lets the faults happen that are due before the driver ends; whether it ended in time."""
    deadline = time.monotonic() + soak.PATIENCE_S
    while driver.poll() is None:
        if time.monotonic() > deadline:
            family.update(descendants(driver.pid))
            driver.kill()
            driver.wait()
            return False
        if left and is_due(left[0], run):
            target = "driver" if left[0].target == DAMAGE else left[0].target
            if found := soak.victims(driver, target):
                fault = left.pop(0)
                family.update(descendants(driver.pid))
                phase = "+".join(soak.phases(run))
                played.met.append(f"{fault.target}: {phase}, {last_step(run)}")
                os.kill(random.Random(fault.step).choice(found), signal.SIGKILL)
                if fault.target == DAMAGE:
                    driver.wait()
                    damage_newest_checkpoint(run, fault.step)
        time.sleep(0.005)
    return True


def is_due(fault: soak.Trial, run: Path) -> bool:
    """Whether its moment has come, or has not come for an epoch."""
    return fault.due(run) or last_step(run) >= fault.step + fault.steps_per_epoch


def damage_newest_checkpoint(run: Path, seed: int) -> None:
    """Flips a bit of one of its files, if there is an older checkpoint to go on from."""
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    if len(checkpoints) < 2:
        return
    draw = random.Random(seed)
    path = draw.choice(sorted(checkpoints[-1].rglob("*.safetensors")))
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


if __name__ == "__main__":
    main()
