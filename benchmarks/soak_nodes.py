"""Nodes that are lost and nodes that join while a run trains, on a cluster of several raylets on this machine.

    python benchmarks/soak_nodes.py                # six minutes: each loss once, and the autoscaler
    python benchmarks/soak_nodes.py --rounds 5     # at other steps each time
    python benchmarks/soak_nodes.py --losses trainer --without-autoscaler

A head without CPUs; each worker and each index actor has a node of its own. A node is lost by SIGKILL of its raylet,
with which its actors end. With as many workers as before, on a node that was idle or on one that joins, the run must
end byte for byte like one that was left alone; with fewer workers for a while, its losses may differ by 1e-9 (all runs
train in float64, where rounding does not change which label is a hard negative). When
index actors are lost, the version they were busy with must be completed by others. The last row starts from a head
alone, with Ray's autoscaler and its provider of fake nodes: demand and nodes rise with the run and fall after it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
from common import new_parser, refuse_if_busy, write_table
from local_nodes import AutoscaledNodes, LocalNodes, environment, slow_until, standing
from planted import write_planted
from processes import When, last_step, train_workers
from soak import OF_METHOD, SETTINGS, final_weights, phases, wait

from xmcray.negatives.ledger import Ledger
from xmcray.training.records import read_records
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

WORKERS = 2
EPOCHS = 12
MOMENTS = ("collecting", "building", "searching", "training")


@dataclass(frozen=True)
class Loss:
    """What is lost and what comes instead.

    Attributes:
        of: actors whose node is lost. spare: nodes like it that are there from the start.
        joins: whether a node joins once the run has gone on for 40 steps.
        settings: of the run, besides those of the soak.
    """

    of: str
    spare: int = 0
    joins: bool = False
    settings: tuple[str, ...] = ()


LOSSES = {
    "nothing": Loss(""),
    "trainer": Loss("RayTrainWorker", spare=1),
    "trainer, fewer go on": Loss("RayTrainWorker", settings=("cluster.min_workers=1",)),
    "trainer, another joins": Loss(
        "RayTrainWorker", joins=True, settings=("cluster.min_workers=1",)
    ),
    "index": Loss("IndexShard", spare=1),
}
CHOICES = [name for name in LOSSES if name != "nothing"]


def main() -> None:
    parser = new_parser(__doc__, out="soak_nodes.md")
    parser.add_argument("--losses", nargs="*", choices=CHOICES, default=CHOICES)
    parser.add_argument("--rounds", type=int, default=1, help="of each loss (default: %(default)s)")
    parser.add_argument("--without-autoscaler", action="store_true")
    parser.add_argument(
        "--queries", type=int, default=6000, help="of the planted corpus (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trial",
        nargs=5,
        metavar=("LOSS", "STEP", "MOMENT", "CORPUS", "RUN"),
        help=argparse.SUPPRESS,
    )
    arguments = parser.parse_args()
    if arguments.trial:
        loss, step, moment, corpus, out = arguments.trial
        print(json.dumps(with_autoscaler(corpus, Path(out)) if loss == "autoscaler" else with_loss(
            LOSSES[loss], int(step), moment, corpus, Path(out)
        )))  # fmt: skip
        return
    load = refuse_if_busy(anyway=True)
    name = f"soak-{arguments.queries}" if arguments.queries != 6000 else "soak"
    corpus = data_sets.prepared(
        name, lambda raw: write_planted(raw, arguments.queries, num_labels=2000)
    ).path
    folder = Path(tempfile.mkdtemp(dir=data_sets.CACHE))
    draw = random.Random(arguments.seed)
    rows = []
    try:
        undisturbed = folder / "undisturbed"
        trial("nothing", 0, "", corpus, undisturbed)
        steps = Run.open(undisturbed).result()["steps"]  # type: ignore[index]
        for number in range(arguments.rounds):
            for loss in arguments.losses:
                step = draw.randrange(steps // EPOCHS, steps // 3)
                moment = (
                    MOMENTS[number % len(MOMENTS)] if loss != "index" else MOMENTS[1 + number % 2]
                )
                run = folder / f"{number}-{loss.replace(', ', '-').replace(' ', '-')}"
                rows.append(
                    [loss, *row_of(loss, trial(loss, step, moment, corpus, run), run, undisturbed)]
                )
                print(*rows[-1], sep=" | ", flush=True)
        if not arguments.without_autoscaler:
            run = folder / "autoscaler"
            seen = trial("autoscaler", 0, "", corpus, run)
            fine = seen.get("ended") and final_weights(run) == final_weights(undisturbed)
            rows.append(
                [
                    "autoscaler",
                    seen.get("met", "?"),
                    "",
                    seen["seconds"],
                    "byte-equal",
                    "yes" if fine else "no",
                ]
            )
            print(*rows[-1], sep=" | ", flush=True)
    finally:
        kept = sum(row[-1] == "yes" for row in rows)
        if kept == len(rows):
            shutil.rmtree(folder, ignore_errors=True)
        notes = [
            f"{kept} of {len(rows)} promises kept; a node is lost by SIGKILL of its raylet",
            f"planted corpus of 2,000 labels, {WORKERS} workers and {WORKERS} index actors, each on a node of its own,"
            " scheduled, CPU, a refresh in every epoch; a lost node is noticed after 2 s (Ray's default is 20 s)",
            load,
        ]
        header = ["lost", "met", "at step", "seconds", "promise", "kept"]
        write_table(arguments.out, "Nodes lost and joined", header, rows, notes)
    if kept < len(rows):
        raise SystemExit(
            f"error: {len(rows) - kept} of {len(rows)} runs broke their promise; they are in {folder}"
        )


def trial(loss: str, step: int, moment: str, corpus: Path, run: Path) -> dict[str, Any]:
    """One run with its own cluster, in its own process. Ray's output is in a file next to the run."""
    started = time.perf_counter()
    with environment() as variables, run.with_suffix(".log").open("ab") as log:
        variables["XMCRAY_CACHE"] = str(run.with_suffix(".caches") / "driver")
        command = [
            sys.executable,
            __file__,
            "--trial",
            loss,
            str(step),
            moment,
            str(corpus),
            str(run),
        ]
        driver = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=log)
        wait(driver)
        lines = [line for line in driver.stdout or () if line.startswith(b"{")]
    seen: dict[str, Any] = json.loads(lines[-1]) if lines and not driver.returncode else {}
    return {**seen, "seconds": f"{time.perf_counter() - started:.0f}"}


