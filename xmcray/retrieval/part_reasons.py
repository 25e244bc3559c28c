"""Says why a label is an answer of a fused bundle: what each part gave, and who voted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xmcray.retrieval.answers import Reasons, named_voters
from xmcray.retrieval.memory import RememberedQueries
from xmcray.retrieval.parts import Candidates, PartsConfig, Votes, memory_shares, word_shares
from xmcray.retrieval.votes import Float64Array
from xmcray.types import Int64Array, TopLabels

VoterWeights = dict[int, float]  # by row of the memory


@dataclass(frozen=True, eq=False)
class PartReasons:
    """The reasons for answers that are among some candidates.

    Attributes:
        candidates: of B queries.
        config: weights and settings of the parts.
        queries: names of the training queries, or None if none vote.
    """

    candidates: Candidates
    config: PartsConfig
    queries: RememberedQueries | None

    def of(self, top: TopLabels) -> list[list[Reasons]]:
        """The reasons for each answer; none for a missing one."""
        place_BK = self._places(top)
        weights = self._weights_of_voters()
        rows: set[int] = set()
        for place in place_BK[place_BK >= 0].tolist():
            rows |= weights.get(place, {}).keys()
        # One look-up of names for all queries: reading a block of the file is what costs.
        names = {} if self.queries is None else self.queries.names(rows)
        gains = self.candidates.gains(self.config)
        all_reasons = []
        for places in place_BK.tolist():
            reasons = []
            for place in places:
                if place < 0:
                    reasons.append(Reasons())
                    continue
                voters = _by_weight(weights.get(place, {}))
                own_gains = {part: float(gain_P[place]) for part, gain_P in gains.items()}
                reasons.append(Reasons(named_voters(voters, names), own_gains))
            all_reasons.append(reasons)
        return all_reasons

    def _places(self, top: TopLabels) -> Int64Array:
        """int64 [B, K], place of each answer among the candidates; -1 for a missing one."""
        labels = self.candidates.labels
        stride = int(labels.values.max(initial=0)) + 1
        # Pairs of query and label as one number each, ascending. Every answer is a candidate.
        pairs = labels.row_ids * stride + labels.values
        query_B1 = np.arange(len(top.ids))[:, None]
        place_BK = np.searchsorted(pairs, query_B1 * stride + top.ids)
        return np.where(top.ids >= 0, place_BK, -1)

    def _weights_of_voters(self) -> dict[int, VoterWeights]:
        """Weight of each voter by candidate; a training query may vote by vectors and by words."""
        weights: dict[int, VoterWeights] = {}
        for scores, member in zip(self.candidates.members, self.config.members, strict=True):
            votes = scores.votes
            shares_BK = memory_shares(votes.voters, member, self.config.memory_keys)
            _add_votes(weights, votes, member.memory * shares_BK)
        similar = self.candidates.words
        similar_BK = self.config.words * word_shares(similar.voters, self.config)
        _add_votes(weights, similar, similar_BK)
        return weights


def _add_votes(weights: dict[int, VoterWeights], votes: Votes, weight_BK: Float64Array) -> None:
    """Adds the weights of votes to those of their voters."""
    row_E = votes.voters.ids[votes.query_E, votes.place_E]
    weight_E = weight_BK[votes.query_E, votes.place_E]
    entries = zip(votes.pair_E.tolist(), row_E.tolist(), weight_E.tolist(), strict=True)
    for pair, row, weight in entries:
        if weight > 0:
            rows = weights.setdefault(pair, {})
            rows[row] = rows.get(row, 0.0) + weight


def _by_weight(weights: VoterWeights) -> list[tuple[int, float]]:
    """Row and weight of each voter, the largest weight first, equal ones by row."""
    return sorted(weights.items(), key=lambda voter: (-voter[1], voter[0]))
