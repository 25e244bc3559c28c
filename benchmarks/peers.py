"""Time to accuracy: what each training time buys, for our methods and for their peers, on the same splits.

    python benchmarks/peers.py                                     # everything; finished trainings are kept
    python benchmarks/peers.py --set msdocs-seealso --system astra XR-Linear
    python benchmarks/peers.py --minutes 60                        # starts no training after an hour
    python benchmarks/peers.py --minutes 0                         # prints the table and draws the plots

A method is trained with its committed preset for a fraction of the preset's epochs, each with its own complete schedule,
on all training queries. Peers run in environments of their own: XR-Linear and a TF-IDF memory (peer_linear.py),
sentence-transformers' static encoder over the same vocabulary and MiniLM, both with their in-batch loss
(peer_sentences.py). Seconds are wall time, so they are only comparable on an idle machine. Of our methods they run from
the corpus to the finished bundle, with RAE-XMC's memory in it; of the peers they are those of training alone, of
XR-Linear with its TF-IDF vectors. Preparing raw files and measuring do not count. The vectors that a static encoder
starts from are distilled from a transformer once for a vocabulary, and kept; those seconds are a note of their own.

results/peers.json keeps all measurements, results/peers.md is the table, docs/images/time_SET.svg are the plots.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data_sets
import matplotlib as mpl
import torch
from common import RESULTS, new_parser, processor, refuse_if_busy, write_table
from methods import floors_folder
from methods_store import METRICS, SETS
from peer_environment import run_script

from xmcray.data.corpus import Corpus
from xmcray.evaluation.evaluate import Evaluation
from xmcray.nn.distilled import distilled_tokens
from xmcray.retrieval.retriever import Retriever
from xmcray.storage.whole_files import write_json
from xmcray.training.export import export_run
from xmcray.training.launch import train
from xmcray.training.outcome import measure, measure_bundle, stored_answers

STORE = RESULTS / "peers.json"
IMAGES = data_sets.ROOT / "docs" / "images"
LINEAR = "XR-Linear"
MEMORY = "TF-IDF memory"
STATIC = "sentence-transformers, static"
MINILM = "sentence-transformers, MiniLM"
# Shares of the preset's epochs, or epochs of a peer.
SHARES = (0.125, 0.25, 0.5, 1.0)
EPOCHS = {STATIC: (1.0, 2.0, 4.0, 8.0), MINILM: (0.1, 0.5, 1.0)}
# Learning rates are those of the examples in sentence-transformers' documentation.
OPTIONS: dict[str, list[str]] = {
    STATIC: ["--batch", "1024", "--lr", "0.2", "--tokens", "128"],
    MINILM: ["--batch", "64", "--lr", "5e-5", "--tokens", "32"],
}
METHODS = ("astra", "dexml", "rae")
SYSTEMS = (*METHODS, LINEAR, MEMORY, STATIC, MINILM)
SHOWN = ("P@1", "PSP@5")
Point = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """One training of one system.

    Attributes:
        corpus: the set.
        system: a method of ours, or a peer.
        budget: share of the preset's epochs, epochs of a peer, or 1 if there is only one.
    """

    corpus: Corpus
    system: str
    budget: float


def main() -> None:
    arguments = parse_arguments()
    load = refuse_if_busy(arguments.anyway)
    torch.set_num_threads(arguments.threads)
    data_sets.offer_minilm()
    deadline = time.monotonic() + 60 * arguments.minutes
    for job in planned(arguments):
        if time.monotonic() > deadline:
            print(f"stopped after {arguments.minutes:g} minutes; the same command continues")
            break
        key = key_of(job)
        points: list[Point] = stored("points")
        if any(point["key"] == key for point in points):
            continue
        distil(job)
        evaluation, seconds = measured(job, arguments.threads)
        point = {
            "key": key,
            "set": job.corpus.card.name,
            "system": job.system,
            "budget": job.budget,
            "seconds": round(seconds, 1),
            "threads": arguments.threads,
            "processor": processor(),
            "load": load,
            "metrics": {metric: evaluation.metrics[metric] for metric in METRICS},
        }
        print(json.dumps(point), flush=True)
        # A new preset replaces the measurements of the old one.
        kept = [old for old in points if place(old) != place(point)]
        keep(points=sorted([*kept, point], key=place))
    points = stored("points")
    for name in SETS:
        of_set = [point for point in points if point["set"] == name]
        if of_set:
            draw(of_set, name, IMAGES / f"time_{name}.svg")
    write(points, load)


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(__doc__, threads=os.cpu_count() or 1, minutes=True, anyway=True)
    names = [name for name in SETS if name != "sample"]
    parser.add_argument("--set", dest="sets", nargs="+", choices=names, default=names)
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    return parser.parse_args()


def planned(arguments: argparse.Namespace) -> list[Job]:
    jobs = []
    for name in arguments.sets:
        corpus = data_sets.corpus(name)
        if corpus is None:
            continue
        for system in arguments.system:
            budgets = SHARES if system in METHODS else EPOCHS.get(system, (1.0,))
            jobs += [Job(corpus, system, budget) for budget in budgets]
    return jobs


def place(point: Point) -> tuple[int, int, float]:
    """What a measurement is of; also the order of the table."""
    return SETS.index(point["set"]), SYSTEMS.index(point["system"]), point["budget"]


def key_of(job: Job) -> str:
    """Names a training; another preset is another training."""
    name = job.corpus.card.name
    settings = " ".join(OPTIONS.get(job.system, []))
    if job.system in METHODS:
        settings = data_sets.fingerprint(data_sets.preset(name, method=job.system), job.corpus)
    return f"{name}/{job.system}/{job.budget:g}/{settings}"


def stored(part: str) -> list[dict[str, Any]]:
    """A list of the store: "points", or "distilled"."""
    if not STORE.is_file():
        return []
    rows: list[dict[str, Any]] = json.loads(STORE.read_text(encoding="utf-8")).get(part, [])
    return rows


def keep(**parts: list[dict[str, Any]]) -> None:
    """Replaces lists of the store."""
    unchanged = {part: stored(part) for part in ("points", "distilled")}
    write_json(STORE, {**unchanged, **parts})


# --- measuring


def distil(job: Job) -> None:
    """Makes the vectors that the encoder of a method starts from, and keeps how long that took."""
    if job.system not in METHODS:
        return
    name = job.corpus.card.name
    model = data_sets.preset(name, method=job.system).encoder.init_from
    if not model:
        return
    started = time.perf_counter()
    distilled_tokens(model, job.corpus.tokenizer())
    seconds = round(time.perf_counter() - started, 1)
    others = [row for row in stored("distilled") if row["set"] != name]
    # Vectors that were kept before are read in less than that.
    if seconds > 5:
        keep(distilled=[*others, {"set": name, "seconds": seconds}])


def measured(job: Job, threads: int) -> tuple[Evaluation, float]:
    """The evaluation of a training on the test split, and its seconds."""
    if job.system in METHODS:
        return method_measured(job, threads)
    if job.system in (LINEAR, MEMORY):
        return linear_measured(job, threads)
    return sentences_measured(job, threads)


def method_measured(job: Job, threads: int) -> tuple[Evaluation, float]:
    name = job.corpus.card.name
    epochs = data_sets.preset(name, method=job.system).optim.epochs
    lines = [
        f"optim.epochs={max(1, round(job.budget * epochs))}",
        *data_sets.measured_settings(threads),
    ]
    config = data_sets.preset(name, lines, job.system)
    with tempfile.TemporaryDirectory(dir=data_sets.CACHE) as folder:
        started = time.perf_counter()
        run = train(job.corpus.path, Path(folder) / "run", config)
        export_run(run, Path(folder) / "bundle", job.corpus)
        seconds = time.perf_counter() - started
        retriever = Retriever.load(str(Path(folder) / "bundle"))
        return measure_bundle(retriever, job.corpus, "test"), seconds


def linear_measured(job: Job, threads: int) -> tuple[Evaluation, float]:
    folder = floors_folder(job.corpus.card.name, threads)
    costs = json.loads((folder / "costs.json").read_text(encoding="utf-8"))
    is_linear = job.system == LINEAR
    path = folder / ("linear.npz" if is_linear else "memory.npz")
    seconds = costs["vectors_s"] + (costs["train_s"] if is_linear else 0.0)
    answers = stored_answers(str(path), job.corpus, "test")
    return measure(answers, job.corpus, "test"), seconds


def sentences_measured(job: Job, threads: int) -> tuple[Evaluation, float]:
    name = job.corpus.card.name
    model = "static"
    if job.system == MINILM:
        # The package's folder, because the peers' environment looks into no cache of ours.
        model = data_sets.packaged_minilm() or data_sets.MINILM
    folder = Path(tempfile.mkdtemp(dir=data_sets.CACHE))
    try:
        words: list[str | Path] = ["--model", model, "--corpus", job.corpus.path]
        words += ["--data", data_sets.DATA / name, "--out", folder]
        words += ["--epochs", str(job.budget), "--threads", str(threads), *OPTIONS[job.system]]
        run_script("sentences", "peer_sentences.py", words, threads)
        costs = json.loads((folder / "costs.json").read_text(encoding="utf-8"))
        answers = stored_answers(str(folder / "answers.npz"), job.corpus, "test")
        return measure(answers, job.corpus, "test"), costs["train_s"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- table and plots


def write(points: Sequence[Point], load: str) -> None:
    rows: list[list[object]] = []
    for point in points:
        metrics = [f"{100 * point['metrics'][metric]:.1f}" for metric in METRICS]
        budget = f"{point['budget']:g}" if point["system"] not in (LINEAR, MEMORY) else "-"
        seconds = f"{point['seconds']:.0f}"
        is_busy = "busy" if "busy" in point["load"] else "idle"
        rows.append([point["set"], point["system"], budget, *metrics, seconds, is_busy])
    notes = [
        "percent on the test split; one seed; seconds: of our methods until the bundle is there, of the others those"
        " of training alone, of XR-Linear with its vectors",
        "budget: share of the preset's epochs (our methods), epochs (sentence-transformers)",
        *(
            f"{row['set']}: the vectors of tokens, distilled once for its vocabulary: {row['seconds']:.0f} s"
            for row in stored("distilled")
        ),
        *(f"measured on {name}: {sets}" for name, sets in sets_by_processor(points).items()),
        "machine: busy if the load average at the start was above 0.5 per core; such seconds say little",
        load,
    ]
    header = ["set", "system", "budget", *METRICS, "seconds", "machine"]
    write_table("peers.md", "Time to accuracy", header, rows, notes)


def sets_by_processor(points: Sequence[Point]) -> dict[str, str]:
    """The names of the sets that were measured on each processor; only one set's seconds compare."""
    sets: dict[str, dict[str, None]] = {}
    for point in points:
        sets.setdefault(point["processor"], {})[point["set"]] = None
    return {name: ", ".join(of_processor) for name, of_processor in sets.items()}


def draw(points: Sequence[Mapping[str, Any]], name: str, out: Path) -> None:
    """Writes the plot of a set: one panel for each shown metric, one curve for each system."""
    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    # A fixed salt and no date, so that the same table gives the same file.
    mpl.rcParams.update({"svg.hashsalt": "xmcray", "svg.fonttype": "path", "font.size": 9})
    figure, panels = pyplot.subplots(1, len(SHOWN), figsize=(9, 3.6))
    for panel, metric in zip(panels, SHOWN, strict=True):
        for system in SYSTEMS:
            curve = [point for point in points if point["system"] == system]
            seconds = [point["seconds"] for point in curve]
            values = [100 * point["metrics"][metric] for point in curve]
            is_peer = system not in METHODS
            style = "s--" if is_peer else "o-"
            if curve:
                panel.plot(seconds, values, style, markersize=4, label=system)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xlabel("seconds of training")
        panel.set_title(f"{name}: {metric}, percent", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=4, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
