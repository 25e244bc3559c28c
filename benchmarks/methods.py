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
import fcntl
import json
import math
import os
import shutil
import subprocess
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
from common import RESULTS, refuse_if_busy, write_table
from peer_environment import run_script

from xmcray import config as configs
from xmcray.data.corpus import Corpus
from xmcray.evaluation.evaluate import SEARCH_K, Evaluation, Search, compare
from xmcray.methods.registry import method_names
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import changed_memory
from xmcray.storage.whole_files import write_json
from xmcray.training.fuse import fuse
from xmcray.training.memory import memory_bundle
from xmcray.training.outcome import bundle_of, measure, measure_bundle, stored_answers
from xmcray.training.part_weights import Choice
from xmcray.training.records import read_records
from xmcray.training.run import SELECTION, Run, RunConfig
from xmcray.tuning.inference import sweep_bundle
from xmcray.tuning.space import nested, parse_space
from xmcray.types import Float32Array, Int64Array, TopLabels

METRICS = ("P@1", "P@5", "PSP@5")
SETS = (
    "sample",
    "cdnjs-keywords",
    "tate-subjects",
    "wordnet-hypernyms",
    "msdocs-seealso",
    "msdocs-links",
)
STORE = RESULTS / "methods.json"
LINEAR = "XR-Linear"
# Files of peer_linear.py, and their names in the table.
FLOORS = {"memory": "TF-IDF memory", "linear": LINEAR, "fused": "XR-Linear and TF-IDF, fused"}
MEMORY_SPACE = data_sets.ROOT / "tune" / "spaces" / "memory.yaml"
MEMORY_TRIALS = 200
ALONE = "alone"
WITH_MEMORY = "with memory"
FUSED = "fused"
FLOOR = "floor"
HEADER = ["set", "method", "validation P@1 / P@5 / PSP@5", *METRICS, "less XR-Linear", "minutes"]
NOTES = (
    "percent; validation: of the run with held-out queries; test: after a refit on all training queries, with 95 %"
    " bootstrap intervals over queries",
    "in bold the row that validation chooses (mean of the three metrics)",
    "with memory: the bundle of `xmcray memory RUN`, settings by `xmcray tune --bundle` on the validation queries;"
    " RAE-XMC alone: its encoder without votes",
    "fused: the bundle of `xmcray fuse RUN`, which chooses the weights of its parts on the same validation queries;"
    " a + b: of `xmcray fuse RUN RUN`",
    "less XR-Linear: differences in the three metrics; * if the paired test over queries has p < 0.05",
    "minutes: wall time of both trainings of a refit, or of XR-Linear with its vectors, whatever else the machine did;"
    " a memory trains nothing",
)
Row = dict[str, Any]


def main() -> None:
    arguments = parse_arguments()
    if arguments.quick:
        arguments.override += ["optim.epochs=1", "encoder.dim=32", "negatives.hard=0"]
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    torch.set_num_threads(arguments.threads)
    data_sets.offer_minilm()
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
            if f"{method}/{name}" not in configs.presets() or time.monotonic() > deadline:
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


# --- the store


def stored(store: Path) -> list[Row]:
    """All measurements, by set, the floors first."""
    if not store.is_file():
        return []
    rows: list[Row] = json.loads(store.read_text(encoding="utf-8"))["results"]
    return rows


def is_measured(store: Path, name: str, method: str, key: str) -> bool:
    """Whether a method was measured on a set with these settings, in all of its variants."""
    # The last variant is there only if all of them are.
    wanted = {"set": name, "method": method, "settings": key, "variant": FUSED}
    return any(wanted.items() <= row.items() for row in stored(store))


