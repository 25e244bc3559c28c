"""Lists of torch alone, as a device has them, and here on the CPU."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from xmcray.retrieval import index_spec, inverted_lists
from xmcray.retrieval.answerable import AnswerableRows
from xmcray.retrieval.exact import empty_keys, exact_keys, exact_search
from xmcray.retrieval.index_building import build_index, index_of_lists
from xmcray.retrieval.index_spec import IndexSpec, num_lists
from xmcray.retrieval.inverted_lists import InvertedLists, Limits
from xmcray.retrieval.kmeans import build_lists
from xmcray.retrieval.list_scan import scan_lists
from xmcray.types import Ragged

CPU = torch.device("cpu")
LIMITS = {
    "as always": inverted_lists.CPU,
    "tight": Limits(
        queries=7,
        visits=40,
        scores=600,
        hits=50,
        keys=64,
    ),
}


@pytest.fixture(params=LIMITS)
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much is computed at once must not matter."""
    monkeypatch.setattr(inverted_lists, "CPU", LIMITS[request.param])


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few thousand rows are many."""
    monkeypatch.setattr(index_spec, "FLAT_ROWS", 1000)


def around_centres(num_rows: int, num_queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows around 100 centres and of about one length, a few long ones, and queries near rows."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((100, 16), np.float32)
    rows = centres[rng.integers(100, size=num_rows)]
    rows += np.float32(0.4) * rng.standard_normal(rows.shape, np.float32)
    rows[::200] *= 3
    queries = rows[rng.integers(num_rows, size=num_queries)]
    queries += np.float32(0.2) * rng.standard_normal(queries.shape, np.float32)
    return rows, queries


def assert_all_lists_are_exact(
    rows: np.ndarray,
    queries: np.ndarray,
    k: int,
    lists: InvertedLists,
    answerable: AnswerableRows,
    num_visited: int,
) -> None:
    """A scan of all lists has the keys of an exact search, to the last bit."""
    keys = scan_lists(
        lists,
        queries,
        k,
        num_visited,
        answerable,
    )

    expected = exact_keys(
        torch.from_numpy(rows),
        queries,
        empty_keys(len(queries), k),
        answerable,
    )
    assert torch.equal(keys, expected)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("with_hidden_rows", [False, True])
@pytest.mark.parametrize("k", [1, 20, 400])
def test_all_lists_have_the_answers_of_an_exact_search_to_the_last_bit(
    k: int, with_hidden_rows: bool
) -> None:
    rng = np.random.default_rng(k)
    # Products of small integers are exact in float32, and full of ties.
    rows = rng.integers(-2, 3, (900, 6)).astype(np.float32)
    queries = rng.integers(-2, 3, (23, 6)).astype(np.float32)
    ids = rng.permutation(900)
    ids[::7] = -1
    hidden = None
    if with_hidden_rows:
        hidden = Ragged.from_rows([rng.choice(900, 30, replace=False) for _ in queries])
    long_ids = np.arange(5, 900, 9)

    lists = build_lists(torch.from_numpy(rows), long_ids, 12, seed=0)

    answerable = AnswerableRows.of(900, 23, ids, hidden)
    assert_all_lists_are_exact(
        rows,
        queries,
        k,
        lists,
        answerable,
        num_visited=12,
    )


@pytest.mark.usefixtures("limits")
def test_scores_that_are_no_numbers_are_no_answers() -> None:
    rows = np.ones((100, 4), np.float32)
    rows[3] = np.nan
    rows[7] = -np.inf
    queries = np.ones((2, 4), np.float32)
    no_long_ids = np.empty(0, np.int64)

    lists = build_lists(torch.from_numpy(rows), no_long_ids, 1, seed=0)

    answerable = AnswerableRows.of(100, 2, None, None)
    assert_all_lists_are_exact(
        rows,
        queries,
        100,
        lists,
        answerable,
        num_visited=1,
    )


def test_every_row_is_in_one_list_the_nearest_one() -> None:
    rows, _ = around_centres(3000, 1)
    long_ids = np.arange(0, 3000, 200)

    lists = build_lists(torch.from_numpy(rows), long_ids, 64, seed=0)

    members_of = []
    for start, size in zip(lists.offset_A, lists.size_A, strict=True):
        members = lists.row_ids[start : start + size]
        members_of.append(members.numpy())
    all_members = np.concatenate(members_of)
    assert np.sort(all_members).tolist() == list(range(3000))
    # The lists after the first 64 hold the long rows.
    long_members = np.concatenate(members_of[64:])
    assert np.sort(long_members).tolist() == long_ids.tolist()

    centroid_CD = lists.centroid_CD.numpy()
    for number, members in enumerate(members_of[:64]):
        difference_MCD = rows[members][:, None] - centroid_CD
        distance_MC = np.linalg.norm(difference_MCD, axis=2)
        assert (distance_MC.argmin(axis=1) == number).all()


def test_rows_of_length_0_start_no_list() -> None:
    """Such a centroid would be the nearest of most rows, until a round of k-means moves it."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((6400, 32), np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    # Of the 200 first rows of the sample, about 20 have length 0: more than there are rounds.
    rows[random.choice(len(rows), 640, replace=False)] = 0
    no_long_ids = np.empty(0, np.int64)

    lists = build_lists(torch.from_numpy(rows), no_long_ids, 200, seed=0)

    # The 640 rows of length 0 are in one list, because they are equally far from all unit vectors.
    assert lists.size_A.max() < 1000


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("made_by", ["faiss", "torch"])
def test_few_lists_of_rows_with_a_common_direction_have_the_answers(made_by: str) -> None:
    """Rows of a classifier share a direction and differ in length, which unit centroids do not show."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((60, 16), np.float32)
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    lengths = rng.uniform(2, 6, (60, 1)).astype(np.float32)
    rows = (lengths * centres)[rng.integers(60, size=6000)]
    rows += np.float32(0.5) * rng.standard_normal(rows.shape, np.float32)
    rows[:, 0] += 8
    queries = centres[rng.integers(60, size=300)]
    queries += np.float32(0.2) * rng.standard_normal(queries.shape, np.float32)
    queries[:, 0] -= 4

    if made_by == "faiss":
        spec = IndexSpec(factory="IVF128,Flat", nprobe=16, candidates=2)
        index = build_index(rows, spec, queries=queries)
    else:
        index = index_of_lists(rows, IndexSpec(nprobe=16), CPU, queries)

    assert index.num_lists == 128
    found = index.search(queries, 10).ids
    expected = exact_search(rows, queries, 10).ids
    num_hits = 0
    for ids, expected_ids in zip(found, expected, strict=True):
        num_hits += len(np.intersect1d(ids, expected_ids))
    assert num_hits / expected.size >= 0.95


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("made_by", ["faiss", "torch"])
def test_a_query_that_equals_a_row_of_unit_length_finds_it_in_one_list(made_by: str) -> None:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((60, 16), np.float32)
    # Lists with little noise have a longer mean than others.
    noise = rng.uniform(0.1, 1.5, (60, 1)).astype(np.float32)
    list_ids = rng.integers(60, size=6000)
    rows = centres[list_ids] + noise[list_ids] * rng.standard_normal((6000, 16), np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[-1] = 0  # a label without text

    if made_by == "faiss":
        index = build_index(rows, IndexSpec(factory="IVF128,Flat", nprobe=1, candidates=2))
    else:
        index = index_of_lists(rows, IndexSpec(nprobe=1), CPU, None)

    assert index.num_lists == 128
    assert index.search(rows[:-1], 1).ids[:, 0].tolist() == list(range(5999))


@pytest.mark.usefixtures("many")
def test_few_lists_of_rows_around_centres_have_the_wanted_recall() -> None:
    rows, queries = around_centres(12_000, 600)
    sample = queries[:256]
    others = queries[256:]

    index = index_of_lists(rows, IndexSpec(), CPU, sample)

    assert 0 < index.nprobe <= num_lists("auto", 12_000) / 10
    top = index.search(others, 50)
    expected = exact_search(rows, others, 50)
    num_hits = 0
    for ids, expected_ids in zip(top.ids, expected.ids, strict=True):
        num_hits += len(np.intersect1d(ids, expected_ids))
    assert num_hits / expected.ids.size >= 0.94

    again = index_of_lists(rows, IndexSpec(), CPU, sample)
    assert again.nprobe == index.nprobe
    assert_array_equal(
        again.search(queries, 50).ids,
        index.search(queries, 50).ids,
    )


@pytest.mark.usefixtures("many")
def test_rows_that_no_list_tells_apart_are_all_compared() -> None:
    """In 256 dimensions, the nearest of random rows lie in more than half of the lists."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((6000, 256), np.float32)
    queries = rng.standard_normal((64, 256), np.float32)

    index = index_of_lists(rows, IndexSpec(recall=0.99), CPU, queries)

    assert index.is_exact
    top = index.search(queries, 5)
    expected = exact_search(rows, queries, 5)
    assert_array_equal(top.ids, expected.ids)


@pytest.mark.usefixtures("many")
def test_more_answers_than_the_visited_lists_hold_are_found() -> None:
    rows, queries = around_centres(12_000, 10)
    index = index_of_lists(rows, IndexSpec(nprobe=1), CPU, queries)

    top = index.search(queries, 3000)

    assert (top.ids >= 0).all()
