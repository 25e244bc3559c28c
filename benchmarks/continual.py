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
from dataclasses import dataclass, field
from pathlib import Path

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
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig
from xmcray.training.start import settings_from

METRICS = ("P@1", "P@5", "PSP@5")
HEADER = ["training", *METRICS, "CPU seconds of training"]
PROMOTION_HEADER = [
    "queries that are answered anew, %",
    "standard error, points",
    "refused, 1 point worse, %",
    "accepted, equal, %",
]
ALONE = ["cluster.workers=0", "cluster.threads_per_process=1"]


@dataclass
class SlicedQuery:
    """A query of the whole data set.

    Attributes:
        row: as the raw files have it.
        filtered: labels that must not be answered.
        slice_number: of the slice in which it comes.
    """

    row: Row
    filtered: list[int] = field(default_factory=list)
    slice_number: int = 0

    @property
    def named(self) -> set[int]:
        """Positives and filtered labels."""
        return {*self.row.label_ids, *self.filtered}


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
    rows = []
    for share in (0.1, 0.2, 0.4, 0.8):
        widths = []
        num_accepted = 0
        num_refused = 0
        for seed in range(num_draws):
            equal = simulated_verdict(seed, 0.0, share)
            worse = simulated_verdict(seed, 0.01, share)
            widths.append(equal.row.high - equal.row.low)
            num_accepted += equal.accepted
            num_refused += not worse.accepted
        # A 95 % interval is 3.92 standard errors wide.
        standard_error = np.mean(widths) / 3.92
        refused_percent = 100 * num_refused / num_draws
        accepted_percent = 100 * num_accepted / num_draws
        shares = [f"{100 * share:.0f}", f"{100 * standard_error:.2f}"]
        rows.append([*shares, refused_percent, accepted_percent])
    about = (
        f"{num_draws} draws each: {LAST:,} queries with five answers, {METRIC}, margin 0.9 points"
    )
    write_table("promotion.md", "How often promote is right", PROMOTION_HEADER, rows, [about, load])


def measure(arguments: argparse.Namespace, load: str) -> None:
    """Trains slice by slice and anew, and writes the table."""
    folder = data_sets.CACHE / "continual" / f"{arguments.set}-{arguments.slices}"
    corpora = grown(arguments.set, arguments.slices, folder)
    last_corpus = corpora[-1]
    runs = folder / ("quick" if arguments.quick else "runs") / arguments.method
    first_overrides = [*arguments.override, *ALONE]
    config = data_sets.preset(arguments.set, first_overrides, arguments.method)
    continued, continued_s = trained(corpora[0], runs / "1", config)
    later_overrides = [f"optim.epochs={arguments.epochs}", *arguments.later, *ALONE]
    for number, corpus in enumerate(corpora[1:], start=2):
        settings = settings_from(continued, arguments.method, corpus)
        values = configs.merge(settings, later_overrides)
        later = RunConfig.resolve(arguments.method, values)
        continued, continued_s = trained(corpus, runs / str(number), later, continued)
    retrained, retrained_s = trained(last_corpus, runs / "anew", config)

    by_slice = evaluated(continued, last_corpus)
    anew = evaluated(retrained, last_corpus)
    num_old = corpora[-2].card.num_labels
    by_slice_old = of_old_labels(by_slice, last_corpus, num_old)
    anew_old = of_old_labels(anew, last_corpus, num_old)
    rows: list[list[object]] = [
        ["--from, slice by slice", *in_percent(by_slice.metrics), continued_s],
        ["anew on everything", *in_percent(anew.metrics), retrained_s],
        ["queries of old labels, --from", *in_percent(by_slice_old), "-"],
        ["queries of old labels, anew", *in_percent(anew_old), "-"],
    ]
    notes = [difference(row) for row in compare(by_slice, anew) if row.metric in METRICS]
    share = continued_s / retrained_s
    notes.append(f"time of the last --from: {100 * share:.1f} % of that of training anew (CPU)")
    served_newest = measure_newest(str(retrained.path / "bundle"), last_corpus)
    candidate_newest = measure_newest(str(continued.path / "bundle"), last_corpus)
    verdict = judge(served_newest, candidate_newest, METRIC)
    notes.append(f"promote, last {LAST:,} test queries: {verdict}")
    card = last_corpus.card
    notes.append(
        f"{arguments.method} on {arguments.set}: {card.num_labels:,} labels, {card.num_train:,} training"
        f" queries in {arguments.slices} slices; {config.optim.epochs} epochs for the first slice"
        f" and anew, then {arguments.epochs} each, with {arguments.later}"
    )
    write_table(arguments.out, "A corpus that grows", HEADER, rows, [*notes, load])


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
    # An interrupted call has left its seconds.
    before_s = json.loads(clock.read_text()) if clock.is_file() else 0.0
    is_finished = (out / "result.json").is_file()
    started = time.process_time()
    try:
        run = train(corpus.path, out, config, source=source, watch=watch_training)
    finally:
        if not is_finished:
            clock.parent.mkdir(parents=True, exist_ok=True)
            clock.write_text(json.dumps(before_s + time.process_time() - started))
    return run, json.loads(clock.read_text())


