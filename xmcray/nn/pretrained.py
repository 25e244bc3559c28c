"""Finds and loads pretrained models of the transformers library.

Only safetensors weights are read, and no code of a model's repository is run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from torch import nn

from xmcray.errors import ConfigError

HUB_FILES = [
    "*.json",
    "*.txt",
    "*.model",
    "model*.safetensors",
    "*/config.json",
    "*_Dense/model.safetensors",
]
# Names of dropout rates in the settings of models. Rates of heads, which are not used, have others.
_DROPOUT_RATES = (
    "hidden_dropout_prob",  # BERT and its relatives
    "attention_probs_dropout_prob",
    "dropout",  # DistilBERT, XLNet
    "attention_dropout",
    "activation_dropout",  # Funnel
    "hidden_dropout",  # Bloom, Falcon, GPT-NeoX
    "embedding_dropout",  # ModernBERT
    "mlp_dropout",
    "dropout_rate",  # T5
    "resid_pdrop",  # GPT-2, Phi
    "embd_pdrop",
    "attn_pdrop",
    "emb_pdrop",  # MPT
)


def find(
    name: str, kind: str = "encoder", example: str = "sentence-transformers/all-MiniLM-L6-v2"
) -> Path:
    """The folder of a model: a local one, the hub's cache, or freshly downloaded.

    Args:
        name: folder or hub id.
        kind: of model, for messages.
        example: a hub id of that kind.
    Raises:
        ConfigError: none of the three; without a network within seconds.
    """
    if Path(name).is_dir():
        return Path(name)
    advice = f"give a local folder or a hub id such as {example}"
    try:
        cached = _cached(name)
    except ValueError:
        raise ConfigError(
            f"{kind} {name!r} is neither an existing folder nor a hub id; {advice}"
        ) from None
    if cached is not None:
        return cached
    try:
        return _downloaded(name)
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{kind} {name!r} is not on the hub, or it is private; {advice}"
        ) from None
    except Exception as error:  # the hub's client raises errors of its network library too
        fault = type(error).__name__
        raise ConfigError(
            f"{kind} {name!r} is no folder here, is not in the cache and the hub cannot be reached ({fault}); {advice}"
        ) from None


def _cached(name: str) -> Path | None:
    """The folder of a model in the hub's cache, or None.

    Raises:
        ValueError: no hub id.
    """
    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=HUB_FILES, local_files_only=True
        )
    except OSError:
        return None
    # Other files alone may be there, such as those of the tokenizer.
    has_weights = any(Path(folder).glob("model*.safetensors"))
    return Path(folder) if has_weights else None


def _downloaded(name: str) -> Path:
    """The folder of a model that is fetched from the hub."""
    # One request with a short time limit first: the download itself would retry for minutes
    # without a network.
    huggingface_hub.HfApi().model_info(name, timeout=10)
    return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))


def load_model(folder: Path, dropout: float | None) -> Any:
    """The model in a folder, float32 and without pooler.

    Args:
        folder: as `find` returns it.
        dropout: replaces the model's own rates; None keeps them.

    Raises:
        ValueError: weights are missing, or a model of this type is not supported.
    """
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    set_dropout(config, dropout)
    options: dict[str, Any] = {}
    loader, model_class = loader_and_class(config)
    # An unused pooler would have parameters without a gradient.
    if model_class and "add_pooling_layer" in inspect.signature(model_class).parameters:
        options["add_pooling_layer"] = False
    supports_sdpa = getattr(model_class, "_supports_sdpa", True)
    with quiet():
        model, info = loader.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="sdpa" if supports_sdpa else "eager",
            output_loading_info=True,
            **options,
        )
    _check_complete(info["missing_keys"])
    fill_constants(model)
    return model


def loader_and_class(config: Any) -> tuple[Any, Any]:
    """What loads a model with these settings, and the model's class, which may be None."""
    config_type = type(config)
    # Of the type, because a folder with the encoder alone says that it has no decoder.
    if not getattr(config_type, "is_encoder_decoder", False):
        model_class = transformers.MODEL_MAPPING.get(config_type, None)
        # Funnel has two classes. One gives fewer states than tokens, the other fails at short texts.
        if isinstance(model_class, tuple):
            raise ValueError(
                f"{config.model_type} merges the states of tokens; it is not supported"
            )
        return transformers.AutoModel, model_class
    encoder_class = transformers.MODEL_FOR_TEXT_ENCODING_MAPPING.get(config_type, None)
    if encoder_class is None:
        raise ValueError(
            f"{config.model_type} is an encoder-decoder, of which only T5 and its relatives are supported"
        )
    return transformers.AutoModelForTextEncoding, encoder_class


def _check_complete(missing: Iterable[str]) -> None:
    """Refuses a model of which transformers filled weights with random values."""
    # No vector depends on a pooler, which some models have without the option to leave it out.
    needed = sorted(name for name in missing if "pooler" not in name.split("."))
    if needed:
        raise ValueError(f"{len(needed)} weights are missing, such as {needed[0]}")


def set_dropout(config: Any, dropout: float | None) -> None:
    """Replaces the dropout rates in a model's settings; None keeps them.

    Raises:
        ConfigError: the settings have no rate that could be replaced.
    """
    if dropout is None:
        return
    names = [name for name in _DROPOUT_RATES if hasattr(config, name)]
    for name in names:
        setattr(config, name, dropout)
    if dropout and not names:
        raise ConfigError(
            f"encoder.dropout is {dropout:g}, but a model of type {config.model_type} has no dropout;"
            " leave it out"
        )


def fill_constants(model: nn.Module) -> None:
    """Writes the buffers that no file has: positions 0, 1, 2, ..., token types 0, and rotations.

    transformers leaves them without values in a process where device contexts do not work on
    `torch.tensor`, because it then takes them for initialised.
    """
    for name, buffer in model.named_buffers():
        if name.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer))
        elif name.endswith("token_type_ids"):
            buffer.zero_()
    for module in model.modules():
        if _rotates(module) and hasattr(module, "config"):
            # Its buffers follow from the model's settings alone.
            for name, buffer in type(module)(module.config).named_buffers():
                module.get_buffer(name).copy_(buffer)


def stated_limit(model: nn.Module) -> int | None:
    """Tokens of a text that a model's settings allow; None if it reads longer ones as well.

    Some models read a few tokens less, because rows of their table of positions are for padding,
    and others have relative positions and read more.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if any(_rotates(module) for module in model.modules()):
        return None
    return int(limit) if limit and limit > 0 else None


def _rotates(module: nn.Module) -> bool:
    """Whether a module turns positions into rotations, of which any position has one."""
    return "RotaryEmbedding" in type(module).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides the library's progress bars, which would break our own bar into pieces."""
    logging = transformers.utils.logging
    bar_was_enabled = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar_was_enabled:
            logging.enable_progress_bar()
