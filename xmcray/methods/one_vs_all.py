"""Common part of one-vs-all methods: label rows, their initial values, dropout and the exact loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from xmcray import draws
from xmcray.config import check_choices, check_range, check_ranges
from xmcray.errors import ConfigError
from xmcray.losses.bce import full_bce
from xmcray.losses.pairs import Pairs
from xmcray.methods.base import BundleSpec, Method, MethodContext
from xmcray.methods.initialisation import label_centroids
from xmcray.methods.label_pool import LabelPool
from xmcray.nn.classifier import classifier_rows
from xmcray.nn.heads import Head
from xmcray.nn.label_side import LabelSide
from xmcray.nn.row_table import RowOptimConfig
from xmcray.parallel.transfers import to_device
from xmcray.permutations import random_sample
from xmcray.types import Batch

_PRIOR_QUERIES = 10_000  # training queries whose positives are counted for the logit prior
# The papers' 0.05 is for the sum of the batch's losses. Ours is for their mean, and 256 queries are
# a batch unless a preset or a user says otherwise.
_CLASSIFIER_LR = 0.05 * 256


@dataclass(frozen=True, kw_only=True)
class OneVsAllConfig:
    """Settings of every method with a classifier.

    Attributes:
        classifier: optimiser and storage of the classifier rows.
        init: rows start as "random" normal draws of deviation `init_std`, as "zeros", or as
            `init_std` times sqrt(D) times vectors of the untrained encoder: of the label "texts",
            or "centroids", means of the labels' queries.
        init_std: deviation of the rows' initial values.
        dropout: on the query embedding, 0.7-0.85 in the papers.
        logit_prior: added to every score in the loss; "prior" is the log-odds of a positive among
            the labels that the loss counts. It spares the rows from learning first that labels are
            rare, and changes no ranking. 0 is the papers' loss.
        chunk_labels: labels that the exact loss scores at once.
    """

    RENAMED: ClassVar = {"offset": "logit_prior"}

    classifier: RowOptimConfig = field(default_factory=lambda: RowOptimConfig(lr=_CLASSIFIER_LR))
    init: Literal["random", "zeros", "texts", "centroids"] = "random"
    init_std: float = 0.02
    dropout: float = 0.5
    logit_prior: Literal["prior"] | float = "prior"
    chunk_labels: int = 2048

    def __post_init__(self) -> None:
        rows = self.classifier
        if rows.kind != "sgd" and rows.lr == _CLASSIFIER_LR:
            raise ConfigError(
                f"method.classifier.kind is {rows.kind}, but the default of method.classifier.lr,"
                f" {rows.lr:g}, is a rate for sgd; set one for {rows.kind}, such as 0.01"
            )
        check_choices(self, "method")
        check_ranges(
            self,
            "method",
            dropout=(0, 0.99),
            init_std=0,
            chunk_labels=1,
        )
        if self.logit_prior != "prior":
            # No log-odds of labels come near these bounds, which leave out infinity and NaN.
            check_range("method.logit_prior", self.logit_prior, low=-1000, high=1000)


@dataclass(frozen=True, slots=True)
class ExactInputs:
    """What the exact loss needs of a batch, on the host.

    Attributes:
        keep_BD: Dropout mask of this rank's queries; None without dropout.
        positives: Positives of all queries among this rank's labels.
        skipped: Pairs of a query and its own label.
    """

    keep_BD: Tensor | None
    positives: Pairs
    skipped: Pairs


class OneVsAll(Method):
    """Rows of this rank's labels; the base of methods that each have a `loss` of their own."""

    def __init__(self, config: OneVsAllConfig, context: MethodContext) -> None:
        super().__init__(Head(context.dim))
        self.context = context
        self.init = config.init
        self.init_std = config.init_std
        self.dropout = config.dropout
        self.chunk_labels = config.chunk_labels
        self.logit_prior = 0.0
        if config.logit_prior != "prior":
            self.logit_prior = float(config.logit_prior)
        self.classifier = classifier_rows(
            context.partition,
            context.dim,
            config.classifier,
            init_std=config.init_std if config.init == "random" else 0.0,
            seed=context.seed,
            dtype=context.dtype,
            device=context.device,
        )
        self.tables = {"classifier": self.classifier}
        self.bundle_spec = BundleSpec(LabelSide(row_columns=context.dim))

    def start(self) -> None:
        """Rows that start from texts or centroids get the vectors of the untrained encoder."""
        if self.init == "texts":
            initial_SD = self.context.label_vectors()
        elif self.init == "centroids":
            initial_SD = label_centroids(self.context)
        else:
            return
        # Vectors of length 1 have coordinates of deviation 1 / sqrt(D).
        scale = self.init_std * math.sqrt(self.context.dim)
        self.classifier.weight_SD.copy_(initial_SD * scale)

    def answer_rows(self) -> Tensor:
        """Classifier rows, with all weight decay applied."""
        self.classifier.flush()
        return self.classifier.weight_SD

    def keep_mask(self, batch: Batch) -> Tensor | None:
        """Dropout by position in the global batch: a query has the same mask on every rank."""
        return self.context.keep_mask(
            "dropout",
            batch.step,
            batch.start,
            batch.stop,
            self.context.dim,
            self.dropout,
        )

    def drop(self, query_BD: Tensor, mask: Tensor | None) -> Tensor:
        """Vectors with the dropout of a mask of `keep_mask`."""
        if mask is None:
            return query_BD
        (keep_BD,) = to_device([mask], query_BD.device)
        return query_BD * keep_BD / (1 - self.dropout)

    def exact_inputs(self, batch: Batch) -> ExactInputs:
        """What `exact_loss` needs of a batch."""
        pool = LabelPool.everything(self.context.partition)
        return ExactInputs(
            self.keep_mask(batch),
            pool.positives(batch.positives, batch),
            pool.pairs(batch.excluded),
        )

    def exact_loss(self, query_GD: Tensor, inputs: ExactInputs) -> Tensor:
        """This rank's sum of the binary cross-entropy over its labels, in label chunks (Renée)."""
        return full_bce(
            query_GD,
            self.classifier.rows(None),
            inputs.positives,
            inputs.skipped,
            self.chunk_labels,
            self.logit_prior,
        )

    def prior(self, num_negatives: float, max_positives: int = 0) -> float:
        """log(positives / negatives) of an average query.

        Args:
            num_negatives: Labels that a query is compared with; clipped to 1 .. L.
            max_positives: Of a query that count; 0 for all.
        """
        data = self.context.data
        # The seed is that of the run, so all ranks draw the same sample and exchange nothing.
        generator = draws.generator(self.context.seed, "prior")
        positions = random_sample(generator, len(data.query_ids), _PRIOR_QUERIES)
        sample = data.query_ids[positions]
        num_positives_N = data.positives(sample).lengths
        if max_positives:
            num_positives_N = np.minimum(num_positives_N, max_positives)
        clipped = max(min(num_negatives, data.num_labels), 1.0)
        return math.log(float(num_positives_N.mean()) / clipped)
