"""Nearest neighbours vote for labels (RAE-XMC, Eq. 8). Pure numpy.

    paper                   here           meaning
    K = [X_train ; Z]       Neighbours     keys: vectors of training queries and of label texts
    V = [lam Y ; (1-lam) I] Votes          a query votes for its positives, a label for itself
    lam, tau, b             MemoryConfig   weight, temperature, keys
    Eq. 8                   joint=True     one softmax over the b nearest keys of both kinds
    Eq. 11, OvA + kNN       joint=False    two searches, two softmaxes, a convex sum

With weight 0 only labels are searched. With weight 1 only training queries are searched.

Letters of axes here, in addition to those in types.py:

    K  keys of a query                 b  the nearest of its keys, which vote
    J  labels that joined later        P  pairs of query and label with a vote
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from xmcray import config as configs
from xmcray.config import check_range
from xmcray.retrieval.neighbours import Neighbours
from xmcray.types import (
    BoolArray,
    Float64Array,
    Int64Array,
    Ragged,
    TopLabels,
    pairs_of,
    weights_of,
)

VOTE_QUERIES = 128  # queries whose votes are counted at once
MAX_POWER = 700.0  # exp of a larger number overflows float64


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """How neighbours vote.

    Attributes:
        weight: lambda, the weight of the votes of training queries. Label texts have 1 - lambda.
        temperature: tau of the softmax over keys.
        keys: b, the number of keys that vote.
        joint: whether training queries and labels compete for the b places in one softmax (Eq. 8).
            Otherwise each kind has its own search and softmax (Eq. 11, "OvA + kNN").
    """

    weight: float = 0.5
    temperature: float = 0.04
    keys: int = 200
    joint: bool = True

    def __post_init__(self) -> None:
        check_range("memory.weight", self.weight, 0, 1)
        check_range("memory.temperature", self.temperature, low=1e-3)
        check_range("memory.keys", self.keys, 1, 100_000)


@dataclass(frozen=True, kw_only=True)
class _AnswerSettings:
    """Settings that an answer can change, by section."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)


def changed_memory(base: MemoryConfig | None, values: Mapping[str, Any]) -> MemoryConfig:
    """A memory's settings with other values, such as {"memory": {"weight": 0.3}}.

    Args:
        base: settings that are not overridden; the defaults if not given.
        values: values that override those of `base`.

    Raises:
        ConfigError: an unknown name, or a value out of range.
    """
    own = {"memory": configs.dump(base or MemoryConfig())}
    return configs.build(_AnswerSettings, configs.overlay(own, values)).memory


@dataclass(frozen=True, slots=True)
class Votes:
    """The entries of the vote matrices that are not zero, for B queries and L labels.

    The matrices are softmax(q K^T / tau) [Y ; 0] and softmax(q K^T / tau) [0 ; I].

    Attributes:
        pairs: int64 [P], query * L + source label id, ascending.
        of_queries: float64 [P], votes of training queries, before lambda.
        of_labels: float64 [P], votes of label texts, before 1 - lambda.
    """

    pairs: Int64Array
    of_queries: Float64Array
    of_labels: Float64Array

    def share(self, weight: float) -> Float64Array:
        """float64 [P], the probability of each pair; it may be above 1, see `rank_votes`."""
        return weight * self.of_queries + (1 - weight) * self.of_labels


def key_weights(neighbours: Neighbours, config: MemoryConfig) -> tuple[Float64Array, Float64Array]:
    """The weights of the keys by softmax (Eq. 8, Eq. 11).

    Returns:
        float64 [B, Kq] of training queries and [B, Kl] of labels, zero outside the b nearest keys.
    """
    query_BK = neighbours.queries.scores
    label_BK = neighbours.labels.scores
    if config.weight in (0, 1) or not config.joint:
        # Two separate softmaxes. A weight of 0 or 1 switches one of them off.
        query_weight_BK = softmax_weights(query_BK, config)
        label_weight_BK = softmax_weights(label_BK, config)
        if config.weight == 0:
            query_weight_BK = np.zeros_like(query_weight_BK)
        if config.weight == 1:
            label_weight_BK = np.zeros_like(label_weight_BK)
        return query_weight_BK, label_weight_BK
    # One softmax over both kinds of keys. Its result is then cut in two again.
    score_BK = np.concatenate([query_BK, label_BK], axis=1)
    weight_BK = softmax_weights(score_BK, config)
    num_queries = query_BK.shape[1]
    return weight_BK[:, :num_queries], weight_BK[:, num_queries:]


