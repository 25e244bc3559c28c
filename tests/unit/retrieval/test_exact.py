import numpy as np
import pytest
import torch

from xmcray.retrieval import ann, exact, few_queries
from xmcray.retrieval.exact import exact_search, from_keys, to_keys
from xmcray.types import Ragged, TopLabels


def brute(vectors, queries, k, ids=None, hidden=None):
    """The definition: sort all rows of each query by (score descending, id ascending)."""
    ids = np.arange(len(vectors)) if ids is None else ids
    top = TopLabels.empty(len(queries), k)
    for row, query in enumerate(queries):
        score = vectors @ query
        keep = np.setdiff1d(np.arange(len(vectors)), hidden[row] if hidden is not None else [])
        order = keep[np.lexsort((ids[keep], -score[keep]))][:k]
        top.scores[row, : len(order)] = score[order]
        top.ids[row, : len(order)] = ids[order]
    return top


def small_integers(rng, rows, dim):
    """Products of small integers are exact in float32, and full of ties."""
    return rng.integers(-2, 3, (rows, dim)).astype(np.float32)


@pytest.mark.parametrize("num_queries", [2, 7])
@pytest.mark.parametrize("block", [(3, 64), (256, 4096)])
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (5, 5), (70, 3), (900, 40), (900, 900)])
def test_answers_are_the_definition_whatever_the_blocks(monkeypatch, block, rows, k, num_queries):
    monkeypatch.setattr(exact, "CPU_BLOCK", block)
    rng = np.random.default_rng(rows + k)
    vectors, queries = small_integers(rng, rows, 6), small_integers(rng, num_queries, 6)
    ids = rng.permutation(rows)
    hidden = Ragged.from_rows(
        [rng.choice(rows, rng.integers(0, min(rows, 6)), replace=False) for _ in queries]
    )
    found = exact_search(vectors, queries, k, ids, hidden)
    wanted = brute(vectors, queries, k, ids, hidden)
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_array_equal(found.scores, wanted.scores)


def test_rows_without_an_id_are_no_answers_to_one_query():
    vectors = np.arange(8, dtype=np.float32)[:, None]
    # The row with the best score has no id, and the next best one is hidden.
    ids = np.array([10, 11, 12, 13, 14, 15, 16, -1])
    hidden = Ragged.from_rows([[6]])
    top = exact_search(vectors, np.ones((1, 1), np.float32), 3, ids, hidden)
    assert top.ids.tolist() == [[15, 14, 13]]
    top = exact_search(vectors, np.ones((1, 1), np.float32), 9, ids, hidden)
    assert top.ids.tolist() == [[15, 14, 13, 12, 11, 10, -1, -1, -1]]


def test_bits_of_one_querys_scores_depend_on_no_other_row_or_thread(monkeypatch):
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((1001, 37), dtype=np.float32)
    query = rng.standard_normal((1, 37), dtype=np.float32)
    whole = exact_search(vectors, query, 1001)
    fewer = exact_search(vectors[:500], query, 500)
    kept = whole.ids[0] < 500
    np.testing.assert_array_equal(whole.ids[0, kept], fewer.ids[0])
    np.testing.assert_array_equal(whole.scores[0, kept], fewer.scores[0])
    monkeypatch.setattr(few_queries, "THREAD_FLOATS", 10_000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    parallel = exact_search(vectors, query, 1001)
    np.testing.assert_array_equal(parallel.scores, whole.scores)
    np.testing.assert_array_equal(parallel.ids, whole.ids)


@pytest.mark.parametrize("k", [1, 10, 98, 300])
def test_one_query_gets_the_definition_with_the_same_bits(k):
    rng = np.random.default_rng(k)
    vectors = rng.standard_normal((3000, 37), dtype=np.float32)
    query = rng.standard_normal((1, 37), dtype=np.float32)
    ids = rng.permutation(3000)
    top = exact_search(vectors, query, k, ids)
    score_of_id = np.empty(3000, np.float32)
    score_of_id[ids] = ann.inner_products(vectors, query[0])
    assert top.ids[0].tolist() == np.argsort(-score_of_id, kind="stable")[:k].tolist()
    np.testing.assert_array_equal(top.scores[0], score_of_id[top.ids[0]])


@pytest.mark.parametrize("seed", range(5))
def test_one_query_decides_ties_by_id(seed):
    rng = np.random.default_rng(seed)
    vectors, query = small_integers(rng, 500, 6), small_integers(rng, 1, 6)
    ids = rng.permutation(500)
    for k in (1, 7, 60):
        found = exact_search(vectors, query, k, ids)
        wanted = brute(vectors, query, k, ids)
        np.testing.assert_array_equal(found.ids, wanted.ids)


def test_one_query_is_answered_without_faiss(monkeypatch):
    rng = np.random.default_rng(0)
    vectors = small_integers(rng, 300, 6)
    query = small_integers(rng, 1, 6)
    with_faiss = exact_search(vectors, query, 20)
    monkeypatch.setattr(ann, "is_installed", lambda: False)
    without_faiss = exact_search(vectors, query, 20)
    np.testing.assert_array_equal(with_faiss.ids, without_faiss.ids)


def test_rows_that_arrive_in_rising_order_of_score(monkeypatch):
    monkeypatch.setattr(exact, "CPU_BLOCK", (4, 64))
    vectors = np.arange(1000, dtype=np.float32)[:, None]
    top = exact_search(vectors, np.array([[1.0], [-1.0]], np.float32), 3)
    assert top.ids.tolist() == [[999, 998, 997], [0, 1, 2]]
    assert top.scores.tolist() == [[999, 998, 997], [0, -1, -2]]


def test_no_rows_and_no_queries():
    rows = np.ones((5, 4), np.float32)
    without_rows = exact_search(rows[:0], rows[:2], 3)
    assert (without_rows.ids == -1).all()
    assert np.isneginf(without_rows.scores).all()
    assert exact_search(rows, rows[:0], 3).ids.shape == (0, 3)


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("k", [1, 3])
def test_not_a_number_is_never_an_answer(num_queries, k):
    vectors = np.array([[np.nan], [1.0], [-np.inf]], np.float32)
    queries = np.ones((num_queries, 1), np.float32)
    assert exact_search(vectors, queries, k).ids.tolist() == [[1, -1, -1][:k]] * num_queries


def test_read_only_vectors_are_accepted():
    vectors = np.eye(3, dtype=np.float32)
    vectors.flags.writeable = False
    assert exact_search(vectors, vectors, 1).ids.ravel().tolist() == [0, 1, 2]


def test_keys_order_like_score_then_id_and_can_be_read_back():
    score = torch.tensor([-1e30, -2.5, -1e-40, -0.0, 0.0, 1e-40, 3.0, 1e30])
    keys = to_keys(score[:, None].repeat(1, 2), torch.tensor([7, 3]))
    assert (
        keys[1:, :].min(dim=1).values.gt(keys[:-1, :].max(dim=1).values)[[0, 1, 2, 4, 5, 6]].all()
    )
    assert torch.equal(keys[3], keys[4]), "both zeros are one score"
    assert (keys[:, 1] > keys[:, 0]).all(), "the lower id wins"
    top = from_keys(keys)
    np.testing.assert_array_equal(top.scores[:, 0], score.numpy())
    assert top.ids.tolist() == [[7, 3]] * 8
