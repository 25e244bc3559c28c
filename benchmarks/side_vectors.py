"""What are side vectors worth where they say something about the labels, and what do they cost where they are noise?

    python benchmarks/side_vectors.py                               # prints what is to be done, then trains
    python benchmarks/side_vectors.py --presets dexml/sample --seeds 3              # a part
    python benchmarks/side_vectors.py --presets dexml/sample --seeds 1 --epochs 2 --out /dev/null

Planted vectors: each label has a random direction, and each query the direction of the sum of its labels', both with
noise. Weak ones have more of it, and noise vectors are noise alone. All trainings of a preset differ in vectors,
`encoder.side` and seed. With `ignore` nothing depends on the vectors, so it is trained once for all kinds.

Results are kept in results/side_vectors.json, so the command can be stopped at any time and started again.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import time
from pathlib import Path

import data_sets
import torch
from ablation import METRICS, NONE, differences_to_none, known_or_measured, table_row
from common import new_parser, refuse_if_busy, write_table
from planted import write_side_vectors
from store import Result, Store

from xmcray.data.batches import DataConfig, TrainingData
from xmcray.data.corpus import Corpus
from xmcray.data.sample import write_sample
from xmcray.data.side_signal import side_signal
from xmcray.training.run_config import RunConfig

PRESETS = (
    "astra/sample",
    "renee/sample",
    "dexml/sample",
    "prime/sample",
    "astra/cdnjs-keywords",
    "dexml/cdnjs-keywords",
)
WIDTH = 64
PLANTED = "planted"
ONLY_NOISE = "noise"
# Expected length of the noise, next to a direction of length 1.
NOISE = {PLANTED: 0.5, "weak": 2.0, "weaker": 4.0, ONLY_NOISE: 1.0}
WANTED = {PLANTED: "wanted: P@1 at least + 5", ONLY_NOISE: "wanted: P@1 within ± 0.3"}


def main() -> None:
    arguments = parse_arguments()
    load = refuse_if_busy(arguments.anyway)
    torch.set_num_threads(arguments.threads)
    deadline = time.monotonic() + 60 * arguments.minutes
    rows: list[list[object]] = []
    notes = []
    for preset in arguments.presets:
        corpora = sided_corpora(preset.rpartition("/")[2], arguments.vectors)
        if corpora is None:
            continue
        results = results_of(preset, corpora, arguments, deadline)
        for vectors, by_seed in results.items():
            if by_seed:
                rows.append(table_row(preset, vectors, by_seed))
        notes += differences_to_none(preset, results, WANTED)
        notes += signals(corpora)
    lengths = ", ".join(f"{NOISE[vectors]:g} ({vectors})" for vectors in arguments.vectors)
    notes = list(dict.fromkeys(notes))  # several presets share a set
    notes += [
        f"side vectors of width {WIDTH}, noise of length {lengths}; committed presets; percent on"
        " the whole test split, exact search; mean over seeds with its 95 % interval (Student's t);"
        " differences are paired by seed",
        load,
    ]
    header = ["preset", "side vectors", "seeds", *METRICS, "CPU minutes"]
    write_table(arguments.out, "Side vectors: planted, and noise", header, rows, notes)


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(
        __doc__, out="side_vectors.md", threads=os.cpu_count() or 1, minutes=True, anyway=True
    )
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), metavar="METHOD/PRESET")
    parser.add_argument("--vectors", nargs="+", choices=list(NOISE), default=list(NOISE))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="instead of the preset's")
    return parser.parse_args()


# --- data


def sided_corpus(name: str, vectors: str) -> Corpus | None:
    """A corpus with side vectors; None if this machine lacks the data."""
    raw = data_sets.DATA / name
    if name != "sample" and not raw.is_dir():
        print(f"{name} left out: no folder of {os.path.relpath(data_sets.DATA)}")
        return None
    write = functools.partial(write_sided, name, raw, vectors)
    # Processes of Ray start slowly on a busy machine.
    return data_sets.prepared(f"{name}-side-{vectors}", write, stall_s=900.0)


def write_sided(name: str, raw: Path, vectors: str, folder: Path) -> None:
    """Writes the raw files of a set, and side vectors next to them."""
    if name == "sample":
        write_sample(folder)
    else:
        shutil.copytree(raw, folder, dirs_exist_ok=True)
    write_side_vectors(folder, WIDTH, planted=vectors != ONLY_NOISE, noise=NOISE[vectors])


def sided_corpora(name: str, kinds: list[str]) -> dict[str, Corpus] | None:
    """A set with each kind of side vectors, by kind; None if this machine lacks the data."""
    corpora = {}
    for vectors in kinds:
        corpus = sided_corpus(name, vectors)
        if corpus is None:
            return None
        corpora[vectors] = corpus
    return corpora


# --- trainings


def results_of(
    preset: str, corpora: dict[str, Corpus], arguments: argparse.Namespace, deadline: float
) -> dict[str, dict[int, Result]]:
    """Results by vectors and seed."""
    # The text encoder alone trains the same on all.
    first = next(iter(corpora.values()))
    results: dict[str, dict[int, Result]] = {NONE: {}}
    results |= {vectors: {} for vectors in corpora}
    # One seed of everything before the next.
    for seed in range(arguments.seeds):
        for vectors, by_seed in results.items():
            config = config_of(preset, vectors, seed, arguments)
            corpus = corpora.get(vectors, first)
            result = known_or_measured(Store("side_vectors"), corpus, config, deadline)
            if result is not None:
                by_seed[seed] = result
                shown = ", ".join(f"{metric} {100 * result[metric]:.1f}" for metric in METRICS)
                print(f"{preset}, {vectors}, seed {seed}: {shown}", flush=True)
    return results


def config_of(preset: str, vectors: str, seed: int, arguments: argparse.Namespace) -> RunConfig:
    """A preset, with its side vectors ignored or mixed."""
    side = "ignore" if vectors == NONE else "mix"
    overrides = [
        f"encoder.side={side}",
        f"optim.seed={seed}",
        *data_sets.measured_settings(arguments.threads),
    ]
    if arguments.epochs:
        overrides += [f"optim.epochs={arguments.epochs}", "negatives.start_epoch=2"]
    method, _, name = preset.partition("/")
    return data_sets.preset(name, overrides, method)


# --- table


def signals(corpora: dict[str, Corpus]) -> list[str]:
    """How much the vectors of each corpus say about its labels, and whether they are mixed in."""
    lines = []
    for corpus in corpora.values():
        signal = side_signal(TrainingData(corpus, DataConfig(validation=0)))
        assert signal is not None
        used = "left out" if signal.is_noise else "mixed in"
        lines.append(
            f"{corpus.card.name}: vectors of a label are {signal.alike:+.3f} more alike than others"
            f" ({signal.standard_errors:.0f} standard errors), {used}"
        )
    return lines


if __name__ == "__main__":
    main()
