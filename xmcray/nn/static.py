"""The static encoder: a bag of embeddings of tokens and of pairs of them, and a residual layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from xmcray.nn.encoder import SETTINGS, WEIGHTS, Encoder
from xmcray.nn.module_files import load_settings, reading, save_settings, save_weights
from xmcray.nn.row_table import sum_by_row
from xmcray.parallel.transfers import to_device
from xmcray.types import Int64Array, Ragged, offsets_of, to_torch

# Tokens over which the extra weight of a text's first tokens falls by a factor e.
_DECAY_TOKENS = 10.0


class StaticEncoder(Encoder):
    """Bag of token embeddings: x = sum_t w_t e_t / sqrt(sum_t w_t^2), then x + W2 gelu(W1 x).

    The bag is normalised by the length of its weight vector, as in TF-IDF. With independent rows of
    length 1 the output then has length about 1 whatever the number of tokens; a mean would shrink
    with it. W2 starts at zero, so training starts from the bag itself. The weights w are fixed; an
    embedding row learns its importance as its length.

    Args:
        weight_V: float [V], the weight of each token.
        dim: D.
        residual: add the two-layer network.
        position_decay: extra weight of the first tokens of a text.
        bigram_buckets: rows for pairs of neighbouring tokens, after the rows of the tokens. A pair
            has the mean weight of its tokens.
        separate_labels: label texts have rows of their own, after those of queries. Both start
            equal, and the network is shared.
    """

    weight: Tensor

    def __init__(
        self,
        weight_V: Tensor,
        dim: int,
        residual: bool = True,
        position_decay: float = 0.0,
        bigram_buckets: int = 0,
        separate_labels: bool = False,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.position_decay = position_decay
        self.bigram_buckets = bigram_buckets
        self.separate_labels = separate_labels
        # Rows of one side: its tokens and, after them, its pairs.
        self.side_rows = len(weight_V) + bigram_buckets
        num_sides = 2 if separate_labels else 1
        self.embedding = nn.Embedding(num_sides * self.side_rows, dim)
        self.register_buffer("weight", weight_V.to(torch.get_default_dtype()))
        self.hidden = nn.Linear(dim, dim) if residual else None
        self.out = nn.Linear(dim, dim) if residual else None

    def reset(self, seed: int) -> None:
        """Draws the initial parameters from `seed` alone."""
        generator = torch.Generator().manual_seed(seed)
        query_rows = self.embedding.weight.data[: self.side_rows]
        nn.init.normal_(query_rows, std=self.dim**-0.5, generator=generator)
        self._copy_to_labels()
        if self.hidden is not None and self.out is not None:
            nn.init.xavier_uniform_(self.hidden.weight, generator=generator)
            nn.init.zeros_(self.hidden.bias)
            # The residual adds nothing at first, so training starts from the bag itself.
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def start_from(self, table_VD: Tensor, share: float) -> None:
        """Mixes a table into the random rows of tokens; both sides start equal.

        What the table means and what tells a token from all others are independent directions, so
        shares are of squared lengths. Rows of pairs keep their random share: none at a share of 1,
        where they would only disturb rows that already mean something.

        Args:
            table_VD: Rows of mean length 1.
            share: Of the table in a row's squared length.
        """
        query_rows = self.embedding.weight.data[: self.side_rows]
        query_rows *= (1 - share) ** 0.5
        query_rows[: len(table_VD)] += share**0.5 * table_VD
        self._copy_to_labels()

    def _copy_to_labels(self) -> None:
        table = self.embedding.weight.data
        table[self.side_rows :] = table[: len(table) - self.side_rows]

    @property
    def num_tokens(self) -> int:
        """V, without the rows of pairs."""
        return len(self.weight)

    def as_labels(self, tokens: Ragged) -> Ragged:
        """Ids of the label side follow those of the query side, if labels have rows of their own."""
        if not self.separate_labels:
            return tokens
        return Ragged(tokens.values + self.side_rows, tokens.offsets)

    def sparse_parameters(self) -> list[str]:
        """The embedding table: its gradient is a sparse tensor of the rows that the batch read."""
        return ["embedding.weight"]

    def forward(self, tokens: Ragged) -> Tensor:
        """query_BD; a text without tokens is the zero vector and what the residual adds."""
        table_VD = self.embedding.weight
        device = table_VD.device
        # Without rows of pairs, these two are empty.
        rows, first, second = self._rows(tokens)
        arrays = (
            rows.values,
            rows.offsets[:-1],
            rows.row_ids,
            tokens.values % self.side_rows,
            tokens.places,
            first,
            second,
        )
        # All that the encoder needs of a batch travels to the device in one copy.
        row_T, start_B, text_T, token_T, place_T, first_R, second_R = to_device(
            [to_torch(array) for array in arrays], device
        )
        weight_T = self._weights(token_T, place_T, first_R, second_R)
        sum_BD = cast(Tensor, _WeightedBag.apply(table_VD, row_T, start_B, text_T, weight_T))
        # The length of the weight vector of each text, squared.
        square_B1 = _bag_sums(weight_T.square(), start_B)
        # A text without tokens has length 0; the bound keeps its zero vector finite.
        scale_B1 = square_B1.clamp_min(1e-12).rsqrt()
        query_BD = sum_BD * scale_B1
        if self.hidden is None or self.out is None:
            return query_BD
        hidden_BD = F.gelu(self.hidden(query_BD))
        return query_BD + cast(Tensor, self.out(hidden_BD))

    def _rows(self, tokens: Ragged) -> tuple[Ragged, Int64Array, Int64Array]:
        """Table rows of each text, and what `_with_pairs` says of them if there are pairs."""
        if self.bigram_buckets:
            return self._with_pairs(tokens)
        nothing = np.empty(0, np.int64)
        return tokens, nothing, nothing

    def _weights(
        self,
        token_T: Tensor,
        place_T: Tensor,
        first_R: Tensor,
        second_R: Tensor,
    ) -> Tensor:
        """The weight of each table row of each text.

        Args:
            token_T: int64, tokens of all texts, as rows of the query side.
            place_T: int64, the place of each in its text.
            first_R: int64, positions in `token_T` of the left token of each row with pairs.
            second_R: int64, those of the right token.
        """
        # Weights are looked up per token, so a pair needs no weight of its own. A token has one
        # weight on both sides.
        weight_T = self.weight[token_T]
        if self.position_decay:
            decay_T = torch.exp(place_T.to(weight_T.dtype) / -_DECAY_TOKENS)
            weight_T = weight_T * (1 + self.position_decay * decay_T)
        if not self.bigram_buckets:
            return weight_T
        # A token's own row has twice the same place, so its mean is its weight.
        return (weight_T[first_R] + weight_T[second_R]) / 2

    def _with_pairs(self, tokens: Ragged) -> tuple[Ragged, Int64Array, Int64Array]:
        """Table rows of tokens and pairs, and the places in `tokens` of each row's two tokens.

        The row of a pair follows that of its left token. A token's own row has its place twice.
        """
        places = np.arange(len(tokens.values))
        has_next = np.ones(len(places), dtype=bool)
        # The last token of each text has none; an empty text has no last token.
        ends = tokens.offsets[1:][tokens.lengths > 0]
        has_next[ends - 1] = False
        # Each place once for the token and, if it has a right neighbour, once for the pair.
        rows_of_place = 1 + has_next
        first = np.repeat(places, rows_of_place)
        # The second of two equal places is the pair.
        pairs = np.flatnonzero(np.diff(first, prepend=-1) == 0)
        second = first.copy()
        second[pairs] += 1
        row_ids = tokens.values[first]
        # A pair has the same bucket on both sides, and a row on the side of its tokens.
        side, left = np.divmod(row_ids[pairs], self.side_rows)
        right = tokens.values[second[pairs]] % self.side_rows
        bucket = _hash(left, right) % self.bigram_buckets
        # Rows of pairs follow those of a side's tokens.
        row_ids[pairs] = side * self.side_rows + len(self.weight) + bucket
        # The first row of each place, read where the texts begin.
        offsets = offsets_of(rows_of_place)[tokens.offsets]
        return Ragged(row_ids, offsets), first, second

    def save(self, folder: Path) -> None:
        """Writes model.safetensors and static.json."""
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(folder / WEIGHTS, self.state_dict())
        settings = {
            "dim": self.dim,
            "vocab_size": len(self.weight),
            "residual": self.out is not None,
            "position_decay": self.position_decay,
            "bigram_buckets": self.bigram_buckets,
            "separate_labels": self.separate_labels,
        }
        save_settings(folder / SETTINGS, settings)

    @classmethod
    def load(cls, folder: Path) -> StaticEncoder:
        """The encoder that `save` wrote, ready to encode.

        Raises:
            BundleError: a file is missing or damaged.
        """
        with reading("encoder", folder):
            settings = load_settings(folder / SETTINGS)
            state = load_file(folder / WEIGHTS)
            encoder = cls(
                state["weight"],
                dim=int(settings["dim"]),
                residual=bool(settings["residual"]),
                # Bundles made before the settings were renamed have their former names.
                position_decay=float(settings.get("position_decay", settings.get("lead", 0))),
                bigram_buckets=int(settings.get("bigram_buckets", settings.get("pairs", 0))),
                separate_labels=bool(settings.get("separate_labels", False)),
            )
            encoder.to(state["weight"].dtype).load_state_dict(state)
            return encoder.eval()


class _WeightedBag(torch.autograd.Function):
    """F.embedding_bag with weights, whose gradient holds only the rows that were read.

    PyTorch's own gradient would fill a tensor of the whole table with zeros in each step.
    """

    @staticmethod
    def forward(
        ctx: Any,
        table_VD: Tensor,
        row_T: Tensor,
        start_B: Tensor,
        text_T: Tensor,
        weight_T: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(row_T, text_T, weight_T)
        ctx.shape = table_VD.shape
        return F.embedding_bag(row_T, table_VD, start_B, mode="sum", per_sample_weights=weight_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        row_T, text_T, weight_T = ctx.saved_tensors
        ids_U, sum_UD = sum_by_row(row_T, text_T, grads[0], weight_T)
        # The ids are distinct and sorted, which `is_coalesced` promises without a check.
        grad_VD = torch.sparse_coo_tensor(
            ids_U[None],
            sum_UD,
            ctx.shape,
            is_coalesced=True,
            check_invariants=False,
        )
        return grad_VD, None, None, None, None


def _hash(left: Int64Array, right: Int64Array) -> Int64Array:
    """int64, non-negative; multiplicative hashing, of which only the high bits are well mixed."""
    # Two odd 32-bit multipliers (Knuth's and one of xxHash): the order of a pair matters.
    mixed = left * 2_654_435_761 + right * 2_246_822_519
    # The lower 48 bits, so that an overflow of int64 leaves no sign behind.
    return (mixed & 0xFFFFFFFFFFFF) >> 12


def _bag_sums(value_T: Tensor, start_B: Tensor) -> Tensor:
    """[B, 1], sums of the values of each text; a bag of numbers is a bag of vectors of width 1."""
    at_T = torch.arange(len(value_T), device=value_T.device)
    return F.embedding_bag(at_T, value_T[:, None], start_B, mode="sum")
