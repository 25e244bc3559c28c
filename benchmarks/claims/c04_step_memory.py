"""Claim 4 (ASTRA): what a step holds besides the rows does not grow with the number of labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from claim import Claim, Comparison, main, mean
from classifier_step import HARD, POOL, POSITIVES, QUERIES, Case
from peak_memory import Peak, in_child
from variants import Measured, Result

from xmcray.evaluation.charts import Series, line_chart

DIM = 64


def make(full: bool) -> Claim:
    sizes = [10**5, 10**6] if full else [10**4, 3 * 10**4, 10**5]
    few = sizes[0]
    many = sizes[-1]
    largest = 10**7 if full else 10**6
    variants = {f"{kind}, {labels:,}": measured(kind, labels) for kind in STEPS for labels in sizes}
    variants[f"sampled, {largest:,}"] = measured("sampled", largest)
    growth = many // few
    return Claim(
        number=4,
        title="ASTRA: activation memory by labels",
        statement="The scores of a step on sampled labels need the same memory for any number of labels",
        source="ASTRA, Table 4",
        variants=variants,
        comparisons=[
            Comparison(
                of=f"sampled, {largest:,}",
                metric="MB",
                against=f"sampled, {many:,}",
                ratio=True,
                high=1.2,
                paper="3.8 / 2.1 GB",
            ),
            Comparison(
                of=f"all scores, {many:,}",
                metric="MB",
                against=f"all scores, {few:,}",
                ratio=True,
                low=growth / 2,
                paper="2,549 / 128 GB",
            ),
            Comparison(
                of=f"all scores, {many:,}",
                metric="MB",
                against=f"sampled, {many:,}",
                ratio=True,
                low=1,
            ),
        ],
        setup=f"Peak memory of one step of the classifier, less what was there before it, in a process of its own:"
        f" {QUERIES} queries, {POSITIVES} positives and {HARD} hard negatives each, {POOL:,} uniform labels, rows of"
        f" {DIM}. 'All scores' is the plain loss, whose scores and their gradients exist at once, as the paper counts"
        " Renée's; xmcray's exact loss ('exact in chunks') holds the scores of 2,048 labels, and the gradient of all"
        " rows. Steps with 10,000 labels meet fewer distinct ones than they ask for. The limits 1.2 and"
        f" {growth / 2:g} are ours.",
        metrics=("MB",),
        plot=lambda results: by_labels(results, [*sizes, largest]),
    )


def measured(kind: str, labels: int) -> Measured:
    return Measured(function=step_memory, settings={"kind": kind, "labels": labels})


def by_labels(results: Mapping[str, Mapping[int, Result]], sizes: list[int]) -> str:
    """Megabytes against the number of labels."""
    series = [
        Series(
            kind,
            np.array(sizes, float),
            np.array([mean(results.get(f"{kind}, {n:,}", {}), "MB") for n in sizes]),
        )
        for kind in STEPS
    ]
    return line_chart(
        "ASTRA: peak memory of the classifier's step", series, y_title="MB", x_title="labels"
    )


def step_memory(seed: int, kind: str, labels: int) -> Result:
    """Peak memory of a step in a child."""
    return in_child(Path(__file__).stem, "one_step", seed=seed, kind=kind, labels=labels)


def one_step(seed: int, kind: str, labels: int) -> dict[str, float]:
    """In the child: one small step first, so that libraries have what they keep."""
    torch.set_num_threads(1)
    for size in (3000, labels):
        case = Case(size, DIM)
        case.step = 1000 * seed
        case.inputs()
        with Peak() as peak:
            STEPS[kind](case)
    return {"MB": peak.mb}


def all_scores(case: Case) -> None:
    """The step with B x L scores, as one writes it down first."""
    batch, _ = case.inputs()
    query_GD = case.query()
    row_LD = case.table.weight_SD.requires_grad_()
    score_GL = query_GD @ row_LD.T
    target_GL = torch.zeros_like(score_GL)
    target_GL[
        torch.from_numpy(batch.positives.row_ids), torch.from_numpy(batch.positives.values)
    ] = 1
    loss = F.binary_cross_entropy_with_logits(score_GL, target_GL, reduction="sum") / len(query_GD)
    loss.backward()
    assert row_LD.grad is not None
    with torch.no_grad():
        row_LD -= 0.05 * row_LD.grad


STEPS: Mapping[str, Callable[[Case], None]] = {
    "sampled": lambda case: case.sampled(keep=False),
    "all scores": all_scores,
    "exact in chunks": lambda case: case.exact(keep=False),
}


if __name__ == "__main__":
    main(make)
