"""Committed presets with some settings changed, on validation data: what `encoders.py` and `row_optimisers.py` share."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
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
from xmcray.training.run import VECTORS
from xmcray.training.run_config import RunConfig

METRICS = ("P@1", "P@5", "PSP@5")
PRESET = "the preset"
COMMON = [
    "cluster.workers=0",
    "cluster.device=cpu",
    "log.validate_every=0",
    "log.checkpoint_every=1000000",
    "log.keep=1",
]

Variants = Mapping[str, Sequence[str]]
"""Settings over a preset, by what they stand for."""


def compare(
    doc: str | None,
    name: str,
    title: str,
    sets: Sequence[str],
    methods: Sequence[str],
    variants_of: Callable[[str, str], Variants],
) -> None:
    """Measures what is missing and writes the table; the main function of a benchmark.

    Args:
        doc: its docstring, for --help.
        name: of the files in results/.
        title: of the table.
        sets: data sets.
        methods: methods.
        variants_of: set and method -> the variants of that preset. One that changes nothing is left
            out.
    """
    arguments = parse_arguments(doc, name, sets, methods)
    if arguments.quick:
        arguments.out = Path(os.devnull)
        arguments.override += ["optim.epochs=1", "encoder.dim=32", "negatives.hard=0"]
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    torch.set_num_threads(arguments.threads)
    deadline = time.monotonic() + 60 * arguments.minutes
    store = Store(name)
    rows: list[list[object]] = []
    notes: list[str] = []
    settings: dict[str, None] = {}
    for set_name in sets:
        if not (data_sets.DATA / set_name).is_dir():
            notes.append(f"{set_name} left out: not on this machine")
            continue
        for method in methods:
            is_wanted = set_name in arguments.sets and method in arguments.method
            variants = variants_of(set_name, method)
            for variant, config in configs_of(set_name, method, variants, arguments).items():
                may_measure = is_wanted and time.monotonic() < deadline
                result = result_of(set_name, config, may_measure, store, arguments.quick)
                if result is not None:
                    rows.append(row(set_name, method, variant, result))
                    settings[f"{variant}: {' '.join(variants[variant]) or 'as committed'}"] = None
    notes += settings
    notes += [
        "percent on held-out training queries; one seed; seconds: wall time of the training on"
        f" {arguments.threads} thread(s), without the vectors that are computed once (the distilled table, the texts"
        " of a frozen encoder), whatever else the machine did",
        load,
    ]
    header = ["set", "method", "settings", *METRICS, "training, s"]
    write_table(arguments.out, title, header, rows, notes)


def parse_arguments(
    doc: str | None, name: str, sets: Sequence[str], methods: Sequence[str]
) -> argparse.Namespace:
    parser = new_parser(doc, out=f"{name}.md", threads=1, minutes=True, anyway=True)
    parser.add_argument("--set", dest="sets", nargs="+", choices=sets, default=list(sets))
    parser.add_argument("--method", nargs="+", choices=methods, default=list(methods))
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings over the presets"
    )
    parser.add_argument("--quick", action="store_true", help="one short epoch, printed only")
    return parser.parse_args()


def configs_of(
    set_name: str, method: str, variants: Variants, arguments: argparse.Namespace
) -> dict[str, RunConfig]:
    """The settings of each variant that differs from those before it."""
    common = [*COMMON, f"cluster.threads_per_process={arguments.threads}"]
    configs: dict[str, RunConfig] = {}
    for variant, lines in variants.items():
        config = data_sets.preset(set_name, [*common, *lines, *arguments.override], method)
        if config not in configs.values():
            configs[variant] = config
    return configs


def result_of(
    set_name: str, config: RunConfig, may_measure: bool, store: Store, is_quick: bool
) -> Result | None:
    """The kept result; trains for it if it is missing and may be measured."""
    is_frozen = config.encoder.frozen
    corpus = data_sets.in_minilm_tokens(set_name) if is_frozen else data_sets.corpus(set_name)
    if corpus is None:
        return None
    key = training_name(corpus, config)
    result = None if is_quick else store.get(key)
    if result is None and may_measure:
        result = measured(corpus, config)
        print(key, result, flush=True)
        if not is_quick:
            store.put(key, result)
    return result


def measured(corpus: Corpus, config: RunConfig) -> dict[str, float]:
    """Trains; returns the metrics on the held-out queries and the seconds of the training."""
    out = data_sets.CACHE / "preset_variants" / f"run-{os.getpid()}"
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


def row(set_name: str, method: str, variant: str, result: Result) -> list[object]:
    cells = [f"{100 * result[metric]:.1f}" for metric in METRICS]
    return [set_name, method, variant, *cells, f"{result['seconds']:.0f}"]
