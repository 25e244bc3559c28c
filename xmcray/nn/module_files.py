"""Modules on disk: weights as safetensors, settings as JSON, never pickle."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from xmcray.errors import BundleError, readable
from xmcray.storage.whole_files import read_json


def save_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors, such as the state of a module, as safetensors."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(state, path)


def save_settings(path: Path, settings: object) -> None:
    """Writes settings as JSON."""
    path.write_text(json.dumps(settings, indent=1), encoding="utf-8")


def load_settings(path: Path) -> dict[str, Any]:
    """Reads what `save_settings` wrote."""
    return read_json(path)


def reading(what: str, folder: Path) -> contextlib.AbstractContextManager[None]:
    """Turns the errors of a missing or damaged file into a BundleError that names the folder."""
    return readable(f"{what} in {folder} cannot be read", "export it again", BundleError)
