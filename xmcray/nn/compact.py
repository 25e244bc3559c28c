"""Encoders that are faster on a CPU than in float32; benchmarks/compact.py measures the loss.

    bfloat16   a transformer's weights and states have 8 bits of precision; the processor needs AMX or AVX512-BF16
    int8       a transformer's weights and their inputs have 8 bits: ONNX Runtime, one text at a time

Pooling, projection and what follows stay float32. A static encoder would gain nothing and stays as
it is.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmcray.config import check_choice
from xmcray.errors import ConfigError, one_line
from xmcray.nn.encoder import Encoder
from xmcray.nn.side import MixedEncoder
from xmcray.nn.static import StaticEncoder
from xmcray.types import Ragged, to_torch

PRECISIONS = ("float32", "bfloat16", "int8")
_LEAST_COSINE = 0.9  # in a trial with a text of another length than the exported one
_TRIAL_TOKENS = 13


def compacted(encoder: Encoder, precision: str) -> Encoder:
    """The encoder in another precision, for answers only; the given encoder is changed or used up.

    Raises:
        ConfigError: no such precision, a model that does not compute in it, or int8 without its
            packages or on a GPU.
    """
    check_choice("encoder", precision, PRECISIONS)
    if isinstance(encoder, MixedEncoder):
        # A mixer costs nothing next to its text encoder.
        encoder.text = compacted(encoder.text, precision)
        return encoder
    if precision == "float32" or isinstance(encoder, StaticEncoder):
        return encoder
    from xmcray.nn.transformer import TransformerEncoder  # its library takes seconds to import

    assert isinstance(encoder, TransformerEncoder)
    if precision == "int8":
        return Int8Encoder(encoder)
    _to_bfloat16(encoder.model)
    try:
        with torch.inference_mode():
            encoder(Ragged.from_rows([[0]]))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # an operation that torch does not have in bfloat16
        raise ConfigError(
            f"encoder 'bfloat16': this model does not compute in it ({one_line(error, 120)});"
            " use 'float32'"
        ) from None
    return encoder


def _to_bfloat16(model: nn.Module) -> None:
    """Rounds a transformer, but not the frequencies by which it rotates positions.

    A frequency is multiplied by a position, so its rounding error grows with the text.
    """
    buffers = dict(model.named_buffers())
    model.bfloat16()
    for name, buffer in buffers.items():
        if name.endswith("inv_freq"):
            module_name, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(module_name), own_name, buffer)


class Int8Encoder(Encoder):
    """A TransformerEncoder whose transformer runs in ONNX Runtime, its products in 8-bit integers.

    One factor scales all states of a call to 8 bits. So texts run one at a time: in one call, a
    text's vector would depend on the other texts. On a CPU nothing is lost by that, and there is no
    padding either.

    Args:
        encoder: a TransformerEncoder on the CPU.
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        device = encoder.model.get_input_embeddings().weight.device
        if device.type != "cpu":
            raise ConfigError(
                f"encoder 'int8' runs on the CPU, found device {str(device)!r}; use 'bfloat16' there"
            )
        self.dim = encoder.dim
        self.pooling = encoder.pooling
        self.normalize = encoder.normalize
        self.projection: nn.Linear | None = encoder.projection
        self._hidden = int(encoder.model.config.hidden_size)
        config = encoder.model.config
        max_tokens = int(getattr(config, "max_position_embeddings", _TRIAL_TOKENS))
        # The first tokens of the vocabulary, again from the first one if there are too few.
        trial_tokens = np.arange(min(_TRIAL_TOKENS, max_tokens)) % config.vocab_size
        trial = Ragged.from_rows([trial_tokens])
        with torch.inference_mode():
            expected_BD = encoder(trial)
        self._session = _session(encoder.model)
        with torch.inference_mode():
            cosine = float(F.cosine_similarity(self(trial), expected_BD))
        if not cosine >= _LEAST_COSINE:  # also refuses NaN
            raise ConfigError(
                f"encoder 'int8' loses too much of this model (cosine {cosine:.2f}); use 'bfloat16'"
            )

    def forward(self, tokens: Ragged) -> Tensor:
        """query_BD; a text without tokens is the zero vector."""
        pooled_BH = torch.zeros(len(tokens), self._hidden)
        for row in np.flatnonzero(tokens.lengths).tolist():
            # A batch of one text; the session has one output.
            (state_1TH,) = self._session.run(None, {"ids": tokens[row][None]})
            state_TH = torch.from_numpy(state_1TH[0])
            pooled_BH[row] = self._pooled(state_TH)
        query_BD = pooled_BH
        if self.projection is not None:
            query_BD = self.projection(pooled_BH)
        if self.normalize:
            query_BD = F.normalize(query_BD, dim=-1)
        return query_BD

    def _pooled(self, state_TH: Tensor) -> Tensor:
        """[H], one vector of the states of a text's tokens."""
        if self.pooling == "cls":
            return state_TH[0]
        if self.pooling == "last_token":
            return state_TH[-1]
        if self.pooling == "weighted_mean":
            weight_T = torch.arange(1, len(state_TH) + 1, dtype=state_TH.dtype)
            state_TH = state_TH * (weight_T / weight_T.mean())[:, None]
        return state_TH.mean(dim=0)

    def save(self, folder: Path) -> None:
        """Raises ConfigError: the bundle holds the float32 encoder that this one was made from."""
        raise ConfigError(
            f"an encoder in int8 cannot be saved in {folder}; save the float32 encoder it was made from"
        )


