"""Rank 0 makes the clusters of all labels; each rank receives those of its own, a few at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import Tensor

from xmcray.methods import prime
from xmcray.parallel import collectives
from xmcray.parallel.partition import LabelPartition


def received(num_labels: int) -> tuple[list[int], int]:
    """This rank's part of the numbers 0, 1, 2, ..., and the most numbers that were sent at once."""
    sizes = [0]
    broadcast = collectives.broadcast

    def counted(tensor: Tensor) -> Tensor:
        sizes.append(len(tensor))
        return broadcast(tensor)

    partition = LabelPartition(num_labels, collectives.num_ranks(), collectives.rank())
    number_L = torch.arange(num_labels if collectives.rank() == 0 else 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prime, "LABELS_AT_ONCE", 4)
        patch.setattr(collectives, "broadcast", counted)
        own = prime.own_part(number_L, partition)
    return own.tolist(), max(sizes)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("num_labels", [2, 8, 11])
def test_each_rank_gets_its_clusters_and_few_are_sent_at_once(
    num_ranks: int, num_labels: int
) -> None:
    results = on_ranks(received, num_ranks, num_labels)

    joined = np.concatenate([numbers for numbers, _ in results])
    assert joined.tolist() == list(range(num_labels))
    assert max(most for _, most in results) <= 4
