"""The metrics against golden numbers (direct loops over the formulas, in agreement with two public evaluators)."""

import json
from pathlib import Path

import numpy as np
import pytest
from dense_metrics import remove_pairs, top_k

from xmcray.evaluation.metrics import Metrics, inverse_propensity
from xmcray.types import Ragged

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("name", ["default", "amazon", "wikipedia"])
def test_metrics_match_golden_numbers(name: str, chunk: int) -> None:
    given = np.load(DATA / f"metrics_{name}.npz", allow_pickle=False)
    expected = json.loads((DATA / f"metrics_{name}.json").read_text())
    num_queries, num_labels = given["truth"].shape
    num_train, a, b = int(given["num_train"]), float(given["A"]), float(given["B"])
    exclude = Ragged.from_rows(
        [given["filter_pairs"][given["filter_pairs"][:, 0] == row, 1] for row in range(num_queries)]
    )
    truth = remove_pairs(Ragged.from_rows([np.flatnonzero(row) for row in given["truth"]]), exclude)

    weights = inverse_propensity(given["train_counts"], num_train, a, b)
    np.testing.assert_allclose(weights, given["inverse_propensity"], rtol=1e-12)
    metrics = Metrics(given["train_counts"], num_train, a, b, num_labels)
    for start in range(0, num_queries, chunk):
        stop = min(start + chunk, num_queries)
        top = top_k(given["scores"][start:stop], 100, exclude.slice(start, stop))
        metrics.update(top, truth.slice(start, stop))

    assert metrics.queries == expected.pop("queries")
    assert metrics.queries + metrics.left_out == num_queries
    found = metrics.result()
    assert found.keys() == expected.keys() | {"R@100", "MRR@10", "coverage@5"}
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-9), key
