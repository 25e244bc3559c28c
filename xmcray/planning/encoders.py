"""The shape of an encoder, known without its weights: parameters, widths, what a token costs.

A static encoder's shape follows from its settings. A transformer's is read from its folder, the hub's cache, or a list
of the encoders that the shipped presets name: planning needs no network.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmcray.errors import ConfigError
from xmcray.nn.encoder import EncoderConfig, start_folder

_DISTILBERT = {
    "model_type": "distilbert",
    "dim": 768,
    "n_layers": 6,
    "hidden_dim": 3072,
    "n_heads": 12,
}
_DISTILBERT |= {"vocab_size": 30522, "max_position_embeddings": 512}
_BERT = {
    "model_type": "bert",
    "type_vocab_size": 2,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
_BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
}
_MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "intermediate_size": 1536,
    "num_attention_heads": 12,
}
KNOWN: dict[str, dict[str, Any]] = {  # config.json of encoders that papers and presets name
    "distilbert-base-uncased": _DISTILBERT,
    "sentence-transformers/msmarco-distilbert-base-v4": _DISTILBERT,
    "bert-base-uncased": _BERT | _BASE,
    "sentence-transformers/all-MiniLM-L6-v2": _BERT | _MINILM,
}
_NAMES = {  # the same sizes have other names in other families
    "hidden": ("hidden_size", "dim", "d_model"),
    "layers": ("num_hidden_layers", "n_layers", "num_layers"),
    "feed_forward": ("intermediate_size", "hidden_dim", "d_ff"),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings",),
}


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """What planning knows of an encoder.

    Attributes:
        name: as in the settings. dim: D, width of its vectors.
        table_rows: rows of a static encoder's sparse token table, pairs included; 0 for a transformer.
        dense: elements of all other trained parameters. frozen: elements of parameters that are not trained.
        buffer: elements of a static encoder's token weights.
        hidden, layers, feed_forward: of a transformer; 0 for a static encoder. words: elements of its largest
            parameter, the table of word embeddings.
    """

    name: str
    dim: int
    table_rows: int = 0
    dense: int = 0
    frozen: int = 0
    buffer: int = 0
    hidden: int = 0
    layers: int = 0
    feed_forward: int = 0
    words: int = 0

    @property
    def is_static(self) -> bool:
        """Whether it is a bag of tokens."""
        return self.table_rows > 0

    @property
    def key(self) -> str:
        """Names what its speed depends on, in a file of measured rates."""
        return f"{self.name}:{self.dim}:{self.table_rows}:{self.hidden}:{self.layers}:{int(self.dense > 0)}"

    @property
    def tensors(self) -> int:
        """Dense parameters: weights and biases of two maps, or of six and two normalisations in each layer."""
        if not self.dense:
            return 0
        return 4 if self.is_static else 16 * self.layers + 5

    @property
    def flop_per_token(self) -> float:
        """Of a forward pass through a transformer's layers: two for each weight that a token meets."""
        return 2.0 * self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.feed_forward)


def encoder_shape(config: EncoderConfig, vocab_size: int) -> EncoderShape:
    """The shape of the encoder that `config` asks for.

    Args:
        vocab_size: of the corpus' tokenizer; a transformer has its own.
    Raises:
        ConfigError: a transformer that is neither a folder, nor cached, nor known.
    """
    if config.name == "static":
        return EncoderShape(
            name="static",
            dim=config.dim,
            table_rows=vocab_size + config.bigram_buckets,
            dense=2 * (config.dim**2 + config.dim) if config.residual else 0,
            buffer=vocab_size,
        )
    settings = transformer_settings(config.name)
    hidden, layers, feed_forward, vocab, positions = (
        _size(config.name, settings, names) for names in _NAMES.values()
    )
    # Embeddings with their normalisation; each layer has four square maps, two to and from the feed-forward width,
    # their biases and two normalisations (BERT and its relatives).
    embeddings = (vocab + positions + int(settings.get("type_vocab_size", 0)) + 2) * hidden
    if settings.get("model_type") == "distilbert":
        embeddings = (vocab + positions + 2) * hidden
    layer = (
        4 * (hidden + 1) * hidden + 2 * hidden * feed_forward + feed_forward + hidden + 4 * hidden
    )
    transformer = embeddings + layers * layer
    dim = config.dim or hidden
    projection = hidden * dim if dim != hidden or (config.frozen and config.dim) else 0
    return EncoderShape(
        name=config.name,
        dim=dim,
        dense=projection + (0 if config.frozen else transformer),
        frozen=transformer if config.frozen else 0,
        hidden=hidden,
        layers=layers,
        feed_forward=feed_forward,
        words=vocab * hidden,
    )


def transformer_settings(name: str) -> dict[str, Any]:
    """config.json of a transformer."""
    folder = start_folder(name)
    path: Path | None = folder / "config.json" if folder.is_dir() else None
    if path is None and name not in KNOWN:
        import huggingface_hub

        try:
            cached = huggingface_hub.try_to_load_from_cache(name, "config.json")
        except ValueError:  # no name that the hub could have
            cached = None
        path = Path(cached) if isinstance(cached, str) else None
    if path is None or not path.is_file():
        if name in KNOWN:
            return KNOWN[name]
        raise ConfigError(
            f"encoder.name is {name!r}, which is neither a transformer's folder nor in the hub's cache; download it"
            f" first, or plan with one of the same size: {', '.join(KNOWN)}"
        )
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return settings


def _size(name: str, settings: dict[str, Any], names: tuple[str, ...]) -> int:
    for known in names:
        if isinstance(settings.get(known), int):
            return int(settings[known])
    raise ConfigError(
        f"the config.json of encoder {name!r} has none of {', '.join(names)}; plan with another encoder"
    )
