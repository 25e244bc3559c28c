"""PRIME: a query is near the prototypes of its labels (Dahiya et al., NAACL 2025).

    paper        here                     meaning
    h_q, h_l     query_BD, text_UD        vectors of a query's and of a label's text, length 1
    c_l          centroid_SD              running mean of the label's queries
    v_l          modules["prototypes"]    free vector that a cluster of labels shares
    z_l          prototype_UD             l2norm(mean(g([h_l, c_l, v_l]))), nn.prototypes
    Eq. 13       losses.triplet.triplet   dynamic margin between a positive and other labels
    R, Eq. 6-7   losses.triplet.regulariser

Prototypes answer queries; they hold more than a text and less than a classifier row. Negatives are
the labels of the global batch. Departures from the authors' code: centroids move (theirs keep their
initial values), a label met by several queries is one column, and hard negatives from a stale index
over the prototypes can be added to the columns. "PRIME (W)", a one-vs-all classifier on the frozen
encoder, is an ASTRA run that starts from this run's encoder with `optim.lr=0`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from xmcray import draws
from xmcray.config import check_choices, check_ranges
from xmcray.errors import ConfigError
from xmcray.evaluation.metrics import inverse_propensity
from xmcray.losses.pairs import Pairs
from xmcray.losses.triplet import regulariser, triplet
from xmcray.methods.base import (
    BundleSpec,
    Method,
    MethodContext,
    MethodEntry,
    dual_encoder_defaults,
)
from xmcray.methods.initialisation import BLOCK, encoded_blocks, label_centroids
from xmcray.methods.label_pool import LabelPool
from xmcray.negatives.clusters import balanced_clusters
from xmcray.negatives.sampler import draw_from_rows
from xmcray.nn.heads import NormalisedHead
from xmcray.nn.label_side import LabelSide
from xmcray.nn.prototypes import PrototypeNetwork, move_centroids
from xmcray.parallel import collectives
from xmcray.parallel.collectives import gather_parts, gather_rows
from xmcray.parallel.partition import LabelPartition
from xmcray.parallel.transfers import to_device
from xmcray.types import Batch, Float64Array, Int64Array, Ragged, Shortlist, StepOutput, spans

logger = logging.getLogger(__name__)

LABELS_AT_ONCE = 1 << 22  # whose clusters rank 0 sends to the others


@dataclass(frozen=True, kw_only=True)
class PrimeConfig:
    """Section `method` of PRIME.

    Attributes:
        num_positives: of a query, drawn in every step (PRIME: 2, PRIME-lite: 1).
        positives: drawn with probability proportional to "inverse_propensity", or "uniform".
        free_vectors: rows of the bank, a power of two; at most as many as fit into the number of
            labels.
        centroid_momentum: share of a centroid that stays when it meets a query.
        feed_forward: width of the prototype network's inner layer.
        dropout: in the prototype network.
        gamma_min: lower bound of the margin; equal to `gamma_max` for a fixed margin.
        gamma_max: upper bound of the margin.
        margin_inverted: the sign of Eq. 13 as printed, for nearly tied pairs.
        num_negatives: hardest negatives of an anchor that count; 0 for all.
        reduction: of an anchor's negatives: "weighted" by their hardness and summed, or their
            "mean".
        weight_temperature: of those weights.
        weights_detached: the weights carry no gradient.
        query_to_text: weight of the loss from queries to label texts.
        text_to_query: weight of the loss from label texts to queries.
        regulariser: lambda, weight of R.
        regulariser_margin: m'.
        regulariser_hinge: False averages over all terms without a hinge (Eq. 6, 7).
        hard_per_query: drawn from the `negatives.hard` labels of a query's shortlist, if it has one.
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
        check_ranges(
            self,
            "method",
            num_positives=1,
            feed_forward=1,
            hard_per_query=1,
            free_vectors=1,
            num_negatives=0,
            query_to_text=0,
            text_to_query=0,
            regulariser=0,
            regulariser_margin=(-2, 2),  # as far as cosines differ
            gamma_min=0,
            centroid_momentum=(0, 1),
            dropout=(0, 0.99),
            gamma_max=self.gamma_min,
            weight_temperature=1e-4,
        )
        # A power of two has a single bit, and none is left when its lowest bit is cleared.
        if self.free_vectors & (self.free_vectors - 1):
            below = 1 << self.free_vectors.bit_length() - 1
            raise ConfigError(
                f"method.free_vectors is {self.free_vectors}, expected a power of two;"
                f" take {below} or {2 * below}"
            )


