"""Claim 11 (RAE-XMC): a memory of training queries and labels, for trained and untrained encoders."""

from __future__ import annotations

from claim import Claim, Comparison, main
from memories import (
    LARGE,
    WEIGHTS,
    curves,
    sets,
    tail_shares,
    trained,
    untrained,
    untrained_minilm,
)

HALF = "P@1 lambda=0.5"
LABELS = "P@1 lambda=0"


def make(full: bool) -> Claim:
    here = sets()
    variants = {corpus: trained(corpus, full) for corpus in here}
    raw = {f"{corpus}, untrained": untrained(corpus) for corpus in here}
    if (minilm := untrained_minilm()) is not None:
        raw["sample, MiniLM untrained"] = minilm
    comparisons = []
    for corpus in here:
        for other, paper in {
            LABELS: "45.16 - 42.58",
            "P@1 lambda=1": "45.16 - 44.40",
            "P@1 apart": "",
        }.items():
            comparisons.append(
                Comparison(of=corpus, metric=HALF, against_metric=other, low=0, paper=paper)
            )
    comparisons += [
        Comparison(of=name, metric=HALF, against_metric=LABELS, low=5, paper="35.6 - 21.4")
        for name in raw
    ]
    return Claim(
        number=11,
        title="RAE-XMC: training queries and labels in one memory",
        statement="Lambda 0.5 beats 0 (labels alone) and 1 (training queries alone); one memory with one softmax beats"
        " two searches (OvA + kNN); a memory lifts an untrained encoder by a lot",
        source="RAE-XMC, Tables 4, 5 and 8; paper's numbers of LF-AmazonTitles-131K",
        variants={**variants, **raw},
        comparisons=comparisons,
        setup=f"{', '.join(here)}; static encoder, settings of `rae/` and the set. One training answers for every"
        " lambda, with b = 200. The temperatures of lambda 0.5, of lambda 1 and of `apart` (Eq. 11 with lambda 0.5) are"
        " each chosen on the tenth of the training queries that the encoder was not trained on; these queries vote, too."
        " Untrained: random rows of tokens, and the weights of all-MiniLM-L6-v2 where they are installed (nothing is"
        ' drawn there, so all seeds are equal). "A lot" is taken to be 5 points.',
        metrics=(
            "P@1 lambda=0",
            "P@1 lambda=0.5",
            "P@1 lambda=1",
            "P@1 apart",
            "P@5 lambda=0",
            "P@5 lambda=0.5",
            "P@5 lambda=1",
        ),
        seeds=10,
        slow=[name for name in [*variants, *raw] if name.startswith(LARGE)],
        plot=lambda results: curves(
            "RAE-XMC by lambda",
            results,
            ("P@1",),
            "lambda",
            WEIGHTS,
        ),
        reason="lambda 0.5 finds more of the labels with many training queries and fewer of the others (claim 12). The"
        f" share of the others among the test positives: {tail_shares(here)}.",
    )


if __name__ == "__main__":
    main(make)
