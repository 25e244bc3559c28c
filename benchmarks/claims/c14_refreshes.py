"""Claim 14 (ASTRA): hard negatives that start earlier and are refreshed more often are better."""

from __future__ import annotations

from claim import Claim, Comparison, main
from variants import SGD, Training, present

CORPUS = "tate-subjects"
# Random rows need hard negatives to find what is near, and few columns leave it to them. Of claim 17's best ratio, a
# quarter of its negatives.
SETTINGS = (
    *SGD,
    "method.init=random",
    "method.init_std=0.02",  # the preset's deviation is for rows that start as texts
    "data.augment_with_labels=false",
    "encoder.dim=128",
    "negatives.uniform=120",
    "negatives.hard=15",
    "optim.epochs=40",
)
PAPER = {
    "start 10": "47.13 - 46.29",
    "start 20": "47.13 - 46.24",
    "every 10": "47.13 - 46.28",
    "every 20": "47.13 - 46.02",
}


def make(full: bool) -> Claim:
    schedules = {
        "start 5, every 5": (5, 5),
        "start 10": (10, 5),
        "start 20": (20, 5),
        "every 10": (5, 10),
        "every 20": (5, 20),
    }
    variants = {}
    if present(CORPUS):
        variants = {name: training(full, *times) for name, times in schedules.items()}
    return Claim(
        number=14,
        title="ASTRA: early and frequent refreshes",
        statement="Hard negatives that start at epoch 5 and are refreshed every 5 epochs beat those of 10 and 20",
        source="ASTRA, Tables 7 and 8; paper's numbers of LF-Amazon-131K",
        variants=variants,
        comparisons=[
            Comparison(of="start 5, every 5", against=other, low=0, paper=paper)
            for other, paper in PAPER.items()
        ],
        setup=f"{CORPUS}, static encoder of 128 dimensions, settings of `astra/{CORPUS}` but SGD, with random rows,"
        " 40 epochs, 120 uniform labels of a batch and 15 hard negatives of a query, without label texts as queries.",
        metrics=("P@1", "P@5", "PSP@5"),
    )


def training(full: bool, start: int, every: int) -> Training:
    """ASTRA with hard negatives from epoch `start` on, new after `every` epochs."""
    times = [f"negatives.start_epoch={start}", f"negatives.refresh_every={every}"]
    return Training(
        method="astra",
        corpus=CORPUS,
        preset=f"astra/{CORPUS}",
        settings=[*SETTINGS, *times],
        full=full,
    )


if __name__ == "__main__":
    main(make)
