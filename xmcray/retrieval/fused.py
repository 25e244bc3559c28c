"""A predictor that is the weighted sum of several: the answers of a fused bundle (parts.py).

The search of vectors may run in several processes. Words are compared where the answers are ranked,
because their index is not sharded and takes part of a millisecond.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmcray import config as configs
from xmcray.errors import ConfigError
from xmcray.retrieval.answers import AllReasons, Reasons, named_voters
from xmcray.retrieval.bundle import Settings
from xmcray.retrieval.label_index import LabelIndex
from xmcray.retrieval.memory import Memory, RememberedQueries
from xmcray.retrieval.neighbours import Neighbours
from xmcray.retrieval.parts import (
    KEYS,
    PARTS,
    Candidates,
    PartsConfig,
    Votes,
    memory_shares,
    word_shares,
)
from xmcray.retrieval.readable import readable
from xmcray.retrieval.shards import SearchScope
from xmcray.retrieval.votes import MemoryConfig
from xmcray.retrieval.word_index import LABELS, QUERIES, WordIndex, best_columns
from xmcray.types import Float32Array, Int64Array, Ragged, TopLabels, offsets_of

DEPTH = 100  # candidates that label vectors and label texts propose, or k if that is more
CHUNK = 64  # queries whose candidates are in memory at once
NO_TEXTS = (
    "this bundle also compares words, so it needs the queries' texts, not their tokens or vectors"
)


@dataclass(frozen=True, eq=False)
class Fusion:
    """What a bundle needs to add up parts.

    Attributes:
        config: weights and settings of the parts.
        words: the index of words, or None if no part uses it.
        queries: labels and names of the training queries that vote, or None if none do.
    """

    config: PartsConfig
    words: WordIndex | None = None
    queries: RememberedQueries | None = None

    @classmethod
    def load(cls, bundle: Path, settings: Settings) -> Fusion:
        """Opens the parts of a verified bundle, but for its vectors.

        Raises:
            BundleError: a file is malformed, or does not fit the settings.
        """
        section = settings.predictor
        with readable(f"{bundle}/settings.json is malformed", "fuse the bundle again"):
            config = configs.build(PartsConfig, section["parts"], "parts.")
            num_queries = int(section["num_queries"])
            if not config.used():
                raise ValueError("no part has a weight")
        used = config.used()
        queries = None
        if "memory" in used or "words" in used:
            queries = RememberedQueries.load(bundle, num_queries, settings.num_labels)
        kinds = []
        if "words" in used:
            kinds.append(QUERIES)
        if "texts" in used:
            kinds.append(LABELS)
        words = None
        if kinds:
            num_exported = settings.first_added or settings.num_labels
            words = WordIndex.load(bundle, num_queries, num_exported, kinds)
        return cls(config, words, queries)

    def with_labels(self, texts: Sequence[str]) -> Fusion:
        """A view with labels that join, in the order of their ids."""
        if self.words is None:
            return self
        return dataclasses.replace(self, words=self.words.with_labels(texts))


@dataclass(frozen=True, eq=False)
class FusedPredictor:
    """Adds up the scores of parts. Implements `Predictor`.

    Attributes:
        fusion: the parts.
        labels: the labels.
        memory: the vectors of training queries, or None.
    """

    fusion: Fusion
    labels: LabelIndex
    memory: Memory | None

    def find(self, query_BD: Float32Array, k: int, scope: SearchScope) -> Neighbours:
        """See `Predictor.find`."""
        queries = TopLabels.empty(len(query_BD))
        if self.memory is not None:
            keys = MemoryConfig(weight=1.0, keys=self.fusion.config.memory_keys)
            queries = self.memory.search(query_BD, keys, scope)
        num_labels = self.labels.settings.num_labels
        depth = min(max(k, DEPTH), num_labels)
        candidates = self.labels.search(query_BD, depth, scope)
        label_keys = candidates
        if self.labels.changed or self.labels.allowed is not None:
            # The softmax always is over labels of the export, so that no other score changes.
            label_keys = self.labels.search_exported(query_BD, min(KEYS, num_labels), scope)
        return Neighbours(queries, label_keys, fallback=candidates, vectors=query_BD)

    def rank(
        self,
        neighbours: Neighbours,
        k: int,
        exclude: Ragged | None = None,
        texts: Sequence[str] | None = None,
    ) -> TopLabels:
        """See `Predictor.rank`."""
        config = self.fusion.config
        all_candidates = self.all_candidates(neighbours, k, exclude, texts)
        tops = [candidates.top(config, k) for candidates in all_candidates]
        return TopLabels.concatenate(tops, k)

    def explain(
        self, neighbours: Neighbours, top: TopLabels, texts: Sequence[str] | None = None
    ) -> AllReasons:
        """See `Predictor.explain`."""
        reasons: list[list[Reasons]] = []
        start = 0
        for candidates in self.all_candidates(neighbours, top.width, None, texts):
            stop = start + len(candidates.labels)
            reasons += self._reasons(candidates, top.slice(start, stop))
            start = stop
        return reasons

    def all_candidates(
        self,
        neighbours: Neighbours,
        k: int,
        exclude: Ragged | None,
        texts: Sequence[str] | None,
    ) -> Iterable[Candidates]:
        """The candidates of all queries, at most CHUNK queries at a time.

        Args:
            neighbours: what `find` found.
            k: answers per query.
            exclude: source label ids that are no answers to a query.
            texts: the queries' texts.
        Raises:
            ConfigError: a part needs texts, and there are none.
        """
        if texts is None and self.fusion.words is not None:
            raise ConfigError(NO_TEXTS)
        for start in range(0, len(neighbours), CHUNK):
            chunk = neighbours.slice(start, start + CHUNK)
            stop = start + len(chunk)
            yield self._candidates(
                chunk,
                k,
                None if exclude is None else exclude.slice(start, stop),
                [] if texts is None else texts[start:stop],
            )

    def _candidates(
        self, neighbours: Neighbours, k: int, exclude: Ragged | None, texts: Sequence[str]
    ) -> Candidates:
        num_queries = len(neighbours)
        assert neighbours.fallback is not None
        assert neighbours.vectors is not None
        proposals = [_pairs(neighbours.fallback, self._num_labels)]
        words = self.fusion.words
        word_voters = TopLabels.empty(num_queries)
        cosine_BL = None
        if words is not None:
            query_BV = words.vectors(texts)
            if words.queries is not None:
                word_keys = self.fusion.config.word_keys
                hidden = None if self.fusion.queries is None else self.fusion.queries.hidden
                word_voters = words.nearest_queries(query_BV, word_keys, hidden)
            if words.labels is not None:
                cosine_BL = words.label_cosines(query_BV)
                best = best_columns(self._answerable(cosine_BL), max(k, DEPTH))
                proposals.append(_pairs(best, self._num_labels))
        proposals.append(self._voted_pairs(neighbours.queries)[0])
        proposals.append(self._voted_pairs(word_voters)[0])
        pairs = self._kept(np.unique(np.concatenate(proposals)), exclude)
        query_P, label_P = np.divmod(pairs, self._num_labels)
        labels = Ragged(label_P, offsets_of(np.bincount(query_P, minlength=num_queries)))
        return Candidates(
            labels=labels,
            score_P=self._label_scores(neighbours.vectors, labels),
            key_BK=neighbours.labels.scores[:, :KEYS],
            memory=self._votes(neighbours.queries, pairs),
            words=self._votes(word_voters, pairs),
            text_P=_at(cosine_BL, labels),
        )

    def _kept(self, pairs: Int64Array, exclude: Ragged | None) -> Int64Array:
        """The pairs whose labels may be answered."""
        hidden = self.labels.hidden_labels
        if hidden is not None:
            pairs = pairs[~hidden[pairs % self._num_labels]]
        if exclude is not None and len(exclude.values):
            excluded = exclude.row_ids * self._num_labels + exclude.values
            pairs = pairs[~np.isin(pairs, excluded)]
        return pairs

    def _answerable(self, cosine_BL: Any) -> Any:
        """The cosines without those of labels that are no answers."""
        hidden = self.labels.hidden_labels
        if hidden is None:
            return cosine_BL
        answerable = cosine_BL.copy()
        answerable.data[hidden[answerable.indices]] = 0
        return answerable

    def _label_scores(self, query_BD: Float32Array, labels: Ragged) -> Float32Array:
        """float32 [P], inner products of queries and their candidates."""
        width = int(labels.lengths.max(initial=0))
        label_BC = np.full((len(labels), width), -1, np.int64)
        label_BC[labels.row_ids, labels.places] = labels.values
        score_BC = self.labels.scores_of(np.ascontiguousarray(query_BD), label_BC)
        scores: Float32Array = score_BC[labels.row_ids, labels.places]
        return scores

    def _voted_pairs(self, voters: TopLabels) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Pair (query * L + label), query and voter's place of each vote."""
        query_K, place_K = np.nonzero(voters.ids >= 0)
        if self.fusion.queries is None or not len(query_K):
            empty = np.empty(0, np.int64)
            return empty, empty, empty
        votes = self.fusion.queries.positives.take(voters.ids[query_K, place_K])
        # A voter has one vote per positive; `voter` is the voter of each vote.
        voter = votes.row_ids
        query_E = query_K[voter]
        return query_E * self._num_labels + votes.values, query_E, place_K[voter]

    def _votes(self, voters: TopLabels, pairs: Int64Array) -> Votes:
        voted_E, query_E, place_E = self._voted_pairs(voters)
        # A vote for a label that may not be answered has no pair.
        counts = np.isin(voted_E, pairs)
        pair_E = np.searchsorted(pairs, voted_E[counts])
        return Votes(voters, pair_E, query_E[counts], place_E[counts])

    def _reasons(self, candidates: Candidates, top: TopLabels) -> list[list[Reasons]]:
        """Why each of the best labels is an answer."""
        config = self.fusion.config
        gain_PF = candidates.parts(config) * config.weights()
        pairs = candidates.labels.row_ids * self._num_labels + candidates.labels.values
        votes_of_pair = _votes_by_pair(candidates, config)
        # Every answer is a candidate, and pairs are ascending.
        query_B1 = np.arange(len(top.ids))[:, None]
        place_BK = np.searchsorted(pairs, query_B1 * self._num_labels + top.ids)
        is_answer_BK = top.ids >= 0
        rows: set[int] = set()
        for place in place_BK[is_answer_BK].tolist():
            rows |= votes_of_pair.get(place, {}).keys()
        names: dict[int, tuple[str, str]] = {}
        if self.fusion.queries is not None:
            names = self.fusion.queries.names(rows)

        def reasons_of(place: int) -> Reasons:
            gains = dict(zip(PARTS, gain_PF[place].tolist(), strict=True))
            used_gains = {part: gains[part] for part in config.used()}
            votes = votes_of_pair.get(place, {})
            # The largest weight first, equal ones by row.
            by_weight = sorted(votes.items(), key=lambda vote: (-vote[1], vote[0]))
            return Reasons(named_voters(by_weight, names), used_gains)

        reasons = []
        for places, is_answers in zip(place_BK.tolist(), is_answer_BK.tolist(), strict=True):
            pairs_of_query = zip(places, is_answers, strict=True)
            reasons.append(
                [reasons_of(p) if is_there else Reasons() for p, is_there in pairs_of_query]
            )
        return reasons

    @property
    def _num_labels(self) -> int:
        return self.labels.settings.num_labels


