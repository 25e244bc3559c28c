"""SIGKILLs of every process of a run, in every phase of a refresh; each run, resumed, must end byte for byte alike.

    python benchmarks/soak.py                             # 60 kills, two hours; finished trials are kept
    python benchmarks/soak.py --method astra              # twenty minutes
    python benchmarks/soak.py --kills 1                   # does it work? one for each method

A planted corpus, 2 workers, `scheduled`, CPU. Every trial is a run of its own with one kill: of a worker (Ray Train
restarts the group, which goes on from the newest checkpoint), of an index actor, of the driver, of the GCS or of the
raylet. Where the kill ends the driver, the same command is started again at once, next to everything that was left
behind. The moments take turns: a random step, while queries are collected, published but not yet searched, searching,
and the step at which a version is switched. What a kill really met is read from the ledger at that moment and printed.
The undisturbed run of each method is trained first, in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import data_sets
from common import refuse_if_busy, write_table
from planted import write_planted
from processes import When, descendants, last_step

from xmcray.negatives.ledger import Ledger
from xmcray.negatives.version_folder import VersionFolder
from xmcray.ray_adapter.session import start_ray
from xmcray.storage.manifest import read_manifest
from xmcray.storage.whole_files import write_json
from xmcray.training.launch import train
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

EPOCHS = 6
SETTINGS = [
    "cluster.workers=2",
    "cluster.cpus_per_worker=0.5",
    "cluster.device=cpu",
    "cluster.threads_per_process=1",
    "encoder.dim=64",
    "optim.batch_size=128",
    f"optim.epochs={EPOCHS}",
    "optim.warmup_steps=10",
    "negatives.start_epoch=2",
    "negatives.refresh_every=1",
    "negatives.wait_s=120",
    "log.every=1",
    "log.checkpoint_every=17",
    "log.validate_every=0",
]
ROWS = [
    "method.classifier.kind=adagrad",
    "method.classifier.lr=0.1",
    "method.classifier.weight_decay=0.001",
]
OF_METHOD = {  # each with something to refresh
    "astra": [*ROWS, "negatives.uniform=100", "negatives.hard=10"],
    "renee": [*ROWS, "negatives.cluster_size=8"],
    "dexml": ["method.columns=hard", "method.hard_per_query=3", "negatives.hard=10"],
    "unidec": ["negatives.hard=10", "negatives.cluster_size=8"],
    "prime": ["method.free_vectors=64", "method.feed_forward=64", "negatives.cluster_size=8"],
    "rae": ["negatives.hard=10"],
}
PATIENCE_S = 300  # a run takes half a minute
RESTARTS = 3  # of a driver that a kill has ended
TARGETS = {  # what the name or the path of each process holds
    "worker": "RayTrainWorker",
    "index actor": "IndexShard",
    "driver": "",
    "GCS": "gcs/gcs_server",
    "raylet": "raylet/raylet",
}
MOMENTS = ("any step", "collecting", "building", "searching", "switching")


@dataclass(frozen=True)
class Trial:
    """What is killed and when it should be. Step: random, of the run's steps."""

    method: str
    target: str
    moment: str
    step: int
    steps_per_epoch: int

    def due(self, run: Path) -> bool:
        """Whether the moment has come; never before the chosen step."""
        step = last_step(run)
        if step < self.step:
            return False
        if self.moment == "switching":
            return step % self.steps_per_epoch == 0 and step // self.steps_per_epoch >= 2
        if self.moment in ("building", "searching"):
            return self.moment in phases(run)
        return self.moment == "any step" or "collecting" in phases(run)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", nargs="+", choices=OF_METHOD, default=list(OF_METHOD))
    parser.add_argument(
        "--kills", type=int, default=10, help="of each method (default: %(default)s)"
    )
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=MOMENTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("soak.md"))
    parser.add_argument(
        "--train", nargs=3, metavar=("METHOD", "CORPUS", "RUN"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.train:
        start_ray(num_cpus=4, object_store_bytes=256 << 20)
        method, corpus_path, out = arguments.train
        train(corpus_path, out, RunConfig.resolve(method, {}, [*SETTINGS, *OF_METHOD[method]]))
        return
    load = refuse_if_busy(anyway=True)
    corpus = data_sets.prepared(
        "soak", lambda raw: write_planted(raw, num_queries=6000, num_labels=2000)
    ).path
    folder = Path(tempfile.mkdtemp(dir=data_sets.CACHE))
    rows: list[list[object]] = []
    try:
        for method in arguments.method:
            rows += of_method(method, arguments, corpus, folder)
    finally:
        equal = sum(row[-1] == "yes" for row in rows)
        if equal == len(rows):
            shutil.rmtree(folder, ignore_errors=True)
        phase_counts = Counter(str(row[4]) for row in rows)
        notes = [
            f"{equal} of {len(rows)} runs ended with the weights of the undisturbed run, byte for byte",
            "met: "
            + ", ".join(f"{phase} {count}" for phase, count in sorted(phase_counts.items())),
            "planted corpus of 2,000 labels, 2 workers, scheduled, CPU, a refresh in every epoch",
            load,
        ]
        header = ["method", "kill", "of", "aimed at", "met", "at step"]
        header += ["starts again", "seconds", "byte-equal"]
        write_table(arguments.out, "Killed and resumed", header, rows, notes)
    if equal < (wanted := arguments.kills * len(arguments.method)):
        raise SystemExit(
            f"error: {equal} of {wanted} runs are as the undisturbed one; the others: {folder}"
        )


def of_method(
    method: str, arguments: argparse.Namespace, corpus: Path, folder: Path
) -> Iterator[list[object]]:
    """A row for each trial of a method; those of a trial that was done before are read."""
    kept = data_sets.CACHE / "soak" / f"{method}-seed-{arguments.seed}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    stored = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    done: dict[str, list[object]] = stored.get("rows", {})
    expected: dict[str, str] | None = None

    def undisturbed() -> dict[str, str]:
        wait(start(method, corpus, folder / method))
        stored["steps"] = Run.open(folder / method).result()["steps"]  # type: ignore[index]
        return final_weights(folder / method)

    if not stored:
        expected = undisturbed()
    for number, trial in enumerate(trials(arguments, method, stored["steps"]), 1):
        what = f"{number} {trial.target} {trial.moment}"
        if what not in done:
            expected = expected or undisturbed()
            killed = folder / f"{method}-{number}"
            row = [
                method,
                number,
                trial.target,
                trial.moment,
                *kill_and_resume(trial, corpus, killed, expected),
            ]
            print(*row, sep=" | ", flush=True)
            if row[-1] != "yes":  # its folder stays, and it is tried again
                yield row
                continue
            shutil.rmtree(killed)
            done[what] = row
            write_json(kept, {"steps": stored["steps"], "rows": done})
        yield done[what]


def trials(arguments: argparse.Namespace, method: str, steps: int) -> list[Trial]:
    """Targets in turn, moments in turn, at random steps not too close to the end."""
    draw = random.Random(arguments.seed)
    per_epoch = steps // EPOCHS
    last = steps - 2 * per_epoch
    chosen = []
    for number in range(arguments.kills):
        target = arguments.targets[number % len(arguments.targets)]
        # One moment further in each round, so that each target meets each moment.
        num_rounds = number // len(arguments.targets)
        moment = arguments.moments[(number + num_rounds) % len(arguments.moments)]
        if moment == "searching" and not searches(method):
            moment = "building"
        chosen.append(Trial(method, target, moment, draw.randrange(1, last), per_epoch))
    return chosen


def searches(method: str) -> bool:
    """Whether its refreshes search; clusters alone are only built."""
    return any(setting.startswith("negatives.hard=") for setting in OF_METHOD[method])


def kill_and_resume(
    trial: Trial, corpus: Path, run: Path, expected: dict[str, str]
) -> list[object]:
    """What the kill met, at which step, how often the command was started again, seconds in all,
    and whether the weights are the expected ones.
    """
    started = time.perf_counter()
    met = ["nothing", 0]
    driver = start(trial.method, corpus, run)
    family: dict[int, str] = {}

    def strike() -> None:
        step = last_step(run)
        boundary = step % trial.steps_per_epoch == 0 and step // trial.steps_per_epoch >= 2
        met[:] = ["+".join(phases(run) + ["switching"] * boundary), step]
        family.update(descendants(driver.pid))
        os.kill(random.Random(trial.step).choice(victims(driver, trial.target)), signal.SIGKILL)

    watcher = When(lambda: trial.due(run) and bool(victims(driver, trial.target)), strike)
    wait(driver)
    watcher.close()
    num_restarts = 0
    while driver.returncode and watcher.done and num_restarts < RESTARTS:
        num_restarts += 1
        driver = start(trial.method, corpus, run)
        wait(driver)
    end(family)
    alike = driver.returncode == 0 and watcher.done and final_weights(run) == expected
    seconds = f"{time.perf_counter() - started:.0f}"
    return [*met, num_restarts, seconds, "yes" if alike else "no"]


def victims(driver: subprocess.Popen[bytes], target: str) -> list[int]:
    """The processes of a driver that are of some kind."""
    if target == "driver":
        return [driver.pid]
    commands = descendants(driver.pid)
    # The first word: others name a process in their arguments.
    programs = {pid: command.partition(" ")[0] for pid, command in commands.items()}
    return sorted(pid for pid, program in programs.items() if TARGETS[target] in program)


def end(family: dict[int, str]) -> None:
    """Kills processes by number and command, should they have outlived their driver."""
    for pid, command in family.items():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            content = (Path("/proc") / str(pid) / "cmdline").read_bytes()
            if content.replace(b"\0", b" ").decode() == command:
                os.kill(pid, signal.SIGKILL)


def start(method: str, corpus: Path, run: Path) -> subprocess.Popen[bytes]:
    """A driver in a process of its own; its output and Ray's go to a file next to the run."""
    with run.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, __file__, "--train", method, str(corpus), str(run)], stderr=log
        )


def wait(driver: subprocess.Popen[bytes]) -> None:
    """Until it ends; one that hangs is killed, and its return code says so."""
    try:
        driver.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        family = descendants(driver.pid)
        for pid in [driver.pid, *family]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        driver.wait()


def phases(run: Path) -> list[str]:
    """What is going on in the ledger at this moment."""
    names = set()
    for folder in Ledger(run / "negatives").versions():
        with contextlib.suppress(FileNotFoundError):
            names.add(phase(folder))
    return sorted(names - {"complete"}) or ["training"]


def phase(folder: VersionFolder) -> str:
    """The phase of one version."""
    if folder.complete:
        return "complete"
    if not folder.published:
        return "collecting"
    return "searching" if any((folder.path / "found").glob("*/*")) else "building"


def final_weights(run: Path) -> dict[str, str]:
    """SHA-256 of every tensor file of the last checkpoint."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    files = read_manifest(newest, "checkpoint").files
    return {
        name: entry.sha256 for name, entry in files.items() if name.endswith(".safetensors")
    } | {"": newest.name}


if __name__ == "__main__":
    main()
