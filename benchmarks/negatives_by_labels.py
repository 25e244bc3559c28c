"""From how many labels on, and up to how many uniform negatives, do hard ones pay? ASTRA on planted near-duplicates.

    python benchmarks/negatives_by_labels.py                              # prints what is to be done, then trains
    python benchmarks/negatives_by_labels.py --labels 10000 100000 --seeds 3      # a part
    python benchmarks/negatives_by_labels.py --labels 2000 --quick        # does it work?

A product with variants: ten labels share four words, and each has one of fifty attributes as its fifth. A query holds
three of the four words, the attribute and two words of noise. What tells a label from its nine siblings is the
attribute alone, and any other label lacks the four words. So a uniform negative teaches little, unless it happens to be
a sibling: with c uniform negatives and L labels, a batch has 9·c/L of a query's siblings.

All trainings have the same settings but for c. With fewer than 100,000 labels, and so fewer queries, they have more
epochs, so that all have enough steps. Exact search. Results are kept in results/negatives_by_labels.json, so the
command can be stopped at any time and started again.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import data_sets
import numpy as np
import synthetic
import torch
from ablation import known_or_measured, spread
from common import new_parser, refuse_if_busy, write_table
from store import KEPT, Result, Store

from xmcray.data.chunks import PackedShard
from xmcray.data.corpus import Corpus
from xmcray.retrieval.retriever import Retriever
from xmcray.training.run_config import RunConfig
from xmcray.types import Int64Array, Ragged

SIBLINGS = 10
GROUP_WORDS = 4
ATTRIBUTES = 50
NOISE_WORDS = 2
VOCABULARY = 30_000
QUERIES_PER_LABEL = 2
TEST_QUERIES = 2000
LEAST_EPOCHS = 10
ENOUGH_LABELS = 100_000  # with fewer labels a training has as many steps as with these
HARD = 20
UNIFORM_ALONE = "uniform"
SIBLING = "sibling"  # share of the queries whose first answer is a sibling of the right one
SETTINGS = [
    "encoder.dim=64",
    "optim.batch_size=512",
    "optim.lr=3e-3",
    "optim.matmul=bf16",
    "data.augment_with_labels=false",
    "method.init=texts",
    "method.init_std=0.4",
    "method.importance_weight=none",
    "method.classifier.lr=300",
    "method.classifier.momentum=0",
]
VARIANTS = {
    UNIFORM_ALONE: ["negatives.hard=0"],
    # A fifth of the epochs come before the first hard negatives, and each version serves for a fifth.
    "uniform and hard": [
        f"negatives.hard={HARD}",
        "negatives.start_epoch={fifth}",
        "negatives.refresh_every={fifth}",
    ],
}
STORE = Store("negatives_by_labels")


@dataclass(frozen=True, order=True, slots=True)
class Point:
    """What trainings of several seeds have in common.

    Attributes:
        num_labels: of the corpus.
        num_uniform: uniform negatives of a batch.
        variant: a key of VARIANTS.
    """

    num_labels: int
    num_uniform: int
    variant: str = UNIFORM_ALONE


SIZES = (
    Point(1000, 2000),
    Point(10_000, 2000),
    Point(100_000, 200),
    Point(100_000, 2000),
    Point(100_000, 16_000),
    Point(1_000_000, 2000),
)
Results = dict[Point, dict[int, Result]]


def main() -> None:
    arguments = parse_arguments()
    if arguments.quick:
        STORE.path = data_sets.CACHE / "negatives_by_labels_quick.json"  # no results for the page
        arguments.out = Path(os.devnull)
        arguments.override += [
            "optim.epochs=3",
            "negatives.start_epoch=2",
            "negatives.refresh_every=1",
        ]
    load = refuse_if_busy(arguments.anyway or arguments.quick)
    torch.set_num_threads(arguments.threads)
    results = results_of(arguments)
    rows = [table_row(point, results) for point in sorted(results)]
    sizes = (
        f"{SIBLINGS} labels share {GROUP_WORDS} words; {QUERIES_PER_LABEL} training queries for each label;"
        f" {TEST_QUERIES:,} test queries"
    )
    notes = [
        f"planted near-duplicates: {sizes}",
        f"{' '.join(SETTINGS)}; hard: {HARD} for each query from a fifth of the epochs on, new after each further fifth",
        "percent; mean over seeds with its 95 % interval (Student's t); the gain over uniform negatives alone is paired"
        " by seed",
        "siblings in a batch: of a query, among the uniform negatives; sibling first: the first answer is another label"
        " with the same four words",
        KEPT,
        load,
    ]
    header = ["labels", "uniform negatives", "siblings in a batch", "negatives", "seeds", "P@1"]
    header += ["gain", "P@5", "sibling first", "epochs", "CPU minutes"]
    write_table(arguments.out, "Hard negatives by the number of labels", header, rows, notes)


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(
        __doc__,
        out="negatives_by_labels.md",
        threads=os.cpu_count() or 1,
        minutes=True,
        anyway=True,
    )
    every = sorted({size.num_labels for size in SIZES})
    parser.add_argument("--labels", type=int, nargs="+", choices=every, default=every)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny epochs, printed only")
    parser.add_argument(
        "--override", nargs="+", default=[], metavar="a.b=c", help="settings over those here"
    )
    return parser.parse_args()


def results_of(arguments: argparse.Namespace) -> Results:
    """Results by point and seed: those that are kept, and those measured now."""
    deadline = time.monotonic() + 60 * arguments.minutes
    settings = [*arguments.override, *data_sets.measured_settings(arguments.threads)]
    results: Results = {}
    sizes = [size for size in SIZES if size.num_labels in arguments.labels]
    # One seed of everything before the next.
    for seed in range(arguments.seeds):
        for size in sizes:
            corpus = near_duplicates(size.num_labels)
            further = functools.partial(sibling_share, corpus)
            for variant in VARIANTS:
                point = replace(size, variant=variant)
                config = config_of(point, seed, settings)
                result = known_or_measured(STORE, corpus, config, deadline, further)
                if result is not None:
                    results.setdefault(point, {})[seed] = result
                    print(f"{point}, seed {seed}: {result}", flush=True)
    return results


def config_of(point: Point, seed: int, settings: list[str]) -> RunConfig:
    """The settings of a training. Few labels have few queries, and more epochs."""
    epochs = max(LEAST_EPOCHS, LEAST_EPOCHS * ENOUGH_LABELS // point.num_labels)
    lines = [
        *SETTINGS,
        f"negatives.uniform={point.num_uniform}",
        f"optim.epochs={epochs}",
        *(line.format(fifth=epochs // 5) for line in VARIANTS[point.variant]),
        f"optim.seed={seed}",
        *settings,
    ]
    return RunConfig.resolve("astra", {}, lines)


def near_duplicates(num_labels: int) -> Corpus:
    """A corpus of labels that differ from nine others by one word."""
    name = f"near-duplicates-{num_labels}"
    tokenizer = synthetic.word_tokenizer(VOCABULARY, GROUP_WORDS + 1 + NOISE_WORDS)
    return synthetic.kept(name, 1000 * num_labels, tokenizer, lambda: shards(num_labels))


def shards(num_labels: int) -> Iterator[PackedShard]:
    """The labels, and queries of them."""
    generator = np.random.default_rng(0)
    num_groups = -(-num_labels // SIBLINGS)
    words_GW = generator.integers(2 + ATTRIBUTES, VOCABULARY, size=(num_groups, GROUP_WORDS))
    # The siblings of a group have different attributes.
    order_GA = generator.random((num_groups, ATTRIBUTES)).argsort(axis=1)
    attribute_L = 2 + order_GA[:, :SIBLINGS].reshape(-1)[:num_labels]
    group_L = np.arange(num_labels) // SIBLINGS

    def packed(
        split: str, tokens_BT: Int64Array, label_B: Int64Array | None
    ) -> Iterator[PackedShard]:
        for number, start in enumerate(range(0, len(tokens_BT), synthetic.SHARD_ROWS)):
            rows = slice(start, start + synthetic.SHARD_ROWS)
            labels = None if label_B is None else one_each(label_B[rows, None])
            tokens = one_each(tokens_BT[rows])
            yield synthetic.packed_shard(split, number, tokens, labels, VOCABULARY)

    yield from packed("labels", np.column_stack([words_GW[group_L], attribute_L]), None)
    # Every label has its training queries, in random order.
    label_of_query = {
        "train": generator.permutation(QUERIES_PER_LABEL * num_labels) % num_labels,
        "test": generator.integers(num_labels, size=TEST_QUERIES),
    }
    for split, label_B in label_of_query.items():
        num_queries = len(label_B)
        order_BW = generator.random((num_queries, GROUP_WORDS)).argsort(axis=1)[:, 1:]
        words_BW = np.take_along_axis(words_GW[group_L[label_B]], order_BW, axis=1)
        noise_BN = generator.integers(2 + ATTRIBUTES, VOCABULARY, size=(num_queries, NOISE_WORDS))
        tokens_BT = np.column_stack([words_BW, attribute_L[label_B], noise_BN])
        yield from packed(split, tokens_BT, label_B)


def one_each(values_BN: Int64Array) -> Ragged:
    """The rows of a matrix."""
    size, width = values_BN.shape
    return Ragged(values_BN.reshape(-1), np.arange(size + 1) * width)


def sibling_share(corpus: Corpus, retriever: Retriever) -> Result:
    """How often the first answer is a sibling of the right one, by exact search."""
    split = corpus.split("test")
    rows = np.arange(len(split))
    first_B = retriever.top_labels(split.tokens(rows), 1, exact=True).ids[:, 0]
    right_B = split.positives(rows).values
    is_sibling_B = (first_B != right_B) & (first_B // SIBLINGS == right_B // SIBLINGS)
    return {SIBLING: float(is_sibling_B.mean())}


def table_row(point: Point, results: Results) -> list[object]:
    """One row of the table."""
    by_seed = results[point]
    reference = results.get(replace(point, variant=UNIFORM_ALONE), {})
    seeds = sorted(by_seed.keys() & reference.keys())
    gains = [by_seed[seed]["P@1"] - reference[seed]["P@1"] for seed in seeds]
    gain = spread(gains) if gains and point.variant != UNIFORM_ALONE else "-"
    values = list(by_seed.values())
    epochs = spread([result["epochs"] for result in values], scale=1)
    minutes = spread([result["cpu_s"] / 60 for result in values], scale=1)
    siblings = (SIBLINGS - 1) * min(point.num_uniform, point.num_labels) / point.num_labels
    return [
        f"{point.num_labels:,}",
        f"{point.num_uniform:,}",
        siblings,
        point.variant,
        len(values),
        spread([result["P@1"] for result in values]),
        gain,
        spread([result["P@5"] for result in values]),
        spread([result[SIBLING] for result in values]),
        epochs,
        minutes,
    ]


if __name__ == "__main__":
    main()
