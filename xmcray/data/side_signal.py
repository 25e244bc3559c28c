"""Measures before training how much the side vectors of a corpus say about its labels.

The training loss does not show it: the rows of a classifier memorise the vectors of single queries, so
vectors that are noise lower the loss too. Here two comparisons are made, none of a query with itself.
Two queries that share a label are compared with one of them and a random query. A query and its label
are compared with the query and a random label.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xmcray import draws
from xmcray.data.batches import TrainingData
from xmcray.data.corpus import Corpus
from xmcray.permutations import random_sample
from xmcray.types import Float32Array, Int64Array, Ragged, side_vectors_of

MAX_QUERIES = 20_000
MAX_NUMBERS = 1 << 24  # of the vectors that are held at once
# Chosen between two measurements of ASTRA on the sample (benchmarks/side_vectors.py). At 0.15 ("weak")
# side vectors add 9 points of P@1 and keep PSP@5. At 0.05 ("weaker"), vectors that were mixed in cost
# 2 and 6 points of these.
MIN_ALIKE = 0.1
MIN_STANDARD_ERRORS = 3.0


@dataclass(frozen=True, slots=True)
class SideSignal:
    """How similar vectors with the same labels are.

    Attributes:
        alike: mean cosine of related vectors minus that of random ones, after their mean is subtracted;
            0 for noise, at most 1.
        standard_errors: `alike` divided by its standard error.
    """

    alike: float
    standard_errors: float

    @property
    def is_noise(self) -> bool:
        """Whether the vectors say nothing about labels, or too little to learn from."""
        return self.alike < MIN_ALIKE or self.standard_errors < MIN_STANDARD_ERRORS

    @classmethod
    def of_differences(cls, difference_P: Float32Array) -> SideSignal:
        """The signal of P pairs: float32 [P], the cosine of each minus that of a random pair."""
        if len(difference_P) < 2:
            return cls(0.0, 0.0)
        mean = float(difference_P.mean())
        standard_error = float(difference_P.std(ddof=1)) / len(difference_P) ** 0.5
        return cls(mean, mean / max(standard_error, 1e-12))


def side_signal(data: TrainingData) -> SideSignal | None:
    """Measures a sample of the training queries. The result is the same on every rank.

    Args:
        data: of a corpus with side vectors.
    Returns:
        None if no query has a vector, because then there is nothing to compare.
    """
    generator = draws.generator(data.config.seed, "side signal")
    width = data.corpus.card.side_width
    count = min(MAX_QUERIES, max(1, MAX_NUMBERS // width))
    sample = random_sample(generator, len(data.training_rows), count)
    rows = data.training_rows[np.sort(sample)]
    split = data.corpus.split("train")
    query_BW = side_vectors_of(split.tokens(rows), width)
    has_vector = query_BW.any(axis=1)
    if not has_vector.any():
        return None
    query_BW = _directions(query_BW[has_vector])
    positives = split.positives(rows[has_vector])
    signals = [
        _of_queries(query_BW, positives, generator),
        _of_labels(query_BW, positives, data.corpus, generator),
    ]
    # One of the two is enough, so the better one counts.
    return max(signals, key=lambda signal: (not signal.is_noise, signal.alike))


def _of_queries(
    query_BW: Float32Array, positives: Ragged, generator: np.random.Generator
) -> SideSignal:
    """Queries that share a label, compared with random queries."""
    # T counts pairs of a query and one of its labels. Sorted by label, pairs with the same label are
    # neighbours.
    order = np.argsort(positives.values, kind="stable")
    label_T = positives.values[order]
    query_T = positives.row_ids[order]
    shares_label = label_T[1:] == label_T[:-1]
    left = query_T[:-1][shares_label]
    right = query_T[1:][shares_label]
    # Two queries that share several labels count once.
    pairs = np.unique(np.stack([left, right], axis=1), axis=0)
    pairs = pairs[random_sample(generator, len(pairs), len(query_BW))]
    first: Int64Array = pairs[:, 0]
    second: Int64Array = pairs[:, 1]
    random = generator.integers(len(query_BW), size=len(pairs))
    difference_PW = query_BW[second] - query_BW[random]
    return SideSignal.of_differences(_row_products(query_BW[first], difference_PW))


def _of_labels(
    query_BW: Float32Array, positives: Ragged, corpus: Corpus, generator: np.random.Generator
) -> SideSignal:
    """Queries and one of their labels, compared with labels of other queries."""
    # The first label of each query.
    label_B = positives.values[positives.offsets[:-1]]
    label_BW = side_vectors_of(corpus.label_tokens(label_B), query_BW.shape[1])
    has_vector = label_BW.any(axis=1)
    if not has_vector.any():
        return SideSignal(0.0, 0.0)
    label_BW = _directions(label_BW[has_vector])
    other_BW = label_BW[generator.permutation(len(label_BW))]
    return SideSignal.of_differences(_row_products(query_BW[has_vector], label_BW - other_BW))


def _row_products(left_PW: Float32Array, right_PW: Float32Array) -> Float32Array:
    """Inner products of rows, [P]."""
    products: Float32Array = np.einsum("pw,pw->p", left_PW, right_PW)
    return products


def _directions(vectors: Float32Array) -> Float32Array:
    """Directions of rows after their mean is subtracted. Many embeddings have a part that all share."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    # The length of a vector of tiny numbers may be rounded to 0.
    directions: Float32Array = vectors / np.maximum(lengths, 1e-12)
    directions -= directions.mean(axis=0)
    lengths = np.linalg.norm(directions, axis=1, keepdims=True)
    directions /= np.maximum(lengths, 1e-12)
    return directions
