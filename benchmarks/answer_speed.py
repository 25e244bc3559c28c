"""How fast a bundle answers compared with XR-Linear: texts a second in bulk, and one text alone.

    python benchmarks/answer_speed.py [--set msdocs-seealso msdocs-links] [--threads 2]

Both sides go from a text to the ids of its ten best labels and answer the same test queries. In bulk
all queries are one call, with `--threads`. One text is a call of its own, with one thread. XR-Linear
is that of the data sets' floors, with beam 20, in an environment of its own (peer_linear.py).

The bundle is that of ASTRA's preset, trained on all training queries and as `export` writes it: with
an index of inverted lists beyond 50,000 labels. It is also exported with a lower recall
(`--set index.recall=0.95`), and searched exactly. The first run trains it, which takes minutes.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import data_sets
import faiss
import numpy as np
import torch
from accuracy import folder_of
from common import new_parser, refuse_if_busy, write_table
from peer_environment import run_script
from peer_linear import SINGLE, TOP_K

from xmcray.data.corpus import Corpus
from xmcray.retrieval.retriever import Retriever
from xmcray.training.export import export_run
from xmcray.training.launch import train
from xmcray.training.outcome import measure_bundle

SETS = ("msdocs-seealso", "msdocs-links")
HEADER = [
    "set",
    "labels",
    "side",
    "texts/s",
    "p50 ms",
    "p99 ms",
    "P@1",
    "texts/s, times XR-Linear's",
]
LOWER_RECALL = 0.95  # of 50 answers; `export` itself chooses 0.99
Figures = dict[str, float]


def main() -> None:
    parser = new_parser(__doc__, out="answer_speed.md", threads=2, anyway=True)
    parser.add_argument("--set", dest="sets", nargs="+", choices=SETS, default=list(SETS))
    options = parser.parse_args()
    load = refuse_if_busy(options.anyway)
    table: list[list[object]] = []
    for name in options.sets:
        corpus = data_sets.corpus(name)
        if corpus is None:
            continue
        linear = linear_speed(name, options.threads)
        sides = {"XR-Linear": linear, **our_sides(corpus, options.threads)}
        for side, figures in sides.items():
            ratio = figures["texts_per_s"] / linear["texts_per_s"]
            row = [name, corpus.card.num_labels, side, *figures.values(), ratio]
            table.append(row)
            print(*row, flush=True)
    notes = [
        f"from a text to the ids of its {TOP_K} best labels; texts/s: all test queries in one call, {options.threads}"
        f" threads; ms: one text in a call, one thread, over {SINGLE} texts",
        "goal: 10 times XR-Linear's texts/s, and one text in 3 ms",
        load,
    ]
    write_table(options.out, "The speed of answers", HEADER, table, notes)


def our_sides(corpus: Corpus, threads: int) -> dict[str, Figures]:
    """The figures of ASTRA's preset by the way to search. The training is kept for later runs."""
    config = data_sets.preset(corpus.card.name, data_sets.measured_settings(threads))
    folder = folder_of(corpus, config)
    run = train(corpus.path, folder, config)
    with tempfile.TemporaryDirectory() as bundles:
        bundle = Path(bundles, "bundle")
        export_run(run, bundle, corpus)
        sides = {"xmcray": our_speed(bundle, corpus, threads)}
        if not Retriever.load(bundle).is_exact:
            quick = Path(bundles, "quick")
            export_run(run, quick, corpus, {"index": {"recall": LOWER_RECALL}})
            sides[f"xmcray, index.recall {LOWER_RECALL}"] = our_speed(quick, corpus, threads)
            sides["xmcray, exact"] = our_speed(bundle, corpus, threads, exact=True)
    return sides


def our_speed(bundle: Path, corpus: Corpus, threads: int, exact: bool = False) -> Figures:
    """The figures of `peer_linear.speed`, of a bundle; `exact` searches all its labels."""
    split = corpus.split("test")
    texts = split.texts(np.arange(len(split)))
    retriever = Retriever.load(bundle, threads=threads)
    set_threads(threads)
    retriever.top_labels(texts[:SINGLE], TOP_K, exact=exact)
    started = time.perf_counter()
    retriever.top_labels(texts, TOP_K, exact=exact)
    bulk_s = time.perf_counter() - started

    retriever = Retriever.load(bundle, threads=1)
    set_threads(1)
    single_ms = []
    for text in texts[:SINGLE]:
        started = time.perf_counter()
        retriever.top_labels([text], TOP_K, exact=exact)
        single_ms.append(1000 * (time.perf_counter() - started))
    median, slow = np.percentile(single_ms, [50, 99])
    evaluation = measure_bundle(retriever, corpus, "test", exact=exact)
    return {
        "texts_per_s": len(texts) / bulk_s,
        "p50_ms": float(median),
        "p99_ms": float(slow),
        "P@1": 100 * evaluation.metrics["P@1"],
    }


def linear_speed(name: str, threads: int) -> Figures:
    """The figures of XR-Linear, trained in its own environment."""
    folder = data_sets.CACHE / "answer_speed" / name
    tool = data_sets.DATA.parent / "tools" / "linear_floor.py"
    words: list[str | Path] = ["--tool", tool, "--data", data_sets.DATA / name]
    words += ["--out", folder, "--threads", str(threads), "--speed"]
    run_script("linear", "peer_linear.py", words, threads)
    figures: Figures = json.loads((folder / "speed.json").read_text(encoding="utf-8"))
    return figures


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)


if __name__ == "__main__":
    main()
