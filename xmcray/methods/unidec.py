"""UniDEC: a dual encoder and a classifier trained as one, against some labels of each batch.

    paper          here                           meaning
    Phi_D, Phi_C   TwoHeads.text, .classifier     what meets label texts, and what meets classifier rows
    Psi            tables["classifier"]           classifier rows
    beta, eta      num_positives, hard_per_query  labels that a query brings into the batch's pool L_B
    beta_C         classifier_positives           "pos-clf": further ones, into the classifier's pool alone
    P_i^B          losses.psl.Picked              all true labels of a query in the pool, whoever brought them
    PSL            losses.psl.pick_some_labels    l_q2l and l_l2q
    lambda         balance                        L = lambda L_D + (1 - lambda) L_C

What is particular: labels are scored twice, by their text and by their row, and an answer adds both cosines. Hard
negatives are the nearest label texts. With lambda = 1 there are no rows: SupconDE. https://arxiv.org/abs/2405.03714
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmcray import draws
from xmcray.config import check_choices, check_range
from xmcray.errors import ConfigError
from xmcray.losses.psl import Normaliser, Picked, Reduction, pick_some_labels
from xmcray.methods.base import BundleSpec, Parts
from xmcray.methods.label_pool import LabelPool
from xmcray.negatives.sampler import draw_from_rows
from xmcray.nn.classifier import ShardedClassifier
from xmcray.nn.heads import Head, TwoHeads
from xmcray.nn.label_side import LabelSide
from xmcray.nn.row_table import RowOptimConfig, RowTable
from xmcray.parallel.collectives import gather_rows
from xmcray.types import Batch, LossTerms, Ragged, Shortlist


@dataclass(frozen=True, kw_only=True)
class UnidecConfig:
    """Section `method` of UniDEC.

    Attributes:
        num_positives: beta, positives of a query that enter the pool, drawn uniformly; 0 for all.
        hard_per_query: eta, drawn from the `negatives.hard` labels of a query's shortlist; the paper's shortlist has
            eta times the epochs between refreshes.
        classifier_positives: beta_C ("pos-clf"), further positives of a query in the classifier's pool alone.
        balance: lambda, share of the dual encoder's loss; 1 is SupconDE, 0 trains the classifier alone.
        balance_encoder, balance_classifier: lambda_D, lambda_C, share of queries to labels in either loss.
        temperature: tau of both losses; scores are divided by it.
        normaliser: "paln" divides by a query's positives in the pool, "pal" does not.
        reduction: "mean_anchors" takes the mean over queries or labels with a positive, "sum_per_query" the paper's
            sums by the number of queries.
        head_dim: width of either head; 0 is the encoder's.
        dropout: in both heads.
        head_lr: learning rate of the heads, as a multiple of the encoder's.
        classifier: optimiser of the rows.
        init: rows start as "random" normal draws of deviation `init_std`, or as "texts": vectors of the label texts
            with coordinates of that deviation.
        init_std: deviation of the rows' start values.
        answer_by: "text", "classifier" or "both"; a loss without a share has no part in "both".
        text_share: of "both", share of the cosine with the label text; 0.5 is the paper's concatenation.
    """

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
    text_share: float = 0.5

    def __post_init__(self) -> None:
        for name in (
            "num_positives",
            "hard_per_query",
            "classifier_positives",
            "head_dim",
            "head_lr",
            "init_std",
        ):
            check_range(f"method.{name}", getattr(self, name), low=0)
        for name in ("balance", "balance_encoder", "balance_classifier"):
            check_range(f"method.{name}", getattr(self, name), 0, 1)
        check_range("method.temperature", self.temperature, low=1e-4)
        check_range("method.dropout", self.dropout, 0, 0.99)
        check_range(
            "method.text_share", self.text_share, 0.01, 0.99
        )  # nearer to 0 or 1, answer_by says it better
        check_choices(self, "method")
        if self.answer_by not in ("both", self.answers):
            raise ConfigError(
                f"method.answer_by is {self.answer_by}, which method.balance={self.balance:g} does not train; use both"
            )

    @property
    def answers(self) -> str:
        """What answers: `answer_by` without what is not trained."""
        return {0.0: "classifier", 1.0: "text"}.get(self.balance, self.answer_by)


class Unidec:
    """Fulfils `methods.base.Method`."""

    def __init__(self, config: UnidecConfig, parts: Parts) -> None:
        parts.check_label_texts("unidec")
        self.config, self.parts = config, parts
        head_dim = config.head_dim or parts.dim
        self.heads = TwoHeads(parts.dim, head_dim, config.answers, config.text_share)
        self.heads.reset(parts.seed)
        self.head: Head = self.heads.to(parts.device, parts.dtype)
        self.modules: Mapping[str, nn.Module] = {"head": self.head}
        self.lr_factors: Mapping[str, float] = {"head": config.head_lr}
        self.bundle_spec = BundleSpec(
            LabelSide(row_columns=0 if config.answers == "text" else head_dim)
        )
        self.tables: Mapping[str, RowTable] = {}
        if config.balance < 1:
            std = config.init_std if config.init == "random" else 0.0
            rows = ShardedClassifier(
                parts.partition,
                head_dim,
                config.classifier,
                init_std=std,
                seed=parts.seed,
                dtype=parts.dtype,
                device=parts.device,
            )
            self.tables = {"classifier": rows.table}
            if config.init == "texts":
                text_SE = F.normalize(
                    self.heads.classifier(self.parts.label_vectors()).detach(), dim=-1
                )
                rows.table.weight_SD.copy_(text_SE * (config.init_std * math.sqrt(head_dim)))

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> LossTerms:
        """lambda L_D + (1 - lambda) L_C of the batch."""
        config, num_queries = self.config, len(batch.query_ids)
        pool, classifier_pool = self._pools(batch, shortlist)
        data = self.parts.data
        labels = pool.own if config.balance > 0 else pool.own[:0]
        vectors = self.parts.encode(
            Ragged.concatenate([batch.tokens, data.tokens(data.num_train + labels)])
        )
        query_BD, label_UD = vectors.split([len(batch.tokens), len(labels)])
        text_BE = self.heads.text(query_BD, self._keep("text", batch, batch.start, batch.stop))
        row_BE = self.heads.classifier(
            query_BD, self._keep("classifier", batch, batch.start, batch.stop)
        )
        text_GE, row_GE = gather_rows(torch.cat([text_BE, row_BE], dim=1), num_queries).split(
            self.heads.head_dim, dim=1
        )
        total = query_BD.new_zeros(())
        if config.balance > 0:
            first = int(np.searchsorted(pool.ids, self.parts.partition.start))
            label_UE = self.heads.text(
                label_UD, self._keep("labels", batch, first, first + len(labels))
            )
            total = total + config.balance * self._psl(
                text_GE, label_UE, batch, pool, config.balance_encoder
            )
        if config.balance < 1:
            own = torch.from_numpy(self.parts.partition.to_local(classifier_pool.own)).to(
                self.parts.device
            )
            row_UE = self.tables["classifier"].rows(own)
            loss = self._psl(row_GE, row_UE, batch, classifier_pool, config.balance_classifier)
            total = total + (1 - config.balance) * loss
        return LossTerms(total, num_queries, text_BE.detach())

    def index_rows(self) -> Tensor:
        """Phi_D of the label texts."""
        with torch.no_grad():
            return self.heads.text(self.parts.label_vectors())

    def answer_rows(self) -> Tensor:
        """Phi_D of the label texts beside the rows, both of length 1, or one of them."""
        by = self.config.answers
        parts = [] if by == "classifier" else [self.index_rows()]
        if by != "text":
            self.tables["classifier"].flush()
            parts.append(F.normalize(self.tables["classifier"].weight_SD, dim=-1))
        return torch.cat(parts, dim=1)

    def _keep(self, purpose: str, batch: Batch, start: int, stop: int) -> Tensor | None:
        """Dropout's factors for positions start .. stop - 1 of the batch's queries, or of its pool."""
        place = batch.step, start, stop
        return self.parts.keep_factors(
            f"dropout {purpose}", *place, self.heads.head_dim, self.config.dropout
        )

    def _pools(self, batch: Batch, shortlist: Shortlist | None) -> tuple[LabelPool, LabelPool]:
        """L_B of the dual encoder, and of the classifier."""
        config, part = self.config, self.parts.partition
        hard = self.parts.drawn_hard(batch, shortlist, config.hard_per_query)

        def drawn(count: int) -> Ragged:
            """The same draw for any count: the first of a larger one are the smaller one."""
            return draw_from_rows(
                batch.positives, count, draws.generator(self.parts.seed, "positives", batch.step)
            )

        some = drawn(config.num_positives) if config.num_positives else batch.positives
        pool = LabelPool.of(part, some, hard)
        if not (config.num_positives and config.classifier_positives):
            return pool, pool
        return pool, LabelPool.of(
            part, drawn(config.num_positives + config.classifier_positives), hard
        )

    def _psl(
        self, query_GE: Tensor, column_UE: Tensor, batch: Batch, pool: LabelPool, balance: float
    ) -> Tensor:
        config, device = self.config, query_GE.device
        picked = Picked(
            pool.pairs(batch.positives, device=device),
            pool.pairs(batch.excluded, device=device),
            torch.from_numpy(pool.count(batch.positives)).to(device),
            int(np.isin(pool.ids, batch.positives.values).sum()),
        )
        scale = 1 / config.temperature
        return pick_some_labels(
            query_GE, column_UE, picked, scale, balance, config.normaliser, config.reduction
        )
