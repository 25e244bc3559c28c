"""Says why a label is an answer of a fused bundle: what each part gave, and who voted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xmcray.retrieval.answers import Reasons, named_voters
from xmcray.retrieval.memory import RememberedQueries
from xmcray.retrieval.parts import Candidates, PartsConfig, Votes, memory_shares, word_shares
from xmcray.retrieval.votes import Float64Array
from xmcray.types import Int64Array, TopLabels, pairs_of

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
        is_answer = place_BK >= 0
        reason_of = self._reasons_by_place(place_BK[is_answer].tolist())
        all_reasons = []
        for places in place_BK.tolist():
            # A missing answer has place -1, and no reason.
            reasons = [reason_of.get(place, Reasons()) for place in places]
            all_reasons.append(reasons)
        return all_reasons

    def _reasons_by_place(self, places: Sequence[int]) -> dict[int, Reasons]:
        """The reasons for the candidates at some places."""
        weights = self._weights_of_voters()
        voters_of = {place: weights.get(place, {}) for place in places}
        # One look-up of names for all queries: reading a block of the file is what costs.
        rows = set[int]().union(*voters_of.values())
        names = {} if self.queries is None else self.queries.names(rows)
        gains = self.candidates.gains(self.config)
        reasons = {}
        for place, voters in voters_of.items():
            named = named_voters(_by_weight(voters), names)
            own_gains = {part: float(gain_P[place]) for part, gain_P in gains.items()}
            reasons[place] = Reasons(named, own_gains)
        return reasons

    def _places(self, top: TopLabels) -> Int64Array:
        """int64 [B, K], place of each answer among the candidates; -1 for a missing one."""
        labels = self.candidates.labels
        num_ids = 1 + int(labels.values.max(initial=0))
        # Candidates ascend by query and label. Every answer is one of them.
        place_BK = np.searchsorted(labels.pairs(num_ids), pairs_of(top.ids, num_ids))
        return np.where(top.ids >= 0, place_BK, -1)

    def _weights_of_voters(self) -> Mapping[int, VoterWeights]:
        """Weight of each voter by candidate; a training query may vote by vectors and by words."""
        weights: defaultdict[int, VoterWeights] = defaultdict(dict)
        for scores, member in zip(self.candidates.members, self.config.members, strict=True):
            votes = scores.votes
            shares_BK = memory_shares(votes.voters, member, self.config.memory_keys)
            _add_votes(weights, votes, member.memory * shares_BK)
        similar = self.candidates.words
        similar_BK = self.config.words * word_shares(similar.voters, self.config)
        _add_votes(weights, similar, similar_BK)
        return weights


def _add_votes(
    weights: defaultdict[int, VoterWeights], votes: Votes, weight_BK: Float64Array
) -> None:
    """Adds the weights of votes to those of their voters.

    Args:
        weights: by candidate; changes.
        votes: of one part.
        weight_BK: float64, weight of each voter of B queries.
    """
    weight_E = votes.weights(weight_BK)
    row_E = votes.voters.ids[votes.query_E, votes.place_E]
    # Voters beyond those that count have no weight.
    counts_E = weight_E > 0
    places = votes.pair_E[counts_E].tolist()
    rows = row_E[counts_E].tolist()
    for place, row, weight in zip(places, rows, weight_E[counts_E].tolist(), strict=True):
        voters = weights[place]
        voters[row] = voters.get(row, 0.0) + weight


def _by_weight(weights: VoterWeights) -> list[tuple[int, float]]:
    """Row and weight of each voter, the largest weight first, equal ones by row."""
    return sorted(weights.items(), key=lambda voter: (-voter[1], voter[0]))
