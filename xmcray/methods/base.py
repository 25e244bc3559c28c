"""What the training loop expects of a method, and the list of methods. The loop never asks which one it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from xmcray import draws
from xmcray.data.batches import TrainingData
from xmcray.errors import DataError
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.sampler import draw_from_rows
from xmcray.nn.heads import Head
from xmcray.nn.label_side import LabelSide
from xmcray.nn.row_table import RowTable
from xmcray.parallel.partition import LabelPartition
from xmcray.retrieval.votes import MemoryConfig
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

    def label_vectors(self) -> Tensor:
        """[S, D], the encoder's vectors of the texts of this rank's labels; no graph."""
        ids = self.data.label_query_ids(self.partition.start, self.partition.stop)
        return self.encode_plain(self.data.tokens(ids))

    def check_label_texts(self, method: str) -> None:
        """For methods that encode label texts: raises DataError unless there are some."""
        if not self.data.corpus.num_label_tokens().any():
            path = self.data.corpus.path
            raise DataError(
                f"{path} has no label text, expected some for {method}; train astra instead"
            )

    def keep_mask(
        self, purpose: str, step: int, start: int, stop: int, width: int, rate: float
    ) -> Tensor | None:
        """Dropout by place in the global batch or pool, bool [stop - start, width]; None where nothing is dropped.

        A place has the same mask whichever rank holds it.
        """
        if not rate:
            return None
        return torch.from_numpy(
            draws.keep_mask(self.seed, purpose, step, start, stop, width, rate)
        ).to(self.device)

    def keep_factors(
        self, purpose: str, step: int, start: int, stop: int, width: int, rate: float
    ) -> Tensor | None:
        """`keep_mask` as factors, 0 or 1 / (1 - rate)."""
        keep = self.keep_mask(purpose, step, start, stop, width, rate)
        return None if keep is None else keep.to(self.dtype) / (1 - rate)

    def drawn_hard(self, batch: Batch, shortlist: Shortlist | None, count: int) -> Ragged:
        """`count` hard negatives of each of the G queries, drawn from those its shortlist has in this epoch."""
        width = self.negatives.hard_at(batch.epoch)
        if shortlist is None or not width:
            return Ragged.empty(len(batch.query_ids))
        generator = draws.generator(self.seed, "hard", batch.step)
        return draw_from_rows(shortlist.take(batch.query_ids, width), count, generator)


@dataclass(frozen=True, slots=True)
class BundleSpec:
    """What the bundle of a finished run needs besides encoder, head and label vectors.

    Attributes:
        label_side: how a label that joins later gets its vector.
        memory: how the training queries vote, of a method that answers with them.
    """

    label_side: LabelSide = field(default_factory=LabelSide)
    memory: MemoryConfig | None = None


class Method(Protocol):
    """One training method.

    Attributes:
        tables: label rows by name, split over ranks by the partition, each with its own optimiser.
        modules: data-parallel modules besides the encoder, trained with the encoder's optimiser.
        lr_factors: learning rates of some of them as multiples of the encoder's, by name.
        head: makes the encoder's output the vector that is searched for among `answer_rows`; one of `modules` if it
            is trained.
        bundle_spec: what export needs.
    """

    tables: Mapping[str, RowTable]
    modules: Mapping[str, nn.Module]
    lr_factors: Mapping[str, float]
    head: Head
    bundle_spec: BundleSpec

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> LossTerms:
        """This rank's sum of the loss of a global batch; collects gradients in rows of `tables`."""

    def index_rows(self) -> Tensor:
        """[S, D], the vectors of this rank's labels that hard negatives are searched among; no graph."""

    def answer_rows(self) -> Tensor:
        """[S, D], the vectors of this rank's labels that answer queries; no graph."""


MethodFactory = Callable[[Any, Parts], Method]


@dataclass(frozen=True, slots=True)
class MethodEntry:
    """How to make one method.

    Attributes:
        config_type: its settings, section `method`. factory: its class.
        defaults: settings of other sections that it has by default, by section.
        at_most_labels: settings that count labels; more than there are is clipped, with a warning.
        by_text: label vectors are made of label texts.
    """

    config_type: type[Any]
    factory: MethodFactory
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    at_most_labels: tuple[str, ...] = ()
    by_text: bool = False


def methods() -> Mapping[str, MethodEntry]:
    """The methods by name."""
    from xmcray.methods.astra import Astra, AstraConfig
    from xmcray.methods.dexml import Dexml, DexmlConfig
    from xmcray.methods.prime import Prime, PrimeConfig
    from xmcray.methods.rae import Rae, RaeConfig
    from xmcray.methods.renee import Renee, ReneeConfig
    from xmcray.methods.unidec import Unidec, UnidecConfig

    # a label's text as a query of its own label teaches nothing where both are encoded by one encoder
    dual: Mapping[str, Mapping[str, Any]] = {
        "data": {"augment_with_labels": False},
        "negatives": {"uniform": 0, "hard": 0},
    }
    hard = ("hard_per_query",)
    return {
        "astra": MethodEntry(AstraConfig, Astra),
        "dexml": MethodEntry(
            DexmlConfig, Dexml, dual, ("hard_per_query", "cache_hard", "top_k"), by_text=True
        ),
        "prime": MethodEntry(PrimeConfig, Prime, dual, hard, by_text=True),
        "rae": MethodEntry(
            RaeConfig, Rae, {**dual, "negatives": {"uniform": 0, "hard": 50}}, hard, by_text=True
        ),
        "renee": MethodEntry(ReneeConfig, Renee, {"negatives": {"uniform": 0, "hard": 0}}),
        "unidec": MethodEntry(
            UnidecConfig,
            Unidec,
            {**dual, "negatives": {"uniform": 0, "hard": 30}},
            hard,
            by_text=True,
        ),
    }
