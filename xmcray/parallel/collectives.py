"""How ranks exchange rows and numbers. Works on Gloo, on NCCL and in one process alone.

Functions with a gradient say what their backward pass does; all others have none. NCCL and Gloo
gather tensors of one shape only, so rows of different number are padded to the largest, called
`width` here.
"""

from __future__ import annotations

import json
import os
import weakref
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from xmcray.parallel.partition import share

T = TypeVar("T")
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def num_ranks() -> int:
    """Returns the number of ranks; 1 if torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Returns the rank of this process; 0 if torch.distributed is not in use."""
    return dist.get_rank() if num_ranks() > 1 else 0


def set_time_limit(seconds: float) -> None:
    """Sets the seconds after which an exchange fails from now on, in channels too."""
    if num_ranks() == 1:
        return
    limit = timedelta(seconds=seconds)
    # Torch has no public function for an existing group. Checked with torch 2.13. If it breaks,
    # leave it out: then the limit with which a group was created stays.
    distributed_c10d._set_pg_timeout(limit)
    for channel in _channels:
        distributed_c10d._set_pg_timeout(limit, channel.group)


def is_first_of_node() -> bool:
    """Returns whether this rank is the first of its node; true if LOCAL_RANK is not set."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def on_gpu() -> bool:
    """Returns whether ranks exchange CUDA tensors (NCCL)."""
    return num_ranks() > 1 and dist.get_backend() == "nccl"


def gather_rows(rows_BD: Tensor, total: int) -> Tensor:
    """Gathers the rows of a global batch in rank order.

    Args:
        rows_BD: rows of positions [start, stop) = share(total, rank, num_ranks); a rank may have
            none.
        total: G, the number of rows of all ranks.
    Returns:
        [G, D]. Backward: reduce-scatter; a rank gets the gradients of its rows summed over all
        ranks.
    """
    if num_ranks() == 1:
        return rows_BD
    return cast(Tensor, _GatherRows.apply(rows_BD, total))


def gather_parts(rows_UD: Tensor) -> Tensor:
    """Gathers rows in rank order; each rank may have any number of them.

    Returns:
        [P, D]. Backward: all-reduce; a rank gets the gradients of its rows summed over all ranks.
    """
    if num_ranks() == 1:
        return rows_UD
    return cast(Tensor, _GatherParts.apply(rows_UD))


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sums a tensor over ranks in place and returns it."""
    if num_ranks() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather_ragged(tensor: Tensor) -> list[Tensor]:
    """Returns every rank's tensor in rank order; collective.

    Args:
        tensor: [rows, ...]; ranks may have different numbers of rows, and none.
    """
    if num_ranks() == 1:
        return [tensor]
    num_rows = _row_counts(tensor)
    buffer = _gather_padded(tensor, max(num_rows))
    return _without_padding(buffer, num_rows)


def gather_equal(tensor: Tensor) -> Tensor:
    """Returns every rank's tensor as [ranks, ...]; collective.

    Args:
        tensor: a tensor of the same shape on every rank, so that nothing is padded.
    """
    if num_ranks() == 1:
        return tensor.unsqueeze(0)
    # Row r * len(tensor) + i of the result is row i of rank r.
    gathered = _all_gather(tensor.contiguous())
    return gathered.view(num_ranks(), *tensor.shape)