def _session(model: Any) -> Any:
    """A transformer on rows of token ids [1, T] as an ONNX Runtime session in 8-bit integers."""
    try:
        import onnx
        import onnxruntime
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError as error:
        raise ConfigError(
            f"encoder 'int8' needs {error.name or 'onnxruntime'}, which is not installed; run"
            " pip install 'xmcray[onnx]', or use 'bfloat16'"
        ) from None
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Tracing warns of sizes that it takes for constants; the trial finds out if one is none.
        warnings.simplefilter("ignore")
        exact = Path(folder) / "float32.onnx"
        compact = Path(folder) / "int8.onnx"
        try:
            _export(model, exact)
            graph = onnx.load(exact)
            # The mark of a preprocessed graph silences a warning on each load; preprocessing gains
            # nothing on such a graph.
            graph.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
            # Products only: 8-bit embeddings would be smaller, but not faster.
            quantize_dynamic(
                graph,
                compact,
                op_types_to_quantize=["MatMul", "Gemm"],
                weight_type=QuantType.QInt8,
                per_channel=True,
            )
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            options.inter_op_num_threads = 1
            return onnxruntime.InferenceSession(
                compact, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # any part of a model that the exporter cannot handle
            raise ConfigError(
                f"encoder 'int8': this model cannot be exported ({one_line(error, 120)}); use 'bfloat16'"
            ) from None


def _export(model: Any, path: Path) -> None:
    """Writes a transformer in float32 as an ONNX graph with a free number of tokens."""
    model.set_attn_implementation("sdpa")
    ids_BT = to_torch(np.arange(7)[None] % model.config.vocab_size)
    torch.onnx.export(
        # The export leaves the model in the mode of the module that it is given.
        _States(model).eval(),
        (ids_BT,),
        str(path),
        input_names=["ids"],
        output_names=["states"],
        dynamic_axes={"ids": {1: "tokens"}, "states": {1: "tokens"}},
        dynamo=False,  # the other exporter needs one more package and makes the same graph
    )


class _States(nn.Module):
    """Token ids [1, T] -> last hidden states [1, T, H]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor) -> Tensor:
        states_BTH: Tensor = self.model(input_ids=ids_BT).last_hidden_state
        return states_BTH
