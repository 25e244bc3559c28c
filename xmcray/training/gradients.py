"""Sums the gradients of data-parallel parameters over ranks while the backward pass still runs.

Few large exchanges are faster than one for each parameter, so gradients are exchanged in buckets.
The exchange of a bucket starts as soon as the backward pass has completed its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xmcray.parallel import collectives
from xmcray.parallel.collectives import Channel

_BUCKET = 8_000_000  # elements exchanged together


@dataclass(slots=True)
class _Bucket:
    """Parameters whose gradients are summed in one exchange.

    Attributes:
        parameters: In the order in which their gradients lie in the exchange.
        num_missing: Gradients that the backward pass has not completed yet.
        exchange: Runs in the background, once it has started.
    """

    parameters: list[nn.Parameter]
    num_missing: int = 0
    exchange: dist.Work | None = None

    def fill_missing(self) -> None:
        """Gives a gradient of 0 to parameters without one."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def flatten(self) -> Tensor:
        """Moves the gradients into one tensor, of which they are views from then on."""
        gradients = []
        for parameter in self.parameters:
            assert parameter.grad is not None
            gradients.append(parameter.grad.reshape(-1))
        flat = torch.cat(gradients)
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, flat.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)
        return flat


class GradientSum:
    """Sums the gradients of some parameters over ranks; collective.

    Exchanges start in the order of the buckets on every rank. How far the backward pass has come
    when one starts differs between ranks: that of a rank without texts completes no gradient of the
    encoder at all. That pass has exchanges itself, so the sums have a channel of their own.

    Args:
        parameters: With the same shapes on every rank, in the order in which they are used.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._buckets = _buckets(parameters)
        self._num_started = 0
        self._overlaps = False
        self._channel: Channel | None = None
        if collectives.num_ranks() == 1 or not parameters:
            return
        self._channel = Channel()
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._counter_of(bucket))

    def overlap(self) -> None:
        """Lets sums start during the next backward pass, which has to complete all gradients."""
        self._overlaps = True
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.parameters)

    def finish(self) -> None:
        """Starts the sums that the backward pass did not start, and waits for all of them.

        A gradient that no rank has computed is 0.
        """
        for bucket in self._buckets[self._num_started :]:
            self._start(bucket)
        for bucket in self._buckets:
            if bucket.exchange is not None:
                bucket.exchange.wait()
                bucket.exchange = None
        self._num_started = 0
        self._overlaps = False

    def _counter_of(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        """What autograd calls when it has completed the gradient of a parameter of a bucket."""

        def count(_: Tensor) -> None:
            if self._overlaps:
                bucket.num_missing -= 1
                self._start_completed()

        return count

    def _start_completed(self) -> None:
        """Starts the sums of complete buckets, up to the first bucket that is not complete."""
        for bucket in self._buckets[self._num_started :]:
            if bucket.num_missing:
                return
            self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        bucket.fill_missing()
        if self._channel is not None:
            bucket.exchange = self._channel.start_sum(bucket.flatten())
        self._num_started += 1


def _buckets(parameters: Iterable[nn.Parameter]) -> list[_Bucket]:
    """Parameters in the order in which a backward pass reaches them: the last ones first."""
    buckets: list[_Bucket] = []
    num_elements = _BUCKET
    for parameter in reversed(list(parameters)):
        if num_elements >= _BUCKET:
            buckets.append(_Bucket([]))
            num_elements = 0
        buckets[-1].parameters.append(parameter)
        num_elements += parameter.numel()
    return buckets
