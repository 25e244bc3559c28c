"""An exact inverted index of the words of training queries and label texts. In a bundle:

    words/terms.npy             uint64 [V], ascending: the terms (terms.py)
    words/idf.npy               float64 [V]: how rare each term is
    words/query_offsets.npy     int64 [V + 1], where each term's training queries begin
    words/query_rows.npy        int32, the training queries that have a term, ascending; rows of
                                the memory (memory.py)
    words/query_values.npy      float32, the term's part of a training query's vector
    words/label_*.npy           the same three files for the labels' texts; rows are source ids

The files of queries are absent if training queries do not vote by their words. The files of labels
are absent if the words of label texts do not count.

A score is the cosine of two TF-IDF vectors. The arrays stay on disk, and a search reads only the
lists of the query's terms. If a label joins later, its vector is made from the terms and rarities
that the index has already, so no other score changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from xmcray.data.checked_files import check_offsets, read_array
from xmcray.retrieval.few_queries import reaching_kth
from xmcray.retrieval.readable import readable
from xmcray.retrieval.terms import TermCounts, TermWeights, Vocabulary, words
from xmcray.types import BoolArray, Float32Array, Int64Array, TopLabels, are_ids

FOLDER = "words"
QUERIES = "query"
LABELS = "label"
_LEAST_COSINE = float(np.finfo(np.float32).tiny)  # of an answer: any number above 0
LARGEST_SHARE = 0.2  # terms that occur in a larger share of the texts are left out


@dataclass(frozen=True, eq=False)
class WordIndex:
    """Finds training queries and labels that have words in common with a query.

    Attributes:
        vocabulary: the terms, and how rare they are.
        queries: CSR float32 [V, training queries], or None.
        labels: CSR float32 [V, labels of the export], or None.
        joined: CSR float32 [V, labels that joined since], or None. Their ids follow those of the
            export.
    """

    vocabulary: Vocabulary
    queries: Any = None
    labels: Any = None
    joined: Any = None

    @classmethod
    def load(
        cls, bundle: Path, num_queries: int, num_labels: int, kinds: Sequence[str]
    ) -> WordIndex:
        """Opens the index of a verified bundle; the lists stay on disk.

        Args:
            bundle: local folder of the bundle.
            num_queries: rows of the memory.
            num_labels: labels of the export.
            kinds: the lists to open: QUERIES, LABELS or both.
        Raises:
            BundleError: a file is missing, malformed, or does not fit the others.
        """
        folder = bundle / FOLDER
        num_rows = {QUERIES: num_queries, LABELS: num_labels}
        with readable(f"{folder} cannot be read", "fuse the bundle again"):
            vocabulary = _read_vocabulary(folder)
            num_terms = len(vocabulary.hashes)
            postings = {}
            for kind in kinds:
                postings[kind] = _read_postings(folder, kind, num_terms, num_rows[kind])
        return cls(vocabulary, queries=postings.get(QUERIES), labels=postings.get(LABELS))

    def with_labels(self, texts: Sequence[str]) -> WordIndex:
        """The same index with the texts of further labels, in the order of their ids."""
        if self.labels is None or not texts:
            return self
        counts = TermCounts.of(texts, words)
        joined = _transposed(self.vocabulary.vectors(counts, np.float32))
        if self.joined is not None:
            joined = sp.hstack([self.joined, joined], format="csr")
        return dataclasses.replace(self, joined=joined)

    def terms(self, texts: Sequence[str]) -> TermWeights:
        """The terms of queries, and the weight of each term."""
        return self.vocabulary.weights(TermCounts.of(texts, words))

    def nearest_queries(
        self, terms: TermWeights, k: int, hidden: Int64Array | None = None
    ) -> TopLabels:
        """The k training queries with the largest cosines, equal cosines by lower row.

        Args:
            terms: of B queries.
            k: rows per query.
            hidden: rows that are left out.
        Returns:
            Rows [B, k]; -1 where no further training query has a word in common.
        """
        top = TopLabels.empty(len(terms), k)
        # One array serves all queries, because there may be millions of rows.
        cosine_N = np.empty(self.queries.shape[1], np.float32)
        for query in range(len(terms)):
            cosine_N.fill(0)
            _add_cosines(self.queries, terms, query, cosine_N)
            if hidden is not None:
                cosine_N[hidden] = 0
            _keep_best(cosine_N, top, query)
        return top

    def label_cosines(self, terms: TermWeights) -> Float32Array:
        """float32 [B, L], the cosines of B queries with all label texts; large if B is large."""
        num_exported = self.labels.shape[1]
        num_labels = num_exported
        if self.joined is not None:
            num_labels += self.joined.shape[1]
        cosine_BL = np.zeros((len(terms), num_labels), np.float32)
        for query, cosine_L in enumerate(cosine_BL):
            _add_cosines(self.labels, terms, query, cosine_L[:num_exported])
            if self.joined is not None:
                _add_cosines(self.joined, terms, query, cosine_L[num_exported:])
        return cosine_BL


def _add_cosines(postings: Any, terms: TermWeights, query: int, cosine_N: Float32Array) -> None:
    """Adds the cosines of one query with all rows to `cosine_N`.

    Args:
        postings: CSR float32 [V, N], the rows that have each term.
        terms: of some queries.
        query: the number of the query among them.
        cosine_N: float32, changed in place. The terms are added in ascending order.
    """
    span = slice(terms.offsets[query], terms.offsets[query + 1])
    columns = terms.columns[span]
    weights = terms.values[span].astype(np.float32)
    starts = postings.indptr[columns].tolist()
    stops = postings.indptr[columns + 1].tolist()
    for start, stop, weight in zip(starts, stops, weights, strict=True):
        rows = postings.indices[start:stop]
        products = weight * postings.data[start:stop]
        # Much faster than `cosine_N[rows] += products`, and than a product of sparse matrices.
        np.add.at(cosine_N, rows, products)


def nearest_labels(cosine_BL: Float32Array, k: int, hidden: BoolArray | None = None) -> TopLabels:
    """The k labels of each query with the largest cosines, equal cosines by lower id.

    Args:
        cosine_BL: cosines with all labels. A label with cosine 0 has no word in common with the
            query, and is no answer.
        k: labels per query.
        hidden: bool [L], labels that are left out.
    """
    top = TopLabels.empty(len(cosine_BL), k)
    for query, cosine_L in enumerate(cosine_BL):
        if hidden is not None:
            cosine_L = np.where(hidden, np.float32(0), cosine_L)
        _keep_best(cosine_L, top, query)
    return top


def _keep_best(cosine_N: Float32Array, top: TopLabels, query: int) -> None:
    """Writes the best rows that have a positive cosine into `top`, as the answers to one query."""
    rows = reaching_kth(cosine_N, top.width, lowest=_LEAST_COSINE)
    cosines = cosine_N[rows]
    # Rows ascend, and a stable sort keeps equal cosines in that order.
    order = np.argsort(-cosines, kind="stable")
    best = order[: top.width]
    top.ids[query, : len(best)] = rows[best]
    top.scores[query, : len(best)] = cosines[best]


def write_word_index(bundle: Path, queries: Sequence[str], labels: Sequence[str]) -> None:
    """Writes words/ of a bundle.

    Args:
        bundle: its folder.
        queries: texts of the training queries, by row of the memory.
        labels: texts of the labels, by source id.
    """
    folder = bundle / FOLDER
    folder.mkdir()
    query_counts = TermCounts.of(queries, words)
    label_counts = TermCounts.of(labels, words)
    counts = TermCounts.concatenate([query_counts, label_counts])
    vocabulary = Vocabulary.of(counts, LARGEST_SHARE)
    np.save(folder / "terms.npy", vocabulary.hashes)
    np.save(folder / "idf.npy", vocabulary.idf)
    _write_postings(folder, QUERIES, vocabulary.vectors(query_counts))
    _write_postings(folder, LABELS, vocabulary.vectors(label_counts))


def file_names(kind: str) -> list[str]:
    """Names of the files of one kind of rows, relative to the bundle."""
    return [f"{FOLDER}/{kind}_{name}.npy" for name in ("offsets", "rows", "values")]


def _write_postings(folder: Path, kind: str, vectors: Any) -> None:
    postings = _transposed(vectors)
    np.save(folder / f"{kind}_offsets.npy", postings.indptr.astype(np.int64))
    np.save(folder / f"{kind}_rows.npy", postings.indices.astype(np.int32))
    np.save(folder / f"{kind}_values.npy", postings.data.astype(np.float32))


def _read_vocabulary(folder: Path) -> Vocabulary:
    hashes = read_array(folder / "terms.npy", np.uint64, mapped=True)
    idf = read_array(folder / "idf.npy", np.float64, mapped=True)
    is_ascending = np.all(hashes[1:] > hashes[:-1])
    are_rarities = len(hashes) == len(idf) and np.isfinite(idf).all()
    if not is_ascending or not are_rarities:
        raise ValueError("expected ascending terms with one rarity each")
    # `asarray` makes plain arrays over the same memory. Each look-up in a `memmap` would take
    # microseconds longer.
    return Vocabulary(np.asarray(hashes), np.asarray(idf))


def _read_postings(folder: Path, kind: str, num_terms: int, num_rows: int) -> Any:
    offsets = read_array(folder / f"{kind}_offsets.npy", np.int64, mapped=True)
    rows = read_array(folder / f"{kind}_rows.npy", np.int32, mapped=True)
    values = read_array(folder / f"{kind}_values.npy", np.float32, mapped=True)
    check_offsets(offsets, num_terms, len(values))
    # A search would count a negative row from the end, and fail at a row that is too large.
    are_values = len(rows) == len(values) and np.isfinite(values).all()
    if not are_ids(rows, num_rows) or not are_values:
        raise ValueError(f"expected rows below {num_rows} with one value each")
    arrays = (np.asarray(values), np.asarray(rows), np.asarray(offsets))
    return sp.csr_matrix(arrays, shape=(num_terms, num_rows), copy=False)


def _transposed(vectors: Any) -> Any:
    """CSR [V, rows], the ascending rows that have each term, of CSR [rows, V]."""
    return vectors.T.tocsr()
