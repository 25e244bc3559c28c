"""What the training loop expects of a method. The loop never asks which method it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xmcray import draws
from xmcray.data.batches import TrainingData
from xmcray.errors import DataError
from xmcray.negatives.plan import NegativesConfig
from xmcray.negatives.sampler import draw_from_rows
from xmcray.nn.heads import FusionConfig, Head
from xmcray.nn.label_side import LabelSide
from xmcray.nn.row_table import RowTable
from xmcray.parallel.partition import LabelPartition
from xmcray.parallel.transfers import to_device
from xmcray.types import Batch, Int64Array, Ragged, Shortlist, StepOutput


@dataclass(frozen=True, kw_only=True)
class MethodContext:
    """What a method is built from.

    Attributes:
        encode: Maps tokens to vectors [rows, D] with a graph; the step decides on micro-batches.
        encode_without_graph: The same without a graph and without dropout, in bounded memory.
        dim: D, the width of the encoder's vectors.
        data: Training split.
        partition: Which labels this rank owns.
        negatives: Settings of section `negatives`.
        seed: Seed of all random draws of the run.
        dtype: Of label rows.
        device: Of label rows.
        fusion: Settings of section `fusion`.
        as_labels: Marks tokens as those of label texts, for encoders with a label side of its own.
    """

    encode: Callable[[Ragged], Tensor]
    encode_without_graph: Callable[[Ragged], Tensor]
    dim: int
    data: TrainingData
    partition: LabelPartition
    negatives: NegativesConfig
    seed: int
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    fusion: FusionConfig = field(default_factory=FusionConfig)
    as_labels: Callable[[Ragged], Ragged] = lambda tokens: tokens

    def check_label_texts(self, user: str, remedy: str = "train astra instead") -> None:
        """Raises DataError if no label has a text.

        Args:
            user: the method or setting that needs them.
            remedy: what to do.
        """
        num_without_tokens = len(self.data.corpus.labels_without_tokens())
        if num_without_tokens == self.data.num_labels:
            path = self.data.corpus.path
            raise DataError(f"{path} has no label text, expected some for {user}; {remedy}")

    def label_tokens(self, label_ids: Int64Array) -> Ragged:
        """Token ids of label texts, as the encoder expects those of labels.

        Args:
            label_ids: int64 [U], global label ids.
        """
        return self.as_labels(self.data.tokens(self.data.num_train + label_ids))

    def label_vectors(self) -> Tensor:
        """[S, D], the encoder's vectors of the texts of this rank's labels, without a graph."""
        label_ids = np.arange(self.partition.start, self.partition.stop)
        return self.encode_without_graph(self.label_tokens(label_ids))

    def encode_with_labels(
        self, batch: Batch, label_ids: Int64Array, label_tokens: Ragged | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encodes this rank's queries and some label texts in one call.

        Args:
            batch: Its `tokens` are encoded first.
            label_ids: int64 [U], global label ids.
            label_tokens: Their token ids, if they were read ahead.

        Returns:
            Vectors of the queries [B, D] and of the label texts [U, D], with a graph.
        """
        if label_tokens is None:
            label_tokens = self.label_tokens(label_ids)
        tokens = Ragged.concatenate([batch.tokens, label_tokens])
        sizes = [len(batch.tokens), len(label_ids)]
        query_BD, label_UD = self.encode(tokens).split(sizes)
        return query_BD, label_UD

    def keep_mask(
        self,
        purpose: str,
        step: int,
        start: int,
        stop: int,
        width: int,
        rate: float,
    ) -> Tensor | None:
        """Dropout mask of positions start .. stop - 1 of the global batch or of a label pool.

        A position has the same mask on whichever rank it lies.

        Returns:
            bool [stop - start, width] on the host, or None if `rate` is 0.
        """
        if not rate:
            return None
        mask = draws.keep_mask(self.seed, purpose, step, start, stop, width, rate)
        return torch.from_numpy(mask)

    def keep_factors(self, mask: Tensor | None, rate: float) -> Tensor | None:
        """A mask of `keep_mask` as factors: 0 for what is dropped, 1 / (1 - rate) for what is kept."""
        if mask is None:
            return None
        (keep_BD,) = to_device([mask], self.device)
        return keep_BD.to(self.dtype) / (1 - rate)

    def draw_positives(self, batch: Batch, count: int) -> Ragged:
        """At most `count` positives of each of the G queries, drawn uniformly; 0 takes all.

        The draw of a smaller count above 0 is contained in the draw of a larger one.
        """
        if not count:
            return batch.positives
        generator = draws.generator(self.seed, "positives", batch.step)
        return draw_from_rows(batch.positives, count, generator)

    def draw_hard_negatives(self, batch: Batch, shortlist: Shortlist | None, count: int) -> Ragged:
        """At most `count` hard negatives of each of the G queries, drawn from its shortlist.

        The epoch decides how many entries of the shortlist count (`negatives.hard_at`).
        """
        width = self.negatives.hard_at(batch.epoch)
        if shortlist is None or not width:
            return Ragged.empty(len(batch.query_ids))
        generator = draws.generator(self.seed, "hard", batch.step)
        return draw_from_rows(shortlist.take(batch.query_ids, width), count, generator)


