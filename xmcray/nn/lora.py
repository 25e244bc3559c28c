"""Low-rank adapters (LoRA, Hu et al., ICLR 2022) in a transformer, by the package peft.

Each adapted linear layer computes W x + (alpha / rank) B A x, and only A and B learn. What is saved
is the merged weight W + (alpha / rank) B A, which any program opens; A and B themselves go into a
file next to it, from which training goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from xmcray.errors import ConfigError, RunError, one_line
from xmcray.nn.encoder import ADAPTERS, EncoderConfig
from xmcray.nn.module_files import save_weights

# peft gives each adapter of a model a name.
_NAME = "default"
# What a merged weight may differ by from the saved one: another processor rounds otherwise.
_TOLERANCE = 1e-4


def add_adapters(model: Any, config: EncoderConfig, seed: int) -> None:
    """Adds adapters to a model, of which nothing else learns from now on.

    Args:
        model: of the transformers library; B starts at zero, so its output stays the same.
        config: rank, alpha and targets.
        seed: of the matrices A.

    Raises:
        ConfigError: peft is not installed, or no layer has the name of a target.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "encoder.lora_rank is set, which needs peft, which is not installed; run"
            " pip install 'xmcray[lora]'"
        ) from None
    targets = list(config.lora_targets) or "all-linear"
    settings = peft.LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=targets
    )
    # peft draws A from torch's own generator, which training uses for dropout.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(settings, model, _NAME)
        except ValueError as error:
            raise ConfigError(
                f"encoder.lora_targets is {targets}, expected names of linear layers of"
                f" {type(model).__name__} ({one_line(error, 120)}); leave it out to adapt all of them"
            ) from None
    model.requires_grad_(False)
    for weight in _factors(model).values():
        weight.requires_grad_()


def merged_state(model: Any) -> dict[str, Tensor]:
    """Weights of the model by the names that they have without adapters."""
    deltas = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            deltas[f"{name}.weight"] = module.get_delta_weight(_NAME)
    merged = {}
    for name, weight in model.state_dict().items():
        if ".lora_" not in name:
            own_name = name.replace(".base_layer.", ".")
            delta = deltas.get(own_name)
            merged[own_name] = weight if delta is None else weight + delta
    return merged


def save_adapters(model: Any, folder: Path) -> None:
    """Writes the factors A and B of all adapters."""
    save_weights(folder / ADAPTERS, _factors(model))


def restore_adapters(model: Any, folder: Path, saved: dict[str, Tensor]) -> None:
    """Reads what `save_adapters` wrote.

    Args:
        model: with adapters of the same rank and targets.
        folder: of the checkpoint.
        saved: merged weights of the checkpoint, by which another base model is recognised.

    Raises:
        RunError: `encoder.name` is another model than the one that the run started with.
        KeyError, ValueError: the file does not fit the adapters.
    """
    factors = _factors(model)
    tensors = load_file(folder / ADAPTERS)
    if tensors.keys() != factors.keys():
        raise ValueError("other layers have adapters")
    with torch.no_grad():
        for name, weight in factors.items():
            weight.copy_(tensors[name])
    for name, weight in merged_state(model).items():
        expected = saved[name].to(weight)
        if not torch.allclose(weight, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise another_model(folder, name)


def another_model(folder: Path, name: str) -> RunError:
    """The error of a run that continues with another model than it started with.

    Args:
        folder: of the checkpoint.
        name: a weight that differs.
    """
    # No ConfigError: in the middle of a checkpoint that would count as a malformed file.
    return RunError(
        f"encoder.name is another model than the one that {folder} was trained from"
        f" ({name} differs); put that one back, or train again with another --out"
    )


def _factors(model: Any) -> dict[str, Tensor]:
    """The matrices A and B of all adapters, by name."""
    return {name: weight for name, weight in model.named_parameters() if ".lora_" in name}
