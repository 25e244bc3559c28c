"""Finds the candidates of queries among the labels of a fused bundle, and scores them by every part.

A pair of query and label travels as one number, query * L + label, so that sorting numbers sorts
pairs by query and then by label.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xmcray.retrieval.label_index import LabelIndex
from xmcray.retrieval.memory import RememberedQueries
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.parts import KEYS, Candidates, MemberScores, PartsConfig, Votes
from xmcray.retrieval.word_index import WordIndex, nearest_labels
from xmcray.types import (
    BoolArray,
    Float32Array,
    Int64Array,
    Ragged,
    TopLabels,
    find_sorted,
    offsets_of,
    weights_of,
)

DEPTH = 100  # candidates that label vectors and label texts propose, or k if that is more


@dataclass(frozen=True, slots=True)
class _CommonWords:
    """What the words of B queries say.

    Attributes:
        voters: training queries with the most similar words.
        labels: labels with the most similar words, among those that may be answered.
        cosine_BL: float32, cosines with the texts of all labels; None if they do not count.
    """

    voters: TopLabels
    labels: TopLabels
    cosine_BL: Float32Array | None


@dataclass(frozen=True, eq=False)
class CandidateFinder:
    """Gathers what the parts propose for some queries.

    Attributes:
        config: settings of the parts.
        members: the label vectors of each member.
        queries: the training queries that vote, or None.
        words: the index of words, or None.
    """

    config: PartsConfig
    members: Sequence[LabelIndex]
    queries: RememberedQueries | None
    words: WordIndex | None

    def find(
        self, neighbours: Neighbours, texts: Sequence[str], k: int, exclude: Ragged | None
    ) -> Candidates:
        """The candidates of B queries.

        Args:
            neighbours: the nearest labels and training queries by vector.
            texts: the queries' texts; empty if no part compares words.
            k: answers per query.
            exclude: B lists of source label ids that are no answers.
        """
        by_member = neighbours.by_member
        common = self._common_words(texts, len(neighbours), k)
        word_votes = self._votes(common.voters)
        near_votes = [self._votes(near.queries) for near in by_member]
        proposals = [word_votes.pair_E, self._pairs(common.labels)]
        proposals += [votes.pair_E for votes in near_votes]
        for near in by_member:
            # The nearest labels; `near.labels` are the keys of the softmax alone.
            assert near.fallback is not None
            proposals.append(self._pairs(near.fallback))
        all_pairs = _distinct(np.concatenate(proposals))
        pairs = all_pairs[self._may_be_answered(all_pairs, exclude)]
        query_P, label_P = np.divmod(pairs, self._num_labels)
        # Pairs ascend, so the labels of each query lie next to each other.
        num_labels_B = np.bincount(query_P, minlength=len(neighbours))
        labels = Ragged(label_P, offsets_of(num_labels_B))
        scores = []
        for member, near, votes in zip(self.members, by_member, near_votes, strict=True):
            assert near.vectors is not None
            own_scores = MemberScores(
                score_P=_label_scores(member, near.vectors, labels),
                key_BK=near.labels.scores[:, :KEYS],
                votes=_for_candidates(votes, pairs),
            )
            scores.append(own_scores)
        text_P = np.zeros(len(pairs), np.float32)
        if common.cosine_BL is not None:
            text_P = common.cosine_BL[query_P, label_P]
        return Candidates(labels, tuple(scores), _for_candidates(word_votes, pairs), text_P)

    def _common_words(self, texts: Sequence[str], num_queries: int, k: int) -> _CommonWords:
        """Compares the words of queries with those of training queries and labels."""
        voters = TopLabels.empty(num_queries)
        labels = TopLabels.empty(num_queries)
        cosine_BL = None
        if self.words is None:
            return _CommonWords(voters, labels, cosine_BL)
        terms = self.words.terms(texts)
        if self.words.queries is not None:
            hidden_queries = None if self.queries is None else self.queries.hidden
            voters = self.words.nearest_queries(terms, self.config.word_keys, hidden_queries)
        if self.words.labels is not None:
            cosine_BL = self.words.label_cosines(terms)
            labels = nearest_labels(cosine_BL, max(k, DEPTH), self._labels.hidden_labels)
        return _CommonWords(voters, labels, cosine_BL)

    def _pairs(self, top: TopLabels) -> Int64Array:
        """The pairs of answers."""
        query_B1 = np.arange(len(top.ids))[:, None]
        pair_BK = query_B1 * self._num_labels + top.ids
        pairs: Int64Array = pair_BK[top.ids >= 0]
        return pairs

    def _votes(self, voters: TopLabels) -> Votes:
        """The votes of training queries for their positives.

        Each vote has the number of its pair, until `_for_candidates` finds the pair's place.
        """
        query_V, place_V = np.nonzero(voters.ids >= 0)
        if self.queries is None or not len(query_V):
            none = np.empty(0, np.int64)
            return Votes(voters, none, none, none)
        rows = voters.ids[query_V, place_V]
        positives = self.queries.positives.take(rows)
        # A voter has one vote per positive; `voter_E` is the voter of each vote.
        voter_E = positives.row_ids
        query_E = query_V[voter_E]
        pair_E = query_E * self._num_labels + positives.values
        return Votes(voters, pair_E, query_E, place_V[voter_E], weights_of(positives))

    def _may_be_answered(self, pairs: Int64Array, exclude: Ragged | None) -> BoolArray:
        """bool, one per pair."""
        may_be = np.ones(len(pairs), bool)
        hidden = self._labels.hidden_labels
        if hidden is not None:
            may_be &= ~hidden[pairs % self._num_labels]
        if exclude is not None and len(exclude.values):
            may_be &= ~np.isin(pairs, exclude.pairs(self._num_labels))
        return may_be

    @property
    def _labels(self) -> LabelIndex:
        """The labels, and which may be answered: the same in each member."""
        return self.members[0]

    @property
    def _num_labels(self) -> int:
        """L, also of labels that were removed."""
        return self._labels.settings.num_labels


def _distinct(pairs: Int64Array) -> Int64Array:
    """Each pair once, ascending; `np.unique` takes several times as long for few pairs."""
    ascending = np.sort(pairs)
    is_new = np.ones(len(ascending), bool)
    is_new[1:] = ascending[1:] != ascending[:-1]
    return ascending[is_new]


def _label_scores(member: LabelIndex, query_BD: Float32Array, labels: Ragged) -> Float32Array:
    """float32 [P], inner products of queries and their candidates."""
    if len(labels) == 1:
        # One query needs no padding.
        own_scores: Float32Array = member.scores_of(query_BD, labels.values[None])[0]
        return own_scores
    score_BC = member.scores_of(np.ascontiguousarray(query_BD), labels.padded())
    score_P: Float32Array = score_BC[labels.row_ids, labels.places]
    return score_P


def _for_candidates(votes: Votes, pairs: Int64Array) -> Votes:
    """The votes for candidates, with the place of each vote's pair among all pairs."""
    # A vote for a label that may not be answered has no pair.
    place_E, counts = find_sorted(pairs, votes.pair_E)
    if counts.all():
        return dataclasses.replace(votes, pair_E=place_E)
    relevance_E = votes.relevance_E
    return Votes(
        voters=votes.voters,
        pair_E=place_E[counts],
        query_E=votes.query_E[counts],
        place_E=votes.place_E[counts],
        relevance_E=None if relevance_E is None else relevance_E[counts],
    )
