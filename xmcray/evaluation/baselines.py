"""How far plain word matching gets: the labels of the nearest training queries by TF-IDF. A number to beat.

Small data only: the whole training split is a sparse matrix in memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp

from xmcray.types import Float32Array, Ragged, TopLabels

NEIGHBOURS = 10
_CHUNK = 256  # queries compared with all training queries at once


class NearestQueries:
    """kNN: a label scores the summed cosine of those of the 10 nearest training queries that carry it.

    Args:
        texts: N training queries. positives: their labels, source ids. num_labels: L.
    """

    def __init__(self, texts: Sequence[str], positives: Ragged, num_labels: int) -> None:
        counts = [Counter(_terms(text)) for text in texts]
        documents = Counter(term for row in counts for term in row)
        self._columns = {term: column for column, term in enumerate(sorted(documents))}
        self._idf = (
            np.log(len(texts) / np.array([documents[term] for term in sorted(documents)])) + 1
        )
        self._train = self._tfidf(counts)
        ones = np.ones(len(positives.values))
        self._labels = sp.csr_matrix(
            (ones, positives.values, positives.offsets), shape=(len(texts), num_labels)
        )

    def top_labels(self, texts: Sequence[str], k: int, exclude: Ragged | None = None) -> TopLabels:
        """The k best labels of each text, ties by lower id; -1 where fewer labels have a score.

        Args:
            exclude: source ids per text that are masked.
        """
        ids, scores = [np.empty((0, k), np.int64)], [np.empty((0, k), np.float32)]
        for start in range(0, len(texts), _CHUNK):
            part = texts[start : start + _CHUNK]
            score_BL = self._scores(part)
            if exclude is not None:
                hidden = exclude.slice(start, start + len(part))
                score_BL[hidden.row_ids, hidden.values] = 0
            order = np.argsort(-score_BL, axis=1, kind="stable")[:, :k]
            best = np.take_along_axis(score_BL, order, 1)
            ids.append(np.where(best > 0, order, -1))
            scores.append(np.where(best > 0, best, -np.inf).astype(np.float32))
        return TopLabels(np.concatenate(ids), np.concatenate(scores))

    def _scores(self, texts: Sequence[str]) -> Float32Array:
        """float32 [B, L]."""
        rows = self._tfidf([Counter(_terms(text)) for text in texts])
        cosine_BN = (rows @ self._train.T).toarray()
        nearest = min(NEIGHBOURS, cosine_BN.shape[1])
        cosine_BN[cosine_BN < np.partition(cosine_BN, -nearest, axis=1)[:, [-nearest]]] = 0
        return np.asarray((sp.csr_matrix(cosine_BN) @ self._labels).toarray(), np.float32)

    def _tfidf(self, counts: Sequence[Counter[str]]) -> Any:
        """float64 [rows, V]: 1 + log(count) times log(N / documents) + 1, rows of length 1; unknown terms left out."""
        known = [
            [(self._columns[term], n) for term, n in row.items() if term in self._columns]
            for row in counts
        ]
        offsets = np.cumsum([0, *map(len, known)])
        columns = np.array([column for row in known for column, _ in row], np.int64)
        times = np.array([n for row in known for _, n in row], np.float64)
        values = (1 + np.log(times)) * self._idf[columns]
        matrix = sp.csr_matrix((values, columns, offsets), shape=(len(counts), len(self._columns)))
        norms = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel())
        return sp.csr_matrix(sp.diags(1 / np.maximum(norms, 1e-12)) @ matrix)


def _terms(text: str) -> list[str]:
    """Words and pairs of neighbouring words, lower-cased."""
    words = re.findall(r"\w+", text.lower())
    return words + [f"{a} {b}" for a, b in pairwise(words)]
