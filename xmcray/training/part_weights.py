"""Chooses the weights of the parts of a fused bundle on held-out queries.

The search goes along one setting at a time, over a fixed grid, until nothing gets better. It draws
nothing at random, so it chooses the same weights every time. A part stays if the answers without it,
with all other settings chosen anew, are worse by a paired test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmcray.data.corpus import Corpus
from xmcray.evaluation.evaluate import sign_flip
from xmcray.evaluation.metrics import MAIN_METRICS, Metrics
from xmcray.retrieval.parts import Candidates, MemberConfig, PartsConfig
from xmcray.types import Float32Array, Float64Array, Ragged, TopLabels

METRICS = ("P@1", "P@5", "PSP@5")  # their mean is maximised
WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
MEMORY_TEMPERATURES = (0.01, 0.02, 0.035, 0.05, 0.08, 0.12, 0.2)
WORD_KEYS = (5, 10, 20, 40)
# Of the typical distance between the best and the tenth label.
LABEL_TEMPERATURES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)
# The smallest temperature is as small as a bundle allows then.
SMALLEST_SPREAD = 0.0025
MEMORY_KEYS = 50
# A part stays if a paired test of the answers without it has a smaller p-value. At 0.157 one more
# free weight is expected to help on new queries (Akaike's criterion).
LARGEST_P_VALUE = 0.157
PERMUTATIONS = 4999
DEPTH = 10  # answers per query that are measured, as many as the metrics look at
_START = 0.5  # of the weights
_ROUNDS = 6
_LEAST_GAIN = 1e-9  # of the objective; smaller ones are rounding


@dataclass(frozen=True, slots=True)
class PartTest:
    """What the answers lose without one part.

    Attributes:
        part: its name.
        weight: its weight where it stays, 0 where it is left out.
        without: metrics of the best answers without it.
        p_value: of the paired test of their mean against the answers with it.
    """

    part: str
    weight: float
    without: Mapping[str, float]
    p_value: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen settings.

    Attributes:
        config: weights and settings of the parts.
        metrics: on the held-out queries.
        alone: metrics of the label vectors of each member alone, by the name of the part.
        tests: one per part.
        queries: number of held-out queries.
    """

    config: PartsConfig
    metrics: Mapping[str, float]
    alone: Mapping[str, Mapping[str, float]]
    tests: Sequence[PartTest]
    queries: int

    def plain(self) -> dict[str, Any]:
        """Plain values for the bundle's manifest and for programs."""
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Choice:
        """What `plain` returned, also after it was written as JSON."""
        tests = [PartTest(**test) for test in plain["tests"]]
        config = PartsConfig.read(plain["config"])
        return cls(**{**plain, "config": config, "tests": tests})


@dataclass(frozen=True)
class _Measured:
    """Answers of one setting.

    Attributes:
        config: the setting.
        objective: mean of the metrics that decide.
        share_Q: float64 [queries], what each query adds to the objective.
    """

    config: PartsConfig
    objective: float
    share_Q: Float64Array

    def is_better_than(self, other: _Measured) -> bool:
        """Whether the objective is larger by more than rounding."""
        return self.objective > other.objective + _LEAST_GAIN


