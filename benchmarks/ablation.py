"""Which negatives matter: random only, hard only, mixture, curriculum and the exact loss, side by side over seeds.

    python benchmarks/ablation.py                                   # prints what is to be done, then trains
    python benchmarks/ablation.py --data msdocs-links --only mixture exact --seeds 3    # a part
    python benchmarks/ablation.py --equal time --minutes 50         # starts no training after 50 minutes
    python benchmarks/ablation.py --data sample --seeds 2 --quick   # does it work?

Each variant changes one thing of ASTRA's preset for the set: which labels a query is trained against. All have the
preset's other settings. They are compared after equally many epochs, and after equal time: there a variant has as many
epochs as fit into the CPU time that the mixture took with the same seed, with its own complete schedule. So trainings
with equal time follow those with equal epochs.

Each training uses all training queries, in this process, and is measured with exact search on the test split. Results
are kept in results/ablation.json, so the command can be stopped at any time and started again, on another machine, too.
What the scripts of claims/ have measured already is taken from there.
`--grid` adds numbers of uniform negatives, their weight, and an index over label texts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "claims"))

import claim
import data_sets
import minilm
import torch
from common import mean_and_half_width, new_parser, refuse_if_busy, write_table
from store import KEPT, Result, Store, training_name
from variants import answers

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.nn.encoder import build_encoder
from xmcray.retrieval.retriever import Retriever
from xmcray.training.export import export_run
from xmcray.training.launch import train
from xmcray.training.outcome import measure_bundle
from xmcray.training.run_config import RunConfig

METRICS = ("P@1", "P@5", "PSP@5")
# With a transformer: MiniLM is frozen, because fifty trainings of all its weights would take days here.
BASE = "msdocs-seealso"
FROZEN = f"{BASE}, MiniLM"
SETS = (BASE, "msdocs-links", FROZEN)
REFERENCE = "mixture"
NONE = "none"  # the variant that others are compared with
NO_GOALS: Mapping[str, str] = {}
EPOCHS = "epochs"
TIME = "time"
DEFAULT_HARD = 30  # hard negatives if the preset has none
VARIANTS: dict[str, list[str]] = {
    "random": ["negatives.hard=0"],
    # Hard negatives need an index, and the earliest one is used from epoch 2: uniform labels until then, none after.
    "hard-only": ["negatives.start_epoch=2", "negatives.uniform_epochs=2"],
    REFERENCE: [],
    "curriculum": ["negatives.curriculum={half}"],
    "exact": ["negatives.hard=0", "method.exact=true"],
}
GRID: dict[str, list[str]] = {
    "random, 200 uniform": ["negatives.hard=0", "negatives.uniform=200"],
    "random, 16,000 uniform": ["negatives.hard=0", "negatives.uniform=16000"],
    "mixture, 200 uniform": ["negatives.uniform=200"],
    "mixture, 16,000 uniform": ["negatives.uniform=16000"],
    "random, weight L/c": ["negatives.hard=0", "method.importance_weight=unbiased"],
    "mixture, weight L/c": ["method.importance_weight=unbiased"],
    "mixture, index on labels": ["method.index_on=labels"],
}
WANTED = (("exact", "at most 1 point behind"), ("hard-only", "above 0"), ("random", "above 0"))
STORE = Store("ablation")


@dataclass(frozen=True, slots=True)
class Job:
    """One training.

    Attributes:
        name: of the set, or FROZEN.
        corpus: its data.
        variant: which labels a query is trained against.
        equal: what all variants have the same amount of, "epochs" or "time".
        seed: of the training.
    """

    name: str
    corpus: Corpus
    variant: str
    equal: str
    seed: int

    def __str__(self) -> str:
        return f"{self.name}, {self.variant}, equal {self.equal}, seed {self.seed}"


def main() -> None:
    arguments = parse_arguments()
    if arguments.quick:
        STORE.path = data_sets.CACHE / "ablation_quick.json"  # no results for the page
        arguments.out = Path(os.devnull)
        arguments.epochs = arguments.epochs or 4
        arguments.override += ["encoder.dim=32", "negatives.uniform=200", "negatives.hard=10"]
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    torch.set_num_threads(arguments.threads)
    jobs = planned(arguments)
    missing = [job for job in jobs if stored_result(job, arguments) is None]
    print(f"{len(missing)} of {len(jobs)} trainings are to be done", flush=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    for number, job in enumerate(missing, start=1):
        if time.monotonic() > deadline:
            print(f"stopped after {arguments.minutes:g} minutes; the same command continues")
            break
        if arguments.only and job.variant not in arguments.only:
            continue
        # The same training may have been due under another name, or another process has done it.
        if stored_result(job, arguments) is not None:
            continue
        config = config_of(job, arguments)
        if config is None:
            print(f"{job}: waits for the mixture with equal epochs")
            continue
        result = measured(job.corpus, config, STORE)
        shown = ", ".join(f"{metric} {100 * result[metric]:.1f}" for metric in METRICS)
        minutes = result["cpu_s"] / 60
        print(f"{number}/{len(missing)} {job}: {shown}, {minutes:.1f} minutes", flush=True)
    write(jobs, arguments, load)


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(
        __doc__, out="ablation.md", threads=os.cpu_count() or 1, minutes=True, anyway=True
    )
    parser.add_argument("--data", nargs="+", default=list(SETS), metavar="CORPUS")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--equal", nargs="+", choices=(EPOCHS, TIME), default=[EPOCHS, TIME])
    parser.add_argument("--epochs", type=int, help="instead of the preset's")
    parser.add_argument(
        "--only", nargs="+", choices=[*VARIANTS, *GRID], help="variants to train; all are printed"
    )
    parser.add_argument("--grid", action="store_true", help="more variants, see above")
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings over the preset"
    )
    parser.add_argument("--quick", action="store_true", help="tiny epochs, printed only")
    return parser.parse_args()


def planned(arguments: argparse.Namespace) -> list[Job]:
    """All trainings: one seed of everything before the next, equal epochs before equal time."""
    is_grid_wanted = arguments.grid or bool(set(arguments.only or ()) & set(GRID))
    variants = [*VARIANTS, *GRID] if is_grid_wanted else list(VARIANTS)
    corpora = {}
    for name in arguments.data:
        is_frozen = name == FROZEN
        corpus = data_sets.in_minilm_tokens(BASE) if is_frozen else data_sets.corpus(name)
        if corpus is not None:
            corpora[name] = corpus
    jobs = []
    for seed in range(arguments.seeds):
        for name, corpus in corpora.items():
            for equal in arguments.equal:
                # With equal time the mixture is itself.
                others = [variant for variant in variants if variant != REFERENCE]
                compared = variants if equal == EPOCHS else others
                jobs += [Job(name, corpus, variant, equal, seed) for variant in compared]
    return jobs


# --- settings


def config_of(job: Job, arguments: argparse.Namespace) -> RunConfig | None:
    """The settings of a training; None if those of equal epochs, which it is based on, are missing."""
    epochs = arguments.epochs or base(job.name, arguments.override).optim.epochs
    if job.equal == EPOCHS:
        return settings(job, epochs, arguments)
    own = stored_result(replace(job, equal=EPOCHS), arguments)
    reference = stored_result(replace(job, equal=EPOCHS, variant=REFERENCE), arguments)
    if own is None or reference is None:
        return None
    fitting = round(epochs * reference["cpu_s"] / own["cpu_s"])
    return settings(job, max(1, fitting), arguments)


def settings(job: Job, epochs: int, arguments: argparse.Namespace) -> RunConfig:
    """The preset of a set under the settings of a variant."""
    preset = base(job.name, arguments.override)
    # A short training would end before the preset's first hard negatives.
    start = min(preset.negatives.start_epoch, max(2, epochs // 3))
    half = max(2, (epochs - start) // 2)
    common = [
        f"optim.epochs={epochs}",
        f"optim.seed={job.seed}",
        f"negatives.start_epoch={start}",
        f"negatives.hard={preset.negatives.hard or DEFAULT_HARD}",
        *data_sets.measured_settings(arguments.threads),
        *arguments.override,
    ]
    lines = {**VARIANTS, **GRID}[job.variant]
    return base(job.name, [*common, *(line.format(half=half) for line in lines)])


def base(name: str, overrides: Sequence[str]) -> RunConfig:
    """The preset of a set under other settings; FROZEN has that of its set, with MiniLM and other rows."""
    if name != FROZEN:
        return data_sets.preset(name, overrides)
    vectors = data_sets.CACHE / "vectors" / BASE
    encoder = [
        f"encoder.name={data_sets.MINILM}",
        "encoder.frozen=true",
        f"encoder.vectors_folder={vectors}",  # made once for all trainings
        "encoder.bigram_buckets=0",
        "encoder.dim=0",
    ]
    # Rows that suit MiniLM's vectors, with as many uniform negatives as the preset has.
    uniform = data_sets.preset(BASE).negatives.uniform
    rows = [*minilm.LARGE["astra"], f"negatives.uniform={uniform}"]
    return data_sets.preset(BASE, [*encoder, *rows, *overrides])


# --- results


def stored_result(job: Job, arguments: argparse.Namespace) -> Result | None:
    """The result of a training; None if it is still to be done."""
    config = config_of(job, arguments)
    if config is None:
        return None
    stored = STORE.get(training_name(job.corpus, config))
    return stored or of_a_claim(job.corpus, config)


def of_a_claim(corpus: Corpus, config: RunConfig) -> Result | None:
    """The result of the same training for a claim; None if there is none."""
    result = claim.result_of(f"{data_sets.fingerprint(config, corpus)}-{answers.__name__}")
    if result is None:
        return None
    metrics = {metric: result[metric] for metric in METRICS}
    return {
        **metrics,
        "seconds": result["training_s"],
        "cpu_s": result["training_cpu_s"],
        "epochs": config.optim.epochs,
    }


def measured(
    corpus: Corpus,
    config: RunConfig,
    store: Store,
    further: Callable[[Retriever], Result] | None = None,
) -> Result:
    """Trains, measures, keeps the metrics and removes the run.

    Args:
        corpus: the set.
        config: settings of the training.
        store: of the metrics.
        further: measures more of the bundle.
    """
    folder = Path(tempfile.mkdtemp(dir=data_sets.CACHE))
    if config.encoder.frozen:
        encode_once(corpus, config)
    try:
        started = time.perf_counter()
        started_cpu = time.process_time()
        run = train(corpus.path, folder / "run", config)
        seconds = time.perf_counter() - started
        cpu_s = time.process_time() - started_cpu
        # The search is exact, so an approximate index would be built in vain.
        export_run(run, folder / "bundle", corpus, {"index": {"factory": "Flat"}})
        retriever = Retriever.load(folder / "bundle")
        evaluation = measure_bundle(retriever, corpus, "test", exact=True)
        of_bundle = further(retriever) if further else {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {metric: evaluation.metrics[metric] for metric in METRICS}
    result |= {"seconds": seconds, "cpu_s": cpu_s, "epochs": config.optim.epochs}
    result |= of_bundle
    store.put(training_name(corpus, config), result)
    return result


def encode_once(corpus: Corpus, config: RunConfig) -> None:
    """Makes the vectors that trainings with a frozen encoder share; their time is no training's."""
    data = TrainingData(corpus, config.data)
    encoder = build_encoder(config.encoder, corpus.tokenizer(), None, 0)
    folder = Path(config.encoder.vectors_folder) / corpus.sha256[:32]
    encoder.remember(folder, data.num_train + data.num_labels, data.tokens)