def fixed_parts() -> ConfigError:
    """The error of a request that changes how the memory of a fused bundle votes."""
    return ConfigError(
        "the parts of a fused bundle have settings that were chosen together; leave settings of"
        " the memory out, or fuse again"
    )


def _pairs(top: TopLabels, num_labels: int) -> Int64Array:
    """query * L + label of each answer."""
    query_P, place_P = np.nonzero(top.ids >= 0)
    return query_P * num_labels + top.ids[query_P, place_P]


def _at(cosine_BL: Any, labels: Ragged) -> Float32Array:
    """float32 [P], the entries of a CSR matrix at some pairs; zeros without a matrix."""
    values = np.zeros(len(labels.values), np.float32)
    if cosine_BL is None:
        return values
    # One dense row for all queries: only the entries that were written are cleared again.
    dense_L = np.zeros(cosine_BL.shape[1], np.float32)
    for query in range(len(labels)):
        entries = slice(cosine_BL.indptr[query], cosine_BL.indptr[query + 1])
        candidates = slice(labels.offsets[query], labels.offsets[query + 1])
        dense_L[cosine_BL.indices[entries]] = cosine_BL.data[entries]
        values[candidates] = dense_L[labels.values[candidates]]
        dense_L[cosine_BL.indices[entries]] = 0
    return values


def _votes_by_pair(candidates: Candidates, config: PartsConfig) -> dict[int, dict[int, float]]:
    """Weight of each voter, by candidate and by row of the memory."""
    weights: dict[int, dict[int, float]] = {}
    memory_BK = config.memory * memory_shares(candidates.memory.voters, config)
    words_BK = config.words * word_shares(candidates.words.voters, config)
    for votes, weight_BK in ((candidates.memory, memory_BK), (candidates.words, words_BK)):
        row_E = votes.voters.ids[votes.query_E, votes.place_E]
        weight_E = weight_BK[votes.query_E, votes.place_E]
        entries = zip(votes.pair_E.tolist(), row_E.tolist(), weight_E.tolist(), strict=True)
        for pair, row, weight in entries:
            if weight > 0:
                # The same training query may vote by its vector and by its words.
                rows = weights.setdefault(pair, {})
                rows[row] = rows.get(row, 0.0) + weight
    return weights
