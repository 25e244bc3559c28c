"""All six methods with the static encoder and their committed presets, compared with simple methods.

    python benchmarks/methods.py                                  # everything; finished trainings are kept
    python benchmarks/methods.py --set cdnjs-keywords --method rae dexml
    python benchmarks/methods.py --minutes 30                     # starts none after 30 minutes
    python benchmarks/methods.py --set tate-subjects --ensemble dexml unidec   # fuses runs that --keep has kept
    python benchmarks/methods.py --set tate-subjects --ensemble astra astra@1  # two seeds of a method
    python benchmarks/methods.py --minutes 0                      # prints the table of what there is
    python benchmarks/methods.py --set sample --method dexml --quick   # does it work?

Each training is a refit in one process: validation chooses the number of epochs, then all training queries are used.
Its bundle is measured on the test split: alone; with a memory as `xmcray memory` writes it, whose settings
`xmcray tune --bundle` chooses on the validation queries; and fused with words and training queries by `xmcray fuse`.
XR-Linear, a TF-IDF memory and their fusion are measured in the same run, in an environment of their own, and every row
is compared with XR-Linear by a paired test. The row of a set with the best validation is its choice.

results/methods.json keeps all measurements, for programs too; results/methods.md is the table. A measurement is
repeated when its preset changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
import torch
from accuracy import folder_of, trained
from common import commit, refuse_if_busy, write_table
from methods_store import (
    ALONE,
    FLOOR,
    FUSED,
    METRICS,
    SETS,
    STORE,
    WITH_MEMORY,
    Row,
    is_measured,
    keep,
    stored,
)
from methods_table import HEADER, notes, table
from peer_environment import run_script

from xmcray import settings_files
from xmcray.data.corpus import Corpus
from xmcray.evaluation.evaluate import SEARCH_K, Evaluation, Search, compare
from xmcray.methods.registry import method_names
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import changed_memory
from xmcray.training.fuse import fuse
from xmcray.training.memory import memory_bundle
from xmcray.training.outcome import bundle_of, measure, measure_bundle, stored_answers
from xmcray.training.part_weights import Choice
from xmcray.training.records import read_records
from xmcray.training.run import SELECTION, Run
from xmcray.training.run_config import RunConfig
from xmcray.tuning.inference import sweep_bundle
from xmcray.tuning.space import nested, parse_space
from xmcray.types import Float32Array, Int64Array, TopLabels

LINEAR = "XR-Linear"
# Files of peer_linear.py, and their names in the table.
FLOORS = {"memory": "TF-IDF memory", "linear": LINEAR, "fused": "XR-Linear and TF-IDF, fused"}
MEMORY_SPACE = data_sets.ROOT / "tune" / "spaces" / "memory.yaml"
MEMORY_TRIALS = 200


def main() -> None:
    arguments = parse_arguments()
    if arguments.quick:
        arguments.override += ["optim.epochs=1", "encoder.dim=32", "negatives.hard=0"]
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    torch.set_num_threads(arguments.threads)
    deadline = time.monotonic() + 60 * arguments.minutes
    store = Path(os.devnull) if arguments.quick else STORE
    for name in arguments.sets:
        is_here = name == "sample" or (data_sets.DATA / name).is_dir()
        if not is_here:
            continue
        corpus = data_sets.corpus(name)
        if corpus is None:
            continue
        linear = None
        if name != "sample" and not arguments.quick and time.monotonic() < deadline:
            linear = linear_of(corpus, arguments.threads)
        for method in arguments.method:
            if f"{method}/{name}" not in settings_files.presets() or time.monotonic() > deadline:
                continue
            config = settings(name, method, arguments)
            key = data_sets.fingerprint(config, corpus)
            if not is_measured(store, name, method, key):
                rows = measured(corpus, config, key, linear, arguments.keep)
                keep(store, name, method, rows)
                print(f"{name}, {method}: {json.dumps(rows)}", flush=True)
        if arguments.ensemble and time.monotonic() < deadline:
            members = [settings(name, member, arguments) for member in arguments.ensemble]
            row = ensemble(corpus, members, linear)
            keep(store, name, row["method"], [row])
            print(f"{name}, {row['method']}: {json.dumps(row)}", flush=True)
    if not arguments.quick:
        rows = stored(store)
        write_table("methods.md", "Six methods on six sets", HEADER, table(rows), notes(rows, load))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", dest="sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--method", nargs="+", choices=method_names(), default=method_names())
    parser.add_argument(
        "--ensemble",
        nargs="+",
        metavar="METHOD[@SEED]",
        help="also fuse the runs of these methods into one bundle; runs that are not kept are trained",
    )
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings over the presets"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no training after so many"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--keep", action="store_true", help="keep the runs in the cache, not only their results"
    )
    parser.add_argument("--quick", action="store_true", help="one short epoch, printed only")
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine")
    return parser.parse_args()


def settings(name: str, member: str, arguments: argparse.Namespace) -> RunConfig:
    """The preset of a method on a set; METHOD@SEED has another seed than the preset's."""
    method, _, seed = member.partition("@")
    here = ["cluster.workers=0", f"cluster.threads_per_process={arguments.threads}", "log.keep=1"]
    if seed:
        here.append(f"optim.seed={seed}")
    return data_sets.preset(name, [*here, *arguments.override], method)


