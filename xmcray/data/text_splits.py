"""The split of a new query, by its text alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from xmcray.data.corpus import Corpus
from xmcray.data.text_keys import Keys, text_keys
from xmcray.types import find_sorted, spans

_KEY_RANGE = 1 << 64
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class TextSplits:
    """Puts a text into one split, however often it comes again, and in any case and spacing.

    Attributes:
        hold_out: share of the texts that go to the test split.
        known: by split, ascending keys of texts that stay there. So nothing is trained on a query of
            a test split.
    """

    hold_out: float
    known: Mapping[str, Keys] = field(default_factory=dict)

    @classmethod
    def of(cls, corpus: Corpus, hold_out: float) -> TextSplits:
        """Texts of the corpus stay in their splits."""
        known = {}
        for name in ("train", "test"):
            if corpus.card.num_rows(name):
                split = corpus.split(name)
                parts = [
                    text_keys(split.texts(np.arange(span.start, span.stop)))
                    for span in spans(len(split), _ROWS_AT_ONCE)
                ]
                known[name] = np.unique(np.concatenate(parts))
        return cls(hold_out, known)

    def __call__(self, text: str) -> str:
        """The split of a text: "train" or "test"."""
        keys = text_keys([text])
        if not len(keys):
            return "train"
        for split in ("test", "train"):
            if split in self.known:
                _, is_there = find_sorted(self.known[split], keys)
                if is_there[0]:
                    return split
        # The key is a hash: a random number that is the same in every process.
        share = int(keys[0]) / _KEY_RANGE
        return "test" if share < self.hold_out else "train"
