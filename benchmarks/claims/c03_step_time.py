"""Claim 3 (ASTRA): the time of a step does not grow with the number of labels, that of the exact loss does."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from claim import Claim, Comparison, main, mean
from classifier_step import HARD, POOL, POSITIVES, QUERIES, Case
from variants import Measured, Result

from xmcray.evaluation.charts import Series, line_chart

DIM = 64


def make(full: bool) -> Claim:
    sizes = [10**5, 10**6, 10**7] if full else [10**5, 3 * 10**5, 10**6]
    # A step on all labels takes seconds, so it is measured with fewer of them.
    exact_sizes = sizes if full else [3 * 10**4, 10**5, 3 * 10**5]
    few = sizes[0]
    many = sizes[-1]
    exact_few = exact_sizes[0]
    exact_many = exact_sizes[-1]

    def measured(labels: int, exact: bool) -> Measured:
        settings = {"labels": labels, "exact": exact, "steps": 3 if exact else 20}
        return Measured(function=step_time, settings=settings)

    growth = exact_many // exact_few
    return Claim(
        number=3,
        title="ASTRA: step time by labels",
        statement="A step on sampled labels takes the same time for any number of labels, one on all grows with it",
        source="ASTRA, Table 3",
        variants={
            **{f"sampled, {labels:,}": measured(labels, False) for labels in sizes},
            **{f"exact, {labels:,}": measured(labels, True) for labels in exact_sizes},
        },
        comparisons=[
            Comparison(
                of=f"sampled, {many:,}",
                metric="ms",
                against=f"sampled, {few:,}",
                ratio=True,
                high=2,
                paper="49 / 38 ms from 131,000 to 20 million",
            ),
            Comparison(
                of=f"exact, {exact_many:,}",
                metric="ms",
                against=f"exact, {exact_few:,}",
                ratio=True,
                low=growth / 2,
                paper="275 / 35 ms, encoder included",
            ),
        ],
        setup=f"The classifier's part of a step (drawing, reading rows, scores, loss, gradients, SGD with momentum) on"
        f" one thread, in CPU time: {QUERIES} queries, {POSITIVES} positives and {HARD} hard negatives each, {POOL:,} uniform"
        f" labels, rows of {DIM}; median of a few steps. The paper's times are of the whole step. That flat means at"
        f" most twice and linear at least {growth / 2:g} times for {growth} times the labels is ours."
        " `benchmarks/classifier_step.py` has the finer measurement.",
        metrics=("ms",),
        plot=lambda results: by_labels(results, {"sampled": sizes, "exact": exact_sizes}),
    )


def by_labels(
    results: Mapping[str, Mapping[int, Result]], sizes: Mapping[str, Sequence[int]]
) -> str:
    """Milliseconds against the number of labels.

    Args:
        results: of each variant, by seed.
        sizes: numbers of labels of each kind of step.
    """
    series = []
    for kind, labels in sizes.items():
        times = [mean(results.get(f"{kind}, {number:,}", {}), "ms") for number in labels]
        series.append(Series(kind, np.array(labels, float), np.array(times)))
    return line_chart(
        "ASTRA: the classifier's part of a step", series, y_title="ms", x_title="labels"
    )


def step_time(seed: int, labels: int, exact: bool, steps: int) -> Result:
    """Median CPU time of a step, after two that do not count."""
    torch.set_num_threads(1)
    case = Case(labels, DIM, clock=time.process_time)
    case.step = 1000 * seed  # other queries and labels
    for number in range(steps + 2):
        (case.exact if exact else case.sampled)(keep=number >= 2)
    return {"ms": 1e3 * case.median}


if __name__ == "__main__":
    main(make)
