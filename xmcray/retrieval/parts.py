"""The parts of a fused bundle, and how their scores add up. Pure numpy.

    part      what a label's score is, before its weight
    labels    softmax over the nearest label vectors; 1 is all of it
    memory    share of the votes of the training queries with the nearest vectors
    words     share of the votes of the training queries with the most similar words
    texts     cosine of the words of the query and of the label's text

A member is a trained model with its own encoder and vectors. Each member has parts `labels` and
`memory` of its own; in a bundle of several members they are called "dexml.labels" and so on.

Inner products of different methods have different sizes, so they cannot be added as they are. Votes
are shares of one, and so is a softmax; a cosine of TF-IDF vectors lies between 0 and 1 too. All of
them are numbers of one query alone, so answers do not depend on other queries in a batch.

Candidates of a query are the best labels of each part. Every candidate is scored by every part, also
by those that did not propose it.

Letters of axes, in addition to those in types.py and votes.py:

    E  votes: pairs of a candidate and a query that votes for it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmcray import config as configs
from xmcray.config import check_range, check_ranges
from xmcray.retrieval.votes import MAX_POWER, MemoryConfig, softmax_weights
from xmcray.types import Float32Array, Float64Array, Int64Array, Ragged, TopLabels

MEMBER_PARTS = ("labels", "memory")  # of each member
WORD_PARTS = ("words", "texts")  # there once
KEYS = 100  # label vectors in the softmax of the part `labels`
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class MemberConfig:
    """How the parts of one member count.

    Attributes:
        name: names the member; empty if it is the only one.
        labels: weight of the label vectors; a part of weight 0 is not there.
        memory: weight of the votes of training queries with near vectors.
        label_temperature: tau of the softmax over label vectors.
        memory_temperature: tau of the softmax over near training queries.
    """

    name: str = ""
    labels: float = 1.0
    memory: float = 0.0
    label_temperature: float = 0.1
    memory_temperature: float = 0.05

    def __post_init__(self) -> None:
        for part in MEMBER_PARTS:
            check_range(f"parts.{self.full(part)}", getattr(self, part), 0, 1e6)
        # Infinity would make all scores NaN.
        check_range(f"parts.{self.full('label_temperature')}", self.label_temperature, 1e-4, 1e6)
        check_range(f"parts.{self.full('memory_temperature')}", self.memory_temperature, 1e-3, 1e6)

    def full(self, setting: str) -> str:
        """The name of one of the settings among those of all members, such as "dexml.labels"."""
        return f"{self.name}.{setting}" if self.name else setting


@dataclass(frozen=True, kw_only=True)
class PartsConfig:
    """How the parts of a bundle add up.

    Attributes:
        members: how the parts of each member count.
        words: weight of the votes of training queries with similar words.
        texts: weight of the words of the labels' own texts.
        memory_keys: training queries with near vectors that vote, in each member.
        word_keys: training queries with similar words that vote.
    """

    members: tuple[MemberConfig, ...] = (MemberConfig(),)
    words: float = 0.0
    texts: float = 0.0
    memory_keys: int = 50
    word_keys: int = 10

    def __post_init__(self) -> None:
        check_ranges(
            self,
            "parts",
            words=(0, 1e6),
            texts=(0, 1e6),
            memory_keys=(1, 100_000),
            word_keys=(1, 100_000),
        )

    @classmethod
    def read(cls, section: Mapping[str, Any]) -> PartsConfig:
        """The settings in a bundle; older ones have a single member, whose settings have no section.

        Raises:
            ConfigError: an unknown name, or a value out of range.
        """
        if "members" not in section:
            member_settings = {field.name for field in dataclasses.fields(MemberConfig)}
            values: dict[str, Any] = {}
            member: dict[str, Any] = {}
            for name, value in section.items():
                owner = member if name in member_settings else values
                owner[name] = value
            section = {**values, "members": [member]}
        return configs.build(cls, section, "parts.")

    @property
    def parts(self) -> list[str]:
        """Names of all parts: those of each member, then the words."""
        names = []
        for member in self.members:
            names += [member.full(part) for part in MEMBER_PARTS]
        return [*names, *WORD_PARTS]

    def __getitem__(self, setting: str) -> float:
        """A setting by its name, such as "words" or "dexml.label_temperature"."""
        place = self._member_of(setting)
        owner: Any = self if place is None else self.members[place]
        return float(getattr(owner, setting.rpartition(".")[2]))

    def weight(self, part: str) -> float:
        """Weight of a part."""
        return self[part]

    def used(self) -> list[str]:
        """The parts that add anything."""
        return [part for part in self.parts if self.weight(part) > 0]

    @property
    def has_voters(self) -> bool:
        """Whether training queries vote."""
        return self.words > 0 or any(member.memory > 0 for member in self.members)

    def changed(self, setting: str, value: float) -> PartsConfig:
        """The same with another value of one setting."""
        change: dict[str, Any] = {setting.rpartition(".")[2]: value}
        place = self._member_of(setting)
        if place is None:
            return dataclasses.replace(self, **change)
        members = list(self.members)
        members[place] = dataclasses.replace(members[place], **change)
        return dataclasses.replace(self, members=tuple(members))

    def without(self, part: str) -> PartsConfig:
        """The same without a part."""
        return self.changed(part, 0.0)

    def only_used_members(self) -> PartsConfig:
        """The same without members that add nothing; the first one stays if none adds anything."""
        used = [member for member in self.members if member.labels or member.memory]
        return dataclasses.replace(self, members=tuple(used) or self.members[:1])

    def settings_of(self, part: str) -> tuple[float, ...]:
        """The settings on which a part depends, without its weight."""
        if part == "texts":
            return ()
        if part == "words":
            return (self.word_keys,)
        member = self.members[self._member_of(part) or 0]
        if part == member.full("labels"):
            return (member.label_temperature,)
        return (member.memory_temperature, self.memory_keys)

    def _member_of(self, setting: str) -> int | None:
        """Place of the member whose setting it is; None for a setting that is there once."""
        name, _, field = setting.rpartition(".")
        if not name and field in _OWN_SETTINGS:
            return None
        return [member.name for member in self.members].index(name)


_OWN_SETTINGS = {field.name for field in dataclasses.fields(PartsConfig)}


@dataclass(frozen=True, slots=True)
class Votes:
    """Training queries that vote for candidates.

    Attributes:
        voters: rows of the memory and their cosines [B, K], best first.
        pair_E: int64, the candidate that gets the vote.
        query_E: int64, its query.
        place_E: int64, the voter's place among the query's voters.
        relevance_E: float32, how much the label counts for the voter; None if all count 1.
    """

    voters: TopLabels
    pair_E: Int64Array
    query_E: Int64Array
    place_E: Int64Array
    relevance_E: Float32Array | None = None

    def weights(self, weight_BK: Float64Array) -> Float64Array:
        """float64, the weight of each vote, by those of the voters."""
        vote_E = weight_BK[self.query_E, self.place_E]
        return vote_E if self.relevance_E is None else vote_E * self.relevance_E

    def sums(self, weight_BK: Float64Array, num_pairs: int) -> Float64Array:
        """float64 [P], the summed weights of each candidate's voters."""
        return np.bincount(self.pair_E, self.weights(weight_BK), num_pairs).astype(np.float64)


