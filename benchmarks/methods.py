"""All six methods with the static encoder and their committed presets on six sets, compared with simple methods.

    python benchmarks/methods.py                                  # everything; finished trainings are kept
    python benchmarks/methods.py --set cdnjs-keywords --method rae dexml
    python benchmarks/methods.py --minutes 30                     # starts none after 30 minutes
    python benchmarks/methods.py --set cdnjs-keywords --quick     # does it work?

Each training is a refit in one process: validation chooses the number of epochs, then all training queries are used.
Its bundle is measured on the test split, alone and in a weighted sum with a memory (memory_sum.py). The weights, and
the best row of a data set, are chosen on the validation split. Each result is one JSON file in the cache.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
import torch
from accuracy import LIMITS, folder_of, trained
from common import refuse_if_busy, write_table
from floors import FLOORS, METRICS
from memory_sum import PARTS, UNTRAINED, VOTES, answers, choose_weights

from xmcray import config as configs
from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.evaluation.evaluate import SEARCH_K, Evaluation, Search
from xmcray.methods.registry import method_names
from xmcray.retrieval.retriever import Retriever
from xmcray.training.outcome import bundle_of, measure, measure_bundle
from xmcray.training.records import read_records
from xmcray.training.run import SELECTION, Run, RunConfig
from xmcray.types import Float32Array, Int64Array, TopLabels

SETS = (
    "sample",
    "cdnjs-keywords",
    "tate-subjects",
    "wordnet-hypernyms",
    "msdocs-seealso",
    "msdocs-links",
)
HEADER = ["set", "method", "validation P@1 / P@5 / PSP@5", *METRICS, "above the floor", "minutes"]
NOTES = (
    "percent; validation: of the run with held-out queries; test: after refit, with 95 % bootstrap intervals over"
    " queries; in bold the row that validation prefers (mean of the three metrics)",
    "with memory: a weighted sum; bundle: softmax of its scores (RAE-XMC: its votes); queries: votes of the"
    f" {VOTES.keys} nearest training queries, softmax of cosines / {VOTES.temperature:g}; label texts: cosines;"
    f" untrained: a bag of random token vectors of {UNTRAINED.dim} dimensions, weighted as in TF-IDF",
    "floor: the best simple method of benchmarks/floors.py in each metric",
    "minutes: wall time of both trainings of a refit, whatever else the machine did (finished runs of accuracy.py,"
    " on both cores, are used where there are any); a memory trains nothing",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Attributes:
        method: its name.
        variant: "alone", "with memory", "texts alone" or "rows alone".
        test: value, lower and upper bound of each metric.
        validation: metrics on validation queries; None if the row cannot be chosen.
        seconds: of the training.
    """

    method: str
    variant: str
    test: Mapping[str, Sequence[float]]
    validation: Mapping[str, float] | None
    seconds: float

    @property
    def validation_total(self) -> float:
        return sum(self.validation.values()) if self.validation else -math.inf

    def above(self, floor: Sequence[float]) -> list[float]:
        """Points above the floor in each metric; nan if the data set has none."""
        values = [100 * self.test[metric][0] for metric in METRICS]
        return [value - low for value, low in zip(values, floor, strict=True)]


def main() -> None:
    arguments = parse_arguments()
    if arguments.quick:
        arguments.out = Path(os.devnull)
        arguments.override += ["optim.epochs=1", "encoder.dim=32", "negatives.hard=0"]
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    torch.set_num_threads(arguments.threads)
    deadline = time.monotonic() + 60 * arguments.minutes
    cells: list[list[object]] = []
    notes: list[str] = []
    for name in SETS:
        is_here = name == "sample" or (data_sets.DATA / name).is_dir()
        corpus = data_sets.corpus(name) if is_here else None
        if corpus is None:
            notes.append(f"{name} left out: not on this machine")
            continue
        results = {}
        for method in method_names():
            if f"{method}/{name}" not in configs.presets():
                continue
            is_wanted = name in arguments.sets and method in arguments.method
            may_train = is_wanted and time.monotonic() < deadline
            config = settings(name, method, arguments)
            result = result_of(corpus, config, may_train, arguments)
            if result is not None:
                results[method] = result
        rows = rows_of(results)
        cells += table(name, rows)
        notes += comments(name, corpus, results, rows)
    write_table(arguments.out, "Six methods on six sets", HEADER, cells, [*notes, *NOTES, load])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", dest="sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--method", nargs="+", choices=method_names(), default=method_names())
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings over the presets"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no training after so many"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-memory", action="store_true", help="the bundles alone")
    parser.add_argument(
        "--keep", action="store_true", help="keep the runs in the cache, not only their results"
    )
    parser.add_argument("--quick", action="store_true", help="one short epoch, printed only")
    parser.add_argument("--out", type=Path, default=Path("methods.md"))
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine")
    return parser.parse_args()


