"""Finds labels by uid again and again: in 16 bytes a label, where a dictionary takes 150."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from xmcray.retrieval.label_index import LabelIndex


class UidIndex:
    """The labels that can be answered, by uid.

    Holds a hash of each uid, in ascending order, and the ids in the same order. Python keys the
    hashes of texts anew in each process, so nobody can choose uids that meet in one. Uids are
    compared all the same.

    Args:
        labels: of which the uids are read, and nothing is kept.
    """

    def __init__(self, labels: LabelIndex) -> None:
        # In blocks, because the texts of all uids at once take what a dictionary takes.
        blocks = labels.table["uid"].chunks
        hash_L = np.concatenate([_hashes(block.to_pylist()) for block in blocks])
        ids = np.argsort(hash_L)
        hidden_L = labels.hidden_labels
        # Of a label that was removed and came back, the table has both.
        self._ids = ids if hidden_L is None else ids[~hidden_L[ids]]
        self._hashes = hash_L[self._ids]

    def ids_of(self, uids: Iterable[str], labels: LabelIndex) -> dict[str, int]:
        """Source ids by uid, of those uids whose labels could be answered.

        Args:
            uids: some of them.
            labels: those that this was made from; others may have joined or been removed since.
        """
        wanted = list(uids)
        hashes = _hashes(wanted)
        starts = np.searchsorted(self._hashes, hashes, side="left")
        stops = np.searchsorted(self._hashes, hashes, side="right")
        # Mostly one id, several if their uids have one hash.
        ranges = zip(starts.tolist(), stops.tolist(), strict=True)
        ids_of_hash = [self._ids[start:stop] for start, stop in ranges]
        label_ids = np.concatenate([np.empty(0, np.int64), *ids_of_hash])
        found_uids, _ = labels.uids_and_texts(label_ids)
        id_of_uid = dict(zip(found_uids, label_ids.tolist(), strict=True))
        return {uid: id_of_uid[uid] for uid in wanted if uid in id_of_uid}


def _hashes(uids: list[str]) -> np.ndarray:
    """int64 [n], the hash of each uid."""
    return np.fromiter(map(hash, uids), np.int64, len(uids))
