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


def validated_on_rank(
    name: str, block: tuple[int, int], removed: tuple[int, ...] = ()
) -> dict[str, float]:
    """The golden scores as rows of the classifier, in an order of labels that is not the source's."""
    g = golden(name)
    num_queries, num_labels = g["truth"].shape
    order = np.random.default_rng(0).permutation(num_labels)
    rank_of = np.argsort(order)
    filtered = [g["filter_pairs"][g["filter_pairs"][:, 0] == row, 1] for row in range(num_queries)]
    truth = remove_pairs(rows_of([np.flatnonzero(row) for row in g["truth"]]), rows_of(filtered))
    part = LabelPartition(num_labels, collectives.num_ranks(), collectives.rank())
    row_SD = torch.from_numpy(g["scores"].T[order][part.start : part.stop].copy())
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
    data: Any = SimpleNamespace(
        corpus=corpus,
        num_labels=num_labels,
        validation_rows=np.arange(num_queries, dtype=np.int64),
        tokens=lambda rows: rows_of([[row] for row in rows]),
        excluded=rows_of([rank_of[ids] for ids in filtered]).take,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "CPU_BLOCK", block)
        method: Any = SimpleNamespace(head=Head(num_queries), answer_rows=lambda: row_SD)
        return validation.validate(UnitVectors(num_queries), method, data, part)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "num_ranks", [1, 2, 3, 4, 7]
)  # 60 labels on 7 ranks: unequal, none has ten
@pytest.mark.parametrize("name", ["default", "amazon"])
def test_validation_is_golden(name: str, num_ranks: int) -> None:
    expected = json.loads((ORACLE / f"metrics_{name}.json").read_text())
    for found in on_ranks(validated_on_rank, num_ranks, name, (7, 32)):  # 40 queries in blocks of 7
        assert found.keys() == set(validation._METRICS)
        for key, value in found.items():
            assert value == pytest.approx(expected[key], rel=1e-9), key


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_removed_labels_are_neither_answers_nor_positives(num_ranks: int) -> None:
    """As if they had no positives, and the lowest scores of all."""
    g = golden("default")
    answers = np.argsort(-g["scores"], axis=1)
    # Those that are answered first most often.
    often = np.bincount(answers[:, 0], minlength=g["scores"].shape[1])
    removed = tuple(np.argsort(-often)[:5].tolist())
    scores = g["scores"].copy()
    scores[g["filter_pairs"][:, 0], g["filter_pairs"][:, 1]] = -np.inf
    scores[:, removed] = -np.inf
    truth = g["truth"].copy()
    truth[g["filter_pairs"][:, 0], g["filter_pairs"][:, 1]] = 0
    truth[:, removed] = 0
    best = np.argsort(-scores, axis=1, kind="stable")
    has_positive = truth.any(axis=1)
    hits_at_1 = truth[np.arange(len(truth)), best[:, 0]]
    expected = hits_at_1[has_positive].mean()

    for found in on_ranks(validated_on_rank, num_ranks, "default", (7, 32), removed):
        assert found["P@1"] == pytest.approx(expected)
