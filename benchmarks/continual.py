"""A corpus that grows slice by slice: `train --from` after each slice, against training anew at the end.

    python benchmarks/continual.py --set msdocs-links
    python benchmarks/continual.py --set msdocs-links --method dexml --epochs 3
    python benchmarks/continual.py --set sample --quick     # does it work?
    python benchmarks/continual.py --draws 1000             # only how often `promote` is right

The training queries are cut, in the order of the file, where a further tenth of the labels has been named. The first
slice is trained with the committed preset, and each further one goes on for few epochs on all queries so far. At the end
the last corpus is trained anew. All corpora have the vocabulary of all texts, so that this is about training alone. An
interrupted measurement continues with the same command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
from common import new_parser, refuse_if_busy, write_table
from corpora import appended, corpus_of, vocabulary_of
from simulated import simulated_verdict

from xmcray import config as configs
from xmcray.data.corpus import Corpus
from xmcray.data.formats import RawFiles, Row, detect
from xmcray.data.sample import write_sample
from xmcray.data.writer import PrepareConfig
from xmcray.errors import DataError
from xmcray.evaluation.evaluate import ComparisonRow, Evaluation, compare
from xmcray.evaluation.metrics import MAIN_METRICS
from xmcray.progress import watch_training
from xmcray.storage.manifest import MANIFEST
from xmcray.training.launch import train
from xmcray.training.outcome import finish
from xmcray.training.promotion import LAST, METRIC, judge, measure_newest
from xmcray.training.run import Run, RunConfig
from xmcray.training.start import settings_from

METRICS = ("P@1", "P@5", "PSP@5")
ALONE = ["cluster.workers=0", "cluster.threads_per_process=1"]


def main() -> None:
    parser = new_parser(__doc__, out="continual.md", anyway=True)
    parser.add_argument("--set", default="msdocs-links")
    parser.add_argument("--method", default="astra")
    parser.add_argument("--slices", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=2, help="after each slice but the first")
    parser.add_argument("--override", nargs="+", default=[], metavar="a.b=c")
    parser.add_argument(
        "--later", nargs="+", default=["optim.warmup_steps=20"], metavar="a.b=c", help="of --from"
    )
    parser.add_argument("--draws", type=int, default=0, metavar="N")
    parser.add_argument("--quick", action="store_true", help="one short epoch, printed only")
    arguments = parser.parse_args()
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    if arguments.quick:
        arguments.out = Path(os.devnull)
        arguments.override += ["optim.epochs=1", "encoder.dim=32", "negatives.hard=0"]
    if arguments.draws:
        simulate(arguments.draws, load)
        return
    measure(arguments, load)


def simulate(num_draws: int, load: str) -> None:
    """How often `promote` is right, on simulated answers to 5,000 queries."""
    seeds = range(num_draws)
    rows: list[list[object]] = []
    for share in (0.1, 0.2, 0.4, 0.8):
        equal = [simulated_verdict(seed, 0.0, share) for seed in seeds]
        worse = [simulated_verdict(seed, 0.01, share) for seed in seeds]
        # A 95 % interval is 3.92 standard errors wide.
        error = np.mean([verdict.row.high - verdict.row.low for verdict in equal]) / 3.92
        accepted = np.mean([verdict.accepted for verdict in equal])
        refused = np.mean([not verdict.accepted for verdict in worse])
        rows.append(
            [
                f"{100 * share:.0f}",
                f"{100 * error:.2f}",
                100 * float(refused),
                100 * float(accepted),
            ]
        )
    header = [
        "queries that are answered anew, %",
        "standard error, points",
        "refused, 1 point worse, %",
        "accepted, equal, %",
    ]
    about = (
        f"{num_draws} draws each: {LAST:,} queries with five answers, {METRIC}, margin 0.9 points"
    )
    write_table("promotion.md", "How often promote is right", header, rows, [about, load])


def measure(arguments: argparse.Namespace, load: str) -> None:
    folder = data_sets.CACHE / "continual" / f"{arguments.set}-{arguments.slices}"
    corpora = grown(arguments.set, arguments.slices, folder)
    name = "quick" if arguments.quick else "runs"
    runs = folder / name / arguments.method
    first_overrides = [*arguments.override, *ALONE]
    config = data_sets.preset(arguments.set, first_overrides, arguments.method)
    run, run_s = trained(corpora[0], runs / "1", config)
    later_overrides = [f"optim.epochs={arguments.epochs}", *arguments.later, *ALONE]
    for number, corpus in enumerate(corpora[1:], start=2):
        settings = settings_from(run, arguments.method, corpus)
        values = configs.merge(settings, later_overrides)
        later = RunConfig.resolve(arguments.method, values)
        run, run_s = trained(corpus, runs / str(number), later, run)
    corpus = corpora[-1]
    anew, anew_s = trained(corpus, runs / "anew", config)

    continued = evaluated(run, corpus)
    retrained = evaluated(anew, corpus)
    num_old = corpora[-2].card.num_labels
    continued_old = of_old_labels(continued, corpus, num_old)
    retrained_old = of_old_labels(retrained, corpus, num_old)
    rows: list[list[object]] = [
        ["--from, slice by slice", *in_percent(continued.metrics), run_s],
        ["anew on everything", *in_percent(retrained.metrics), anew_s],
        ["queries of old labels, --from", *in_percent(continued_old), "-"],
        ["queries of old labels, anew", *in_percent(retrained_old), "-"],
    ]
    comparisons = compare(continued, retrained)
    notes = [difference(row) for row in comparisons if row.metric in METRICS]
    share = run_s / anew_s
    notes.append(f"time of the last --from: {100 * share:.1f} % of that of training anew (CPU)")
    served = measure_newest(str(anew.path / "bundle"), corpus)
    candidate = measure_newest(str(run.path / "bundle"), corpus)
    notes.append(f"promote, last {LAST:,} test queries: {judge(served, candidate, METRIC)}")
    notes.append(
        f"{arguments.method} on {arguments.set}: {corpus.card.num_labels:,} labels, {corpus.card.num_train:,} training"
        f" queries in {arguments.slices} slices; {config.optim.epochs} epochs for the first slice"
        f" and anew, then {arguments.epochs} each, with {arguments.later}"
    )
    header = ["training", *METRICS, "CPU seconds of training"]
    write_table(arguments.out, "A corpus that grows", header, rows, [*notes, load])


def evaluated(run: Run, corpus: Corpus) -> Evaluation:
    """What a finished run reaches on the test split."""
    evaluation = finish(run, corpus)
    assert evaluation is not None, "the set has a test split"
    return evaluation


def in_percent(metrics: Mapping[str, float]) -> list[float]:
    return [100 * metrics[name] for name in METRICS]


def difference(row: ComparisonRow) -> str:
    return (
        f"{row.metric} of --from less anew: {100 * row.difference:+.2f} points, 95 % interval"
        f" {100 * row.low:+.2f} to {100 * row.high:+.2f}"
    )


def trained(
    corpus: Corpus, out: Path, config: RunConfig, source: Run | None = None
) -> tuple[Run, float]:
    """The finished run, and the CPU seconds that its training took, over all calls."""
    clock = out.with_suffix(".seconds")
    before = json.loads(clock.read_text()) if clock.is_file() else 0.0
    is_finished = (out / "result.json").is_file()
    started = time.process_time()
    try:
        run = train(corpus.path, out, config, source=source, watch=watch_training)
    finally:
        if not is_finished:
            clock.parent.mkdir(parents=True, exist_ok=True)
            clock.write_text(json.dumps(before + time.process_time() - started))
    return run, json.loads(clock.read_text())


def of_old_labels(evaluation: Evaluation, corpus: Corpus, num_old: int) -> dict[str, float]:
    """METRICS over the test queries all of whose labels are among the first `num_old`."""
    positives = corpus.split("test").positives(evaluation.query_ids)
    # Later labels have larger ids, so the largest id of a query says whether all of them are old.
    newest = np.zeros(len(positives), np.int64)
    np.maximum.at(newest, positives.row_ids, positives.values)
    is_old = newest < num_old
    gain_M = evaluation.per_query.gain_QM[is_old].sum(0)
    divisor_M = evaluation.per_query.divisor_QM[is_old].sum(0)
    values = dict(zip(MAIN_METRICS, (gain_M / divisor_M).tolist(), strict=True))
    return {name: values[name] for name in METRICS}


def grown(name: str, num_slices: int, folder: Path) -> list[Corpus]:
    """The corpora after each slice; made once."""
    numbers = range(1, num_slices + 1)
    last = folder / f"corpus-{num_slices}"
    if not (last / MANIFEST).is_file():
        # An interrupted call may have left some of them.
        shutil.rmtree(folder, ignore_errors=True)
        raw = data_sets.DATA / name
        if name == "sample":
            raw = folder / "raw"
            write_sample(raw)
        source = detect(raw)
        tokenizer = vocabulary_of(source, PrepareConfig())
        write_slices(source, folder, num_slices)
        corpus = corpus_of(folder / "raw-1", folder / "corpus-1", tokenizer)
        for number in numbers[1:]:
            corpus = appended(corpus, folder / f"raw-{number}", folder / f"corpus-{number}")
    return [Corpus.open(folder / f"corpus-{number}") for number in numbers]


def write_slices(source: RawFiles, folder: Path, num_slices: int) -> None:
    """Writes raw files of each slice: its queries, and the labels that they name."""

    def fail(bad: object) -> None:
        raise DataError(str(bad))

    labels = list(source.labels(fail))
    queries = {}
    # By split and row of the query, the labels that must not be answered.
    filters: dict[str, list[list[int]]] = {}
    for split in source.splits:
        queries[split] = list(source.queries(split, len(labels), fail))
        filters[split] = [[] for _ in queries[split]]
        for row, label in source.filters(split).tolist():
            filters[split][row].append(label)
    # The slice of a label is that of the first training query that names it.
    slice_of = np.full(len(labels), num_slices - 1)
    seen: set[int] = set()
    slices: dict[str, list[int]] = {"train": [], "test": []}
    for query, excluded in zip(queries["train"], filters["train"], strict=True):
        # A slice ends when a further share of all labels was named.
        number = min(num_slices - 1, num_slices * len(seen) // len(labels))
        slices["train"].append(number)
        for label in {*query.label_ids, *excluded} - seen:
            slice_of[label] = number
            seen.add(label)
    # A test query comes when all of its labels are there.
    for query, excluded in zip(queries["test"], filters["test"], strict=True):
        named = [*query.label_ids, *excluded]
        slices["test"].append(int(slice_of[named].max()) if named else 0)
    for number in range(num_slices):
        target = folder / f"raw-{number + 1}"
        target.mkdir(parents=True)
        write_slice(target, number, labels, queries, filters, slices, slice_of)


def write_slice(
    target: Path,
    number: int,
    labels: list[Row],
    queries: dict[str, list[Row]],
    filters: dict[str, list[list[int]]],
    slices: dict[str, list[int]],
    slice_of: np.ndarray[Any, Any],
) -> None:
    # The labels of the slice itself, and earlier ones that its queries name.
    named: set[int] = set(np.flatnonzero(slice_of == number).tolist())
    for split, rows in queries.items():
        for row, query in enumerate(rows):
            if slices[split][row] == number:
                named.update(query.label_ids, filters[split][row])
    ids = sorted(named)
    place = {label: position for position, label in enumerate(ids)}
    lines = []
    for label in ids:
        record = {"uid": labels[label].uid}
        if slice_of[label] == number:
            record["text"] = labels[label].text
        lines.append(json.dumps(record))
    (target / "labels.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    for split, rows in queries.items():
        lines = []
        pairs = []
        for row, query in enumerate(rows):
            if slices[split][row] != number:
                continue
            pairs += [f"{len(lines)} {place[label]}" for label in filters[split][row]]
            record = dataclasses.asdict(query)
            of_query = [place[label] for label in query.label_ids]
            lines.append(json.dumps({**record, "labels": of_query, "relevance": None}))
        if lines:
            (target / f"{split}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
            (target / f"filter_labels_{split}.txt").write_text("\n".join(pairs) + "\n", "utf-8")


if __name__ == "__main__":
    main()
