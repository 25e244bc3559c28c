"""Trainings on a GPU, and what a step of each may cost; for a pretended device and for a real one."""

from __future__ import annotations

from dataclasses import dataclass

COMMON = [
    "encoder.dim=16",
    "optim.epochs=3",
    "optim.batch_size=32",
    "optim.warmup_steps=2",
    "negatives.start_epoch=2",
    "negatives.refresh_every=1",
    "data.validation=0.1",
    "log.validate_every=1",
    "log.every=2",
]
NUM_LABELS = 40


@dataclass(frozen=True, slots=True)
class Case:
    """A run and what one of its steps may cost.

    Attributes:
        method: Name of the method.
        syncs: How often the host may wait for the device. All cases have one in the gradient of the
            token table, whose distinct rows are counted.
        copies: Copies from the host. The tokens are one, each dropout mask is one, and the listed
            pairs are one for each loss.
        launches: Kernels; ranks differ a little.
        settings: After those of all cases.
        ranks: How many train together.
        exchanged: Bytes that collectives of a rank may get.
        corpus: Name of the corpus.
    """

    method: str
    syncs: int
    copies: int
    launches: int
    settings: tuple[str, ...] = ()
    ranks: int = 1
    exchanged: int = 0
    corpus: str = "corpus"


CASES = {
    "astra": Case("astra", 1, 4, 130),
    "astra, all labels": Case("astra", 1, 4, 100, ("method.exact=true",)),
    "astra, weight decay": Case(
        "astra",
        1,
        4,
        150,
        ("method.classifier.weight_decay=0.01", "method.classifier.storage=bfloat16"),
    ),
    "astra, nearest texts": Case(
        "astra",
        1,
        5,
        130,
        ("method.index_on=labels", "method.max_positives=1", "method.init=texts"),
    ),
    "astra, adam": Case(
        "astra",
        1,
        3,
        140,
        ("method.classifier.kind=adam", "method.classifier.lr=0.01", "method.dropout=0"),
    ),
    "astra, adagrad": Case(
        "astra", 1, 4, 130, ("method.classifier.kind=adagrad", "method.classifier.lr=0.05")
    ),
    # Each prefix asks whether it reads the rows that the first one has read, and moves its inputs.
    "astra, prefixes": Case("astra", 3, 10, 250, ("encoder.matryoshka=[4,8]",)),
    "renee": Case("renee", 1, 4, 100),
    # Five chunks of labels instead of one. Decay makes each step bring all rows up to date.
    "renee, chunks": Case(
        "renee", 1, 4, 160, ("method.chunk_labels=8", "method.classifier.weight_decay=0.01")
    ),
    "renee, centroids": Case("renee", 1, 4, 100, ("method.init=centroids",)),
    "dexml": Case("dexml", 1, 4, 160),
    # The fifth copy is k of each query. After each of Newton's steps the host asks whether to stop.
    "dexml, soft top k": Case("dexml", 14, 5, 600, ("method.loss=soft_top_k",)),
    "dexml, softmax": Case(
        "dexml", 1, 6, 170, ("method.loss=softmax", "method.num_positives=1", "method.dropout=0.2")
    ),
    "dexml, bce": Case("dexml", 1, 3, 130, ("method.loss=bce",)),
    "dexml, hard": Case("dexml", 1, 4, 160, ("method.columns=hard", "negatives.hard=5")),
    "dexml, in batch": Case(
        "dexml", 1, 4, 130, ("method.columns=in_batch", "method.normalised=false")
    ),
    # The fifth copy are the probabilities.
    "dexml, logQ": Case("dexml", 1, 5, 170, ("method.columns=in_batch", "method.log_q=true")),
    # Mining sends the labels with the largest gradients to the host, and encodes twice.
    "dexml, cache": Case("dexml", 3, 11, 270, ("method.columns=cache", "method.cache_hard=8")),
    # Nine chunks of texts are encoded twice, and each counts the distinct rows of its tokens.
    "dexml, micro-batches": Case("dexml", 9, 21, 540, ("optim.micro_batch=8",)),
    # Two losses in two directions, dropout of three kinds of vectors, and queries without it for the
    # index.
    "unidec": Case("unidec", 1, 15, 380),
    "unidec, texts": Case("unidec", 1, 9, 250, ("method.balance=1",)),
    "unidec, rows": Case(
        "unidec",
        1,
        9,
        230,
        ("method.balance=0", "method.init=random", "method.classifier.kind=sgd"),
    ),
    "unidec, sums": Case(
        "unidec",
        1,
        15,
        370,
        (
            "method.reduction=sum_per_query",
            "method.normaliser=pal",
            "method.classifier_positives=1",
        ),
    ),
    # The regulariser takes a mean over terms whose number depends on the scores.
    "prime": Case("prime", 4, 8, 440),
    "prime, means": Case(
        "prime",
        4,
        8,
        390,
        (
            "method.reduction=mean",
            "method.num_negatives=0",
            "method.regulariser_hinge=false",
            "method.positives=uniform",
        ),
    ),
    "prime, hard": Case(
        "prime",
        4,
        8,
        440,
        ("negatives.hard=5", "method.margin_inverted=true", "method.weights_detached=true"),
    ),
    "prime, clusters": Case("prime", 4, 8, 440, ("negatives.cluster_size=4",)),
    "rae": Case("rae", 1, 4, 160),
    "rae, labels alone": Case("rae", 1, 4, 160, ("method.query_negatives=false",)),
    # Ranks also count the rows of their token tables, and those that all of them touch.
    "astra, ranks": Case("astra", 3, 4, 160, ranks=3, exchanged=32_000),
    "dexml, ranks": Case("dexml", 3, 4, 200, ranks=3, exchanged=64_000),
    "renee, ranks": Case("renee", 3, 4, 130, ranks=3, exchanged=32_000),
    "unidec, ranks": Case("unidec", 3, 15, 420, ranks=3, exchanged=52_000),
    "rae, ranks": Case("rae", 3, 4, 200, ranks=3, exchanged=44_000),
    "prime, ranks": Case("prime", 9, 8, 520, ranks=3, exchanged=200_000),
    # All rows of a transformer's token table are updated, so nothing is counted.
    "transformer": Case("astra", 0, 5, 340, corpus="model-corpus"),
    "dexml, transformer": Case("dexml", 0, 5, 380, corpus="model-corpus"),
    # The vectors of a batch are looked up on the host, and copied.
    "frozen transformer": Case("astra", 0, 4, 80, ("encoder.frozen=true",), corpus="model-corpus"),
    "transformer, ranks": Case(
        "astra", 0, 5, 360, ranks=3, exchanged=64_000, corpus="model-corpus"
    ),
}
TRANSFORMERS = [name for name, case in CASES.items() if case.corpus == "model-corpus"]
LEARNING = [name for name in TRANSFORMERS if "encoder.frozen=true" not in CASES[name].settings]
SERVED = [
    "astra",
    "renee",
    "dexml",
    "unidec",
    "prime",
    "rae",
    "transformer",
    "dexml, transformer",
    "astra, ranks",
]
RESUMED = [
    "astra",
    "renee",
    "dexml, cache",
    "unidec",
    "prime",
    "rae",
    "transformer",
    "astra, ranks",
]
SMALL_BATCH = ("optim.batch_size=256", "data.augment_with_labels=false", "encoder.dim=32")
HARD = (*SMALL_BATCH, "negatives.hard=10")
RANK_OF_EIGHT = (
    "optim.batch_size=1024",
    "negatives.hard=10",
    "negatives.uniform=1000",
    "data.augment_with_labels=false",
    "method.init=zeros",
)
# Method, settings, labels and ranks of a step. Ranks other than the first do not exist: what the first
# one sends comes back from each. So methods that exchange labels (PRIME, the cache of DEXML) have one.
OF_A_RANK = {
    # As many labels as public data sets have, and a hundred times more.
    "astra, few labels": ("astra", ("encoder.dim=64", *RANK_OF_EIGHT), 1_305_265, 8),
    "astra, many labels": ("astra", ("encoder.dim=2", *RANK_OF_EIGHT), 120_000_000, 8),
}
# Other methods that score some labels, with ten times more of them.
for method, ranks, settings in (
    ("dexml", 8, (*HARD, "method.columns=hard")),
    ("unidec", 8, HARD),
    ("prime", 1, (*HARD, "method.free_vectors=1024")),
    ("rae", 8, HARD),
):
    OF_A_RANK[f"{method}, few labels"] = (method, settings, 130_000, ranks)
    OF_A_RANK[f"{method}, many labels"] = (method, settings, 1_305_265, ranks)
SAMPLED = ["astra", "dexml", "unidec", "prime", "rae"]
# Methods that score all labels.
OF_A_RANK |= {
    "renee, few labels": ("renee", (*SMALL_BATCH, "method.init=zeros"), 20_000, 8),
    "renee, many labels": ("renee", (*SMALL_BATCH, "method.init=zeros"), 200_000, 8),
    "dexml, a rank": ("dexml", SMALL_BATCH, 8000, 8),
    "dexml, soft top k, a rank": ("dexml", (*SMALL_BATCH, "method.loss=soft_top_k"), 8000, 8),
    "dexml, softmax, a rank": ("dexml", (*SMALL_BATCH, "method.loss=softmax"), 8000, 8),
    "dexml, bce, a rank": ("dexml", (*SMALL_BATCH, "method.loss=bce"), 8000, 8),
    "dexml, cache, a rank": ("dexml", (*SMALL_BATCH, "method.columns=cache"), 8000, 1),
}
