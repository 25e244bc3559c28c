"""Claim 25 (RAE-XMC): a memory also lifts an encoder that another method trained."""

from __future__ import annotations

from claim import Claim, Comparison, main
from memories import LARGE, WEIGHTS, by_added_memory, curves, sets, tail_shares
from variants import HELD_OUT, Training


def make(full: bool) -> Claim:
    here = sets()
    return Claim(
        number=25,
        title="RAE-XMC: a memory on a trained DEXML",
        statement="Training queries as keys, with lambda 0.5, raise the P@1 of an encoder that DEXML trained",
        source="RAE-XMC, Table 5",
        variants={corpus: training(full, corpus) for corpus in here},
        comparisons=[
            Comparison(of=corpus, metric="P@1 lambda=0.5", against_metric="P@1 lambda=0", low=0)
            for corpus in here
        ],
        setup=f"{', '.join(here)}; static encoder, settings of `dexml/` and the set. The memory is put on the finished"
        " encoder, and its temperature is chosen on training queries that were held out.",
        reason="as in claim 11: votes come from labels with many training queries. The share of the others among the test"
        f" positives: {tail_shares(here)}. PSP@5 falls on all four sets.",
        metrics=("P@1 lambda=0", "P@1 lambda=0.5", "P@1 lambda=1", "PSP@5 lambda=0", "PSP@5"),
        seeds=10,
        slow=[corpus for corpus in here if corpus in LARGE],
        plot=lambda results: curves("A memory on DEXML", results, ("P@1",), "lambda", WEIGHTS),
    )


def training(full: bool, corpus: str) -> Training:
    """DEXML with the preset of its corpus; a tenth of its queries choose the temperature."""
    return Training(
        method="dexml",
        corpus=corpus,
        preset=f"dexml/{corpus}",
        settings=[f"data.validation={HELD_OUT}"],
        measure_run=by_added_memory,
        full=full,
    )


if __name__ == "__main__":
    main(make)
