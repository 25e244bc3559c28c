"""How far word matching gets: labels of the nearest training queries by TF-IDF. A number to beat.

For small data only: the whole training split is a sparse matrix in memory.

Letters of axes: B queries, N training queries, V terms, L labels, P pairs of query and label.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import norm

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
        all_terms = itertools.chain.from_iterable(map(_terms, texts))
        # Sorted, so that the columns do not depend on the order of the texts.
        self._columns = {term: column for column, term in enumerate(sorted(set(all_terms)))}
        counts = self._counts(texts)
        # A term counts once for each text, however often it occurs there.
        num_documents = np.bincount(counts.indices, minlength=len(self._columns))
        self._idf = np.log(len(texts) / num_documents) + 1
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
            # A label that none of the nearest queries carries scores 0 and is no answer.
            query_P, label_P = np.nonzero(score_BL)
            score_P = score_BL[query_P, label_P]
            tops.append(TopLabels.from_pairs(query_P, label_P, score_P, len(chunk), k))
        return TopLabels.concatenate(tops, k)

    def _scores(self, texts: Sequence[str]) -> Float32Array:
        """float32 [queries, labels]."""
        query_BV = self._tfidf(self._counts(texts))
        # Rows have length 1, so products are cosines.
        cosine_BN = (query_BV @ self._train.T).toarray()
        nearest = min(NEIGHBOURS, cosine_BN.shape[1])
        # The smallest cosine that is among the nearest of each query.
        bar_B1 = np.partition(cosine_BN, -nearest, axis=1)[:, [-nearest]]
        cosine_BN[cosine_BN < bar_B1] = 0
        score_BL = sp.csr_matrix(cosine_BN) @ self._labels
        return np.asarray(score_BL.toarray(), np.float32)

    def _counts(self, texts: Sequence[str]) -> sp.csr_matrix:
        """How often each text has each term: int64 [texts, terms].

        Terms that no training query has are left out.
        """
        columns: list[int] = []
        times: list[int] = []
        offsets = [0]
        for text in texts:
            for term, count in Counter(_terms(text)).items():
                if term in self._columns:
                    columns.append(self._columns[term])
                    times.append(count)
            offsets.append(len(columns))
        shape = (len(texts), len(self._columns))
        return sp.csr_matrix((np.array(times, np.int64), columns, offsets), shape=shape)

    def _tfidf(self, counts: sp.csr_matrix) -> sp.csr_matrix:
        """float64 [texts, terms], rows of length 1.

        Before scaling, a value is (1 + log(count)) * (log(N / documents) + 1).
        """
        values = (1 + np.log(counts.data.astype(np.float64))) * self._idf[counts.indices]
        matrix = sp.csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)
        lengths = norm(matrix, axis=1)
        # A row without any known term stays zero.
        scale = sp.diags(1 / np.maximum(lengths, 1e-12))
        return sp.csr_matrix(scale @ matrix)


def _terms(text: str) -> list[str]:
    """Words and pairs of neighbouring words, lower-cased, each as often as it occurs."""
    words = re.findall(r"\w+", text.lower())
    pairs = map(" ".join, itertools.pairwise(words))
    return [*words, *pairs]
