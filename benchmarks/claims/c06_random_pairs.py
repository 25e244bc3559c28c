"""Claim 6 (DEXML): a dual encoder learns random pairs of texts by heart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from claim import Claim, Comparison, Result, Training, main, mean
from random_texts import corpus, random_texts, write_texts

from xmcray.data.corpus import Corpus
from xmcray.evaluation.charts import Series, line_chart

VOCABULARY, LENGTH, TESTED = 30_000, 16, 20_000
EPOCHS = (1, 2, 4, 8, 16)


def make(full: bool) -> Claim:
    sizes = [20_000, 100_000, 1_000_000] if full else [20_000, 50_000]
    required = sizes[0] if not full else sizes[1]

    def training(pairs: int, epochs: int) -> Training:
        return Training(
            method="dexml",
            corpus=lambda seed: random_pairs(pairs),
            settings=[
                "encoder.dim=256",
                "encoder.residual=false",
                "encoder.idf=false",
                "method.columns=in_batch",
                "method.temperature=0.05",
                "optim.lr=3e-3",
                "optim.batch_size=1000",
                f"optim.epochs={epochs}",
            ],
            full=full,
        )

    most = EPOCHS[-1]
    return Claim(
        number=6,
        title="DEXML: random pairs by heart",
        statement="A dual encoder of fixed width is no bottleneck: 100,000 pairs of random texts are memorised",
        source="DEXML, Table 10",
        variants={
            **{named(required, epochs): training(required, epochs) for epochs in EPOCHS},
            **{named(pairs, most): training(pairs, most) for pairs in sizes if pairs != required},
        },
        comparisons=[
            Comparison(of=named(pairs, most), low=99.9, paper="100 with 100,000 pairs")
            for pairs in sizes
            if pairs >= required
        ],
        setup=f"Pairs of texts of {LENGTH} random words of {VOCABULARY:,}; the queries trained on are the test, up to"
        f" {TESTED:,} of them, searched exactly among all labels. Static encoder (a bag of tokens, 256 wide), decoupled"
        " softmax over the labels of a batch of 1,000.",
        plot=lambda results: curve(results, required),
    )


def named(pairs: int, epochs: int) -> str:
    return f"{pairs:,} pairs, {epochs} epoch{'s' if epochs > 1 else ''}"


def curve(results: Mapping[str, Mapping[int, Result]], pairs: int) -> str:
    """P@1 by number of epochs, each a training of its own."""
    share = np.array([mean(results.get(named(pairs, epochs), {}), "P@1") for epochs in EPOCHS])
    title = f"DEXML: {pairs:,} random pairs, P@1"
    return line_chart(title, [Series("P@1", np.array(EPOCHS, float), share)], y_title="percent", x_title="epochs")


def random_pairs(pairs: int) -> Corpus:
    """Query i and label i are random texts; some of the training queries are the test queries."""

    def write(folder: Path) -> None:
        generator = np.random.default_rng(pairs)
        labels = random_texts(generator, pairs, LENGTH, VOCABULARY)
        queries = [(text, [i]) for i, text in enumerate(random_texts(generator, pairs, LENGTH, VOCABULARY))]
        write_texts(folder, labels, train=queries, test=queries[:: max(1, pairs // TESTED)][:TESTED])

    return corpus(f"pairs-{pairs}", VOCABULARY, write, 0, layers=1, width=16)[0]


if __name__ == "__main__":
    main(make)
