"""Ctrl-C and SIGTERM at random moments of a training under Ray.

    python benchmarks/soak_signals.py                  # 50 moments, an hour
    python benchmarks/soak_signals.py --moments 3      # does it work?

`xmcray train` with two workers and hard negatives gets SIGINT and SIGTERM in turn, at moments drawn
over the whole time of an undisturbed run: while it imports, starts Ray, starts workers, trains and
ends. Every other SIGTERM goes to a process that ignores SIGINT, as in the background of a shell. The
same command then continues, until the run is finished and the next one begins. Each signal has to
end the command within 10 s on an idle machine and leave no process behind, and each finished run has
to have the weights of the undisturbed one, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import data_sets
from common import refuse_if_busy, write_table
from planted import write_planted
from processes import last_step
from soak import OF_METHOD, SETTINGS, final_weights

METHOD = "astra"
MAIN = "import sys; from xmcray.cli import main; sys.exit(main(sys.argv[1:]))"
MARK = "XMCRAY_SOAK_SIGNALS"  # a variable that all processes of a command inherit
_TOKEN = secrets.token_hex(8)  # its value
LIMIT_S = 10
PATIENCE_S = 300
# Before the command has its handlers, Python's own and those of the system end it.
CODES = {signal.SIGINT: {130, -signal.SIGINT, 1}, signal.SIGTERM: {143, -signal.SIGTERM}}


@dataclass(frozen=True)
class Outcome:
    """What a signal met and how the command ended.

    Attributes:
        cells: of the table.
        good: whether the promises were kept.
    """

    cells: list[object]
    good: bool


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=50, help="signals (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("soak_signals.md"))
    arguments = parser.parse_args()
    load = refuse_if_busy(anyway=True)
    corpus = data_sets.prepared(
        "soak", lambda raw: write_planted(raw, num_queries=6000, num_labels=2000)
    ).path
    with tempfile.TemporaryDirectory(dir=data_sets.CACHE) as folder:
        outcomes = list(play(arguments, corpus, Path(folder)))
    num_good = sum(outcome.good for outcome in outcomes)
    notes = [
        f"{num_good} of {len(outcomes)} signals and finished runs kept every promise",
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
        "left",
        "good",
    ]
    rows = [outcome.cells for outcome in outcomes]
    write_table(arguments.out, "Signals at random moments", header, rows, notes)
    if num_good < len(outcomes):
        raise SystemExit(f"error: {len(outcomes) - num_good} promises were broken")


def play(arguments: argparse.Namespace, corpus: Path, folder: Path) -> Iterator[Outcome]:
    """Sends the signals one after the other; yields what came of each, and of each finished run."""
    began = time.perf_counter()
    undisturbed = folder / "undisturbed"
    start(corpus, undisturbed, ignores_sigint=False).wait(PATIENCE_S)
    duration_s = time.perf_counter() - began
    expected = final_weights(undisturbed)
    draw = random.Random(arguments.seed)
    run = folder / "run"
    for number in range(arguments.moments):
        kind = signal.SIGTERM if number % 2 else signal.SIGINT
        outcome = interrupt(corpus, run, kind, draw.uniform(0, duration_s), number % 4 == 3)
        yield show(outcome)
        is_last = number == arguments.moments - 1
        if is_last and not (run / "result.json").exists():
            start(corpus, run, ignores_sigint=False).wait(PATIENCE_S)
        if (run / "result.json").exists():
            alike = final_weights(run) == expected
            cells = ["a finished run", "", "", last_step(run), "", "", "", "yes" if alike else "no"]
            yield show(Outcome(cells, alike))
            shutil.rmtree(run)


def interrupt(
    corpus: Path, run: Path, kind: signal.Signals, after_s: float, ignores_sigint: bool
) -> Outcome:
    """Starts the command, signals it after some seconds, and waits for its end."""
    command = start(corpus, run, ignores_sigint)
    try:
        code = command.wait(after_s)
    except subprocess.TimeoutExpired:
        pass
    else:
        # It was finished before its moment came.
        return Outcome(
            [kind.name, ignores_sigint, f"{after_s:.1f}", "", code, "", "", ""], not code
        )
    step = last_step(run)
    sent = time.perf_counter()
    command.send_signal(kind)
    code = command.wait(PATIENCE_S)
    seconds = time.perf_counter() - sent
    left = still_running(LIMIT_S)
    # 0: the signal came when nothing was left to do.
    good = code in CODES[kind] | {0} and seconds <= LIMIT_S and not left
    cells = [kind.name, ignores_sigint, f"{after_s:.1f}", step, code, f"{seconds:.1f}", left]
    return Outcome([*cells, "yes" if good else "no"], good)


def start(corpus: Path, run: Path, ignores_sigint: bool) -> subprocess.Popen[bytes]:
    """The command in a process of its own; what it prints goes to a file next to the run."""
    words = ["train", METHOD, "--data", str(corpus), "--out", str(run), "--no-evaluate"]
    for setting in [*SETTINGS, *OF_METHOD[METHOD]]:
        words += ["--set", setting]
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
    while (number := sum(map(_is_ours, Path("/proc").glob("[0-9]*")))) > 0:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return number


def _is_ours(process: Path) -> bool:
    try:
        return f"{MARK}={_TOKEN}".encode() in (process / "environ").read_bytes()
    except OSError:
        return False


def show(outcome: Outcome) -> Outcome:
    """Prints a row as soon as it is there."""
    print(*outcome.cells, sep=" | ", flush=True)
    return outcome


if __name__ == "__main__":
    main()