def settings(name: str, method: str, arguments: argparse.Namespace) -> RunConfig:
    here = ["cluster.workers=0", f"cluster.threads_per_process={arguments.threads}", "log.keep=1"]
    return data_sets.preset(name, [*here, *arguments.override], method)


def result_of(
    corpus: Corpus, config: RunConfig, may_train: bool, arguments: argparse.Namespace
) -> dict[str, Any] | None:
    """The result in the cache; trains for it if it is missing and `may_train`. An interrupted training continues."""
    name = f"{config.method_name}-{data_sets.fingerprint(config, corpus)}.json"
    file = data_sets.CACHE / "methods" / corpus.card.name / name
    result: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    is_complete = bool(result) and ("weights" in result or arguments.no_memory)
    if may_train and not is_complete:
        was_there = folder_of(corpus, config).exists()
        run, seconds = trained(corpus, config)
        result |= measured(run, corpus, seconds, with_memory=not arguments.no_memory)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result))
        print(f"{corpus.card.name}, {config.method_name}: {json.dumps(result)}", flush=True)
        if not (arguments.keep or was_there):
            shutil.rmtree(run.path)
    return result or None


def measured(run: Run, corpus: Corpus, seconds: float, with_memory: bool) -> dict[str, Any]:
    """Measures the bundle of a finished run: alone, its halves (UniDEC), and with a memory."""
    retriever = Retriever.load(bundle_of(run, corpus))
    alone: dict[str, Any] = {"test": with_bounds(measure_bundle(retriever, corpus, "test"))}
    result = {"seconds": seconds, "epochs": run.config.optim.stop_epoch, "alone": alone}
    method = run.config.method
    if run.config.method_name == "unidec" and method.answers == "both":
        for half, variant in enumerate(("texts alone", "rows alone")):
            evaluation = measure(search_by_half(retriever, corpus, half), corpus, "test")
            result[variant] = {"test": with_bounds(evaluation)}
    if with_memory:
        add_memory(result, run, corpus)
    else:
        alone["validation"] = last_validation(run)
    return result


def last_validation(run: Run) -> dict[str, float]:
    """Validation at the end of the training that chose the number of epochs."""
    records = read_records(run.path / SELECTION / "metrics.jsonl")
    validations = [record for record in records if METRICS[0] in record]
    return {metric: float(validations[-1][metric]) for metric in METRICS}


def add_memory(result: dict[str, Any], run: Run, corpus: Corpus) -> None:
    """Adds the best weights of a sum with a memory to a result, and the metrics of the sum."""
    selection = Run.open(run.path / SELECTION)
    data = TrainingData(corpus, selection.config.data)
    truth = corpus.split("train").positives(data.validation_rows)
    held_out = list(answers(selection, data, data.validation_rows, "train"))
    alone, weights, best = choose_weights(held_out, truth, corpus)
    result["alone"]["validation"] = alone
    result["weights"] = weights
    if not any(weights[1:]):  # the bundle alone is best
        return
    num_labels = corpus.card.num_labels
    test_rows = np.arange(len(corpus.split("test")))
    blocks = answers(run, TrainingData(corpus, run.config.data), test_rows, "test")
    tops = [shares.top(weights, min(SEARCH_K, num_labels), num_labels) for shares in blocks]
    ids = np.concatenate([top.ids for top in tops])
    scores = np.concatenate([top.scores for top in tops])
    evaluation = measure(lambda rows: TopLabels(ids[rows], scores[rows]), corpus, "test")
    result["with memory"] = {"validation": best, "test": with_bounds(evaluation)}


def search_by_half(retriever: Retriever, corpus: Corpus, half: int) -> Search:
    """A search with one half of the vectors; the other half of the query is set to zero."""
    split = corpus.split("test")
    width = min(SEARCH_K, corpus.card.num_labels)

    def search(rows: Int64Array) -> TopLabels:
        query_BD: Float32Array = retriever.encode(split.tokens(rows))
        np.split(query_BD, 2, axis=1)[1 - half][:] = 0
        return retriever.top_labels(query_BD, width, exclude=split.filters(rows), exact=True)

    return search


