"""A data set in the numbers that a plan needs, counted on a corpus or given by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xmcray import draws
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError
from xmcray.permutations import random_sample
from xmcray.types import Float64Array, Ragged

_SAMPLED = 20_000  # texts that frequencies of tokens are taken of
_VOCAB = 32_000  # what `prepare` trains at most
DEFAULT_TOKENS = 16.0
DEFAULT_POSITIVES = 5.0  # labels of a query
# Ids of labels have 31 bits. The other numbers are beyond any data set.
_MOST = {
    "--labels": 2**31 - 1,
    "--queries": 10**12,
    "--tokens-per-text": 10**4,
    "--positives": 10**4,
}


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """A data set in numbers.

    Attributes:
        num_labels: L.
        num_train: N.
        vocab_size: V.
        tokens_per_query: average.
        tokens_per_label: average.
        positives_per_query: average.
        token_share_V: how often each token occurs, sums to 1.
        label_share_L: how often each label is a positive, sums to 1; None: all alike.
        side_width: W of side vectors, which all queries and labels are taken to have; 0 for none.
        assumptions: what was not counted on a corpus.
    """

    num_labels: int
    num_train: int
    vocab_size: int
    tokens_per_query: float
    tokens_per_label: float
    positives_per_query: float
    token_share_V: Float64Array
    label_share_L: Float64Array | None = None
    side_width: int = 0
    assumptions: tuple[str, ...] = ()


def from_numbers(
    num_labels: int,
    num_train: int,
    tokens_per_text: float | None = None,
    positives_per_query: float | None = None,
) -> DataSize:
    """A data set that is not there yet.

    Args:
        num_labels: L.
        num_train: N.
        tokens_per_text: average of queries and label texts; 16 if not given.
        positives_per_query: average; 5 if not given.

    Raises:
        ConfigError: a number below one, or beyond what a run could have.
    """
    tokens = DEFAULT_TOKENS if tokens_per_text is None else tokens_per_text
    positives = positives_per_query
    if positives is None:
        positives = min(DEFAULT_POSITIVES, num_labels)
    options = {
        "--labels": num_labels,
        "--queries": num_train,
        "--tokens-per-text": tokens,
        "--positives": positives,
    }
    for name, value in options.items():
        if not value >= 1:
            raise ConfigError(f"{name} is {value:g}, expected at least 1")
        if value > _MOST[name]:
            raise ConfigError(f"{name} is {value:g}, expected at most {_MOST[name]:g}")
    if positives > num_labels:
        raise ConfigError(
            f"--positives is {positives:g}, expected at most the number of labels, {num_labels:g}"
        )
    # Zipf-Mandelbrot with the usual constants of a language.
    share_V = 1.0 / (np.arange(_VOCAB) + 2.7)
    default = "" if tokens_per_text is not None else " (no --tokens-per-text was given)"
    return DataSize(
        num_labels=int(num_labels),
        num_train=int(num_train),
        vocab_size=_VOCAB,
        tokens_per_query=tokens,
        tokens_per_label=tokens,
        positives_per_query=positives,
        token_share_V=share_V / share_V.sum(),
        assumptions=(
            f"{positives:g} positives per query, all labels equally frequent",
            f"{tokens:g} tokens in each text{default}, of a vocabulary of {_VOCAB:,} by Zipf's law",
        ),
    )


def from_corpus(corpus: Corpus) -> DataSize:
    """Counts on a prepared corpus; averages and frequencies from a seeded sample."""
    card = corpus.card
    generator = draws.generator(0, "plan")
    rows = np.sort(random_sample(generator, card.num_train, _SAMPLED))
    labels = np.sort(random_sample(generator, card.num_labels, _SAMPLED))
    query_tokens = corpus.split("train").tokens(rows)
    label_tokens = corpus.label_tokens(labels)
    texts = Ragged.concatenate([query_tokens, label_tokens])
    counts_V = np.bincount(texts.values, minlength=card.vocab_size).astype(float)
    counts_L = corpus.train_counts.astype(float)
    return DataSize(
        num_labels=card.num_labels,
        num_train=card.num_train,
        vocab_size=card.vocab_size,
        tokens_per_query=card.averages["tokens per training query"],
        tokens_per_label=card.averages["tokens per label"],
        positives_per_query=card.averages["labels per training query"],
        token_share_V=counts_V / max(1.0, counts_V.sum()),
        label_share_L=counts_L / max(1.0, counts_L.sum()),
        side_width=card.side_width,
    )