def write(jobs: Sequence[Job], arguments: argparse.Namespace, load: str) -> None:
    """Writes the table of all results that there are."""
    results: dict[tuple[str, str, str], dict[int, Result]] = {}
    num_missing = 0
    for job in jobs:
        result = stored_result(job, arguments)
        if result is None:
            num_missing += 1
            continue
        key = (job.name, job.equal, job.variant)
        results.setdefault(key, {})[job.seed] = result
    rows: list[list[object]] = []
    for name, equal, variant in sorted(results):
        by_seed = results[name, equal, variant]
        values = list(by_seed.values())
        metrics = [spread([result[metric] for result in values]) for metric in METRICS]
        epochs = spread([result["epochs"] for result in values], scale=1)
        minutes = spread([result["cpu_s"] / 60 for result in values], scale=1)
        rows.append([name, equal, variant, len(values), *metrics, epochs, minutes])
    notes = [f"{num_missing} of {len(jobs)} trainings are still to be done"]
    for name in dict.fromkeys(job.name for job in jobs):
        notes += comparisons(name, results)
    notes += [
        "ASTRA with the committed preset; percent on the test split, exact search; mean over seeds with its 95 %"
        " interval (Student's t); differences are paired by seed",
        "equal time: as many epochs as fit into the CPU time of the mixture; minutes are of CPU time",
        "hard-only has uniform negatives in epochs 0 and 1, which the earliest index needs, and hard ones alone after",
        f"{FROZEN}: frozen, 32 tokens of a text, rows' settings of minilm.py",
        KEPT,
        load,
    ]
    header = ["set", "equal", "negatives", "seeds", *METRICS, "epochs", "minutes"]
    write_table(arguments.out, "Which negatives matter", header, rows, notes)


