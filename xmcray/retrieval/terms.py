"""TF-IDF: texts as sparse vectors of length 1, one column per term of some texts.

A term is kept as a 64-bit hash of its text. So the vocabulary is one ascending array, which is
memory-mapped and searched where it lies. Two of a million terms share a hash with a probability of
3e-8.

Letters of axes, in addition to those in types.py:

    V  terms of the vocabulary         T  pairs of text and term, text by text
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from xmcray.types import Float64Array, Int64Array, Ragged, find_sorted, offsets_of

HashArray = npt.NDArray[np.uint64]
# "HTTPServer2" -> "HTTP", "Server", "2".
_CAMEL = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_WORD = re.compile(r"\w+")
_CACHED = 1 << 18  # words and hashes that are kept
_LONGEST_CACHED = 64  # characters; so many words of any length would fill the memory
_TINY = 1e-12


def words(text: str) -> list[str]:
    """Words, split at camel case; a word of several pieces is there as a whole too."""
    terms: list[str] = []
    for word in _WORD.findall(text):
        terms += _cached_pieces(word) if len(word) <= _LONGEST_CACHED else _pieces(word)
    return terms


def words_and_pairs(text: str) -> list[str]:
    """Words and pairs of neighbouring words, lower-cased, each as often as it occurs."""
    whole_words = _WORD.findall(text.lower())
    pairs = map(" ".join, itertools.pairwise(whole_words))
    return [*whole_words, *pairs]


def _pieces(word: str) -> tuple[str, ...]:
    if not word.isascii():
        # Names in programs are ASCII; other words have no humps to split at.
        return (word.lower(),)
    pieces = [piece.lower() for piece in _CAMEL.findall(word)]
    if len(pieces) > 1:
        pieces.append("".join(pieces))
    return tuple(pieces)


def _hash(term: str) -> int:
    # A lone surrogate, which JSON can hold, has no UTF-8.
    data = term.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


_cached_pieces = functools.lru_cache(_CACHED)(_pieces)
_cached_hash = functools.lru_cache(_CACHED)(_hash)


@dataclass(frozen=True, slots=True)
class TermCounts:
    """How often each text has each of its terms.

    Attributes:
        hashes: uint64 [T], a text's terms in the order in which they occur first.
        counts: int64 [T].
        offsets: int64 [texts + 1], where each text's terms begin.
    """

    hashes: HashArray
    counts: Int64Array
    offsets: Int64Array

    @classmethod
    def of(cls, texts: Iterable[str], terms_of: Callable[[str], Sequence[str]]) -> TermCounts:
        """Counts the terms of texts."""
        hashes: list[int] = []
        counts: list[int] = []
        lengths: list[int] = []
        for text in texts:
            term_counts = Counter(terms_of(text))
            are_short = max(map(len, term_counts), default=0) <= _LONGEST_CACHED
            hashes += map(_cached_hash if are_short else _hash, term_counts)
            counts += term_counts.values()
            lengths.append(len(term_counts))
        offsets = offsets_of(np.array(lengths, np.int64))
        return cls(np.array(hashes, np.uint64), np.array(counts, np.int64), offsets)

    @staticmethod
    def concatenate(parts: Sequence[TermCounts]) -> TermCounts:
        """The texts of all parts, one part after another."""
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        hashes = np.concatenate([part.hashes for part in parts])
        counts = np.concatenate([part.counts for part in parts])
        return TermCounts(hashes, counts, offsets_of(lengths))

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.offsets) - 1


@dataclass(frozen=True, slots=True)
class TermWeights:
    """Sparse vectors of some texts.

    Attributes:
        columns: int64 [T], a text's terms as columns of the vocabulary, ascending.
        values: float64 [T].
        offsets: int64 [texts + 1], where each text's terms begin.
    """

    columns: Int64Array
    values: Float64Array
    offsets: Int64Array

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.offsets) - 1


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The terms of some texts, and how rare each of them is.

    Attributes:
        hashes: uint64 [V], ascending; the columns of vectors.
        idf: float64 [V], log(texts / texts with the term) + 1.
    """

    hashes: HashArray
    idf: Float64Array

    @classmethod
    def of(cls, counts: TermCounts, largest_share: float = 1.0) -> Vocabulary:
        """Takes the terms of some texts.

        Args:
            counts: the terms of the texts.
            largest_share: leave out terms that more than this share of the texts have. Such a term
                says little, and comparing it costs most.
        """
        hashes, num_texts = np.unique(counts.hashes, return_counts=True)
        kept = num_texts <= largest_share * len(counts)
        idf = np.log(len(counts) / num_texts[kept]) + 1
        return cls(hashes[kept], idf)

    def vectors(self, counts: TermCounts, dtype: npt.DTypeLike = np.float64) -> Any:
        """TF-IDF vectors of length 1 as scipy CSR [texts, V], columns ascending; see `weights`."""
        terms = self.weights(counts)
        shape = (len(counts), len(self.hashes))
        return sp.csr_matrix(
            (terms.values.astype(dtype), terms.columns, terms.offsets), shape=shape
        )

    def weights(self, counts: TermCounts) -> TermWeights:
        """TF-IDF vectors of length 1; terms that are not in the vocabulary are left out.

        Before scaling, a value is (1 + log(count)) * idf. A text without any known term has a
        vector of zeros.
        """
        columns, is_known = find_sorted(self.hashes, counts.hashes)
        # The number of known terms before each text's first one.
        offsets = offsets_of(is_known)[counts.offsets]
        columns = columns[is_known]
        rows = Ragged(columns, offsets).row_ids
        # By text, then by column.
        order = np.lexsort((columns, rows))
        columns = columns[order]
        known_counts = counts.counts[is_known]
        raw_values = (1 + np.log(known_counts[order])) * self.idf[columns]
        lengths = np.sqrt(np.bincount(rows, raw_values**2, len(counts)))
        # A text without any term has length 0.
        values = raw_values / np.maximum(lengths, _TINY)[rows]
        return TermWeights(columns, values, offsets)