@dataclass(frozen=True, slots=True)
class PrimeOutput(StepOutput):
    """Output of a step, with the vectors that move the centroids.

    Attributes:
        query_GD: Vectors of all queries of the batch, without a graph.
    """

    query_GD: Tensor


@dataclass(frozen=True, slots=True)
class _AnchorPairs:
    """Pairs (anchor, column) of one direction of the triplet loss.

    Attributes:
        positives: Drawn positives.
        not_negatives: All positives and excluded labels.
    """

    positives: Pairs
    not_negatives: Pairs

    def to(self, device: torch.device) -> _AnchorPairs:
        """The same pairs on another device."""
        return _AnchorPairs(self.positives.to(device), self.not_negatives.to(device))


@dataclass(frozen=True, slots=True)
class PrimeInputs:
    """What the loss needs of a batch, on the host.

    Attributes:
        label_ids: int64 [U], this rank's labels of the pool.
        label_tokens: Their token ids.
        keep_UD: Dropout mask of their prototypes; None without dropout.
        query_pairs: Queries of this rank with the labels of all ranks.
        label_pairs: Labels of this rank with the queries of all ranks.
        num_label_anchors: Labels with a drawn positive, of all ranks.
    """

    label_ids: Int64Array
    label_tokens: Ragged
    keep_UD: Tensor | None
    query_pairs: _AnchorPairs
    label_pairs: _AnchorPairs
    num_label_anchors: int


