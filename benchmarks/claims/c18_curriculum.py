"""Claim 18 (ASTRA): a curriculum of hard negatives, found among rows or among label texts."""

from __future__ import annotations

from c01_mixture import CORPUS, training
from c02_index_on_rows import ON_LABELS
from claim import Claim, Comparison, main
from variants import present

# Hard negatives grow to their number over half of the epochs that have them.
CURRICULUM = "negatives.curriculum=4"


def make(full: bool) -> Claim:
    variants = {}
    if present(CORPUS):
        variants = {
            "mixture, rows": training(full),
            "curriculum, rows": training(full, CURRICULUM),
            "curriculum, label texts": training(full, CURRICULUM, ON_LABELS),
        }
    return Claim(
        number=18,
        title="ASTRA: a curriculum of hard negatives",
        statement="With a curriculum too an index on classifier rows beats one on label embeddings; the mixture on rows"
        " is as good without a curriculum",
        source="ASTRA, Table 5",
        variants=variants,
        comparisons=[
            Comparison(of="curriculum, rows", against="curriculum, label texts", low=0),
            Comparison(of="mixture, rows", against="curriculum, rows", low=-1),
        ],
        setup=f"{CORPUS}, trainings as in claim 1; the number of hard negatives grows to 30 over 4 epochs. 'As good' is"
        " within a point; the limit is ours.",
        metrics=("P@1", "P@5", "PSP@5"),
    )


if __name__ == "__main__":
    main(make)
