"""Finds the candidates of queries among the labels of a fused bundle, and scores them by every part.

A pair of query and label travels as one number, query * L + label, so that sorting numbers sorts
pairs by query and then by label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmcray.retrieval.label_index import LabelIndex
from xmcray.retrieval.memory import RememberedQueries
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.parts import KEYS, Candidates, MemberScores, PartsConfig, Votes
from xmcray.retrieval.word_index import WordIndex, best_columns
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels, offsets_of

DEPTH = 100  # candidates that label vectors and label texts propose, or k if that is more


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
        num_queries = len(neighbours)
        word_votes = self._votes(TopLabels.empty(num_queries))
        cosine_BL = None
        proposals = []
        near_votes = []
        for near in neighbours.by_member:
            votes = self._votes(near.queries)
            near_votes.append(votes)
            proposals.append(votes.pair_E)
            # The nearest labels; `near.labels` are the keys of the softmax alone.
            assert near.fallback is not None
            proposals.append(self._pairs(near.fallback))
        if self.words is not None:
            query_BV = self.words.vectors(texts)
            if self.words.queries is not None:
                word_votes = self._votes(self._similar_queries(query_BV))
            if self.words.labels is not None:
                cosine_BL = self.words.label_cosines(query_BV)
                proposals.append(self._pairs(self._similar_labels(cosine_BL, k)))
        proposals.append(word_votes.pair_E)
        pairs = np.unique(np.concatenate(proposals))
        pairs = pairs[self._may_be_answered(pairs, exclude)]
        labels = self._by_query(pairs, num_queries)
        scores = []
        for member, near, votes in zip(self.members, neighbours.by_member, near_votes, strict=True):
            assert near.vectors is not None
            own_scores = MemberScores(
                score_P=_label_scores(member, near.vectors, labels),
                key_BK=near.labels.scores[:, :KEYS],
                votes=_for_candidates(votes, pairs),
            )
            scores.append(own_scores)
        return Candidates(
            labels=labels,
            members=tuple(scores),
            words=_for_candidates(word_votes, pairs),
            text_P=_entries(cosine_BL, labels),
        )

    def _similar_queries(self, query_BV: Any) -> TopLabels:
        """The training queries with the most similar words."""
        assert self.words is not None
        hidden = None if self.queries is None else self.queries.hidden
        return self.words.nearest_queries(query_BV, self.config.word_keys, hidden)

    def _similar_labels(self, cosine_BL: Any, k: int) -> TopLabels:
        """The labels with the most similar words, among those that may be answered."""
        hidden = self._labels.hidden_labels
        if hidden is not None:
            cosine_BL = cosine_BL.copy()
            cosine_BL.data[hidden[cosine_BL.indices]] = 0
        return best_columns(cosine_BL, max(k, DEPTH))

    def _pairs(self, top: TopLabels) -> Int64Array:
        """The pairs of answers."""
        query_P, place_P = np.nonzero(top.ids >= 0)
        return query_P * self._num_labels + top.ids[query_P, place_P]

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
        return Votes(voters, pair_E, query_E, place_V[voter_E])

    def _may_be_answered(self, pairs: Int64Array, exclude: Ragged | None) -> Any:
        """bool, one per pair."""
        may_be = np.ones(len(pairs), bool)
        hidden = self._labels.hidden_labels
        if hidden is not None:
            may_be &= ~hidden[pairs % self._num_labels]
        if exclude is not None and len(exclude.values):
            excluded = exclude.row_ids * self._num_labels + exclude.values
            may_be &= ~np.isin(pairs, excluded)
        return may_be

    def _by_query(self, pairs: Int64Array, num_queries: int) -> Ragged:
        """The labels of ascending pairs, a list per query."""
        query_P, label_P = np.divmod(pairs, self._num_labels)
        lengths = np.bincount(query_P, minlength=num_queries)
        return Ragged(label_P, offsets_of(lengths))

    @property
    def _labels(self) -> LabelIndex:
        """The labels, and which may be answered: the same in each member."""
        return self.members[0]

    @property
    def _num_labels(self) -> int:
        """L, also of labels that were removed."""
        return self._labels.settings.num_labels


def _label_scores(member: LabelIndex, query_BD: Float32Array, labels: Ragged) -> Float32Array:
    """float32 [P], inner products of queries and their candidates."""
    rows = labels.row_ids
    places = labels.places
    width = int(labels.lengths.max(initial=0))
    label_BC = np.full((len(labels), width), -1, np.int64)
    label_BC[rows, places] = labels.values
    score_BC = member.scores_of(np.ascontiguousarray(query_BD), label_BC)
    score_P: Float32Array = score_BC[rows, places]
    return score_P


def _for_candidates(votes: Votes, pairs: Int64Array) -> Votes:
    """The votes for candidates, with the place of each vote's pair among all pairs."""
    place_E = np.searchsorted(pairs, votes.pair_E)
    # A vote for a label that may not be answered has no pair. One beyond the last pair would be out
    # of range; it fails the comparison instead.
    place_E = np.minimum(place_E, max(0, len(pairs) - 1))
    counts = np.zeros(len(place_E), bool)
    if len(pairs):
        counts = pairs[place_E] == votes.pair_E
    return Votes(
        voters=votes.voters,
        pair_E=place_E[counts],
        query_E=votes.query_E[counts],
        place_E=votes.place_E[counts],
    )


def _entries(cosine_BL: Any, labels: Ragged) -> Float32Array:
    """float32 [P], the entries of a CSR matrix at the candidates; zeros without a matrix."""
    cosine_P = np.zeros(len(labels.values), np.float32)
    if cosine_BL is None:
        return cosine_P
    # One dense row serves all queries: only the entries that were written are cleared again.
    row_L = np.zeros(cosine_BL.shape[1], np.float32)
    for query in range(len(labels)):
        entries = slice(cosine_BL.indptr[query], cosine_BL.indptr[query + 1])
        columns = cosine_BL.indices[entries]
        row_L[columns] = cosine_BL.data[entries]
        span = slice(labels.offsets[query], labels.offsets[query + 1])
        cosine_P[span] = row_L[labels.values[span]]
        row_L[columns] = 0
    return cosine_P