def joined_weights(neighbours: Neighbours, joined: TopLabels, config: MemoryConfig) -> Float64Array:
    """Weights of labels that joined later, relative to keys as the softmax would weigh them.

    Joined labels are not part of the sum of the softmax and take no place among the b nearest keys, so
    every other label keeps its probability. Like a key, a joined label votes only if it is as near as
    the b nearest keys.

    Returns:
        float64 [B, Kj].
    """
    # The scores and weights of the keys that joined labels are compared with.
    query_weight_BK, weight_BK = key_weights(neighbours, config)
    score_BK = neighbours.labels.scores
    if config.joint and config.weight:
        score_BK = np.concatenate([neighbours.queries.scores, score_BK], axis=1)
        weight_BK = np.concatenate([query_weight_BK, weight_BK], axis=1)
    if config.weight == 1 or not score_BK.shape[1]:
        return np.zeros(joined.scores.shape)
    # The score and the weight of the best key say which weight belongs to a score. The score of the
    # b-th best key is the bar for votes. Sorting negated scores puts the largest first.
    descending_BK = -np.sort(-score_BK.astype(np.float64), axis=1)
    best_BK = descending_BK[:, : config.keys]
    best_B1 = best_BK[:, :1]
    last_B1 = best_BK[:, -1:]
    if best_BK.shape[1] < config.keys:
        last_B1 = np.full_like(best_B1, -np.inf)  # all keys vote
    reaches_BJ = joined.scores >= last_B1
    votes_BJ = reaches_BJ & (joined.scores > -np.inf) & (best_B1 > -np.inf)
    # Zeros stand in for scores that do not vote, because -inf - -inf is no number.
    joined_BJ = np.where(votes_BJ, joined.scores, 0)
    best_BJ = np.where(votes_BJ, best_B1, 0)
    distance_BJ = joined_BJ - best_BJ
    # In a softmax, weights are in proportion to exp(score / tau). The best key has the largest weight.
    power_BJ = np.minimum(distance_BJ / config.temperature, MAX_POWER)
    weight_BJ = weight_BK.max(axis=1, keepdims=True) * np.exp(power_BJ)
    return np.where(votes_BJ, weight_BJ, 0.0)


def count_votes(
    neighbours: Neighbours,
    positives: Ragged,
    config: MemoryConfig,
    num_labels: int,
    exclude: Ragged | None = None,
    hidden: BoolArray | None = None,
) -> Votes:
    """Counts the votes for each label: softmax(q K^T / tau) V with both halves of V apart (Eq. 8).

    Args:
        neighbours: nearest keys of B queries.
        positives: source label ids of each row of the memory (Y). Weights multiply votes.
        config: how keys vote.
        num_labels: L.
        exclude: of each query, source ids of labels that it must not be answered.
        hidden: bool [L], labels that are keys but no answers.
    """
    query_weight_BK, label_weight_BK = key_weights(neighbours, config)
    label_BK = neighbours.labels.ids
    if neighbours.joined is not None:
        joined_weight_BJ = joined_weights(neighbours, neighbours.joined, config)
        label_weight_BK = np.concatenate([label_weight_BK, joined_weight_BJ], axis=1)
        label_BK = np.concatenate([label_BK, neighbours.joined.ids], axis=1)
    # Training queries: one vote for each positive of each key.
    key_query, key_place = np.nonzero(query_weight_BK)
    key_rows = neighbours.queries.ids[key_query, key_place]
    voted_labels = positives.take(key_rows)
    # `voter` says which key each vote comes from.
    voter = voted_labels.row_ids
    query_pairs = key_query[voter] * num_labels + voted_labels.values
    key_weight = query_weight_BK[key_query, key_place]
    query_weights = key_weight[voter]
    relevance = weights_of(voted_labels)
    if relevance is not None:
        query_weights = query_weights * relevance
    # Labels: one vote per key, for the label itself.
    own_query, own_place = np.nonzero(label_weight_BK)
    label_pairs = own_query * num_labels + label_BK[own_query, own_place]
    label_weights = label_weight_BK[own_query, own_place]
    # A pair of query and label may get many votes. `entry` says which of the distinct pairs each vote
    # is for.
    all_pairs = np.concatenate([query_pairs, label_pairs])
    pairs, entry = np.unique(all_pairs, return_inverse=True)
    query_entry = entry[: len(voter)]
    label_entry = entry[len(voter) :]
    of_queries = np.bincount(query_entry, query_weights, len(pairs)).astype(np.float64)
    of_labels = np.bincount(label_entry, label_weights, len(pairs)).astype(np.float64)
    # Hidden and excluded labels lose their votes, which does not change those of other labels.
    kept = np.ones(len(pairs), bool)
    if hidden is not None:
        kept &= ~hidden[pairs % num_labels]
    if exclude is not None and len(exclude.values):
        kept &= ~np.isin(pairs, exclude.pairs(num_labels))
    return Votes(pairs[kept], of_queries[kept], of_labels[kept])


