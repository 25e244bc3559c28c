"""Claim 23 (UniDEC): training both parts beats either alone."""

from __future__ import annotations

import dataclasses

from c09_unidec import CORPUS, unidec
from claim import Claim, Comparison, main
from variants import Training, answers, present

SHARES = {"classifier alone": 0.0, "0.3": 0.3, "0.5": 0.5, "0.7": 0.7, "SupconDE": 1.0}


def make(full: bool) -> Claim:
    variants = {}
    if present(CORPUS):
        for name, share in SHARES.items():
            variants[name] = training(full, share)
    return Claim(
        number=23,
        title="UniDEC: the share of each part in the loss",
        statement="A share of 0.3 to 0.5 for the dual encoder is better than 1 (SupconDE) and 0 (the classifier alone)",
        source="UniDEC, Eq. of L and its λ",
        variants=variants,
        comparisons=[
            Comparison(of=of, against=against, low=0)
            for of in ("0.3", "0.5")
            for against in ("classifier alone", "SupconDE")
        ],
        setup=f"{CORPUS}, trainings as in claim 9 with other shares of the loss.",
        metrics=("P@1", "P@5", "PSP@1", "PSP@5"),
        slow=list(variants),
    )


def training(full: bool, share: float) -> Training:
    """UniDEC with this share of the dual encoder; a part without a share answers nothing."""
    both = unidec(full, f"method.balance={share}")
    if share in (0, 1):
        return dataclasses.replace(both, measure_run=answers)
    return both


if __name__ == "__main__":
    main(make)
