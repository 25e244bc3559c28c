"""Claim 12 (RAE-XMC): lambda trades rare labels for frequent ones."""

from __future__ import annotations

from claim import Claim, Comparison, main
from memories import HEAD, LARGE, WEIGHTS, curves, sets, trained


def make(full: bool) -> Claim:
    here = sets()
    parts = {"head": {"low": 0.0}, "tail": {"high": 0.0}}
    return Claim(
        number=12,
        title="RAE-XMC: head and tail by lambda",
        statement="The more training queries weigh, the better frequent labels are found and the worse rare ones",
        source="RAE-XMC, Table 2",
        variants={corpus: trained(corpus, full) for corpus in here},
        comparisons=[
            Comparison(
                of=corpus,
                metric=f"{part} R@5 lambda={more:g}",
                against_metric=f"{part} R@5 lambda={less:g}",
                **bound,
            )
            for corpus in here
            for part, bound in parts.items()
            for more, less in ((0.9, 0.1), (1, 0))
        ],
        setup=f"The trainings of claim 11. Head: labels with more than {HEAD} training queries. R@5: the share of a"
        " part's positives of the test split that are among the first 5 answers.",
        metrics=[
            f"{part} R@5 lambda={weight:g}" for part in parts for weight in (0, 0.1, 0.5, 0.9, 1)
        ],
        seeds=10,
        slow=[corpus for corpus in here if corpus in LARGE],
        plot=lambda results: curves(
            "RAE-XMC by lambda", results, ("head R@5", "tail R@5"), "lambda", WEIGHTS
        ),
    )


if __name__ == "__main__":
    main(make)
