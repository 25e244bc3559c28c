"""What one-vs-all methods share: label rows over the encoder, their start values, dropout, and the exact loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor, nn

from xmcray import draws
from xmcray.config import check_choices, check_range
from xmcray.losses.bce import full_bce
from xmcray.methods.base import BundleSpec, Parts
from xmcray.methods.label_pool import LabelPool
from xmcray.methods.starts import label_centroids
from xmcray.nn.classifier import ShardedClassifier
from xmcray.nn.heads import Head
from xmcray.nn.label_side import LabelSide
from xmcray.nn.row_table import RowOptimConfig, RowTable
from xmcray.types import Batch, LossTerms


@dataclass(frozen=True, kw_only=True)
class OneVsAllConfig:
    """Settings of every method with a classifier.

    Attributes:
        classifier: optimiser and storage of the classifier rows.
        init: rows start as "random" normal draws of deviation `init_std`, as "zeros", or as `init_std` times sqrt(D)
            times vectors of the start encoder: of the label "texts", or "centroids", means of the labels' queries.
        init_std: deviation of the rows' start values.
        dropout: on the query embedding, 0.7-0.85 in the papers.
        logit_prior: added to every score in the loss; "prior" is the log-odds of a positive among what the loss counts. It
            spares the rows from learning first that labels are rare, and changes no ranking. 0 is the papers' loss.
        chunk_labels: labels that the exact loss scores at once.
    """

    RENAMED: ClassVar = {"offset": "logit_prior"}

    classifier: RowOptimConfig = field(default_factory=RowOptimConfig)
    init: Literal["random", "zeros", "texts", "centroids"] = "random"
    init_std: float = 0.02
    dropout: float = 0.5
    logit_prior: Literal["prior"] | float = "prior"
    chunk_labels: int = 2048

    def __post_init__(self) -> None:
        check_choices(self, "method")
        check_range("method.dropout", self.dropout, 0, 0.99)
        check_range("method.init_std", self.init_std, low=0)
        check_range("method.chunk_labels", self.chunk_labels, low=1)


class OneVsAll:
    """Rows of this rank's labels; the base of the methods, each of which has its own `loss`."""

    def __init__(self, config: OneVsAllConfig, parts: Parts) -> None:
        self.parts, self.rate, self.chunk_labels = parts, config.dropout, config.chunk_labels
        self.classifier = ShardedClassifier(
            parts.partition,
            parts.dim,
            config.classifier,
            init_std=config.init_std if config.init == "random" else 0.0,
            seed=parts.seed,
            dtype=parts.dtype,
            device=parts.device,
        )
        rows_SD = self.classifier.table.weight_SD
        if config.init in ("texts", "centroids"):
            start_SD = (
                self.parts.label_vectors() if config.init == "texts" else label_centroids(parts)
            )
            rows_SD.copy_(start_SD * (config.init_std * math.sqrt(parts.dim)))
        self.tables: Mapping[str, RowTable] = {"classifier": self.classifier.table}
        self.modules: Mapping[str, nn.Module] = {}
        self.lr_factors: Mapping[str, float] = {}
        self.head = Head(parts.dim)
        self.bundle_spec = BundleSpec(LabelSide(row_columns=parts.dim))
        self.logit_prior = 0.0 if config.logit_prior == "prior" else float(config.logit_prior)

    def index_rows(self) -> Tensor:
        """Classifier rows."""
        return self.answer_rows()

    def answer_rows(self) -> Tensor:
        """Classifier rows, up to date."""
        self.classifier.table.flush()
        return self.classifier.table.weight_SD

    def drop(self, query_BD: Tensor, batch: Batch) -> Tensor:
        """Dropout by position in the global batch: the same mask whoever encodes a query."""
        place = batch.step, batch.start, batch.stop
        keep = self.parts.keep_mask("dropout", *place, query_BD.shape[1], self.rate)
        return query_BD if keep is None else query_BD * keep / (1 - self.rate)

    def exact(self, query_GD: Tensor, batch: Batch) -> LossTerms:
        """Binary cross-entropy over all labels, in label chunks (Renée)."""
        pool, device = LabelPool.everything(self.parts.partition), query_GD.device
        positives, excluded = (
            pool.pairs(part, device=device) for part in (batch.positives, batch.excluded)
        )
        row_SD = self.classifier.table.rows(None)
        pairs = positives.rows, positives.columns, excluded.rows, excluded.columns
        return full_bce(query_GD, row_SD, *pairs, self.chunk_labels, self.logit_prior)

    def prior(self, negatives: float) -> float:
        """log(positives / negatives) of an average query that is compared with so many labels."""
        data = self.parts.data
        ids = data.query_ids[
            draws.generator(self.parts.seed, "prior").permutation(len(data.query_ids))[:10_000]
        ]
        return math.log(
            float(data.positives(ids).lengths.mean()) / max(min(negatives, data.num_labels), 1.0)
        )
