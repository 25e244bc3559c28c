"""Says why a label is an answer of a fused bundle: what each part gave, and who voted.

A pair is a query with one of its candidates. Its number is its position on axis P of `Candidates`.

Letters of axes, in addition to those in types.py:

    E  votes, each of one voter for one pair
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xmcray.retrieval.answers import Reasons, named_voters
from xmcray.retrieval.memory import RememberedQueries
from xmcray.retrieval.parts import Candidates, PartsConfig, Votes, memory_shares, word_shares
from xmcray.types import Float64Array, Int64Array, TopLabels, find_sorted, pairs_of

VoterWeights = dict[int, float]  # the weight of each voter's vote, by its row in the memory


@dataclass(frozen=True, eq=False)
class PartReasons:
    """Explains answers that were chosen from some candidates.

    Attributes:
        candidates: the pairs from which the answers were chosen.
        config: weights and settings of the parts.
        queries: the training queries that vote, by row; None if there are none.
    """

    candidates: Candidates
    config: PartsConfig
    queries: RememberedQueries | None

    def of_answers(self, top: TopLabels) -> list[list[Reasons]]:
        """The reasons for each answer, and empty `Reasons` for each missing answer."""
        pair_BK = self._pairs_of_answers(top)
        answered_pairs = pair_BK[pair_BK >= 0]
        reasons_of_pair = self._reasons_of_pairs(answered_pairs.tolist())
        all_reasons = []
        for pairs in pair_BK.tolist():
            # -1, which stands for a missing answer, is not among the pairs.
            reasons = [reasons_of_pair.get(pair, Reasons()) for pair in pairs]
            all_reasons.append(reasons)
        return all_reasons

    def _pairs_of_answers(self, top: TopLabels) -> Int64Array:
        """int64 [B, K], the pair of each answer; -1 for a missing answer."""
        labels = self.candidates.labels
        num_ids = 1 + int(labels.values.max(initial=0))
        # A key joins query and label in one number. The keys of all candidates ascend, and the
        # place of a key among them is the number of its pair.
        candidate_keys = labels.pairs(num_ids)
        answer_keys = pairs_of(top.ids, num_ids)
        pair_BK, is_candidate_BK = find_sorted(candidate_keys, answer_keys)
        is_answer_BK = top.ids >= 0
        assert is_candidate_BK[is_answer_BK].all(), "an answer is no candidate"
        return np.where(is_answer_BK, pair_BK, -1)

    def _reasons_of_pairs(self, pairs: Sequence[int]) -> dict[int, Reasons]:
        """The reasons for some answers, by their pairs."""
        voters_of_pair = self._voters_of_pairs(pairs)
        names = self._names_of(voters_of_pair.values())
        gains = self.candidates.gains(self.config)
        reasons_of_pair = {}
        for pair, voters in voters_of_pair.items():
            voting_queries = named_voters(_by_weight(voters), names)
            gain_of_part = {part: float(gain_P[pair]) for part, gain_P in gains.items()}
            reasons_of_pair[pair] = Reasons(voting_queries, gain_of_part)
        return reasons_of_pair

    def _names_of(self, voters_of_pairs: Iterable[VoterWeights]) -> Mapping[int, tuple[str, str]]:
        """Uid and text of the voters of several pairs, by row."""
        if self.queries is None:
            return {}
        # One look-up for all voters, because reading blocks of the file takes most of the time.
        rows: set[int] = set()
        for voters in voters_of_pairs:
            rows.update(voters)
        return self.queries.names(rows)

    def _voters_of_pairs(self, pairs: Sequence[int]) -> dict[int, VoterWeights]:
        """The voters of each pair, with the weights that their votes have in `Candidates.gains`.

        A training query may vote for a label several times: by its vector in each member and by its
        words. These weights add up.
        """
        voters_of_pair: dict[int, VoterWeights] = {pair: {} for pair in pairs}
        members = zip(self.candidates.members, self.config.members, strict=True)
        for member_scores, member_config in members:
            votes = member_scores.votes
            shares_BK = memory_shares(votes.voters, member_config, self.config.memory_keys)
            _add_votes(voters_of_pair, votes, member_config.memory * shares_BK)
        word_votes = self.candidates.words
        shares_BK = word_shares(word_votes.voters, self.config)
        _add_votes(voters_of_pair, word_votes, self.config.words * shares_BK)
        return voters_of_pair


def _add_votes(
    voters_of_pair: Mapping[int, VoterWeights], votes: Votes, weight_BK: Float64Array
) -> None:
    """Adds the votes of one part to the weights of their voters.

    Args:
        voters_of_pair: the voters of each wanted pair; changed in place.
        votes: the part's votes for all candidates.
        weight_BK: float64, the weight of each query's K voters.
    """
    weight_E = votes.weights(weight_BK)
    voter_row_E = votes.voters.ids[votes.query_E, votes.place_E]
    # A voter beyond the nearest ones that count has weight 0, and is not a reason.
    is_wanted_E = (weight_E > 0) & np.isin(votes.pair_E, list(voters_of_pair))
    pairs = votes.pair_E[is_wanted_E].tolist()
    rows = voter_row_E[is_wanted_E].tolist()
    weights = weight_E[is_wanted_E].tolist()
    for pair, row, weight in zip(pairs, rows, weights, strict=True):
        voters = voters_of_pair[pair]
        voters[row] = voters.get(row, 0.0) + weight


def _by_weight(voters: VoterWeights) -> list[tuple[int, float]]:
    """Row and weight of each voter, largest weight first, equal weights by lower row."""
    return sorted(voters.items(), key=lambda voter: (-voter[1], voter[0]))
