"""Folders of sentence-transformers: what follows a transformer in them, and the prompts.

modules.json lists the parts of an encoder: the transformer, a pooling, perhaps a dense layer and a
normalisation. Each part but the transformer has a folder of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from xmcray.errors import BundleError, ConfigError
from xmcray.nn.encoder import WEIGHTS
from xmcray.nn.module_files import save_settings, save_weights
from xmcray.storage.whole_files import read_json

# Prompts and similarity; data/tokens.py reads the prompts too.
SENTENCE_SETTINGS = "config_sentence_transformers.json"
TRANSFORMER_SETTINGS = "sentence_bert_config.json"
# How sentence-transformers names the ways of pooling.
POOLINGS = {
    "mean": "mean",
    "cls": "cls",
    "last_token": "lasttoken",
    "weighted_mean": "weightedmean",
}
# How sentence-transformers 6 names the parts of a folder.
MODULES = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.sentence_transformer.modules.normalize.Normalize",
}
_TRANSFORMER_SETTINGS = {
    "transformer_task": "feature-extraction",
    "modality_config": {
        "text": {"method": "forward", "method_output_name": "last_hidden_state"},
    },
    "module_output_name": "token_embeddings",
}

# Settings of a part, and the path of its folder.
Part = dict[str, Any]


def write_parts(
    folder: Path,
    hidden: int,
    pooling: str,
    projection: nn.Linear | None,
    normalize: bool,
) -> None:
    """Writes the list of parts, and all parts but the transformer's own files.

    Args:
        folder: of the encoder.
        hidden: H, width of the transformer's states.
        pooling: a key of `POOLINGS`.
        projection: the bias-free dense layer, or None.
        normalize: whether vectors are divided by their lengths.
    """
    save_settings(folder / TRANSFORMER_SETTINGS, _TRANSFORMER_SETTINGS)
    # The transformer lies in the folder itself, the other parts in folders by number and kind.
    modules = [_module(0, "Transformer", "")]

    def add_part(kind: str, settings: dict[str, Any]) -> Path:
        number = len(modules)
        name = f"{number}_{kind}"
        modules.append(_module(number, kind, name))
        part_folder = folder / name
        part_folder.mkdir(exist_ok=True)
        save_settings(part_folder / "config.json", settings)
        return part_folder

    pooling_settings = {
        "embedding_dimension": hidden,
        "pooling_mode": POOLINGS[pooling],
        "include_prompt": True,
    }
    add_part("Pooling", pooling_settings)
    if projection is not None:
        dense_settings = {
            "in_features": hidden,
            "out_features": projection.out_features,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        dense_folder = add_part("Dense", dense_settings)
        save_weights(dense_folder / WEIGHTS, {"linear.weight": projection.weight})
    if normalize:
        add_part("Normalize", {})
    save_settings(folder / "modules.json", modules)


def _module(number: int, kind: str, path: str) -> dict[str, Any]:
    """An entry of modules.json."""
    return {"idx": number, "name": str(number), "path": path, "type": MODULES[kind]}


def read_parts(folder: Path, error_type: type[ConfigError | BundleError]) -> dict[str, Part]:
    """The parts of a folder by kind; without a list of parts, a pooling by the mean.

    Releases before 6 had another form of the pooling's settings, which is translated.

    Raises:
        error_type: there is a part that this package does not have, or two of one kind.
        ValueError: the list is malformed.
    """
    parts: dict[str, Part] = {"Pooling": {"pooling_mode": "mean"}}
    modules_file = folder / "modules.json"
    if not modules_file.is_file():
        return parts
    found: set[str] = set()
    for type_name, path in _read_modules(modules_file):
        # The class alone: its module has moved between releases.
        kind = type_name.rsplit(".", 1)[-1]
        part = _read_part(folder / path, kind)
        if not _is_supported(kind, part):
            raise error_type(
                f"encoder in {folder} has a part {kind} {part.get('pooling_mode', '')} that is not supported;"
                f" expected pooling by {', '.join(POOLINGS.values())} with the prompt's tokens, and at most a"
                " bias-free dense layer without activation and a normalisation"
            )
        if kind in found:
            raise error_type(
                f"encoder in {folder} has two parts {kind}, expected one of each kind; use another model"
            )
        found.add(kind)
        parts[kind] = {**part, "path": path}
    return parts


def _read_modules(path: Path) -> list[tuple[str, str]]:
    """The type and the path of each part."""
    modules = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(modules, list):
        raise ValueError(f"{path.name} holds no list")
    types_and_paths = []
    for module in modules:
        fields = module if isinstance(module, dict) else {}
        type_name = fields.get("type")
        part_path = fields.get("path")
        if not isinstance(type_name, str) or not isinstance(part_path, str):
            raise ValueError(f"{path.name} has a part without the texts type and path")
        types_and_paths.append((type_name, part_path))
    return types_and_paths


def _read_part(folder: Path, kind: str) -> Part:
    """Settings of a part; the transformer's config.json is that of the model, and is not read."""
    part: Part = {}
    settings_file = folder / "config.json"
    if kind != "Transformer" and settings_file.is_file():
        part = read_json(settings_file)
    if kind == "Pooling" and not part.get("pooling_mode"):
        part["pooling_mode"] = _old_pooling_mode(part)
    return part


