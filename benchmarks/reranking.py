"""What a cross-encoder that reads the best answers again adds to a bundle.

    python benchmarks/reranking.py                                # DEXML on the sample, MiniLM
    python benchmarks/reranking.py --set cdnjs-keywords --method rae --queries 5000

The bundle is that of a refit with the committed preset; the cross-encoder starts from MiniLM and is trained on the
bundle's hard negatives by `xmcray train-reranker`, once: it stays in the cache. Both are measured on the test split and
compared by a paired test.
"""

from __future__ import annotations

import dataclasses
import os
import time

import data_sets
import numpy as np
import torch
from accuracy import trained
from common import new_parser, refuse_if_busy, write_table

from xmcray.data.corpus import Corpus
from xmcray.retrieval.retriever import Retriever
from xmcray.training.outcome import bundle_of, measure_bundle
from xmcray.training.train_reranker import RerankTraining, train_reranker

METRICS = ("P@1", "P@5", "PSP@5")
TIMED = 30  # queries that are answered for the time of one


def main() -> None:
    parser = new_parser(__doc__, threads=os.cpu_count() or 1, anyway=True)
    parser.add_argument("--set", default="sample", dest="name")
    parser.add_argument("--method", default="dexml")
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    load = refuse_if_busy(options.anyway)
    torch.set_num_threads(options.threads)
    corpus = data_sets.corpus(options.name)
    if corpus is None:
        raise SystemExit(f"{options.name} is not in {data_sets.DATA}")
    here = ["cluster.workers=0", f"cluster.threads_per_process={options.threads}", "log.keep=1"]
    run, _ = trained(corpus, data_sets.preset(options.name, here, options.method))
    config = RerankTraining(model=data_sets.MINILM, queries=options.queries, epochs=options.epochs)
    out = run.path / f"reranker-{options.queries}-{options.epochs}"
    if not out.exists():
        begin = time.perf_counter()
        train_reranker(str(run.path), corpus, out, config)
        print(f"trained in {(time.perf_counter() - begin) / 60:.1f} minutes", flush=True)
    plain = Retriever.load(bundle_of(run, corpus))
    reordered = plain.reranked_by(out)
    retrievers = {
        "of the bundle": plain,
        "read again": reordered,
        "by the cross-encoder alone": without_own_score(reordered),
    }
    header = ["answers", *METRICS, "ms a query"]
    rows: list[list[object]] = []
    evaluations = {}
    for name, retriever in retrievers.items():
        evaluations[name] = measure_bundle(retriever, corpus, "test")
        values = [f"{100 * evaluations[name].metrics[metric]:.1f}" for metric in METRICS]
        rows.append([name, *values, f"{one_query_ms(retriever, corpus):.1f}"])
    notes = [f"{options.method} on {options.name}, MiniLM, epochs: {options.epochs}"]
    notes += data_sets.paired_notes(
        evaluations["read again"], evaluations["of the bundle"], METRICS
    )
    assert reordered.reranker is not None
    weight = reordered.reranker.config.weight
    notes.append(f"weight of the bundle's score, chosen on held-out queries: {weight:.3g}")
    notes.append(load)
    write_table("reranking.md", "Answers read again by a cross-encoder", header, rows, notes)


def without_own_score(retriever: Retriever) -> Retriever:
    """The retriever whose answers are in the order of the cross-encoder's scores alone."""
    reranker = retriever.reranker
    assert reranker is not None
    config = dataclasses.replace(reranker.config, weight=0.0)
    return dataclasses.replace(retriever, reranker=dataclasses.replace(reranker, config=config))


def one_query_ms(retriever: Retriever, corpus: Corpus) -> float:
    """Mean time of a search of one text, ms."""
    split = corpus.split("test")
    texts = split.texts(np.arange(min(TIMED, len(split))))
    retriever.search(texts[:1])
    begin = time.perf_counter()
    for text in texts:
        retriever.search([text])
    return 1000 * (time.perf_counter() - begin) / len(texts)


if __name__ == "__main__":
    main()
