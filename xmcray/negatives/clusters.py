"""Balanced recursive 2-means: clusters of query or label vectors whose sizes differ by at most one.

Letters of axes, in addition to those in types.py:

    N  rows
    C  clusters of one level
    M  slots of a cluster, as many as the largest cluster has rows
"""

from __future__ import annotations

import numpy as np

from xmcray import draws
from xmcray.errors import ConfigError
from xmcray.types import BoolArray, Float32Array, Int64Array, spans

_MIN_GAIN = 1e-4  # a split stops if the mean similarity to the centres gains less
ELEMENTS_AT_ONCE = 1 << 22  # numbers in the vectors of the clusters that are split together


def balanced_clusters(vectors: Float32Array, num_clusters: int, seed: int) -> Int64Array:
    """Clusters rows by balanced, spherical 2-means, applied recursively (NGAME, section 3).

    Each split starts with two random rows as centres and repeats two steps. First, the half of the
    rows that prefers the first centre most is assigned to it, and the other half to the second
    centre. Then each centre becomes the normalised mean of its rows. A split stops when the mean
    similarity of rows and centres gains less than 1e-4.

    Args:
        vectors: float32 [N, D]; they are normalised here.
        num_clusters: a power of two, at most N.
        seed: of the random rows.

    Returns:
        int64 [N], the cluster of each row. Sizes differ by at most 1. Clusters 2c and 2c + 1 are
        the halves of one parent, so `result >> k` is the clustering into `num_clusters >> k`
        clusters.

    Raises:
        ConfigError: num_clusters is no power of two or above N.
    """
    num_rows = len(vectors)
    # A power of two has a single bit, and none is left when its lowest bit is cleared.
    is_power_of_two = num_clusters >= 1 and num_clusters & (num_clusters - 1) == 0
    if not is_power_of_two or num_clusters > max(1, num_rows):
        raise ConfigError(
            f"{num_clusters} clusters of {num_rows} vectors;"
            f" give a power of two of at most {num_rows}"
        )
    row_ND = _normalised(np.asarray(vectors, np.float32))
    # Cluster c of the current level is order[starts[c] : starts[c + 1]].
    order = np.arange(num_rows)
    starts = np.array([0, num_rows])
    num_levels = num_clusters.bit_length() - 1
    for level in range(num_levels):
        start_C = starts[:-1]
        size_C = np.diff(starts)
        generator = draws.generator(seed, "clusters", level)
        _split_level(row_ND, order, start_C, size_C, generator)
        # Sorting puts the start of each second half after that of its first half. So cluster c
        # becomes the clusters 2c and 2c + 1.
        second_halves = start_C + _first_half(size_C)
        starts = np.sort(np.concatenate([starts, second_halves]))
    # `order` lists the rows by cluster. This inverts it to the cluster of each row.
    clusters = np.empty(num_rows, np.int64)
    size_C = np.diff(starts)
    clusters[order] = np.repeat(np.arange(num_clusters), size_C)
    return clusters