def gather_placed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Gathers the rows of some tensors of equal length without an extra copy; collective.

    Args:
        tensors: [rows, ...]; all of a rank's tensors have the same number of rows.
    Returns:
        int64, the places of all ranks' rows in rank order, and for each tensor a buffer with its
        rows at these places.
    """
    num_rows = _row_counts(tensors[0])
    width = max(num_rows)
    buffers = [_gather_padded(tensor, width) for tensor in tensors]
    # Cutting the padding out of the places, and not out of the buffers, copies no row.
    all_places = torch.arange(len(buffers[0]), device=tensors[0].device)
    places = torch.cat(_without_padding(all_places, num_rows))
    return places, *buffers


def gather_objects(value: T) -> list[T]:
    """Returns every rank's small Python value in rank order; collective.

    Args:
        value: plain numbers, strings, lists and dicts, because it is sent as JSON text. (Pickle,
            which torch's own function uses, could run code of another process.)
    """
    if num_ranks() == 1:
        return [value]
    text = json.dumps(value).encode()
    # frombuffer wants writable memory, and the bytes of `encode` are read-only.
    tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    values = []
    for received in gather_ragged(tensor.to(_device())):
        received_text = received.cpu().numpy().tobytes()
        values.append(json.loads(received_text))
    return values


def broadcast_int(value: int) -> int:
    """Returns the `value` of rank 0 on every rank; collective.

    Args:
        value: a 64-bit integer; the values of other ranks do not matter.
    """
    if num_ranks() == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=_device())
    dist.broadcast(tensor, src=0)
    return int(tensor)


def broadcast(tensor: Tensor) -> Tensor:
    """Overwrites a tensor with that of rank 0 and returns it; collective."""
    if num_ranks() > 1:
        exchanged = tensor.to(_device())
        dist.broadcast(exchanged, src=0)
        tensor.copy_(exchanged)
    return tensor


class Channel:
    """Runs exchanges in the background, independently of the other functions of this module.

    All ranks must start the exchanges of a channel in the same order. Collective.
    """

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        # With the time limit of the other exchanges, so that a rank that hangs is noticed as soon.
        options = dist.group.WORLD._get_backend(_device()).options
        # The simulated ranks of a plan have no options.
        self.group = dist.new_group(timeout=options._timeout if options else None)
        _channels.add(self)

    def start_sum(self, tensor: Tensor) -> dist.Work:
        """Starts to sum a tensor over ranks in place; `wait()` of the result waits for the end."""
        return cast(dist.Work, dist.all_reduce(tensor, group=self.group, async_op=True))


class _GatherRows(torch.autograd.Function):
    """See `gather_rows`. The shares follow from the total, so no counts are exchanged."""

    @staticmethod
    def forward(ctx: Any, rows_BD: Tensor, total: int) -> Tensor:
        ctx.total = total
        num_rows = _shares(total)
        buffer = _gather_padded(rows_BD, max(num_rows))
        if total == len(buffer):
            return buffer  # nothing is padded
        return torch.cat(_without_padding(buffer, num_rows))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_GD,) = grads
        num_rows = _shares(ctx.total)
        width = max(num_rows)
        # Reduce-scatter cuts into equal pieces, so each rank's gradient is padded to one height.
        pieces = [_padded(piece_BD, width) for piece_BD in grad_GD.split(num_rows)]
        own = grad_GD.new_empty((width, grad_GD.shape[1]))
        _reduce_scatter(own, torch.cat(pieces))
        own_rows = num_rows[rank()]
        return own[:own_rows], None


class _GatherParts(torch.autograd.Function):
    """See `gather_parts`. The counts of rows are exchanged first, because no rank knows them."""

    @staticmethod
    def forward(ctx: Any, rows_UD: Tensor) -> Tensor:
        parts = gather_ragged(rows_UD)
        # The rows of lower ranks stand before this rank's rows.
        start = sum(len(part) for part in parts[: rank()])
        ctx.own = slice(start, start + len(rows_UD))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        # The sum is in place, and autograd may hand this gradient to other functions too.
        grad_PD = grads[0].clone(memory_format=torch.contiguous_format)
        sum_over_ranks(grad_PD)
        return grad_PD[ctx.own]


def _shares(total: int) -> list[int]:
    """Returns the number of positions of each rank."""
    sizes = []
    for other_rank in range(num_ranks()):
        start, stop = share(total, other_rank, num_ranks())
        sizes.append(stop - start)
    return sizes


def _row_counts(tensor: Tensor) -> list[int]:
    """Returns the number of rows of each rank's tensor; needs one exchange of its own."""
    if num_ranks() == 1:
        return [len(tensor)]
    # Filled on the device: a copy from the host would be one more wait.
    count = torch.full((1,), len(tensor), dtype=torch.int64, device=tensor.device)
    return _all_gather(count).tolist()


def _gather_padded(tensor: Tensor, width: int) -> Tensor:
    """Gathers all ranks' rows into one buffer, `width` of each rank."""
    if num_ranks() == 1:
        return tensor
    return _all_gather(_padded(tensor, width))


def _without_padding(buffer: Tensor, num_rows: list[int]) -> list[Tensor]:
    """Returns each rank's rows in a buffer of `_gather_padded`, as views without a copy."""
    width = max(num_rows)
    parts = []
    for source_rank, count in enumerate(num_rows):
        first = source_rank * width
        parts.append(buffer[first : first + count])
    return parts


def _padded(rows: Tensor, width: int) -> Tensor:
    """Appends rows of zeros up to `width` rows; contiguous, as collectives demand."""
    missing = width - len(rows)
    if not missing:
        return rows.contiguous()
    zeros = rows.new_zeros((missing, *rows.shape[1:]))
    return torch.cat([rows, zeros])


def _device() -> torch.device:
    """Returns where tensors must be to be exchanged: NCCL moves GPU memory only."""
    return torch.device("cuda" if on_gpu() else "cpu")


# torch renames these collectives; older versions know the longer names only.
def _all_gather(own: Tensor) -> Tensor:
    """Returns the rows of all ranks, which have equally many each, in rank order."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    num_rows = num_ranks() * len(own)
    full = own.new_empty((num_rows, *own.shape[1:]))
    gather(full, own)
    return full


def _reduce_scatter(own: Tensor, full: Tensor) -> None:
    """Sums `full` over ranks, and writes this rank's piece of it into `own`."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(own, full)
