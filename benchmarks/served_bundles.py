"""The bundles whose serving is measured, and what they do in process."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import recall_of

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("XMCRAY_BENCHMARK_CACHE", ROOT / "runs" / "benchmarks")) / "serve"
K = 10
BATCH = 32
QUERIES = 2048
SINGLES = 1024
CHECKED = 20


def bundle_folder(name: str, num_labels: int) -> Path:
    """A folder with `bundle` and queries.json, from the cache if it was made before."""
    folder = CACHE / (name if name == "sample" else f"{name}-{num_labels}")
    if not (folder / "queries.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        if name == "sample":
            queries = sample_bundle(folder)
        else:
            queries = synthetic_bundle(folder / "bundle", num_labels)
        (folder / "queries.json").write_text(json.dumps(queries), encoding="utf-8")
    return folder


def sample_bundle(folder: Path) -> list[str]:
    """ASTRA with the committed preset on the embedded sample; its test queries."""
    import data_sets

    from xmcray.training.export import export_run
    from xmcray.training.launch import train

    corpus = data_sets.corpus("sample")
    config = data_sets.preset("sample", ["cluster.workers=0"])
    run = train(corpus.path, folder / "run", config)
    export_run(run, folder / "bundle", corpus)
    test = corpus.split("test")
    num_queries = min(len(test), QUERIES)
    return test.texts(np.arange(num_queries))


def synthetic_bundle(
    path: Path, num_labels: int, dim: int = 256, recall: float = 0.95
) -> list[str]:
    """A bundle of labels with random words, found by the vectors of their texts; returns queries.

    A label has the four words of one of num_labels / 100 topics, and two words of its own. A query is a label's text with
    one of its own words replaced, so its best answers are the label and others of its topic.
    """
    import torch

    from xmcray.data.tokens import train_wordpiece
    from xmcray.nn.heads import Head
    from xmcray.nn.static import StaticEncoder
    from xmcray.retrieval.bundle_writer import BundleLabels, BundleModel, write_bundle
    from xmcray.retrieval.index_spec import IndexSpec
    from xmcray.retrieval.index_tuning import TUNE_QUERIES
    from xmcray.retrieval.shards import ShardBuild
    from xmcray.types import spans

    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    distinct_words = set()
    for _ in range(20_000):
        length = draw.randint(3, 9)
        distinct_words.add("".join(draw.choices(letters, k=length)))
    words = sorted(distinct_words)
    topics = [draw.choices(words, k=4) for _ in range(max(1, num_labels // 100))]
    labels = []
    for number in range(num_labels):
        topic = topics[number % len(topics)]
        labels.append([*topic, *draw.choices(words, k=2)])
    texts = [" ".join(label) for label in labels]
    queries = []
    for label in draw.choices(labels, k=QUERIES + TUNE_QUERIES):
        query_words = [*label[:5], draw.choice(words)]
        queries.append(" ".join(query_words))
    tokenizer = train_wordpiece(words * 2, vocab_size=30_000, max_len=32)
    encoder = StaticEncoder(torch.ones(tokenizer.vocab_size), dim, residual=False)
    encoder.reset(0)

    def vectors(block: Sequence[str]) -> np.ndarray:
        with torch.inference_mode():
            return encoder(tokenizer.encode(block)).float().numpy()

    blocks = (vectors(texts[span]) for span in spans(num_labels, 8192))
    model = BundleModel(encoder=encoder, head=Head(dim), tokenizer=tokenizer, method="synthetic")
    all_labels = BundleLabels(
        uids=(f"l{i}" for i in range(num_labels)),
        texts=texts,
        order=np.arange(num_labels),
        vectors=blocks,
    )
    build = ShardBuild(
        spec=IndexSpec(recall=recall),
        queries=vectors(queries[QUERIES:]),
        threads=os.cpu_count() or 1,
    )
    write_bundle(path, model, all_labels, build, {"benchmark": "serve_load"})
    return queries[:QUERIES]


def in_process(folder: Path, threads: int) -> dict[str, Any]:
    """Latency of one text, ms; texts/s with 32 at once and with all; recall; the first answers."""
    from xmcray.retrieval.retriever import Retriever

    retriever = Retriever.load(folder / "bundle", threads=threads)
    queries = read_queries(folder)
    batches = [queries[start : start + BATCH] for start in range(0, len(queries), BATCH)]
    retriever.search(queries[:256], K)  # pages of the index are read
    single_s = [timed(retriever.search, [text], K) for text in queries[:SINGLES]]
    batch_s = sum(timed(retriever.search, batch, K) for batch in batches)
    all_s = timed(retriever.search, queries, K)
    tokens = retriever.tokenizer.encode(queries[:512])
    approximate = retriever.top_labels(tokens, K)
    exact = retriever.top_labels(tokens, K, exact=True)
    uids = []
    for query in queries[:CHECKED]:
        (answers,) = retriever.search([query], K)
        uids.append([answer.uid for answer in answers])
    p50, p99 = 1000 * np.percentile(single_s, [50, 99])
    kind = "exhaustive" if retriever.is_exact else "IVF"
    return {
        "p50": p50,
        "p99": p99,
        "batch_texts_per_s": len(queries) / batch_s,
        "all_texts_per_s": len(queries) / all_s,
        "recall": recall_of(approximate.ids, exact.ids, K),
        "uids": uids,
        "size": f"{retriever.num_labels:,} x {retriever.settings.dim}, {kind}",
    }


def read_queries(folder: Path) -> list[str]:
    queries: list[str] = json.loads((folder / "queries.json").read_text(encoding="utf-8"))
    # Whole batches only.
    return queries[: len(queries) // BATCH * BATCH]


def timed(function: Callable[..., object], *arguments: object) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin
