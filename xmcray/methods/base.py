"""What the training loop expects of a method, and the list of methods. The loop never asks which one it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from xmcray.data.batches import TrainingData
from xmcray.negatives.plan import NegativesConfig
from xmcray.nn.row_table import RowTable
from xmcray.parallel.partition import LabelPartition
from xmcray.types import Batch, LossTerms, Ragged, Shortlist


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a method is built from.

    Attributes:
        encode: tokens to vectors [rows, D] with a graph; the step decides about micro-batches.
        encode_plain: the same without a graph and without dropout, in bounded memory.
        dim: D. data: the training split. partition: who owns which label.
        negatives: section `negatives`. seed: of all draws of the run.
        dtype, device: of label rows.
    """

    encode: Callable[[Ragged], Tensor]
    encode_plain: Callable[[Ragged], Tensor]
    dim: int
    data: TrainingData
    partition: LabelPartition
    negatives: NegativesConfig
    seed: int
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class BundleSpec:
    """How answers are found with what a method trained.

    Attributes:
        table: the method's table whose rows answer.
        predictor: "labels": inner product of the query vector with one vector per label.
        normalise_queries: whether the query vector is l2-normalised before the search.
    """

    table: str = "classifier"
    predictor: str = "labels"
    normalise_queries: bool = False


class Method(Protocol):
    """One training method.

    Attributes:
        tables: label rows by name, split over ranks by the partition, each with its own optimiser.
        modules: data-parallel modules besides the encoder, trained with the encoder's optimiser.
    """

    tables: Mapping[str, RowTable]
    modules: Mapping[str, nn.Module]

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> LossTerms:
        """This rank's sum of the loss of a global batch; collects gradients in rows of `tables`."""

    def index_rows(self) -> Tensor:
        """[S, D], the vectors of this rank's labels that hard negatives are searched among; no graph."""

    def answer_rows(self) -> Tensor:
        """[S, D], the vectors of this rank's labels that answer queries; no graph."""


MethodFactory = Callable[[Any, Parts], Method]


@dataclass(frozen=True, slots=True)
class MethodEntry:
    """How to make one method: its settings (section `method`), its class, and how its result answers queries."""

    config_type: type[Any]
    factory: MethodFactory
    bundle_spec: BundleSpec = field(default_factory=BundleSpec)


def methods() -> Mapping[str, MethodEntry]:
    """The methods by name."""
    from xmcray.methods.astra import Astra, AstraConfig

    return {"astra": MethodEntry(AstraConfig, Astra)}