class Prime(Method):
    """Implements `methods.base.Method`."""

    def __init__(self, config: PrimeConfig, context: MethodContext) -> None:
        context.check_label_texts("prime")
        super().__init__(NormalisedHead(context.dim))
        self.config = config
        self.context = context
        self.num_vectors = _in_force(config, context.data.num_labels).free_vectors
        network = PrototypeNetwork(
            context.dim,
            config.feed_forward,
            self.num_vectors,
            seed=draws.torch_seed(context.seed, "prototypes"),
        )
        self.network = network.to(context.device, context.dtype)
        self.modules = {"prototypes": self.network}
        self.bundle_spec = BundleSpec(LabelSide(prototypes=self.network), cluster_state="clusters")
        size = context.partition.size
        self.centroid_SD = torch.zeros(
            size,
            context.dim,
            dtype=context.dtype,
            device=context.device,
        )
        self.cluster_S = torch.zeros(size, dtype=torch.int64, device=context.device)

    def start(self) -> None:
        """Clusters labels by their texts and averages the queries of each label; collective."""
        data = self.context.data
        if collectives.rank() == 0 and self.num_vectors < self.config.free_vectors:
            logger.warning(
                "method.free_vectors is %d, clipped to %d for %d labels",
                self.config.free_vectors,
                self.num_vectors,
                data.num_labels,
            )
        self.cluster_S.copy_(self._clusters())
        self.centroid_SD.copy_(label_centroids(self.context, self.head))

    def prepare(self, batch: Batch, shortlist: Shortlist | None) -> PrimeInputs:
        """Draws positives and hard negatives, and collects columns and pairs."""
        drawn = self._draw_positives(batch)
        hard = self.context.draw_hard_negatives(batch, shortlist, self.config.hard_per_query)
        pool = LabelPool.of(self.context.partition, drawn, hard)
        return PrimeInputs(
            label_ids=pool.own,
            label_tokens=self.context.label_tokens(pool.own),
            keep_UD=self._keep_mask(batch, pool),
            query_pairs=self._query_pairs(batch, drawn, pool),
            label_pairs=self._label_pairs(batch, drawn, pool),
            num_label_anchors=len(np.unique(drawn.values)),
        )

    def loss(self, batch: Batch, shortlist: Shortlist | None) -> StepOutput:
        """l(h_q, z_l) + l(h_q, h_l) + l(h_l, h_q) + lambda R over the global batch."""
        config = self.config
        device = self.context.device
        inputs: PrimeInputs = self.inputs(batch, shortlist)
        query_BD, text_UD = self.context.encode_with_labels(
            batch, inputs.label_ids, inputs.label_tokens
        )
        query_BD = self.head(query_BD)
        text_UD = self.head(text_UD)
        keep_UD = self.context.keep_factors(inputs.keep_UD, config.dropout)
        prototype_UD = self._prototypes(text_UD, inputs.label_ids, keep_UD)
        query_GD = gather_rows(query_BD, len(batch.query_ids))
        # Texts and prototypes travel side by side, in one exchange.
        label_P2D = gather_parts(torch.cat([text_UD, prototype_UD], dim=1))
        text_PD, prototype_PD = label_P2D.chunk(2, dim=1)

        # Queries of this rank as anchors, against the labels of all ranks.
        to_prototypes_BP = query_BD @ prototype_PD.T
        to_texts_BP = query_BD @ text_PD.T
        query_pairs = inputs.query_pairs.to(device)
        query_loss = self._triplet(to_prototypes_BP, query_pairs)
        text_loss = self._triplet(to_texts_BP, query_pairs)
        query_loss = query_loss + config.query_to_text * text_loss

        # Labels of this rank as anchors, against the queries of all ranks.
        label_pairs = inputs.label_pairs.to(device)
        label_loss = self._triplet(text_UD @ query_GD.T, label_pairs)

        # Each term is a mean over anchors of its own (queries, labels with a drawn positive, terms
        # of R that are not 0), so their sum has no common divisor left for the step.
        total = query_loss / len(query_GD)
        total = total + config.text_to_query * (label_loss / inputs.num_label_anchors)
        total = total + config.regulariser * regulariser(
            to_prototypes_BP,
            to_texts_BP,
            query_pairs.positives,
            query_pairs.not_negatives,
            margin=config.regulariser_margin,
            num_negatives=config.num_negatives,
            hinge=config.regulariser_hinge,
        )
        return PrimeOutput(
            total,
            divisor=1,
            query_vectors=query_BD.detach(),
            query_GD=query_GD.detach(),
        )

    def after_step(self, batch: Batch, output: StepOutput) -> None:
        """Moves the centroids of the batch's positives towards their queries."""
        assert isinstance(output, PrimeOutput)
        partition = self.context.partition
        positives = batch.positives
        # A label's own text is no query of it, as in the start of the centroids.
        is_query_G = batch.query_ids < self.context.data.num_train
        # All positives of the batch, and not only the drawn ones of the loss.
        is_own = partition.owns(positives.values) & is_query_G[positives.row_ids]
        local_ids = partition.to_local(positives.values[is_own])
        queries = positives.row_ids[is_own]
        move_centroids(
            self.centroid_SD,
            torch.from_numpy(local_ids),
            output.query_GD,
            torch.from_numpy(queries),
            self.config.centroid_momentum,
        )

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Centroids, and the row of the bank that each label shares with its cluster."""
        return {"centroids": self.centroid_SD, "clusters": self.cluster_S}

    def answer_rows(self) -> Tensor:
        """Prototypes of this rank's labels."""
        ids = np.arange(self.context.partition.start, self.context.partition.stop)
        label_SD: Tensor = self.head(self.context.label_vectors()).to(self.centroid_SD)
        with torch.no_grad():
            # Each block of prototypes replaces its texts, so no second [S, D] is in memory.
            for block in spans(len(ids), BLOCK):
                label_SD[block] = self._prototypes(label_SD[block], ids[block], None)
        return label_SD

    def _draw_positives(self, batch: Batch) -> Ragged:
        generator = draws.generator(self.context.seed, "positives", batch.step)
        weight_T = self.draw_weights(batch.positives.values)
        return draw_from_rows(batch.positives, self.config.num_positives, generator, weight_T)

    def draw_weights(self, labels: Int64Array) -> Float64Array | None:
        """float64, weights that positives are drawn with; None draws uniformly."""
        if self.config.positives == "uniform":
            return None
        corpus = self.context.data.corpus
        card = corpus.card
        # The counts are by source id. They are mapped, so only those of the batch are in memory.
        counts = corpus.train_counts[corpus.label_order[labels]]
        return inverse_propensity(counts, card.num_train, card.propensity_a, card.propensity_b)

    def _triplet(self, score_AC: Tensor, pairs: _AnchorPairs) -> Tensor:
        config = self.config
        return triplet(
            score_AC,
            pairs.positives,
            pairs.not_negatives,
            gamma_min=config.gamma_min,
            gamma_max=config.gamma_max,
            inverted=config.margin_inverted,
            num_negatives=config.num_negatives,
            temperature=config.weight_temperature if config.reduction == "weighted" else None,
            detached=config.weights_detached,
        )

    def _query_pairs(self, batch: Batch, drawn: Ragged, pool: LabelPool) -> _AnchorPairs:
        """Queries of this rank with the labels of all ranks."""
        # Texts and prototypes are gathered, so here every label of the pool is a column.
        all_columns = LabelPool(pool.partition, pool.ids, own=pool.ids)
        drawn_own = drawn.slice(batch.start, batch.stop)
        positives_own = batch.positives.slice(batch.start, batch.stop)
        excluded_own = batch.excluded.slice(batch.start, batch.stop)
        return _AnchorPairs(
            all_columns.positives(drawn_own, batch, first=batch.start),
            all_columns.pairs(positives_own, excluded_own),
        )

    def _label_pairs(self, batch: Batch, drawn: Ragged, pool: LabelPool) -> _AnchorPairs:
        """Labels of this rank with the queries of all ranks."""
        return _AnchorPairs(
            pool.positives(drawn, batch).swapped(),
            pool.pairs(batch.positives, batch.excluded).swapped(),
        )

    def _prototypes(self, text_UD: Tensor, label_ids: Int64Array, keep: Tensor | None) -> Tensor:
        """Prototypes [U, D] of labels of this rank.

        A gradient flows to texts, network and free vectors.
        """
        local_ids = torch.from_numpy(self.context.partition.to_local(label_ids))
        (local_U,) = to_device([local_ids], self.context.device)
        prototype_UD: Tensor = self.network(
            text_UD,
            self.centroid_SD[local_U],
            self.cluster_S[local_U],
            keep,
        )
        return prototype_UD

    def _keep_mask(self, batch: Batch, pool: LabelPool) -> Tensor | None:
        """Dropout mask of this rank's labels by their position in the whole pool."""
        return self.context.keep_mask(
            "prototypes",
            batch.step,
            pool.first,
            pool.first + len(pool.own),
            self.network.mask_width,
            self.config.dropout,
        )

    def _clusters(self) -> Tensor:
        """int64 [S], clusters of this rank's labels. Rank 0 clusters the texts of all labels."""
        context = self.context
        num_labels = context.data.num_labels
        is_first = collectives.rank() == 0
        # Only rank 0 keeps the vectors; the others take part in encoding them.
        num_kept = num_labels if is_first else 0
        text_LD = np.empty((num_kept, context.dim), np.float32)
        row = 0
        label_ids = np.arange(num_labels)
        for _, vectors in encoded_blocks(context, label_ids, context.label_tokens, self.head):
            if is_first:
                stop = row + len(vectors)
                text_LD[row:stop] = vectors.float().cpu().numpy()
                row = stop
        cluster_L = torch.empty(0, dtype=torch.int64)
        if is_first:
            clusters = balanced_clusters(text_LD, self.num_vectors, context.seed)
            cluster_L = torch.from_numpy(clusters)
        return own_part(cluster_L, context.partition)


