"""One text answered by a fused bundle, and by the label vectors of the same bundle alone.

    python benchmarks/fused_latency.py [--labels 14471 104969] [--queries-per-label 2]

Texts of labels and queries are drawn by Zipf's law (synthetic.py). The encoder is not trained, which
changes answers and not times. The bundle has all four parts. Both sides take turns, so that other
processes and the frequency of the processor disturb both alike. Times are CPU milliseconds of the
searching thread, from the text to the ids and scores of ten labels; of each text the least of all
rounds counts.

Bundles are kept in the cache, because an index over the training queries takes minutes to build.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

import data_sets
import faiss
import numpy as np
import synthetic
import torch
from common import new_parser, refuse_if_busy, write_table

from xmcray.data.corpus import Corpus
from xmcray.nn.encoder import EncoderConfig, build_encoder
from xmcray.retrieval.parts import MemberConfig, PartsConfig
from xmcray.retrieval.retriever import Retriever
from xmcray.training.fuse import write_parts
from xmcray.training.memory import memory_bundle

DIM = 256
K = 10
CONFIG = PartsConfig(members=(MemberConfig(memory=0.5),), words=0.5, texts=0.5)
HEADER = ["labels", "training queries", "side", "p50 ms", "p90 ms", "added p50 ms"]


def main() -> None:
    parser = new_parser(__doc__, out="fused_latency.md", anyway=True)
    parser.add_argument("--labels", type=int, nargs="+", default=[14_471, 104_969])
    parser.add_argument("--queries-per-label", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9, help="through all texts")
    options = parser.parse_args()
    load = refuse_if_busy(options.anyway)
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    table = []
    for num_labels in options.labels:
        corpus = synthetic.corpus(num_labels, options.queries_per_label * num_labels)
        table += measure(Retriever.load(bundle_of(corpus), threads=1), corpus, options.rounds)
    notes = [
        f"D = {DIM}, k = {K}, one thread, one text at a time: CPU time of its answer, the least of"
        f" {options.rounds} rounds; percentiles over {synthetic.TEST_QUERIES} texts",
        "plain: the label vectors of the same bundle; fused: all four parts",
        load,
    ]
    write_table(options.out, "One text, plain and fused", HEADER, table, notes)


def bundle_of(corpus: Corpus) -> Path:
    """The fused bundle of a corpus, from the cache if it was made before."""
    folder = data_sets.CACHE / "fused_latency" / corpus.card.name
    fused = folder / "fused"
    if not (folder / "memory").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        encoder = build_encoder(EncoderConfig(dim=DIM), corpus.tokenizer(), None, seed=0)
        encoder.save(folder / "encoder")
        memory_bundle(str(folder / "encoder"), corpus, folder / "memory")
    if not fused.is_dir():
        write_parts([folder / "memory"], corpus, fused, CONFIG)
    return fused


def measure(retriever: Retriever, corpus: Corpus, rounds: int) -> list[list[Any]]:
    """Two rows of the table: plain and fused."""
    plain = dataclasses.replace(retriever, fusion=None, memory=None)
    sides = {"plain": plain, "fused": retriever}
    texts = corpus.split("test").texts(np.arange(synthetic.TEST_QUERIES))
    least_ms = {name: np.full(len(texts), np.inf) for name in sides}
    for _ in range(rounds):
        for query, text in enumerate(texts):
            for name, side in sides.items():
                started = time.thread_time()
                side.top_labels([text], K)
                taken_ms = 1000 * (time.thread_time() - started)
                least_ms[name][query] = min(taken_ms, least_ms[name][query])
    table = []
    plain_median = np.median(least_ms["plain"])
    for name, of_side in least_ms.items():
        median, slow = np.percentile(of_side, [50, 90])
        added = median - plain_median
        row = [corpus.card.num_labels, corpus.card.num_train, name, median, slow, added]
        table.append(row)
        print(*row, flush=True)
    return table


if __name__ == "__main__":
    main()