@dataclass(frozen=True, slots=True)
class BundleSpec:
    """What the bundle of a finished run needs besides encoder, head and label vectors.

    Attributes:
        label_side: How a label that joins later gets its vector.
        cluster_state: Name of the state tensor that holds the cluster of each label, if the label
            side needs the clusters of all labels.
    """

    label_side: LabelSide = field(default_factory=LabelSide)
    cluster_state: str | None = None


class Method(ABC):
    """One training method. Only `head`, `loss` and `answer_rows` have no default.

    Attributes:
        tables: Optimised label rows by name. The partition splits them over ranks, and each table
            has its own optimiser. Other state per label goes into `state_tensors`.
        modules: Data-parallel modules besides the encoder, trained with the encoder's optimiser.
        lr_factors: Learning rates of modules as multiples of the encoder's, by name; 1 if absent.
        head: Maps the encoder's output to the vector that `answer_rows` are searched with. It is
            one of `modules` if it is trained.
        bundle_spec: What export needs.
    """

    tables: Mapping[str, RowTable]
    modules: Mapping[str, nn.Module]
    lr_factors: Mapping[str, float]
    head: Head
    bundle_spec: BundleSpec

    def __init__(self, head: Head) -> None:
        self.head = head
        self.tables = {}
        self.modules = {}
        self.lr_factors = {}
        self.bundle_spec = BundleSpec()

    def start(self) -> None:  # noqa: B027 (an optional hook)
        """Computes initial values from the untrained encoder; collective.

        Called once before the first step. Not called after a restore, because the checkpoint
        holds what it computed.
        """

    def prepare(self, batch: Batch, shortlist: Shortlist | None) -> Any:
        """What `loss` needs of a batch on the host: draws, columns, pairs, tokens of label texts.

        It follows from the arguments and the data alone, and uses neither parameters nor the device.
        The loop calls it in a background thread for the batches of the next steps.
        """
        return None

    def inputs(self, batch: Batch, shortlist: Shortlist | None) -> Any:
        """What `prepare` returned ahead of the step, or returns now."""
        return self.prepare(batch, shortlist) if batch.inputs is None else batch.inputs

    @abstractmethod
    def loss(self, batch: Batch, shortlist: Shortlist | None) -> StepOutput:
        """This rank's part of the loss of a global batch.

        Changes nothing: it only reads rows of `tables` so that they collect gradients.
        """

    def after_step(self, batch: Batch, output: StepOutput) -> None:  # noqa: B027 (as above)
        """Moves what no optimiser moves (centroids, caches), after the update of the parameters.

        Args:
            batch: The batch of the step.
            output: What `loss` returned for it.
        """

    def state_tensors(self) -> Mapping[str, Tensor]:
        """State that is not optimised, by name: tensors [S, ...] with one row per label of this rank.

        Checkpoints save them and write restored rows into them.
        """
        return {}

    def index_rows(self) -> Tensor:
        """[S, D], vectors of this rank's labels for the search of hard negatives, without a graph."""
        return self.answer_rows()

    @abstractmethod
    def answer_rows(self) -> Tensor:
        """[S, D], vectors of this rank's labels that answer queries, without a graph."""


@dataclass(frozen=True, slots=True)
class MethodEntry:
    """Everything that loop, command line, sweeps and plans need to know about a method.

    A method's module has one, and `methods/registry.py` says where. An installed package adds a
    method with an entry point of group `xmcray.methods`.

    Attributes:
        config_type: Frozen dataclass of the settings in section `method`.
        factory: Makes the method from its settings.
        defaults: Default settings of other sections, by section.
        label_counts: Settings that count labels. A value above L is clipped, with a warning.
        uses_label_texts: Label vectors are made of label texts, so labels without text have none.
        has_prefixes: Whether the method's losses mean the same for the first columns of the encoder's
            vectors, given its settings.
        needs_negatives: Whether queries meet no other negatives than those of section `negatives`,
            given the method's settings.
        needs_batch: Whether queries meet no other negatives than what the other queries of their batch
            bring, and hard ones, given the method's settings.
        uses_hard: Whether the loss takes hard negatives, given the method's settings.
        check_negatives: Raises ConfigError if section `negatives` does not fit the method's settings.
        uses_fusion: Whether the settings of section `fusion` have an effect, given the method's
            settings.
        sections: Which of the optional sections `memory` and `fusion` the method has.
        in_force: The settings as they take effect with a number of labels.
    """

    config_type: type[Any]
    factory: Callable[[Any, MethodContext], Method]
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    label_counts: tuple[str, ...] = ()
    uses_label_texts: bool = False
    has_prefixes: Callable[[Any], bool] = lambda config: False
    needs_negatives: Callable[[Any], bool] = lambda config: False
    needs_batch: Callable[[Any], bool] = lambda config: False
    uses_hard: Callable[[Any], bool] = lambda config: True
    check_negatives: Callable[[Any, NegativesConfig], None] = lambda config, negatives: None
    uses_fusion: Callable[[Any], bool] = lambda config: True
    sections: tuple[str, ...] = ()
    in_force: Callable[[Any, int], Any] = lambda config, num_labels: config


def dual_encoder_defaults(hard: int = 0) -> Mapping[str, Mapping[str, Any]]:
    """Defaults of methods in which one encoder makes the vectors of queries and of labels.

    A label text as a query of its own label teaches such a method nothing: both vectors are equal.
    """
    return {
        "data": {"augment_with_labels": False},
        "negatives": {"uniform": 0, "hard": hard},
    }
