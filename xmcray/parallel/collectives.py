"""How ranks exchange rows and numbers; each function states its backward. Works on Gloo, NCCL and one process alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from xmcray.parallel.partition import share

T = TypeVar("T")


def num_ranks() -> int:
    """Number of ranks; 1 when torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 when torch.distributed is not in use."""
    return dist.get_rank() if num_ranks() > 1 else 0


def on_gpu() -> bool:
    """Whether ranks exchange CUDA tensors (NCCL)."""
    return num_ranks() > 1 and dist.get_backend() == "nccl"


def gather_rows(rows_BD: Tensor, total: int) -> Tensor:
    """All ranks' rows in rank order.

    Args:
        rows_BD: rows of positions [start, stop) = share(total, rank, num_ranks); a rank may have none.
        total: G, the number of rows of all ranks.
    Returns:
        [G, D]. Backward: reduce-scatter; a rank gets the gradients of its rows summed over all ranks.
    """
    if num_ranks() == 1:
        return rows_BD
    return cast(Tensor, _GatherRows.apply(rows_BD, total))


def gather_parts(rows_UD: Tensor) -> Tensor:
    """All ranks' rows in rank order, any number of each.

    Returns:
        [P, D]. Backward: a rank gets the gradients of its rows summed over all ranks.
    """
    if num_ranks() == 1:
        return rows_UD
    return cast(Tensor, _GatherParts.apply(rows_UD))


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """`tensor` summed over ranks, in place; no gradient."""
    if num_ranks() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_ragged(tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor (same trailing shape, any number of rows) in rank order; no gradient."""
    if num_ranks() == 1:
        return [tensor]
    sizes = _sizes(tensor)
    width = max(sizes)
    buffer = _gathered(tensor, width)
    return [buffer[r * width : r * width + size] for r, size in enumerate(sizes)]


def gather_equal(tensor: Tensor) -> Tensor:
    """[ranks, ...], every rank's tensor, all of the same shape; no gradient."""
    if num_ranks() == 1:
        return tensor.unsqueeze(0)
    buffer = tensor.new_empty((num_ranks() * len(tensor), *tensor.shape[1:]))
    _all_gather(buffer, tensor.contiguous())
    return buffer.view(num_ranks(), *tensor.shape)


def gather_placed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Every rank's rows of tensors of equal length, without a copy of what came; no gradient.

    Returns:
        int64, places of ranks' rows in rank order, and of each tensor a buffer that has them there.
    """
    sizes = _sizes(tensors[0])
    width, device = max(sizes), tensors[0].device
    places = [
        torch.arange(r * width, r * width + size, device=device) for r, size in enumerate(sizes)
    ]
    return torch.cat(places), *(_gathered(tensor, width) for tensor in tensors)


def gather_objects(value: T) -> list[T]:
    """Every rank's small Python value (plain numbers, strings, dicts) in rank order, sent as JSON text."""
    if num_ranks() == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(_device())
    return [json.loads(bytes(part.cpu().numpy().tobytes())) for part in gather_ragged(text)]


def broadcast_int(value: int) -> int:
    """Rank 0's `value` on every rank."""
    if num_ranks() == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=_device())
    dist.broadcast(tensor, src=0)
    return int(tensor)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_BD: Tensor, total: int) -> Tensor:
        ctx.total = total
        width = -(-total // num_ranks())
        buffer = rows_BD.new_empty((num_ranks() * width, rows_BD.shape[1]))
        _all_gather(buffer, _padded(rows_BD, width))
        return _unpad(buffer, total, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_GD,) = grads
        width = -(-ctx.total // num_ranks())
        spans = _spans(ctx.total)
        padded = torch.cat([_padded(grad_GD[start:stop], width) for start, stop in spans])
        own = grad_GD.new_empty((width, grad_GD.shape[1]))
        _reduce_scatter(own, padded)
        start, stop = spans[rank()]
        return own[: stop - start], None


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_UD: Tensor) -> Tensor:
        parts = gather_ragged(rows_UD)
        start = sum(len(part) for part in parts[: rank()])
        ctx.own = slice(start, start + len(rows_UD))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return sum_over_ranks(grads[0].clone(memory_format=torch.contiguous_format))[ctx.own]


def _sizes(tensor: Tensor) -> list[int]:
    """Rows of each rank's tensor."""
    if num_ranks() == 1:
        return [len(tensor)]
    count = torch.tensor([len(tensor)], device=tensor.device)
    counts = torch.zeros(num_ranks(), dtype=count.dtype, device=tensor.device)
    _all_gather(counts, count)
    return counts.tolist()


def _gathered(tensor: Tensor, width: int) -> Tensor:
    """All ranks' rows, `width` of each."""
    if num_ranks() == 1:
        return tensor
    buffer = tensor.new_empty((num_ranks() * width, *tensor.shape[1:]))
    _all_gather(buffer, _padded(tensor, width))
    return buffer


def _spans(total: int) -> Sequence[tuple[int, int]]:
    return [share(total, r, num_ranks()) for r in range(num_ranks())]


def _padded(rows: Tensor, width: int) -> Tensor:
    missing = width - len(rows)
    return (
        torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])
        if missing
        else rows.contiguous()
    )


def _unpad(buffer: Tensor, total: int, width: int) -> Tensor:
    if total == len(buffer):
        return buffer
    return torch.cat(
        [buffer[r * width : r * width + b - a] for r, (a, b) in enumerate(_spans(total))]
    )


def _device() -> torch.device:
    return torch.device("cuda" if on_gpu() else "cpu")


def _all_gather(out: Tensor, own: Tensor) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, own)


def _reduce_scatter(out: Tensor, full: Tensor) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, full)
