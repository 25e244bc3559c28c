"""Words of texts, their weights, and the index of them."""

import math
from collections import Counter
from pathlib import Path

import numpy as np

from xmcray.retrieval.terms import TermCounts, Vocabulary, words, words_and_pairs
from xmcray.retrieval.word_index import LABELS, QUERIES, WordIndex, nearest_labels, write_word_index

TEXTS = ["solve a sparse system", "sparse matrix, sparse vector", "sort rows", "solve rows"]


def test_words_are_split_at_camel_case_and_kept_whole() -> None:
    assert words("readHTTPServer2 of Naïve") == [
        *("read", "http", "server", "2", "readhttpserver2"),
        *("of", "naïve"),
    ]
    assert words_and_pairs("Sort the rows") == ["sort", "the", "rows", "sort the", "the rows"]
    assert words("") == []


def test_vectors_are_those_of_the_formula() -> None:
    counts = TermCounts.of(TEXTS, words)
    vectors = Vocabulary.of(counts).vectors(counts).toarray()
    frequency = Counter(term for text in TEXTS for term in set(words(text)))
    for text, vector in zip(TEXTS, vectors, strict=True):
        values = [
            (1 + math.log(count)) * (math.log(len(TEXTS) / frequency[term]) + 1)
            for term, count in Counter(words(text)).items()
        ]
        length = math.sqrt(sum(value**2 for value in values))
        expected = sorted(value / length for value in values)
        np.testing.assert_allclose(np.sort(vector[vector > 0]), expected)


def test_a_frequent_or_unknown_term_is_left_out() -> None:
    counts = TermCounts.of(TEXTS, words)
    vocabulary = Vocabulary.of(counts, largest_share=0.25)
    vectors = vocabulary.vectors(TermCounts.of(["sparse", "unheard", "system"], words))
    assert np.diff(vectors.indptr).tolist() == [0, 0, 1]
    empty = Vocabulary.of(TermCounts.of([], words))
    assert empty.vectors(counts).shape == (4, 0)


def test_equal_cosines_are_ranked_by_row() -> None:
    cosines = np.array([[0.5, 0, 0.75, 0.5, 0.5], [0, 0, 0, 0, 0]], np.float32)
    assert nearest_labels(cosines, 3).ids.tolist() == [[2, 0, 3], [-1, -1, -1]]
    hidden = np.arange(5) == 2
    assert nearest_labels(cosines, 3, hidden).ids.tolist() == [[0, 3, 4], [-1, -1, -1]]


def test_the_index_finds_the_nearest_texts_and_labels_that_join(tmp_path: Path) -> None:
    write_word_index(tmp_path, TEXTS, ["sparse", "sort", "matrix"])
    index = WordIndex.load(tmp_path, len(TEXTS), 3, [QUERIES, LABELS])
    terms = index.terms(["a sparse vector", "nothing"])
    assert index.nearest_queries(terms, 2).ids.tolist() == [[1, 0], [-1, -1]]
    assert index.nearest_queries(terms, 2, np.array([1])).ids.tolist() == [[0, -1], [-1, -1]]
    before = index.label_cosines(terms)
    grown = index.with_labels(["vector"]).with_labels(["sort", "sparse vector"])
    after = grown.label_cosines(terms)
    np.testing.assert_array_equal(after[:, :3], before)
    assert after[0, 3] > 0
    assert after[0, 4] == 0
    # "sparse" is in too many of these few texts to count.
    assert after[0, 5] == after[0, 3]