class WeightSearch:
    """Measures settings on the candidates of held-out queries.

    Args:
        corpus: gives the propensities.
        candidates: of all queries, in order.
        truth: positives of the queries.
        start: names the members, and how many training queries vote by vectors.
        metrics: names of the metrics whose mean is maximised.
    """

    def __init__(
        self,
        corpus: Corpus,
        candidates: Sequence[Candidates],
        truth: Ragged,
        start: PartsConfig,
        metrics: Sequence[str] = METRICS,
    ) -> None:
        self.candidates = candidates
        self.truth = truth
        self.metrics = metrics
        self._hits = HitValues(corpus, truth, metrics)
        self._tables = []
        first = 0
        for chunk in candidates:
            stop = first + len(chunk.labels)
            self._tables.append(_Table(chunk, self._hits.between(first, stop)))
            first = stop
        self._spreads = [_spread(candidates, place) for place in range(len(start.members))]
        self._start = self._equal_weights(start)
        self._measured: dict[PartsConfig, _Measured] = {}

    def choose(self) -> Choice:
        """The best settings, without the parts that do not earn their place."""
        best = self._best(self._start)
        tests: dict[str, PartTest] = {}
        for part in self._start.parts:
            # Nothing is lost without a part whose best weight is 0.
            tests[part] = PartTest(part, 0.0, self._named(best), 1.0)
        while shorter := self._without_each_part(best):
            for part, other in shorter.items():
                p_value = self._p_value(best, other)
                tests[part] = PartTest(part, 0.0, self._named(other), p_value)
            weakest = max(shorter, key=lambda part: tests[part].p_value)
            if tests[weakest].p_value < LARGEST_P_VALUE:
                break
            best = shorter[weakest]
        weighted_tests = []
        for part, test in tests.items():
            weight = best.config.weight(part)
            weighted_tests.append(dataclasses.replace(test, weight=weight))
        return Choice(
            config=best.config.only_used_members(),
            metrics=self._named(best),
            alone=self._each_member_alone(),
            tests=weighted_tests,
            queries=len(self.truth),
        )

    def _without_each_part(self, best: _Measured) -> dict[str, _Measured]:
        """The best answers without each of the parts that are used; the last part stays."""
        used = best.config.used()
        if len(used) == 1:
            return {}
        return {part: self._best(best.config.without(part)) for part in used}

    def _each_member_alone(self) -> dict[str, Mapping[str, float]]:
        """Metrics of the label vectors of each member alone, by the name of the part."""
        alone: dict[str, Mapping[str, float]] = {}
        for member in self._start.members:
            config = self._start
            part = member.full("labels")
            # Alone, a temperature changes no order, unless it is so low that shares become zero.
            for other in config.used():
                if other != part:
                    config = config.without(other)
            alone[part] = self._named(self.measure(config))
        return alone

    def measure(self, config: PartsConfig, varied: str = "") -> _Measured:
        """Answers all queries with some settings; settings that were measured are remembered.

        Args:
            config: the settings.
            varied: the part that alone differs from the settings that were measured before; for
                speed.
        """
        if config not in self._measured:
            shares = [table.shares(config, varied) for table in self._tables]
            share_Q = np.concatenate(shares)
            self._measured[config] = _Measured(config, float(share_Q.sum()), share_Q)
        return self._measured[config]

    def _equal_weights(self, start: PartsConfig) -> PartsConfig:
        """Equal weights of all parts, and temperatures that fit the size of the inner products."""
        members: list[MemberConfig] = []
        for member, spread in zip(start.members, self._spreads, strict=True):
            equal = dataclasses.replace(
                member,
                # Only the ratios of weights matter, so the first weight stays as it is.
                labels=_START if members else 1.0,
                memory=_START,
                label_temperature=spread * 0.35,
            )
            members.append(equal)
        return PartsConfig(
            members=tuple(members),
            words=_START,
            texts=_START,
            memory_keys=start.memory_keys,
        )

    def _best(self, start: PartsConfig) -> _Measured:
        """The best settings that a search along one setting at a time reaches.

        Args:
            start: where it begins. A part of weight 0 stays out.
        """
        grid = self._grid(start)
        best = self.measure(start)
        for _ in range(_ROUNDS):
            before = best
            for name, values in grid.items():
                best = self._best_value(best, name, values)
            if not best.is_better_than(before):
                break
        return best

    def _best_value(self, best: _Measured, name: str, values: Sequence[float]) -> _Measured:
        """The best settings after one of them was varied."""
        for value in values:
            config = best.config.changed(name, value)
            # Without any part there are no answers.
            if not config.used():
                continue
            measured = self.measure(config, varied=part_of(name))
            if measured.is_better_than(best):
                best = measured
        return best

    def _grid(self, start: PartsConfig) -> dict[str, Sequence[float]]:
        """The values of each setting that changes an answer."""
        used = start.used()
        grid: dict[str, Sequence[float]] = {}
        # Only the ratios of weights matter, so the first weight stays as it is.
        for part in used[1:]:
            grid[part] = WEIGHTS
        for member, spread in zip(start.members, self._spreads, strict=True):
            if member.labels and len(used) > 1:
                temperatures = [share * spread for share in LABEL_TEMPERATURES]
                grid[member.full("label_temperature")] = temperatures
            if member.memory:
                grid[member.full("memory_temperature")] = MEMORY_TEMPERATURES
        if start.words:
            grid["word_keys"] = WORD_KEYS
        return grid

    def _p_value(self, better: _Measured, other: _Measured) -> float:
        """Of the paired test that both are equally good; 1 if the other is not worse."""
        if other.objective >= better.objective:
            return 1.0
        difference_Q = (better.share_Q - other.share_Q) * len(self.truth)
        # One column, because `sign_flip` tests the columns of several metrics.
        p_values = sign_flip(difference_Q[:, None], PERMUTATIONS, seed=0)
        return float(p_values[0])

    def _named(self, measured: _Measured) -> dict[str, float]:
        """The metrics that decide, by name."""
        tops = [candidates.top(measured.config, DEPTH) for candidates in self.candidates]
        answers = TopLabels.concatenate(tops, DEPTH)
        values = self._hits.metrics_of(answers, self.truth).result()
        return {name: values[name] for name in self.metrics}


