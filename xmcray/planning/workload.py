"""What a step meets: texts, tokens, distinct rows, labels; expected from the numbers of a data set."""

from __future__ import annotations

import math

import numpy as np

from xmcray.planning.costs import costs_of
from xmcray.planning.data_size import DataSize
from xmcray.planning.step import Workload
from xmcray.training.run import RunConfig


def workload(config: RunConfig, data: DataSize, workers: int) -> Workload:
    """The step of a configuration, when hard negatives are in use."""
    augmented = data.num_labels if config.data.augment_with_labels else 0
    queries = round(data.num_train * (1 - config.data.validation)) + augmented
    G = min(config.optim.batch_size, queries)
    of_labels = augmented / max(1, queries)  # share of the batch's queries that are label texts
    positives = G * ((1 - of_labels) * data.positives_per_query + of_labels)
    met = costs_of(config).met(data, G, positives)
    texts = met.columns if met.by_text else 0.0
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
        hard=met.hard,
        uniform=met.uniform,
        columns=met.columns,
        tokens=tokens,
        token_rows=distinct_rows(data, config, tokens, per_rank + texts / workers),
        all_token_rows=distinct_rows(data, config, tokens * workers, G + texts),
    )


def distinct_rows(data: DataSize, config: RunConfig, tokens: float, texts: float) -> float:
    """Expected distinct rows of the token table in so many tokens: sum over tokens of 1 - (1 - p)^n.

    Pairs of neighbours (one less than tokens in each text) are spread over their rows by a hash, as if all differed.
    """
    rows = float(-np.expm1(tokens * np.log1p(-np.minimum(data.token_share_V, 1 - 1e-12))).sum())
    if config.encoder.bigram_buckets:
        rows += config.encoder.bigram_buckets * -math.expm1(
            -max(tokens - texts, 0.0) / config.encoder.bigram_buckets
        )
    return rows
