"""Does leaving out probable right answers among the hard negatives help where the data lacks positives?

    python benchmarks/false_negatives.py                                # prints what is to be done, then trains
    python benchmarks/false_negatives.py --presets prime/sample --seeds 3           # a part
    python benchmarks/false_negatives.py --presets astra/sample --seeds 1 --epochs 4 --out /dev/null
    python benchmarks/false_negatives.py --where --seeds 1        # more hidden, fewer negatives

5 % of the positives of training queries are hidden, at random; a query keeps at least one. The test split is whole. All
variants of a preset differ in `negatives.max_relative_score` alone; with a teacher, the scores are those of a run with
another seed that leaves nothing out.

`--where` hides larger shares too, has few and many hard negatives, and counts how many of them are hidden positives.

Results are kept in results/false_negatives.json, so the command can be stopped at any time and started again.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import data_sets
import numpy as np
import torch
from ablation import (
    METRICS,
    NONE,
    differences_to_none,
    known_or_measured,
    spread,
    table_row,
)
from common import new_parser, refuse_if_busy, write_table
from store import Result, Store

from xmcray.data.corpus import Corpus, Split
from xmcray.retrieval.retriever import Retriever
from xmcray.training.export import export_run
from xmcray.training.launch import train
from xmcray.training.run_config import RunConfig
from xmcray.types import Int64Array, Ragged

# The loss over hard and uniform labels, a triplet loss over the hardest ones, and ANCE.
PRESETS = ("astra/sample", "prime/sample", "dexml/ance-sample")
HIDDEN = 0.05
TEACHER_SEED = 100
TEACHER = "teacher, 0.9"
VARIANTS = {NONE: 0.0, "0.95": 0.95, "0.9": 0.9, "0.8": 0.8, TEACHER: 0.9}
# Of --where: ANCE draws some of a query's hard negatives in each step, and its loss compares them with one positive.
WHERE_PRESET = "dexml/ance-sample"
WHERE_HIDDEN = (0.05, 0.2, 0.4)
WHERE_HARD = (5, 20)
WHERE_METRICS = ("P@1", "PSP@5")
WHERE_VARIANTS = (NONE, "0.9")
DRAWN = "drawn"  # share of the hard negatives that are hidden positives
MET = "met"  # share of the hidden positives that are hard negatives
KEY_STRIDE = 1 << 32  # above every label id


def main() -> None:
    arguments = parse_arguments()
    load = refuse_if_busy(arguments.anyway)
    torch.set_num_threads(arguments.threads)
    deadline = time.monotonic() + 60 * arguments.minutes
    if arguments.where:
        write_where(arguments, deadline, load)
        return
    rows: list[list[object]] = []
    notes = []
    for preset in arguments.presets:
        # "ance-sample" is a preset for "sample".
        corpus = hidden_corpus(preset.rpartition("/")[2].removeprefix("ance-"), HIDDEN)
        if corpus is None:
            continue
        settings = Settings(corpus, preset, arguments, deadline)
        results = results_of(settings, arguments.only)
        rows += [table_row(preset, variant, by_seed) for variant, by_seed in results.items()]
        notes += differences_to_none(preset, results)
    notes += [
        "committed presets; percent on the whole test split, exact search; mean over"
        " seeds with its 95 % interval (Student's t); differences are paired by seed",
        load,
    ]
    header = ["preset", "negatives.max_relative_score", "seeds", *METRICS, "CPU minutes"]
    out = arguments.out or "false_negatives.md"
    title = f"{100 * HIDDEN:g} % of the positives hidden: false negatives left out or not"
    write_table(out, title, header, rows, notes)


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(__doc__, threads=os.cpu_count() or 1, minutes=True, anyway=True)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), metavar="METHOD/PRESET")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="instead of the preset's")
    parser.add_argument("--where", action="store_true", help="where the filter wins")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--out", type=Path, help="instead of the page in results")
    return parser.parse_args()


# --- data


def hidden_corpus(name: str, share: float) -> Corpus | None:
    """A corpus without a share of the positives of its training queries."""
    corpus = data_sets.corpus(name)
    if corpus is None:
        return None
    settings = {
        "max_len": corpus.card.max_len,
        "label_max_len": corpus.card.label_max_len,
        "stall_s": 900.0,  # processes of Ray start slowly on a busy machine
    }
    write = functools.partial(write_hidden, corpus, share)
    suffix = "" if share == HIDDEN else f"-{100 * share:g}"
    return data_sets.prepared(f"{name}-hidden{suffix}", write, **settings)


def write_hidden(corpus: Corpus, share: float, folder: Path) -> None:
    """Writes the raw files of a corpus with a share of its training positives hidden."""
    folder.mkdir(parents=True, exist_ok=True)
    label_ids = np.arange(corpus.card.num_labels)
    uids = corpus.label_uids(label_ids)
    labels = zip(uids, corpus.label_texts(label_ids), strict=True)
    write_lines(folder / "labels.jsonl", [{"uid": uid, "text": text} for uid, text in labels])
    for split in ("train", "test"):
        queries = corpus.split(split)
        write_queries(queries, uids, share if split == "train" else 0.0, folder)


def write_queries(queries: Split, label_uids: Sequence[str], hidden: float, folder: Path) -> None:
    """Writes the queries of a split and its filter pairs."""
    rows = np.arange(len(queries))
    positives = queries.positives(rows)
    is_hidden = np.random.default_rng(0).random(len(positives.values)) < hidden
    # A query keeps its first positive.
    is_hidden[positives.offsets[:-1][positives.lengths > 0]] = False
    filters = queries.filters(rows)
    lines = []
    pairs = []
    for row, (uid, text) in enumerate(zip(queries.uids(rows), queries.texts(rows), strict=True)):
        kept = positives[row][~is_hidden[positives.offsets[row] : positives.offsets[row + 1]]]
        lines.append({"uid": uid, "text": text, "labels": [label_uids[label] for label in kept]})
        pairs += [f"{row} {label}\n" for label in filters[row]]
    write_lines(folder / f"{queries.name}.jsonl", lines)
    (folder / f"filter_labels_{queries.name}.txt").write_text("".join(pairs), encoding="utf-8")


def write_lines(path: Path, rows: Sequence[object]) -> None:
    """Writes each row as JSON, a line each."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


