"""How far word matching gets: labels of the nearest training queries by TF-IDF. A number to beat.

For small data only: the whole training split is a sparse matrix in memory.

Letters of axes: B queries, N training queries, V terms, L labels, P pairs of query and label.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.sparse as sp

from xmcray.retrieval.terms import TermCounts, Vocabulary, words_and_pairs
from xmcray.types import Float32Array, Ragged, TopLabels, spans

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
        counts = TermCounts.of(texts, words_and_pairs)
        self._vocabulary = Vocabulary.of(counts)
        self._train = self._vocabulary.vectors(counts)
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
        for span in spans(len(texts), _CHUNK):
            chunk = texts[span]
            score_BL = self._scores(chunk)
            if exclude is not None:
                hidden = exclude.slice(span.start, span.stop)
                score_BL[hidden.row_ids, hidden.values] = 0
            # A label that none of the nearest queries carries scores 0 and is no answer.
            query_P, label_P = np.nonzero(score_BL)
            score_P = score_BL[query_P, label_P]
            tops.append(TopLabels.from_pairs(query_P, label_P, score_P, len(chunk), k))
        return TopLabels.concatenate(tops, k)

    def _scores(self, texts: Sequence[str]) -> Float32Array:
        """float32 [queries, labels]."""
        query_BV = self._vocabulary.vectors(TermCounts.of(texts, words_and_pairs))
        # Rows have length 1, so products are cosines.
        cosine_BN = (query_BV @ self._train.T).toarray()
        nearest = min(NEIGHBOURS, cosine_BN.shape[1])
        # The smallest cosine that is among the nearest of each query.
        bar_B1 = np.partition(cosine_BN, -nearest, axis=1)[:, [-nearest]]
        cosine_BN[cosine_BN < bar_B1] = 0
        score_BL = sp.csr_matrix(cosine_BN) @ self._labels
        return np.asarray(score_BL.toarray(), np.float32)
