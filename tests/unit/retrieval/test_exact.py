"""Exact search equals a sort of all rows, whatever the blocks and the number of queries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from xmcray.retrieval import ann, exact, few_queries
from xmcray.retrieval.exact import exact_search, from_keys, to_keys
from xmcray.types import Ragged, TopLabels


def sort_all_rows(
    vectors: np.ndarray,
    queries: np.ndarray,
    k: int,
    ids: np.ndarray,
    hidden: Ragged | None = None,
) -> TopLabels:
    """The definition: sort all rows of each query by (score descending, id ascending)."""
    all_rows = np.arange(len(vectors))
    top = TopLabels.empty(len(queries), k)
    for place, query in enumerate(queries):
        scores = vectors @ query
        rows = all_rows
        if hidden is not None:
            rows = np.setdiff1d(all_rows, hidden[place])
        # The last key of lexsort is the first one that decides.
        keys = (ids[rows], -scores[rows])
        order = np.lexsort(keys)
        best = rows[order][:k]
        num_answers = len(best)
        top.scores[place, :num_answers] = scores[best]
        top.ids[place, :num_answers] = ids[best]
    return top


def assert_same_answers(top: TopLabels, expected: TopLabels) -> None:
    assert_array_equal(top.ids, expected.ids)
    assert_array_equal(top.scores, expected.scores)


def small_integers(
    rng: np.random.Generator,
    num_rows: int,
    dim: int,
) -> np.ndarray:
    """Products of small integers are exact in float32, and full of ties."""
    integers = rng.integers(-2, 3, (num_rows, dim))
    return integers.astype(np.float32)


def hide_some_rows(
    rng: np.random.Generator,
    num_queries: int,
    num_rows: int,
) -> Ragged:
    """Up to five rows that are hidden from each query, but never all of them."""
    hidden = []
    for _ in range(num_queries):
        num_hidden = rng.integers(0, min(num_rows, 6))
        rows = rng.choice(num_rows, num_hidden, replace=False)
        hidden.append(rows)
    return Ragged.from_rows(hidden)


@pytest.mark.parametrize("num_queries", [2, 7])
@pytest.mark.parametrize(
    "block",
    [
        (3, 64),
        (256, 4096),
    ],
)
@pytest.mark.parametrize(
    ("rows", "k"),
    [
        (1, 1),
        (5, 5),
        (70, 3),
        (900, 40),
        (900, 900),
    ],
)
def test_answers_are_the_definition_whatever_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
    block: tuple[int, int],
    rows: int,
    k: int,
    num_queries: int,
) -> None:
    monkeypatch.setattr(exact, "CPU_BLOCK", block)
    rng = np.random.default_rng(rows + k)
    vectors = small_integers(rng, rows, 6)
    queries = small_integers(rng, num_queries, 6)
    ids = rng.permutation(rows)
    hidden = hide_some_rows(rng, num_queries, rows)

    top = exact_search(
        vectors,
        queries,
        k,
        ids,
        hidden,
    )

    expected = sort_all_rows(
        vectors,
        queries,
        k,
        ids,
        hidden,
    )
    assert_same_answers(top, expected)


def test_rows_without_an_id_are_no_answers_to_one_query() -> None:
    vectors = np.arange(8, dtype=np.float32)[:, None]
    query = np.ones((1, 1), np.float32)
    # The row with the best score has no id, and the next best one is hidden.
    ids = np.append(np.arange(10, 17), -1)
    hidden = Ragged.from_rows([[6]])

    three = exact_search(
        vectors,
        query,
        3,
        ids,
        hidden,
    )
    nine = exact_search(
        vectors,
        query,
        9,
        ids,
        hidden,
    )

    assert three.ids.tolist() == [[15, 14, 13]]
    assert nine.ids.tolist() == [[15, 14, 13, 12, 11, 10, -1, -1, -1]]


def test_bits_of_one_querys_scores_depend_on_no_other_row_or_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((1001, 37), dtype=np.float32)
    query = rng.standard_normal((1, 37), dtype=np.float32)

    whole = exact_search(vectors, query, 1001)
    fewer = exact_search(vectors[:500], query, 500)

    # Of the answers among all rows, those that are also among the first 500.
    is_shared = whole.ids < 500
    shared = TopLabels(
        whole.ids[is_shared][None],
        whole.scores[is_shared][None],
    )
    assert_same_answers(shared, fewer)

    monkeypatch.setattr(few_queries, "THREAD_FLOATS", 10_000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    parallel = exact_search(vectors, query, 1001)
    assert_same_answers(parallel, whole)


@pytest.mark.parametrize("k", [1, 10, 98, 300])
def test_one_query_gets_the_definition_with_the_same_bits(k: int) -> None:
    rng = np.random.default_rng(k)
    vectors = rng.standard_normal((3000, 37), dtype=np.float32)
    query = rng.standard_normal((1, 37), dtype=np.float32)
    ids = rng.permutation(3000)

    top = exact_search(vectors, query, k, ids)

    score_of_id = np.empty(3000, np.float32)
    score_of_id[ids] = ann.inner_products(vectors, query[0])
    # A stable sort leaves equal scores in the order of their ids.
    order = np.argsort(-score_of_id, kind="stable")
    best_ids = order[:k]
    assert_array_equal(top.ids, [best_ids])
    assert_array_equal(top.scores, [score_of_id[best_ids]])


@pytest.mark.parametrize("seed", range(5))
def test_one_query_decides_ties_by_id(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = small_integers(rng, 500, 6)
    query = small_integers(rng, 1, 6)
    ids = rng.permutation(500)

    for k in (1, 7, 60):
        top = exact_search(vectors, query, k, ids)

        expected = sort_all_rows(vectors, query, k, ids)
        assert_array_equal(top.ids, expected.ids)


def test_one_query_is_answered_without_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    vectors = small_integers(rng, 300, 6)
    query = small_integers(rng, 1, 6)

    with_faiss = exact_search(vectors, query, 20)
    monkeypatch.setattr(ann, "is_installed", lambda: False)
    without_faiss = exact_search(vectors, query, 20)

    assert_array_equal(with_faiss.ids, without_faiss.ids)


def test_rows_that_arrive_in_rising_order_of_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "CPU_BLOCK", (4, 64))
    vectors = np.arange(1000, dtype=np.float32)[:, None]
    queries = np.array([[1.0], [-1.0]], np.float32)

    top = exact_search(vectors, queries, 3)

    assert top.ids.tolist() == [
        [999, 998, 997],
        [0, 1, 2],
    ]
    assert top.scores.tolist() == [
        [999, 998, 997],
        [0, -1, -2],
    ]


@pytest.mark.parametrize("num_queries", [257, 258, 769])
def test_equal_vectors_are_answered_by_id_whatever_is_left_for_the_last_block(
    num_queries: int,
) -> None:
    """Blocks have 256 queries and 4,096 rows, so a few of each are left."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((4098, 64), dtype=np.float32)
    originals, twins = np.split(rng.permutation(len(rows)), 2)
    rows[twins] = rows[originals]
    near = rows[rng.integers(len(rows), size=num_queries)]
    queries = near + 0.1 * rng.standard_normal(near.shape, dtype=np.float32)

    top = exact_search(rows, queries, 10)

    vectors = rows[top.ids]
    is_twin_of_next = (vectors[:, :-1] == vectors[:, 1:]).all(axis=2)
    assert is_twin_of_next.any()
    is_ascending = top.ids[:, :-1] < top.ids[:, 1:]
    assert is_ascending[is_twin_of_next].all()


