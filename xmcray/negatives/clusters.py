"""Balanced recursive 2-means: clusters of query or label vectors whose sizes differ by at most one."""

from __future__ import annotations

import numpy as np

from xmcray import draws
from xmcray.errors import ConfigError
from xmcray.types import Float32Array, Int64Array

_MIN_GAIN = 1e-4  # of the mean similarity to the centroid; a split stops below it
_ELEMENTS_AT_ONCE = 1 << 22  # vectors of neighbouring clusters that are split in one go


def balanced_clusters(vectors: Float32Array, num_clusters: int, seed: int) -> Int64Array:
    """Halves the rows again and again, each time by 2-means with halves of equal size (NGAME, section 3; spherical).

    Two rows drawn at random start as centres. The half of the rows that prefers the first centre most goes to it, the
    rest to the other, and the centres become the normalised means, until the mean similarity gains less than 1e-4.

    Args:
        vectors: float32 [n, D], normalised here. num_clusters: a power of two, at most n. seed: of the drawn rows.

    Returns:
        Int64Array: int64 [n], a row's cluster; the sizes differ by at most 1. Clusters 2c and 2c + 1 are the halves of
        one parent, hence `result >> k` are the clusters of `num_clusters >> k`.

    Raises:
        ConfigError: num_clusters is no power of two or above n.
    """
    n = len(vectors)
    if num_clusters < 1 or num_clusters & (num_clusters - 1) or num_clusters > max(1, n):
        raise ConfigError(
            f"{num_clusters} clusters of {n} vectors; give a power of two of at most {n}"
        )
    rows = _normalised(np.asarray(vectors, np.float32))
    order, starts = (
        np.arange(n),
        np.array([0, n]),
    )  # cluster c of the level is order[starts[c] : starts[c + 1]]
    for level in range(num_clusters.bit_length() - 1):
        sizes = np.diff(starts)
        seeds = _two_rows(sizes, draws.generator(seed, "clusters", level))
        at_once = max(1, _ELEMENTS_AT_ONCE // (int(sizes.max()) * max(1, rows.shape[1])))
        for low in range(0, len(sizes), at_once):
            some = slice(low, low + at_once)
            _split(rows, order, starts[:-1][some], sizes[some], seeds[some])
        starts = np.append(
            np.stack([starts[:-1], starts[:-1] + (sizes + 1) // 2], axis=1).ravel(), n
        )
    clusters = np.empty(n, np.int64)
    clusters[order] = np.repeat(np.arange(num_clusters), np.diff(starts))
    return clusters


def _split(
    rows: Float32Array, order: Int64Array, starts: Int64Array, sizes: Int64Array, seeds: Int64Array
) -> None:
    """Reorders each cluster C of `order` so that its first half, the larger if they differ, comes first."""
    slots = np.arange(sizes.max())
    filled_CM = (
        slots < sizes[:, None]
    )  # sizes differ by at most one: at most the last slot is empty
    places_CM = starts[:, None] + np.minimum(slots, sizes[:, None] - 1)
    members_CM = order[places_CM]
    vectors_CMD = rows[members_CM]
    vectors_CMD[~filled_CM] = 0
    total_CD = vectors_CMD.sum(axis=1)
    half_C = (sizes + 1) // 2
    active = np.arange(len(sizes))
    pull_CD = vectors_CMD[active, seeds[:, 0]] - vectors_CMD[active, seeds[:, 1]]
    similarity_C = np.full(len(sizes), -np.inf)
    ranked_CM = np.empty_like(members_CM)
    while len(active):
        preference_CM = np.matmul(vectors_CMD, pull_CD[:, :, None])[:, :, 0]
        preference_CM[~filled_CM[active]] = -np.inf
        ranking_CM = np.argsort(-preference_CM, axis=1, kind="stable")
        ranked_CM[active] = ranking_CM
        in_first_CM = np.zeros(ranking_CM.shape, np.float32)
        np.put_along_axis(
            in_first_CM, ranking_CM, (slots < half_C[active, None]).astype(np.float32), axis=1
        )
        first_CD = np.matmul(in_first_CM[:, None, :], vectors_CMD)[:, 0]
        second_CD = total_CD[active] - first_CD
        norms_C = np.linalg.norm(first_CD, axis=1) + np.linalg.norm(second_CD, axis=1)
        gained = norms_C / sizes[active] - similarity_C[active] >= _MIN_GAIN
        similarity_C[active] = norms_C / sizes[active]
        pull_CD = _normalised(first_CD) - _normalised(second_CD)
        if not gained.all():  # a copy of what goes on
            vectors_CMD, active, pull_CD = vectors_CMD[gained], active[gained], pull_CD[gained]
    order[places_CM[filled_CM]] = np.take_along_axis(members_CM, ranked_CM, axis=1)[filled_CM]


def _two_rows(sizes: Int64Array, generator: np.random.Generator) -> Int64Array:
    """int64 [C, 2]: two different places in each cluster of at least two rows."""
    uniform = generator.random((len(sizes), 2))
    first = (uniform[:, 0] * sizes).astype(np.int64)
    second = first + 1 + (uniform[:, 1] * (sizes - 1)).astype(np.int64)
    return np.stack([first, second % sizes], axis=1)


def _normalised(vectors: Float32Array) -> Float32Array:
    unit: Float32Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return unit