# --- trainings


@dataclass(frozen=True, slots=True)
class Settings:
    """What the trainings of a table's part have in common.

    Attributes:
        corpus: with hidden positives.
        preset: METHOD/NAME.
        arguments: of the command.
        deadline: on the clock `time.monotonic`, after which no training is started.
        hard: hard negatives of a query; 0 for the preset's.
        whole: the corpus with all its positives, to count hidden ones; not if None.
    """

    corpus: Corpus
    preset: str
    arguments: argparse.Namespace
    deadline: float
    hard: int = 0
    whole: Corpus | None = None


def config_of(settings: Settings, variant: str, seed: int, teacher: Path | None) -> RunConfig:
    """A preset under the settings of a variant."""
    arguments = settings.arguments
    overrides = [
        f"optim.seed={seed}",
        *data_sets.measured_settings(arguments.threads),
        f"negatives.max_relative_score={VARIANTS[variant]}",
    ]
    if arguments.epochs:
        overrides += [f"optim.epochs={arguments.epochs}", "negatives.start_epoch=2"]
    if settings.hard:
        overrides.append(f"negatives.hard={settings.hard}")
    if teacher is not None:
        overrides.append(f"negatives.teacher={teacher}")
    method, _, name = settings.preset.partition("/")
    return data_sets.preset(name, overrides, method)


def results_of(settings: Settings, variants: Sequence[str]) -> dict[str, dict[int, Result]]:
    """Results by variant and seed."""
    results: dict[str, dict[int, Result]] = {variant: {} for variant in variants}
    # One seed of everything before the next.
    for seed in range(settings.arguments.seeds):
        for variant in variants:
            result = result_of(settings, variant, seed)
            if result is not None:
                results[variant][seed] = result
    return results


def result_of(settings: Settings, variant: str, seed: int) -> Result | None:
    """The result of a training, from the cache or measured now; None if there is no time."""
    corpus = settings.corpus
    teacher = None
    if variant == TEACHER:
        teacher = teacher_of(settings)
        if teacher is None:
            return None
    config = config_of(settings, variant, seed, teacher)
    kind = "false_negatives"
    further = None
    if settings.whole is not None:
        kind = "false_negatives_where"
        hard = config.negatives.hard
        further = functools.partial(hidden_among_hard, corpus, settings.whole, hard)
    result = known_or_measured(Store(kind), corpus, config, settings.deadline, further)
    if result is not None:
        shown = ", ".join(f"{metric} {100 * result[metric]:.1f}" for metric in METRICS)
        print(f"{corpus.card.name}, {settings.preset}, {variant}, seed {seed}: {shown}", flush=True)
    return result


