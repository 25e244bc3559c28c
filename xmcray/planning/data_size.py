"""A data set in the numbers that a plan needs, counted on a corpus or given by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xmcray import draws
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError

Float64Array = npt.NDArray[np.float64]
_SAMPLED = 20_000  # texts and positives that averages are taken of
_VOCAB = 32_000  # of a corpus that is not there: what `prepare` trains at most


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """A data set in numbers.

    Attributes:
        num_labels, num_train: L and N. vocab_size: V.
        tokens_per_query, tokens_per_label, positives_per_query: averages.
        token_share_V: how often each token occurs, sums to 1. label_share_L: the same of positives; None: all alike.
        assumptions: what was not counted on a corpus.
    """

    num_labels: int
    num_train: int
    vocab_size: int = _VOCAB
    tokens_per_query: float = 16.0
    tokens_per_label: float = 16.0
    positives_per_query: float = 5.0
    token_share_V: Float64Array
    label_share_L: Float64Array | None = None
    assumptions: tuple[str, ...] = ()


def from_numbers(
    num_labels: int,
    num_train: int,
    tokens_per_text: float,
    positives_per_query: float = 5.0,
    vocab_size: int = _VOCAB,
) -> DataSize:
    """A data set that is not there yet.

    Raises:
        ConfigError: a number below one.
    """
    named = {"--labels": num_labels, "--queries": num_train, "--tokens-per-text": tokens_per_text}
    for name, value in {**named, "--positives": positives_per_query}.items():
        if not value >= 1:
            raise ConfigError(f"{name} is {value:g}, expected at least 1")
    share_V = 1.0 / (
        np.arange(vocab_size) + 2.7
    )  # Zipf-Mandelbrot with the usual constants of a language
    return DataSize(
        num_labels=int(num_labels),
        num_train=int(num_train),
        vocab_size=vocab_size,
        tokens_per_query=tokens_per_text,
        tokens_per_label=tokens_per_text,
        positives_per_query=positives_per_query,
        token_share_V=share_V / share_V.sum(),
        assumptions=(
            f"{positives_per_query:g} positives per query, all labels equally frequent",
            f"{tokens_per_text:g} tokens in each text, of a vocabulary of {vocab_size:,} by Zipf's law",
        ),
    )


def from_corpus(corpus: Corpus) -> DataSize:
    """Counts on a prepared corpus; averages and frequencies from a seeded sample."""
    card = corpus.card
    generator = draws.generator(0, "plan")
    rows = np.sort(generator.permutation(card.num_train)[:_SAMPLED])
    labels = np.sort(generator.permutation(card.num_labels)[:_SAMPLED])
    texts = [corpus.split("train").tokens(rows), corpus.label_tokens(labels)]
    counts_V = sum(np.bincount(part.values, minlength=card.vocab_size) for part in texts)
    share_V = np.asarray(counts_V, float) / max(1, sum(len(part.values) for part in texts))
    counts_L = corpus.train_counts.astype(float)
    return DataSize(
        num_labels=card.num_labels,
        num_train=card.num_train,
        vocab_size=card.vocab_size,
        tokens_per_query=card.averages["tokens per training query"],
        tokens_per_label=card.averages["tokens per label"],
        positives_per_query=card.averages["labels per training query"],
        token_share_V=share_V,
        label_share_L=counts_L / max(1.0, counts_L.sum()),
    )


def distinct_labels(data: DataSize, count: float) -> float:
    """Expected distinct labels in so many positives."""
    if data.label_share_L is None:
        return union(data.num_labels, 0.0, count)
    return float(-np.expm1(count * np.log1p(-np.minimum(data.label_share_L, 1 - 1e-12))).sum())


def union(num_labels: int, known: float, drawn: float) -> float:
    """Distinct labels when some are known and others are drawn uniformly."""
    return known + (num_labels - known) * -math.expm1(-drawn / num_labels)