def of_old_labels(evaluation: Evaluation, corpus: Corpus, num_old: int) -> dict[str, float]:
    """METRICS over the test queries all of whose labels are among the first `num_old`."""
    positives = corpus.split("test").positives(evaluation.query_ids)
    # Later labels have larger ids, so the largest id of a query says whether all of them are old.
    newest_label_Q = np.zeros(len(positives), np.int64)
    np.maximum.at(newest_label_Q, positives.row_ids, positives.values)
    is_old_Q = newest_label_Q < num_old
    gain_M = evaluation.per_query.gain_QM[is_old_Q].sum(0)
    divisor_M = evaluation.per_query.divisor_QM[is_old_Q].sum(0)
    value_M = gain_M / divisor_M
    values = dict(zip(MAIN_METRICS, value_M.tolist(), strict=True))
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
    queries: dict[str, list[SlicedQuery]] = {}
    for split in source.splits:
        rows = source.queries(split, len(labels), fail)
        queries[split] = [SlicedQuery(row) for row in rows]
        for row_number, label in source.filters(split).tolist():
            queries[split][row_number].filtered.append(label)
    # The slice of a label is that of the first training query that names it.
    slice_of_label = np.full(len(labels), num_slices - 1)
    seen: set[int] = set()
    for query in queries["train"]:
        # A slice ends when a further share of all labels was named.
        query.slice_number = min(num_slices - 1, num_slices * len(seen) // len(labels))
        new_labels = query.named - seen
        slice_of_label[list(new_labels)] = query.slice_number
        seen |= new_labels
    # A test query comes when all of its labels are there.
    for query in queries["test"]:
        slices_of_named = [int(slice_of_label[label]) for label in query.named]
        query.slice_number = max(slices_of_named, default=0)
    for number in range(num_slices):
        target = folder / f"raw-{number + 1}"
        target.mkdir(parents=True)
        of_slice = {}
        for split, all_queries in queries.items():
            of_slice[split] = [query for query in all_queries if query.slice_number == number]
        new_ids = set(np.flatnonzero(slice_of_label == number).tolist())
        write_slice(target, labels, new_ids, of_slice)


def write_slice(
    target: Path, labels: list[Row], new_ids: set[int], queries: dict[str, list[SlicedQuery]]
) -> None:
    """Writes the raw files of one slice.

    Args:
        target: an empty folder.
        labels: all labels.
        new_ids: the labels of the slice; they are written with their texts.
        queries: those of the slice, by split.
    """
    # Earlier labels that the queries name are written without their texts.
    named = set(new_ids)
    for of_split in queries.values():
        for query in of_split:
            named |= query.named
    ids = sorted(named)
    # The raw files name a label by its line.
    line_of_label = {label: line for line, label in enumerate(ids)}
    lines = []
    for label in ids:
        record = {"uid": labels[label].uid}
        if label in new_ids:
            record["text"] = labels[label].text
        lines.append(json.dumps(record))
    write_lines(target / "labels.jsonl", lines)
    for split, of_split in queries.items():
        lines = []
        pairs = []
        for row_number, query in enumerate(of_split):
            pairs += [f"{row_number} {line_of_label[label]}" for label in query.filtered]
            fields = dataclasses.asdict(query.row)
            fields["labels"] = [line_of_label[label] for label in query.row.label_ids]
            fields["relevance"] = None
            lines.append(json.dumps(fields))
        if lines:
            write_lines(target / f"{split}.jsonl", lines)
            write_lines(target / f"filter_labels_{split}.txt", pairs)


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
