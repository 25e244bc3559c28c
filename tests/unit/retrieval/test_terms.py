"""Words of texts, their weights, and the index of them."""

import math
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np

from xmcray.retrieval.terms import TermCounts, Vocabulary, words, words_and_pairs
from xmcray.retrieval.word_index import LABELS, QUERIES, WordIndex, nearest_labels, write_word_index

TEXTS = [
    "solve a sparse system",
    "sparse matrix, sparse vector",
    "sort rows",
    "solve rows",
]


def test_words_are_split_at_camel_case_and_kept_whole() -> None:
    assert words("readHTTPServer2 of Naïve") == [
        "read",
        "http",
        "server",
        "2",
        "readhttpserver2",
        "of",
        "naïve",
    ]
    assert words_and_pairs("Sort the rows") == [
        "sort",
        "the",
        "rows",
        "sort the",
        "the rows",
    ]
    assert words("") == []


def test_long_words_do_not_stay_in_memory() -> None:
    tracemalloc.start()
    for number in range(100):
        TermCounts.of([f"{number}x{'a' * 50_000}"], words)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000


def tf_idf(text: str, num_texts_with: Counter[str]) -> list[float]:
    """The nonzero entries of a text's vector, by the formula, before it is normalised."""
    values = []
    for term, count in Counter(words(text)).items():
        frequency = 1 + math.log(count)
        rarity = math.log(len(TEXTS) / num_texts_with[term]) + 1
        values.append(frequency * rarity)
    return values


def test_vectors_are_those_of_the_formula() -> None:
    num_texts_with: Counter[str] = Counter()
    for text in TEXTS:
        num_texts_with.update(set(words(text)))

    counts = TermCounts.of(TEXTS, words)
    vectors = Vocabulary.of(counts).vectors(counts).toarray()

    # Sorted, because the order of the terms in a vector is not part of the formula.
    for text, vector in zip(TEXTS, vectors, strict=True):
        values = tf_idf(text, num_texts_with)
        expected = np.sort(values) / math.hypot(*values)
        nonzero = np.sort(vector[vector > 0])
        np.testing.assert_allclose(nonzero, expected)


def test_a_frequent_or_unknown_term_is_left_out() -> None:
    counts = TermCounts.of(TEXTS, words)
    queries = TermCounts.of(["sparse", "unheard", "system"], words)

    vocabulary = Vocabulary.of(counts, largest_share=0.25)

    vectors = vocabulary.vectors(queries)
    terms_per_query = np.diff(vectors.indptr)
    assert terms_per_query.tolist() == [0, 0, 1]

    no_counts = TermCounts.of([], words)
    no_terms = Vocabulary.of(no_counts)
    assert no_terms.vectors(counts).shape == (4, 0)


def test_equal_cosines_are_ranked_by_row() -> None:
    cosines = np.array(
        [
            [0.5, 0, 0.75, 0.5, 0.5],
            [0, 0, 0, 0, 0],
        ],
        np.float32,
    )

    nearest = nearest_labels(cosines, 3)
    assert nearest.ids.tolist() == [
        [2, 0, 3],
        [-1, -1, -1],
    ]

    is_hidden = np.arange(5) == 2
    nearest = nearest_labels(cosines, 3, is_hidden)
    assert nearest.ids.tolist() == [
        [0, 3, 4],
        [-1, -1, -1],
    ]


def test_the_index_finds_the_nearest_texts_and_labels_that_join(tmp_path: Path) -> None:
    write_word_index(tmp_path, TEXTS, ["sparse", "sort", "matrix"])
    index = WordIndex.load(tmp_path, len(TEXTS), 3, [QUERIES, LABELS])
    terms = index.terms(["a sparse vector", "nothing"])

    nearest = index.nearest_queries(terms, 2)
    assert nearest.ids.tolist() == [[1, 0], [-1, -1]]

    text_1_is_hidden = np.array([1])
    nearest = index.nearest_queries(terms, 2, text_1_is_hidden)
    assert nearest.ids.tolist() == [[0, -1], [-1, -1]]

    grown = index.with_labels(["vector"])
    grown = grown.with_labels(["sort", "sparse vector"])

    before = index.label_cosines(terms)
    after = grown.label_cosines(terms)
    np.testing.assert_array_equal(after[:, :3], before)
    vector, sort, sparse_vector = after[0, 3:]
    assert vector > 0
    assert sort == 0
    # "sparse" is in too many of these few texts to count.
    assert sparse_vector == vector
