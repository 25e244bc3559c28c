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
    rows: list[list[object]] = []
    for share in (0.1, 0.2, 0.4, 0.8):
        verdicts = {}
        for loss in (0.0, 0.01):
            verdicts[loss] = [simulated_verdict(s, loss, share) for s in range(num_draws)]
        # A 95 % interval is 3.92 standard errors wide.
        error = np.mean([v.row.high - v.row.low for v in verdicts[0.0]]) / 3.92
        accepted = np.mean([v.accepted for v in verdicts[0.0]])
        refused = np.mean([not v.accepted for v in verdicts[0.01]])
        shares = [100 * float(value) for value in (share, error, refused, accepted)]
        rows.append([f"{shares[0]:.0f}", f"{shares[1]:.2f}", *shares[2:]])
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
    overrides = [*arguments.override, *ALONE]
    config = data_sets.preset(arguments.set, overrides, arguments.method)
    run, seconds = trained(corpora[0], runs / "1", config)
    rows: list[list[object]] = []
    notes: list[str] = []
    for number, corpus in enumerate(corpora[1:], start=2):
        overrides = [f"optim.epochs={arguments.epochs}", *arguments.later, *ALONE]
        values = configs.merge(settings_from(run, arguments.method, corpus), overrides)
        later = RunConfig.resolve(arguments.method, values)
        run, seconds = trained(corpus, runs / str(number), later, run)
    anew, all_seconds = trained(corpora[-1], runs / "anew", config)
    corpus = corpora[-1]
    results = []
    for finished, cpu_s in ((run, seconds), (anew, all_seconds)):
        evaluation = finish(finished, corpus)
        assert evaluation is not None, "the set has a test split"
        results.append(evaluation)
        what = "--from, slice by slice" if finished is run else "anew on everything"
        rows.append([what, *(100 * evaluation.metrics[m] for m in METRICS), cpu_s])
    share = seconds / all_seconds
    num_old = corpora[-2].card.num_labels
    old = [of_old_labels(r, corpus, num_old) for r in results]
    rows.append(["queries of old labels, --from", *(100 * v for v in old[0]), "-"])
    rows.append(["queries of old labels, anew", *(100 * v for v in old[1]), "-"])
    notes += [difference(row) for row in compare(*results) if row.metric in METRICS]
    notes.append(f"time of the last --from: {100 * share:.1f} % of that of training anew (CPU)")
    bundles = [measure_newest(str(r.path / "bundle"), corpus) for r in (anew, run)]
    notes.append(f"promote, last {LAST:,} test queries: {judge(*bundles, METRIC)}")
    notes.append(
        f"{arguments.method} on {arguments.set}: {corpus.card.num_labels:,} labels, {corpus.card.num_train:,} training"
        f" queries in {arguments.slices} slices; {config.optim.epochs} epochs for the first slice"
        f" and anew, then {arguments.epochs} each, with {arguments.later}"
    )
    header = ["training", *METRICS, "CPU seconds of training"]
    write_table(arguments.out, "A corpus that grows", header, rows, [*notes, load])


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


def of_old_labels(evaluation: Evaluation, corpus: Corpus, num_old: int) -> list[float]:
    """METRICS over the test queries all of whose labels are among the first `num_old`."""
    positives = corpus.split("test").positives(evaluation.query_ids)
    newest = np.zeros(len(positives), np.int64)
    np.maximum.at(newest, positives.row_ids, positives.values)
    is_old = newest < num_old
    gains = evaluation.per_query.gain_QM[is_old].sum(0)
    divisors = evaluation.per_query.divisor_QM[is_old].sum(0)
    return [float(gains[i] / divisors[i]) for i in map(MAIN_METRICS.index, METRICS)]


def grown(name: str, num_slices: int, folder: Path) -> list[Corpus]:
    """The corpora after each slice; made once."""
    last = folder / f"corpus-{num_slices}"
    if not (last / MANIFEST).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        raw = data_sets.DATA / name
        if name == "sample":
            raw = folder / "raw"
            write_sample(raw)
        source = detect(raw)
        tokenizer = vocabulary_of(source, PrepareConfig())
        write_slices(source, folder, num_slices)
        corpus = corpus_of(folder / "raw-1", folder / "corpus-1", tokenizer)
        for number in range(2, num_slices + 1):
            corpus = appended(corpus, folder / f"raw-{number}", folder / f"corpus-{number}")
    return [Corpus.open(folder / f"corpus-{number + 1}") for number in range(num_slices)]


def write_slices(source: RawFiles, folder: Path, num_slices: int) -> None:
    """Writes raw files of each slice: its queries, and the labels that they name."""

    def fail(bad: object) -> None:
        raise DataError(str(bad))

    labels = list(source.labels(fail))
    queries = {split: list(source.queries(split, len(labels), fail)) for split in source.splits}
    filters: dict[str, list[list[int]]] = {}
    for split, rows in queries.items():
        filters[split] = [[] for _ in rows]
        for row, label in source.filters(split).tolist():
            filters[split][row].append(label)
    # The slice of a label is that of the first training query that names it.
    slice_of = np.full(len(labels), num_slices - 1)
    seen: set[int] = set()
    slices: dict[str, list[int]] = {"train": [], "test": []}
    for query, excluded in zip(queries["train"], filters["train"], strict=True):
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
