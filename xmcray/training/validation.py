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
_K = 10  # the largest k of these metrics


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
    parts = collectives.gather_ragged(query_BD)
    query_GD = torch.cat(parts).float().cpu().numpy()
    source_ids_S = data.corpus.label_order[partition.start : partition.stop]
    excluded = _own_labels(data.excluded(rows), partition)
    own = exact_search(label_SD, query_GD, _K, source_ids_S, excluded)
    best = _best_of_all_ranks(own)

    # From here on every rank has all answers and computes the same numbers.
    metrics = Metrics.of_corpus(data.corpus)
    positives = data.corpus.split("train").positives(rows)
    metrics.update(best, positives)
    result = metrics.result()
    return {name: float(result[name]) for name in _METRICS if name in result}


def _own_labels(lists: Ragged, partition: LabelPartition) -> Ragged:
    """The labels of this rank in each list, as local ids."""
    is_own = partition.owns(lists.values)
    # How many own labels stand before each entry: the offsets of the shorter lists.
    num_before = np.concatenate([[0], np.cumsum(is_own)])
    own_values = lists.values[is_own]
    return Ragged(partition.to_local(own_values), num_before[lists.offsets])


def _best_of_all_ranks(own: TopLabels) -> TopLabels:
    """The K best answers of all ranks; of equal scores the lower source id comes first."""
    ids = _gather_columns(own.ids)
    scores = _gather_columns(own.scores)
    # lexsort orders by its last key first: by falling score, then by rising id.
    order = np.lexsort((ids, -scores))[:, :_K]
    best_ids = np.take_along_axis(ids, order, axis=1)
    best_scores = np.take_along_axis(scores, order, axis=1)
    return TopLabels(best_ids, best_scores)


def _gather_columns(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The columns of all ranks, side by side; collective."""
    device = "cuda" if collectives.on_gpu() else "cpu"
    own = torch.from_numpy(array).to(device)
    gathered = collectives.gather_ragged(own)
    columns = [part.cpu().numpy() for part in gathered]
    return np.concatenate(columns, axis=1)
