"""Metrics on held-out training queries. Every rank searches its own labels exhaustively."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xmcray.data.batches import TrainingData
from xmcray.evaluation.metrics import Metrics
from xmcray.methods.base import Method
from xmcray.nn.encoder import Encoder
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition, share
from xmcray.retrieval.exact import exact_search
from xmcray.training.step import encode_queries
from xmcray.types import Ragged, TopLabels

VALIDATION_METRICS = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@10")
_K = 10  # answers per query, for the largest k of these metrics


def validate(
    encoder: Encoder,
    method: Method,
    data: TrainingData,
    partition: LabelPartition,
) -> dict[str, float]:
    """Metrics on `data.validation_rows`. Collective; the result is the same on every rank.

    As in the evaluation of a bundle, removed labels are neither answers nor positives.
    """
    label_SD = method.answer_rows()
    rows = data.validation_rows
    start, stop = share(len(rows), partition.rank, partition.num_ranks)
    # Every rank encodes a share of the queries, and then searches its own labels for all queries.
    tokens = data.tokens(rows[start:stop])
    query_BD = encode_queries(encoder, method, tokens)
    # The vectors are concatenated on the host. On the device this would need twice the memory, and they
    # would stay there while it scores.
    gathered = collectives.gather_ragged(query_BD)
    parts = [part_BD.float().cpu().numpy() for part_BD in gathered]
    query_GD = np.concatenate(parts)
    source_ids_S = data.corpus.label_order[partition.start : partition.stop]
    was_removed_S = np.isin(source_ids_S, data.corpus.removed_labels)
    own_best = exact_search(
        label_SD,
        query_GD,
        _K,
        ids=np.where(was_removed_S, -1, source_ids_S),
        hidden=_to_local_lists(data.excluded(rows), partition),
    )
    best = _best_of_all_ranks(own_best)

    # Every rank now has all answers and computes the same numbers from them.
    metrics = Metrics.of_corpus(data.corpus)
    positives = data.corpus.split("train").positives(rows)
    metrics.update(best, data.corpus.answerable(positives))
    values = metrics.result()
    return {name: float(values[name]) for name in VALIDATION_METRICS}


def _to_local_lists(lists: Ragged, partition: LabelPartition) -> Ragged:
    """Each list without the labels of other ranks, as local ids."""
    own_lists = lists.where(partition.owns(lists.values))
    return Ragged(partition.to_local(own_lists.values), own_lists.offsets)


def _best_of_all_ranks(own_best: TopLabels) -> TopLabels:
    """The K best answers of all ranks; of equal scores the lower source id comes first."""
    ids = _side_by_side(own_best.ids)
    scores = _side_by_side(own_best.scores)
    # The last key of `lexsort` is the first to be compared: score descending, then id ascending.
    order = np.lexsort((ids, -scores))
    best = order[:, :_K]
    best_ids = np.take_along_axis(ids, best, axis=1)
    best_scores = np.take_along_axis(scores, best, axis=1)
    return TopLabels(best_ids, best_scores)


def _side_by_side(own_BK: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Concatenates the columns of all ranks. Collective."""
    device = "cuda" if collectives.on_gpu() else "cpu"
    of_ranks = collectives.gather_equal(torch.from_numpy(own_BK).to(device))
    return np.concatenate(of_ranks.cpu().numpy(), axis=1)