def row_of(loss: str, seen: dict[str, Any], run: Path, undisturbed: Path) -> list[object]:
    """What the loss met, at which step, seconds in all, what was promised and whether it came true."""
    elastic = bool(LOSSES[loss].settings)
    promise = "losses within 1e-9" if elastic else "byte-equal"
    fine = bool(seen.get("ended"))
    if fine and elastic:
        losses, expected = (
            {
                record["step"]: record["loss"]
                for record in read_records(path / "metrics.jsonl")
                if "loss" in record
            }
            for path in (run, undisturbed)
        )
        apart = (
            max(abs(losses[step] / expected[step] - 1) for step in expected)
            if losses.keys() == expected.keys()
            else np.inf
        )
        promise = f"losses within 1e-9: {apart:.0e}"
        fine = apart <= 1e-9
    elif fine:
        fine = final_weights(run) == final_weights(undisturbed)
    if LOSSES[loss].of == "IndexShard":
        promise += ", every version complete"
        fine = fine and seen["complete"]
    return [
        seen.get("met", "?"),
        seen.get("step", "?"),
        seen["seconds"],
        promise,
        "yes" if fine else "no",
    ]


def config(*extra: str) -> RunConfig:
    alone = [
        "cluster.cpus_per_worker=2",
        "cluster.resize_every_s=1",
        f"optim.epochs={EPOCHS}",
        "optim.precision=float64",
    ]
    return RunConfig.resolve("astra", {}, [*SETTINGS, *OF_METHOD["astra"], *alone, *extra])


def with_loss(loss: Loss, step: int, moment: str, corpus: str, out: Path) -> dict[str, Any]:
    """Trains while a node is lost; what the loss met and whether all ended well."""
    from xmcray.training.launch import train

    nodes = LocalNodes(out.with_suffix(".caches"))
    met = {}
    over = threading.Event()
    kinds = {
        "RayTrainWorker": ("trainer", {"cpus": 2, "gpus": 1}),
        "IndexShard": ("index", {"cpus": 1, "resources": {"index": 1}}),
    }
    for kind, (name, has) in kinds.items():
        for number in range(WORKERS + (loss.spare if kind == loss.of else 0)):
            nodes.add(f"{name}{number}", **has)

    def strike() -> None:
        met.update(met="+".join(phases(out)), step=last_step(out))
        nodes.lose(random.Random(step).choice(nodes.carried(loss.of)))

    def join() -> None:
        left = train_workers()
        with standing(left):
            nodes.add("joined", **kinds[loss.of][1])
        slow_until(lambda: "joined" in nodes.carried(loss.of), left, over)

    watchers = []
    if loss.of:
        due = lambda: last_step(out) >= step and (moment == "training" or moment in phases(out))  # noqa: E731
        watchers.append(When(due, strike))
    if loss.joins:  # a worker that waits for a lost rank never gets here
        watchers.append(When(lambda: "step" in met and last_step(out) >= met["step"] + 40, join))
    train(corpus, out, config(*loss.settings))
    over.set()
    for watcher in watchers:
        watcher.close()
    used = set(nodes.carried("RayTrainWorker"))
    nodes.close()
    complete = all(folder.complete for folder in Ledger(out / "negatives").versions())
    in_time = Run.open(out).result()["schedule_broken_at_step"] is None  # type: ignore[index]
    ended = all(watcher.done for watcher in watchers) and (not loss.joins or "joined" in used)
    return {**met, "ended": ended, "complete": complete and in_time}


def with_autoscaler(corpus: str, out: Path) -> dict[str, Any]:
    """Trains on a cluster that is a head alone at first; demand and nodes before, at the most, and after."""
    from xmcray.training.launch import train

    kinds = {
        "trainer": ({"CPU": 2, "GPU": 1}, WORKERS + 1),
        "index": ({"CPU": 1, "index": 1}, WORKERS),
    }
    nodes = AutoscaledNodes(kinds, idle_s=6)
    seen: list[tuple[int, int]] = []  # (missing nodes that were requested, nodes without the head)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.3):
            now = nodes.demand(), nodes.number()
            if not seen or now != seen[-1]:
                seen.append(now)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        train(corpus, out, config())
        gone = When(lambda: nodes.number() == 0, lambda: None)
        gone.join(120)
    finally:
        over.set()
        thread.join()
        seen.append((nodes.demand(), nodes.number()))
        nodes.close()
    most = max(demand for demand, _ in seen), max(number for _, number in seen)
    met = f"requested and missing: 0 → {most[0]} → {seen[-1][0]}; nodes: {seen[0][1]} → {most[1]} → {seen[-1][1]}"
    return {
        "met": met,
        "ended": gone.done and most[0] > 0 and most[1] == 2 * WORKERS and seen[-1] == (0, 0),
    }


if __name__ == "__main__":
    main()
