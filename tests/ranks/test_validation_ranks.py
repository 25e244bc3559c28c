"""Validation over label shards equals the golden metrics on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dense_metrics import remove_pairs
from ranks import on_ranks
from torch import Tensor, nn

from xmcray.nn.heads import Head
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition
from xmcray.retrieval import exact
from xmcray.training import validation
from xmcray.types import Ragged

ORACLE = Path(__file__).parents[1] / "oracle" / "data"


class UnitVectors(nn.Module):
    """Query i, whose only token is i, becomes unit vector i: its score of a row is the row's i-th coordinate."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, tokens: Ragged) -> Tensor:
        return torch.eye(self.dim, dtype=torch.float64)[torch.from_numpy(tokens.values)]


def rows_of(ids: list[Any]) -> Ragged:
    return Ragged.from_rows([np.sort(np.asarray(row, np.int64)) for row in ids])


def golden(name: str) -> dict[str, Any]:
    with np.load(ORACLE / f"metrics_{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def filter_lists(g: dict[str, Any]) -> list[np.ndarray]:
    """The labels of each query that its filter pairs name."""
    queries = g["filter_pairs"][:, 0]
    labels = g["filter_pairs"][:, 1]
    return [labels[queries == query] for query in range(len(g["truth"]))]


def pretended_data(g: dict[str, Any], order: np.ndarray, removed: tuple[int, ...]) -> Any:
    """What validation reads of the data of a run whose internal label ids are places in `order`."""
    num_queries, num_labels = g["truth"].shape
    filters = filter_lists(g)
    positives = rows_of([np.flatnonzero(row) for row in g["truth"]])
    truth = remove_pairs(positives, rows_of(filters))
    internal_id = np.argsort(order)
    card = SimpleNamespace(
        num_train=int(g["num_train"]),
        num_labels=num_labels,
        propensity_a=float(g["A"]),
        propensity_b=float(g["B"]),
    )
    corpus = SimpleNamespace(
        card=card,
        label_order=order,
        train_counts=g["train_counts"],
        split=lambda _: SimpleNamespace(positives=truth.take),
        removed_labels=np.array(removed, np.int64),
        answerable=lambda labels: labels.where(~np.isin(labels.values, removed)),
    )
    return SimpleNamespace(
        corpus=corpus,
        num_labels=num_labels,
        validation_rows=np.arange(num_queries, dtype=np.int64),
        tokens=lambda rows: rows_of([[row] for row in rows]),
        excluded=rows_of([internal_id[labels] for labels in filters]).take,
    )


def validated_on_rank(
    name: str, block: tuple[int, int], removed: tuple[int, ...] = ()
) -> dict[str, float]:
    """The golden scores as rows of the classifier, in an order of labels that is not the source's."""
    g = golden(name)
    num_queries, num_labels = g["truth"].shape
    order = np.random.default_rng(0).permutation(num_labels)
    part = LabelPartition(num_labels, collectives.num_ranks(), collectives.rank())
    own_labels = order[part.start : part.stop]
    # A query is a unit vector, so row l has the scores of label l with all queries.
    row_SD = torch.from_numpy(g["scores"].T[own_labels])
    method: Any = SimpleNamespace(head=Head(num_queries), answer_rows=lambda: row_SD)
    encoder: Any = UnitVectors(num_queries)
    data = pretended_data(g, order, removed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "CPU_BLOCK", block)
        return validation.validate(encoder, method, data, part)


# 60 labels on 7 ranks: unequal, none has ten.
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", ["default", "amazon"])
def test_validation_is_golden(name: str, num_ranks: int) -> None:
    expected = json.loads((ORACLE / f"metrics_{name}.json").read_text())
    blocks_of_7_queries = (7, 32)
    for metrics in on_ranks(validated_on_rank, num_ranks, name, blocks_of_7_queries):
        assert metrics.keys() == set(validation.VALIDATION_METRICS)
        for key, value in metrics.items():
            assert value == pytest.approx(expected[key], rel=1e-9), key


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_removed_labels_are_neither_answers_nor_positives(num_ranks: int) -> None:
    """As if they had no positives, and the lowest scores of all."""
    g = golden("default")
    # Those that are answered first most often, and all positives of one query, which is left out.
    first_answers = g["scores"].argmax(axis=1)
    times_first = np.bincount(first_answers, minlength=g["scores"].shape[1])
    answered_first = np.argsort(-times_first)[:5]
    query = np.flatnonzero(g["truth"].any(axis=1))[0]
    its_positives = np.flatnonzero(g["truth"][query])
    removed = tuple(np.union1d(answered_first, its_positives).tolist())
    filter_queries = g["filter_pairs"][:, 0]
    filter_labels = g["filter_pairs"][:, 1]
    scores = g["scores"].copy()
    scores[filter_queries, filter_labels] = -np.inf
    scores[:, removed] = -np.inf
    truth = g["truth"].copy()
    truth[filter_queries, filter_labels] = 0
    truth[:, removed] = 0
    # Of equal scores the lower id, which argmax gives too.
    best = scores.argmax(axis=1)
    has_positive = truth.any(axis=1)
    assert has_positive.sum() > 5
    is_hit = truth[np.arange(len(truth)), best]
    expected = is_hit[has_positive].mean()

    for metrics in on_ranks(validated_on_rank, num_ranks, "default", (7, 32), removed):
        assert metrics["P@1"] == pytest.approx(expected)
