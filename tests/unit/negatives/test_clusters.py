"""Balanced recursive 2-means: sizes, the planted clusters, repeatability."""

import numpy as np
import pytest

from xmcray.errors import ConfigError
from xmcray.negatives import clusters
from xmcray.negatives.clusters import balanced_clusters


def _vectors(num_rows: int, dim: int = 8, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.standard_normal((num_rows, dim)).astype(np.float32)


@pytest.mark.parametrize(
    ("num_rows", "num_clusters"),
    [(1, 1), (2, 2), (3, 2), (64, 64), (1000, 16), (1001, 256), (777, 512)],
)
def test_sizes_differ_by_at_most_one(num_rows: int, num_clusters: int) -> None:
    clusters_N = balanced_clusters(_vectors(num_rows), num_clusters, seed=1)

    sizes = np.bincount(clusters_N, minlength=num_clusters)
    assert len(sizes) == num_clusters
    assert sizes.sum() == num_rows
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_planted_groups_of_equal_size_are_found(seed: int) -> None:
    """Groups are directions, whatever the lengths of the vectors."""
    fifty_of_each = np.repeat([0, 1], 50)
    group_N = np.random.default_rng(seed).permutation(fifty_of_each)
    centre_CD = np.array([[1, 0, 0], [0, 1, 0]], np.float32)
    length_N = np.linspace(0.1, 100, 100, dtype=np.float32)
    direction_ND = centre_CD[group_N] + 0.1 * _vectors(100, 3, seed)

    clusters_N = balanced_clusters(length_N[:, None] * direction_ND, 2, seed)

    # Two different pairs of a group and a cluster: each group is one cluster.
    pairs = set(zip(group_N, clusters_N, strict=True))
    assert len(pairs) == 2


def test_the_lengths_of_vectors_do_not_matter() -> None:
    vectors = _vectors(200)
    # Powers of two change no digit of a vector, so even close decisions stay the same.
    lengths = 2.0 ** np.random.default_rng(1).integers(-5, 6, 200)
    scaled = vectors * lengths[:, None].astype(np.float32)

    expected = balanced_clusters(vectors, 16, seed=0)

    np.testing.assert_array_equal(balanced_clusters(scaled, 16, seed=0), expected)


def test_coarser_clusters_are_the_parents() -> None:
    vectors = _vectors(300)
    fine_N = balanced_clusters(vectors, 64, seed=3)
    coarse_N = balanced_clusters(vectors, 8, seed=3)
    # 64 clusters are three halvings of 8, and each halving adds a bit.
    np.testing.assert_array_equal(fine_N >> 3, coarse_N)


def test_same_seed_same_clusters_and_another_seed_others() -> None:
    vectors = _vectors(200)
    first = balanced_clusters(vectors, 16, seed=5)
    again = balanced_clusters(vectors, 16, seed=5)
    other_seed = balanced_clusters(vectors, 16, seed=6)
    np.testing.assert_array_equal(first, again)
    assert (first != other_seed).any()


def test_splitting_clusters_one_by_one_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = _vectors(203)
    at_once = balanced_clusters(vectors, 32, seed=2)
    monkeypatch.setattr(clusters, "ELEMENTS_AT_ONCE", 1)
    one_by_one = balanced_clusters(vectors, 32, seed=2)
    np.testing.assert_array_equal(one_by_one, at_once)


def test_members_are_closer_to_each_other_than_to_others() -> None:
    vectors = _vectors(512, 4)

    clusters_N = balanced_clusters(vectors, 32, seed=0)

    unit_ND = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity_NN = unit_ND @ unit_ND.T
    same_NN = clusters_N[:, None] == clusters_N
    assert similarity_NN[same_NN].mean() > 0.8
    assert similarity_NN[~same_NN].mean() < 0.05


@pytest.mark.parametrize("value", [0, 1])
def test_equal_and_zero_vectors_are_still_halved(value: int) -> None:
    vectors = np.full((9, 3), value, np.float32)
    sizes = np.bincount(balanced_clusters(vectors, 4, seed=0))
    assert sorted(sizes) == [2, 2, 2, 3]


@pytest.mark.parametrize("num_clusters", [0, 3, 16])
def test_impossible_numbers_are_refused(num_clusters: int) -> None:
    with pytest.raises(ConfigError, match="power of two"):
        balanced_clusters(_vectors(8), num_clusters, seed=0)