def comparisons(
    name: str, results: Mapping[tuple[str, str, str], Mapping[int, Result]]
) -> list[str]:
    """The mixture against the others at P@1, paired by seed."""
    lines = []
    ours = results.get((name, EPOCHS, REFERENCE), {})
    for equal in (EPOCHS, TIME):
        for other, wanted in WANTED:
            theirs = results.get((name, equal, other), {})
            seeds = sorted(ours.keys() & theirs.keys())
            if seeds:
                differences = [ours[seed]["P@1"] - theirs[seed]["P@1"] for seed in seeds]
                lines.append(
                    f"{name}, equal {equal}: P@1 of the mixture less {other}:"
                    f" {spread(differences)} points ({wanted})"
                )
    return lines


def known_or_measured(
    store: Store,
    corpus: Corpus,
    config: RunConfig,
    deadline: float,
    further: Callable[[Retriever], Result] | None = None,
) -> Result | None:
    """The result of a training, from the store or measured now; None if there is no time.

    Args:
        store: of the metrics.
        corpus: the set.
        config: settings of the training.
        deadline: after which nothing is trained.
        further: measures more of the bundle.
    """
    stored = store.get(training_name(corpus, config))
    if stored is not None:
        return stored
    if time.monotonic() > deadline:
        return None
    return measured(corpus, config, store, further)


def differences_to_none(
    preset: str, results: Mapping[str, dict[int, Result]], wanted: Mapping[str, str] = NO_GOALS
) -> list[str]:
    """Each variant against NONE, paired by seed; `wanted` has the goals of some."""
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
        goal = f" ({wanted[variant]})" if variant in wanted else ""
        lines.append(f"{preset}, {variant} less none, in points: {', '.join(parts)}{goal}")
    return lines


def table_row(preset: str, variant: str, by_seed: dict[int, Result]) -> list[object]:
    """One row of the table."""
    results = list(by_seed.values())
    if not results:
        return [preset, variant, 0, *("-" for _ in METRICS), "-"]
    metrics = [spread([result[metric] for result in results]) for metric in METRICS]
    minutes = spread([result["cpu_s"] / 60 for result in results], scale=1)
    return [preset, variant, len(results), *metrics, minutes]


def spread(values: Sequence[float], scale: float = 100) -> str:
    """Mean and half width of its interval, in percent."""
    mean, half = mean_and_half_width(values)
    interval = f" ± {scale * half:.1f}" if len(values) > 1 else ""
    return f"{scale * mean:.1f}{interval}"


if __name__ == "__main__":
    main()
