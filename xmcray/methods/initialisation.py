"""Initial values from the untrained encoder: the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from xmcray.data.kept_ids import KeptIds
from xmcray.methods.base import MethodContext
from xmcray.nn.row_table import sum_by_row
from xmcray.parallel import collectives
from xmcray.types import Int64Array, Ragged, spans

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
    device = context.device
    text_SD = _text_vectors(context, head)

    centroid_SD = torch.zeros_like(text_SD)
    count_S = torch.zeros(partition.size, dtype=torch.int64, device=device)
    # Label texts that were added as queries do not count.
    for query_ids, query_BD in encoded_blocks(context, data.training_rows, data.tokens, head):
        # Every rank sees all queries, and adds up those of its own labels.
        positives = data.positives(query_ids)
        is_own = partition.owns(positives.values)
        rows = positives.row_ids[is_own]
        labels = partition.to_local(positives.values[is_own])
        row_P = torch.from_numpy(rows).to(device)
        label_P = torch.from_numpy(labels).to(device)
        # index_add_ is deterministic only if no label repeats, so a label's queries are summed
        # beforehand.
        label_U, sum_UD = sum_by_row(label_P, row_P, query_BD)
        centroid_SD.index_add_(0, label_U, sum_UD)
        count_S += torch.bincount(label_P, minlength=partition.size)
    # A count of 0 becomes 1: such a row is replaced by its text below, and must not be NaN.
    divisor_S = count_S.clamp_min(1)
    centroid_SD /= divisor_S[:, None]
    without_query_S = count_S == 0
    centroid_SD[without_query_S] = text_SD[without_query_S]
    return centroid_SD


def _text_vectors(context: MethodContext, head: Head) -> Tensor:
    """Returns [S, D], the vectors of the texts of this rank's labels."""
    partition = context.partition
    size = partition.size
    text_SD = torch.zeros(size, context.dim, device=context.device, dtype=context.dtype)
    label_ids = np.arange(partition.start, partition.stop)
    for block in spans(size, BLOCK):
        tokens = context.label_tokens(label_ids[block])
        vectors = context.encode_without_graph(tokens)
        text_SD[block] = head(vectors)
    return text_SD


def encoded_blocks(
    context: MethodContext,
    ids: Int64Array | KeptIds,
    tokens_of: Callable[[Int64Array], Ragged],
    head: Head,
) -> Iterator[tuple[Int64Array, Tensor]]:
    """Blocks of ids with the vectors of their texts, on every rank; collective.

    Ranks encode a block each and exchange the vectors. Without a graph.

    Args:
        context: Of the method.
        ids: of queries or labels.
        tokens_of: Tokens of the texts of some ids.
        head: What follows the encoder.
    """
    texts_per_round = BLOCK * collectives.num_ranks()
    for round_start in range(0, len(ids), texts_per_round):
        first = round_start + BLOCK * collectives.rank()
        # In the last round a rank may have no text left; it still takes part in the exchange.
        tokens = tokens_of(ids[first : first + BLOCK])
        vectors = context.encode_without_graph(tokens)
        own_BD = head(vectors).to(context.device, context.dtype)
        start = round_start
        for block_BD in collectives.gather_ragged(own_BD):
            stop = start + len(block_BD)
            yield ids[start:stop], block_BD
            start = stop
