"""Claim 16 (DEXML): hard negatives from a cache of label vectors are at least as good as stale ones."""

from __future__ import annotations

from claim import Claim, Comparison, Training, main, present


def make(full: bool) -> Claim:
    here = present(*(("msdocs-seealso", "tate-subjects") if full else ("sample", "cdnjs-keywords")))
    batch = 512 if full else 128
    # One hard negative for each query of a batch on either side, so that the columns are about as many.
    stale = [
        "method.columns=hard",
        "method.hard_per_query=1",
        "negatives.hard=20",
        "negatives.start_epoch=2",
    ]
    cached = ["method.columns=cache", f"method.cache_hard={batch}"]

    def training(corpus: str, *settings: str) -> Training:
        settings = (*settings, f"optim.batch_size={batch}")
        return Training(
            method="dexml", corpus=corpus, preset="dexml/sample", settings=settings, full=full
        )

    return Claim(
        number=16,
        title="DEXML: hard negatives from the embedding cache",
        statement="Hard negatives chosen with cached label vectors, refreshed as labels are encoded, reach at least the"
        " P@1 of those from a stale index",
        source="DEXML, Table 13",
        variants={
            f"{corpus}, {name}": training(corpus, *settings)
            for corpus in here
            for name, settings in {
                "cache": cached,
                "stale": [*stale, "negatives.refresh_every=2"],
                "in-batch": ["method.columns=in_batch"],
            }.items()
        },
        comparisons=[
            Comparison(of=f"{corpus}, cache", against=f"{corpus}, stale", low=0) for corpus in here
        ],
        setup=f"{' and '.join(here)}, static encoder, decoupled softmax, settings of `dexml/sample`; {batch} queries a"
        f" batch, their positives, and {batch} hard negatives: the labels with the largest gradients by the cache, or"
        " one for each query from its 20 nearest labels, found anew every 2 epochs. In-batch alone is shown for comparison.",
        metrics=("P@1", "P@5", "PSP@5", "R@100"),
        reason="the difference is at most as large as what seeds differ by. With two thousand labels and a refresh"
        " every 2 epochs, of 19 to 27 steps each, the stale list is nearly fresh.",
    )


if __name__ == "__main__":
    main(make)