def measured(
    corpus: Corpus, config: RunConfig, key: str, linear: Evaluation | None, keep_run: bool
) -> list[Row]:
    """Trains a method and measures its variants. An interrupted training continues."""
    name = corpus.card.name
    was_there = folder_of(corpus, config).exists()
    run, seconds = trained(corpus, config)
    about = {
        "set": name,
        "method": config.method_name,
        "preset": f"{config.method_name}/{name}",
        "settings": key,
        "epochs": run.config.optim.stop_epoch,
        "seconds": round(seconds, 1),
    }
    rows = []
    for variant, (evaluation, validation, changes) in variants(run, corpus).items():
        row = {**about, "variant": variant, "changes": changes, "validation": validation}
        rows.append(finished(row, evaluation, linear))
    if not (keep_run or was_there):
        shutil.rmtree(run.path)
    return rows


Variant = tuple[Evaluation, Mapping[str, float] | None, Mapping[str, Any]]


def variants(run: Run, corpus: Corpus) -> dict[str, Variant]:
    """Evaluation, validation and changed settings of each way to answer with a run."""
    retriever = Retriever.load(bundle_of(run, corpus))
    result: dict[str, Variant] = {}
    if run.config.memory is None:
        evaluation = measure_bundle(retriever, corpus, "test")
        result[ALONE] = (evaluation, selection_metrics(run), {})
    else:
        result[ALONE] = with_memory(run, corpus, {"memory.weight": {"choice": [0.0]}})
    result[WITH_MEMORY] = with_memory(run, corpus, settings_files.load_yaml(str(MEMORY_SPACE)))
    result[FUSED] = fused(run, corpus)
    if run.config.method_name == "unidec" and run.config.method.answers == "both":
        for half, variant in enumerate(("texts alone", "rows alone")):
            evaluation = measure(search_by_half(retriever, corpus, half), corpus, "test")
            result[variant] = (evaluation, None, {})
    return result


def selection_metrics(run: Run) -> dict[str, float]:
    """Validation at the epoch that the refit trains to."""
    records = read_records(run.path / SELECTION / "metrics.jsonl")
    validations = [record for record in records if METRICS[0] in record]
    last = run.config.optim.stop_epoch - 1
    chosen = [record for record in validations if record["epoch"] == last]
    return {metric: float(chosen[-1][metric]) for metric in METRICS}


def with_memory(run: Run, corpus: Corpus, space: Mapping[str, Any]) -> Variant:
    """A run's encoder under a memory: settings chosen on the selection's held-out queries."""
    selection = run.path / "memory-of-selection"
    if not selection.exists():
        memory_bundle(str(run.path / SELECTION), corpus, selection)
    distributions = parse_space(space, "memory")
    sweep = sweep_bundle(str(selection), corpus, distributions, MEMORY_TRIALS, 0, METRICS[0])
    best = max(sweep.settings, key=lambda setting: sum(setting.metrics[m] for m in METRICS))
    validation = {metric: float(best.metrics[metric]) for metric in METRICS}
    bundle = run.path / "memory"
    shutil.rmtree(bundle, ignore_errors=True)
    memory = changed_memory(None, nested(best.values))
    memory_bundle(str(run.path), corpus, bundle, memory)
    evaluation = measure_bundle(Retriever.load(str(bundle)), corpus, "test")
    return evaluation, validation, best.values


def fused(run: Run, corpus: Corpus) -> Variant:
    """A run's bundle fused with the words of training queries and labels, as `xmcray fuse` does."""
    bundle = run.path / "fused"
    shutil.rmtree(bundle, ignore_errors=True)
    choice = fuse([str(run.path)], corpus, bundle, metrics=METRICS, threads=torch.get_num_threads())
    evaluation = measure_bundle(Retriever.load(str(bundle)), corpus, "test")
    return evaluation, choice.metrics, part_weights(choice)


