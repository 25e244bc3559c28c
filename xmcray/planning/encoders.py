"""Encoders without weights, for planning: a transformer needs its config.json alone, and no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from xmcray.errors import ConfigError
from xmcray.nn.encoder import SETTINGS, Encoder, EncoderConfig, start_folder
from xmcray.nn.static import StaticEncoder
from xmcray.types import Int64Array, Ragged

_DISTILBERT = {
    "model_type": "distilbert",
    "dim": 768,
    "n_layers": 6,
    "hidden_dim": 3072,
    "n_heads": 12,
    "vocab_size": 30522,
}
_BERT = {"model_type": "bert", "vocab_size": 30522}
_MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
KNOWN: dict[str, dict[str, Any]] = {  # config.json of encoders that papers and presets name
    "distilbert-base-uncased": _DISTILBERT,
    "sentence-transformers/msmarco-distilbert-base-v4": _DISTILBERT,
    "bert-base-uncased": _BERT,
    "sentence-transformers/all-MiniLM-L6-v2": _BERT | _MINILM,
}


def planned_encoder(config: EncoderConfig, vocab_size: int, on_gpu: bool) -> Encoder:
    """The encoder of a run with parameters on the device "meta"; called inside a `Counter`.

    Args:
        config: section `encoder`.
        vocab_size: of the corpus' tokenizer; a transformer has its own.
        on_gpu: whether "auto" precision is bfloat16.
    Raises:
        ConfigError: a transformer that is neither a folder, nor cached, nor known.
    """
    folder = start_folder(config.name)
    if (folder / SETTINGS).is_file():
        return StaticEncoder.load(folder).to("meta").train()
    with torch.device("meta"):
        if config.name == "static":
            buckets = config.bigram_buckets
            weight_V = torch.ones(vocab_size)
            return StaticEncoder(
                weight_V, config.dim, config.residual, config.position_decay, buckets
            )
        return _transformer(config, folder, on_gpu)


def _transformer(config: EncoderConfig, folder: Path, on_gpu: bool) -> Encoder:
    import transformers  # takes seconds, which plans with the static encoder spare

    from xmcray.nn import packed, transformer

    costs = transformer._costs

    class PlannedTransformer(transformer.TransformerEncoder):
        """Takes micro-batches of the planned device, and casts where autocast would."""

        half = config.autocast == "bf16" or (config.autocast == "auto" and on_gpu)

        def pooled(self, tokens: Ragged) -> Tensor:
            device = torch.device("cuda" if on_gpu else "cpu")
            with mock.patch.object(
                transformer, "_costs", lambda _, training: costs(device, training)
            ):
                return super().pooled(tokens)

        def _pooled(self, token_TH: Tensor, lengths: Int64Array) -> Tensor:
            model = self.model
            if self.half:
                token_TH = token_TH.bfloat16()
                cast = {name: p.bfloat16() for name, p in model.named_parameters()}

                def model(**inputs: Any) -> Any:
                    return torch.func.functional_call(self.model, cast, (), inputs)

            state_TH = packed.run(model, token_TH, lengths).float()
            return packed.means(state_TH, lengths)

    settings = dict(_settings(config.name, folder))
    family = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    for rate in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"):
        if config.dropout is not None and hasattr(family, rate):
            setattr(family, rate, config.dropout)
    family._attn_implementation = "sdpa"
    model = transformers.AutoModel.from_config(family)
    if hasattr(model, "pooler"):
        model.pooler = None
    hidden = int(family.hidden_size)
    dim = config.dim or hidden
    has_projection = dim != hidden or (config.frozen and config.dim)
    projection = nn.Linear(hidden, dim, bias=False) if has_projection else None
    encoder = PlannedTransformer(model, None, projection=projection)
    encoder.packed = True
    model.set_attn_implementation(packed.NAME)
    if config.frozen:
        encoder.freeze()
        encoder.known = lambda tokens: _stored(tokens, hidden)  # type: ignore[assignment]
    return encoder.train()


def _stored(tokens: Ragged, hidden: int) -> Tensor:
    """What a frozen encoder has computed of each text before training."""
    return torch.zeros(len(tokens), hidden, device="cpu")


def _settings(name: str, folder: Path) -> dict[str, Any]:
    """config.json of a transformer: its folder's, the hub's cache's, or one that is listed here."""
    path: Path | None = folder / "config.json" if folder.is_dir() else None
    if path is None and name not in KNOWN:
        import huggingface_hub

        try:
            cached = huggingface_hub.try_to_load_from_cache(name, "config.json")
        except ValueError:  # no name that the hub could have
            cached = None
        path = Path(cached) if isinstance(cached, str) else None
    if path is not None and path.is_file():
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return settings
    if name in KNOWN:
        return KNOWN[name]
    raise ConfigError(
        f"encoder.name is {name!r}, which is neither a transformer's folder nor in the hub's cache;"
        f" download it first, or plan with one of the same size: {', '.join(KNOWN)}"
    )
