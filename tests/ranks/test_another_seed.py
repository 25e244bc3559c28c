"""The losses equal direct loops on inputs of other seeds, and the loops equal the golden vectors."""

from pathlib import Path

import direct_loops
import numpy as np
import pytest
import ranks
import test_bce_ranks
import test_psl_ranks
import test_rae_ranks
import test_softmax_ranks
import test_triplet_ranks
from ranks import golden


@pytest.mark.parametrize("name", direct_loops.LOSSES)
def test_direct_loops_give_the_golden_results(name: str) -> None:
    vector = golden(name)
    for key, value in direct_loops.LOSSES[name](vector).items():
        np.testing.assert_allclose(value, vector[key], rtol=1e-9, atol=1e-11, err_msg=key)


@pytest.fixture(params=[1, 2, 3])
def another_seed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Puts vectors of another seed in the place of the golden ones."""
    direct_loops.write_vectors(tmp_path, request.param, num_queries=6 + request.param)
    monkeypatch.setattr(ranks, "ORACLE", tmp_path)


def test_losses_are_those_of_another_seed(
    another_seed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_bce_ranks.test_full_bce_is_golden(num_ranks=1, chunk=4)
    for name in ("astra_bce_one", "astra_bce_unbiased"):
        test_bce_ranks.test_sampled_bce_is_golden(name, num_ranks=1)
    for tau in ("0.05", "1.0"):
        test_softmax_ranks.test_softmax_is_golden(tau, num_ranks=1)
        test_softmax_ranks.test_decoupled_softmax_is_golden(tau, num_ranks=1)
    for k in (3, 5):
        test_softmax_ranks.test_soft_top_k_is_golden(k, num_ranks=1)
    for name in ("psl_paln", "psl_pal"):
        test_psl_ranks.test_psl_is_golden(name, num_ranks=1)
    for name in ("triplet_dynamic", "triplet_dynamic_inverted", "triplet_weighted"):
        test_triplet_ranks.test_triplet_is_golden(name, num_ranks=1)
    test_rae_ranks.test_the_loss_is_golden(1, 7, monkeypatch)
