"""Neighbours vote for labels (RAE-XMC, Eq. 8). Pure numpy.

    paper                   here           meaning
    K = [X_train ; Z]       Neighbours     keys: vectors of training queries and of label texts
    V = [lam Y ; (1-lam) I] Votes          a query votes for its positives, a label for itself
    lam, tau, b             MemoryConfig   weight, temperature, keys
    Eq. 8                   joint=True     one softmax over the b nearest keys of both kinds
    Eq. 11, OvA + kNN       joint=False    two searches, two softmaxes, a convex sum

With weight 0 only labels are searched, with weight 1 only training queries.

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
MAX_POWER = 700.0  # exp of more is no float64


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """How neighbours vote.

    Attributes:
        weight: lambda, of the votes of training queries; that of label texts is 1 - weight.
        temperature: tau of the softmax over keys.
        keys: b, keys that vote.
        joint: training queries and labels compete for the b places in one softmax (Eq. 8), or each
            kind has its own search and softmax (Eq. 11, "OvA + kNN").
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
        values: in place of those of `base`.

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
        """float64 [P], the probability of each pair."""
        return weight * self.of_queries + (1 - weight) * self.of_labels


def key_weights(neighbours: Neighbours, config: MemoryConfig) -> tuple[Float64Array, Float64Array]:
    """The softmax over keys (Eq. 8, Eq. 11).

    Returns:
        float64 [B, Kq] of training queries and [B, Kl] of labels, zero outside the b nearest keys.
    """
    query_BK = neighbours.queries.scores
    label_BK = neighbours.labels.scores
    if config.weight in (0, 1) or not config.joint:
        # Two separate softmaxes, of which weight 0 or 1 switches one off.
        query_weight_BK = softmax_weights(query_BK, config)
        label_weight_BK = softmax_weights(label_BK, config)
        if config.weight == 0:
            query_weight_BK = np.zeros_like(query_weight_BK)
        if config.weight == 1:
            label_weight_BK = np.zeros_like(label_weight_BK)
        return query_weight_BK, label_weight_BK
    # One softmax over both kinds of keys, which is then cut in two again.
    weight_BK = softmax_weights(np.concatenate([query_BK, label_BK], axis=1), config)
    num_queries = query_BK.shape[1]
    return weight_BK[:, :num_queries], weight_BK[:, num_queries:]


def joined_weights(neighbours: Neighbours, joined: TopLabels, config: MemoryConfig) -> Float64Array:
    """Weights of labels that joined later, in the proportion to keys that the softmax would give.

    Joined labels are not part of the softmax's sum and take no key's place among the b nearest, so
    every other label keeps its probability. A joined label farther than the b nearest keys does not
    vote, as no key does.

    Returns:
        float64 [B, Kj].
    """
    # Scores and weights of the keys that a joined label is compared with.
    query_weight_BK, weight_BK = key_weights(neighbours, config)
    score_BK = neighbours.labels.scores
    if config.joint and config.weight:
        score_BK = np.concatenate([neighbours.queries.scores, score_BK], axis=1)
        weight_BK = np.concatenate([query_weight_BK, weight_BK], axis=1)
    if config.weight == 1 or not score_BK.shape[1]:
        return np.zeros(joined.scores.shape)
    # The best key gives the proportion of score to weight, the b-th best is the bar.
    # Sorting the negated scores puts the largest first.
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
    # The best key has the largest weight, so exp(distance / tau) of it is what the softmax gives.
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
    """softmax(q K^T / tau) V, with the two halves of V apart (Eq. 8).

    Args:
        neighbours: nearest keys of B queries.
        positives: source label ids of each row of the memory (Y). Weights multiply votes.
        config: how keys vote.
        num_labels: L.
        exclude: B lists of source label ids that get no votes from their query's keys.
        hidden: bool [L], labels that are keys but no answers.
    """
    query_weight_BK, label_weight_BK = key_weights(neighbours, config)
    label_BK = neighbours.labels.ids
    if neighbours.joined is not None:
        joined_weight_BJ = joined_weights(neighbours, neighbours.joined, config)
        label_weight_BK = np.concatenate([label_weight_BK, joined_weight_BJ], axis=1)
        label_BK = np.concatenate([label_BK, neighbours.joined.ids], axis=1)
    # Training queries: one entry per key and positive of the key.
    key_query, key_place = np.nonzero(query_weight_BK)
    key_rows = neighbours.queries.ids[key_query, key_place]
    voted_labels = positives.take(key_rows)
    # `voter` is the place of each vote's key among the keys.
    voter = voted_labels.row_ids
    query_pairs = key_query[voter] * num_labels + voted_labels.values
    key_weight = query_weight_BK[key_query, key_place]
    query_weights = key_weight[voter]
    relevance = weights_of(voted_labels)
    if relevance is not None:
        query_weights = query_weights * relevance
    # Labels: one entry per key.
    own_query, own_place = np.nonzero(label_weight_BK)
    label_pairs = own_query * num_labels + label_BK[own_query, own_place]
    label_weights = label_weight_BK[own_query, own_place]
    # The same pair may have many votes; `entry` is the place of each vote's pair among all pairs.
    all_pairs = np.concatenate([query_pairs, label_pairs])
    pairs, entry = np.unique(all_pairs, return_inverse=True)
    query_entry = entry[: len(voter)]
    label_entry = entry[len(voter) :]
    of_queries = np.bincount(query_entry, query_weights, len(pairs)).astype(np.float64)
    of_labels = np.bincount(label_entry, label_weights, len(pairs)).astype(np.float64)
    # Hidden and excluded labels lose their votes; the weights of other keys stay as they are.
    kept = np.ones(len(pairs), bool)
    if hidden is not None:
        kept &= ~hidden[pairs % num_labels]
    if exclude is not None and len(exclude.values):
        kept &= ~np.isin(pairs, exclude.pairs(num_labels))
    return Votes(pairs[kept], of_queries[kept], of_labels[kept])


