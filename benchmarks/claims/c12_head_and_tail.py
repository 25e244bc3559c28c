"""Claim 12 (RAE-XMC): lambda trades rare labels for frequent ones."""

from __future__ import annotations

from claim import Claim, Comparison, main
from memories import HEAD, LARGE, WEIGHTS, curves, sets, tail_shares, trained

# Where the change of each part lies, according to the claim.
PARTS = {"head": {"low": 0.0}, "tail": {"high": 0.0}}


def make(full: bool) -> Claim:
    corpora = sets()
    comparisons = []
    for corpus in corpora:
        for part, bound in PARTS.items():
            for more, less in ((0.9, 0.1), (1, 0)):
                change = Comparison(
                    of=corpus,
                    metric=f"{part} R@5 lambda={more:g}",
                    against_metric=f"{part} R@5 lambda={less:g}",
                    **bound,
                )
                comparisons.append(change)
    metrics = []
    for part in PARTS:
        metrics += [f"{part} R@5 lambda={weight:g}" for weight in (0, 0.1, 0.5, 0.9, 1)]
    return Claim(
        number=12,
        title="RAE-XMC: head and tail by lambda",
        statement="The more training queries weigh, the better frequent labels are found and the worse rare ones",
        source="RAE-XMC, Table 2",
        variants={corpus: trained(corpus, full) for corpus in corpora},
        comparisons=comparisons,
        setup=f"The trainings of claim 11. Head: labels with more than {HEAD} training queries. R@5: the share of a"
        " part's positives of the test split that are among the first 5 answers. Test positives of the tail:"
        f" {tail_shares(corpora)}.",
        metrics=metrics,
        seeds=10,
        slow=[corpus for corpus in corpora if corpus in LARGE],
        plot=lambda results: curves(
            "RAE-XMC by lambda", results, ("head R@5", "tail R@5"), "lambda", WEIGHTS
        ),
    )


if __name__ == "__main__":
    main(make)
