"""Labels that are no answers do not lower the recall of the others."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import xmcray.retrieval.index as index_module
from xmcray.retrieval import label_index
from xmcray.retrieval.index_building import build_index
from xmcray.retrieval.index_spec import IndexSpec
from xmcray.retrieval.label_index import LabelIndex
from xmcray.retrieval.shards import SearchScope, ShardedIndex, VectorShard

NUM_LABELS = 20_000
SHARE = 0.07  # of the labels can be answered
K = 20


@functools.cache
def indexed_labels(factory: str) -> tuple[LabelIndex, np.ndarray, np.ndarray]:
    """Indexed labels, queries, and which of the labels can be answered."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((NUM_LABELS, 16), dtype=np.float32)
    query_BD = rows[:100] + 0.3 * rng.standard_normal((100, 16), dtype=np.float32)
    index = build_index(rows, IndexSpec(factory=factory), queries=query_BD)
    shard = VectorShard(0, NUM_LABELS, indexed=True, candidates=index.candidates)
    settings: Any = SimpleNamespace(num_labels=NUM_LABELS, shards=(shard,), first_added=None)
    none = np.empty(0, np.int64)
    table: Any = None
    labels = LabelIndex(
        settings, ShardedIndex((shard,), (index,)), np.arange(NUM_LABELS), table, none
    )
    return labels, query_BD, rng.random(NUM_LABELS) < SHARE


def recall_of_view(factory: str, removes: bool) -> float:
    """Share of the exact answers that are found where few labels can be answered."""
    labels, query_BD, is_answer = indexed_labels(factory)
    if removes:
        view = dataclasses.replace(labels, removed=np.flatnonzero(~is_answer))
    else:
        view = labels.restricted(is_answer)
    found = view.search(query_BD, K)
    wanted = view.search(query_BD, K, SearchScope(exact=True))
    assert is_answer[found.ids].all()
    shared = [
        len(np.intersect1d(one, other)) for one, other in zip(found.ids, wanted.ids, strict=True)
    ]
    return float(np.mean(shared)) / K


@pytest.mark.parametrize("batch_queries", [1, 10**9])
@pytest.mark.parametrize("removes", [False, True])
# The last one rotates rows before they are put into lists, as OPQ does, which takes long to train.
@pytest.mark.parametrize("factory", ["IVF64,PQ8x4fs", "IVF64,Flat", "RR16,IVF64,PQ8x4fs"])
def test_few_labels_that_can_be_answered_are_found(
    factory: str, removes: bool, batch_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the lists and candidates of a search of all labels, 0.86 to 0.93 of them are found."""
    # Fewer labels are compared exhaustively.
    monkeypatch.setattr(label_index, "FLAT_ROWS", 100)
    # Lists are scanned with matrix products, or FAISS is asked.
    monkeypatch.setattr(index_module, "BATCH_QUERIES", batch_queries)

    assert recall_of_view(factory, removes) >= 0.94
