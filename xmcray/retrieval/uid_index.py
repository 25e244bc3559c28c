"""Looks up labels by uid, with 16 bytes per label; a dictionary takes 150."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from xmcray.retrieval.label_index import LabelIndex
from xmcray.types import Int64Array


class UidIndex:
    """Source ids of the labels that can be answered, by uid.

    Keeps the sorted hashes of all uids, and the ids in the same order. A candidate is compared with
    its real uid, so collisions are harmless. They cannot be provoked either, because Python seeds
    the hashes of strings in each process.

    For a single look-up `LabelIndex.ids_of` is faster: it needs no index.

    Args:
        labels: read here and not kept.
    """

    def __init__(self, labels: LabelIndex) -> None:
        # In blocks: all uids as Python strings would take as much memory as the dictionary.
        blocks = labels.table["uid"].chunks
        hash_L = np.concatenate([_hashes(block.to_pylist()) for block in blocks])
        ids = np.argsort(hash_L)
        hidden_L = labels.hidden_labels
        # A label that was removed and added again is in the table twice.
        self._ids = ids if hidden_L is None else ids[~hidden_L[ids]]
        self._hashes = hash_L[self._ids]

    def ids_of(self, uids: Iterable[str], labels: LabelIndex) -> dict[str, int]:
        """Source ids by uid. Uids without a label are left out.

        Args:
            uids: the uids to look up.
            labels: the labels of the constructor. Some may have been added or removed since; those
                changes are not seen here.
        """
        wanted = list(uids)
        hashes = _hashes(wanted)
        starts = np.searchsorted(self._hashes, hashes, side="left")
        stops = np.searchsorted(self._hashes, hashes, side="right")
        # Usually one candidate per uid, several if hashes collide.
        ranges = zip(starts.tolist(), stops.tolist(), strict=True)
        candidates = [self._ids[start:stop] for start, stop in ranges]
        label_ids = np.concatenate([np.empty(0, np.int64), *candidates])
        candidate_uids = labels.names_of(label_ids)["uid"].to_pylist()
        id_of_uid = dict(zip(candidate_uids, label_ids.tolist(), strict=True))
        # A candidate whose hash collides has a uid that may not be wanted.
        return {uid: id_of_uid[uid] for uid in wanted if uid in id_of_uid}


def _hashes(uids: list[str]) -> Int64Array:
    """int64 [n], the hash of each uid."""
    return np.fromiter(map(hash, uids), np.int64, len(uids))
