"""An exchange fails when another rank lets it wait for too long."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest
import torch
from ranks import on_ranks

from xmcray.parallel import collectives
from xmcray.parallel.collectives import Channel

HAS_FAILED = multiprocessing.get_context("fork").Event()


def sum_in_world() -> None:
    collectives.sum_over_ranks(torch.ones(2))


def sum_in_channel() -> None:
    channel = Channel()
    collectives.set_time_limit(0.5)
    wait_on_rank_1()
    channel.start_sum(torch.ones(2)).wait()


def wait_on_rank_1() -> None:
    if collectives.rank() == 1:
        assert HAS_FAILED.wait(60)


def exchange(sum_up: Callable[[], None]) -> bool:
    """Whether the exchange fails on a rank, with a group that began with half an hour."""
    if sum_up is sum_in_world:
        collectives.set_time_limit(0.5)
        wait_on_rank_1()
    try:
        sum_up()
    except RuntimeError:
        HAS_FAILED.set()
        return True
    return False


@pytest.mark.parametrize("sum_up", [sum_in_world, sum_in_channel])
def test_an_exchange_fails_after_the_time_that_was_set_last(sum_up: Callable[[], None]) -> None:
    HAS_FAILED.clear()
    # Rank 1 finds that its peer has left.
    assert on_ranks(exchange, 2, sum_up) == [True, True]
