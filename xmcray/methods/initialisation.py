"""Initial values from the untrained encoder: the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from xmcray.methods.base import MethodContext
from xmcray.nn.row_table import sum_by_row
from xmcray.parallel import collectives
from xmcray.types import Int64Array

BLOCK = 1024  # texts encoded together; the same blocks on any number of ranks
Head = Callable[[Tensor], Tensor]  # what follows the encoder


def _identity(vectors: Tensor) -> Tensor:
    return vectors


def label_centroids(context: MethodContext, head: Head = _identity) -> Tensor:
    """Mean vector of the training queries of each label; collective.

    A label without a training query gets the vector of its text.

    Returns:
        [S, D], rows of this rank's labels.
    """
    partition = context.partition
    data = context.data
    text_SD = torch.zeros(partition.size, context.dim, device=context.device, dtype=context.dtype)
    label_query_ids = data.label_query_ids(partition.start, partition.stop)
    for first in range(0, partition.size, BLOCK):
        tokens = data.tokens(label_query_ids[first : first + BLOCK])
        text_SD[first : first + BLOCK] = head(context.encode_plain(tokens))

    centroid_SD = torch.zeros_like(text_SD)
    count_S = torch.zeros(partition.size, dtype=torch.int64, device=context.device)
    # Ids from num_train on are label texts that were added as queries.
    training_queries = data.query_ids[data.query_ids < data.num_train]
    for query_ids, query_BD in encoded_blocks(context, training_queries, head):
        positives = data.positives(query_ids)
        is_own = partition.owns(positives.values)
        rows = positives.row_ids[is_own]
        labels = partition.to_local(positives.values[is_own])
        row_P = torch.from_numpy(rows).to(context.device)
        label_P = torch.from_numpy(labels).to(context.device)
        label_U, sum_UD = sum_by_row(label_P, row_P, query_BD)
        centroid_SD.index_add_(0, label_U, sum_UD)
        count_S += torch.bincount(label_P, minlength=partition.size)
    centroid_SD /= count_S.clamp_min(1)[:, None]
    without_query_S = count_S == 0
    centroid_SD[without_query_S] = text_SD[without_query_S]
    return centroid_SD


def encoded_blocks(
    context: MethodContext, query_ids: Int64Array, head: Head
) -> Iterator[tuple[Int64Array, Tensor]]:
    """Blocks of ids with their vectors, on every rank; collective.

    Ranks encode a block each and exchange the vectors. Without a graph.
    """
    for round_start in range(0, len(query_ids), BLOCK * collectives.num_ranks()):
        first = round_start + BLOCK * collectives.rank()
        tokens = context.data.tokens(query_ids[first : first + BLOCK])
        own_BD = head(context.encode_plain(tokens)).to(context.device, context.dtype)
        for rank, block_BD in enumerate(collectives.gather_ragged(own_BD)):
            start = round_start + BLOCK * rank
            yield query_ids[start : start + BLOCK], block_BD
