"""Which negatives matter: random only, hard only, mixture, curriculum and the exact loss, side by side over seeds.

    python benchmarks/ablation.py                                   # prints how long it will take, then trains
    python benchmarks/ablation.py --only mixture exact --seeds 3    # a part; finished trainings are kept
    python benchmarks/ablation.py --minutes 50                      # stops starting trainings after 50 minutes
    python benchmarks/ablation.py --data sample --seeds 2 --quick   # does it work?

Each training uses all training queries, for a fixed number of epochs, in this process (the results do not depend on
the number of workers), and is measured with exact search on the test split. A result is one JSON file in the cache, so
the command can be stopped at any time and started again. `--grid` adds the weight of uniform negatives (1 in place of
labels / sample) and an index over label texts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import data_sets
import numpy as np
import torch
from common import mean_and_half_width, refuse_if_busy, write_table

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.retrieval.retriever import Retriever
from xmcray.training.export import export_run
from xmcray.training.launch import train
from xmcray.training.loop import build
from xmcray.training.outcome import measure_bundle
from xmcray.training.run import RunConfig
from xmcray.types import Shortlist

METRICS = ("P@1", "P@5", "PSP@5")
# Chosen on validation queries: 2,000 uniform negatives 56.9 P@1, 8,000 61.1, 16,000 61.6, by
# `xmcray train astra --data CORPUS --out RUN --config preset:astra/msdocs-links --workers 0 --no-evaluate` with
# --set encoder.dim=128 optim.epochs=6 negatives.hard=50 .start_epoch=2 .refresh_every=2 .uniform=N data.validation=0.05
UNIFORM = {"msdocs-links": 16_000}
VARIANTS: dict[str, list[str]] = {
    "random": ["negatives.hard=0"],
    # Hard negatives need an index, and the earliest one is used from epoch 2: uniform labels until then, none after.
    "hard-only": ["negatives.start_epoch=2", "negatives.uniform_epochs=2"],
    "mixture": [],
    "curriculum": ["negatives.curriculum={half}"],
    "exact": ["negatives.hard=0", "method.exact=true"],
}
GRID: dict[str, list[str]] = {
    "random, weight 1": [*VARIANTS["random"], "method.importance_weight=none"],
    "random, weight L/c": [*VARIANTS["random"], "method.importance_weight=unbiased"],
    "mixture, weight 1": ["method.importance_weight=none"],
    "mixture, weight L/c": ["method.importance_weight=unbiased"],
    "mixture, index on labels": ["method.index_on=labels"],
    "mixture, 2,000 uniform": ["negatives.uniform=2000"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", nargs="+", default=["msdocs-seealso", "msdocs-links"], metavar="CORPUS"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="instead of the preset's")
    parser.add_argument(
        "--only", nargs="+", choices=[*VARIANTS, *GRID], help="variants to train; all are printed"
    )
    parser.add_argument(
        "--grid", action="store_true", help="importance weights and the index on label texts too"
    )
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings laid over the preset"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no training after so many"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="tiny epochs, printed only")
    parser.add_argument("--out", type=Path, default=Path("ablation.md"))
    parser.add_argument(
        "--anyway", action="store_true", help="train on a busy machine: only the minutes suffer"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.out = Path(os.devnull)
        arguments.epochs = arguments.epochs or 4
        arguments.override += ["encoder.dim=32", "negatives.uniform=200", "negatives.hard=10"]
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    torch.set_num_threads(arguments.threads)
    corpora = [corpus for name in arguments.data if (corpus := data_sets.corpus(name)) is not None]
    variants = {
        **VARIANTS,
        **(GRID if arguments.grid or set(arguments.only or ()) & set(GRID) else {}),
    }
    plan = [
        (corpus, variant, seed, settings(corpus, variants[variant], seed, arguments))
        for seed in range(arguments.seeds)
        for corpus in corpora
        for variant in variants
    ]
    due = [
        job
        for job in plan
        if (not arguments.only or job[1] in arguments.only)
        and not result_file(job[3], job[0]).exists()
    ]
    estimate(due)
    deadline = time.monotonic() + 60 * arguments.minutes
    for number, (corpus, variant, seed, config) in enumerate(due, 1):
        if time.monotonic() > deadline:
            print(f"stopped after {arguments.minutes:g} minutes; the same command goes on")
            break
        result = run_one(corpus, config)
        found = ", ".join(f"{m} {100 * result[m]:.1f}" for m in METRICS)
        minutes = result["seconds"] / 60
        print(
            f"{number}/{len(due)} {corpus.card.name}, {variant}, seed {seed}: {found}, {minutes:.1f} min",
            flush=True,
        )
    write(plan, arguments, load)


def settings(
    corpus: Corpus, overrides: Sequence[str], seed: int, arguments: argparse.Namespace
) -> RunConfig:
    """The preset of a set with one variant's settings laid over it."""
    base = data_sets.preset(corpus.card.name, arguments.override)
    epochs = arguments.epochs or base.optim.epochs
    start = min(base.negatives.start_epoch, max(2, epochs // 3))
    common = [
        f"optim.epochs={epochs}",
        f"optim.seed={seed}",
        f"negatives.start_epoch={start}",
        f"negatives.hard={base.negatives.hard or 50}",
        "data.validation=0",
        "cluster.workers=0",
        "cluster.device=cpu",
        f"cluster.threads_per_process={arguments.threads}",
        "log.validate_every=0",
        "log.keep=1",
        f"log.checkpoint_every={10**9}",
        *arguments.override,
    ]
    sampled = not any("exact=true" in line for line in overrides)
    if sampled and corpus.card.name in UNIFORM:
        common.append(f"negatives.uniform={UNIFORM[corpus.card.name]}")
    half = max(2, (epochs - start) // 2)
    return data_sets.preset(
        corpus.card.name, [*common, *(line.format(half=half) for line in overrides)]
    )


def result_file(config: RunConfig, corpus: Corpus) -> Path:
    return (
        data_sets.CACHE
        / "ablation"
        / corpus.card.name
        / f"{data_sets.fingerprint(config, corpus)}.json"
    )


def run_one(corpus: Corpus, config: RunConfig) -> dict[str, float]:
    """Trains, measures, keeps the measures and forgets the run."""
    target = result_file(config, corpus)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        started = time.perf_counter()
        run = train(corpus.path, folder / "run", config)
        seconds = time.perf_counter() - started
        export_run(run, folder / "bundle", corpus)
        found = measure_bundle(Retriever.load(folder / "bundle"), corpus, "test", exact=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {**{metric: found.metrics[metric] for metric in METRICS}, "seconds": seconds}
    target.write_text(json.dumps(result))
    return result


def estimate(due: Sequence[tuple[Corpus, str, int, RunConfig]]) -> None:
    """Prints how long the trainings will take, from three steps of each kind."""
    if not due:
        return
    seconds: dict[tuple[str, str], float] = {}
    for corpus, variant, _, config in due:
        key = corpus.card.name, variant
        if key not in seconds:
            seconds[key] = training_seconds(corpus, config)
    total = sum(seconds[corpus.card.name, variant] for corpus, variant, *_ in due)
    for (name, variant), value in seconds.items():
        print(f"estimate: {name}, {variant}: {value / 60:.1f} minutes a training")
    print(
        f"estimate: {len(due)} trainings, {total / 60:.0f} minutes besides the refreshes of the index",
        flush=True,
    )


def training_seconds(corpus: Corpus, config: RunConfig) -> float:
    setup = build(config, TrainingData(corpus, config.data), torch.device("cpu"))
    generator = np.random.default_rng(0)
    shape = setup.data.num_query_ids, max(config.negatives.hard, 1)
    shortlist = Shortlist(
        0, 0, generator.integers(setup.data.num_labels, size=shape, dtype=np.int32)
    )
    last_epoch = (config.optim.epochs - 1) * setup.sampler.steps_per_epoch
    times = []
    for step in range(last_epoch, last_epoch + min(4, setup.sampler.steps_per_epoch)):
        started = time.perf_counter()
        batch = setup.sampler.batch(step, 0, 1)
        setup.stepper.step(batch, shortlist if config.negatives.hard else None)
        times.append(time.perf_counter() - started)
    return float(np.median(times)) * config.optim.epochs * setup.sampler.steps_per_epoch


def write(
    plan: Sequence[tuple[Corpus, str, int, RunConfig]], arguments: argparse.Namespace, load: str
) -> None:
    results: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for corpus, variant, _, config in plan:
        if (path := result_file(config, corpus)).exists():
            results.setdefault((corpus.card.name, variant), []).append(json.loads(path.read_text()))
    rows = [
        [
            name,
            variant,
            len(found),
            *(spread([r[m] for r in found]) for m in METRICS),
            median_minutes(found),
        ]
        for (name, variant), found in sorted(results.items(), key=lambda item: item[0][0])
    ]
    notes = [
        f"{len(plan) - sum(map(len, results.values()))} of {len(plan)} trainings are still to be done"
    ]
    for name in dict.fromkeys(name for name, _ in results):
        notes += comparisons(name, results)
    notes += [
        "percent on the test split, exact search; mean over seeds with its 95 % interval (Student's t);"
        " differences are paired by seed",
        *(
            f"{name}: {count:,} uniform negatives, chosen on validation queries"
            for name, count in UNIFORM.items()
        ),
        "hard-only has uniform negatives in epochs 0 and 1, which the earliest index needs, and hard ones alone after",
        load,
    ]
    header = ["set", "negatives", "seeds", *METRICS, "minutes"]
    write_table(arguments.out, "Which negatives matter", header, rows, notes)


def comparisons(
    name: str, results: Mapping[tuple[str, str], Sequence[Mapping[str, float]]]
) -> list[str]:
    """The mixture against the others at P@1, paired by seed."""
    lines = []
    ours = [r["P@1"] for r in results.get((name, "mixture"), ())]
    for other, wanted in (
        ("exact", "at most 1 point behind"),
        ("hard-only", "above 0"),
        ("random", "as it is"),
    ):
        theirs = [r["P@1"] for r in results.get((name, other), ())]
        if ours and len(ours) == len(theirs):
            difference = spread([a - b for a, b in zip(ours, theirs, strict=True)])
            lines.append(f"{name}: P@1 of mixture less {other}: {difference} points ({wanted})")
    return lines


def spread(values: Sequence[float]) -> str:
    """Mean and half width of its interval, in percent."""
    mean, half = mean_and_half_width(values)
    return f"{100 * mean:.1f}" + (f" ± {100 * half:.1f}" if len(values) > 1 else "")


def median_minutes(found: Sequence[Mapping[str, float]]) -> str:
    return f"{np.median([r['seconds'] for r in found]) / 60:.1f}"


if __name__ == "__main__":
    main()
