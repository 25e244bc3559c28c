"""Says why a label is an answer of a fused bundle: what each part gave, and who voted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xmcray.retrieval.answers import Reasons, named_voters
from xmcray.retrieval.memory import RememberedQueries
from xmcray.retrieval.parts import Candidates, PartsConfig, Votes, memory_shares, word_shares
from xmcray.types import Float64Array, Int64Array, TopLabels, pairs_of

VoterWeights = dict[int, float]  # the weight of each voter's vote, by its row in the memory


@dataclass(frozen=True, eq=False)
class PartReasons:
    """The reasons for answers that are among some candidates.

    A place, below, is that of a candidate in the flat list of all pairs of query and label.

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
        answer_places = place_BK[place_BK >= 0].tolist()
        reasons_at = self._reasons_at(answer_places)
        all_reasons = []
        for places in place_BK.tolist():
            # A missing answer has place -1, and no reason.
            reasons = [reasons_at.get(place, Reasons()) for place in places]
            all_reasons.append(reasons)
        return all_reasons

    def _places(self, top: TopLabels) -> Int64Array:
        """int64 [B, K], place of each answer; -1 for a missing one."""
        labels = self.candidates.labels
        num_ids = 1 + int(labels.values.max(initial=0))
        candidate_pairs = labels.pairs(num_ids)
        answer_pairs = pairs_of(top.ids, num_ids)
        # A look-up, because candidates ascend by query and label, and every answer is one of them.
        place_BK = np.searchsorted(candidate_pairs, answer_pairs)
        return np.where(top.ids >= 0, place_BK, -1)

    def _reasons_at(self, places: Sequence[int]) -> dict[int, Reasons]:
        """The reasons for the candidates at some places."""
        all_voters = self._voters()
        voters_at = {place: all_voters.get(place, {}) for place in places}
        names = self._names_of(voters_at.values())
        gains = self.candidates.gains(self.config)
        reasons_at = {}
        for place, voters in voters_at.items():
            voting_queries = named_voters(_by_weight(voters), names)
            gain_of_part = {part: float(gain_P[place]) for part, gain_P in gains.items()}
            reasons_at[place] = Reasons(voting_queries, gain_of_part)
        return reasons_at

    def _names_of(self, voters: Iterable[VoterWeights]) -> Mapping[int, tuple[str, str]]:
        """Uid and text of the voters of several candidates, by row."""
        if self.queries is None:
            return {}
        # One look-up for all of them, because reading a block of the file is what costs.
        rows: set[int] = set()
        for weights in voters:
            rows.update(weights)
        return self.queries.names(rows)

    def _voters(self) -> Mapping[int, VoterWeights]:
        """The voters of each candidate, by place; a query may vote by its vector and by its words."""
        voters_at: defaultdict[int, VoterWeights] = defaultdict(dict)
        for scores, member in zip(self.candidates.members, self.config.members, strict=True):
            shares_BK = memory_shares(scores.votes.voters, member, self.config.memory_keys)
            _add_votes(voters_at, scores.votes, member.memory * shares_BK)
        word_votes = self.candidates.words
        shares_BK = word_shares(word_votes.voters, self.config)
        _add_votes(voters_at, word_votes, self.config.words * shares_BK)
        return voters_at


def _add_votes(
    voters_at: defaultdict[int, VoterWeights], votes: Votes, weight_BK: Float64Array
) -> None:
    """Adds the votes of one part to the weights of their voters.

    Args:
        voters_at: voters by the place of the candidate; changes.
        votes: of the part.
        weight_BK: float64, weight of each voter of B queries.
    """
    weight_E = votes.weights(weight_BK)
    row_E = votes.voters.ids[votes.query_E, votes.place_E]
    # Voters beyond those that count have no weight.
    counts_E = weight_E > 0
    places = votes.pair_E[counts_E].tolist()
    rows = row_E[counts_E].tolist()
    weights = weight_E[counts_E].tolist()
    for place, row, weight in zip(places, rows, weights, strict=True):
        voters = voters_at[place]
        voters[row] = voters.get(row, 0.0) + weight


def _by_weight(voters: VoterWeights) -> list[tuple[int, float]]:
    """Row and weight of each voter, the largest weight first, equal ones by row."""
    return sorted(voters.items(), key=lambda voter: (-voter[1], voter[0]))