@dataclass(frozen=True, slots=True)
class MemberScores:
    """What one member knows about the candidates.

    Attributes:
        score_P: float32, inner product of query and label vector.
        key_BK: float32, the inner products of the nearest label vectors of the export, best first.
        votes: votes of training queries with near vectors.
    """

    score_P: Float32Array
    key_BK: Float32Array
    votes: Votes


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of B queries, and what each part knows about them.

    Attributes:
        labels: B lists of source ids, ascending: the pairs of query and candidate.
        members: scores by each member.
        words: votes of training queries with similar words.
        text_P: float32, cosine of the words of query and label text.
    """

    labels: Ragged
    members: tuple[MemberScores, ...]
    words: Votes
    text_P: Float32Array

    def __len__(self) -> int:
        """Number of pairs P."""
        return len(self.labels.values)

    def part(self, name: str, config: PartsConfig) -> Float64Array:
        """float64 [P]: what one part gives to each candidate, before its weight."""
        if name == "texts":
            return self.text_P.astype(np.float64)
        if name == "words":
            return self.words.sums(word_shares(self.words.voters, config), len(self))
        # The parts of the members come first in `config.parts`: two of each member.
        place, kind = divmod(config.parts.index(name), len(MEMBER_PARTS))
        scores = self.members[place]
        member = config.members[place]
        if MEMBER_PARTS[kind] == "memory":
            shares = memory_shares(scores.votes.voters, member, config.memory_keys)
            return scores.votes.sums(shares, len(self))
        return label_shares(scores.score_P, self.labels.row_ids, scores.key_BK, member)

    def gains(self, config: PartsConfig) -> dict[str, Float64Array]:
        """float64 [P] by part that is used: what it adds to the score of each candidate."""
        return {name: config.weight(name) * self.part(name, config) for name in config.used()}

    def top(self, config: PartsConfig, k: int) -> TopLabels:
        """The k best candidates of each query, equal scores by lower source id."""
        score_P = np.zeros(len(self))
        # One part after another: the last bits do not depend on the number of candidates.
        for gain_P in self.gains(config).values():
            score_P += gain_P
        query_P = self.labels.row_ids
        scores = score_P.astype(np.float32)
        return TopLabels.from_pairs(query_P, self.labels.values, scores, len(self.labels), k)


def label_shares(
    score_P: Float32Array, query_P: Int64Array, key_BK: Float32Array, member: MemberConfig
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
    sum_B = np.exp((keys - best_B1) / member.label_temperature).sum(axis=1)
    distance_P = score_P - best_B1[query_P, 0]
    power_P = np.minimum(distance_P / member.label_temperature, MAX_POWER)
    share_P: Float64Array = np.exp(power_P) / sum_B[query_P]
    return np.where(share_P > 1, 1 + np.log(np.maximum(share_P, 1)), share_P)


def memory_shares(voters: TopLabels, member: MemberConfig, keys: int) -> Float64Array:
    """Share of each near training query in the votes: softmax of cosine / tau, float64 [B, K]."""
    softmax = MemoryConfig(temperature=member.memory_temperature, keys=keys)
    return softmax_weights(voters.scores, softmax)


def word_shares(voters: TopLabels, config: PartsConfig) -> Float64Array:
    """Share of each similar training query in the votes: proportional to cosine, float64 [B, K]."""
    is_voter = voters.ids >= 0
    # Voters are sorted, so the first columns are the nearest.
    is_voter[:, config.word_keys :] = False
    cosine_BK = np.where(is_voter, voters.scores, 0.0).astype(np.float64)
    share_BK: Float64Array = cosine_BK / np.maximum(cosine_BK.sum(axis=1, keepdims=True), _TINY)
    return share_BK
