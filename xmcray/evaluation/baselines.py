"""How far word matching gets: labels of the nearest training queries by TF-IDF. A number to beat.

For small data only: the whole training split is a sparse matrix in memory.

Letters of axes: B queries, N training queries, V terms, L labels, P pairs of query and label.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import scipy.sparse as sp

from xmcray.types import Float32Array, Ragged, TopLabels

NEIGHBOURS = 10
_CHUNK = 256  # queries compared with all training queries at once


class NearestQueries:
    """Scores a label by the summed cosine of the nearest training queries that carry it.

    Only the 10 nearest training queries count, and all that tie with the tenth.

    Args:
        texts: N training queries.
        positives: their labels, source ids.
        num_labels: L.
    """

    def __init__(self, texts: Sequence[str], positives: Ragged, num_labels: int) -> None:
        counts = _term_counts(texts)
        num_documents: Counter[str] = Counter()
        for row in counts:
            # The keys only: a term counts once for each text, however often it occurs there.
            num_documents.update(row.keys())
        # Sorted, so that the columns do not depend on the order of the texts.
        self._columns: dict[str, int] = {}
        documents = []
        for column, term in enumerate(sorted(num_documents)):
            self._columns[term] = column
            documents.append(num_documents[term])
        self._idf = np.log(len(texts) / np.array(documents)) + 1
        self._train = self._tfidf(counts)
        # [N, L], 1 for a query's label: a product with it sums the cosines of each label's queries.
        ones = np.ones(len(positives.values))
        self._labels = sp.csr_matrix(
            (ones, positives.values, positives.offsets), shape=(len(texts), num_labels)
        )

    def top_labels(self, texts: Sequence[str], k: int, exclude: Ragged | None = None) -> TopLabels:
        """The k best labels of each text, ties by lower id; -1 where fewer labels have a score.

        Args:
            texts: queries.
            k: answers per query.
            exclude: source ids per text that are masked.
        """
        tops = []
        for start in range(0, len(texts), _CHUNK):
            chunk = texts[start : start + _CHUNK]
            score_BL = self._scores(chunk)
            if exclude is not None:
                hidden = exclude.slice(start, start + len(chunk))
                score_BL[hidden.row_ids, hidden.values] = 0
            # Stable, so that equal scores keep the order of ids.
            order = np.argsort(-score_BL, axis=1, kind="stable")[:, :k]
            best = np.take_along_axis(score_BL, order, 1)
            # A label that none of the nearest queries carries scores 0 and is no answer.
            is_answer = best > 0
            ids = np.where(is_answer, order, -1)
            scores = np.where(is_answer, best, -np.inf).astype(np.float32)
            tops.append(TopLabels(ids, scores))
        return TopLabels.concatenate(tops, k)

    def _scores(self, texts: Sequence[str]) -> Float32Array:
        """float32 [B, L]."""
        query_BV = self._tfidf(_term_counts(texts))
        # Rows have length 1, so products are cosines.
        cosine_BN = (query_BV @ self._train.T).toarray()
        nearest = min(NEIGHBOURS, cosine_BN.shape[1])
        # The smallest cosine that is among the nearest of each query.
        bar_B1 = np.partition(cosine_BN, -nearest, axis=1)[:, [-nearest]]
        cosine_BN[cosine_BN < bar_B1] = 0
        score_BL = sp.csr_matrix(cosine_BN) @ self._labels
        return np.asarray(score_BL.toarray(), np.float32)

    def _tfidf(self, counts: Sequence[Counter[str]]) -> sp.csr_matrix:
        """float64 [rows, V], rows with L2 norm 1, without the terms that no training query has.

        A value is (1 + log(count)) * (log(N / documents) + 1).
        """
        columns: list[int] = []
        times: list[int] = []
        offsets = [0]
        for row in counts:
            for term, count in row.items():
                column = self._columns.get(term)
                if column is not None:
                    columns.append(column)
                    times.append(count)
            offsets.append(len(columns))
        term_frequency = 1 + np.log(np.array(times, np.float64))
        values = term_frequency * self._idf[np.array(columns, np.int64)]
        shape = (len(counts), len(self._columns))
        matrix = sp.csr_matrix((values, columns, offsets), shape=shape)
        squares = matrix.multiply(matrix).sum(axis=1)
        lengths = np.sqrt(np.asarray(squares).ravel())
        # A row without any known term stays zero.
        scale = sp.diags(1 / np.maximum(lengths, 1e-12))
        return sp.csr_matrix(scale @ matrix)


def _term_counts(texts: Sequence[str]) -> list[Counter[str]]:
    """Occurrences in each text of words and of pairs of neighbouring words, lower-cased."""
    counts = []
    for text in texts:
        words = re.findall(r"\w+", text.lower())
        pairs = map(" ".join, pairwise(words))
        counts.append(Counter([*words, *pairs]))
    return counts