def teacher_of(settings: Settings) -> Path | None:
    """The bundle of a run that leaves nothing out; None if there is no time to train it."""
    corpus = settings.corpus
    config = config_of(settings, NONE, TEACHER_SEED, None)
    key = data_sets.fingerprint(config, corpus)
    bundle = data_sets.CACHE / "false_negatives" / corpus.card.name / f"teacher-{key}"
    if bundle.is_dir():
        return bundle
    if time.monotonic() > settings.deadline:
        return None
    bundle.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=bundle.parent))
    try:
        export_run(train(corpus.path, folder / "run", config), bundle, corpus)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return bundle


def hidden_among_hard(
    corpus: Corpus, whole: Corpus, hard: int, retriever: Retriever
) -> dict[str, float]:
    """How many hard negatives of the finished training are hidden positives.

    Args:
        corpus: with hidden positives.
        whole: with all of them.
        hard: hard negatives of a query.
        retriever: the bundle of the training; its answers are the hard negatives of a next version.
    """
    split = corpus.split("train")
    rows = np.arange(len(split))
    listed = split.positives(rows)
    hidden_keys = np.setdiff1d(pair_keys(whole.split("train").positives(rows)), pair_keys(listed))
    num_answers = hard + int(listed.lengths.max())
    answer_BC = retriever.top_labels(
        split.tokens(rows), num_answers, exclude=split.filters(rows)
    ).ids
    answer_keys = rows[:, None] * KEY_STRIDE + answer_BC
    is_negative = (answer_BC >= 0) & ~np.isin(answer_keys, pair_keys(listed))
    # The first ones, as many as a query has hard negatives.
    is_hard = is_negative & (np.cumsum(is_negative, axis=1) <= hard)
    num_met = int(np.isin(answer_keys[is_hard], hidden_keys).sum())
    return {DRAWN: num_met / int(is_hard.sum()), MET: num_met / len(hidden_keys)}


def pair_keys(positives: Ragged) -> Int64Array:
    """One number for each (query, label)."""
    keys: Int64Array = positives.row_ids * KEY_STRIDE + positives.values
    return keys


# --- table


def write_where(arguments: argparse.Namespace, deadline: float, load: str) -> None:
    """Writes the table of shares and numbers of hard negatives."""
    name = WHERE_PRESET.rpartition("/")[2].removeprefix("ance-")
    whole = data_sets.corpus(name)
    assert whole is not None, "the sample is in the package"
    rows: list[list[object]] = []
    for share in WHERE_HIDDEN:
        corpus = hidden_corpus(name, share)
        assert corpus is not None
        for hard in WHERE_HARD:
            settings = Settings(corpus, WHERE_PRESET, arguments, deadline, hard, whole)
            results = results_of(settings, WHERE_VARIANTS)
            rows += where_rows(share, hard, results)
    notes = [
        f"{WHERE_PRESET}; percent; hidden positives are counted among the hard negatives of the"
        " trained bundle; mean over seeds with its 95 % interval (Student's t); gains over none"
        " are paired by seed, in points",
        load,
    ]
    header = ["hidden", "hard", "filter", "seeds", "hard negatives that are hidden positives"]
    header += ["hidden positives among hard negatives", "P@1", "PSP@5", "gain in PSP@5"]
    out = arguments.out or "false_negatives_where.md"
    title = "Where leaving out false negatives wins"
    write_table(out, title, header, rows, notes)


def where_rows(
    share: float, hard: int, results: dict[str, dict[int, Result]]
) -> list[list[object]]:
    """The rows of one share and number of hard negatives."""
    rows: list[list[object]] = []
    reference = results[NONE]
    for variant, by_seed in results.items():
        seeds = sorted(reference.keys() & by_seed.keys())
        if not seeds:
            continue
        columns = [
            [by_seed[seed][field] for seed in seeds] for field in (DRAWN, MET, *WHERE_METRICS)
        ]
        cells = [spread(column) for column in columns]
        gains = [by_seed[seed]["PSP@5"] - reference[seed]["PSP@5"] for seed in seeds]
        cells.append("-" if variant == NONE else spread(gains))
        rows.append([f"{100 * share:g} %", hard, variant, len(seeds), *cells])
    return rows


if __name__ == "__main__":
    main()
