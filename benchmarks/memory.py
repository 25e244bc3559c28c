"""A million labels of 256 dimensions must train in at most 4 GB: peak memory of the trainer process.

    python benchmarks/memory.py            # 10^6 labels
    python benchmarks/memory.py --quick    # does it work?

The trainer is a process of its own. Negatives are refreshed in other processes, as on a cluster, whose memory is
reported too: a version is collected, published, built, searched and used, and checkpoints are written, so every
phase that needs memory is met. Label texts are no queries here (`--augment` makes them so): a pass over the data is
short, and what a step and a refresh hold does not depend on it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import data_sets
import torch
from common import new_parser, refuse_if_busy, write_table

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.negatives.refresh import RefreshSpec, run_version
from xmcray.negatives.version_folder import VersionFolder
from xmcray.training.loop import Loop, build
from xmcray.training.run import Run, open_or_create
from xmcray.training.run_config import RunConfig

LIMIT_MB = 4000
WORDS = 5000


class ProcessRefresher:
    """Refreshes in a process per version; fulfils `refresh.Refresher`."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, folder: Path) -> None:
        self.started.append(
            subprocess.Popen([sys.executable, __file__, "--refresh", str(folder), str(self.run)])
        )

    def check(self) -> None:
        if any(process.poll() for process in self.started):
            raise SystemExit("a refreshing process failed; its message is above")

    def close(self) -> None:
        """Nothing to end: a version that is needed is waited for in the ledger."""


def main() -> None:
    parser = new_parser(__doc__, out="memory.md", anyway=True)
    parser.add_argument("--labels", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=30_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument(
        "--augment", action="store_true", help="label texts are training queries too"
    )
    parser.add_argument("--quick", action="store_true", help="20,000 labels, printed only")
    parser.add_argument("--train", nargs=2, metavar=("RUN", "CORPUS"), help=argparse.SUPPRESS)
    parser.add_argument("--refresh", nargs=2, metavar=("VERSION", "RUN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(Path(arguments.train[0]), Path(arguments.train[1]), arguments)
    elif arguments.refresh:
        refresh(Path(arguments.refresh[0]), Path(arguments.refresh[1]))
    else:
        if arguments.quick:
            arguments.labels = 20_000
            arguments.queries = 4_000
            arguments.out = Path(os.devnull)
        measure(arguments, refuse_if_busy(arguments.anyway or arguments.quick))


def measure(arguments: argparse.Namespace, load: str) -> None:
    labels = arguments.labels
    queries = arguments.queries
    dim = arguments.dim
    name = f"words-{labels}-{queries}"
    corpus = data_sets.prepared(
        name, lambda folder: write_words(folder, labels, queries), max_len=16
    )
    with tempfile.TemporaryDirectory(dir=data_sets.CACHE) as folder:
        command = [sys.executable, __file__, "--train", folder, str(corpus.path), "--dim", str(dim)]
        environment = {
            **os.environ,
            "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
            "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
        }
        subprocess.run(
            [*command, *(["--augment"] if arguments.augment else [])], check=True, env=environment
        )
        peaks = json.loads(Path(folder, "peaks.json").read_text())
        pool = max(float(path.read_text()) for path in Path(folder).glob("refresh-*.txt"))
    table_mb = labels * dim * 4 / 1e6
    tokens = corpus.tokenizer().vocab_size * dim * 4 * 3 / 1e6
    copy_mb = table_mb if peaks["published"] else 0.0
    rows = [
        ["plan: rows and momentum", 2 * table_mb],
        ["plan: token table with Adam's state", tokens],
        ["plan: copy of the rows while a version is published", copy_mb],
        ["measured: process before the model is built", peaks["imported"]],
        ["measured: after the model is built", peaks["built"]],
        ["measured: after the first step", peaks["first_step"]],
        ["measured: peak of the trainer process", peaks["end"]],
        ["measured: peak of a process that refreshes", pool],
    ]
    write_table(
        arguments.out,
        f"Memory: {labels:,} labels of {dim} dimensions, one trainer",
        ["what", "MB"],
        rows,
        [
            f"peak of the trainer {peaks['end']:.0f} MB (limit {LIMIT_MB} at 1,000,000 x 256); MB of 10^6 bytes",
            f"{queries:,} queries, batch 512, 2,000 uniform and 50 hard negatives, SGD with momentum;"
            f" {peaks['steps']} steps, {peaks['published']} versions published, a checkpoint per epoch",
            load,
        ],
    )


def train(path: Path, corpus_path: Path, arguments: argparse.Namespace) -> None:
    """The trainer process: writes its peaks next to the run."""
    torch.set_num_threads(1)
    settings = {
        "data": {"augment_with_labels": arguments.augment, "validation": 0.02},
        "encoder": {"dim": arguments.dim},
        "negatives": {
            "start_epoch": 2,
            "refresh_every": 1,
            "recall_queries": 0,
            "index": "IVF1024,Flat",
            "wait_s": 3600,
        },
        "optim": {"epochs": 4, "batch_size": 512},
        "cluster": {"workers": 0},
        "log": {"validate_every": 0},
    }
    if arguments.labels < 100_000:
        settings["negatives"]["index"] = "auto"
    config = RunConfig.resolve("astra", settings)
    corpus = Corpus.open(corpus_path)
    run = open_or_create(path / "run", config, corpus, "never")
    peaks: dict[str, float] = {"imported": peak_mb()}
    setup = build(config, TrainingData(corpus, config.data), torch.device("cpu"))
    peaks["built"] = peak_mb()

    def on_step(step: int) -> None:
        if step == 1:
            peaks["first_step"] = peak_mb()

    refresher = ProcessRefresher(path / "run")
    result = Loop(run, setup, refresher, on_step).train()
    peaks |= {"end": peak_mb(), "steps": result["steps"], "published": len(refresher.started)}
    assert all(process.wait() == 0 for process in refresher.started)
    (path / "peaks.json").write_text(json.dumps(peaks))


def refresh(folder: Path, path: Path) -> None:
    """A refreshing process."""
    from xmcray.negatives.refresh import wait_published

    torch.set_num_threads(1)
    run = Run.open(path)
    version = VersionFolder(folder)
    wait_published(version)
    data = TrainingData(Corpus.open(run.corpus, verify=False), run.config.data)
    run_version(version, data, RefreshSpec(1, run.config.negatives, run.config.optim.seed))
    (path.parent / f"refresh-{folder.name}.txt").write_text(str(peak_mb()))


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def write_words(folder: Path, num_labels: int, num_queries: int) -> None:
    """Label l is named by three words that spell l in base WORDS; a query holds the words of its label."""
    import random

    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)

    def text(label: int) -> str:
        return f"a{label % WORDS} b{label // WORDS % WORDS} c{label * 7919 % WORDS}"

    with (folder / "labels.jsonl").open("w") as file:
        file.writelines(f'{{"uid": "l{i}", "text": "{text(i)}"}}\n' for i in range(num_labels))
    for split, count in (("train", num_queries), ("test", 1000)):
        with (folder / f"{split}.jsonl").open("w") as file:
            for i in range(count):
                labels = sorted({draw.randrange(num_labels) for _ in range(2)})
                words = " ".join(text(label) for label in labels)
                file.write(f'{{"uid": "{split}{i}", "text": "{words}", "labels": {labels}}}\n')


if __name__ == "__main__":
    main()
