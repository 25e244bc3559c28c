"""Copies tensors from the host to the device without making the host wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Moves host tensors to a device, with one copy for all tensors of a type.

    Args:
        tensors: Tensors on the host, of any shapes.
        device: The device of the results.

    Returns:
        The tensors on the device, in the same order. On a CPU these are the given tensors.
    """
    if device.type == "cpu":
        return list(tensors)
    places_by_type: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        places_by_type[tensor.dtype].append(place)
    results = list(tensors)
    for places in places_by_type.values():
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        # The host waits for a copy from pageable memory. It does not for one from pinned memory,
        # which the allocator does not hand out again before the copy is done.
        if device.type == "cuda":
            flat = flat.pin_memory()
        flat = flat.to(device, non_blocking=True)
        sizes = [tensors[place].numel() for place in places]
        for place, piece in zip(places, flat.split(sizes), strict=True):
            results[place] = piece.view(tensors[place].shape)
    return results