def _split_level(
    row_ND: Float32Array,
    order: Int64Array,
    start_C: Int64Array,
    size_C: Int64Array,
    generator: np.random.Generator,
) -> None:
    """Splits all clusters of a level, as many at once as ELEMENTS_AT_ONCE allows; see `_split`."""
    # The centres of the whole level are drawn together, so they do not depend on the chunks below.
    centre_C2 = _two_rows(size_C, generator)
    width = row_ND.shape[1]
    elements_per_cluster = int(size_C.max()) * max(1, width)
    clusters_at_once = max(1, ELEMENTS_AT_ONCE // elements_per_cluster)
    for chunk in spans(len(size_C), clusters_at_once):
        _split(row_ND, order, start_C[chunk], size_C[chunk], centre_C2[chunk])


def _split(
    row_ND: Float32Array,
    order: Int64Array,
    start_C: Int64Array,
    size_C: Int64Array,
    centre_C2: Int64Array,
) -> None:
    """Reorders `order` in place so that the first half of each given cluster comes first.

    Args:
        row_ND: unit vectors.
        order: int64 [N], rows by cluster.
        start_C: where each cluster begins in `order`.
        size_C: rows of each cluster; they differ by at most one, so at most the last slot of a
            cluster is empty.
        centre_C2: slots of the two rows that are the first centres.
    """
    slot_M = np.arange(size_C.max())
    size_C1 = size_C[:, None]
    filled_CM = slot_M < size_C1
    # An empty slot refers to the last row, so that its place is valid. Its vector becomes 0, which
    # adds nothing to a sum.
    filled_slot_CM = np.minimum(slot_M, size_C1 - 1)
    place_CM = start_C[:, None] + filled_slot_CM
    member_CM = order[place_CM]
    vector_CMD = row_ND[member_CM]
    vector_CMD[~filled_CM] = 0
    total_CD = vector_CMD.sum(axis=1)
    half_C = _first_half(size_C)
    similarity_C = np.full(len(size_C), -np.inf)
    ranked_CM = np.empty_like(member_CM)  # slots of each cluster in their new order

    # From here on, the first axis of vector_CMD, pull_CD and all that is computed from them has the
    # active clusters only: those whose last step gained enough.
    active = np.arange(len(size_C))
    # A row's product with the difference of the two centres says which of them it prefers.
    centre_C2D = vector_CMD[active[:, None], centre_C2]
    pull_CD = centre_C2D[:, 0] - centre_C2D[:, 1]
    while len(active):
        ranking_CM = _ranking(vector_CMD, pull_CD, filled_CM[active])
        ranked_CM[active] = ranking_CM
        first_CD = _sum_of_first_half(vector_CMD, ranking_CM, half_C[active])
        second_CD = total_CD[active] - first_CD
        # The similarities of unit vectors to their normalised sum add up to the norm of that sum.
        first_norm_C = np.linalg.norm(first_CD, axis=1)
        second_norm_C = np.linalg.norm(second_CD, axis=1)
        new_similarity_C = (first_norm_C + second_norm_C) / size_C[active]
        improves = new_similarity_C - similarity_C[active] >= _MIN_GAIN
        similarity_C[active] = new_similarity_C
        pull_CD = _normalised(first_CD) - _normalised(second_CD)
        # Selecting clusters copies their vectors, so it waits until a cluster is done.
        if not improves.all():
            vector_CMD = vector_CMD[improves]
            pull_CD = pull_CD[improves]
            active = active[improves]
    new_member_CM = np.take_along_axis(member_CM, ranked_CM, axis=1)
    order[place_CM[filled_CM]] = new_member_CM[filled_CM]


def _ranking(vector_CMD: Float32Array, pull_CD: Float32Array, filled_CM: BoolArray) -> Int64Array:
    """Slots of each cluster, by falling preference of their rows for the first centre.

    An empty slot comes last.
    """
    preference_CM1 = np.matmul(vector_CMD, pull_CD[:, :, None])
    preference_CM = preference_CM1[:, :, 0]
    preference_CM[~filled_CM] = -np.inf
    # The sort is stable, so rows with equal preferences keep their order on every machine.
    return np.argsort(-preference_CM, axis=1, kind="stable")


def _sum_of_first_half(
    vector_CMD: Float32Array, ranking_CM: Int64Array, half_C: Int64Array
) -> Float32Array:
    """float32 [C, D], the sum of each cluster's first half in the order of `ranking_CM`."""
    rank_M = np.arange(ranking_CM.shape[1])
    is_first_CM = rank_M < half_C[:, None]
    # By slot and not by rank, 1 for a row of the first half and 0 for another: the product with the
    # vectors is the sum.
    in_first_CM = np.zeros(ranking_CM.shape, np.float32)
    np.put_along_axis(in_first_CM, ranking_CM, is_first_CM, axis=1)
    sum_C1D = np.matmul(in_first_CM[:, None, :], vector_CMD)
    sum_CD: Float32Array = sum_C1D[:, 0]
    return sum_CD


def _first_half(size_C: Int64Array) -> Int64Array:
    """The sizes of the first halves. Of an odd number of rows, the first half has one more."""
    return (size_C + 1) // 2


def _two_rows(size_C: Int64Array, generator: np.random.Generator) -> Int64Array:
    """int64 [C, 2], two different random slots of each cluster, which has at least two rows."""
    uniform_C2 = generator.random((len(size_C), 2))
    # Rounding down u * size for u in [0, 1) gives each slot 0 .. size - 1 the same chance.
    first_C = (uniform_C2[:, 0] * size_C).astype(np.int64)
    # The second slot is 1 .. size - 1 slots after the first one, counted around the end. So it is
    # never the first one again.
    distance_C = 1 + (uniform_C2[:, 1] * (size_C - 1)).astype(np.int64)
    second_C = (first_C + distance_C) % size_C
    return np.stack([first_C, second_C], axis=1)


def _normalised(vectors: Float32Array) -> Float32Array:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    # A vector of zeros stays zero.
    unit: Float32Array = vectors / np.maximum(norms, 1e-12)
    return unit
