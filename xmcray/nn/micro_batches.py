"""Cuts texts into groups of like length, so that a transformer computes little padding."""

from __future__ import annotations

import numpy as np

from xmcray.types import Int64Array, offsets_of, spans


def token_batches(lengths: Int64Array, max_tokens: int) -> list[Int64Array]:
    """Rows of texts, shortest first, cut into batches of about `max_tokens` tokens.

    Empty texts are left out.

    Args:
        lengths: int64 [B], tokens per text.
    """
    order = _by_length(lengths)
    if len(order) == 0:
        return []
    # A text belongs to the batch in which its last token falls.
    batch = (np.cumsum(lengths[order]) - 1) // max_tokens
    # A cut lies where the number of the batch changes.
    cuts = np.flatnonzero(np.diff(batch)) + 1
    return np.split(order, cuts)


def _by_length(lengths: Int64Array) -> Int64Array:
    """Rows of the texts that have a token, shortest first."""
    order = np.argsort(lengths, kind="stable")
    return order[lengths[order] > 0]


def micro_batches(lengths: Int64Array, call_tokens: int, max_tokens: int) -> list[Int64Array]:
    """Rows of texts grouped so that padded tokens plus `call_tokens` per group are fewest.

    Empty texts are left out.

    Args:
        lengths: int64 [B], tokens per text.
        call_tokens: what one more call of the model costs, in tokens.
        max_tokens: padded tokens of one group at most (a longer text stands alone).

    Returns:
        Row numbers of each group, shortest texts first.
    """
    order = _by_length(lengths)
    if len(order) == 0:
        return []
    widths, counts = np.unique(lengths[order], return_counts=True)
    num_widths = len(widths)
    ends = offsets_of(counts)
    # Dynamic programming. cheapest[j]: cost of the texts of the j smallest widths, split best.
    # Their last group holds the widths first_width[j] .. j - 1, each padded to the largest of them.
    cheapest = np.zeros(num_widths + 1)
    first_width = np.zeros(num_widths + 1, np.int64)
    for j in range(1, num_widths + 1):
        # For each possible first width i of the last group: the texts of widths i .. j - 1.
        group_sizes = ends[j] - ends[:j]
        costs = cheapest[:j] + widths[j - 1] * group_sizes + call_tokens
        first_width[j] = np.argmin(costs)
        cheapest[j] = costs[first_width[j]]
    # Read the best split from its end, so the groups are found in the opposite order.
    groups: list[Int64Array] = []
    j = num_widths
    while j:
        i = int(first_width[j])
        rows = order[ends[i] : ends[j]]
        # A group that is too large for one call is cut.
        size = max(1, int(max_tokens // widths[j - 1]))
        parts = [rows[span] for span in spans(len(rows), size)]
        groups += reversed(parts)
        j = i
    return groups[::-1]
