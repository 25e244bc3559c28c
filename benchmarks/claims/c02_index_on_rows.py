"""Claim 2 (ASTRA): hard negatives of the mixture are better found among classifier rows than among label texts."""

from __future__ import annotations

from c01_mixture import CORPUS, training
from claim import Claim, Comparison, main
from variants import present

ON_LABELS = "method.index_on=labels"


def make(full: bool) -> Claim:
    variants = {}
    if present(CORPUS):
        variants = {
            "mixture, rows": training(full),
            "mixture, label texts": training(full, ON_LABELS),
        }
    return Claim(
        number=2,
        title="ASTRA: what the index is built on",
        statement="For the mixture an index on classifier rows beats one on label embeddings",
        source="ASTRA, Table 5",
        variants=variants,
        comparisons=[
            Comparison(
                of="mixture, rows",
                against="mixture, label texts",
                low=0,
                paper="46.20 - 45.55; 47.13 - 45.79; 84.88 - 81.40",
            ),
        ],
        setup=f"{CORPUS}, trainings as in claim 1.",
        metrics=("P@1", "P@5", "PSP@5"),
    )


if __name__ == "__main__":
    main(make)