def part_weights(choice: Choice) -> dict[str, float]:
    """The weights of a fusion, by the names of its settings."""
    return {f"parts.{part}": choice.config.weight(part) for part in choice.config.used()}


def ensemble(corpus: Corpus, members: Sequence[RunConfig], linear: Evaluation | None) -> Row:
    """The row of one bundle of several runs, as `xmcray fuse RUN RUN` makes it."""
    paths = []
    keys = []
    total_seconds = 0.0
    for config in members:
        run, seconds = trained(corpus, config)
        paths.append(str(run.path))
        keys.append(data_sets.fingerprint(config, corpus))
        total_seconds += seconds
    with tempfile.TemporaryDirectory(dir=data_sets.CACHE) as folder:
        bundle = Path(folder) / "fused"
        choice = fuse(paths, corpus, bundle, metrics=METRICS, threads=torch.get_num_threads())
        evaluation = measure_bundle(Retriever.load(str(bundle)), corpus, "test")
    row = {
        "set": corpus.card.name,
        "method": " + ".join(counted(config.method_name for config in members)),
        "variant": FUSED,
        "preset": None,
        "settings": " + ".join(keys),
        "changes": part_weights(choice),
        "validation": choice.metrics,
        "epochs": None,
        "seconds": round(total_seconds, 1),
    }
    return finished(row, evaluation, linear)


def counted(names: Iterable[str]) -> list[str]:
    """Each name once, with the number of its runs where it has several, such as 2 astra."""
    return [name if count == 1 else f"{count} {name}" for name, count in Counter(names).items()]


def search_by_half(retriever: Retriever, corpus: Corpus, half: int) -> Search:
    """A search with one half of the vectors; the other half of the query is set to zero."""
    split = corpus.split("test")
    width = min(SEARCH_K, corpus.card.num_labels)

    def search(rows: Int64Array) -> TopLabels:
        query_BD: Float32Array = retriever.encode(split.tokens(rows))
        halves = np.split(query_BD, 2, axis=1)
        # The halves are views, so this changes the vectors themselves.
        halves[1 - half][:] = 0
        return retriever.top_labels(query_BD, width, exclude=split.filters(rows), exact=True)

    return search


def linear_of(corpus: Corpus, threads: int) -> Evaluation:
    """XR-Linear's evaluation. The floors of the set are measured if they are missing, and stored."""
    name = corpus.card.name
    folder = floors_folder(name, threads)
    evaluations = {}
    for kind in FLOORS:
        answers = stored_answers(str(folder / f"{kind}.npz"), corpus, "test")
        evaluations[kind] = measure(answers, corpus, "test")
    costs = json.loads((folder / "costs.json").read_text(encoding="utf-8"))
    for kind, method in FLOORS.items():
        seconds = costs["vectors_s"]
        if kind != "memory":
            seconds += costs["train_s"]
        row = {
            "set": name,
            "method": method,
            "variant": FLOOR,
            "preset": None,
            "settings": None,
            "changes": {"weights": costs["weights"]} if kind == "fused" else {},
            "validation": None,
            "epochs": None,
            "seconds": round(seconds, 1),
        }
        # XR-Linear is not compared with itself.
        linear = None if kind == "linear" else evaluations["linear"]
        keep(STORE, name, method, [finished(row, evaluations[kind], linear)])
    return evaluations["linear"]


def floors_folder(name: str, threads: int) -> Path:
    """Answers of the simple methods, measured in their own environment if they are missing."""
    folder = data_sets.CACHE / "floors" / name
    if not (folder / "costs.json").is_file():
        tool = data_sets.DATA.parent / "tools" / "linear_floor.py"
        words: list[str | Path] = ["--tool", tool, "--data", data_sets.DATA / name]
        words += ["--out", folder, "--threads", str(threads)]
        run_script("linear", "peer_linear.py", words, threads)
    return folder


def finished(row: Row, evaluation: Evaluation, linear: Evaluation | None) -> Row:
    """A row with the metrics of a test and, against XR-Linear, their paired differences."""
    test = {}
    for metric in METRICS:
        low, high = evaluation.intervals[metric]
        test[metric] = {"value": evaluation.metrics[metric], "low": low, "high": high}
    differences = None
    if linear is not None:
        differences = {}
        for comparison in compare(evaluation, linear):
            if comparison.metric in METRICS:
                values = dataclasses.asdict(comparison)
                names = ("difference", "low", "high", "p_value")
                differences[comparison.metric] = {name: values[name] for name in names}
    today = str(datetime.date.today())
    return {**row, "test": test, "less_linear": differences, "date": today, "commit": commit()}


if __name__ == "__main__":
    main()
