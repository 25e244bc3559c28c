"""Turns query texts or tokens into query vectors: tokenizer, encoder, head and normalisation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xmcray.data.tokens import TextTokenizer
from xmcray.errors import BundleError, ConfigError
from xmcray.nn.compact import compacted
from xmcray.nn.encoder import Encoder, load_encoder
from xmcray.nn.heads import Head, load_head
from xmcray.nn.static import StaticEncoder
from xmcray.retrieval.bundle import Settings
from xmcray.types import BoolArray, Float32Array, Ragged, spans

CHUNK = 1024  # queries encoded at once


@dataclass(frozen=True, eq=False)
class QueryEncoder:
    """Makes the vectors that are compared with label vectors.

    Attributes:
        encoder: makes one vector of each text's tokens.
        head: maps the encoder's vector to the vector that is searched.
        tokenizer: makes token ids of texts.
        normalised: whether query vectors get length 1, whatever the head makes.
        normalised_labels: the same of the vectors of label texts.
    """

    encoder: Encoder
    head: Head
    tokenizer: TextTokenizer
    normalised: bool = False
    normalised_labels: bool = False

    @classmethod
    def load(
        cls, bundle: Path, settings: Settings, device: torch.device, precision: str
    ) -> QueryEncoder:
        """Reads the encoder of a verified bundle.

        Args:
            bundle: local folder of the bundle.
            settings: its settings. With a memory or several parts, vectors get length 1.
            device: where texts are encoded.
            precision: "float32", "bfloat16" or "int8", see nn/compact.py.
        Raises:
            BundleError: encoder, head and label vectors do not fit each other.
            ConfigError: the encoder cannot compute with this precision.
        """
        loaded = load_encoder(bundle / "encoder")
        encoder = compacted(loaded.to(device).eval(), precision)
        head = load_head(bundle / "head").to(device)
        if encoder.dim != head.dim or head.out_dim != settings.dim:
            raise BundleError(
                f"{bundle}: encoder of width {encoder.dim}, head from {head.dim} to {head.out_dim},"
                f" label vectors of width {settings.dim}; export again"
            )
        tokenizer = TextTokenizer.load(bundle / "tokenizer")
        num_rows = loaded.num_embeddings
        if num_rows is not None and tokenizer.vocab_size > num_rows:
            raise BundleError(
                f"{bundle}: its tokenizer has {tokenizer.vocab_size} token ids, its encoder {num_rows}"
                " rows; export again"
            )
        return cls(
            encoder,
            head,
            tokenizer,
            normalised=settings.normalises,
            normalised_labels=settings.normalises_labels,
        )

    @property
    def dim(self) -> int:
        """D, the width of query vectors."""
        return self.head.out_dim

    @property
    def is_static(self) -> bool:
        """Whether texts are encoded by a table look-up.

        That takes less time than sending them to another process.
        """
        return isinstance(self.encoder.of_texts, StaticEncoder)

    def encode(
        self, queries: Sequence[str] | Ragged, vectors: Float32Array | None = None
    ) -> Float32Array:
        """Encodes queries in chunks of bounded memory; an empty text is legal.

        Args:
            queries: B texts, or B rows of token ids, which may have side vectors.
            vectors: float32 [B, W], side vectors of the texts, if they have some.
        Returns:
            float32 [B, D].
        """
        chunks = self.encode_chunks(queries, vectors)
        # No queries have no chunk, but a width.
        no_rows = np.empty((0, self.dim), np.float32)
        return np.concatenate([no_rows, *chunks])

    def encode_start(
        self, texts: Sequence[str], max_tokens: int, vectors: Float32Array | None = None
    ) -> tuple[Float32Array, BoolArray]:
        """Encodes texts, of which at most `max_tokens` tokens are read.

        Args:
            texts: B texts.
            max_tokens: tokens that are read of a text.
            vectors: as for `encode`.
        Returns:
            float32 [B, D], and bool [B]: whether only the start of the text was read.
        """
        limit = min(max_tokens, self.tokenizer.max_len)
        tokens = self.tokenizer.encode(texts, limit)
        truncated = tokens.lengths >= limit
        # A text of exactly `limit` tokens is not truncated. One token more shows which those are.
        full_texts = [texts[i] for i in np.flatnonzero(truncated).tolist()]
        if full_texts:
            longer_tokens = self.tokenizer.encode(full_texts, limit + 1)
            truncated[truncated] = longer_tokens.lengths > limit
        return self.encode(tokens.with_vectors(vectors)), truncated

    def encode_labels(self, tokens: Ragged) -> Float32Array:
        """Encodes the texts of labels, as an index has them.

        Args:
            tokens: n rows of token ids.
        Returns:
            float32 [n, D].
        """
        vectors = [np.empty((0, self.dim), np.float32)]
        for span in spans(len(tokens), CHUNK):
            chunk = self.encoder.as_labels(tokens.slice(span.start, span.stop))
            with torch.inference_mode():
                label_BD = self.head.label_vectors(self.encoder(chunk))
            vectors.append(_on_host(label_BD, self.normalised_labels))
        return np.concatenate(vectors)

    def encode_chunks(
        self, queries: Sequence[str] | Ragged, vectors: Float32Array | None = None
    ) -> Iterator[Float32Array]:
        """As `encode`, but yields float32 [at most CHUNK, D] after each chunk."""
        for span in spans(len(queries), CHUNK):
            if isinstance(queries, Ragged):
                tokens = queries.slice(span.start, span.stop)
            else:
                own_vectors = None if vectors is None else vectors[span]
                texts = list(queries[span])
                tokens = self.tokenizer.encode(texts).with_vectors(own_vectors)
            yield self._encode_tokens(tokens)

    def _encode_tokens(self, tokens: Ragged) -> Float32Array:
        with torch.inference_mode():
            query_BD = self.head(self.encoder(tokens))
        return _on_host(query_BD, self.normalised)


def _on_host(vector_BD: Tensor, normalised: bool) -> Float32Array:
    """float32 [B, D], perhaps of length 1."""
    vector_BD = vector_BD.float()
    if normalised:
        vector_BD = F.normalize(vector_BD, dim=-1)
    vectors: Float32Array = vector_BD.cpu().numpy()
    return vectors


def check_side_vectors(vectors: Float32Array | None, num_queries: int, width: int) -> None:
    """Raises ConfigError unless an encoder can use some side vectors.

    Args:
        vectors: float32 [B, W], or None.
        num_queries: B.
        width: W; 0 if the encoder uses none.
    """
    if vectors is None:
        return
    if not width:
        raise ConfigError(
            "this bundle uses no side vectors, expected texts alone; leave out the vectors, or"
            " train with encoder.side=mix"
        )
    expected = (num_queries, width)
    if vectors.shape != expected or not np.isfinite(vectors).all():
        raise ConfigError(
            f"found side vectors {list(vectors.shape)}, expected {list(expected)} finite numbers;"
            " give each text one vector, of zeros if it has none"
        )
