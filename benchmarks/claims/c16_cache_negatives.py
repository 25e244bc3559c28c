"""Claim 16 (DEXML): hard negatives from a cache of label vectors are at least as good as stale ones."""

from __future__ import annotations

from claim import Claim, Comparison, main
from variants import Training, present

CORPUS = "tate-subjects"
BATCH = 512
EPOCHS = 12
# One hard negative for each query of a batch on either side, so that the columns are about as many. The stale list is
# made once, after the first epoch, and ten epochs old at the end.
STALE = (
    "method.columns=hard",
    "method.hard_per_query=1",
    "negatives.hard=20",
    "negatives.start_epoch=2",
    "negatives.refresh_every=10",
)
CACHED = ("method.columns=cache", f"method.cache_hard={BATCH}")
IN_BATCH = ("method.columns=in_batch",)


def make(full: bool) -> Claim:
    variants = {}
    if present(CORPUS):
        variants = {
            "cache": training(full, *CACHED),
            "stale": training(full, *STALE),
            "in-batch": training(full, *IN_BATCH),
        }
    return Claim(
        number=16,
        title="DEXML: hard negatives from the embedding cache",
        statement="Hard negatives chosen with cached label vectors, refreshed as labels are encoded, reach at least the"
        " P@1 of those from a stale index",
        source="DEXML, Table 13",
        variants=variants,
        comparisons=[Comparison(of="cache", against="stale", low=0)],
        setup=f"{CORPUS}, static encoder, decoupled softmax, settings of `dexml/{CORPUS}` with {EPOCHS} epochs; {BATCH}"
        f" queries a batch, their positives, and {BATCH} hard negatives: the labels with the largest gradients by the"
        " cache, or one for each query from its 20 nearest labels, found once after the first epoch. In-batch alone is"
        " shown for comparison.",
        metrics=("P@1", "P@5", "PSP@5", "R@100"),
    )


def training(full: bool, *settings: str) -> Training:
    """DEXML with other columns."""
    common = [f"optim.batch_size={BATCH}", f"optim.epochs={EPOCHS}"]
    return Training(
        method="dexml",
        corpus=CORPUS,
        preset=f"dexml/{CORPUS}",
        settings=[*common, *settings],
        full=full,
    )


if __name__ == "__main__":
    main(make)
