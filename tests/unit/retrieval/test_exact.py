import numpy as np
import pytest
import torch

from xmcray.retrieval import exact
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


@pytest.mark.parametrize("block", [(3, 64), (256, 4096)])
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (5, 5), (70, 3), (900, 40), (900, 900)])
def test_answers_are_the_definition_whatever_the_blocks(monkeypatch, block, rows, k):
    monkeypatch.setattr(exact, "CPU_BLOCK", block)
    rng = np.random.default_rng(rows + k)
    vectors, queries = small_integers(rng, rows, 6), small_integers(rng, 7, 6)
    ids = rng.permutation(rows)
    hidden = Ragged.from_rows(
        [rng.choice(rows, rng.integers(0, min(rows, 6)), replace=False) for _ in queries]
    )
    found = exact_search(vectors, queries, k, ids, hidden)
    wanted = brute(vectors, queries, k, ids, hidden)
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_array_equal(found.scores, wanted.scores)


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


def test_not_a_number_is_never_an_answer():
    vectors = np.array([[np.nan], [1.0], [-np.inf]], np.float32)
    assert exact_search(vectors, np.ones((1, 1), np.float32), 3).ids.tolist() == [[1, -1, -1]]


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
