"""Encoders without weights, for planning: a transformer needs its config.json alone, and no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
        if config.name != "static":
            return _transformer(config, folder, on_gpu)
        return StaticEncoder(
            torch.ones(vocab_size),
            config.dim,
            config.residual,
            config.position_decay,
            config.bigram_buckets,
            config.separate_labels,
        )


def _transformer(config: EncoderConfig, folder: Path, on_gpu: bool) -> Encoder:
    import transformers  # takes seconds, which plans with the static encoder spare

    from xmcray.nn import packed
    from xmcray.nn.transformer import DROPOUT_RATES, TransformerEncoder

    planned_device = torch.device("cuda" if on_gpu else "cpu")
    is_half = config.autocast == "bf16" or (config.autocast == "auto" and on_gpu)

    class PlannedTransformer(TransformerEncoder):
        """Takes micro-batches of the planned device, and casts where autocast would."""

        def call_costs(self, device: torch.device) -> tuple[int, int]:
            return super().call_costs(planned_device)

        def _pooled(self, token_TH: Tensor, lengths: Int64Array) -> Tensor:
            if not is_half:
                return packed.means(packed.run(self.model, token_TH, lengths), lengths)
            # Autocast does not know the device "meta": the weights are cast here.
            cast = {name: weight.bfloat16() for name, weight in self.model.named_parameters()}

            def half_model(**inputs: Any) -> Any:
                return torch.func.functional_call(self.model, cast, (), inputs)

            state_TH = packed.run(half_model, token_TH.bfloat16(), lengths)
            return packed.means(state_TH.float(), lengths)

    settings = dict(_settings(config.name, folder))
    model_config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    for rate in DROPOUT_RATES:
        if config.dropout is not None and hasattr(model_config, rate):
            setattr(model_config, rate, config.dropout)
    model_config._attn_implementation = "sdpa"
    model = transformers.AutoModel.from_config(model_config)
    if hasattr(model, "pooler"):
        model.pooler = None
    hidden = int(model_config.hidden_size)
    dim = config.dim or hidden
    projection = None
    if dim != hidden or (config.frozen and config.dim):
        projection = nn.Linear(hidden, dim, bias=False)
    encoder = PlannedTransformer(model, None, projection=projection)
    encoder.packed = True
    model.set_attn_implementation(packed.NAME)
    if config.frozen:
        encoder.freeze()

        def encoded_texts(tokens: Ragged) -> Tensor:
            """What the encoder has computed of each text before training."""
            return torch.zeros(len(tokens), hidden, device="cpu")

        encoder.encoded_texts = encoded_texts  # type: ignore[assignment]
    return encoder.train()


def _settings(name: str, folder: Path) -> dict[str, Any]:
    """config.json of a transformer: of its folder, of the hub's cache, or one that is listed here."""
    path: Path | None = None
    if folder.is_dir():
        path = folder / "config.json"
    elif name not in KNOWN:
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
