"""ASTRA: a one-vs-all classifier trained on sampled labels, hard negatives from an index over its own rows.

    paper     here                         meaning
    P_i       batch.positives              labels of query i
    H_i       shortlist.take(...)          hard negatives of query i, from a stale index
    R         draws.uniform_labels(...)    uniform labels, drawn once for the whole global batch
    L / c     pool_weight                  importance weight of a label of R (Lemma 4.1)
    Eq. 2     losses.bce.sampled_bce

What is particular: only the rows of P_i, H_i and R are read, scored and updated, so a step costs the same for 10^4 and
10^7 labels. Two departures from the paper: R is shared by the global batch (the paper draws one for each query; both
are unbiased, the shared one is a dense product), and slots without a label are left out instead of padded.
`exact` replaces the sampled sum by the sum over all labels with the same everything else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from xmcray import draws
from xmcray.config import check_range
from xmcray.losses.bce import full_bce, sampled_bce
from xmcray.losses.pairs import pair_scores
from xmcray.methods.base import Parts
from xmcray.negatives.sampler import Candidates, capped_positives, gather_candidates
from xmcray.nn.classifier import ShardedClassifier
from xmcray.nn.heads import Head
from xmcray.nn.row_table import RowOptimConfig, RowTable
from xmcray.parallel.collectives import gather_rows
from xmcray.types import Batch, LossTerms, Ragged, Shortlist


@dataclass(frozen=True, kw_only=True)
class AstraConfig:
    """Section `method` of ASTRA.

    Attributes:
        classifier: optimiser of the classifier rows.
        init: rows start as "random" normal draws of deviation `init_std`, or as "texts": `init_std` times sqrt(D) times
            the start encoder's vectors of the label texts, so that labels with similar texts start alike.
        init_std: deviation of the rows' start values.
        dropout: on the query embedding, 0.7-0.85 in the paper.
        importance_weight: of a uniform negative: "unbiased" (L / c), "none" (1), or a number.
        max_positives: positives of a query that are scored, drawn uniformly; 0 for all.
        index_on: hard negatives are nearest "classifier" rows, or nearest "labels" (embeddings of label texts).
        offset: added to every score in the loss; "prior" is the log-odds of a positive among what the loss counts. It
            spares the rows from learning first that labels are rare, and changes no ranking. 0 is the paper's loss.
        exact: score all labels instead of a sample, in chunks of `chunk_labels`.
    """

    classifier: RowOptimConfig = field(default_factory=RowOptimConfig)
    init: Literal["random", "texts"] = "random"
    init_std: float = 0.02
    dropout: float = 0.5
    importance_weight: Literal["unbiased", "none"] | float = "unbiased"
    max_positives: int = 0
    index_on: Literal["classifier", "labels"] = "classifier"
    offset: Literal["prior"] | float = "prior"
    exact: bool = False
    chunk_labels: int = 8192

    def __post_init__(self) -> None:
        check_range("method.dropout", self.dropout, 0, 0.99)
        check_range("method.init_std", self.init_std, low=0)
        check_range("method.max_positives", self.max_positives, low=0)
        check_range("method.chunk_labels", self.chunk_labels, low=1)
        if isinstance(self.importance_weight, float):
            check_range("method.importance_weight", self.importance_weight, low=0)


class Astra:
    """Fulfils `methods.base.Method`."""

    def __init__(self, config: AstraConfig, parts: Parts) -> None:
        self.config = config
        self.parts = parts
        self.classifier = ShardedClassifier(
            parts.partition,
            parts.dim,
            config.classifier,
            init_std=config.init_std if config.init == "random" else 0.0,
            seed=parts.seed,
            dtype=parts.dtype,
            device=parts.device,
        )
        if config.init == "texts":
            self.classifier.table.weight_SD.copy_(self._label_vectors() * (config.init_std * math.sqrt(parts.dim)))
        self.tables: Mapping[str, RowTable] = {"classifier": self.classifier.table}
        self.modules: Mapping[str, nn.Module] = {}
        self.head = Head(parts.dim)
        self.offset = self._prior() if config.offset == "prior" else float(config.offset)

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> LossTerms:
        """Binary cross-entropy of the batch, over sampled labels or over all (Eq. 1, 2)."""
        query_BD = self.parts.encode(batch.tokens)
        query_GD = gather_rows(self._drop(query_BD, batch), len(batch.query_ids))
        terms = self._exact(query_GD, batch) if self.config.exact else self._sampled(query_GD, batch, shortlist)
        return LossTerms(terms.total, terms.num_queries, query_BD.detach())

    def index_rows(self) -> Tensor:
        """Classifier rows, or embeddings of the label texts."""
        if self.config.index_on == "classifier":
            return self.answer_rows()
        return self._label_vectors()

    def answer_rows(self) -> Tensor:
        """Classifier rows, up to date."""
        self.classifier.table.flush()
        return self.classifier.table.weight_SD

    def _label_vectors(self) -> Tensor:
        """[S, D], vectors of the texts of this rank's labels; no graph."""
        part, data = self.parts.partition, self.parts.data
        return self.parts.encode_plain(data.tokens(data.label_query_ids(part.start, part.stop)))

    def _drop(self, query_BD: Tensor, batch: Batch) -> Tensor:
        rate = self.config.dropout
        if not rate:
            return query_BD
        keep = draws.keep_mask(self.parts.seed, "dropout", batch.step, batch.start, batch.stop, query_BD.shape[1], rate)
        return query_BD * torch.from_numpy(keep).to(query_BD.device) / (1 - rate)

    def _sampled(self, query_GD: Tensor, batch: Batch, shortlist: Shortlist | None) -> LossTerms:
        found = self._candidates(batch, shortlist)
        row_UD = self.classifier.table.rows(found.row_ids)
        pair_score_P = pair_scores(query_GD, row_UD, found.pair_query, found.pair_row)
        pool_score_GC = query_GD @ row_UD.index_select(0, found.pool_rows).T
        weight_P = None if found.pair_weight is None else found.pair_weight.to(query_GD)
        return sampled_bce(
            pair_score_P + self.offset,
            found.pair_is_positive,
            weight_P,
            pool_score_GC + self.offset,
            found.skip_query,
            found.skip_column,
            self._pool_weight(),
        )

    def _candidates(self, batch: Batch, shortlist: Shortlist | None) -> Candidates:
        data, negatives, seed = self.parts.data, self.parts.negatives, self.parts.seed
        unbiased = self.config.importance_weight == "unbiased"
        positives, weight_G = capped_positives(batch, self.config.max_positives, seed, unbiased)
        width = negatives.hard_at(batch.epoch)
        hard = shortlist.take(batch.query_ids, width) if shortlist and width else Ragged.empty(len(batch.query_ids))
        pool = draws.uniform_labels(seed, batch.step, data.num_labels, negatives.uniform_at(batch.epoch))
        return gather_candidates(batch, hard, pool, positives, weight_G, self.parts.partition).to(self.parts.device)

    def _pool_weight(self) -> float:
        weight, uniform = self.config.importance_weight, self.parts.negatives.uniform
        if weight == "none" or not uniform:
            return 1.0
        return max(1.0, self.parts.data.num_labels / uniform) if weight == "unbiased" else float(weight)

    def _prior(self) -> float:
        """log(positives / negatives) of an average query, negatives counted with their importance weight."""
        data, asked = self.parts.data, self.parts.negatives
        ids = data.query_ids[draws.generator(self.parts.seed, "prior").permutation(len(data.query_ids))[:10_000]]
        positives = float(data.positives(ids).lengths.mean())
        sampled = asked.hard + min(asked.uniform, data.num_labels) * self._pool_weight()
        negatives = data.num_labels if self.config.exact else min(sampled, data.num_labels)
        return math.log(positives / max(negatives, 1.0))

    def _exact(self, query_GD: Tensor, batch: Batch) -> LossTerms:
        def own_pairs(lists: Ragged) -> tuple[Tensor, Tensor]:
            own = self.parts.partition.owns(lists.values)
            local = self.parts.partition.to_local(lists.values[own])
            device = self.parts.device
            return torch.from_numpy(lists.row_ids[own]).to(device), torch.from_numpy(local).to(device)

        row_SD = self.classifier.table.rows(None)
        return full_bce(
            query_GD,
            row_SD,
            *own_pairs(batch.positives),
            *own_pairs(batch.excluded),
            self.config.chunk_labels,
            self.offset,
        )