def test_no_rows_and_no_queries() -> None:
    rows = np.ones((5, 4), np.float32)
    queries = np.ones((2, 4), np.float32)
    nothing = np.ones((0, 4), np.float32)

    without_rows = exact_search(nothing, queries, 3)
    assert (without_rows.ids == -1).all()
    assert np.isneginf(without_rows.scores).all()

    without_queries = exact_search(rows, nothing, 3)
    assert without_queries.ids.shape == (0, 3)


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("k", [1, 3])
def test_not_a_number_is_never_an_answer(num_queries: int, k: int) -> None:
    scores = [np.nan, 1.0, -np.inf]
    vectors = np.array(scores, np.float32)[:, None]
    queries = np.ones((num_queries, 1), np.float32)

    top = exact_search(vectors, queries, k)

    # Only row 1 has a score; the rest is padding.
    expected = [1, -1, -1][:k]
    assert top.ids.tolist() == [expected] * num_queries


def test_read_only_vectors_are_accepted() -> None:
    vectors = np.eye(3, dtype=np.float32)
    vectors.flags.writeable = False

    top = exact_search(vectors, vectors, 1)

    assert top.ids.ravel().tolist() == [0, 1, 2]


def test_keys_order_like_score_then_id_and_can_be_read_back() -> None:
    ascending = [-1e30, -2.5, -1e-40, -0.0, 0.0, 1e-40, 3.0, 1e30]
    score = torch.tensor(ascending)
    ids = torch.tensor([7, 3])

    # One row of keys for each score, one column for each id.
    keys = to_keys(score[:, None].repeat(1, 2), ids)

    lowest = keys.amin(dim=1)
    highest = keys.amax(dim=1)
    rises = lowest[1:] > highest[:-1]
    # Every score but 0.0, the fifth, is greater than the one before it.
    assert rises.tolist() == [
        True,
        True,
        True,
        False,
        True,
        True,
        True,
    ]
    assert torch.equal(keys[3], keys[4]), "both zeros are one score"
    id_7, id_3 = keys.unbind(dim=1)
    assert (id_3 > id_7).all(), "the lower id wins"

    top = from_keys(keys)
    assert_array_equal(top.scores[:, 0], score)
    assert top.ids.tolist() == [[7, 3]] * 8
