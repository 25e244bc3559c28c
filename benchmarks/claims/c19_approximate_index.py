"""Claim 19 (ASTRA): hard negatives of an approximate index are as good as those of exact search."""

from __future__ import annotations

from claim import Claim, Comparison, main
from variants import STEADY_SGD, Training, present

CORPUS = "tate-subjects"
INDEXES = {"exact": "Flat", "inverted lists": "IVF128,SQfp16", "graph": "HNSW32"}


def make(full: bool) -> Claim:
    variants = {}
    if present(CORPUS):
        variants = {name: training(full, index) for name, index in INDEXES.items()}
    return Claim(
        number=19,
        title="ASTRA: exact or approximate hard negatives",
        statement="An approximate index with a recall of 0.9 and more leads to the same accuracy as exact search",
        source="ASTRA, section 3.2 (FAISS and DiskANN)",
        variants=variants,
        comparisons=[
            Comparison(of=name, against="exact", low=-1, high=1)
            for name in INDEXES
            if name != "exact"
        ],
        setup=f"{CORPUS}, static encoder of 128 dimensions, settings of `astra/{CORPUS}` but SGD with a rate of 150"
        " and 8 epochs, without label texts as queries; 480 uniform labels of a batch and 60 hard negatives of a query"
        " from epoch 3 on, new every 2 epochs. The indexes are tuned as in every training. 'The same' is within a point;"
        " the limit is ours.",
        metrics=("P@1", "P@5", "PSP@5"),
    )


def training(full: bool, index: str) -> Training:
    """ASTRA with an index of this kind."""
    return Training(
        method="astra",
        corpus=CORPUS,
        preset=f"astra/{CORPUS}",
        settings=[
            *STEADY_SGD,
            "optim.epochs=8",
            "encoder.dim=128",
            "data.augment_with_labels=false",
            "negatives.uniform=480",
            "negatives.hard=60",
            "negatives.start_epoch=3",
            "negatives.refresh_every=2",
            f"negatives.index={index}",
        ],
        full=full,
    )


if __name__ == "__main__":
    main(make)
