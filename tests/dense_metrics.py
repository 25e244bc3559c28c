"""Small dense references for tests of metrics."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xmcray.types import Ragged, TopLabels


def top_k(scores_BL: npt.NDArray[np.floating], k: int, exclude: Ragged | None = None) -> TopLabels:
    """The k best labels of each row of a dense score matrix, ties by the lower label id.

    Args:
        scores_BL: scores [B, L]; -inf and NaN mean "no answer".
        k: answers per row, clipped to L.
        exclude: label ids per row that are masked before the top k is taken.
    """
    masked = np.where(np.isnan(scores_BL), -np.inf, scores_BL)
    if exclude is not None:
        masked[exclude.row_ids, exclude.values] = -np.inf
    order = np.argsort(-masked, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(masked, order, axis=1)
    return TopLabels(np.where(best == -np.inf, -1, order).astype(np.int64), best.astype(np.float32))


def remove_pairs(rows: Ragged, exclude: Ragged) -> Ragged:
    """`rows` without the values that `exclude` names for the same row."""
    kept = [np.setdiff1d(rows[row], exclude[row]) for row in range(len(rows))]
    return Ragged.from_rows(kept)
