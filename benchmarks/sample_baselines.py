"""How far plain word matching gets on the embedded sample: 10 nearest training queries by TF-IDF cosine.

python benchmarks/sample_baselines.py [FOLDER]     # a folder of plain JSON lines instead of the sample
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from xmcray.data.formats import BadRow, Row, Source, detect
from xmcray.data.sample import write_sample
from xmcray.errors import DataError

NEIGHBOURS = 10


def fail(bad: BadRow) -> None:
    raise DataError(str(bad))


def tfidf(train: list[str], test: list[str]) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """float64 [N, V] and [Q, V]: words and word pairs, 1 + log(count) times log(N / documents), rows of length 1."""
    counts = [[Counter(terms(text)) for text in texts] for texts in (train, test)]
    documents = Counter(term for row in counts[0] for term in row)
    columns = {term: column for column, term in enumerate(sorted(documents))}
    idf = np.log(len(train) / np.array([documents[term] for term in sorted(documents)])) + 1
    return tuple(_matrix(rows, columns, idf) for rows in counts)


def terms(text: str) -> list[str]:
    words = re.findall(r"\w+", text.lower())
    return words + [f"{a} {b}" for a, b in pairwise(words)]


def _matrix(rows: list[Counter[str]], columns: dict[str, int], idf: np.ndarray) -> sp.csr_matrix:
    entries = [(i, columns[t], 1 + np.log(n)) for i, row in enumerate(rows) for t, n in row.items() if t in columns]
    row, column, value = map(np.array, zip(*entries, strict=True))
    matrix = sp.csr_matrix((value * idf[column], (row, column)), shape=(len(rows), len(columns)))
    norms = np.sqrt(matrix.multiply(matrix).sum(axis=1).A1)
    return sp.csr_matrix(sp.diags(1 / np.maximum(norms, 1e-12)) @ matrix)


def positives(rows: list[Row], num_labels: int) -> sp.csr_matrix:
    indptr = np.cumsum([0] + [len(row.label_ids) for row in rows])
    indices = np.array([label for row in rows for label in row.label_ids], dtype=np.int64)
    return sp.csr_matrix((np.ones(len(indices)), indices, indptr), shape=(len(rows), num_labels))


def knn_scores(source: Source) -> tuple[np.ndarray, sp.csr_matrix]:
    """Scores float64 [Q, L], filter pairs at -inf, and the true labels [Q, L] of the test split."""
    num_labels = sum(1 for _ in source.labels(fail))
    train, test = (list(source.queries(split, num_labels, fail)) for split in ("train", "test"))
    train_tfidf, test_tfidf = tfidf([row.text for row in train], [row.text for row in test])
    cosine = (test_tfidf @ train_tfidf.T).toarray()
    cosine[cosine < np.partition(cosine, -NEIGHBOURS, axis=1)[:, [-NEIGHBOURS]]] = 0
    scores = sp.csr_matrix(cosine) @ positives(train, num_labels)
    scores = scores.toarray()
    filters = source.filters("test")
    scores[filters[:, 0], filters[:, 1]] = -np.inf
    return scores, positives(test, num_labels)


def precision(scores: np.ndarray, truth: sp.csr_matrix, k: int) -> float:
    top = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return float(np.take_along_axis(truth.toarray(), top, axis=1).sum() / (k * len(scores)))


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        if len(sys.argv) == 1:
            write_sample(folder)
        scores, truth = knn_scores(detect(folder))
    print(f"{scores.shape[0]} test queries, {scores.shape[1]} labels")
    for k in (1, 3, 5):
        print(f"P@{k} {precision(scores, truth, k):.3f}")


if __name__ == "__main__":
    main()
