"""Claim 20 (ASTRA, Renée): label texts as training queries of their own label raise accuracy."""

from __future__ import annotations

from claim import Claim, Comparison, main
from variants import Training, present

# So many epochs of the queries have as many steps as the preset's 20 and 10 epochs of queries and label texts.
EPOCHS = {"sample": 38, "cdnjs-keywords": 17}
PAPER = {"P@1": "1.4 and 2.0", "PSP@5": ""}


def make(full: bool) -> Claim:
    corpora = present("sample", "cdnjs-keywords")
    variants = {}
    comparisons = []
    for corpus in corpora:
        without = f"{corpus}, queries alone"
        variants[corpus] = training(full, corpus, "true")
        variants[without] = training(full, corpus, "false", f"optim.epochs={EPOCHS[corpus]}")
        variants[f"{without}, as many epochs"] = training(full, corpus, "false")
        for metric, paper in PAPER.items():
            comparisons.append(
                Comparison(of=corpus, metric=metric, against=without, low=0, paper=paper)
            )
    return Claim(
        number=20,
        title="ASTRA: label texts as training queries",
        statement="Label texts added to the training queries, each with its own label, raise accuracy",
        source="ASTRA, ablation; paper's numbers of LF-AmazonTitles-131K and LF-Wikipedia-500K",
        variants=variants,
        comparisons=comparisons,
        setup=f"{' and '.join(corpora)}, static encoder, settings of `astra/` and the set, but rows start at random, so"
        " that they know no label text without the augmentation. Queries alone have more epochs, so that both trainings"
        " have as many steps; those with as many epochs are shown for comparison.",
        metrics=("P@1", "P@5", "PSP@1", "PSP@5"),
        seeds=10,
        reason="on cdnjs-keywords queries alone with as many epochs, and so fewer steps, are far behind in both measures."
        " So what label texts gain there are steps.",
    )


def training(full: bool, corpus: str, augment: str, *settings: str) -> Training:
    """ASTRA with or without label texts among the queries."""
    return Training(
        method="astra",
        corpus=corpus,
        preset=f"astra/{corpus}",
        # The preset's deviation is for rows that start as texts.
        settings=[
            "method.init=random",
            "method.init_std=0.02",
            f"data.augment_with_labels={augment}",
            *settings,
        ],
        full=full,
    )


if __name__ == "__main__":
    main(make)