# Settings that are no weights, with the part that they belong to.
_PART_OF_SETTING = {
    "label_temperature": "labels",
    "memory_temperature": "memory",
    "word_keys": "words",
}


def part_of(setting: str) -> str:
    """The part whose weight or other setting a setting is, by their names."""
    member, _, field = setting.rpartition(".")
    part = _PART_OF_SETTING.get(field, field)
    return f"{member}.{part}" if member else part


class HitValues:
    """What an answer that is a positive adds to the mean of some metrics, by its rank.

    Every metric that decides is a sum over the hits among the first answers, so a setting is
    measured by the ranks of the positives alone.

    Attributes:
        truth: positives of the queries.
        value_HR: float64 [positives, DEPTH + 1]; 0 in the last column, for any later rank.
    """

    def __init__(self, corpus: Corpus, truth: Ragged, metrics: Sequence[str]) -> None:
        self.corpus = corpus
        self.truth = truth
        columns = [MAIN_METRICS.index(name) for name in metrics]
        num_hits = len(truth.values)
        # The positives of each positive's query.
        truth_of_hit = truth.take(truth.row_ids)
        divisor_M = self._divisors(columns)
        # The last column, of later ranks, stays 0.
        self.value_HR = np.zeros((num_hits, DEPTH + 1))
        for rank in range(DEPTH):
            # Each positive is the only answer to its query, at this rank.
            answer = TopLabels.empty(num_hits, rank + 1)
            answer.ids[:, rank] = truth.values
            per_query = self.metrics_of(answer, truth_of_hit).per_query()
            gain_HM = per_query.gain_QM[:, columns].astype(np.float64)
            self.value_HR[:, rank] = (gain_HM / divisor_M).mean(axis=1)

    def _divisors(self, columns: Sequence[int]) -> Float64Array:
        """float64 [M], the sum of each metric's divisors over all queries."""
        no_answers = TopLabels.empty(len(self.truth), DEPTH)
        per_query = self.metrics_of(no_answers, self.truth).per_query()
        divisor_QM = per_query.divisor_QM[:, columns].astype(np.float64)
        divisor_M: Float64Array = divisor_QM.sum(axis=0)
        return divisor_M

    def metrics_of(self, top: TopLabels, truth: Ragged) -> Metrics:
        """All metrics of some answers."""
        metrics = Metrics.of_corpus(self.corpus)
        metrics.update(top, truth)
        return metrics

    def between(self, start: int, stop: int) -> tuple[Ragged, Float64Array]:
        """Positives of the queries start .. stop - 1, and their values."""
        first = self.truth.offsets[start]
        last = self.truth.offsets[stop]
        return self.truth.slice(start, stop), self.value_HR[first:last]


