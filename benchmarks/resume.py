"""The time that a resume takes from a checkpoint, next to that of reading its bytes.

    python benchmarks/resume.py                     # 10^7 labels: 12 GB of memory and 6 GB of disk
    python benchmarks/resume.py --labels 1e6        # a minute

The checkpoint is that of checkpoint_saving.py: ASTRA, rows of 64 dimensions with momentum. To resume
is what the loop of a rank does: it compares its share of the files with their hashes, and loads its
rows and all that ranks share into what it has built. To read is to read as many of the files, one
after the other, into a buffer of 1 MB. Each measurement is made by new processes, with the settings
of a worker. They are made in turns, a few times, and the table has their medians.

Cold: the files were synced, and then dropped from the page cache (posix_fadvise).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import data_sets
import numpy as np
import scale
import synthetic
import torch
import torch.distributed as dist
from checkpoint_saving import DIM, SETTLED_EPOCH, prepared
from common import new_parser, refuse_if_busy, write_table

from xmcray.data.batches import TrainingData
from xmcray.nn.row_table import RowTable
from xmcray.parallel import collectives
from xmcray.training import checkpoint as checkpoints
from xmcray.training.checkpoint_writer import CheckpointWriter
from xmcray.training.loop import Setup, build
from xmcray.training.process import worker_environment

GOAL = 1.5
BUFFER_BYTES = 1 << 20
CACHES = ("cold", "warm")
RANKS = (1, 2)


def main() -> None:
    parser = new_parser(__doc__, out="resume.md", anyway=True)
    parser.add_argument("--labels", type=float, default=1e7)
    parser.add_argument("--rounds", type=int, default=3)
    # Steps that the script starts as processes of their own.
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--rank", nargs=3, metavar=("RANK", "RANKS", "FOLDER"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    num_labels = int(arguments.labels)
    if arguments.write:
        write(arguments.write, num_labels)
        return
    if arguments.rank:
        rank, num_ranks, checkpoint_folder = arguments.rank
        rank_main(Path(checkpoint_folder), num_labels, int(rank), int(num_ranks), arguments.rounds)
        return
    load = refuse_if_busy(arguments.anyway)
    data_sets.CACHE.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="resume-", dir=data_sets.CACHE))
    rows: list[list[object]] = []
    try:
        run_processes([["--write", str(folder), "--labels", str(num_labels)]])
        num_bytes = sum(path.stat().st_size for path in files_of(folder))
        for num_ranks in RANKS:
            rows += measured_rows(folder, num_labels, num_ranks, arguments.rounds)
    finally:
        shutil.rmtree(folder)
    write_table(
        arguments.out,
        f"Resuming from a checkpoint of {num_labels:,} rows",
        ["", *(f"{cache}, s" for cache in CACHES), "goal"],
        rows,
        [
            f"a checkpoint of {num_bytes / 1e9:.2f} GB; D = {DIM}, float32 rows with momentum;"
            f" medians of {arguments.rounds} rounds; the slowest process counts",
            "cold: synced and dropped from the page cache by posix_fadvise; loading follows hashing,"
            " which has brought the files back",
            load,
        ],
    )


def measured_rows(
    folder: Path, num_labels: int, num_ranks: int, num_rounds: int
) -> list[list[object]]:
    """The rows of the table for one number of ranks."""
    commands = []
    for rank in range(num_ranks):
        words = ["--rank", str(rank), str(num_ranks), str(folder)]
        commands.append([*words, "--labels", str(num_labels), "--rounds", str(num_rounds)])
    results = run_processes(commands)
    (folder / "store").unlink(missing_ok=True)
    slowest: dict[str, list[float]] = {}
    for name in results[0]:
        # Rounds, then states of the page cache.
        slowest[name] = np.median(np.max([result[name] for result in results], axis=0), axis=0)
    ranks = "one rank" if num_ranks == 1 else f"{num_ranks} ranks"
    ratios = np.divide(slowest["resume"], slowest["read"])
    return [
        [f"{ranks}: the bytes read", *map(float, slowest["read"]), ""],
        [f"{ranks}: resumed", *map(float, slowest["resume"]), ""],
        [f"{ranks}: resumed / read", *map(float, ratios), f"{GOAL:g}"],
        [f"{ranks}: of which hashes compared", *map(float, slowest["hash"]), ""],
        [f"{ranks}: of which loaded", *map(float, slowest["load"]), ""],
        [f"{ranks}: CPU time of a resume", *map(float, slowest["cpu"]), ""],
    ]


def run_processes(commands: list[list[str]]) -> list[dict[str, list[list[float]]]]:
    """What this script prints when it is started with each of these arguments at the same time."""
    environment = {**os.environ, **worker_environment(threads=1)}
    processes = []
    for command in commands:
        words = [sys.executable, __file__, *command]
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
        processes.append(process)
    results = []
    for process in processes:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"error: a process ended with {process.returncode}, see above")
        if output:
            results.append(json.loads(output.splitlines()[-1]))
    return results


def files_of(folder: Path) -> list[Path]:
    """The files of the checkpoint."""
    return sorted(path for path in folder.glob("step-*/**/*") if path.is_file())


def drop_from_cache(folder: Path) -> None:
    """Drops the files from the page cache, which drops only what is on the disk."""
    for path in files_of(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# --- The steps ---


def write(folder: Path, num_labels: int) -> None:
    """Writes a checkpoint, as training does."""
    setup = prepared(num_labels)
    writer = CheckpointWriter(folder, setup.stepper, setup.partition, keep=1)
    step = SETTLED_EPOCH * setup.sampler.steps_per_epoch
    writer.save(step, {"epoch": SETTLED_EPOCH, "negatives": {}})
    writer.finish()


def rank_main(folder: Path, num_labels: int, rank: int, num_ranks: int, num_rounds: int) -> None:
    """One of the ranks that read and resume in turns; prints lists of rounds, of cold and warm."""
    torch.set_num_threads(1)
    if num_ranks > 1:
        store = dist.FileStore(str(folder / "store"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    corpus = synthetic.corpus(num_labels, scale.QUERIES, scale.TOKENS, scale.POSITIVES)
    config = scale.settings(DIM, num_ranks)
    setup = build(config, TrainingData(corpus, config.data), torch.device("cpu"))
    measured: dict[str, list[list[float]]] = {}
    for _ in range(num_rounds):
        both: dict[str, list[float]] = {}
        for measure in (read, resume):
            for cache in CACHES:
                collectives.gather_objects(rank)
                if cache == "cold" and rank == 0:
                    drop_from_cache(folder)
                for table in setup.method.tables.values():
                    forget_state(table)
                # All ranks begin at the same time.
                collectives.gather_objects(rank)
                for name, seconds in measure(folder, setup).items():
                    both.setdefault(name, []).append(seconds)
        for name, pair in both.items():
            measured.setdefault(name, []).append(pair)
        print(both, file=sys.stderr, flush=True)
    print(json.dumps(measured))


def forget_state(table: RowTable) -> None:
    """Gives the rows a state as of a new process: zeros, of which the system has no page yet."""
    names = list(table.state)
    table.state.clear()
    for name in names:
        table.state[name] = torch.zeros_like(table.weight_SD)


def read(folder: Path, _setup: Setup) -> dict[str, float]:
    """Reads this rank's share of the files."""
    buffer = bytearray(BUFFER_BYTES)
    start = time.perf_counter()
    for path in files_of(folder)[collectives.rank() :: collectives.num_ranks()]:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return {"read": time.perf_counter() - start}


def resume(folder: Path, setup: Setup) -> dict[str, float]:
    """Restores the checkpoint, as the loop does."""
    cpu = time.process_time()
    start = time.perf_counter()
    checkpoint = checkpoints.newest(folder)
    assert checkpoint is not None
    hashed = time.perf_counter()
    checkpoints.load(checkpoint, setup.stepper, setup.partition)
    loaded = time.perf_counter()
    return {
        "resume": loaded - start,
        "hash": hashed - start,
        "load": loaded - hashed,
        "cpu": time.process_time() - cpu,
    }


if __name__ == "__main__":
    main()
