"""Chooses the weights of the parts of a fused bundle on held-out queries.

The search is a coordinate search: it varies one setting at a time over a fixed grid, until no value
is better. It is not random, so it chooses the same weights every time. A part stays if the answers
without it are worse by a paired test. For that test, all other settings are chosen anew.
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

METRICS = ("P@1", "P@5", "PSP@5")  # the search maximises their mean
WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
MEMORY_TEMPERATURES = (0.01, 0.02, 0.035, 0.05, 0.08, 0.12, 0.2)
WORD_KEYS = (5, 10, 20, 40)
# As shares of a member's spread: the typical distance between the scores of the best and the tenth
# label.
LABEL_TEMPERATURES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)
# With this spread, the lowest temperature is the lowest that a bundle allows.
SMALLEST_SPREAD = 0.0025
MEMORY_KEYS = 50
# A part stays if the paired test of the answers without it has a p-value below this. At 0.157, one
# more free weight is expected to help on new queries (Akaike's criterion).
LARGEST_P_VALUE = 0.157
PERMUTATIONS = 4999
DEPTH = 10  # answers per query that are measured, because no metric of SUMMED looks at more
# Metrics to which each hit adds, whatever the other answers are. R@100 needs more answers than DEPTH,
# and MRR@10 counts the first hit alone.
SUMMED = tuple(name for name in MAIN_METRICS if name not in ("R@100", "MRR@10"))
_START = 0.5  # each weight at the start
_ROUNDS = 6
_LEAST_GAIN = 1e-9  # smaller gains of the objective are rounding


@dataclass(frozen=True, slots=True)
class PartTest:
    """What the answers lose without one part.

    Attributes:
        part: its name.
        weight: its weight; 0 if it is left out.
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
        """The choice that `plain` was made from, also if it was stored as JSON."""
        tests = [PartTest(**test) for test in plain["tests"]]
        config = PartsConfig.read(plain["config"])
        return cls(**{**plain, "config": config, "tests": tests})


@dataclass(frozen=True)
class _Measured:
    """How good the answers with some settings are.

    Attributes:
        config: the settings.
        objective: mean of the metrics that the search maximises.
    """

    config: PartsConfig
    objective: float

    def is_better_than(self, other: _Measured) -> bool:
        """Whether the objective is larger by more than rounding."""
        return self.objective > other.objective + _LEAST_GAIN


