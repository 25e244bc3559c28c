"""What Ray Train costs in steady state: the loop on two of its workers against the same loop on two bare processes.

    python benchmarks/ray_overhead.py
    python benchmarks/ray_overhead.py --quick    # does it work?

The same settings, corpus, threads and allocator; the two take turns. Speed is the median over the records of
metrics.jsonl but for the first fifth. No hard negatives: the pool is a part of ours, not of Ray Train's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import data_sets
import numpy as np
import torch
import torch.distributed as dist
from common import new_parser, refuse_if_busy, write_table

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.negatives.refresh import RefreshSpec, ThreadRefresher
from xmcray.training.launch import train
from xmcray.training.loop import Loop, build
from xmcray.training.records import read_records
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

RANKS = 2
LIMIT = 0.95
ENVIRONMENT = {  # as workers under Ray Train are started
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
}


def main() -> None:
    parser = new_parser(__doc__, out="ray_overhead.md", anyway=True)
    parser.add_argument("--data", default="planted", metavar="CORPUS")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two epochs, one round, printed only")
    parser.add_argument("--rank", nargs=2, metavar=("RANK", "RUN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        bare_rank(int(arguments.rank[0]), Path(arguments.rank[1]))
        return
    if arguments.quick:
        arguments.out = Path(os.devnull)
        arguments.epochs = 2
        arguments.rounds = 1
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    corpus = data_sets.corpus(arguments.data)
    if corpus is None:
        raise SystemExit(2)
    config = RunConfig.resolve("astra", {}, settings(arguments))
    ways: dict[str, Callable[[Path, RunConfig, Corpus], None]] = {
        "bare": on_processes,
        "Ray Train": on_ray,
    }
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(arguments.rounds):
        for way, run_on in ways.items() if number % 2 == 0 else reversed(ways.items()):
            folder = Path(tempfile.mkdtemp(dir=data_sets.CACHE))
            try:
                run_on(folder / "run", config, corpus)
                speeds[way].append(steady(folder / "run"))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            print(
                f"round {number + 1}: {way}: {speeds[way][-1]:,.0f} queries/s",
                file=sys.stderr,
                flush=True,
            )
    medians = {way: float(np.median(values)) for way, values in speeds.items()}
    ratios = [a / b for a, b in zip(speeds["Ray Train"], speeds["bare"], strict=True)]
    rows = [
        [way, f"{medians[way]:,.0f}", f"{min(values):,.0f} - {max(values):,.0f}"]
        for way, values in speeds.items()
    ]
    notes = [
        f"Ray Train over bare: {np.median(ratios):.3f}, median of {len(ratios)} rounds"
        f" ({min(ratios):.3f} - {max(ratios):.3f}; at least {LIMIT})",
        f"{corpus.card.name}: {corpus.card.num_labels:,} labels; {RANKS} processes of 1 thread, gloo; batch"
        f" {arguments.batch}, D = 256, 2,048 uniform labels, {arguments.epochs} epochs a run",
        load,
    ]
    write_table(
        arguments.out,
        "The loop under Ray Train",
        ["way", "queries/s", "range of rounds"],
        rows,
        notes,
    )


def settings(arguments: argparse.Namespace) -> list[str]:
    return [
        f"optim.epochs={arguments.epochs}",
        f"optim.batch_size={arguments.batch}",
        "encoder.dim=256",
        "negatives.uniform=2048",
        "negatives.hard=0",
        "data.validation=0",
        f"cluster.workers={RANKS}",
        "cluster.device=cpu",
        "cluster.threads_per_process=1",
        "log.every=5",
        "log.validate_every=0",
        f"log.checkpoint_every={10**9}",
    ]


def steady(run: Path) -> float:
    """Median queries/s after the first fifth of the records."""
    records = read_records(run / "metrics.jsonl")
    return float(np.median([record["queries_per_s"] for record in records[len(records) // 5 :]]))


def on_ray(path: Path, config: RunConfig, corpus: Corpus) -> None:
    train(corpus.path, path, config)


def on_processes(path: Path, config: RunConfig, corpus: Corpus) -> None:
    path.mkdir()
    Run.create(path, config, corpus)
    environment = {**os.environ, **ENVIRONMENT}
    command = [sys.executable, __file__, "--rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(path)], env=environment) for rank in range(RANKS)
    ]
    codes = [process.wait() for process in ranks]
    if any(codes):
        raise SystemExit("error: a bare process failed, its message is above")


def bare_rank(rank: int, path: Path) -> None:
    """One of the bare processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(path / "store"), RANKS), rank=rank, world_size=RANKS
    )
    run = Run.open(path)
    data = TrainingData(Corpus.open(run.corpus, verify=False), run.config.data)
    setup = build(run.config, data, torch.device("cpu"))
    Loop(run, setup, ThreadRefresher(data, RefreshSpec(RANKS, run.config.negatives, 0))).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
