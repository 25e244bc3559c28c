"""Gradients are summed over ranks while the backward pass still runs."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn

from xmcray.parallel import collectives
from xmcray.parallel.collectives import Channel
from xmcray.parallel.partition import share
from xmcray.training import gradients
from xmcray.training.gradients import GradientSum

NUM_RANKS = 3
NUM_QUERIES = 2  # so that one rank has none


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()


def queries() -> Tensor:
    return torch.arange(4.0 * NUM_QUERIES, dtype=torch.float64).view(NUM_QUERIES, 4)


def summed_gradients() -> tuple[list[Tensor], list[str]]:
    """Gradients of all parameters, and what happened in which order on this rank."""
    events: list[str] = []
    start_sum = Channel.start_sum

    def recorded(self: Channel, tensor: Tensor) -> object:
        events.append("sum")
        return start_sum(self, tensor)

    model = layers()
    start, stop = share(NUM_QUERIES, collectives.rank(), NUM_RANKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "_BUCKET", 1)  # each parameter is a bucket
        patch.setattr(Channel, "start_sum", recorded)
        sums = GradientSum(list(model.parameters()))
        for _ in range(2):
            model.zero_grad()
            sums.overlap()
            if start < stop:
                hidden_BD = model[0](queries()[start:stop])
                hidden_BD.register_hook(lambda _: events.append("first layer"))
                own_BD = model[1:](hidden_BD)
            else:
                # No gradient reaches the layers, but the backward pass has its exchange.
                own_BD = torch.empty(0, 2, dtype=torch.float64, requires_grad=True)
            query_GD = collectives.gather_rows(own_BD, NUM_QUERIES)
            query_GD.square().sum().backward()
            sums.finish()
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad)
    return found, events


def test_sums_start_before_the_backward_pass_ends() -> None:
    model = layers()
    # Each rank adds the loss of all queries.
    (NUM_RANKS * model(queries()).square().sum()).backward()
    results = on_ranks(summed_gradients, NUM_RANKS)
    step = ["sum"] * 4 + ["first layer"] + ["sum"] * 2
    num_overlapping = 0
    for found, events in results:
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)
        num_overlapping += events == 2 * step
        assert events.count("sum") == 2 * 6
    assert num_overlapping == NUM_QUERIES