def keep(store: Path, name: str, method: str, new_rows: Sequence[Row]) -> None:
    """Replaces the rows of a method on a set; several processes may measure at the same time."""
    if store == Path(os.devnull):
        return
    with (data_sets.CACHE / "methods.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = []
        for row in stored(store):
            is_replaced = row["set"] == name and row["method"] == method
            if not is_replaced:
                rows.append(row)
        rows += new_rows
        rows.sort(key=order)
        choose(rows)
        write_json(store, {"results": rows})


def order(row: Row) -> tuple[int, bool, str, bool, str]:
    """Sets in their order, the floors first, then methods by name, alone before the others."""
    is_method = row["variant"] != FLOOR
    is_variant = row["variant"] != ALONE
    return SETS.index(row["set"]), is_method, row["method"], is_variant, row["variant"]


def choose(rows: Sequence[Row]) -> None:
    """Marks the row of each set with the best validation."""
    for name in SETS:
        candidates = [row for row in rows if row["set"] == name]
        best = max(candidates, key=validation_mean, default=None)
        for row in candidates:
            row["chosen"] = row is best and row["validation"] is not None


def validation_mean(row: Row) -> float:
    values = row["validation"]
    return -math.inf if values is None else float(np.mean([values[name] for name in METRICS]))


# --- measuring


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
    result[WITH_MEMORY] = with_memory(run, corpus, configs.load_yaml(str(MEMORY_SPACE)))
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


def commit() -> str:
    git = ["git", "-C", str(data_sets.ROOT), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(git, capture_output=True, text=True, check=False)
    return result.stdout.strip()


# --- the table


def table(rows: Sequence[Row]) -> list[list[object]]:
    """One line for each measurement."""
    lines: list[list[object]] = []
    for row in rows:
        is_plain = row["variant"] in (ALONE, FLOOR)
        label = row["method"] if is_plain else f"{row['method']}, {row['variant']}"
        if row["chosen"]:
            label = f"**{label}**"
        minutes = f"{row['seconds'] / 60:.1f}" if is_plain else "-"
        test = [cell(row["test"][metric]) for metric in METRICS]
        lines.append([row["set"], label, shown_validation(row), *test, less_linear(row), minutes])
    return lines


def cell(value: Mapping[str, float]) -> str:
    return f"{100 * value['value']:.1f} [{100 * value['low']:.1f}, {100 * value['high']:.1f}]"


def shown_validation(row: Row) -> str:
    if row["validation"] is None:
        return "-"
    return " / ".join(f"{100 * row['validation'][metric]:.1f}" for metric in METRICS)


def less_linear(row: Row) -> str:
    if row["less_linear"] is None:
        return "-"
    cells = []
    for metric in METRICS:
        comparison = row["less_linear"][metric]
        star = "*" if comparison["p_value"] < 0.05 else ""
        cells.append(f"{100 * comparison['difference']:+.1f}{star}")
    return " / ".join(cells)


def notes(rows: Sequence[Row], load: str) -> list[str]:
    """What each set's choice reaches, what is missing, and how to read the table."""
    lines = []
    for name in SETS:
        of_set = [row for row in rows if row["set"] == name]
        lines += notes_on_set(name, of_set)
    dates = sorted({row["date"] for row in rows})
    measured_on = f"measured between {dates[0]} and {dates[-1]}" if dates else "nothing measured"
    return [*lines, *NOTES, f"{measured_on}; commits are in methods.json", load]


def notes_on_set(name: str, rows: Sequence[Row]) -> list[str]:
    lines = []
    missing = []
    stale = []
    is_here = name == "sample" or (data_sets.DATA / name).is_dir()
    corpus = data_sets.corpus(name) if is_here else None
    for method in method_names():
        of_method = [row for row in rows if row["method"] == method]
        if not of_method:
            missing.append(method)
        elif corpus is not None:
            preset = data_sets.preset(name, method=method)
            if of_method[0]["settings"] != data_sets.fingerprint(preset, corpus):
                stale.append(method)
    if missing:
        lines.append(f"{name}: not measured yet: {', '.join(missing)}")
    if stale:
        lines.append(f"{name}: measured with an earlier preset: {', '.join(stale)}")
    chosen = [row for row in rows if row["chosen"]]
    floors = [row for row in rows if row["variant"] == FLOOR]
    if chosen and floors:
        lines.append(f"{name}: {verdict(chosen[0], floors)}")
    for row in rows:
        if row["variant"] == WITH_MEMORY:
            changes = ", ".join(f"{key} {value:.3g}" for key, value in row["changes"].items())
            lines.append(f"{name}, {row['method']} with memory: {changes}")
    return lines


def verdict(row: Row, floors: Sequence[Row]) -> str:
    """How the row that validation chooses compares with the best floor in each metric."""
    cells = []
    for metric in METRICS:
        best = max(floor["test"][metric]["value"] for floor in floors)
        cells.append(f"{metric} {100 * (row['test'][metric]['value'] - best):+.1f}")
    return (
        f"validation chooses {row['method']} {row['variant']};"
        f" less the best floor of each metric: {', '.join(cells)}"
    )


if __name__ == "__main__":
    main()
