"""What a step meets: texts, tokens, distinct rows, labels. Counted on a corpus, or expected from a few numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xmcray import draws
from xmcray.data.corpus import Corpus
from xmcray.errors import ConfigError
from xmcray.training.run import RunConfig

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
    num_labels: int, num_train: int, tokens_per_text: float, positives_per_query: float = 5.0, vocab_size: int = _VOCAB
) -> DataSize:
    """A data set that is not there yet.

    Raises:
        ConfigError: a number below one.
    """
    named = {"--labels": num_labels, "--queries": num_train, "--tokens-per-text": tokens_per_text}
    for name, value in {**named, "--positives": positives_per_query}.items():
        if not value >= 1:
            raise ConfigError(f"{name} is {value:g}, expected at least 1")
    share_V = 1.0 / (np.arange(vocab_size) + 2.7)  # Zipf-Mandelbrot with the usual constants of a language
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


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step of the global batch, and the run around it.

    Attributes:
        queries: G. per_rank: queries of the largest share of a rank. steps_per_epoch, epochs: of the run.
        num_query_ids: N, or N + L where label texts are queries.
        positives: of all G queries together. label_texts: labels whose texts the step encodes, of all ranks.
        hard: hard negatives that the step uses per query. uniform: labels of the uniform pool.
        columns: distinct labels that the step meets, of all ranks (L where it meets all).
        tokens: of the texts that one rank encodes. token_rows: distinct rows of a static encoder's table in them;
            all_token_rows: in those of all ranks.
    """

    queries: int
    per_rank: int
    steps_per_epoch: int
    epochs: int
    num_query_ids: int
    positives: float
    label_texts: float
    hard: int
    uniform: int
    columns: float
    tokens: float
    token_rows: float
    all_token_rows: float


def workload(config: RunConfig, data: DataSize, workers: int) -> Workload:
    """The step of a configuration, when hard negatives are in use."""
    L, G, method = data.num_labels, config.optim.batch_size, config.method
    augmented = data.num_labels if config.data.augment_with_labels else 0
    queries = round(data.num_train * (1 - config.data.validation)) + augmented
    G = min(G, queries)
    of_labels = augmented / max(1, queries)  # share of the batch's queries that are label texts
    positives = G * ((1 - of_labels) * data.positives_per_query + of_labels)
    hard, uniform = config.negatives.hard, min(config.negatives.uniform, L)
    name = config.method_name
    drawn = getattr(method, "num_positives", 0) or 0
    drawn = 1 if name == "rae" else drawn
    met = min(positives, G * drawn) if drawn else positives
    drawn_hard = min(hard, getattr(method, "hard_per_query", 0)) if name != "dexml" or method.columns == "hard" else 0
    everything = name == "renee" or (name == "astra" and method.exact) or (name == "dexml" and method.columns == "all")
    if everything:
        columns = float(L)
    elif name == "astra":
        columns = _union(L, distinct_labels(data, positives), G * hard + uniform)
    else:
        cached = method.cache_hard if name == "dexml" and method.columns == "cache" else 0
        columns = _union(L, distinct_labels(data, met), G * drawn_hard + cached)
    by_text = name in ("dexml", "rae", "prime") or (name == "unidec" and method.balance > 0)
    texts = columns if by_text else 0.0
    per_rank = -(-G // workers)
    query_tokens = (1 - of_labels) * data.tokens_per_query + of_labels * data.tokens_per_label
    tokens = per_rank * query_tokens + texts / workers * data.tokens_per_label
    return Workload(
        queries=G,
        per_rank=per_rank,
        steps_per_epoch=math.ceil(queries / G),
        epochs=config.optim.stop_epoch or config.optim.epochs,
        num_query_ids=data.num_train + augmented,
        positives=positives,
        label_texts=texts,
        hard=hard if name == "astra" else drawn_hard,
        uniform=uniform if name == "astra" else 0,
        columns=columns,
        tokens=tokens,
        token_rows=distinct_rows(data, config, tokens, per_rank + texts / workers),
        all_token_rows=distinct_rows(data, config, tokens * workers, G + texts),
    )


def distinct_rows(data: DataSize, config: RunConfig, tokens: float, texts: float) -> float:
    """Expected distinct rows of the token table in so many tokens: sum over tokens of 1 - (1 - p)^n.

    Pairs of neighbours (one less than tokens in each text) are spread over their rows by a hash, as if all differed.
    """
    rows = float(-np.expm1(tokens * np.log1p(-np.minimum(data.token_share_V, 1 - 1e-12))).sum())
    if config.encoder.pairs:
        rows += config.encoder.pairs * -math.expm1(-max(tokens - texts, 0.0) / config.encoder.pairs)
    return rows


def distinct_labels(data: DataSize, count: float) -> float:
    """Expected distinct labels in so many positives."""
    if data.label_share_L is None:
        return _union(data.num_labels, 0.0, count)
    return float(-np.expm1(count * np.log1p(-np.minimum(data.label_share_L, 1 - 1e-12))).sum())


def _union(num_labels: int, known: float, drawn: float) -> float:
    """Distinct labels when some are known and others are drawn uniformly."""
    return known + (num_labels - known) * -math.expm1(-drawn / num_labels)
