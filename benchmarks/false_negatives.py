"""Does leaving out probable right answers among the hard negatives help where the data lacks positives?

    python benchmarks/false_negatives.py                                # prints what is to be done, then trains
    python benchmarks/false_negatives.py --presets prime/sample --seeds 3           # a part
    python benchmarks/false_negatives.py --presets astra/sample --seeds 1 --epochs 4 --out /dev/null

5 % of the positives of training queries are hidden, at random; a query keeps at least one. The test split is whole. All
variants of a preset differ in `negatives.max_relative_score` alone; with a teacher, the scores are those of a run with
another seed that leaves nothing out.

A result is one JSON file in the cache, so the command can be stopped at any time and started again.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import data_sets
import numpy as np
import torch
from ablation import METRICS, Result, measured, spread, table_row
from common import refuse_if_busy, write_table

from xmcray.data.corpus import Corpus, Split
from xmcray.training.export import export_run
from xmcray.training.launch import train
from xmcray.training.run import RunConfig

# The loss over hard and uniform labels, a triplet loss over the hardest ones, and ANCE.
PRESETS = ("astra/sample", "prime/sample", "dexml/ance-sample")
HIDDEN = 0.05
TEACHER_SEED = 100
NONE = "none"
TEACHER = "teacher, 0.9"
VARIANTS = {NONE: 0.0, "0.95": 0.95, "0.9": 0.9, "0.8": 0.8, TEACHER: 0.9}


def main() -> None:
    arguments = parse_arguments()
    load = refuse_if_busy(arguments.anyway)
    torch.set_num_threads(arguments.threads)
    deadline = time.monotonic() + 60 * arguments.minutes
    rows: list[list[object]] = []
    notes = []
    for preset in arguments.presets:
        # "ance-sample" is a preset for "sample".
        corpus = hidden_corpus(preset.rpartition("/")[2].removeprefix("ance-"))
        if corpus is None:
            continue
        results: dict[str, dict[int, Result]] = {variant: {} for variant in arguments.only}
        # One seed of everything before the next.
        for seed in range(arguments.seeds):
            for variant in arguments.only:
                result = result_of(corpus, preset, variant, seed, arguments, deadline)
                if result is not None:
                    results[variant][seed] = result
        rows += [table_row(preset, variant, by_seed) for variant, by_seed in results.items()]
        notes += differences(preset, results)
    notes += [
        "committed presets; percent on the whole test split, exact search; mean over"
        " seeds with its 95 % interval (Student's t); differences are paired by seed",
        load,
    ]
    header = ["preset", "negatives.max_relative_score", "seeds", *METRICS, "CPU minutes"]
    title = f"{100 * HIDDEN:g} % of the positives hidden: false negatives left out or not"
    write_table(arguments.out, title, header, rows, notes)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), metavar="METHOD/PRESET")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="instead of the preset's")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no training after so many"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("false_negatives.md"))
    parser.add_argument("--anyway", action="store_true", help="train on a busy machine")
    return parser.parse_args()


# --- data


def hidden_corpus(name: str) -> Corpus | None:
    """A corpus without some positives of its training queries."""
    corpus = data_sets.corpus(name)
    if corpus is None:
        return None
    settings = {
        "max_len": corpus.card.max_len,
        "label_max_len": corpus.card.label_max_len,
        "stall_s": 900.0,  # processes of Ray start slowly on a busy machine
    }
    write = functools.partial(write_hidden, corpus)
    return data_sets.prepared(f"{name}-hidden", write, **settings)


def write_hidden(corpus: Corpus, folder: Path) -> None:
    """Writes the raw files of a corpus with 5 % of its training positives hidden."""
    folder.mkdir(parents=True, exist_ok=True)
    label_ids = np.arange(corpus.card.num_labels)
    uids = corpus.label_uids(label_ids)
    labels = zip(uids, corpus.label_texts(label_ids), strict=True)
    write_lines(folder / "labels.jsonl", [{"uid": uid, "text": text} for uid, text in labels])
    for split in ("train", "test"):
        queries = corpus.split(split)
        write_queries(queries, uids, HIDDEN if split == "train" else 0.0, folder)


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


def config_of(
    preset: str, variant: str, seed: int, arguments: argparse.Namespace, teacher: Path | None
) -> RunConfig:
    """A preset under the settings of a variant."""
    overrides = [
        f"optim.seed={seed}",
        *data_sets.measured_settings(arguments.threads),
        f"negatives.max_relative_score={VARIANTS[variant]}",
    ]
    if arguments.epochs:
        overrides += [f"optim.epochs={arguments.epochs}", "negatives.start_epoch=2"]
    if teacher is not None:
        overrides.append(f"negatives.teacher={teacher}")
    method, _, name = preset.partition("/")
    return data_sets.preset(name, overrides, method)


def result_of(
    corpus: Corpus,
    preset: str,
    variant: str,
    seed: int,
    arguments: argparse.Namespace,
    deadline: float,
) -> Result | None:
    """The result of a training, from the cache or measured now; None if there is no time."""
    teacher = None
    if variant == TEACHER:
        teacher = teacher_of(corpus, preset, arguments, deadline)
        if teacher is None:
            return None
    config = config_of(preset, variant, seed, arguments, teacher)
    key = data_sets.fingerprint(config, corpus)
    path = data_sets.CACHE / "false_negatives" / corpus.card.name / f"{key}.json"
    if path.is_file():
        stored: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        return stored
    if time.monotonic() > deadline:
        return None
    result = measured(corpus, config, path)
    shown = ", ".join(f"{metric} {100 * result[metric]:.1f}" for metric in METRICS)
    print(f"{preset}, {variant}, seed {seed}: {shown}", flush=True)
    return result


def teacher_of(
    corpus: Corpus, preset: str, arguments: argparse.Namespace, deadline: float
) -> Path | None:
    """The bundle of a run that leaves nothing out; None if there is no time to train it."""
    config = config_of(preset, NONE, TEACHER_SEED, arguments, None)
    key = data_sets.fingerprint(config, corpus)
    bundle = data_sets.CACHE / "false_negatives" / corpus.card.name / f"teacher-{key}"
    if bundle.is_dir():
        return bundle
    if time.monotonic() > deadline:
        return None
    bundle.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=bundle.parent))
    try:
        export_run(train(corpus.path, folder / "run", config), bundle, corpus)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return bundle


# --- table


def differences(preset: str, results: dict[str, dict[int, Result]]) -> list[str]:
    """Each variant against none, paired by seed."""
    lines = []
    reference = results.get(NONE, {})
    for variant, by_seed in results.items():
        seeds = sorted(reference.keys() & by_seed.keys())
        if variant == NONE or not seeds:
            continue
        parts = []
        for metric in METRICS:
            gains = [by_seed[seed][metric] - reference[seed][metric] for seed in seeds]
            parts.append(f"{metric} {spread(gains)}")
        lines.append(f"{preset}, {variant} less none, in points: {', '.join(parts)}")
    return lines


if __name__ == "__main__":
    main()