class WeightSearch:
    """Searches for the best settings on the candidates of held-out queries.

    Args:
        corpus: gives the propensities.
        candidates: of all queries, in order.
        truth: positives of the queries.
        start: settings that name the members, and how many training queries vote by vectors.
        metrics: names in SUMMED of the metrics whose mean is maximised.
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
        self._objectives: dict[PartsConfig, float] = {}

    def choose(self) -> Choice:
        """The best settings, without the parts that do not make the answers significantly better."""
        best = self._best(self._start)
        tests: dict[str, PartTest] = {}
        for part in self._start.parts:
            # A part whose best weight is 0 is not tested below: the answers without it are the same.
            tests[part] = PartTest(part, 0.0, self._named(best), 1.0)
        # In each round the part that matters least is removed, until all parts matter.
        while shorter := self._without_each_part(best):
            for part, other in shorter.items():
                p_value = self._p_value(best, other)
                tests[part] = PartTest(part, 0.0, self._named(other), p_value)
            weakest = max(shorter, key=lambda part: tests[part].p_value)
            if tests[weakest].p_value < LARGEST_P_VALUE:
                break
            best = shorter[weakest]
        if len(best.config.used()) == 1:
            only_part = best.config.used()[0]
            tests[only_part] = self._test_of_only_part(only_part, best)
        # Only now the weights of the parts that stay are known.
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
        """By part that is used, the best answers without it; empty if it is the only part."""
        used = best.config.used()
        if len(used) == 1:
            return {}
        return {part: self._best(best.config.without(part)) for part in used}

    def _test_of_only_part(self, part: str, best: _Measured) -> PartTest:
        """The test of a part without which there is no answer."""
        p_value = 1.0
        if best.objective > 0:
            p_value = self._sign_flip_test(self._shares(best.config))
        no_metrics = dict.fromkeys(self.metrics, 0.0)
        return PartTest(part, 0.0, no_metrics, p_value)

    def _each_member_alone(self) -> dict[str, Mapping[str, float]]:
        """Metrics of the label vectors of each member alone, by the name of the part."""
        alone: dict[str, Mapping[str, float]] = {}
        for member in self._start.members:
            config = self._start
            part = member.full("labels")
            # The temperature stays as it is. It changes the order of a single part only if it is so low
            # that shares become zero.
            for other in config.used():
                if other != part:
                    config = config.without(other)
            alone[part] = self._named(self.measure(config))
        return alone

    def measure(self, config: PartsConfig, varied: str = "") -> _Measured:
        """Measures the answers to all queries with some settings. Results are cached.

        Args:
            config: the settings.
            varied: for speed, the only part that differs from the settings measured just before.
        """
        # Thousands of settings are measured, so the shares of the queries are not kept.
        if config not in self._objectives:
            self._objectives[config] = float(self._shares(config, varied).sum())
        return _Measured(config, self._objectives[config])

    def _shares(self, config: PartsConfig, varied: str = "") -> Float64Array:
        """float64 [queries], what each query adds to the objective; see `measure`."""
        return np.concatenate([table.shares(config, varied) for table in self._tables])

    def _equal_weights(self, start: PartsConfig) -> PartsConfig:
        """The settings at the start: equal weights, and temperatures that fit each member's spread."""
        members: list[MemberConfig] = []
        for member, spread in zip(start.members, self._spreads, strict=True):
            equal = dataclasses.replace(
                member,
                # Only the ratios of weights matter, so the search keeps the first weight at 1.
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
        """The best settings that a coordinate search reaches.

        Args:
            start: where the search begins. A part whose weight is 0 is left out.
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
        """The best settings after one setting was varied."""
        for value in values:
            config = best.config.changed(name, value)
            # Settings without any part give no answers.
            if not config.used():
                continue
            measured = self.measure(config, varied=part_of(name))
            if measured.is_better_than(best):
                best = measured
        return best

    def _grid(self, start: PartsConfig) -> dict[str, Sequence[float]]:
        """The values to try of each setting that can change an answer."""
        used = start.used()
        grid: dict[str, Sequence[float]] = {}
        # Only the ratios of weights matter, so the first weight is not varied. It is 1, unless the part
        # before it was removed; then the same ratios to it are tried too.
        first_weight = start.weight(used[0])
        ratios = [first_weight * weight for weight in WEIGHTS]
        for part in used[1:]:
            grid[part] = sorted({*WEIGHTS, *ratios})
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
        """The p-value of the paired test of "both are equally good"; 1 if the other is not worse."""
        if other.objective >= better.objective:
            return 1.0
        return self._sign_flip_test(self._shares(better.config) - self._shares(other.config))

    def _sign_flip_test(self, difference_Q: Float64Array) -> float:
        """The p-value of "both are equally good", of what queries add to one objective and not to the other."""
        # `sign_flip` tests one column per metric. Here the mean is the only one.
        per_query_Q1 = difference_Q[:, None] * len(self.truth)
        return float(sign_flip(per_query_Q1, PERMUTATIONS, seed=0)[0])

    def _named(self, measured: _Measured) -> dict[str, float]:
        """The metrics of some answers, by name."""
        tops = [candidates.top(measured.config, DEPTH) for candidates in self.candidates]
        answers = TopLabels.concatenate(tops, DEPTH)
        values = self._hits.metrics_of(answers, self.truth).result()
        return {name: values[name] for name in self.metrics}


# The parts to which settings other than weights belong.
_PART_OF_SETTING = {
    "label_temperature": "labels",
    "memory_temperature": "memory",
    "word_keys": "words",
}


def part_of(setting: str) -> str:
    """The name of the part that a setting belongs to. The name of a weight is that of its part."""
    member, _, field = setting.rpartition(".")
    part = _PART_OF_SETTING.get(field, field)
    return f"{member}.{part}" if member else part


class HitValues:
    """What each positive adds to the mean of some metrics, by its rank among the answers.

    Each of these metrics is a sum over the hits among the first answers. So the ranks of the positives
    are all that is needed to measure answers.

    Attributes:
        truth: positives of the queries.
        value_HR: float64 [positives, DEPTH + 1]. The last column is 0 and stands for all later ranks.
    """

    def __init__(self, corpus: Corpus, truth: Ragged, metrics: Sequence[str]) -> None:
        self.corpus = corpus
        self.truth = truth
        columns = [MAIN_METRICS.index(name) for name in metrics]
        num_hits = len(truth.values)
        # The positives of each positive's query.
        truth_of_hit = truth.take(truth.row_ids)
        divisor_M = self._divisors(columns)
        self.value_HR = np.zeros((num_hits, DEPTH + 1))
        for rank in range(DEPTH):
            # The metrics are asked for the value: each positive becomes a query with one answer, which
            # is that positive at this rank.
            answer = TopLabels.empty(num_hits, rank + 1)
            answer.ids[:, rank] = truth.values
            per_query = self.metrics_of(answer, truth_of_hit).per_query()
            gain_HM = per_query.gain_QM[:, columns]
            self.value_HR[:, rank] = (gain_HM / divisor_M).mean(axis=1)

    def _divisors(self, columns: Sequence[int]) -> Float64Array:
        """float64 [M], the sum of each metric's divisors over all queries."""
        no_answers = TopLabels.empty(len(self.truth), DEPTH)
        per_query = self.metrics_of(no_answers, self.truth).per_query()
        divisor_M: Float64Array = per_query.divisor_QM[:, columns].sum(axis=0)
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
    """Scores the candidates of B queries as a matrix, and ranks the positives among them.

    C is the largest number of candidates of a query, and H the number of positives that are candidates.

    Args:
        candidates: of B queries.
        positives: positives of the queries, and their values by rank (see `HitValues.between`).
    """

    def __init__(self, candidates: Candidates, positives: tuple[Ragged, Float64Array]) -> None:
        self._candidates = candidates
        labels = candidates.labels
        self._cells = labels.row_ids, labels.places
        width = max(DEPTH, int(labels.lengths.max(initial=0)))
        self._shape = len(labels), width
        # Missing candidates have -inf and come last. Of two equal scores, the one with the lower id must
        # come first. Candidates ascend by id, so a later column gets a little less. The difference is
        # smaller than what float32 can distinguish.
        self._start_BC = np.full(self._shape, -np.inf)
        self._start_BC[self._cells] = -1e-10 * labels.places
        truth, values = positives
        largest_candidate = int(labels.values.max(initial=0))
        largest_positive = int(truth.values.max(initial=0))
        num_ids = 1 + max(largest_candidate, largest_positive)
        candidate_pairs = labels.pairs(num_ids)
        true_pairs = truth.pairs(num_ids)
        # A positive that is no candidate has no rank.
        is_candidate = np.isin(true_pairs, candidate_pairs)
        # Candidates are sorted by query and label, so their pairs ascend.
        place = np.searchsorted(candidate_pairs, true_pairs[is_candidate])
        self._hit_cells = labels.row_ids[place], labels.places[place]
        self._value_HR = values[is_candidate]
        self._columns: dict[tuple[Any, ...], Float32Array] = {}
        # The cached sum of all parts but one, and its key: name, weight and settings of these parts.
        self._others_BC = self._start_BC
        self._others_key: list[tuple[Any, ...]] = []

    def shares(self, config: PartsConfig, varied: str = "") -> Float64Array:
        """float64 [B], what each query adds to the mean of the metrics.

        Args:
            config: the settings.
            varied: the part that differs from call to call. The sum of the other parts is cached.
        """
        score_BC = self._sum_without(varied, config)
        if varied in config.used():
            score_BC = score_BC + config.weight(varied) * self._column(varied, config)
        # A partition puts the largest scores last. They are not sorted, which ranks do not need.
        best_BK = np.partition(score_BC, -DEPTH, axis=1)[:, -DEPTH:]
        query_H, _ = self._hit_cells
        score_H = score_BC[self._hit_cells]
        # The rank of a positive, from 0, is the number of best scores that are larger than its own.
        is_before_HK = best_BK[query_H] > score_H[:, None]
        rank_H = is_before_HK.sum(axis=1)
        # A positive that is not among the best has rank DEPTH, whose value is 0.
        value_H = self._value_HR[np.arange(len(rank_H)), rank_H]
        return np.bincount(query_H, value_H, self._shape[0]).astype(np.float64)

    def _sum_without(self, varied: str, config: PartsConfig) -> Float64Array:
        """float64 [B, C], the weighted sum of all parts but one, cached until other parts change."""
        other_parts = [part for part in config.used() if part != varied]
        key = [(part, config.weight(part), *config.settings_of(part)) for part in other_parts]
        if key != self._others_key:
            self._others_BC = self._start_BC.copy()
            for part in other_parts:
                self._others_BC += config.weight(part) * self._column(part, config)
            self._others_key = key
        return self._others_BC

    def _column(self, part: str, config: PartsConfig) -> Float32Array:
        """float32 [B, C], the score that one part gives to each candidate, without its weight."""
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
        # A query with fewer than ten labels has -inf after its last label, which then counts as tenth.
        num_keys_B = np.isfinite(key_BK).sum(axis=1)
        last_B = np.maximum(num_keys_B - 1, 0)
        last_key_B = np.take_along_axis(key_BK, last_B[:, None], axis=1)[:, 0]
        has_keys_B = np.isfinite(last_key_B)
        distances.append(key_BK[has_keys_B, 0] - last_key_B[has_keys_B])
    distance_B = np.concatenate(distances)
    distance = float(np.median(distance_B)) if len(distance_B) else 0.0
    return max(distance, SMALLEST_SPREAD)