def _old_pooling_mode(settings: Mapping[str, Any]) -> str:
    """The pooling of older folders, which have a switch per mode; several may be on."""
    modes = []
    for key, is_on in settings.items():
        prefix, _, mode = key.partition("pooling_mode_")
        if mode and not prefix and is_on:
            modes.append(mode.removesuffix("_tokens").removesuffix("_token"))
    return "+".join(modes)


def _is_supported(kind: str, part: Part) -> bool:
    if kind == "Pooling":
        # Without `include_prompt`, the tokens of the prompt would be left out of the mean.
        reads_prompt: bool = part.get("include_prompt", True)
        return reads_prompt and part["pooling_mode"] in POOLINGS.values()
    if kind == "Dense":
        activation = str(part.get("activation_function", ""))
        has_bias = part.get("bias", True)
        return activation.endswith("Identity") and not has_bias
    return kind in MODULES


def pooling_of(parts: Mapping[str, Part]) -> str:
    """The way of pooling, a key of `POOLINGS`."""
    mode = parts["Pooling"]["pooling_mode"]
    by_mode = {name: pooling for pooling, name in POOLINGS.items()}
    return by_mode[mode]


def read_projection(folder: Path, parts: Mapping[str, Part], hidden: int) -> nn.Linear | None:
    """The dense layer, or None if the folder has none.

    Args:
        folder: of the encoder.
        parts: as `read_parts` returns them.
        hidden: H, width of the transformer's states.

    Raises:
        ValueError: it has another width.
    """
    if "Dense" not in parts:
        return None
    state = load_file(folder / parts["Dense"]["path"] / WEIGHTS)
    weight_DH = state["linear.weight"]
    dim, width = weight_DH.shape
    if width != hidden:
        raise ValueError(f"its dense layer takes {width} columns, its transformer has {hidden}")
    projection = nn.Linear(hidden, dim, bias=False)
    projection.load_state_dict({"weight": weight_DH})
    return projection


def lower_cases(folder: Path) -> bool:
    """Whether sentence-transformers lower-cases texts before the folder's tokenizer reads them."""
    path = folder / TRANSFORMER_SETTINGS
    return path.is_file() and bool(read_json(path).get("do_lower_case"))


def write_sentence_settings(
    folder: Path, prompts: Mapping[str, str], similarity: str | None
) -> None:
    """Writes the prompts and by which similarity vectors are compared, if there is either."""
    settings: dict[str, Any] = {}
    if any(prompts.values()):
        settings["prompts"] = dict(prompts)
    if similarity is not None:
        settings["similarity_fn_name"] = similarity
    if settings:
        settings["model_type"] = "SentenceTransformer"
        save_settings(folder / SENTENCE_SETTINGS, settings)


def read_sentence_settings(folder: Path) -> dict[str, Any]:
    """What `write_sentence_settings` wrote, or nothing.

    Raises:
        ValueError: the prompts are something else than texts by name.
    """
    path = folder / SENTENCE_SETTINGS
    if not path.is_file():
        return {}
    settings = read_json(path)
    prompts = settings.get("prompts") or {}
    is_object = isinstance(prompts, dict)
    if not is_object or not all(isinstance(prompt or "", str) for prompt in prompts.values()):
        raise ValueError(f"prompts in {path.name} are no texts by name")
    return settings
