"""The parts of a fused bundle, and how their scores add up. Pure numpy.

    part      what a label's score is, before its weight
    labels    softmax over the nearest label vectors; 1 is all of it
    memory    share of the votes of the training queries with the nearest vectors
    words     share of the votes of the training queries with the most similar words
    texts     cosine of the words of the query and of the label's text

Inner products of different methods have different sizes, so they cannot be added as they are. Votes
are shares of one, and so is a softmax; a cosine of TF-IDF vectors lies between 0 and 1 too. All four
are numbers of one query alone, so answers do not depend on what other queries are in a batch.

Candidates of a query are the best labels of each part. Every candidate is scored by every part, also
by those that did not propose it.

Letters of axes, in addition to those in types.py and votes.py:

    F  parts                           E  votes: pairs of a candidate and a query that votes for it
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xmcray.config import check_range
from xmcray.retrieval.votes import MAX_POWER, MemoryConfig, softmax_weights
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels

Float64Array = npt.NDArray[np.float64]

PARTS = ("labels", "memory", "words", "texts")
KEYS = 100  # label vectors in the softmax of the part `labels`
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class PartsConfig:
    """How the parts of a bundle add up.

    Attributes:
        labels: weight of the label vectors; a part of weight 0 is not there.
        memory: weight of the votes of training queries with near vectors.
        words: weight of the votes of training queries with similar words.
        texts: weight of the words of the labels' own texts.
        label_temperature: tau of the softmax over label vectors.
        memory_temperature: tau of the softmax over near training queries.
        memory_keys: training queries with near vectors that vote.
        word_keys: training queries with similar words that vote.
    """

    labels: float = 1.0
    memory: float = 0.0
    words: float = 0.0
    texts: float = 0.0
    label_temperature: float = 0.1
    memory_temperature: float = 0.05
    memory_keys: int = 50
    word_keys: int = 10

    def __post_init__(self) -> None:
        for part in PARTS:
            check_range(f"parts.{part}", getattr(self, part), 0, 1e6)
        check_range("parts.label_temperature", self.label_temperature, low=1e-4)
        check_range("parts.memory_temperature", self.memory_temperature, low=1e-3)
        check_range("parts.memory_keys", self.memory_keys, 1, 100_000)
        check_range("parts.word_keys", self.word_keys, 1, 100_000)

    def weight(self, part: str) -> float:
        """Weight of a part."""
        return float(getattr(self, part))

    def weights(self) -> Float64Array:
        """float64 [F], in the order of `PARTS`."""
        return np.array([self.weight(part) for part in PARTS])

    def used(self) -> list[str]:
        """The parts that add anything."""
        return [part for part in PARTS if self.weight(part) > 0]

    def without(self, part: str) -> PartsConfig:
        """The same without a part."""
        no_weight: dict[str, Any] = {part: 0.0}
        return dataclasses.replace(self, **no_weight)


@dataclass(frozen=True, slots=True)
class Votes:
    """Training queries that vote for candidates.

    Attributes:
        voters: rows of the memory and their cosines [B, K], best first.
        pair_E: int64, the candidate that gets the vote.
        query_E: int64, its query.
        place_E: int64, the voter's place among the query's voters.
    """

    voters: TopLabels
    pair_E: Int64Array
    query_E: Int64Array
    place_E: Int64Array

    def sums(self, weight_BK: Float64Array, num_pairs: int) -> Float64Array:
        """float64 [P], the summed weights of each candidate's voters."""
        vote_E = weight_BK[self.query_E, self.place_E]
        return np.bincount(self.pair_E, vote_E, num_pairs).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of B queries, and what each part knows about them.

    Attributes:
        labels: B lists of source ids, ascending: the pairs of query and candidate.
        score_P: float32, inner product of query and label vector.
        key_BK: float32, the inner products of the nearest label vectors of the export, best first.
        memory: votes of training queries with near vectors.
        words: votes of training queries with similar words.
        text_P: float32, cosine of the words of query and label text.
    """

    labels: Ragged
    score_P: Float32Array
    key_BK: Float32Array
    memory: Votes
    words: Votes
    text_P: Float32Array

    def __len__(self) -> int:
        """Number of pairs P."""
        return len(self.labels.values)

    def parts(self, config: PartsConfig) -> Float64Array:
        """float64 [P, F]: what each part gives to each candidate, before its weight."""
        memory_weights = memory_shares(self.memory.voters, config)
        word_weights = word_shares(self.words.voters, config)
        columns = [
            label_shares(self.score_P, self.labels.row_ids, self.key_BK, config),
            self.memory.sums(memory_weights, len(self)),
            self.words.sums(word_weights, len(self)),
            self.text_P.astype(np.float64),
        ]
        return np.stack(columns, axis=1)

    def top(self, config: PartsConfig, k: int) -> TopLabels:
        """The k best candidates of each query, equal scores by lower source id."""
        score_P = weighted_sums(self.parts(config), config)
        query_P = self.labels.row_ids
        return TopLabels.from_pairs(query_P, self.labels.values, score_P, len(self.labels), k)


def weighted_sums(part_PF: Float64Array, config: PartsConfig) -> Float32Array:
    """float32 [P], the scores of candidates.

    Not a matrix product, whose last bits may depend on the number of candidates.
    """
    score_P: Float32Array = (part_PF * config.weights()).sum(axis=1).astype(np.float32)
    return score_P


def label_shares(
    score_P: Float32Array, query_P: Int64Array, key_BK: Float32Array, config: PartsConfig
) -> Float64Array:
    """The part `labels`: softmax over the nearest label vectors of the export.

    A label that joined later is not part of the softmax's sum, so it changes no other label's
    share. Its own share may be above 1 and then grows with its logarithm.

    Returns:
        float64 [P].
    """
    keys = key_BK.astype(np.float64)
    best_B1 = keys[:, :1]
    # A query without any key has no candidate either; zero stands in, because -inf - -inf is no
    # number.
    best_B1 = np.where(np.isfinite(best_B1), best_B1, 0.0)
    # A missing key (-inf) adds nothing.
    sum_B = np.exp((keys - best_B1) / config.label_temperature).sum(axis=1)
    distance_P = score_P - best_B1[query_P, 0]
    power_P = np.minimum(distance_P / config.label_temperature, MAX_POWER)
    share_P: Float64Array = np.exp(power_P) / sum_B[query_P]
    return np.where(share_P > 1, 1 + np.log(np.maximum(share_P, 1)), share_P)


def memory_shares(voters: TopLabels, config: PartsConfig) -> Float64Array:
    """Share of each near training query in the votes: softmax of cosine / tau, float64 [B, K]."""
    softmax = MemoryConfig(temperature=config.memory_temperature, keys=config.memory_keys)
    return softmax_weights(voters.scores, softmax)


def word_shares(voters: TopLabels, config: PartsConfig) -> Float64Array:
    """Share of each similar training query in the votes: proportional to cosine, float64 [B, K]."""
    is_voter = voters.ids >= 0
    # Voters are sorted, so the first columns are the nearest.
    is_voter[:, config.word_keys :] = False
    cosine_BK = np.where(is_voter, voters.scores, 0.0).astype(np.float64)
    share_BK: Float64Array = cosine_BK / np.maximum(cosine_BK.sum(axis=1, keepdims=True), _TINY)
    return share_BK
