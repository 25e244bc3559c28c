"""P@k on held-out training queries, with the labels where they are: every rank searches its own rows exactly."""

from __future__ import annotations

import numpy as np
import torch

from xmcray.data.batches import TrainingData
from xmcray.evaluation.metrics import Metrics
from xmcray.methods.base import Method
from xmcray.nn.encoder import Encoder
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition, share
from xmcray.retrieval.exact import exact_search
from xmcray.training.step import answer_queries
from xmcray.types import Ragged, TopLabels

_KEPT = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@10")
_K = 10


def validate(
    encoder: Encoder, method: Method, data: TrainingData, part: LabelPartition
) -> dict[str, float]:
    """Metrics on `data.validation_rows`; collective, the same result on every rank."""
    row_SD = method.answer_rows()
    rows = data.validation_rows
    start, stop = share(len(rows), part.rank, part.num_ranks)
    query_BD = answer_queries(encoder, method, data.tokens(rows[start:stop]))
    query_GD = torch.cat(collectives.gather_ragged(query_BD)).float().cpu().numpy()
    source_S = data.corpus.label_order[part.start : part.stop]
    own_labels = exact_search(row_SD, query_GD, _K, source_S, _own(data.excluded(rows), part))
    top = _merge(own_labels)
    card = data.corpus.card
    metrics = Metrics(
        data.corpus.train_counts,
        card.num_train,
        card.propensity_a,
        card.propensity_b,
        data.num_labels,
    )
    metrics.update(top, data.corpus.split("train").positives(rows))
    result = metrics.result()
    return {name: float(result[name]) for name in _KEPT if name in result}


def _own(lists: Ragged, part: LabelPartition) -> Ragged:
    """The labels of this rank in each list, by their local ids."""
    own = part.owns(lists.values)
    return Ragged(
        part.to_local(lists.values[own]), np.concatenate([[0], np.cumsum(own)])[lists.offsets]
    )


def _merge(top: TopLabels) -> TopLabels:
    """The best of all ranks, ties by the lower source id."""
    device = "cuda" if collectives.on_gpu() else "cpu"
    gathered = (
        collectives.gather_ragged(torch.from_numpy(own).to(device)) for own in (top.ids, top.scores)
    )
    source, score = (
        np.concatenate([part.cpu().numpy() for part in parts], axis=1) for parts in gathered
    )
    order = np.lexsort((source, -score))[:, :_K]
    return TopLabels(np.take_along_axis(source, order, 1), np.take_along_axis(score, order, 1))