def rank_votes(
    votes: Votes, weight: float, k: int, fallback: TopLabels, num_labels: int
) -> TopLabels:
    """The k most probable labels, equal ones by lower source id, with float32 probabilities.

    If fewer than k labels got votes, labels of `fallback` follow in its order. Their scores are
    inner products minus 2, which is negative for vectors of length 1. A weight above 1, which only
    a label that joined later can have, becomes 1 plus its logarithm.

    Args:
        votes: the votes of B queries.
        weight: lambda.
        k: answers per query.
        fallback: labels [B, K] by inner product.
        num_labels: L.
    """
    share = votes.share(weight)
    # Where a share is smaller, the logarithm of 1 stands in for one that is not used.
    compressed_share = 1 + np.log(np.maximum(share, 1))
    share = np.where(share > 1, compressed_share, share)
    voted = np.flatnonzero(share)
    voted_pairs = votes.pairs[voted]
    # A pair is query * L + label.
    query_P, label_P = np.divmod(voted_pairs, num_labels)
    num_queries = len(fallback.ids)
    has_vote_BK = np.isin(pairs_of(fallback.ids, num_labels), voted_pairs)
    query_F, place_F = np.nonzero((fallback.ids >= 0) & ~has_vote_BK)
    # Votes are positive. A label that follows is ranked by its place, as a negative number, because
    # its score may be larger than any vote if label vectors are long.
    rank_scores = np.concatenate([share[voted], -1.0 - place_F])
    top = TopLabels.from_pairs(
        np.concatenate([query_P, query_F]),
        np.concatenate([label_P, fallback.ids[query_F, place_F]]),
        # Ranked as they are returned: of scores that are equal then, the lower id comes first.
        rank_scores.astype(np.float32),
        num_queries,
        k,
    )
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
    """Answers of many settings from one search of the widest of them.

    Lambda only weighs the two halves of the votes, so settings that differ in a lambda between 0
    and 1 share all counting.
    """
    votes_of: dict[MemoryConfig, Votes] = {}  # by what decides which keys vote
    fallback = neighbours.fallback or neighbours.labels
    for config in grid:
        inside = 0 < config.weight < 1
        counted = dataclasses.replace(config, weight=0.5) if inside else config
        if counted not in votes_of:
            votes_of[counted] = count_votes(
                neighbours, positives, counted, num_labels, exclude, hidden
            )
        votes = votes_of[counted]
        yield config, rank_votes(votes, config.weight, k, fallback, num_labels)


def softmax_weights(score_BK: npt.NDArray[np.floating], config: MemoryConfig) -> Float64Array:
    """softmax(score / tau) over the b largest of each row, zero elsewhere; float64 [B, K]."""
    # Stable, so that of equal scores the first keys are taken.
    order_BK = np.argsort(-score_BK, axis=1, kind="stable")
    best_Bb = order_BK[:, : config.keys]
    top_Bb = np.take_along_axis(score_BK, best_Bb, 1).astype(np.float64)
    is_key_Bb = top_Bb > -np.inf
    # The largest score is the first one. Zeros stand in for missing keys, because -inf - -inf is
    # no number; a row without any key has no softmax.
    finite_Bb = np.where(is_key_Bb, top_Bb, 0)
    shifted_Bb = finite_Bb - finite_Bb[:, :1]
    power_Bb = np.where(is_key_Bb, np.exp(shifted_Bb / config.temperature), 0.0)
    sum_B1 = power_Bb.sum(axis=1, keepdims=True)
    power_Bb /= np.maximum(sum_B1, np.finfo(np.float64).tiny)
    weight_BK = np.zeros(score_BK.shape)
    np.put_along_axis(weight_BK, best_Bb, power_Bb, 1)
    return weight_BK
