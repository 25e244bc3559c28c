"""Claim 9 (UniDEC): answers by text and classifier together, the normalised loss, and what hard negatives trade."""

from __future__ import annotations

import dataclasses
from typing import Any

from claim import Claim, Comparison, main
from variants import Result, Training, answers, present

from xmcray.data.corpus import Corpus
from xmcray.training.run import Run

CORPUS = "tate-subjects"
# The paper's pool (beta 3, eta 6, a shortlist of 5 eta) and its clusters, which grow sooner in fewer epochs.
SETTINGS = (
    "method.num_positives=3",
    "method.hard_per_query=6",
    "method.balance=0.5",
    "negatives.hard=30",
    "negatives.start_epoch=2",
    "negatives.refresh_every=2",
    "negatives.cluster_size=4",
    "negatives.cluster_doubles=[5, 8]",
    "optim.epochs=10",
)


def make(full: bool) -> Claim:
    variants = {}
    if present(CORPUS):
        variants = {
            "PAL-N": unidec(full),
            "PAL": unidec(full, "method.normaliser=pal"),
            "no hard negatives": unidec(full, "negatives.hard=0"),
            "no clusters": unidec(full, "negatives.cluster_size=0"),
        }
    of = "PAL-N"
    none = "no hard negatives"
    return Claim(
        number=9,
        title="UniDEC: two heads, one answer",
        statement="The concatenation of both heads answers at least as well as either; PAL-N is at least as good as"
        " PAL; hard negatives raise P@k and lower PSP@k on dense data",
        source="UniDEC, Tables 5, 6 and 7; paper's numbers of LF-Amazon-131K (heads) and LF-AmazonTitles-1.3M (hard)",
        variants=variants,
        comparisons=[
            Comparison(of=of, against_metric="text P@1", low=0, paper="48.00 - 44.50"),
            Comparison(of=of, against_metric="classifier P@1", low=0, paper="48.00 - 47.59"),
            Comparison(of=of, against="PAL", low=0, paper="1 to 2"),
            Comparison(of=of, metric="P@1", against=none, low=0, paper="53.79 - 48.36"),
            Comparison(of=of, metric="P@5", against=none, low=0),
            Comparison(of=of, metric="PSP@1", against=none, high=0, paper="32.19 - 34.03"),
            Comparison(of=of, metric="PSP@5", against=none, high=0),
        ],
        setup=f"{CORPUS} (18.5 training queries a label), static encoder, settings of `unidec/{CORPUS}` with 10 epochs;"
        " 3 positives and 6 of 30 hard negatives of a query, half the loss for the classifier, clusters of 4 queries"
        " and more, new every 2 epochs. The heads are compared on the same trained model. Random batches ('no"
        " clusters') are shown for comparison.",
        metrics=("P@1", "text P@1", "classifier P@1", "P@5", "PSP@1", "PSP@5"),
        seeds=10,
        slow=list(variants),
    )


def unidec(full: bool, *settings: str) -> Training:
    """UniDEC on the dense set, with other settings."""
    return Training(
        method="unidec",
        corpus=CORPUS,
        preset=f"unidec/{CORPUS}",
        settings=[*SETTINGS, *settings],
        measure_run=by_part,
        full=full,
    )


def by_part(run: Run, corpus: Corpus) -> Result:
    """Metrics of both heads together, and as "text P@1" and "classifier P@1" those of either."""
    result: dict[str, Any] = {"hits": {}}
    for part in ("both", "text", "classifier"):
        method = dataclasses.replace(run.config.method, answer_by=part)
        view = dataclasses.replace(run, config=dataclasses.replace(run.config, method=method))
        prefix = "" if part == "both" else f"{part} "
        metrics = answers(view, corpus, bundle=part)
        for name, digits in metrics.pop("hits").items():
            result["hits"][prefix + name] = digits
        for name, value in metrics.items():
            result[prefix + name] = value
    return result


if __name__ == "__main__":
    main(make)
