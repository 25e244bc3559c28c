"""The static encoder: a bag of token embeddings, of pairs of neighbouring tokens too, and a residual layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from xmcray.errors import BundleError
from xmcray.nn.encoder import SETTINGS, WEIGHTS, Encoder
from xmcray.nn.row_table import sum_by_row
from xmcray.types import Int64Array, Ragged, to_torch

_LEAD_TOKENS = (
    10.0  # positions over which the extra weight of a text's first tokens falls by a factor e
)


class StaticEncoder(Encoder):
    """Bag of token embeddings: x = sum_t w_t e_t / sqrt(sum_t w_t^2), then x + W2 gelu(W1 x).

    The bag is normalised by the length of its weight vector, as in TF-IDF: with independent rows of length 1 the
    output has length about 1 whatever the number of tokens, where a mean would shrink with it. W2 starts at zero, so
    training starts from the bag itself. The weights w are fixed; an embedding row learns its importance as its length.

    Args:
        weight_V: float [V], the weight of each token.
        dim: D.
        residual: add the two-layer network.
        position_decay: extra weight of the first tokens of a text.
        bigram_buckets: rows for pairs of neighbouring tokens, behind the tokens' own; a pair weighs the mean of its tokens.
    """

    weight: Tensor

    def __init__(
        self,
        weight_V: Tensor,
        dim: int,
        residual: bool = True,
        position_decay: float = 0.0,
        bigram_buckets: int = 0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.position_decay = position_decay
        self.bigram_buckets = bigram_buckets
        self.embedding = nn.Embedding(len(weight_V) + bigram_buckets, dim)
        self.register_buffer("weight", weight_V.to(torch.get_default_dtype()))
        self.hidden = nn.Linear(dim, dim) if residual else None
        self.out = nn.Linear(dim, dim) if residual else None

    def reset(self, seed: int) -> None:
        """Draws the initial parameters from `seed` alone."""
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(self.embedding.weight, std=self.dim**-0.5, generator=generator)
        if self.hidden is not None and self.out is not None:
            nn.init.xavier_uniform_(self.hidden.weight, generator=generator)
            for zero in (self.hidden.bias, self.out.weight, self.out.bias):
                nn.init.zeros_(zero)

    @property
    def num_tokens(self) -> int:
        """V, without the rows of pairs."""
        return len(self.weight)

    def sparse_parameters(self) -> list[str]:
        """The embedding table: its gradient is a sparse tensor of the rows that the batch read."""
        return ["embedding.weight"]

    def _rows(self, tokens: Ragged) -> tuple[Ragged, Int64Array, Int64Array]:
        """Table rows of each text, and for each the places in `tokens` of the token and of its right neighbour."""
        first = np.arange(len(tokens.values))
        if not self.bigram_buckets:
            return tokens, first, first
        has_next = np.ones(len(first), dtype=bool)
        has_next[tokens.offsets[1:][tokens.lengths > 0] - 1] = False
        place = np.repeat(first, 1 + has_next)
        second = place.copy()
        is_pair = np.flatnonzero(np.diff(place, prepend=-1) == 0)
        second[is_pair] += 1
        values = tokens.values[place]
        values[is_pair] = (
            len(self.weight)
            + _hash(values[is_pair], tokens.values[second[is_pair]]) % self.bigram_buckets
        )
        offsets = np.concatenate([[0], np.cumsum(1 + has_next)])[tokens.offsets]
        return Ragged(values, offsets), place, second

    def _weighted(self, tokens: Ragged) -> tuple[Ragged, Tensor]:
        rows, first, second = self._rows(tokens)
        weight_T = self.weight[to_torch(tokens.values).to(self.weight.device)]
        if self.position_decay:
            weight_T = weight_T * (
                1 + self.position_decay * torch.exp(_positions(tokens).to(weight_T) / -_LEAD_TOKENS)
            )
        if not self.bigram_buckets:
            return rows, weight_T
        first_R, second_R = (to_torch(places).to(weight_T.device) for places in (first, second))
        return rows, (weight_T[first_R] + weight_T[second_R]) / 2

    def forward(self, tokens: Ragged) -> Tensor:
        """query_BD; a text without tokens is the zero vector plus the residual layer's answer to it."""
        table_VD = self.embedding.weight
        rows, weight_T = self._weighted(tokens)
        row_T = to_torch(rows.values).to(table_VD.device)
        start_B = to_torch(rows.offsets[:-1]).to(table_VD.device)
        text_T = to_torch(rows.row_ids).to(table_VD.device)
        sum_BD = cast(Tensor, _WeightedBag.apply(table_VD, row_T, start_B, text_T, weight_T))
        square_B1 = _bag_sums(weight_T.square(), start_B)
        query_BD = sum_BD * square_B1.clamp_min(1e-12).rsqrt()
        if self.hidden is None or self.out is None:
            return query_BD
        return query_BD + cast(Tensor, self.out(F.gelu(self.hidden(query_BD))))

    def save(self, folder: Path) -> None:
        """Writes model.safetensors and static.json."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()
        }
        save_file(state, folder / WEIGHTS)
        settings = {
            "dim": self.dim,
            "vocab_size": len(self.weight),
            "residual": self.out is not None,
            "position_decay": self.position_decay,
            "bigram_buckets": self.bigram_buckets,
        }
        (folder / SETTINGS).write_text(json.dumps(settings, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> StaticEncoder:
        """The encoder that `save` wrote, ready to encode.

        Raises:
            BundleError: a file is missing or damaged.
        """
        try:
            settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
            state = load_file(folder / WEIGHTS)
            shape = (
                int(settings["dim"]),
                bool(settings["residual"]),
                float(settings["position_decay"]),
                int(settings["bigram_buckets"]),
            )
            encoder = cls(state["weight"], *shape)
            encoder.to(state["weight"].dtype).load_state_dict(state)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            found = " ".join(str(error).split())[:200]
            raise BundleError(
                f"encoder in {folder} cannot be read ({found}); save or export it again"
            ) from None
        return encoder.eval()


class _WeightedBag(torch.autograd.Function):
    """F.embedding_bag with weights, and a gradient that holds the rows read only: no zeros of the table's size."""

    @staticmethod
    def forward(
        ctx: Any, table_VD: Tensor, row_T: Tensor, start_B: Tensor, text_T: Tensor, weight_T: Tensor
    ) -> Tensor:
        ctx.save_for_backward(row_T, text_T, weight_T)
        ctx.shape = table_VD.shape
        return F.embedding_bag(row_T, table_VD, start_B, mode="sum", per_sample_weights=weight_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        row_T, text_T, weight_T = ctx.saved_tensors
        ids_U, sum_UD = sum_by_row(row_T, text_T, grads[0], weight_T)
        grad_VD = torch.sparse_coo_tensor(
            ids_U[None], sum_UD, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return grad_VD, None, None, None, None


def _hash(left: Int64Array, right: Int64Array) -> Int64Array:
    """int64, non-negative; multiplicative hashing, of which the high bits are the good ones."""
    return (left * 2_654_435_761 + right * 2_246_822_519 & 0xFFFFFFFFFFFF) >> 12


def _positions(tokens: Ragged) -> Tensor:
    """int64 [T], place of each token in its text."""
    return to_torch(np.arange(len(tokens.values)) - np.repeat(tokens.offsets[:-1], tokens.lengths))


def _bag_sums(value_T: Tensor, start_B: Tensor) -> Tensor:
    """[B, 1], sums of the values of each text."""
    at_T = torch.arange(len(value_T), device=value_T.device)
    return F.embedding_bag(at_T, value_T[:, None], start_B, mode="sum")
