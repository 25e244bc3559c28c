"""Claim 8 (DEXML): with gradient caching, all labels are negatives in memory that does not grow with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from claim import Claim, Comparison, main, mean
from peak_memory import Peak, in_child
from random_texts import corpus, random_texts, write_texts
from variants import Measured, Result

from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.evaluation.charts import Series, line_chart
from xmcray.training.loop import build
from xmcray.training.run_config import RunConfig

VOCABULARY = 1000
LENGTH = 8
QUERIES = 512
DIM = 32
COPIES = 4  # L x d floats: vectors of the encoder and of unit length, and the gradients of both


def make(full: bool) -> Claim:
    micro_batch, sizes = (2048, [20_000, 200_000]) if full else (1000, [2_000, 6_000, 20_000])

    def measured(labels: int, cached: bool) -> Measured:
        settings = {"labels": labels, "micro_batch": micro_batch if cached else 0, "gpu": full}
        return Measured(function=step_memory, settings=settings)

    few = f"{sizes[0]:,} labels"
    many = f"{sizes[-1]:,} labels"
    return Claim(
        number=8,
        title="DEXML: memory by labels with a gradient cache",
        statement="With gradient caching the memory of a step on all labels hardly grows with their number",
        source="DEXML, Table 8 and App. B.5",
        variants={
            **{f"{labels:,} labels": measured(labels, True) for labels in sizes},
            **{f"{labels:,} labels, no cache": measured(labels, False) for labels in sizes},
        },
        comparisons=[
            Comparison(
                of=many,
                metric="MB apart from L x d",
                against=few,
                ratio=True,
                high=1.2,
                paper="flat",
            ),
            Comparison(of=many, metric="MB", against=few, ratio=True, high=2),
            Comparison(
                of=f"{many}, no cache", metric="MB", against=f"{few}, no cache", ratio=True, low=5
            ),
        ],
        setup=f"Peak memory of one training step, less what was there before it, in a process of its own: {QUERIES}"
        f" queries against all labels, texts of {LENGTH} tokens, a transformer of 2 layers and width 128 with {DIM}"
        f" outputs, micro-batches of {micro_batch:,} texts. The L x d table is {COPIES} arrays of that shape: the"
        " vectors before and after they are given length 1, and the gradients of both. The limits 2 and 5 are ours.",
        metrics=("MB", "MB apart from L x d"),
        plot=lambda results: by_labels(results, sizes),
    )


def by_labels(results: Mapping[str, Mapping[int, Result]], sizes: list[int]) -> str:
    """Peak memory against the number of labels."""
    series = [
        Series(
            name,
            np.array(sizes, float),
            np.array([mean(results.get(f"{n:,} labels{end}", {}), "MB") for n in sizes]),
        )
        for name, end in (("gradient cache", ""), ("none", ", no cache"))
    ]
    return line_chart("DEXML: peak memory of a step", series, y_title="MB", x_title="labels")


def step_memory(seed: int, labels: int, micro_batch: int, gpu: bool) -> Result:
    """Peak memory of the second step; the first one makes what stays."""
    texts(labels)  # prepared by this process, so that the child's memory is the step's
    step = in_child(
        Path(__file__).stem, "one_step", seed=seed, labels=labels, micro_batch=micro_batch, gpu=gpu
    )
    table_mb = COPIES * labels * DIM * 4 / 1e6
    return {**step, "MB apart from L x d": step["MB"] - table_mb}


def one_step(seed: int, labels: int, micro_batch: int, gpu: bool) -> dict[str, float]:
    """In the child: a small step first, so that libraries and optimiser have what they keep."""
    torch.set_num_threads(1)
    device = "cuda" if gpu and torch.cuda.is_available() else "cpu"
    data, model = texts(labels)
    settings = [
        f"encoder.name={model}",
        f"encoder.dim={DIM}",
        f"optim.micro_batch={micro_batch}",
        f"optim.seed={seed}",
    ]
    config = RunConfig.resolve(
        "dexml", {}, [*settings, "data.validation=0", f"optim.batch_size={QUERIES}"]
    )
    setup = build(config, TrainingData(data, config.data), torch.device(device))
    setup.stepper.encoder(setup.data.tokens(np.arange(8))).sum().backward()
    setup.stepper.optimizer.step(0.0)
    batch = setup.sampler.batch(0, 0, 1)
    with Peak(device) as peak:
        setup.stepper.step(batch, None)
    return {"MB": peak.mb}


def texts(labels: int) -> tuple[Corpus, Path]:
    """Random texts of equal length; the encoder tells them apart by nothing but words."""

    def write(folder: Path) -> None:
        generator = np.random.default_rng(labels)
        queries = random_texts(generator, QUERIES, LENGTH, VOCABULARY)
        train = [(text, [int(generator.integers(labels))]) for text in queries]
        write_texts(
            folder,
            random_texts(generator, labels, LENGTH, VOCABULARY),
            train=train,
            test=train[:10],
        )

    return corpus(f"memory-{labels}", VOCABULARY, write, 0, layers=2, width=128)


if __name__ == "__main__":
    main(make)
