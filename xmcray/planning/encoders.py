"""Encoders without weights: a transformer needs its config.json alone, and no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from torch import Tensor, nn

from xmcray.errors import ConfigError, readable
from xmcray.nn.encoder import SETTINGS, Encoder, EncoderConfig, start_folder, with_mixer
from xmcray.nn.static import StaticEncoder
from xmcray.types import Int64Array, Ragged

# config.json of encoders that papers and presets name, where it is not the default of its type.
_MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
KNOWN: dict[str, dict[str, Any]] = {
    "distilbert-base-uncased": {"model_type": "distilbert"},
    "sentence-transformers/msmarco-distilbert-base-v4": {"model_type": "distilbert"},
    "bert-base-uncased": {"model_type": "bert"},
    "sentence-transformers/all-MiniLM-L6-v2": {"model_type": "bert", **_MINILM},
}


def planned_encoder(
    config: EncoderConfig, vocab_size: int, on_gpu: bool, side_width: int = 0
) -> Encoder:
    """The encoder of a run with parameters on the device "meta"; called inside a `Counter`.

    Args:
        config: Section `encoder`.
        vocab_size: Size of the corpus' tokenizer; a transformer has its own.
        on_gpu: Whether "auto" precision is bfloat16.
        side_width: Width of the corpus' side vectors; 0 if it has none.

    Raises:
        ConfigError: a transformer that is neither a folder, nor cached, nor known; or there are no
            side vectors to mix.
    """
    text = _text_encoder(config, vocab_size, on_gpu)
    if config.side == "ignore":
        return text
    with torch.device("meta"):
        return with_mixer(text, side_width)


def _text_encoder(config: EncoderConfig, vocab_size: int, on_gpu: bool) -> Encoder:
    folder = start_folder(config.name)
    if (folder / SETTINGS).is_file():
        return StaticEncoder.load(folder).to("meta").train()
    with torch.device("meta"):
        if config.name != "static":
            is_half = config.autocast == "bf16" or (config.autocast == "auto" and on_gpu)
            return _transformer(config, folder, is_half)
        return StaticEncoder(
            torch.ones(vocab_size),
            config.dim,
            config.residual,
            config.position_decay,
            config.bigram_buckets,
            config.separate_labels,
        )


def _transformer(config: EncoderConfig, folder: Path, is_half: bool) -> Encoder:
    import transformers  # takes seconds, which plans with the static encoder spare

    from xmcray.nn import packed
    from xmcray.nn.pretrained import loader_and_class, set_dropout
    from xmcray.nn.transformer import TransformerEncoder, prepare_training

    path = _settings_path(config.name, folder)
    settings = KNOWN.get(config.name, {})
    failure = f"encoder.name is {config.name!r}, whose config.json is no transformer's"
    with readable(failure, "save or download the model again", ConfigError):
        if path is not None:
            settings = json.loads(path.read_text(encoding="utf-8"))
        model_config = transformers.AutoConfig.for_model(**settings)
        set_dropout(model_config, config.dropout)
        # Of an encoder-decoder only the encoder is trained.
        loader, _ = loader_and_class(model_config)
        model = loader.from_config(model_config)
        hidden = int(model_config.hidden_size)
    if hasattr(model, "pooler"):
        model.pooler = None
    projection = None
    if config.dim not in (0, hidden) or (config.frozen and config.dim):
        projection = nn.Linear(hidden, config.dim, bias=False)
    encoder = TransformerEncoder(model, None, projection=projection)
    model.set_attn_implementation(packed.NAME)

    def pooled(token_TH: Tensor, lengths: Int64Array) -> Tensor:
        """Casts where autocast would, which does not know the device "meta"."""
        dtype = torch.bfloat16 if is_half else token_TH.dtype
        weights = {name: weight.to(dtype) for name, weight in model.named_parameters()}

        def cast_model(**inputs: Any) -> Any:
            return torch.func.functional_call(model, weights, (), inputs)

        state_TH = packed.run(cast_model, token_TH.to(dtype), lengths, encoder.is_causal)
        return packed.means(state_TH.to(token_TH.dtype), lengths)

    def encoded_texts(tokens: Ragged) -> Tensor:
        """What a frozen encoder has computed of each text before training."""
        return torch.zeros(len(tokens), hidden, device="cpu")

    prepare_training(encoder, config, seed=0)
    encoder.packed = True
    encoder._pooled_packed = pooled  # type: ignore[method-assign]
    if config.frozen:
        encoder.freeze()
        encoder.encoded_texts = encoded_texts  # type: ignore[assignment]
    return encoder.train()


def _settings_path(name: str, folder: Path) -> Path | None:
    """config.json of a transformer, in its folder or in the hub's cache; None if `KNOWN` has it.

    Raises:
        ConfigError: there is none.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        if name in KNOWN:
            return None
        try:
            path = Path(str(huggingface_hub.try_to_load_from_cache(name, "config.json")))
        except ValueError:  # not a name that the hub could have
            path = Path()
    if not path.is_file():
        raise ConfigError(
            f"encoder.name is {name!r}, which is neither a transformer's folder nor in the hub's"
            f" cache; download it first, or plan with one of the same size: {', '.join(KNOWN)}"
        )
    return path
