"""UniDEC: a dual encoder and a classifier trained as one, against some labels of each batch.

    paper          here                           meaning
    Phi_D, Phi_C   TwoHeads.text, .classifier     what meets label texts, and what meets classifier rows
    Psi            tables["classifier"]           classifier rows
    beta, eta      num_positives, hard_per_query  labels that a query brings into the batch's pool L_B
    beta_C         classifier_positives           "pos-clf": further ones, into the classifier's pool alone
    P_i^B          losses.psl.Picked              all true labels of a query in the pool
    PSL            losses.psl.pick_some_labels    l_q2l and l_l2q
    lambda         balance                        L = lambda L_D + (1 - lambda) L_C

Labels are scored twice, by their text and by their row, and an answer adds both cosines. Hard
negatives are the nearest label texts. With lambda = 1 there are no rows: SupconDE.
https://arxiv.org/abs/2405.03714
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xmcray.config import MAX_INT, check_choices, check_ranges
from xmcray.errors import ConfigError
from xmcray.losses.psl import Normaliser, Picked, Reduction, pick_some_labels
from xmcray.methods.base import (
    BundleSpec,
    Method,
    MethodContext,
    MethodEntry,
    dual_encoder_defaults,
)
from xmcray.methods.label_pool import LabelPool
from xmcray.nn.classifier import classifier_rows
from xmcray.nn.heads import TwoHeads
from xmcray.nn.label_side import LabelSide
from xmcray.nn.row_table import RowOptimConfig
from xmcray.parallel.collectives import gather_rows
from xmcray.parallel.transfers import to_device
from xmcray.types import Batch, Int64Array, Ragged, Shortlist, StepOutput


@dataclass(frozen=True, kw_only=True)
class UnidecConfig:
    """Section `method` of UniDEC.

    Attributes:
        num_positives: beta, positives of a query that enter the pool, drawn uniformly; 0 for all.
        hard_per_query: eta, drawn from the `negatives.hard` labels of a query's shortlist; the
            paper's shortlist has eta times the epochs between refreshes.
        classifier_positives: beta_C ("pos-clf"), further positives of a query in the classifier's
            pool alone.
        balance: lambda, share of the dual encoder's loss; 1 is SupconDE, 0 trains the classifier
            alone.
        balance_encoder: lambda_D, share of queries to labels in the dual encoder's loss.
        balance_classifier: lambda_C, share of queries to labels in the classifier's loss.
        temperature: tau of both losses; scores are divided by it.
        normaliser: "paln" divides by a query's positives in the pool, "pal" does not.
        reduction: "mean_anchors" takes the mean over queries or labels with a positive,
            "sum_per_query" the paper's sums by the number of queries.
        head_dim: width of either head; 0 is the encoder's.
        dropout: in both heads.
        head_lr: learning rate of the heads, as a multiple of the encoder's.
        classifier: optimiser of the rows.
        init: rows start as "random" normal draws of deviation `init_std`, or as "texts": vectors of
            the label texts with coordinates of that deviation.
        init_std: deviation of the rows' initial values.
        answer_by: "text", "classifier" or "both"; a loss without a share has no part in "both".
    """

    MOVED: ClassVar = {"text_share": "fusion.text_weight"}

    num_positives: int = 3
    hard_per_query: int = 6
    classifier_positives: int = 0
    balance: float = 0.5
    balance_encoder: float = 0.5
    balance_classifier: float = 0.5
    temperature: float = 0.05
    normaliser: Normaliser = "paln"
    reduction: Reduction = "mean_anchors"
    head_dim: int = 0
    dropout: float = 0.1
    head_lr: float = 2.0
    classifier: RowOptimConfig = field(default_factory=lambda: RowOptimConfig(kind="adam", lr=1e-3))
    init: Literal["random", "texts"] = "texts"
    init_std: float = 0.02
    answer_by: Literal["both", "text", "classifier"] = "both"

    def __post_init__(self) -> None:
        check_ranges(
            self,
            "method",
            num_positives=0,
            hard_per_query=0,
            classifier_positives=0,
            head_dim=0,
            head_lr=0,
            init_std=0,
            balance=(0, 1),
            balance_encoder=(0, 1),
            balance_classifier=(0, 1),
            temperature=1e-4,
            dropout=(0, 0.99),
        )
        check_choices(self, "method")
        if self.answer_by not in ("both", self.answers):
            raise ConfigError(
                f"method.answer_by is {self.answer_by}, which method.balance={self.balance:g}"
                " does not train; use both"
            )

    @property
    def answers(self) -> str:
        """What answers: `answer_by`, or the only part that is trained."""
        if self.balance == 0:
            return "classifier"
        if self.balance == 1:
            return "text"
        return self.answer_by


@dataclass(frozen=True, slots=True)
class _Pools:
    """Labels that a batch meets.

    Attributes:
        texts: L_B, labels that the dual encoder scores.
        rows: Labels that the classifier scores.
    """

    texts: LabelPool
    rows: LabelPool


@dataclass(frozen=True, slots=True)
class UnidecInputs:
    """What the loss needs of a batch, on the host.

    Attributes:
        encoded_ids: Labels of this rank whose texts are encoded.
        label_tokens: Their token ids.
        texts: Positives among the labels that the dual encoder scores; None if it is not trained.
        rows: Positives among the labels that the classifier scores; None if it is not trained.
        local_ids: int64, rows of the classifier that are scored.
        keep_text: Dropout mask of this rank's queries in the head that meets texts.
        keep_row: The same in the head that meets rows.
        keep_label: The same of the labels' texts.
    """

    encoded_ids: Int64Array
    label_tokens: Ragged
    texts: Picked | None
    rows: Picked | None
    local_ids: Tensor
    keep_text: Tensor | None
    keep_row: Tensor | None
    keep_label: Tensor | None


class Unidec(Method):
    """Implements `methods.base.Method`."""

    def __init__(self, config: UnidecConfig, context: MethodContext) -> None:
        context.check_label_texts("unidec")
        self.config = config
        self.context = context
        head_dim = config.head_dim or context.dim
        self.heads = TwoHeads(context.dim, head_dim, config.answers, context.fusion.text_weight)
        self.heads.reset(context.seed)
        self.heads.to(context.device, context.dtype)
        super().__init__(self.heads)
        self.modules = {"head": self.heads}
        self.lr_factors = {"head": config.head_lr}
        row_columns = 0 if config.answers == "text" else head_dim
        self.bundle_spec = BundleSpec(LabelSide(row_columns))
        if config.balance < 1:
            rows = classifier_rows(
                context.partition,
                head_dim,
                config.classifier,
                init_std=config.init_std if config.init == "random" else 0.0,
                seed=context.seed,
                dtype=context.dtype,
                device=context.device,
            )
            self.tables = {"classifier": rows}

    def start(self) -> None:
        """Rows that start from texts get the vectors of the untrained encoder."""
        if self.config.init != "texts" or not self.tables:
            return
        with torch.no_grad():
            text_SE = F.normalize(self.heads.classifier(self.context.label_vectors()), dim=-1)
        # Vectors of length 1 have coordinates of deviation 1 / sqrt(E).
        scale = self.config.init_std * math.sqrt(self.heads.head_dim)
        self.tables["classifier"].weight_SD.copy_(text_SE * scale)

    def prepare(self, batch: Batch, shortlist: Shortlist | None) -> UnidecInputs:
        """Draws positives and hard negatives, and collects columns and pairs."""
        config = self.config
        pools = self._pools(batch, shortlist)
        has_texts = config.balance > 0
        encoded_ids = pools.texts.own if has_texts else pools.texts.own[:0]
        first = pools.texts.first
        local_ids = self.context.partition.to_local(pools.rows.own)
        return UnidecInputs(
            encoded_ids=encoded_ids,
            label_tokens=self.context.label_tokens(encoded_ids),
            texts=self._picked(batch, pools.texts) if has_texts else None,
            rows=self._picked(batch, pools.rows) if config.balance < 1 else None,
            local_ids=torch.from_numpy(local_ids),
            keep_text=self._keep_mask("text", batch, batch.start, batch.stop),
            keep_row=self._keep_mask("classifier", batch, batch.start, batch.stop),
            keep_label=self._keep_mask("labels", batch, first, first + len(encoded_ids)),
        )

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> StepOutput:
        """lambda L_D + (1 - lambda) L_C of the batch."""
        config = self.config
        inputs: UnidecInputs = self.inputs(batch, shortlist)
        query_BD, label_UD = self.context.encode_with_labels(
            batch, inputs.encoded_ids, inputs.label_tokens
        )
        text_BE = self.heads.text(query_BD, self._keep_factors(inputs.keep_text))
        row_BE = self.heads.classifier(query_BD, self._keep_factors(inputs.keep_row))
        # Both vectors of a query travel side by side, in one exchange.
        query_B2E = torch.cat([text_BE, row_BE], dim=1)
        query_G2E = gather_rows(query_B2E, len(batch.query_ids))
        text_GE, row_GE = query_G2E.split(self.heads.head_dim, dim=1)

        total = query_BD.new_zeros(())
        if inputs.texts is not None:
            label_UE = self.heads.text(label_UD, self._keep_factors(inputs.keep_label))
            text_loss = self._psl(text_GE, label_UE, inputs.texts, config.balance_encoder)
            total = total + config.balance * text_loss
        if inputs.rows is not None:
            (local_U,) = to_device([inputs.local_ids], self.context.device)
            row_UE = self.tables["classifier"].rows(local_U)
            row_loss = self._psl(row_GE, row_UE, inputs.rows, config.balance_classifier)
            total = total + (1 - config.balance) * row_loss
        searched_BE = text_BE.detach()
        if config.dropout and self.context.negatives.refreshed:
            # Hard negatives and clusters are those of the query itself, without dropout.
            with torch.no_grad():
                searched_BE = self.heads.text(query_BD)
        return StepOutput(total, len(batch.query_ids), searched_BE)

    def index_rows(self) -> Tensor:
        """Phi_D of the label texts."""
        with torch.no_grad():
            return self.heads.text(self.context.label_vectors())

    def answer_rows(self) -> Tensor:
        """Phi_D of the label texts alongside the rows, both of length 1, or one of them."""
        columns = []
        if self.config.answers != "classifier":
            columns.append(self.index_rows())
        if self.config.answers != "text":
            table = self.tables["classifier"]
            table.flush()
            columns.append(F.normalize(table.weight_SD, dim=-1))
        return torch.cat(columns, dim=1)

    def _keep_factors(self, mask: Tensor | None) -> Tensor | None:
        """A dropout mask as factors on the device."""
        return self.context.keep_factors(mask, self.config.dropout)

    def _keep_mask(self, purpose: str, batch: Batch, start: int, stop: int) -> Tensor | None:
        """Dropout mask of positions start .. stop - 1 of the batch's queries, or of its pool."""
        return self.context.keep_mask(
            f"dropout {purpose}",
            batch.step,
            start,
            stop,
            self.heads.head_dim,
            self.config.dropout,
        )

    def _pools(self, batch: Batch, shortlist: Shortlist | None) -> _Pools:
        config = self.config
        partition = self.context.partition
        hard = self.context.draw_hard_negatives(batch, shortlist, config.hard_per_query)
        if not config.num_positives:
            # All positives are drawn for either part, so there are no further ones.
            pool = LabelPool.of(partition, batch.positives, hard)
            return _Pools(pool, pool)
        drawn = self.context.draw_positives(batch, config.num_positives)
        text_pool = LabelPool.of(partition, drawn, hard)
        if not config.classifier_positives:
            return _Pools(text_pool, text_pool)
        # A larger draw contains the smaller one, so the classifier's pool contains the other.
        count = min(config.num_positives + config.classifier_positives, MAX_INT)
        more_drawn = self.context.draw_positives(batch, count)
        return _Pools(text_pool, LabelPool.of(partition, more_drawn, hard))

    def _picked(self, batch: Batch, pool: LabelPool) -> Picked:
        """The true labels of the batch's queries in a pool."""
        # Labels of the pool that no query of the batch has are negatives only, and no anchors.
        positives = batch.counting(batch.positives)
        is_positive = np.isin(pool.ids, positives.values)
        return Picked(
            positives=pool.positives(positives, batch),
            # Positives that count 0 in this step are neither positive nor negative.
            skipped=pool.pairs(batch.positives, batch.excluded, without=positives),
            count_G=torch.from_numpy(pool.count(positives)),
            num_labels=int(is_positive.sum()),
        )

    def _psl(self, query_GE: Tensor, column_UE: Tensor, picked: Picked, balance: float) -> Tensor:
        return pick_some_labels(
            query_GE,
            column_UE,
            picked,
            scale=1 / self.config.temperature,
            balance=balance,
            normaliser=self.config.normaliser,
            reduction=self.config.reduction,
        )


ENTRY = MethodEntry(
    UnidecConfig,
    Unidec,
    defaults=dual_encoder_defaults(hard=30),
    label_counts=("hard_per_query",),
    uses_label_texts=True,
    needs_batch=lambda config: True,
    uses_hard=lambda config: config.hard_per_query > 0,
    uses_fusion=lambda config: config.answers == "both",
    sections=("fusion",),
)
