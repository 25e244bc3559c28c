"""P@k on held-out training queries, with the labels where they are: every rank searches its own rows exactly."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from xmcray.data.batches import TrainingData
from xmcray.evaluation.metrics import Metrics
from xmcray.methods.base import Method
from xmcray.nn.encoder import Encoder
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition, share
from xmcray.training.step import answer_queries
from xmcray.types import Ragged, TopLabels

_KEPT = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@10")
_K = 10
_ROWS = 256  # queries scored at once


def validate(encoder: Encoder, method: Method, data: TrainingData, part: LabelPartition) -> dict[str, float]:
    """Metrics on `data.validation_rows`; collective, the same result on every rank."""
    row_SD = method.answer_rows()
    rows = data.validation_rows
    start, stop = share(len(rows), part.rank, part.num_ranks)
    query_BD = answer_queries(encoder, method, data.tokens(rows[start:stop])).to(row_SD)
    query_GD = torch.cat(collectives.gather_ragged(query_BD))
    excluded = data.excluded(rows)
    ids, scores = _top_rows(query_GD, row_SD, part, excluded)
    top = _merge(ids, scores, data)
    card = data.corpus.card
    metrics = Metrics(data.corpus.train_counts, card.num_train, card.propensity_a, card.propensity_b, data.num_labels)
    metrics.update(top, data.corpus.split("train").positives(rows))
    result = metrics.result()
    return {name: float(result[name]) for name in _KEPT if name in result}


def _top_rows(query_GD: Tensor, row_SD: Tensor, part: LabelPartition, excluded: Ragged) -> tuple[Tensor, Tensor]:
    """Global ids and scores [G, k] of each query's best rows of this rank."""
    ids = torch.full((len(query_GD), _K), -1, dtype=torch.int64)
    scores = torch.full((len(query_GD), _K), -torch.inf)
    width = min(_K, part.size)
    for start in range(0, len(query_GD), _ROWS) if width else []:
        block = query_GD[start : start + _ROWS] @ row_SD.T
        skip = excluded.slice(start, start + len(block))
        own = part.owns(skip.values)
        block[torch.from_numpy(skip.row_ids[own]), torch.from_numpy(part.to_local(skip.values[own]))] = -torch.inf
        best = block.topk(width)
        ids[start : start + len(block), :width] = best.indices.cpu() + part.start
        scores[start : start + len(block), :width] = best.values.float().cpu()
    return ids, scores


def _merge(ids: Tensor, scores: Tensor, data: TrainingData) -> TopLabels:
    """The best of all ranks, in source ids, ties by the lower one."""
    device = "cuda" if collectives.on_gpu() else "cpu"
    all_ids = torch.stack(collectives.gather_ragged(ids.to(device))).cpu().numpy()
    all_scores = torch.stack(collectives.gather_ragged(scores.to(device))).cpu().numpy()
    candidate = np.concatenate(list(all_ids), axis=1)
    score = np.concatenate(list(all_scores), axis=1)
    source = np.where(np.isfinite(score), data.corpus.label_order[candidate], -1)
    order = np.lexsort((source, -score))[:, :_K]
    return TopLabels(np.take_along_axis(source, order, 1), np.take_along_axis(score, order, 1).astype(np.float32))