def with_bounds(evaluation: Evaluation) -> dict[str, list[float]]:
    """Value, lower and upper bound of each metric."""
    return {
        metric: [evaluation.metrics[metric], *evaluation.intervals[metric]] for metric in METRICS
    }


def rows_of(results: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The rows of one data set."""
    rows = []
    for method, result in results.items():
        for variant, values in result.items():
            if isinstance(values, dict):
                validation = values.get("validation")
                rows.append(Row(method, variant, values["test"], validation, result["seconds"]))
    return rows


def preferred(rows: Sequence[Row]) -> Row | None:
    """The row with the best validation."""
    return max(rows, key=lambda row: row.validation_total, default=None)


def best_floor(name: str) -> list[float]:
    """The best simple method in each metric; nan if none was measured."""
    best = []
    for column in range(len(METRICS)):
        values = [floor[column] for floor in FLOORS[name].values()]
        best.append(max((value for value in values if value is not None), default=math.nan))
    return best


def table(name: str, rows: Sequence[Row]) -> list[list[object]]:
    """The lines of one data set, the floor first."""
    floor = best_floor(name)
    shown_floor = ["-" if math.isnan(low) else f"{low:.1f}" for low in floor]
    lines: list[list[object]] = [[name, "floor", "-", *shown_floor, "-", "-"]]
    best = preferred(rows)
    for row in rows:
        is_alone = row.variant == "alone"
        label = row.method if is_alone else f"{row.method}, {row.variant}"
        if row is best:
            label = f"**{label}**"
        validation = "-"
        if row.validation:
            validation = " / ".join(f"{100 * value:.1f}" for value in row.validation.values())
        test = []
        for value, low, high in row.test.values():
            test.append(f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]")
        minutes = f"{row.seconds / 60:.1f}" if is_alone else "-"
        lines.append([name, label, validation, *test, signed(row.above(floor)), minutes])
    return lines


def signed(differences: Sequence[float]) -> str:
    return " / ".join("." if math.isnan(value) else f"{value:+.1f}" for value in differences)


def comments(
    name: str, corpus: Corpus, results: Mapping[str, Mapping[str, Any]], rows: Sequence[Row]
) -> list[str]:
    """Notes on one data set."""
    card = corpus.card
    about = f"{name}: {card.num_labels:,} labels, {card.num_train:,} training queries"
    missing = [method for method in method_names() if method not in results]
    if missing:
        about += f"; not trained yet: {', '.join(missing)}"
    if results:
        epochs = [f"{method} {result['epochs']}" for method, result in results.items()]
        about += f"; epochs of the refit: {', '.join(epochs)}"
    lines = [about]
    for method, result in results.items():
        if "with memory" in result:
            weights = zip(PARTS, result["weights"], strict=True)
            shown = ", ".join(f"{part} {weight:g}" for part, weight in weights if weight)
            lines.append(f"{name}, {method} with memory: {shown}")
    if name == "sample":
        lines.append(reached_on_sample(rows))
    elif rows:
        lines += compared_with_floor(name, rows)
    return lines


def reached_on_sample(rows: Sequence[Row]) -> str:
    limit = LIMITS["sample"][0]
    assert limit is not None
    bundles = [row for row in rows if row.variant == "alone"]
    reached = [row.method for row in bundles if 100 * row.test["P@1"][0] >= limit]
    names = ", ".join(reached) or "none"
    return f"sample: P@1 of {limit:g}, of the bundle alone: reached by {names}"


def compared_with_floor(name: str, rows: Sequence[Row]) -> list[str]:
    floor = best_floor(name)
    best = preferred(rows)
    assert best is not None
    short = []
    for metric, difference in zip(METRICS, best.above(floor), strict=True):
        if is_below(difference):
            short.append(f"{metric} {difference:+.1f}")
    verdict = f"below the floor in {', '.join(short)}" if short else "at or above every floor"
    good = []
    for row in rows:
        if not any(is_below(difference) for difference in row.above(floor)):
            is_alone = row.variant == "alone"
            good.append(row.method if is_alone else f"{row.method} {row.variant}")
    return [
        f"{name}: validation prefers {best.method} {best.variant}, {verdict}",
        f"{name}: at or above every floor: {', '.join(good) or 'none'}",
    ]


def is_below(difference: float) -> bool:
    """Whether a difference is negative as it is printed."""
    return f"{difference:+.1f}".startswith("-")


if __name__ == "__main__":
    main()
