"""Claim 6 (DEXML): a dual encoder learns random pairs of texts by heart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from claim import Claim, Comparison, main
from random_texts import corpus, random_texts, write_texts
from variants import Result, Training, answers

from xmcray.data.corpus import Corpus
from xmcray.evaluation.charts import Series, line_chart
from xmcray.nn.encoder import load_encoder
from xmcray.training.run import Run
from xmcray.training.step import encode_without_graph

VOCABULARY = 30_000
LENGTH = 16
TESTED = 20_000
BATCH = 1000
# P@1 of some queries is taken every two epochs
EPOCHS = 8
OFTEN = 2
SHOWN = 2000


def make(full: bool) -> Claim:
    sizes = [20_000, 100_000, 1_000_000] if full else [20_000, 100_000]
    return Claim(
        number=6,
        title="DEXML: random pairs by heart",
        statement="A dual encoder of fixed width is no bottleneck: 100,000 pairs of random texts are memorised",
        source="DEXML, Table 10",
        variants={f"{pairs:,} pairs": training(pairs, full) for pairs in sizes},
        comparisons=[
            Comparison(of=f"{pairs:,} pairs", low=99.9, paper="100 with 100,000 pairs")
            for pairs in sizes
        ],
        setup=f"Pairs of texts of {LENGTH} random words of {VOCABULARY:,}; the queries trained on are the test, up to"
        f" {TESTED:,} of them, searched exactly among all labels. Static encoder (a bag of tokens, 256 wide), decoupled"
        f" softmax over the labels of a batch of {BATCH:,}, {EPOCHS} epochs.",
        plot=curves,
    )


def training(pairs: int, full: bool) -> Training:
    settings = {
        "encoder.dim": 256,
        "encoder.residual": False,
        "encoder.idf": False,
        "method.columns": "in_batch",
        "method.temperature": 0.05,
        "optim.lr": 3e-3,
        "optim.warmup_steps": 20,
        "optim.batch_size": BATCH,
        "optim.epochs": EPOCHS,
        "log.checkpoint_every": OFTEN * pairs // BATCH,
        "log.keep": EPOCHS,
    }
    return Training(
        method="dexml",
        corpus=lambda seed: random_pairs(pairs),
        settings=[f"{name}={value}" for name, value in settings.items()],
        measure_run=over_epochs,
        full=full,
    )


def over_epochs(run: Run, corpus: Corpus) -> Result:
    """The metrics of the end, and P@1 of some queries at every checkpoint."""
    rows = np.arange(min(SHOWN, len(corpus.split("test"))))
    right_B = torch.from_numpy(corpus.split("test").positives(rows).values)
    shares = []
    for step in sorted(run.checkpoints.glob("step-*")):
        encoder = load_encoder(step / "encoder")
        query_BD = encode_without_graph(encoder, corpus.split("test").tokens(rows))
        label_LD = encode_without_graph(
            encoder, corpus.label_tokens(np.arange(corpus.card.num_labels))
        )
        found_B = (query_BD @ torch.nn.functional.normalize(label_LD).T).argmax(dim=1)
        shares.append(float((found_B == right_B).double().mean()))
    return {**answers(run, corpus), "P@1 curve": shares}


def curves(results: Mapping[str, Mapping[int, Result]]) -> str:
    """P@1 over epochs, the mean of the seeds."""
    epochs = np.arange(OFTEN, EPOCHS + 1, OFTEN, dtype=float)
    lines = {
        name: [found["P@1 curve"] for found in by_seed.values()]
        for name, by_seed in results.items()
        if by_seed
    }
    series = [Series(name, epochs, 100 * np.mean(shares, axis=0)) for name, shares in lines.items()]
    return line_chart("DEXML: random pairs, P@1", series, y_title="percent", x_title="epochs")


def random_pairs(pairs: int) -> Corpus:
    """Query i and label i are random texts; some of the training queries are the test queries."""

    def write(folder: Path) -> None:
        generator = np.random.default_rng(pairs)
        labels = random_texts(generator, pairs, LENGTH, VOCABULARY)
        queries = [
            (text, [i]) for i, text in enumerate(random_texts(generator, pairs, LENGTH, VOCABULARY))
        ]
        write_texts(
            folder, labels, train=queries, test=queries[:: max(1, pairs // TESTED)][:TESTED]
        )

    return corpus(f"pairs-{pairs}", VOCABULARY, write, 0, layers=1, width=16)[0]


if __name__ == "__main__":
    main(make)
