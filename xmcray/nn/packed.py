"""Transformers over texts that lie one after another: no layer computes padding, whatever the lengths.

All layers but attention treat tokens alone, so they run once over the tokens of all texts. Attention runs once for
each length that occurs. The transformers library lets a model's attention be replaced by name; whether a model's
other parts (position embeddings above all) work on such a row is tried when it is loaded, not assumed.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from xmcray.types import Int64Array

NAME = "xmcray_packed"
_TOLERANCE = 1e-4


def run(model: Any, token_TH: Tensor, lengths: Int64Array) -> Tensor:
    """Last hidden states [T, H] of texts given by their input embeddings, one text after another.

    Args:
        lengths: int64 [B] > 0, ascending.
    """
    spans = _spans(lengths)
    position = np.arange(len(token_TH)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    position_T = torch.from_numpy(position).to(token_TH.device)
    output = model(inputs_embeds=token_TH[None], position_ids=position_T[None], packed_spans=spans)
    state_TH: Tensor = output.last_hidden_state[0]
    return state_TH


def means(state_TH: Tensor, lengths: Int64Array) -> Tensor:
    """[B, H], the mean state of each text."""
    sizes, widths = _spans(lengths)
    parts = zip(state_TH.split(sizes), widths, strict=True)
    return torch.cat([part.unflatten(0, (-1, width)).mean(dim=1) for part, width in parts])


def try_on(model: Any) -> bool:
    """Switches a model to packed texts if it answers as it does with padding; leaves it as it was otherwise."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    before, training = model.config._attn_implementation, model.training
    table = model.get_input_embeddings().weight
    lengths = np.array([2, 3, 3])
    token_TH = table[torch.arange(8, device=table.device) % len(table)].detach()
    mask_BT = torch.from_numpy(np.arange(3) < lengths[:, None]).to(table.device)
    padded_BTH = token_TH.new_zeros(3, 3, token_TH.shape[1])
    padded_BTH[mask_BT] = token_TH
    model.eval()
    try:
        with torch.no_grad():
            wanted = model(
                inputs_embeds=padded_BTH, attention_mask=mask_BT.long()
            ).last_hidden_state[mask_BT]
            model.set_attn_implementation(NAME)
            same = bool(
                (run(model, token_TH, lengths) - wanted).abs().max()
                <= _TOLERANCE * wanted.abs().max()
            )
    except (TypeError, ValueError, KeyError, RuntimeError, IndexError, AttributeError):
        same = False  # some part of the model does not know such rows
    finally:
        model.train(training)
    if not same:
        model.set_attn_implementation(before)
    return same


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_spans: tuple[list[int], list[int]] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention within each text; query, key and value are [1, heads, T, d]. Returns [1, T, heads, d]."""
    if packed_spans is None:  # whoever calls the model itself, with padding
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **others)
    sizes, widths = packed_spans
    parts = []
    # split, not slices: the backward of a slice fills a tensor of the whole row with zeros, once for each length
    for width, *spans in zip(
        widths, *(x[0].split(sizes, dim=1) for x in (query, key, value)), strict=True
    ):
        q, k, v = (x.unflatten(1, (-1, width)).transpose(0, 1) for x in spans)
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling)
        parts.append(found.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)[None], None


def _spans(lengths: Int64Array) -> tuple[list[int], list[int]]:
    """For each length that occurs, ascending: the tokens of its texts together, and the length."""
    widths, counts = np.unique(lengths, return_counts=True)
    return (widths * counts).tolist(), widths.tolist()


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
