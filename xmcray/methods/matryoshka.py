"""Matryoshka representations: the first columns of the vectors are good vectors of their own.

The loss is the mean of the method's losses of several prefixes (Kusupati et al., NeurIPS 2022, who
add them up). Texts are encoded once for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from xmcray.errors import ConfigError
from xmcray.methods.base import Method
from xmcray.types import Batch, Ragged, Shortlist, StepOutput


def check_prefixes(widths: tuple[int, ...], dim: int) -> None:
    """Raises ConfigError unless all widths are below that of whole vectors."""
    for width in widths:
        if not 1 <= width < dim:
            raise ConfigError(
                f"encoder.matryoshka has {width}, expected widths of 1 to {dim - 1}: vectors have"
                f" {dim} columns; leave it out or raise encoder.dim"
            )


class PrefixEncode:
    """An encoder whose vectors are zero after some number of columns.

    Inner products and lengths are then those of the prefix.

    Args:
        encode: of `MethodContext`.

    Attributes:
        width: columns that are kept; None keeps all.
    """

    def __init__(self, encode: Callable[[Ragged], Tensor]) -> None:
        self.encode = encode
        self.width: int | None = None
        # Whole vectors of the texts that this step has encoded, by their tokens.
        self._encoded: dict[tuple[bytes, bytes], Tensor] = {}

    def __call__(self, tokens: Ragged) -> Tensor:
        """[B, D]."""
        if self.width is None:
            return self.encode(tokens)
        key = (tokens.values.tobytes(), tokens.offsets.tobytes())
        vector_BD = self._encoded.get(key)
        if vector_BD is None:
            vector_BD = self.encode(tokens)
            self._encoded[key] = vector_BD
        column_D = torch.arange(vector_BD.shape[1], device=vector_BD.device)
        return vector_BD * (column_D < self.width)

    def forget(self) -> None:
        """Keeps all columns again, and lets go of the vectors of the step."""
        self.width = None
        self._encoded.clear()


class Matryoshka(Method):
    """A method that is trained with several prefixes of the vectors.

    Args:
        method: its head works on prefixes as on whole vectors, such as normalisation does.
        encode: what the method encodes texts with.
        widths: numbers of columns, ascending up to the whole width.
    """

    def __init__(self, method: Method, encode: PrefixEncode, widths: Sequence[int]) -> None:
        super().__init__(method.head)
        self.method = method
        self.encode = encode
        self.widths = widths
        self.tables = method.tables
        self.modules = method.modules
        self.lr_factors = method.lr_factors
        self.bundle_spec = method.bundle_spec

    def start(self) -> None:
        """As the method does, with whole vectors."""
        self.method.start()

    def prepare(self, batch: Batch, shortlist: Shortlist | None) -> Any:
        """As the method does, for all prefixes alike."""
        return self.method.prepare(batch, shortlist)

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> StepOutput:
        """The mean of the method's losses; what else is in the output belongs to whole vectors."""
        totals = []
        try:
            for width in self.widths:
                # All random draws are keyed by the step, so every prefix meets the same labels.
                self.encode.width = width
                output = self.method.loss(batch, shortlist)
                totals.append(output.total)
        finally:
            self.encode.forget()
        return dataclasses.replace(output, total=torch.stack(totals).mean())

    def after_step(self, batch: Batch, output: StepOutput) -> None:
        """As the method does."""
        self.method.after_step(batch, output)

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Those of the method."""
        return self.method.state_tensors()

    def index_rows(self) -> Tensor:
        """Those of the method, whole."""
        return self.method.index_rows()

    def answer_rows(self) -> Tensor:
        """Those of the method, whole."""
        return self.method.answer_rows()
