"""What ASTRA with a static encoder reaches with the committed presets, compared with simple methods (floors.py).

    python benchmarks/accuracy.py                       # every set
    python benchmarks/accuracy.py --set sample
    python benchmarks/accuracy.py --set sample --quick  # does it work?

Each set is prepared once, trained with refit (validation chooses the number of epochs, then all training queries are
used) through the functions behind `xmcray train`, exported, and the bundle is measured on the test split. An
interrupted training continues when the same command is started again.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import data_sets
from common import new_parser, refuse_if_busy, write_table
from floors import FLOORS, METRICS

from xmcray.data.corpus import Corpus
from xmcray.evaluation.evaluate import Evaluation
from xmcray.progress import watch_training
from xmcray.training.launch import train
from xmcray.training.outcome import finish
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

LIMITS: dict[str, tuple[float | None, ...]] = {
    "msdocs-seealso": (74.0, 33.5, 64.1),
    "msdocs-links": (65.0, 38.5, 40.0),
    "sample": (62.0, 34.0, None),
}
LIMIT_MINUTES = {"msdocs-seealso": 10, "msdocs-links": 10}


def main() -> None:
    parser = new_parser(__doc__, out="accuracy.md", anyway=True)
    parser.add_argument("--set", dest="sets", nargs="+", choices=list(FLOORS), default=list(FLOORS))
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings laid over the preset"
    )
    parser.add_argument("--quick", action="store_true", help="one short epoch, printed only")
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
        evaluation = finish(run, corpus)
        assert evaluation is not None, "the set has a test split"
        rows.append(
            [
                name,
                "ASTRA, 95 % interval",
                *(with_interval(evaluation, m) for m in METRICS),
                f"{seconds / 60:.1f}",
            ]
        )
        if name in LIMITS:
            rows.append(
                [
                    name,
                    verdict(name, evaluation, seconds),
                    *map(cell, LIMITS[name]),
                    LIMIT_MINUTES.get(name, "-"),
                ]
            )
        rows += [[name, method, *map(cell, values), "-"] for method, values in FLOORS[name].items()]
        optim = run.config.optim
        cluster = run.config.cluster
        notes.append(
            f"{name}: {corpus.card.num_labels:,} labels, {corpus.card.num_train:,} training queries; refit for"
            f" {optim.stop_epoch or optim.epochs} of {optim.epochs} epochs on {cluster.workers} workers"
        )
    header = ["set", "method", *METRICS, "training, minutes"]
    about = "percent; intervals: bootstrap over test queries; minutes: wall time of both trainings of a refit"
    floors = "floors: quoted from BASELINES.md of the data sets, see benchmarks/floors.py"
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


def with_interval(evaluation: Evaluation, metric: str) -> str:
    low, high = evaluation.intervals[metric]
    return f"**{100 * evaluation.metrics[metric]:.1f}** [{100 * low:.1f}, {100 * high:.1f}]"


def verdict(name: str, evaluation: Evaluation, seconds: float) -> str:
    missed = [
        metric
        for metric, limit in zip(METRICS, LIMITS[name], strict=True)
        if limit is not None and 100 * evaluation.metrics[metric] < limit
    ]
    if seconds / 60 > LIMIT_MINUTES.get(name, float("inf")):
        missed.append("minutes")
    return f"goal: missed in {', '.join(missed)}" if missed else "goal: reached"


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    main()
