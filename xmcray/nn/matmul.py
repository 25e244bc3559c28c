"""How precisely torch multiplies float32 matrices: a setting of the whole process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

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
