"""PRIME: a query is near the prototypes of its labels (Dahiya et al., NAACL 2025).

    paper        here                     meaning
    h_q, h_l     query_BD, text_UD        vectors of a query's and of a label's text, length 1
    c_l          tables["centroids"]      running mean of the label's queries
    v_l          modules["prototypes"]    free vector that a cluster of labels shares
    z_l          prototype_UD             l2norm(mean(g([h_l, c_l, v_l]))), nn.prototypes
    Eq. 13       losses.triplet.triplet   dynamic margin between a positive and the batch's other labels
    R, Eq. 6-7   losses.triplet.regulariser

What is particular: answers are searched among prototypes, which are more than a text and less than a classifier row.
Negatives are the labels of the global batch. Departures from the authors' code: centroids move (theirs stay at their
start), a label met by several queries is one column, and hard negatives from a stale index over the prototypes can be
added to the columns. "PRIME (W)", a one-vs-all classifier on the frozen encoder, is an ASTRA run that starts from this
run's encoder with `optim.lr=0`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from xmcray import draws
from xmcray.config import check_choices, check_range
from xmcray.errors import ConfigError
from xmcray.evaluation.metrics import inverse_propensity
from xmcray.losses.pairs import Pairs
from xmcray.losses.triplet import regulariser, triplet
from xmcray.methods.base import BundleSpec, Parts
from xmcray.methods.label_pool import LabelPool
from xmcray.methods.starts import BLOCK, encoded, label_centroids
from xmcray.negatives.clusters import balanced_clusters
from xmcray.negatives.sampler import draw_from_rows
from xmcray.nn.heads import Head, NormalisedHead
from xmcray.nn.label_side import LabelSide
from xmcray.nn.prototypes import PrototypeNetwork, move_centroids
from xmcray.nn.row_table import RowOptimConfig, RowTable
from xmcray.parallel import collectives
from xmcray.parallel.collectives import gather_parts, gather_rows
from xmcray.types import Batch, Int64Array, LossTerms, Ragged, Shortlist

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PrimeConfig:
    """Section `method` of PRIME.

    Attributes:
        num_positives: of a query, drawn in every step (PRIME: 2, PRIME-lite: 1).
        positives: drawn with probability proportional to "inverse_propensity", or "uniform".
        free_vectors: rows of the bank, a power of two; no more are made than fit into the number of labels.
        centroid_momentum: what a centroid keeps of itself when it meets a query.
        feed_forward, dropout: of the prototype network.
        gamma_min, gamma_max: the margin's bounds; equal for a fixed margin.
        margin_inverted: the sign of Eq. 13 as printed, for pairs nearly tied.
        num_negatives: hardest negatives of an anchor that count; 0 for all.
        reduction: of an anchor's negatives: "weighted" by their hardness and summed, or their "mean".
        weight_temperature: of those weights. weights_detached: they carry no gradient.
        query_to_text, text_to_query: weights of the losses between queries and label texts.
        regulariser: lambda, weight of R. regulariser_margin: m'.
        regulariser_hinge: False averages over all terms without a hinge (Eq. 6, 7).
        hard_per_query: drawn from the `negatives.hard` labels of a query's shortlist, where there is one.
    """

    num_positives: int = 2
    positives: Literal["inverse_propensity", "uniform"] = "inverse_propensity"
    free_vectors: int = 65_536
    centroid_momentum: float = 0.95
    feed_forward: int = 1024
    dropout: float = 0.1
    gamma_min: float = 0.1
    gamma_max: float = 0.3
    margin_inverted: bool = False
    num_negatives: int = 100
    reduction: Literal["weighted", "mean"] = "weighted"
    weight_temperature: float = 0.1
    weights_detached: bool = False
    query_to_text: float = 1.0
    text_to_query: float = 1.0
    regulariser: float = 0.1
    regulariser_margin: float = 0.1
    regulariser_hinge: bool = True
    hard_per_query: int = 2

    def __post_init__(self) -> None:
        check_choices(self, "method")
        for name in ("num_positives", "feed_forward", "hard_per_query", "free_vectors"):
            check_range(f"method.{name}", getattr(self, name), low=1)
        for name in ("num_negatives", "query_to_text", "text_to_query", "regulariser", "gamma_min"):
            check_range(f"method.{name}", getattr(self, name), low=0)
        check_range("method.centroid_momentum", self.centroid_momentum, 0, 1)
        check_range("method.dropout", self.dropout, 0, 0.99)
        check_range("method.gamma_max", self.gamma_max, low=self.gamma_min)
        check_range("method.weight_temperature", self.weight_temperature, low=1e-4)
        if self.free_vectors & (self.free_vectors - 1):
            near = 1 << self.free_vectors.bit_length() - 1
            raise ConfigError(
                f"method.free_vectors is {self.free_vectors}, expected a power of two; take {near} or {2 * near}"
            )


class Prime:
    """Fulfils `methods.base.Method`."""

    def __init__(self, config: PrimeConfig, parts: Parts) -> None:
        self.config, self.parts = config, parts
        data, size = parts.data, parts.partition.size
        parts.check_label_texts("prime")
        self.num_vectors = min(config.free_vectors, 1 << data.num_labels.bit_length() - 1)
        self.head: Head = NormalisedHead(parts.dim)
        seed = draws.torch_seed(parts.seed, "prototypes")
        network = PrototypeNetwork(
            parts.dim, config.feed_forward, data.num_labels, self.num_vectors, seed
        )
        self.network = network.to(parts.device, parts.dtype)
        rows_SD = torch.zeros(size, parts.dim, dtype=parts.dtype, device=parts.device)
        self.centroids = RowTable(
            rows_SD, RowOptimConfig(kind="sgd", momentum=0.0)
        )  # kept, but never optimised
        self.tables: Mapping[str, RowTable] = {"centroids": self.centroids}
        self.modules: Mapping[str, nn.Module] = {"prototypes": self.network}
        self.lr_factors: Mapping[str, float] = {}
        self.bundle_spec = BundleSpec(LabelSide(prototypes=self.network))
        self.label_weight_L = np.ones(data.num_labels)
        if config.positives == "inverse_propensity":
            card, counts = data.corpus.card, data.corpus.train_counts[data.corpus.label_order]
            self.label_weight_L = inverse_propensity(
                counts, card.num_train, card.propensity_a, card.propensity_b
            )
        self._triplet = partial(
            triplet,
            gamma_min=config.gamma_min,
            gamma_max=config.gamma_max,
            inverted=config.margin_inverted,
            num_negatives=config.num_negatives,
            temperature=config.weight_temperature if config.reduction == "weighted" else None,
            detached=config.weights_detached,
        )
        self._regulariser = partial(
            regulariser,
            margin=config.regulariser_margin,
            num_negatives=config.num_negatives,
            hinge=config.regulariser_hinge,
        )

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> LossTerms:
        """l(h_q, z_l) + l(h_q, h_l) + l(h_l, h_q) + lambda R over the global batch; then the centroids move."""
        if batch.step == 0:
            self._start()
        config, data, num_queries = self.config, self.parts.data, len(batch.query_ids)
        drawn = self._drawn(batch)
        hard = self.parts.drawn_hard(batch, shortlist, config.hard_per_query)
        pool = LabelPool.of(self.parts.partition, drawn, hard)
        tokens = Ragged.concatenate([batch.tokens, data.tokens(data.num_train + pool.own)])
        query_BD, text_UD = self.head(self.parts.encode(tokens)).split(
            [len(batch.tokens), len(pool.own)]
        )
        prototype_UD = self._prototypes(text_UD, pool.own, self._keep(batch, pool))
        query_GD = gather_rows(query_BD, num_queries)
        text_PD, prototype_PD = gather_parts(torch.cat([text_UD, prototype_UD], dim=1)).chunk(
            2, dim=1
        )
        b_BP, s_BP = query_BD @ prototype_PD.T, query_BD @ text_PD.T
        of_queries, of_labels = self._pairs(batch, drawn, pool)
        total = (
            self._triplet(b_BP, *of_queries)
            + config.query_to_text * self._triplet(s_BP, *of_queries)
        ) / num_queries
        label_loss = self._triplet(text_UD @ query_GD.T, *of_labels) / len(np.unique(drawn.values))
        total = (
            total
            + config.text_to_query * label_loss
            + config.regulariser * self._regulariser(b_BP, s_BP, *of_queries)
        )
        rows, labels = self._own(batch.positives)
        move_centroids(
            self.centroids.weight_SD, labels, query_GD.detach(), rows, config.centroid_momentum
        )
        return LossTerms(total * num_queries, num_queries, query_BD.detach())

    def index_rows(self) -> Tensor:
        """Prototypes of this rank's labels."""
        return self.answer_rows()

    def answer_rows(self) -> Tensor:
        """Prototypes of this rank's labels."""
        ids = np.arange(self.parts.partition.start, self.parts.partition.stop)
        text_SD = self._texts(ids)
        with torch.no_grad():
            for i in range(0, len(ids), BLOCK):
                text_SD[i : i + BLOCK] = self._prototypes(
                    text_SD[i : i + BLOCK], ids[i : i + BLOCK], None
                )
        return text_SD

    def _drawn(self, batch: Batch) -> Ragged:
        generator = draws.generator(self.parts.seed, "positives", batch.step)
        weight_T = self.label_weight_L[batch.positives.values]
        return draw_from_rows(batch.positives, self.config.num_positives, generator, weight_T)

    def _pairs(
        self, batch: Batch, drawn: Ragged, pool: LabelPool
    ) -> tuple[tuple[Pairs, Pairs], tuple[Pairs, Pairs]]:
        """Positives, and all that is no negative: of its own queries among all labels, and the other way round."""
        device, own = self.parts.device, (batch.start, batch.stop)
        lists = [drawn], [batch.positives, batch.excluded]
        whole = LabelPool(pool.part, pool.ids, pool.ids)
        drawn_Q, true_Q = (
            whole.pairs(*(part.slice(*own) for part in some), device=device) for some in lists
        )
        drawn_L, true_L = (pool.pairs(*some, device=device) for some in lists)
        return (drawn_Q, true_Q), (
            Pairs(drawn_L.columns, drawn_L.rows),
            Pairs(true_L.columns, true_L.rows),
        )

    def _prototypes(self, text_UD: Tensor, label_ids: Int64Array, keep: Tensor | None) -> Tensor:
        """[U, D] of labels of this rank; a gradient flows to texts, network and free vectors."""
        local = torch.from_numpy(self.parts.partition.to_local(label_ids)).to(self.parts.device)
        found: Tensor = self.network(
            text_UD, self.centroids.weight_SD[local], local + self.parts.partition.start, keep
        )
        return found

    def _keep(self, batch: Batch, pool: LabelPool) -> Tensor | None:
        """Dropout mask of this rank's labels by their place among the pool's: the same whoever owns them."""
        first = int(np.searchsorted(pool.ids, self.parts.partition.start))
        place = batch.step, first, first + len(pool.own)
        return self.parts.keep_factors(
            "prototypes", *place, self.network.mask_width, self.config.dropout
        )

    def _own(self, lists: Ragged) -> tuple[Tensor, Tensor]:
        """Row and local label of each entry that is a label of this rank."""
        own, device = self.parts.partition.owns(lists.values), self.parts.device
        local = self.parts.partition.to_local(lists.values[own])
        return torch.from_numpy(lists.row_ids[own]).to(device), torch.from_numpy(local).to(device)

    def _start(self) -> None:
        """Clusters and centroids from the encoder as it is before the first step; checkpoints keep both; collective."""
        data, first = self.parts.data, collectives.rank() == 0
        if first and self.num_vectors < self.config.free_vectors:
            message = "method.free_vectors is %d, clipped to %d for %d labels"
            logger.warning(message, self.config.free_vectors, self.num_vectors, data.num_labels)
        # on one rank only, and for this moment
        text_LD, place = np.empty((data.num_labels if first else 0, self.parts.dim), np.float32), 0
        for _, vectors in encoded(self.parts, data.label_query_ids(0, data.num_labels), self.head):
            if first:
                text_LD[place : place + len(vectors)] = vectors.float().cpu().numpy()
                place += len(vectors)
        clusters = (
            balanced_clusters(text_LD, self.num_vectors, self.parts.seed)
            if first
            else np.empty(0, np.int64)
        )
        del text_LD
        found = collectives.gather_ragged(torch.from_numpy(clusters).to(self.parts.device))
        self.network.cluster_L.copy_(torch.cat(found))
        self.centroids.weight_SD.copy_(label_centroids(self.parts, self.head))

    def _texts(self, label_ids: Int64Array) -> Tensor:
        """[n, D], vectors of label texts; no graph."""
        data = self.parts.data
        found: Tensor = self.head(self.parts.encode_plain(data.tokens(data.num_train + label_ids)))
        return found.to(self.centroids.weight_SD)
