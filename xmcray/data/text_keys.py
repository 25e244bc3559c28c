"""Texts that several rows have: duplicates, test queries among the training queries, labels that
differ only in case.

Texts that differ only in case or white space count as equal. They are compared by 64-bit keys, which
are collected in nameless files, so that 10^8 of them take no memory.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from xmcray.types import find_sorted, spans

Keys = npt.NDArray[np.uint64]

LABELS_WITH_CASE = "labels with case"
LEAKS = "test: text of a training query"
# What the card calls rows that repeat the text of another one, by split.
_REPEATED = {
    "train": "train: text of an earlier training query",
    "test": "test: text of an earlier test query",
    LABELS_WITH_CASE: "labels: text of another label",
}
_ONLY_CASE = "labels: text differs from another label only in case"
COUNTED = (LEAKS, _ONLY_CASE, *_REPEATED.values())
NO_KEYS: Keys = np.empty(0, np.uint64)
_KEYS_AT_ONCE = 1 << 22


def text_keys(texts: Iterable[str], with_case: bool = False) -> Keys:
    """Keys of texts, which are equal for equal texts; texts without a word have none.

    Args:
        texts: what to compare.
        with_case: whether texts that differ in case are different.
    """
    digests = bytearray()
    for text in texts:
        words = " ".join(text.split())
        if not words:
            continue
        if not with_case:
            words = words.casefold()
        # Python's own hash of a text differs from process to process.
        digests += hashlib.blake2b(words.encode(errors="surrogatepass"), digest_size=8).digest()
    return np.frombuffer(digests, np.uint64)


def keys_by_name(split: str, texts: list[str]) -> dict[str, Keys]:
    """What `TextKeys.add` takes of some rows of a split."""
    keys = {split: text_keys(texts)}
    if split == "labels":
        keys[LABELS_WITH_CASE] = text_keys(texts, with_case=True)
    return keys


class TextKeys:
    """The keys of all texts of a corpus, in any order.

    Args:
        folder: where the files are; they have no names and end with `close`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}

    def add(self, keys: dict[str, Keys]) -> None:
        """Adds keys by name."""
        for name, values in keys.items():
            if name not in self._files:
                # Open until the corpus is written; closed, its content is gone.
                self._files[name] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            self._files[name].write(values.tobytes())

    def odd_rows(self) -> Counter[str]:
        """The number of rows that share their text with another one, by what the card calls them."""
        odd: Counter[str] = Counter()
        keys = {name: self._sorted(name) for name in ("labels", *_REPEATED)}
        for name, reason in _REPEATED.items():
            odd[reason] = len(keys[name]) - _num_distinct(keys[name])
        # Texts that are different with case and equal without it.
        odd[_ONLY_CASE] = _num_distinct(keys[LABELS_WITH_CASE]) - _num_distinct(keys["labels"])
        odd[LEAKS] = _num_shared(keys["test"], keys["train"])
        return odd

    def close(self) -> None:
        """Closes the files, which removes them. On NFS a nameless file has a name while it is open."""
        for file in self._files.values():
            file.close()

    def _sorted(self, name: str) -> Keys:
        file = self._files.get(name)
        if file is None or not file.tell():
            return NO_KEYS
        file.flush()
        keys = np.memmap(file, np.uint64, mode="r+")
        # In the file: the system may write pages of it to disk at any time.
        keys.sort()
        return keys


def _num_distinct(keys: Keys) -> int:
    """Number of distinct keys of a sorted array."""
    num_repeated = 0
    for start in range(1, len(keys), _KEYS_AT_ONCE):
        stop = min(start + _KEYS_AT_ONCE, len(keys))
        # Equal keys lie next to each other, so a repeated one equals the key before it.
        previous_keys = keys[start - 1 : stop - 1]
        is_repeated = keys[start:stop] == previous_keys
        num_repeated += int(is_repeated.sum())
    return len(keys) - num_repeated


def _num_shared(keys: Keys, others: Keys) -> int:
    """How many of some sorted keys are among others, which are sorted too."""
    num_shared = 0
    for span in spans(len(keys), _KEYS_AT_ONCE):
        _, is_shared = find_sorted(others, keys[span])
        num_shared += int(is_shared.sum())
    return num_shared
