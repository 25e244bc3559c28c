"""Inverted lists by k-means, on the device where the rows are.

Letters of axes, in addition to those in types.py:

    N  all rows    S  rows of the sample    C  lists    R  rows of a block
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from xmcray.retrieval.ann_create import KMEANS_ROUNDS, TRAIN_ROWS_PER_LIST
from xmcray.retrieval.exact import as_tensor
from xmcray.retrieval.inverted_lists import InvertedLists, are_equally_long, limits_of
from xmcray.types import Int64Array


def build_lists(
    vector_ND: Tensor, long_ids: Int64Array, num_lists: int, seed: int
) -> InvertedLists:
    """Clusters all rows except the long ones into inverted lists. Equal arguments give equal lists.

    Args:
        vector_ND: float32, on the device that computes.
        long_ids: int64, ascending positions of the rows that are not clustered.
        num_lists: C, at most the number of the other rows.
        seed: of the sample, whose first rows are the starts of k-means.
    """
    all_ids = np.arange(len(vector_ND))
    row_ids = np.setdiff1d(all_ids, long_ids, assume_unique=True)
    num_samples = min(len(row_ids), TRAIN_ROWS_PER_LIST * num_lists)
    sample_ids = np.random.default_rng(seed).choice(row_ids, num_samples, replace=False)
    device = vector_ND.device
    sample_SD = vector_ND[as_tensor(sample_ids, np.int64).to(device)]
    centroid_CD = _centroids(sample_SD, num_lists)
    # Long rows are few: assigning them too is cheaper than copying all other vectors.
    list_N = _nearest(vector_ND, centroid_CD)
    clustered_ids = as_tensor(row_ids, np.int64).to(device)
    list_ids = list_N[clustered_ids]
    return InvertedLists.of(vector_ND, centroid_CD, clustered_ids, list_ids, long_ids)


def _centroids(sample_SD: Tensor, num_lists: int) -> Tensor:
    """float32 [C, D], the centroids that assign rows to lists, and by which queries choose lists.

    Spherical k-means finds the clusters. The centroids are their means, or unit vectors if all rows
    are equally long; `ann_create._train_centroids` says why.
    """
    # A GPU adds rows in an arbitrary order. That changes a sum of floats, but not one of integers.
    # Elements are scaled to at most 2^32, so an int64 holds a sum of 2^30 of them.
    largest = sample_SD.abs().max().double()
    scale = 2.0**32 / largest.clamp_min(1e-30)  # all rows may be 0
    integer_SD = (sample_SD.double() * scale).long()
    unit_CD = _starts(sample_SD, num_lists)
    for _ in range(KMEANS_ROUNDS):
        list_S = _nearest(sample_SD, unit_CD)
        sum_CD = _sums(integer_SD, list_S, num_lists)
        unit_CD = _directions(sum_CD, unit_CD)
    if are_equally_long(sample_SD.norm(dim=1).cpu().numpy()):
        return unit_CD
    list_S = _nearest(sample_SD, unit_CD)
    size_C1 = torch.bincount(list_S, minlength=num_lists)[:, None]
    sum_CD = _sums(integer_SD, list_S, num_lists)
    # A list without rows has 0 / 0 here, and keeps its unit centroid.
    mean_CD = sum_CD.double() / scale / size_C1
    return torch.where(size_C1 == 0, unit_CD, mean_CD.float())


def _starts(sample_SD: Tensor, num_lists: int) -> Tensor:
    """float32 [C, D], the first centroids: the directions of the first rows that have one."""
    # A centroid of length 0 (a text without words) would be the nearest one of most rows, so rows
    # of length 0 come last. The sort is stable, so the others keep the sample's random order.
    is_zero_S = (sample_SD == 0).all(dim=1)
    starts = is_zero_S.int().argsort(stable=True)[:num_lists]
    return nn.functional.normalize(sample_SD[starts], dim=1)


def _directions(sum_CD: Tensor, unit_CD: Tensor) -> Tensor:
    """float32 [C, D], the unit vectors of the lists' sums; of a sum of 0 the previous unit vector.

    A sum of 0 has no direction: the list has no rows, or they cancel.
    """
    new_unit_CD = nn.functional.normalize(sum_CD.double(), dim=1).float()
    is_zero_C1 = (sum_CD == 0).all(dim=1, keepdim=True)
    return torch.where(is_zero_C1, unit_CD, new_unit_CD)


def _sums(integer_SD: Tensor, list_S: Tensor, num_lists: int) -> Tensor:
    """int64 [C, D], the sum of each list's rows."""
    sum_CD = integer_SD.new_zeros((num_lists, integer_SD.shape[1]))
    return sum_CD.index_add_(0, list_S, integer_SD)


def _nearest(vector_ND: Tensor, centroid_CD: Tensor) -> Tensor:
    """int64 [N], the list of each row: the one with the nearest centroid."""
    # |x - c|^2 = |x|^2 - 2 (x c - |c|^2 / 2), so the nearest centroid has the largest score
    # x c - |c|^2 / 2.
    offset_C = -0.5 * (centroid_CD * centroid_CD).sum(dim=1)
    # By blocks, because the scores [R, C] of a block have to fit into the device's limit.
    block_rows = max(1, limits_of(vector_ND).scores // len(centroid_CD))
    nearest = []
    for vector_RD in vector_ND.split(block_rows):
        score_RC = torch.addmm(offset_C, vector_RD, centroid_CD.T)
        nearest.append(score_RC.argmax(dim=1))
    return torch.cat(nearest)
