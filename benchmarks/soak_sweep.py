"""Sweeps whose driver is killed when half of the trials have ended, and then started again (tier N).

    python benchmarks/soak_sweep.py                  # 16 trials on the sample, half an hour on 2 cores
    python benchmarks/soak_sweep.py --trials 4 --set optim.epochs=4 --variants none     # does it work?

Wanted: every trial ends exactly once, none that had ended is touched again, and with random search and no scheduler all
trials, thus also the best, come to what they do in a sweep that was left alone, validation by validation. A scheduler
compares trials at times that vary from sweep to sweep, and Optuna proposes by what has ended by then: of those variants
only the first two are asked.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import data_sets
from asha import MAIN, SPACE, settings
from common import new_parser, refuse_if_busy, write_table

from xmcray.data.sample import write_sample
from xmcray.tuning.sweep import Sweep, Trial

sys.path.insert(0, str(data_sets.ROOT / "tests"))
from processes import When, descendants, last_step  # shared with the tests

VARIANTS = {
    "none": ["--scheduler", "none"],
    "asha": ["--scheduler", "asha"],
    "optuna": ["--scheduler", "asha", "--search", "optuna"],
}
PATIENCE_S = 3600


def main() -> None:
    parser = new_parser(__doc__, out="soak_sweep.md")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="settings of all trials"
    )
    arguments = parser.parse_args()
    load = refuse_if_busy(anyway=True)
    corpus = data_sets.prepared("sample", write_sample).path
    folder = Path(tempfile.mkdtemp(dir=data_sets.CACHE))
    rows = []
    for variant in arguments.variants:
        options = [*VARIANTS[variant], "--trials", str(arguments.trials), *settings(arguments.set)]
        expected: list[Trial] = []
        if variant == "none":
            wait(start(corpus, folder / "undisturbed", options))
            expected = Sweep.open(folder / "undisturbed").trials()
        rows.append(
            [
                variant,
                *kill_and_restore(corpus, folder / variant, options, arguments.trials, expected),
            ]
        )
        print(*rows[-1], sep=" | ", flush=True)
    good = all(row[-1] == "yes" for row in rows)
    if good:
        shutil.rmtree(folder, ignore_errors=True)
    header = [
        "variant",
        "ended at the kill",
        "under way",
        "ended in all",
        "touched again",
        "best",
        "seconds",
        "as wanted",
    ]
    notes = [
        f"ASTRA on the sample, preset astra/sample, space tune/spaces/astra.yaml, {arguments.trials} trials",
        "as wanted: all ended once; of `none` also every validation of every trial is that of an undisturbed sweep",
        load,
    ]
    write_table(arguments.out, "Sweeps killed and restored", header, rows, notes)
    if not good:
        raise SystemExit(f"error: a sweep is not as wanted; see {folder}")


def kill_and_restore(
    corpus: Path, out: Path, options: list[str], trials: int, expected: list[Trial]
) -> list[object]:
    """What a kill met and what came of the sweep; the last cell tells whether it is as wanted."""
    started = time.perf_counter()
    family = dict[int, str]()
    driver = start(corpus, out, options)

    def strike() -> None:
        family.update(descendants(driver.pid))
        driver.send_signal(signal.SIGKILL)

    watcher = When(lambda: len(ended(out)) >= trials // 2 and under_way(out) > 0, strike)
    wait(driver)
    watcher.close()
    before = ended(out)
    met = under_way(out)
    wait(driver := start(corpus, out, options))
    for pid, command in family.items():  # ours, should something have outlived its driver
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(
                b"\0", b" "
            ).decode() == command:
                os.kill(pid, signal.SIGKILL)
    after = ended(out)
    sweep = Sweep.open(out)
    touched = sum(after[name] != text for name, text in before.items())
    right = watcher.done and driver.returncode == 0 and touched == 0 and len(after) == trials
    if expected:
        right = (
            right
            and [t.state for t in sweep.trials()] == ["finished"] * trials
            and sweep.trials() == expected
        )
    seconds = f"{time.perf_counter() - started:.0f}"
    return [
        len(before),
        met,
        len(after),
        touched,
        sweep.ranked()[0].name,
        seconds,
        "yes" if right else "no",
    ]


def start(corpus: Path, out: Path, options: list[str]) -> subprocess.Popen[bytes]:
    """A driver in a process of its own; its output goes to a file next to the sweep."""
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
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def wait(driver: subprocess.Popen[bytes]) -> None:
    """Until it ends; one that hangs is killed, and its return code says so."""
    try:
        driver.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        for pid in [driver.pid, *descendants(driver.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        driver.wait()


def ended(out: Path) -> dict[str, str]:
    """The ledger's entries of trials that have ended."""
    entries = {
        path.name: path.read_text(encoding="utf-8") for path in (out / "ledger").glob("[0-9]*.json")
    }
    return {name: text for name, text in entries.items() if '"state"' in text}


def under_way(out: Path) -> int:
    """Trials that have trained some steps and have not ended."""
    names = {path.stem for path in (out / "ledger").glob("[0-9]*.json")} - {
        name[:-5] for name in ended(out)
    }
    return sum(last_step(out / "trials" / name) >= 20 for name in names)


if __name__ == "__main__":
    main()
