"""Modules on disk: weights as safetensors, settings as JSON, never pickle."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from xmcray.errors import BundleError, one_line

_READ_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
    SafetensorError,
)


def save_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors, such as the state of a module, as safetensors."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(state, path)


def save_settings(path: Path, settings: object) -> None:
    """Writes settings as JSON."""
    path.write_text(json.dumps(settings, indent=1), encoding="utf-8")


def load_settings(path: Path) -> dict[str, Any]:
    """Reads what `save_settings` wrote."""
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return settings


@contextlib.contextmanager
def reading(what: str, folder: Path) -> Iterator[None]:
    """Turns the errors of a missing or damaged file into a BundleError that names the folder."""
    try:
        yield
    except _READ_ERRORS as error:
        raise BundleError(
            f"{what} in {folder} cannot be read ({one_line(error)}); export it again"
        ) from None
