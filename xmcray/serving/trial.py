"""Whether a new bundle may replace the one in use."""

from __future__ import annotations

import numpy as np

from xmcray.serving.problems import ProblemError
from xmcray.serving.snapshot import Snapshot


def check_successor(old: Snapshot, new: Snapshot, version: str | None, floor: float) -> float:
    """Compares a new bundle with the one in use.

    Args:
        old: the snapshot in use.
        new: the snapshot that is to replace it.
        version: SHA-256 that the new bundle must have, if one is expected.
        floor: least recall.
    Returns:
        The recall: the share of the old bundle's best labels that the new one finds too.
    Raises:
        ProblemError: it has another version or width than expected, or finds too few of them.
    """
    if version is not None and new.version != version:
        raise ProblemError("refused", f"the bundle has SHA-256 {new.version}, expected {version}")
    width = new.retriever.dim
    expected = old.retriever.dim
    if width != expected:
        raise ProblemError(
            "refused",
            f"the bundle has vectors of width {width}, expected {expected} as those in use;"
            " serve it by another name",
        )
    recalls = []
    expected_labels = old.probe(old.probes)
    found_labels = new.probe(old.probes)
    for best, answered in zip(expected_labels, found_labels, strict=True):
        num_hits = len(best & answered)
        recalls.append(num_hits / max(1, len(best)))
    recall = float(np.mean(recalls))
    if recall < floor:
        raise ProblemError(
            "refused",
            f"the bundle finds {recall:.2f} of the best labels of the one in use, expected at least {floor:g};"
            " look at it, or lower recall_floor",
        )
    return recall
