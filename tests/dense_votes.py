"""The votes of a memory as the paper writes them, in dense matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from xmcray.retrieval.votes import MemoryConfig


def softmax_of_best(
    scores: Any,
    values: Any,
    config: MemoryConfig,
) -> Any:
    """The values [keys, L] of the nearest keys of one query, weighted by a softmax over them."""
    order = np.argsort(-scores, kind="stable")
    best = order[: config.keys]
    shifted = scores[best] - scores[best].max()
    power = np.exp(shifted / config.temperature)
    return power @ values[best] / power.sum()


def dense(
    query_score_BN: Any,
    label_score_BL: Any,
    positive_NL: Any,
    config: MemoryConfig,
) -> Any:
    """Eq. 8, or 11: probabilities [B, L] as the formula is written."""
    num_memory = query_score_BN.shape[1]
    num_labels = positive_NL.shape[1]
    weight = config.weight
    score_BK = np.concatenate([query_score_BN, label_score_BL], axis=1)
    value_KL = np.concatenate(
        [
            weight * positive_NL,
            (1 - weight) * np.eye(num_labels),
        ]
    )

    queries = slice(0, num_memory)
    labels = slice(num_memory, None)
    if weight == 0:
        parts = [labels]
    elif weight == 1:
        parts = [queries]
    elif config.joint:
        # One softmax over the keys of both.
        parts = [slice(0, None)]
    else:
        parts = [queries, labels]

    answer_BL = np.zeros(label_score_BL.shape)
    for part in parts:
        for row, scores in enumerate(score_BK[:, part]):
            answer_BL[row] += softmax_of_best(scores, value_KL[part], config)
    return answer_BL