class _Table:
    """Candidates of some queries as a matrix, in which positives have ranks.

    Args:
        candidates: of B queries.
        positives: labels that are right answers to the queries, and their values by rank.
    """

    def __init__(self, candidates: Candidates, positives: tuple[Ragged, Float64Array]) -> None:
        self._candidates = candidates
        labels = candidates.labels
        self._cells = labels.row_ids, labels.places
        width = max(DEPTH, int(labels.lengths.max(initial=0)))
        self._shape = len(labels), width
        # Missing candidates come last. Of equal scores the lower id, which is the earlier column,
        # comes first: the step is smaller than what float32 tells apart.
        self._start_BC = np.full(self._shape, -np.inf)
        self._start_BC[self._cells] = -1e-10 * labels.places
        truth, values = positives
        largest_candidate = int(labels.values.max(initial=0))
        largest_positive = int(truth.values.max(initial=0))
        num_ids = 1 + max(largest_candidate, largest_positive)
        pairs = labels.pairs(num_ids)
        true_pairs = truth.pairs(num_ids)
        # A positive that is no candidate has no rank.
        is_candidate = np.isin(true_pairs, pairs)
        # Candidates ascend by query and label, so their pairs ascend too.
        place = np.searchsorted(pairs, true_pairs[is_candidate])
        self._hit_cells = labels.row_ids[place], labels.places[place]
        self._value_HR = values[is_candidate]
        self._columns: dict[tuple[Any, ...], Float32Array] = {}
        # The sum of all parts but one, and the name, weight and settings of each of these parts.
        self._others_BC = self._start_BC
        self._others: list[tuple[Any, ...]] = []

    def shares(self, config: PartsConfig, varied: str = "") -> Float64Array:
        """float64 [B], what each query adds to the mean of the metrics.

        Args:
            config: the settings.
            varied: the part that differs from call to call. The sum of the others is kept.
        """
        score_BC = self._sum_without(varied, config)
        if varied in config.used():
            score_BC = score_BC + config.weight(varied) * self._column(varied, config)
        # A partition puts the largest scores last, in any order; ranks need no order.
        best_BK = np.partition(score_BC, -DEPTH, axis=1)[:, -DEPTH:]
        query_H, _ = self._hit_cells
        score_H = score_BC[self._hit_cells]
        # The rank of a positive, from 0: how many of the best have larger scores.
        is_before_HK = best_BK[query_H] > score_H[:, None]
        rank_H = is_before_HK.sum(axis=1)
        # A positive after the first answers has rank DEPTH, whose value is 0.
        value_H = self._value_HR[np.arange(len(rank_H)), rank_H]
        return np.bincount(query_H, value_H, self._shape[0]).astype(np.float64)

    def _sum_without(self, varied: str, config: PartsConfig) -> Float64Array:
        """float64 [B, C], the sum of all parts but one; kept until the other parts change."""
        other_parts = [part for part in config.used() if part != varied]
        others = [(part, config.weight(part), *config.settings_of(part)) for part in other_parts]
        if others != self._others:
            self._others_BC = self._start_BC.copy()
            for part in other_parts:
                self._others_BC += config.weight(part) * self._column(part, config)
            self._others = others
        return self._others_BC

    def _column(self, part: str, config: PartsConfig) -> Float32Array:
        """float32 [B, C]: what one part gives to each candidate, before its weight."""
        key = (part, *config.settings_of(part))
        if key not in self._columns:
            column = np.zeros(self._shape, np.float32)
            column[self._cells] = self._candidates.part(part, config)
            self._columns[key] = column
        return self._columns[key]


def _spread(candidates: Sequence[Candidates], place: int) -> float:
    """The median distance between the best and the tenth inner product of a member."""
    distances = [np.empty(0)]
    for chunk in candidates:
        key_BK = chunk.members[place].key_BK[:, :DEPTH]
        # Where there are fewer labels, the last of them; what follows is -inf.
        last_B = np.maximum(np.isfinite(key_BK).sum(axis=1) - 1, 0)
        last_key_B = np.take_along_axis(key_BK, last_B[:, None], axis=1)[:, 0]
        has_keys_B = np.isfinite(last_key_B)
        distances.append(key_BK[has_keys_B, 0] - last_key_B[has_keys_B])
    distance_P = np.concatenate(distances)
    distance = float(np.median(distance_P)) if len(distance_P) else 0.0
    return max(distance, SMALLEST_SPREAD)
