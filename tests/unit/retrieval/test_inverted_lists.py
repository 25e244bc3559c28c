"""Lists of torch alone, as a device has them, and here on the CPU."""

import numpy as np
import pytest
import torch

from xmcray.retrieval import index_spec, inverted_lists
from xmcray.retrieval.answerable import AnswerableRows
from xmcray.retrieval.exact import empty_keys, exact_keys, exact_search
from xmcray.retrieval.index_building import index_of_lists
from xmcray.retrieval.index_spec import IndexSpec, num_lists
from xmcray.retrieval.inverted_lists import Limits
from xmcray.retrieval.kmeans import build_lists
from xmcray.retrieval.list_scan import scan_lists
from xmcray.types import Ragged

CPU = torch.device("cpu")
LIMITS = {
    "as always": inverted_lists.CPU,
    "tight": Limits(queries=7, visits=40, scores=600, hits=50, keys=64),
}


@pytest.fixture(params=LIMITS)
def limits(request, monkeypatch):
    """How much is computed at once must not matter."""
    monkeypatch.setattr(inverted_lists, "CPU", LIMITS[request.param])


@pytest.fixture
def many(monkeypatch):
    """A few thousand rows are many."""
    monkeypatch.setattr(index_spec, "FLAT_ROWS", 1000)


def around_centres(num_rows, num_queries):
    """Rows around 100 centres and of about one length, a few long ones, and queries near rows."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((100, 16), np.float32)
    rows = centres[rng.integers(100, size=num_rows)]
    rows += np.float32(0.4) * rng.standard_normal(rows.shape, np.float32)
    rows[::200] *= 3
    queries = rows[rng.integers(num_rows, size=num_queries)]
    queries += np.float32(0.2) * rng.standard_normal(queries.shape, np.float32)
    return rows, queries


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("with_hidden_rows", [False, True])
@pytest.mark.parametrize("k", [1, 20, 400])
def test_all_lists_have_the_answers_of_an_exact_search_to_the_last_bit(k, with_hidden_rows):
    rng = np.random.default_rng(k)
    # Products of small integers are exact in float32, and full of ties.
    rows = rng.integers(-2, 3, (900, 6)).astype(np.float32)
    queries = rng.integers(-2, 3, (23, 6)).astype(np.float32)
    ids = rng.permutation(900)
    ids[::7] = -1
    hidden = None
    if with_hidden_rows:
        hidden = Ragged.from_rows([rng.choice(900, 30, replace=False) for _ in queries])
    answerable = AnswerableRows.of(900, 23, ids, hidden)
    long_ids = np.arange(5, 900, 9)
    lists = build_lists(torch.from_numpy(rows), long_ids, 12, seed=0)
    found = scan_lists(lists, queries, k, 12, answerable)
    wanted = exact_keys(torch.from_numpy(rows), queries, empty_keys(23, k), answerable)
    assert torch.equal(found, wanted)


@pytest.mark.usefixtures("limits")
def test_scores_that_are_no_numbers_are_no_answers():
    rows = np.ones((100, 4), np.float32)
    rows[3] = np.nan
    rows[7] = -np.inf
    lists = build_lists(torch.from_numpy(rows), np.empty(0, np.int64), 1, seed=0)
    queries = np.ones((2, 4), np.float32)
    answerable = AnswerableRows.of(100, 2, None, None)
    found = scan_lists(lists, queries, 100, 1, answerable)
    wanted = exact_keys(torch.from_numpy(rows), queries, empty_keys(2, 100), answerable)
    assert torch.equal(found, wanted)


def test_every_row_is_in_one_list_the_nearest_one():
    rows, _ = around_centres(3000, 1)
    long_ids = np.arange(0, 3000, 200)
    lists = build_lists(torch.from_numpy(rows), long_ids, 64, seed=0)
    positions = []
    for start, size in zip(lists.offset_A.tolist(), lists.size_A.tolist(), strict=True):
        positions.append(lists.row_ids[start : start + size].numpy())
    assert np.sort(np.concatenate(positions)).tolist() == list(range(3000))
    assert np.sort(np.concatenate(positions[64:])).tolist() == long_ids.tolist()
    centroids = lists.centroid_CD.numpy()
    for number, members in enumerate(positions[:64]):
        assert (np.argmax(rows[members] @ centroids.T, axis=1) == number).all()


@pytest.mark.usefixtures("many")
def test_few_lists_of_rows_around_centres_have_the_wanted_recall():
    rows, queries = around_centres(12_000, 600)
    index = index_of_lists(rows, IndexSpec(), CPU, queries[:256])
    assert 0 < index.nprobe <= num_lists("auto", 12_000) / 10
    found = index.search(queries[256:], 50)
    wanted = exact_search(rows, queries[256:], 50)
    hits = [len(np.intersect1d(*pair)) for pair in zip(found.ids, wanted.ids, strict=True)]
    assert np.mean(hits) / 50 >= 0.94
    again = index_of_lists(rows, IndexSpec(), CPU, queries[:256])
    assert again.nprobe == index.nprobe
    np.testing.assert_array_equal(again.search(queries, 50).ids, index.search(queries, 50).ids)


@pytest.mark.usefixtures("many")
def test_rows_that_no_list_tells_apart_are_all_compared():
    """In 256 dimensions, the nearest of random rows lie in more than half of the lists."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((6000, 256), np.float32)
    queries = rng.standard_normal((64, 256), np.float32)
    index = index_of_lists(rows, IndexSpec(recall=0.99), CPU, queries)
    assert index.is_exact
    np.testing.assert_array_equal(index.search(queries, 5).ids, exact_search(rows, queries, 5).ids)


@pytest.mark.usefixtures("many")
def test_more_answers_than_the_visited_lists_hold_are_found():
    rows, queries = around_centres(12_000, 10)
    index = index_of_lists(rows, IndexSpec(nprobe=1), CPU, queries)
    assert (index.search(queries, 3000).ids >= 0).all()
