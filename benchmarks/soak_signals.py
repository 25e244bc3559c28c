"""Ctrl-C and SIGTERM at random moments of a training under Ray.

    python benchmarks/soak_signals.py                  # 50 of each, an hour
    python benchmarks/soak_signals.py --moments 3      # does it work?

`xmcray train` with two workers and hard negatives gets SIGINT and SIGTERM in turn, at moments drawn
over the whole time of an undisturbed run: while it imports, starts Ray, starts workers, trains and
ends. Every other SIGTERM goes to a process that ignores SIGINT, as in the background of a shell. The
same command then continues, until the run is finished and the next one begins. Each signal has to
end the command within 10 s on an idle machine and leave no process behind, and each finished run has
to have the weights of the undisturbed one, byte for byte.

What came of the signals is kept in the benchmarks' cache as soon as the run that they met is
finished. The next call goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import data_sets
from common import MAX_LOAD_PER_CORE, refuse_if_busy, set_options, write_table
from planted import write_planted
from processes import last_step, with_variable
from soak import OF_METHOD, SETTINGS, final_weights

METHOD = "astra"
MAIN = "from xmcray.cli import command; command()"
MARK = "XMCRAY_SOAK_SIGNALS"  # a variable that all processes of a command inherit
_TOKEN = secrets.token_hex(8)  # its value
LEDGER = data_sets.CACHE / "soak_signals.jsonl"
LIMIT_S = 10
PATIENCE_S = 900
# Before the command has its handlers, Python's own and those of the system end it.
CODES = {signal.SIGINT: {130, -signal.SIGINT, 1}, signal.SIGTERM: {143, -signal.SIGTERM}}


@dataclass(frozen=True)
class Outcome:
    """What a signal met and how the command ended, or the weights of a finished run.

    Attributes:
        moment: number of the signal; of the last one, for a finished run.
        cells: of the table.
        kept: whether the promises were kept: "yes", "no", or "late" if the command ended too late
            on a machine that was busy.
    """

    moment: int
    cells: list[object]
    kept: str


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=100, help="signals (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("soak_signals.md"))
    arguments = parser.parse_args()
    load = refuse_if_busy(anyway=True)
    # A command inherits that SIGINT is ignored, as it is in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    corpus = data_sets.prepared(
        "soak", lambda raw: write_planted(raw, num_queries=6000, num_labels=2000)
    ).path
    with tempfile.TemporaryDirectory(dir=data_sets.CACHE) as folder:
        play(arguments, corpus, Path(folder))
    outcomes = finished()
    counts = Counter(outcome.kept for outcome in outcomes)
    notes = [
        f"{counts['yes']} of {len(outcomes)} signals and finished runs kept every promise",
        f"{counts['late']} signals ended the command after more than {LIMIT_S} s while the machine"
        " was busy: the limit is for an idle one",
        "load: average of the last minute when the signal came",
        "planted corpus of 2,000 labels, 2 workers, hard negatives in every epoch, CPU",
        load,
    ]
    header = [
        "signal",
        "SIGINT ignored",
        "after s",
        "at step",
        "code",
        "ended in s",
        "load",
        "left",
        "kept",
    ]
    rows = [[*outcome.cells, outcome.kept] for outcome in outcomes]
    write_table(arguments.out, "Signals at random moments", header, rows, notes)
    if counts["no"]:
        raise SystemExit(f"error: {counts['no']} promises were broken")


def play(arguments: argparse.Namespace, corpus: Path, folder: Path) -> None:
    """Sends the signals that are missing, one after the other, and keeps what came of them."""
    done = {outcome.moment for outcome in finished()}
    missing = [moment for moment in range(arguments.moments) if moment not in done]
    if not missing:
        return
    began = time.perf_counter()
    undisturbed = folder / "undisturbed"
    start(corpus, undisturbed, ignores_sigint=False).wait(PATIENCE_S)
    duration_s = time.perf_counter() - began
    expected = final_weights(undisturbed)
    run = folder / "run"
    outcomes = []
    for moment in missing:
        after_s = random.Random(f"{arguments.seed} {moment}").uniform(0, duration_s)
        outcomes.append(show(interrupt(corpus, run, moment, after_s)))
        if moment == missing[-1] and not (run / "result.json").exists():
            start(corpus, run, ignores_sigint=False).wait(PATIENCE_S)
        if (run / "result.json").exists():
            alike = final_weights(run) == expected
            cells = ["a finished run", "", "", last_step(run), "", "", "", ""]
            outcomes.append(show(Outcome(moment, cells, "yes" if alike else "no")))
            keep(outcomes)
            outcomes = []
            shutil.rmtree(run)


def keep(outcomes: list[Outcome]) -> None:
    """Writes what came of the signals of a finished run."""
    with LEDGER.open("a") as file:
        for outcome in outcomes:
            file.write(json.dumps(asdict(outcome)) + "\n")


def finished() -> list[Outcome]:
    """What came of the signals of all finished runs, of earlier calls too."""
    if not LEDGER.is_file():
        return []
    return [Outcome(**json.loads(line)) for line in LEDGER.read_text().splitlines()]


def interrupt(corpus: Path, run: Path, moment: int, after_s: float) -> Outcome:
    """Starts the command, signals it after some seconds, and waits for its end."""
    kind = signal.SIGTERM if moment % 2 else signal.SIGINT
    ignores_sigint = moment % 4 == 3
    command = start(corpus, run, ignores_sigint)
    cells: list[object] = [kind.name, ignores_sigint, f"{after_s:.1f}"]
    try:
        code = command.wait(after_s)
    except subprocess.TimeoutExpired:
        pass
    else:
        # It was finished before its moment came.
        return Outcome(moment, [*cells, "", code, "", "", ""], "no" if code else "yes")
    step = last_step(run)
    load = os.getloadavg()[0]
    sent = time.perf_counter()
    command.send_signal(kind)
    code = command.wait(PATIENCE_S)
    seconds = time.perf_counter() - sent
    left = still_running(LIMIT_S)
    cells += [step, code, f"{seconds:.1f}", f"{load:.1f}", left]
    is_busy = load > MAX_LOAD_PER_CORE * len(os.sched_getaffinity(0))
    kept = "yes"
    # 0: the signal came when nothing was left to do.
    if code not in CODES[kind] | {0} or left:
        kept = "no"
    elif seconds > LIMIT_S:
        kept = "late" if is_busy else "no"
    return Outcome(moment, cells, kept)


def start(corpus: Path, run: Path, ignores_sigint: bool) -> subprocess.Popen[bytes]:
    """The command in a process of its own; what it prints goes to a file next to the run."""
    words = ["train", METHOD, "--data", str(corpus), "--out", str(run), "--no-evaluate"]
    words += set_options([*SETTINGS, *OF_METHOD[METHOD]])
    begin = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " if ignores_sigint else ""
    )
    with run.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", begin + MAIN, *words],
            env={**os.environ, MARK: _TOKEN},
            stdout=log,
            stderr=log,
        )


def still_running(patience_s: float) -> int:
    """Number of processes of a command that has ended which are there after some seconds."""
    deadline = time.monotonic() + patience_s
    while (number := len(with_variable(f"{MARK}={_TOKEN}"))) > 0:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return number


def show(outcome: Outcome) -> Outcome:
    """Prints a row as soon as it is there."""
    print(*outcome.cells, outcome.kept, sep=" | ", flush=True)
    return outcome


if __name__ == "__main__":
    main()
