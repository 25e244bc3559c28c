"""Balanced recursive 2-means: sizes, the planted clusters, repeatability."""

import numpy as np
import pytest

from xmcray.errors import ConfigError
from xmcray.negatives import clusters
from xmcray.negatives.clusters import balanced_clusters


def _vectors(n: int, dim: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)


@pytest.mark.parametrize(
    ("n", "num_clusters"), [(1, 1), (2, 2), (3, 2), (64, 64), (1000, 16), (1001, 256), (777, 512)]
)
def test_sizes_differ_by_at_most_one(n: int, num_clusters: int) -> None:
    sizes = np.bincount(
        balanced_clusters(_vectors(n), num_clusters, seed=1), minlength=num_clusters
    )
    assert len(sizes) == num_clusters
    assert sizes.sum() == n
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_planted_groups_of_equal_size_are_found(seed: int) -> None:
    """Lengths of the vectors do not matter: groups are directions."""
    centres = np.array([[1, 0, 0], [0, 1, 0]], np.float32)
    group = np.random.default_rng(seed).permutation(np.repeat([0, 1], 50))
    vectors = (centres[group] + 0.1 * _vectors(100, 3, seed)) * np.linspace(
        0.1, 100, 100, dtype=np.float32
    )[:, None]
    found = balanced_clusters(vectors, 2, seed)
    assert len(np.unique(np.stack([group, found]), axis=1).T) == 2


def test_coarser_clusters_are_the_parents() -> None:
    vectors = _vectors(300)
    np.testing.assert_array_equal(
        balanced_clusters(vectors, 64, seed=3) >> 3, balanced_clusters(vectors, 8, seed=3)
    )


def test_same_seed_same_clusters_and_another_seed_others() -> None:
    vectors = _vectors(200)
    first = balanced_clusters(vectors, 16, seed=5)
    np.testing.assert_array_equal(first, balanced_clusters(vectors, 16, seed=5))
    assert (first != balanced_clusters(vectors, 16, seed=6)).any()


def test_splitting_clusters_one_by_one_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = _vectors(203)
    at_once = balanced_clusters(vectors, 32, seed=2)
    monkeypatch.setattr(clusters, "ELEMENTS_AT_ONCE", 1)
    np.testing.assert_array_equal(balanced_clusters(vectors, 32, seed=2), at_once)


def test_members_are_closer_to_each_other_than_to_others() -> None:
    vectors = _vectors(512, 4)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    found = balanced_clusters(vectors, 32, seed=0)
    same = found[:, None] == found
    similarity = unit @ unit.T
    assert similarity[same].mean() > 0.8
    assert similarity[~same].mean() < 0.05


def test_equal_and_zero_vectors_are_still_halved() -> None:
    for vectors in (np.ones((9, 3), np.float32), np.zeros((9, 3), np.float32)):
        assert sorted(np.bincount(balanced_clusters(vectors, 4, seed=0))) == [2, 2, 2, 3]


@pytest.mark.parametrize("num_clusters", [0, 3, 16])
def test_impossible_numbers_are_refused(num_clusters: int) -> None:
    with pytest.raises(ConfigError, match="power of two"):
        balanced_clusters(_vectors(8), num_clusters, seed=0)
