"""Start values from the encoder as it is before the first step: the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from xmcray.methods.base import Parts
from xmcray.nn.row_table import sum_by_row
from xmcray.parallel import collectives
from xmcray.types import Int64Array

BLOCK = 1024  # texts encoded together, the same ones whatever the number of ranks


def label_centroids(
    parts: Parts, head: Callable[[Tensor], Tensor] = lambda vectors: vectors
) -> Tensor:
    """[S, D], for each label of this rank the mean of its training queries' vectors, its text's where it has none.

    Args:
        head: what follows the encoder. Collective.
    """
    part, data = parts.partition, parts.data
    ids = data.label_query_ids(part.start, part.stop)
    text_SD = torch.zeros(part.size, parts.dim, device=parts.device, dtype=parts.dtype)
    for i in range(0, part.size, BLOCK):
        text_SD[i : i + BLOCK] = head(parts.encode_plain(data.tokens(ids[i : i + BLOCK])))
    centroid_SD = torch.zeros_like(text_SD)
    count_S = torch.zeros(part.size, dtype=torch.int64, device=parts.device)
    for query_ids, query_BD in encoded(
        parts, data.query_ids[data.query_ids < data.num_train], head
    ):
        positives = data.positives(query_ids)
        own = part.owns(positives.values)
        rows, labels = positives.row_ids[own], part.to_local(positives.values[own])
        label_P = torch.from_numpy(labels).to(parts.device)
        ids_U, sum_UD = sum_by_row(label_P, torch.from_numpy(rows).to(parts.device), query_BD)
        centroid_SD.index_add_(0, ids_U, sum_UD)
        count_S += torch.bincount(label_P, minlength=part.size)
    centroid_SD /= count_S.clamp_min(1)[:, None]
    without_S = count_S == 0
    centroid_SD[without_S] = text_SD[without_S]
    return centroid_SD


def encoded(
    parts: Parts, query_ids: Int64Array, head: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Int64Array, Tensor]]:
    """Blocks of ids with their vectors on every rank; each block is encoded by one of them. Collective."""
    for start in range(0, len(query_ids), BLOCK * collectives.num_ranks()):
        first = start + BLOCK * collectives.rank()
        own_BD = head(parts.encode_plain(parts.data.tokens(query_ids[first : first + BLOCK])))
        for i, vectors in enumerate(
            collectives.gather_ragged(own_BD.to(parts.device, parts.dtype))
        ):
            at = start + BLOCK * i
            yield query_ids[at : at + BLOCK], vectors
