"""One process that is rank 0 of many: collectives are counted, and the other ranks send what this one sends."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork

_BACKEND = "xmcray_plan"
Count = Callable[[str, float], None]


class _PretendedGroup(dist.ProcessGroup):
    """Implements the collectives of `parallel.collectives` for one rank."""

    def __init__(self, num_ranks: int, count: Count) -> None:
        super().__init__(0, num_ranks)  # type: ignore[call-arg]
        self._num_ranks = num_ranks
        self._count = count

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return _BACKEND

    def all_gather_single(self, out: Tensor, own: Tensor, options: Any = None) -> FakeWork:
        self._count("collective", own.nbytes)
        if not out.is_meta:
            out.view(self._num_ranks, -1).copy_(own.reshape(1, -1))
        return FakeWork()

    def reduce_scatter_single(self, out: Tensor, full: Tensor, options: Any = None) -> FakeWork:
        self._count("collective", out.nbytes)
        return FakeWork()

    def allreduce(self, tensors: Any, options: Any = None) -> FakeWork:  # type: ignore[override]
        # A ring reduces and gathers: each rank sends its share of the tensor to all others, twice.
        share = tensors[0].nbytes / self._num_ranks
        self._count("collective", share)
        self._count("collective", share)
        return FakeWork()

    def broadcast(self, tensors: Any, options: Any = None) -> FakeWork:  # type: ignore[override]
        self._count("collective", tensors[0].nbytes)
        return FakeWork()

    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]


@contextlib.contextmanager
def pretended_ranks(num_ranks: int, count: Count) -> Iterator[None]:
    """Inside, `parallel.collectives` sees so many ranks.

    Args:
        num_ranks: 1 leaves torch.distributed alone.
        count: called with "collective" and the bytes that this rank contributes.
    """
    if num_ranks == 1:
        yield
        return
    if hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.backend_capability.pop(_BACKEND, None)
        delattr(dist.Backend, _BACKEND.upper())
    dist.Backend.register_backend(
        _BACKEND,
        lambda store, rank, size, timeout: _PretendedGroup(size, count),
        devices=["cpu", "meta"],
    )
    dist.init_process_group(_BACKEND, rank=0, world_size=num_ranks, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        dist.destroy_process_group()
