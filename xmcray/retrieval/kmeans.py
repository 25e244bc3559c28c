"""Inverted lists by k-means, on the device where the rows are.

S  rows of the sample    C  lists
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from xmcray.retrieval.ann import KMEANS_ROUNDS, TRAIN_ROWS_PER_LIST
from xmcray.retrieval.exact import as_tensor
from xmcray.retrieval.inverted_lists import InvertedLists, limits_of
from xmcray.types import Int64Array


def build_lists(
    vector_ND: Tensor, long_ids: Int64Array, num_lists: int, seed: int
) -> InvertedLists:
    """Clusters all rows but the long ones into inverted lists. Equal arguments give equal lists.

    Args:
        vector_ND: float32, on the device that computes.
        long_ids: int64, ascending positions of the rows that are not clustered.
        num_lists: C, at most the number of the other rows.
        seed: of the sample.
    """
    all_ids = np.arange(len(vector_ND))
    row_ids = np.setdiff1d(all_ids, long_ids, assume_unique=True)
    random = np.random.default_rng(seed)
    num_samples = min(len(row_ids), TRAIN_ROWS_PER_LIST * num_lists)
    sample = random.choice(row_ids, num_samples, replace=False)
    device = vector_ND.device
    sample_SD = vector_ND[as_tensor(sample, np.int64).to(device)]
    centroid_CD = _centroids(sample_SD, num_lists)
    listed = as_tensor(row_ids, np.int64).to(device)
    list_ids = _nearest(vector_ND, centroid_CD)[listed]
    return InvertedLists.of(vector_ND, centroid_CD, listed, list_ids, long_ids)


def _centroids(sample_SD: Tensor, num_lists: int) -> Tensor:
    """float32 [C, D], unit vectors, by spherical k-means as in FAISS for inner products."""
    # The sample is in random order, so its first rows are a random choice.
    centroid_CD = nn.functional.normalize(sample_SD[:num_lists], dim=1)
    # A GPU adds the rows of a list in an arbitrary order, and a sum of floats depends on the order. A
    # sum of integers does not. So elements become integers up to 2^32, of which 2^31 can be added in 64
    # bits.
    scale = 2.0**32 / sample_SD.abs().max().clamp_min(1e-30)
    integer_SD = (sample_SD.double() * scale).long()
    for _ in range(KMEANS_ROUNDS):
        list_S = _nearest(sample_SD, centroid_CD)
        sum_CD = torch.zeros(centroid_CD.shape, dtype=torch.int64, device=sample_SD.device)
        sum_CD.index_add_(0, list_S, integer_SD)
        mean_CD = nn.functional.normalize(sum_CD.double(), dim=1).float()
        # The centroid of a list without rows stays where it is.
        is_empty_C1 = (sum_CD == 0).all(dim=1, keepdim=True)
        centroid_CD = torch.where(is_empty_C1, centroid_CD, mean_CD)
    return centroid_CD


def _nearest(vector_ND: Tensor, centroid_CD: Tensor) -> Tensor:
    """int64 [N], the list of each row: the one whose centroid has the largest inner product."""
    num_rows = max(1, limits_of(vector_ND).scores // len(centroid_CD))
    nearest = []
    for vector_RD in vector_ND.split(num_rows):
        score_RC = vector_RD @ centroid_CD.T
        nearest.append(score_RC.argmax(dim=1))
    return torch.cat(nearest)
