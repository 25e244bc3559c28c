"""Transformers over texts that lie one after another: no layer computes padding.

All layers but attention treat tokens alone, so they run once over the tokens of all texts.
Attention runs once for each length that occurs. The transformers library lets a model's attention
be replaced by name. Whether a model's other parts (position embeddings above all) work on such a
row is tried when it is loaded, not assumed.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from xmcray.nn.matmul import attention_kernel
from xmcray.parallel.transfers import to_device
from xmcray.types import Int64Array

NAME = "xmcray_packed"
ANY_LENGTH = np.iinfo(np.int64).max
_TOLERANCE = 1e-4
_UNSUPPORTED = (TypeError, ValueError, KeyError, RuntimeError, IndexError, AttributeError)


class _Spans(NamedTuple):
    """The texts of each length that occurs, ascending by length.

    Attributes:
        sizes: tokens of all texts of a length.
        widths: the length.
    """

    sizes: list[int]
    widths: list[int]


def _spans(lengths: Int64Array) -> _Spans:
    widths, counts = np.unique(lengths, return_counts=True)
    return _Spans((widths * counts).tolist(), widths.tolist())


def run(model: Any, token_TH: Tensor, lengths: Int64Array, causal: bool = False) -> Tensor:
    """Last hidden states [T, H] of texts given by their input embeddings, one text after another.

    Args:
        token_TH: input embeddings of all tokens.
        lengths: int64 [B] > 0, tokens of each text, ascending.
        causal: what `is_causal` says of the model.
    """
    starts = np.cumsum(lengths) - lengths
    position = np.arange(len(token_TH)) - np.repeat(starts, lengths)
    (position_T,) = to_device([torch.from_numpy(position)], token_TH.device)
    inputs = {"inputs_embeds": token_TH[None], "position_ids": position_T[None]}
    if causal:
        # A mask of four dimensions reaches attention as it is, where nothing reads it. Without one,
        # a decoder makes a mask of all pairs of tokens.
        inputs["attention_mask"] = token_TH.new_zeros(1, 1, 1, 1)
    # To the model, all texts are one row; attention cuts it by `packed_spans`.
    output = model(**inputs, packed_spans=_spans(lengths))
    state_TH: Tensor = output.last_hidden_state[0]
    return state_TH


def is_causal(model: Any) -> bool:
    """Whether a model is a decoder, in which a token attends to those before it alone."""
    return any(getattr(module, "is_causal", False) for module in model.modules())


def longest_text(model: Any) -> int:
    """Tokens up to which a text lies within every attention window of the model."""
    # Attention does not see which layers have a window, so texts beyond it are padded instead.
    window = getattr(model.config, "sliding_window", None)
    return int(window or ANY_LENGTH)


def means(state_TH: Tensor, lengths: Int64Array, weighted: bool = False) -> Tensor:
    """[B, H], the mean state of each text.

    Args:
        state_TH: as `run` returns it.
        lengths: as for `run`.
        weighted: the n-th token of a text weighs n times as much as the first.
    """
    spans = _spans(lengths)
    means = []
    for states, width in zip(state_TH.split(spans.sizes), spans.widths, strict=True):
        # Texts of one length are a rectangle: [texts, width, H].
        text_states = states.unflatten(0, (-1, width))
        if weighted:
            weight_T = torch.arange(1, width + 1, device=states.device, dtype=states.dtype)
            text_states = text_states * (weight_T / weight_T.mean())[:, None]
        means.append(text_states.mean(dim=1))
    return torch.cat(means)


def try_on(model: Any) -> bool:
    """Switches a model to packed texts if its output is the same as with padding.

    Returns:
        Whether it is; otherwise the model is left as it was.
    """
    has_positions = "position_ids" in inspect.signature(model.forward).parameters
    # Without such a backend, the library only warns that it replaces nothing.
    if not (has_positions and getattr(model, "_supports_attention_backend", True)):
        return False
    table = model.get_input_embeddings().weight
    if table.is_meta:  # no values that could be the same
        return False
    implementation = model.config._attn_implementation
    was_training = model.training
    # Three texts of two lengths, packed and padded; their 8 tokens are the first of the table.
    lengths = np.array([2, 3, 3])
    token_T = torch.arange(8, device=table.device) % len(table)
    token_TH = table[token_T].detach()
    is_filled_BT = np.arange(3) < lengths[:, None]
    mask_BT = torch.from_numpy(is_filled_BT).to(table.device)
    padded_BTH = token_TH.new_zeros(3, 3, token_TH.shape[1])
    padded_BTH[mask_BT] = token_TH
    model.eval()
    try:
        with torch.no_grad():
            output = model(inputs_embeds=padded_BTH, attention_mask=mask_BT.long())
            expected = output.last_hidden_state[mask_BT]
            model.set_attn_implementation(NAME)
            states = run(model, token_TH, lengths, is_causal(model))
            difference = (states - expected).abs().max()
            largest = expected.abs().max()
            is_same = bool(difference <= _TOLERANCE * largest)
    except _UNSUPPORTED:  # some part of the model cannot handle such rows
        is_same = False
    finally:
        model.train(was_training)
    if not is_same:
        model.set_attn_implementation(implementation)
    return is_same


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_spans: _Spans | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention within each text: query, key and value [1, heads, T, d] to [1, T, heads, d]."""
    if packed_spans is None:  # a caller that runs the model itself, with padding
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **others)
    # split, not slices: the backward of a slice fills a tensor of the whole row with zeros, once
    # for each length.
    is_causal = bool(getattr(module, "is_causal", False))
    # Several heads of queries may share the keys and values of one head.
    shares_heads = query.shape[1] != key.shape[1]
    queries = query[0].split(packed_spans.sizes, dim=1)
    keys = key[0].split(packed_spans.sizes, dim=1)
    values = value[0].split(packed_spans.sizes, dim=1)
    outputs = []
    for q, k, v, width in zip(queries, keys, values, packed_spans.widths, strict=True):
        with attention_kernel(q.device, width):
            output = F.scaled_dot_product_attention(
                _by_text(q, width),
                _by_text(k, width),
                _by_text(v, width),
                dropout_p=dropout,
                is_causal=is_causal,
                scale=scaling,
                enable_gqa=shares_heads,
            )
        # [texts, heads, width, d] -> [texts * width, heads, d]
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


def _by_text(span: Tensor, width: int) -> Tensor:
    """[heads, texts * width, d] -> [texts, heads, width, d]."""
    texts: Tensor = span.unflatten(1, (-1, width))
    return texts.transpose(0, 1)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
