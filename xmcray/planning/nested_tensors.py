"""The tensors among the nested arguments and results of torch's operations.

torch's own functions for nested values (`torch.utils._pytree`) are several times slower, and a step
has 50,000 calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among nested arguments or results, in their order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    found = []
    for value in values:
        found += tensors_in(value)
    return found


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Nested arguments or results with `function` of each tensor in its place."""
    if isinstance(values, Tensor):
        return function(values)
    if type(values) in (list, tuple):
        return type(values)(map_tensors(function, value) for value in values)
    if type(values) is dict:
        return {name: map_tensors(function, value) for name, value in values.items()}
    return values
