"""Creates FAISS indexes that are searched by inner product."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from xmcray.errors import ConfigError
from xmcray.retrieval.ann import (
    failure_reason,
    import_faiss,
    lists_of,
    refer_to,
    transforms_rows,
)
from xmcray.retrieval.index_spec import num_lists
from xmcray.retrieval.inverted_lists import are_equally_long
from xmcray.types import Float32Array, Int64Array

TRAIN_ROWS_PER_LIST = 64
KMEANS_ROUNDS = 8
CODE_SAMPLES = 1 << 16  # rows that train the codes of an index without lists
MOST_LINKS = 1024  # of a row in a graph
ANY_WIDTH = 7680  # divisible by all common numbers of codes
# What FAISS raises for a factory string that it does not accept.
_REFUSALS = (RuntimeError, ValueError, AssertionError, MemoryError)


def check_factory(name: str, factory: str, num_rows: int) -> None:
    """Refuses a factory string before there are vectors to index.

    Whether it fits their width is not known then.

    Args:
        name: of the setting.
        factory: FAISS factory string.
        num_rows: vectors that are to come.
    Raises:
        ConfigError: FAISS does not know it, or it wants more lists than there are vectors.
    """
    faiss = import_faiss()
    try:
        _check_numbers(factory)
        faiss.index_factory(ANY_WIDTH, factory, faiss.METRIC_INNER_PRODUCT)
    except _REFUSALS as error:
        raise ConfigError(
            f"{name} is {factory!r}, expected a FAISS factory string ({failure_reason(error)}); use"
            " auto"
        ) from None
    wanted = num_lists(factory, num_rows)
    if wanted > num_rows:
        raise ConfigError(
            f"{name} is {factory!r} with {wanted} lists, found {num_rows} labels in an index; use auto"
        )


def create(
    rows: Float32Array, ids: Int64Array | None, factory: str, seed: int, threads: int
) -> Any:
    """A trained FAISS index that holds `rows`, the same whatever the timing of threads.

    Args:
        rows: float32 [n, D].
        ids: int64 [n], ids of the rows in an index with lists; positions if not given.
        factory: FAISS factory string.
        seed: seed of the training sample and of k-means.
        threads: threads that build the index.
    Raises:
        ConfigError: FAISS does not accept the factory string for these rows.
    """
    faiss = import_faiss()
    # The graph of HNSW depends on the order of insertion, which is random with several threads.
    faiss.omp_set_num_threads(1 if "HNSW" in factory else threads)
    num_rows, dim = rows.shape
    graph_match = re.fullmatch(r"HNSW(\d+)(,Flat)?", factory)
    try:
        _check_numbers(factory)
        if graph_match and ids is None:
            return _create_graph(rows, int(graph_match[1]))
        faiss_index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        lists = lists_of(faiss_index)
        if lists is not None:
            _set_up_kmeans(lists, seed)
        sample = _training_rows(lists, rows, seed)
        # Where rows are transformed first, which the sample is not, FAISS itself makes the centroids.
        own_lists = None if transforms_rows(faiss_index) else lists
        if own_lists is not None:
            _train_centroids(own_lists, sample)
        # FAISS keeps centroids that exist, and then trains only the codes.
        faiss_index.train(sample)
        if ids is None:
            faiss_index.add(rows)
        else:
            faiss_index.add_with_ids(rows, ids)
        if own_lists is not None:
            # Rows have joined the list whose centroid is nearest. A query visits lists by inner product.
            faiss.downcast_index(own_lists.quantizer).metric_type = faiss.METRIC_INNER_PRODUCT
    except _REFUSALS as error:
        raise ConfigError(
            f"index factory {factory!r} does not fit {num_rows} vectors of width {dim} ({failure_reason(error)}); use auto"
        ) from None
    return faiss_index


def _check_numbers(factory: str) -> None:
    """Raises ValueError for numbers by which FAISS would crash, or answer nothing."""
    for num_links in re.findall(r"HNSW(\d+)", factory):
        if not 2 <= int(num_links) <= MOST_LINKS:
            raise ValueError(f"{num_links} links of a row, expected 2 to {MOST_LINKS}")
    for lists in re.findall(r"IVF(\d+)", factory):
        if int(lists) == 0:
            raise ValueError("0 lists, expected at least 1")


def _create_graph(rows: Float32Array, num_links: int) -> Any:
    """An HNSW graph over rows that it refers to and does not copy.

    With inner product as the metric, long rows get almost all links. Searches for other rows then end
    too early, and recall@50 stays below 0.96 at any breadth (docs/serving.md). So each row gets one
    more number that makes all rows equally long, and links are made by distance. For a query, whose
    number there is 0, the nearest of those rows have the largest inner products (Bachrach et al.
    2014, "Speeding up the Xbox recommender system"). The search itself computes inner products of
    the rows as they are.

    Args:
        rows: contiguous float32 [n, D].
        num_links: links per row on each layer but the lowest, which has twice as many.
    """
    faiss = import_faiss()
    num_rows, dim = rows.shape
    squares = np.einsum("nd,nd->n", rows, rows)
    extra = np.sqrt(squares.max() - squares)
    equally_long = np.concatenate([rows, extra[:, None]], axis=1, dtype=np.float32)
    by_distance = faiss.IndexHNSWFlat(dim + 1, num_links, faiss.METRIC_L2)
    by_distance.add(equally_long)
    graph = faiss.IndexHNSWFlat(dim, num_links, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw = by_distance.hnsw
    # Distances are better if smaller, products if larger.
    graph.hnsw.is_similarity = True
    graph.ntotal = num_rows
    refer_to(graph, rows)
    return graph


def _set_up_kmeans(lists: Any, seed: int) -> None:
    """Sets how the centroids of an IndexIVF are trained."""
    # FAISS's seed is an integer of 32 bits.
    lists.cp.seed = 1 + seed % 1_000_000
    lists.cp.niter = KMEANS_ROUNDS
    lists.cp.min_points_per_centroid = 1
    lists.cp.max_points_per_centroid = TRAIN_ROWS_PER_LIST


def _training_rows(lists: Any | None, rows: Float32Array, seed: int) -> Float32Array:
    """A seeded sample that is large enough for k-means, or for codes where there are no lists."""
    num_samples = CODE_SAMPLES
    if lists is not None:
        num_samples = TRAIN_ROWS_PER_LIST * int(lists.nlist)
    if num_samples >= len(rows):
        return rows
    sample = np.random.default_rng(seed).choice(len(rows), num_samples, replace=False)
    return rows[np.sort(sample)]


def _train_centroids(lists: Any, sample_SD: Float32Array) -> None:
    """Clusters a sample of rows, and makes the mean of each cluster the centroid of a list.

    For inner products FAISS makes unit centroids. Equally long rows keep them. Rows of a classifier
    differ in length and share a direction, so products with unit vectors hardly tell the lists apart.
    The product with a list's mean is the mean score of its rows.

    Args:
        lists: an IndexIVF that is not trained. If it gets means, it assigns rows by distance from then on.
        sample_SD: float32, contiguous.
    """
    faiss = import_faiss()
    flat = faiss.downcast_index(lists.quantizer)
    # FAISS makes the centroids of a graph or of codes together with them.
    is_flat = isinstance(flat, faiss.IndexFlat)
    if not is_flat or are_equally_long(np.linalg.norm(sample_SD, axis=1)):
        return
    clustering = faiss.Clustering(lists.d, lists.nlist, lists.cp)
    clustering.train(sample_SD, flat)
    _, list_S1 = flat.search(sample_SD, 1)
    means = _cluster_means(sample_SD, list_S1[:, 0], flat.reconstruct_n(0, lists.nlist))
    flat.reset()
    flat.add(means)
    flat.metric_type = faiss.METRIC_L2


def _cluster_means(
    vector_SD: Float32Array, cluster_S: Int64Array, if_empty_CD: Float32Array
) -> Float32Array:
    """float32 [C, D], the mean of each cluster; the given vector if it is empty."""
    order = np.argsort(cluster_S, kind="stable")
    sizes = np.bincount(cluster_S, minlength=len(if_empty_CD))
    has_rows = sizes > 0
    starts = np.cumsum(sizes) - sizes
    means = if_empty_CD.copy()
    # Empty clusters are left out, because `reduceat` would take the first row of the next one.
    sums = np.add.reduceat(vector_SD[order], starts[has_rows], axis=0, dtype=np.float64)
    means[has_rows] = sums / sizes[has_rows, None]
    return means