def own_part(cluster_L: Tensor, partition: LabelPartition) -> Tensor:
    """This rank's part of what rank 0 has for all labels; collective.

    Args:
        cluster_L: int64, on the host of rank 0; other ranks have nothing.
        partition: labels of this rank.
    """
    own_S = torch.empty(partition.size, dtype=torch.int64)
    # A device never holds a number for each label, of which there may be 10^8.
    for block in spans(partition.num_labels, LABELS_AT_ONCE):
        part = torch.empty(block.stop - block.start, dtype=torch.int64)
        if collectives.rank() == 0:
            part = cluster_L[block]
        collectives.broadcast(part)
        low = max(block.start, partition.start)
        high = min(block.stop, partition.stop)
        if low < high:
            overlap = part[low - block.start : high - block.start]
            own_S[low - partition.start : high - partition.start] = overlap
    return own_S


def _in_force(config: PrimeConfig, num_labels: int) -> PrimeConfig:
    """The settings with the size of the bank for a number of labels."""
    # More vectors than labels would stay unused, and clusters come in powers of two.
    largest_power = 1 << num_labels.bit_length() - 1
    return dataclasses.replace(config, free_vectors=min(config.free_vectors, largest_power))


ENTRY = MethodEntry(
    PrimeConfig,
    Prime,
    defaults=dual_encoder_defaults(),
    label_counts=("hard_per_query",),
    uses_label_texts=True,
    needs_batch=lambda config: True,
    in_force=_in_force,
)
