"""Predictors: what finds the neighbours of query vectors and turns them into ranked labels.

`find` and `rank` are apart because serving may search subsets of the shards in several processes:
the merged neighbours of all subsets are ranked in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from xmcray.errors import ConfigError
from xmcray.retrieval.answers import AllReasons, Reasons, named_voters
from xmcray.retrieval.calibration import CONTEXT
from xmcray.retrieval.label_index import LabelIndex
from xmcray.retrieval.memory import Memory
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.shards import SearchScope
from xmcray.retrieval.votes import (
    VOTE_QUERIES,
    MemoryConfig,
    count_votes,
    key_weights,
    rank_votes,
)
from xmcray.types import Float32Array, Ragged, TopLabels, spans


class Predictor(Protocol):
    """Scores labels for queries. The weighted sum of several (fused.py) is a predictor too."""

    def find(self, query_BD: Float32Array, k: int, scope: SearchScope) -> Neighbours:
        """Searches what `rank` needs for k answers.

        Args:
            query_BD: float32 [B, D].
            k: answers per query.
            scope: what to search.
        """

    def rank(
        self,
        neighbours: Neighbours,
        k: int,
        exclude: Ragged | None = None,
        texts: Sequence[str] | None = None,
    ) -> TopLabels:
        """The k best labels [B, k] by source id, with scores; equal scores by lower id.

        Args:
            neighbours: what `find` found.
            k: answers per query.
            exclude: B lists of source label ids that are no answers.
            texts: the queries' texts, if a part of the bundle compares words.
        """

    def explain(
        self,
        neighbours: Neighbours,
        top: TopLabels,
        num_ranked: int,
        texts: Sequence[str] | None = None,
    ) -> AllReasons:
        """Why each label in `top` is an answer.

        Args:
            neighbours: what `find` found.
            top: some of the labels that `rank` gave, in any order.
            num_ranked: the k that `rank` had.
            texts: as of `rank`.
        Raises:
            ConfigError: there is nothing to tell, because training queries do not vote.
        """


@dataclass(frozen=True, eq=False)
class LabelPredictor:
    """Implements `Predictor`: answers with the nearest label vectors; scores are inner products.

    Attributes:
        labels: the labels.
        calibrated: whether answers get probabilities, which take the nearest labels of the export.
    """

    labels: LabelIndex
    calibrated: bool = False

    def find(self, query_BD: Float32Array, k: int, scope: SearchScope) -> Neighbours:
        """See `Predictor.find`."""
        no_queries = TopLabels.empty(len(query_BD))
        if not self.calibrated:
            return Neighbours(no_queries, self.labels.search(query_BD, k, scope))
        width = min(max(k, CONTEXT), self.labels.settings.num_labels)
        nearest = self.labels.search(query_BD, width, scope)
        if self.labels.answers_all and not scope.excludes:
            return Neighbours(no_queries, nearest)
        # Probabilities compare a score with labels of the export, whatever may be answered.
        exported = self.labels.search_exported(query_BD, CONTEXT, scope.without_exclude)
        return Neighbours(no_queries, exported, fallback=nearest)

    def rank(
        self,
        neighbours: Neighbours,
        k: int,
        exclude: Ragged | None = None,
        texts: Sequence[str] | None = None,
    ) -> TopLabels:
        """See `Predictor.rank`."""
        answers = neighbours.fallback or neighbours.labels
        return answers.first(k)

    def explain(
        self,
        neighbours: Neighbours,
        top: TopLabels,
        num_ranked: int,
        texts: Sequence[str] | None = None,
    ) -> AllReasons:
        """See `Predictor.explain`."""
        raise no_memory()


@dataclass(frozen=True, eq=False)
class MemoryPredictor:
    """Lets training queries and labels vote; a score is a probability. Implements `Predictor`.

    Attributes:
        memory: the training queries.
        labels: the labels.
        config: how both vote.
    """

    memory: Memory
    labels: LabelIndex
    config: MemoryConfig

    def find(self, query_BD: Float32Array, k: int, scope: SearchScope) -> Neighbours:
        """See `Predictor.find`."""
        # The keys are always those of the export, whatever labels joined, were removed since or are
        # excluded, so that no other label's probability changes.
        queries = self.memory.search(query_BD, self.config, scope)
        num_labels = self.labels.settings.num_labels
        voting_labels = self.config.keys if self.config.weight < 1 else 0
        width = min(max(k, voting_labels, CONTEXT), num_labels)
        keys = self.labels.search_exported(query_BD, width, scope.without_exclude)
        if self.labels.answers_all and not scope.excludes:
            return Neighbours(queries, keys)
        # Labels that joined vote in addition to the keys of the export, each for itself: what
        # others there are must not take its vote.
        num_joined = min(max(k, self.config.keys), num_labels)
        joined = self.labels.search(query_BD, num_joined, scope, joined_only=True)
        # If fewer than k labels get votes, the nearest ones follow.
        fallback = self.labels.search(query_BD, k, scope)
        return Neighbours(queries, keys, joined, fallback)

    def rank(
        self,
        neighbours: Neighbours,
        k: int,
        exclude: Ragged | None = None,
        texts: Sequence[str] | None = None,
    ) -> TopLabels:
        """See `Predictor.rank`."""
        num_labels = self.labels.settings.num_labels
        tops = []
        for span in spans(len(neighbours), VOTE_QUERIES):
            chunk = neighbours.slice(span.start, span.stop)
            chunk_exclude = None if exclude is None else exclude.slice(span.start, span.stop)
            votes = count_votes(
                chunk,
                self.memory.positives,
                self.config,
                num_labels,
                chunk_exclude,
                self.labels.hidden_labels,
            )
            fallback = chunk.fallback or chunk.labels
            tops.append(rank_votes(votes, self.config.weight, k, fallback, num_labels))
        return TopLabels.concatenate(tops, k)

    def explain(
        self,
        neighbours: Neighbours,
        top: TopLabels,
        num_ranked: int,
        texts: Sequence[str] | None = None,
    ) -> AllReasons:
        """See `Predictor.explain`."""
        query_weight_BK, _ = key_weights(neighbours, self.config)
        weight_BK = self.config.weight * query_weight_BK
        # By query and answer, row and weight of each key that votes for it.
        votes: list[list[list[tuple[int, float]]]] = []
        rows = set()
        for query, label_ids in enumerate(top.ids.tolist()):
            by_label = dict[int, list[tuple[int, float]]]()
            for label_id in label_ids:
                by_label[label_id] = []
            # Keys without a weight do not vote, nor does a key for a label of no relevance.
            weight_K = weight_BK[query]
            for place in np.flatnonzero(weight_K).tolist():
                row = int(neighbours.queries.ids[query, place])
                weight = float(weight_K[place])
                for label_id, relevance in self.memory.queries.graded(row):
                    if relevance and label_id in by_label:
                        by_label[label_id].append((row, weight * relevance))
                        rows.add(row)
            # The largest weight first; those of equal weight in the order of the keys.
            votes.append(
                [sorted(by_label[label_id], key=lambda vote: -vote[1]) for label_id in label_ids]
            )
        # One look-up of names for all queries: reading a block of the file is what costs.
        names = self.memory.queries.names(rows)
        all_reasons = []
        for answers in votes:
            reasons = [Reasons(named_voters(voters, names)) for voters in answers]
            all_reasons.append(reasons)
        return all_reasons


def no_memory() -> ConfigError:
    """The error of a request for votes to a bundle without a memory."""
    return ConfigError(
        "this bundle has no memory of training queries; make one with `xmcray memory`"
    )
