"""Claim 13 (RAE-XMC): in-batch queries as negatives help; answers get better with more keys, and then no more."""

from __future__ import annotations

from claim import Claim, Comparison, main
from memories import KEYS, curves, sets, trained
from variants import present

BIG_BATCH = (
    "optim.batch_size=2048",
    "optim.epochs=10",
    "method.temperature=0.04",
)
WITH_QUERIES = "msdocs-seealso"
LABELS_ALONE = "msdocs-seealso, labels alone"


def make(full: bool) -> Claim:
    here = sets()
    variants = {corpus: trained(corpus, full) for corpus in here}
    comparisons = []
    if present(WITH_QUERIES):
        variants[WITH_QUERIES] = trained(WITH_QUERIES, full, *BIG_BATCH)
        alone = ("method.query_negatives=false",)
        variants[LABELS_ALONE] = trained(WITH_QUERIES, full, *BIG_BATCH, *alone)
        comparisons += [
            Comparison(of=WITH_QUERIES, metric=metric, against=LABELS_ALONE, low=0)
            for metric in ("P@1", "P@5")
        ]
    for corpus in here:
        comparisons += rises_and_saturates(corpus)
    return Claim(
        number=13,
        title="RAE-XMC: queries as negatives, number of keys",
        statement="The other queries of a batch as negatives help; results rise with b and saturate",
        source="RAE-XMC, Table 3 and App. B.1",
        variants=variants,
        comparisons=comparisons,
        setup="Number of keys: the trainings of claim 11, with lambda 0.5 and the temperature that validation chose for"
        " b = 200. Saturated: 1,000 keys are within half a point of 200. Queries as negatives: msdocs-seealso, batches"
        " of 2,048 (the paper has 7,168), temperature 0.04, 10 epochs, against labels alone (a plain decoupled"
        " softmax); both are measured under the memory with lambda 0.5.",
        metrics=(
            "P@1",
            "P@5",
            "P@1 b=1",
            "P@1 b=10",
            "P@1 b=200",
            "P@1 b=1000",
            "P@5 b=10",
            "P@5 b=1000",
        ),
        seeds=10,  # of tate-subjects too: five do not decide whether it is saturated
        slow=[name for name in variants if name.startswith(("wordnet-hypernyms", WITH_QUERIES))],
        plot=lambda results: curves(
            "RAE-XMC by b", {name: results[name] for name in here}, ("P@1", "P@5"), "b", KEYS
        ),
    )


def rises_and_saturates(corpus: str) -> list[Comparison]:
    """More keys help at first, and change little after 200."""
    comparisons = []
    for metric, few in (("P@1", 1), ("P@5", 10)):
        many = f"{metric} b=200"
        more = f"{metric} b=1000"
        comparisons += [
            Comparison(of=corpus, metric=many, against_metric=f"{metric} b={few}", low=0),
            Comparison(of=corpus, metric=more, against_metric=many, low=-0.5, high=0.5),
        ]
    return comparisons


if __name__ == "__main__":
    main(make)