def rank_votes(
    votes: Votes, weight: float, k: int, fallback: TopLabels, num_labels: int
) -> TopLabels:
    """The k labels with the largest shares, equal ones by lower source id, with float32 shares.

    If fewer than k labels got votes, labels of `fallback` follow in its order. Their scores are
    inner products minus 2, which is negative for vectors of length 1. A label that joined later can
    have a share above 1, and so can any label if votes are multiplied by relevance / mean relevance
    (`data.relevance`): such shares are no probabilities. A share above 1 becomes 1 plus its logarithm.

    Args:
        votes: the votes of B queries.
        weight: lambda.
        k: answers per query.
        fallback: labels [B, K] by inner product.
        num_labels: L.
    """
    share = votes.share(weight)
    # `maximum` only avoids the logarithm of 0: shares below 1 are not compressed.
    compressed_share = 1 + np.log(np.maximum(share, 1))
    share = np.where(share > 1, compressed_share, share)
    # A share that float32 rounds to 0 would be ranked by id, so the fallback ranks its label.
    voted = np.flatnonzero(share.astype(np.float32))
    voted_pairs = votes.pairs[voted]
    # A pair is query * L + label.
    query_P, label_P = np.divmod(voted_pairs, num_labels)
    num_queries = len(fallback.ids)
    has_vote_BK = np.isin(pairs_of(fallback.ids, num_labels), voted_pairs)
    query_F, place_F = np.nonzero((fallback.ids >= 0) & ~has_vote_BK)
    # Labels of the fallback follow the labels with votes, in their order. So they are ranked by a
    # negative number, which says their place. Their own scores could be larger than any vote, because
    # label vectors may be longer than 1.
    rank_scores = np.concatenate([share[voted], -1.0 - place_F])
    top = TopLabels.from_pairs(
        np.concatenate([query_P, query_F]),
        np.concatenate([label_P, fallback.ids[query_F, place_F]]),
        # Ranked by float32, as they are returned: if two scores are equal, the lower id comes first.
        rank_scores.astype(np.float32),
        num_queries,
        k,
    )
    # Negative scores are places in the fallback. Its scores replace them.
    query, column = np.nonzero((top.scores < 0) & (top.ids >= 0))
    place = (-1 - top.scores[query, column]).astype(np.int64)
    top.scores[query, column] = fallback.scores[query, place] - 2
    return top


def sweep(
    neighbours: Neighbours,
    positives: Ragged,
    grid: Iterable[MemoryConfig],
    k: int,
    num_labels: int,
    exclude: Ragged | None = None,
    hidden: BoolArray | None = None,
) -> Iterator[tuple[MemoryConfig, TopLabels]]:
    """Answers for many settings from one search, that of the setting with most keys.

    Lambda only weighs the two halves of the votes. So settings that differ only in a lambda between 0
    and 1 share their votes.
    """
    votes_of: dict[MemoryConfig, Votes] = {}
    fallback = neighbours.fallback or neighbours.labels
    for config in grid:
        key = config
        if 0 < config.weight < 1:
            key = dataclasses.replace(config, weight=0.5)
        if key not in votes_of:
            votes_of[key] = count_votes(neighbours, positives, key, num_labels, exclude, hidden)
        votes = votes_of[key]
        yield config, rank_votes(votes, config.weight, k, fallback, num_labels)


def softmax_weights(score_BK: npt.NDArray[np.floating], config: MemoryConfig) -> Float64Array:
    """softmax(score / tau) over the b largest of each row, zero elsewhere; float64 [B, K]."""
    # The sort is stable, so the first of several equal scores are taken.
    order_BK = np.argsort(-score_BK, axis=1, kind="stable")
    best_Bb = order_BK[:, : config.keys]
    top_Bb = np.take_along_axis(score_BK, best_Bb, 1).astype(np.float64)
    is_key_Bb = top_Bb > -np.inf
    # Subtracting the largest score, which is the first one, avoids an overflow of exp. Missing keys have
    # the score -inf. They become 0 here, because -inf minus -inf is not a number.
    finite_Bb = np.where(is_key_Bb, top_Bb, 0)
    shifted_Bb = finite_Bb - finite_Bb[:, :1]
    power_Bb = np.where(is_key_Bb, np.exp(shifted_Bb / config.temperature), 0.0)
    sum_B1 = power_Bb.sum(axis=1, keepdims=True)
    # A row without any key has the sum 0, and keeps the weights 0.
    power_Bb /= np.maximum(sum_B1, np.finfo(np.float64).tiny)
    weight_BK = np.zeros(score_BK.shape)
    np.put_along_axis(weight_BK, best_Bb, power_Bb, 1)
    return weight_BK
