"""Copies from the host to the device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Moves host tensors to a device, with one copy for all tensors of a type.

    Args:
        tensors: On the host, of any shapes.
        device: Where the results are.

    Returns:
        The same tensors on the device, in the same order. On a CPU they are the tensors themselves.
    """
    if device.type == "cpu":
        return list(tensors)
    moved: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[i].reshape(-1) for i in places])
        # The host waits for a copy from pageable memory. It does not for one from pinned memory,
        # which the allocator does not hand out again before the copy is done.
        if device.type == "cuda":
            flat = flat.pin_memory()
        pieces = flat.to(device, non_blocking=True).split([tensors[i].numel() for i in places])
        for i, piece in zip(places, pieces, strict=True):
            moved[i] = piece.view(tensors[i].shape)
    return [moved[i] for i in range(len(tensors))]
