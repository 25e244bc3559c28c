"""The time of a training step while a checkpoint is written in the background, next to steps without.

    python benchmarks/checkpoint_saving.py                     # 10^7 labels: 16 GB of memory and 20 GB of disk
    python benchmarks/checkpoint_saving.py --labels 1e6        # a minute

ASTRA on one process without Ray, rows of 64 dimensions with momentum, the workload of scale.py.
Each round takes steps without a checkpoint, saves one, and takes steps until it is on the disk.
Steps of both kinds are compared by their medians over all rounds. Copying the rows before the
writing starts is not part of a step; its time is a line of its own.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import data_sets
import numpy as np
import scale
import synthetic
import torch
from common import new_parser, refuse_if_busy, write_table

from xmcray.data.batches import TrainingData
from xmcray.training import checkpoint as checkpoints
from xmcray.training.checkpoint_writer import CheckpointWriter
from xmcray.training.loop import Setup, build
from xmcray.training.process import configure_this_process
from xmcray.types import Shortlist

DIM = 64
GOAL = 1.1
WARM_STEPS = 16
SETTLED_EPOCH = 2  # from which on `scale.settings` uses hard negatives


@dataclass(slots=True)
class Measured:
    """Seconds of all rounds.

    Attributes:
        idle: of steps while nothing is written: wall time, and CPU time of the training thread.
        saving: the same of steps while a checkpoint is written.
        copy_s: that training stood still for at each save.
        write_s: from each save until its checkpoint was on the disk.
        num_bytes: of a checkpoint.
    """

    idle: list[tuple[float, float]] = field(default_factory=list)
    saving: list[tuple[float, float]] = field(default_factory=list)
    copy_s: list[float] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)
    num_bytes: int = 0


def main() -> None:
    parser = new_parser(__doc__, out="checkpoint_saving.md", anyway=True)
    parser.add_argument("--labels", type=float, default=1e7)
    parser.add_argument("--rounds", type=int, default=3, help="at least 2")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    arguments = parser.parse_args()
    load = refuse_if_busy(arguments.anyway)
    configure_this_process(arguments.threads)
    num_labels = int(arguments.labels)
    measured = measure(num_labels, arguments.rounds)
    idle_ms, idle_cpu_ms = 1e3 * np.median(measured.idle, axis=0)
    saving_ms, saving_cpu_ms = 1e3 * np.median(measured.saving, axis=0)
    write_table(
        arguments.out,
        f"Steps while a checkpoint of {num_labels:,} rows is written",
        ["", "measured", "goal"],
        [
            ["a step while nothing is written, median ms", float(idle_ms), ""],
            ["a step while a checkpoint is written, median ms", float(saving_ms), ""],
            ["ratio", float(saving_ms / idle_ms), f"{GOAL:g}"],
            ["ratio in CPU time of the training thread", float(saving_cpu_ms / idle_cpu_ms), ""],
            ["standstill at the first save, s", measured.copy_s[0], ""],
            ["standstill at a later save, s", float(np.median(measured.copy_s[1:])), ""],
            [
                "from a save to its checkpoint on the disk, s",
                float(np.median(measured.write_s)),
                "",
            ],
            ["a checkpoint, GB", measured.num_bytes / 1e9, ""],
        ],
        [
            f"{arguments.rounds} rounds; {len(measured.idle)} and {len(measured.saving)} steps;"
            f" {arguments.threads} threads of torch; D = {DIM}, float32 rows with momentum",
            load,
        ],
    )


def measure(num_labels: int, num_rounds: int) -> Measured:
    """Steps with and without a checkpoint that is being written, in turns."""
    setup = prepared(num_labels)
    shortlist = random_shortlist(setup)
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=data_sets.CACHE))
    writer = CheckpointWriter(folder, setup.stepper, setup.partition, keep=1)
    measured = Measured()
    step = SETTLED_EPOCH * setup.sampler.steps_per_epoch
    try:
        for _ in range(WARM_STEPS):
            step_times(setup, shortlist, step)
            step += 1
        num_idle = WARM_STEPS
        for _ in range(num_rounds):
            for _ in range(num_idle):
                measured.idle.append(step_times(setup, shortlist, step))
                step += 1
            start = time.perf_counter()
            writer.save(step, {"epoch": SETTLED_EPOCH})
            measured.copy_s.append(time.perf_counter() - start)
            saved_step = step
            before = len(measured.saving)
            while writer.is_writing:
                measured.saving.append(step_times(setup, shortlist, step))
                step += 1
            measured.write_s.append(time.perf_counter() - start)
            writer.finish()
            # The next round has as many steps of the other kind.
            num_idle = max(WARM_STEPS, len(measured.saving) - before)
        saved = checkpoints.step_folder(folder, saved_step)
        files = [path for path in saved.rglob("*") if path.is_file()]
        measured.num_bytes = sum(path.stat().st_size for path in files)
    finally:
        writer.abandon()
        shutil.rmtree(folder)
    return measured


def prepared(num_labels: int) -> Setup:
    """What is trained, with every page of the rows' state in memory."""
    corpus = synthetic.corpus(num_labels, scale.QUERIES, scale.TOKENS, scale.POSITIVES)
    config = scale.settings(DIM, 0)
    data = TrainingData(corpus, config.data)
    setup = build(config, data, torch.device("cpu"))
    for table in setup.method.tables.values():
        for state in table.state.values():
            state.fill_(1e-9)
    return setup


def random_shortlist(setup: Setup) -> Shortlist:
    """Random labels as hard negatives: the rows of a step lie anywhere in the table."""
    shape = (setup.data.num_query_ids, scale.settings(DIM, 0).negatives.hard)
    labels = np.random.default_rng(0).integers(setup.data.num_labels, size=shape)
    return Shortlist(0, 0, labels.astype(np.int32))


def step_times(setup: Setup, shortlist: Shortlist, step: int) -> tuple[float, float]:
    """Wall and CPU seconds of one step, whose batch is there, as the prefetcher builds it."""
    batch = setup.sampler.batch(step, 0, 1)
    wall = time.perf_counter()
    cpu = time.thread_time()
    setup.stepper.step(batch, shortlist)
    return time.perf_counter() - wall, time.thread_time() - cpu


if __name__ == "__main__":
    main()
