"""What ASTRA with a static encoder reaches with the committed presets, beside floors (../shared/data/BASELINES.md).

    python benchmarks/accuracy.py                       # every set
    python benchmarks/accuracy.py --set sample
    python benchmarks/accuracy.py --set sample --quick  # does it work?

Each set is prepared once, trained with refit (validation chooses the number of epochs, then all training queries are
used) through the functions behind `xmcray train`, exported, and the bundle is measured on the test split. An
interrupted training continues when the same command is started again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import data_sets
from common import refuse_if_busy, write_table

from xmcray.data.corpus import Corpus
from xmcray.evaluation.evaluate import Evaluation
from xmcray.progress import watch_training
from xmcray.training.launch import train
from xmcray.training.outcome import finish
from xmcray.training.run import Run, RunConfig

METRICS = ("P@1", "P@5", "PSP@5")
# Percent, quoted from BASELINES.md (same splits, filter pairs masked, A=0.55, B=1.5); the sample's from issue 2.
FLOORS: dict[str, dict[str, tuple[float | None, ...]]] = {
    "msdocs-seealso": {
        "kNN": (67.4, 30.3, 59.8),
        "label": (37.4, 18.8, 53.0),
        "both": (71.4, 32.3, 70.2),
        "XR-Linear": (74.7, 31.8, 64.1),
    },
    "msdocs-links": {
        "kNN": (62.2, 35.3, 38.2),
        "label": (30.6, 16.8, 33.4),
        "both": (59.8, 33.1, 45.1),
        "XR-Linear": (61.2, 34.1, 38.4),
    },
    "cdnjs-keywords": {
        "kNN": (60.3, 33.0, 33.7),
        "label": (57.4, 30.9, 45.3),
        "both": (69.7, 39.4, 49.6),
        "XR-Linear": (62.0, 36.8, 40.0),
    },
    "tate-subjects": {
        "kNN": (68.3, 44.2, 35.3),
        "label": (30.4, 12.7, 28.0),
        "both": (67.3, 44.5, 45.0),
        "XR-Linear": (78.5, 51.7, 42.6),
    },
    "wordnet-hypernyms": {
        "kNN": (48.8, 31.8, 45.2),
        "label": (17.6, 8.3, 25.0),
        "both": (45.9, 29.2, 50.3),
        "XR-Linear": (58.2, 37.2, 49.8),
    },
    "sample": {
        "kNN, another build": (47.0, None, None),
        "XR-Linear, another build": (56.0, None, None),
    },
}
LIMITS: dict[str, tuple[float | None, ...]] = {
    "msdocs-seealso": (74.0, 33.5, 64.1),
    "msdocs-links": (65.0, 38.5, 40.0),
    "sample": (62.0, 34.0, None),
}
LIMIT_MINUTES = {"msdocs-seealso": 10, "msdocs-links": 10}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", dest="sets", nargs="+", choices=list(FLOORS), default=list(FLOORS))
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings laid over the preset"
    )
    parser.add_argument("--quick", action="store_true", help="one short epoch, printed only")
    parser.add_argument("--out", type=Path, default=Path("accuracy.md"))
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.out = Path(os.devnull)
        arguments.override += [
            "optim.epochs=1",
            "optim.batch_size=1024",
            "encoder.dim=32",
            "negatives.hard=0",
        ]
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    rows: list[list[object]] = []
    notes: list[str] = []
    for name in arguments.sets:
        corpus = data_sets.corpus(name)
        if corpus is None:
            notes.append(f"{name} left out: not on this machine")
            continue
        run, seconds = trained(corpus, data_sets.preset(name, arguments.override))
        found = finish(run, corpus)
        assert found is not None, "the set has a test split"
        rows.append(
            [
                name,
                "ASTRA, 95 % interval",
                *(with_interval(found, m) for m in METRICS),
                f"{seconds / 60:.1f}",
            ]
        )
        if name in LIMITS:
            rows.append(
                [
                    name,
                    verdict(name, found, seconds),
                    *map(cell, LIMITS[name]),
                    LIMIT_MINUTES.get(name, "-"),
                ]
            )
        rows += [[name, method, *map(cell, values), "-"] for method, values in FLOORS[name].items()]
        optim, cluster = run.config.optim, run.config.cluster
        notes.append(
            f"{name}: {corpus.card.num_labels:,} labels, {corpus.card.num_train:,} training queries; refit for"
            f" {optim.stop_epoch or optim.epochs} of {optim.epochs} epochs on {cluster.workers} workers"
        )
    header = ["set", "method", *METRICS, "training, minutes"]
    about = "percent; intervals: bootstrap over test queries; minutes: wall time of both trainings of a refit"
    floors = "floors quoted from BASELINES.md: TF-IDF 10 nearest queries, label texts, both, and XR-Linear"
    write_table(
        arguments.out,
        "Accuracy with the committed presets",
        header,
        rows,
        [*notes, about, floors, load],
    )


def trained(corpus: Corpus, config: RunConfig) -> tuple[Run, float]:
    """The finished run, in the cache, and the seconds that training took, over all calls that worked on it."""
    out = folder_of(corpus, config)
    clock = out.with_suffix(".seconds")
    before = json.loads(clock.read_text()) if clock.is_file() else 0.0
    started = time.perf_counter()
    finished = before and (out / "result.json").is_file()
    try:
        run = train(
            corpus.path, out, config, refit=config.data.validation > 0, watch=watch_training
        )
    finally:
        clock.parent.mkdir(parents=True, exist_ok=True)
        if not finished:
            clock.write_text(json.dumps(before + time.perf_counter() - started))
    return run, float(json.loads(clock.read_text()))


def folder_of(corpus: Corpus, config: RunConfig) -> Path:
    """Where `trained` keeps the run."""
    name = f"{corpus.card.name}-{config.method_name}-{data_sets.fingerprint(config, corpus)}"
    return data_sets.CACHE / "accuracy" / name


def with_interval(found: Evaluation, metric: str) -> str:
    low, high = found.intervals[metric]
    return f"**{100 * found.metrics[metric]:.1f}** [{100 * low:.1f}, {100 * high:.1f}]"


def verdict(name: str, found: Evaluation, seconds: float) -> str:
    missed = [
        metric
        for metric, limit in zip(METRICS, LIMITS[name], strict=True)
        if limit is not None and 100 * found.metrics[metric] < limit
    ]
    if seconds / 60 > LIMIT_MINUTES.get(name, float("inf")):
        missed.append("minutes")
    return f"goal: missed in {', '.join(missed)}" if missed else "goal: reached"


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    main()
