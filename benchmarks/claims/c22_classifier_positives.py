"""Claim 22 (UniDEC): further positives for the classifier alone help it on dense data."""

from __future__ import annotations

from c09_unidec import CORPUS, unidec
from claim import Claim, Comparison, main
from variants import present

TWO_POSITIVES = "method.num_positives=2"
EXTRA = "method.classifier_positives=6"


def make(full: bool) -> Claim:
    variants = {}
    if present(CORPUS):
        variants = {
            "2 and 6 for the classifier": unidec(full, TWO_POSITIVES, EXTRA),
            "2 positives": unidec(full, TWO_POSITIVES),
        }
    of = "2 and 6 for the classifier"
    return Claim(
        number=22,
        title="UniDEC: positives for the classifier (pos-clf)",
        statement="Where queries have many labels, six further positives of each in the classifier's pool raise P@5",
        source="UniDEC, Table 6 (pos-clf)",
        variants=variants,
        comparisons=[
            Comparison(of=of, metric="classifier P@5", against="2 positives", low=0),
            Comparison(of=of, metric="P@5", against="2 positives", low=0),
        ],
        setup=f"{CORPUS} (6.4 labels a query), trainings as in claim 9 with 2 drawn positives of a query.",
        metrics=("P@1", "P@5", "classifier P@1", "classifier P@5", "PSP@5"),
        slow=list(variants),
    )


if __name__ == "__main__":
    main(make)
