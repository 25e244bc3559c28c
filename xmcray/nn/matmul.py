"""How precisely torch multiplies matrices, and which attention that makes the faster one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# With bfloat16 products, torch's fused attention on a CPU is slower than separate products up to this
# many tokens: eight times with 32 (benchmarks/attention_kernels.py).
_LONGEST_UNFUSED = 128
# Torch's names for the values of `optim.matmul`.
TORCH_PRECISION = {"float32": "highest", "bf16": "medium"}


@contextlib.contextmanager
def matmul_precision(matmul: str) -> Iterator[None]:
    """Multiplies as `optim.matmul` says, then again as before.

    What the process does after a training, such as a search, must not depend on the training.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(TORCH_PRECISION[matmul])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def attention_kernel(device: torch.device, width: int) -> contextlib.AbstractContextManager[None]:
    """Selects the faster attention for texts of `width` tokens, and leaves other devices alone."""
    is_short = device.type == "cpu" and width <= _LONGEST_UNFUSED
    rounds_products = torch.get_float32_matmul_precision() != "highest"
    rounds_states = torch.is_autocast_enabled("cpu")
    if is_short and (rounds_products or rounds_states):
        return sdpa_kernel(SDPBackend.MATH)
    return contextlib.nullcontext()
