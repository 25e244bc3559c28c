"""Metrics on held-out training queries: every rank searches the labels that it owns, exactly."""

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

_METRICS = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@10")
_K = 10  # answers per query, for the largest k of these metrics


def validate(
    encoder: Encoder,
    method: Method,
    data: TrainingData,
    partition: LabelPartition,
) -> dict[str, float]:
    """Metrics on `data.validation_rows`; collective, the same result on every rank."""
    label_SD = method.answer_rows()
    rows = data.validation_rows
    start, stop = share(len(rows), partition.rank, partition.num_ranks)
    # Every rank encodes a share of the queries, and searches its labels for all of them.
    tokens = data.tokens(rows[start:stop])
    query_BD = encode_queries(encoder, method, tokens)
    query_GD = torch.cat(collectives.gather_ragged(query_BD))
    queries = query_GD.float().cpu().numpy()
    source_ids_S = data.corpus.label_order[partition.start : partition.stop]
    excluded = _own_labels(data.excluded(rows), partition)
    own_best = exact_search(label_SD, queries, _K, source_ids_S, excluded)
    best = _best_of_all_ranks(own_best)

    # From here on every rank has all answers and computes the same numbers.
    metrics = Metrics.of_corpus(data.corpus)
    positives = data.corpus.split("train").positives(rows)
    metrics.update(best, positives)
    values = metrics.result()
    return {name: float(values[name]) for name in _METRICS if name in values}


def _own_labels(lists: Ragged, partition: LabelPartition) -> Ragged:
    """Each list without the labels of other ranks, as local ids."""
    own_lists = lists.where(partition.owns(lists.values))
    return Ragged(partition.to_local(own_lists.values), own_lists.offsets)


def _best_of_all_ranks(own_best: TopLabels) -> TopLabels:
    """The K best answers of all ranks; of equal scores the lower source id comes first."""
    ids = _gather_columns(own_best.ids)
    scores = _gather_columns(own_best.scores)
    # The last key of lexsort counts most: columns go by falling score, then by rising id.
    order = np.lexsort((ids, -scores))
    best = order[:, :_K]
    best_ids = np.take_along_axis(ids, best, axis=1)
    best_scores = np.take_along_axis(scores, best, axis=1)
    return TopLabels(best_ids, best_scores)


def _gather_columns(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The columns of all ranks, side by side; collective."""
    device = "cuda" if collectives.on_gpu() else "cpu"
    own = torch.from_numpy(array).to(device)
    gathered = collectives.gather_ragged(own)
    columns = [part.cpu().numpy() for part in gathered]
    return np.concatenate(columns, axis=1)
