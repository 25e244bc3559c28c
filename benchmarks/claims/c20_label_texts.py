"""Claim 20 (ASTRA, Renée): label texts as training queries of their own label raise accuracy."""

from __future__ import annotations

from claim import Claim, Comparison, main
from data_sets import preset
from variants import Training, open_corpus, present

PAPER = {"P@1": "1.4 and 2.0", "PSP@5": ""}


def make(full: bool) -> Claim:
    corpora = present("sample", "cdnjs-keywords")
    variants = {}
    comparisons = []
    for corpus in corpora:
        without = f"{corpus}, queries alone"
        variants[corpus] = training(full, corpus, True)
        variants[without] = training(full, corpus, False)
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
        " have as many steps.",
        metrics=("P@1", "P@5", "PSP@1", "PSP@5"),
        seeds=10,
    )


def training(full: bool, corpus: str, with_labels: bool) -> Training:
    """ASTRA with or without label texts among the queries, with as many steps."""
    # The preset's deviation is for rows that start as texts.
    settings = [
        "method.init=random",
        "method.init_std=0.02",
        f"data.augment_with_labels={str(with_labels).lower()}",
    ]
    if not with_labels:
        settings.append(f"optim.epochs={epochs_of_queries(corpus)}")
    return Training(
        method="astra", corpus=corpus, preset=f"astra/{corpus}", settings=settings, full=full
    )


def epochs_of_queries(corpus: str) -> int:
    """So many epochs of the queries have as many steps as the preset's epochs of queries and label texts."""
    opened = open_corpus(corpus)
    epochs = preset(corpus).optim.epochs
    num_texts = opened.card.num_train + opened.card.num_labels
    return round(epochs * num_texts / opened.card.num_train)


if __name__ == "__main__":
    main(make)
