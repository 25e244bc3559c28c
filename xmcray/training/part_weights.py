"""Chooses the weights of the parts of a fused bundle on held-out queries.

The search goes along one setting at a time, over a fixed grid, until nothing gets better. It draws
nothing at random, so it chooses the same weights every time. A part stays if the answers without it,
with all other settings chosen anew, are worse by a paired test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from xmcray.data.corpus import Corpus
from xmcray.evaluation.evaluate import sign_flip
from xmcray.evaluation.metrics import MAIN_METRICS, Metrics
from xmcray.retrieval.parts import PARTS, Candidates, PartsConfig, weighted_sums
from xmcray.types import Float32Array, Ragged, TopLabels

Float64Array = npt.NDArray[np.float64]

METRICS = ("P@1", "P@5", "PSP@5")  # their mean is maximised
WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
MEMORY_TEMPERATURES = (0.01, 0.02, 0.035, 0.05, 0.08, 0.12, 0.2)
WORD_KEYS = (5, 10, 20, 40)
# Of the typical distance between the best and the tenth label.
LABEL_TEMPERATURES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)
MEMORY_KEYS = 50
# A part stays if a paired test of the answers without it has a smaller p-value. At 0.157 one more
# free weight is expected to help on new queries (Akaike's criterion).
LARGEST_P_VALUE = 0.157
PERMUTATIONS = 4999
DEPTH = 10  # answers per query that are measured, as many as the metrics look at
_START = 0.5  # of the weights
_ROUNDS = 6


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
        labels_alone: metrics of the label vectors alone.
        tests: one per part.
        queries: number of held-out queries.
    """

    config: PartsConfig
    metrics: Mapping[str, float]
    labels_alone: Mapping[str, float]
    tests: Sequence[PartTest]
    queries: int

    def plain(self) -> dict[str, Any]:
        """Plain values for the bundle's manifest and for programs."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class _Measured:
    """Answers of one setting.

    Attributes:
        config: the setting.
        metrics: values by name.
        objective: mean of the metrics that decide.
        share_Q: float64 [queries], what each query adds to the objective.
    """

    config: PartsConfig
    metrics: Mapping[str, float]
    objective: float
    share_Q: Float64Array


@dataclass
class WeightSearch:
    """Measures settings on the candidates of held-out queries.

    Attributes:
        corpus: gives the propensities.
        candidates: of all queries, in order.
        truth: positives of the queries.
        metrics: names of the metrics whose mean is maximised.
    """

    corpus: Corpus
    candidates: Sequence[Candidates]
    truth: Ragged
    metrics: Sequence[str] = METRICS
    _columns: dict[tuple[Any, ...], list[Float64Array]] = field(default_factory=dict, init=False)

    def choose(self) -> Choice:
        """The best settings, without the parts that do not earn their place."""
        best = self._best(self._start(), PARTS)
        tests: dict[str, PartTest] = {}
        for part in PARTS:
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
        # Alone, a temperature changes no order, unless it is so low that shares become zero.
        temperature = self._start().label_temperature
        labels_alone = self.measure(PartsConfig(label_temperature=temperature))
        weighted_tests = []
        for part, test in tests.items():
            weight = best.config.weight(part)
            weighted_tests.append(dataclasses.replace(test, weight=weight))
        return Choice(
            config=best.config,
            metrics=self._named(best),
            labels_alone=self._named(labels_alone),
            tests=weighted_tests,
            queries=len(self.truth),
        )

    def _without_each_part(self, best: _Measured) -> dict[str, _Measured]:
        """The best answers without each of the parts that are used; the last part stays."""
        used = best.config.used()
        if len(used) == 1:
            return {}
        return {part: self._best(best.config.without(part), used) for part in used}

    def measure(self, config: PartsConfig) -> _Measured:
        """Answers all queries with some settings."""
        tops = []
        for candidates, part_PF in zip(self.candidates, self._parts(config), strict=True):
            tops.append(_top(candidates.labels, weighted_sums(part_PF, config)))
        card = self.corpus.card
        metrics = Metrics(
            self.corpus.train_counts,
            card.num_train,
            card.propensity_a,
            card.propensity_b,
            card.num_labels,
        )
        metrics.update(TopLabels.concatenate(tops, DEPTH), self.truth)
        values = metrics.result()
        per_query = metrics.per_query()
        columns = [MAIN_METRICS.index(name) for name in self.metrics]
        divisors = per_query.divisor_QM[:, columns].astype(np.float64).sum(axis=0)
        share_QM = per_query.gain_QM[:, columns] / divisors
        share_Q = share_QM.mean(axis=1)
        return _Measured(config, values, float(share_Q.sum()), share_Q)

    def _start(self) -> PartsConfig:
        """Equal weights, and a temperature that fits the size of the inner products."""
        return PartsConfig(
            labels=1.0,
            memory=_START,
            words=_START,
            texts=_START,
            label_temperature=self._spread() * 0.35,
            memory_keys=MEMORY_KEYS,
        )

    def _spread(self) -> float:
        """The median distance between the best and the tenth inner product."""
        distances = []
        for candidates in self.candidates:
            keys = candidates.key_BK
            tenth = min(9, keys.shape[1] - 1)
            distances.append(keys[:, 0] - keys[:, tenth])
        distance = float(np.median(np.concatenate(distances)))
        return max(distance, 1e-3)

    def _best(self, start: PartsConfig, parts: Sequence[str]) -> _Measured:
        """The best settings that a search along one setting at a time reaches.

        Args:
            start: where it begins. A part of weight 0 stays out.
            parts: parts whose weights may change.
        """
        used = [part for part in parts if start.weight(part) > 0]
        grid = self._grid(used)
        best = self.measure(start)
        for _ in range(_ROUNDS):
            before = best.objective
            for name, values in grid.items():
                for value in values:
                    change: dict[str, Any] = {name: value}
                    config = dataclasses.replace(best.config, **change)
                    if config == best.config or not config.used():
                        continue
                    measured = self.measure(config)
                    if measured.objective > best.objective + 1e-9:
                        best = measured
            if best.objective <= before + 1e-9:
                break
        return best

    def _grid(self, used: Sequence[str]) -> dict[str, Sequence[float | int]]:
        """The values of each setting that changes an answer."""
        grid: dict[str, Sequence[float | int]] = {}
        # Only the ratios of weights matter, so the first weight stays as it is.
        for part in used[1:]:
            grid[part] = WEIGHTS
        if "labels" in used and len(used) > 1:
            spread = self._spread()
            grid["label_temperature"] = [share * spread for share in LABEL_TEMPERATURES]
        if "memory" in used:
            grid["memory_temperature"] = MEMORY_TEMPERATURES
        if "words" in used:
            grid["word_keys"] = WORD_KEYS
        return grid

    def _parts(self, config: PartsConfig) -> list[Float64Array]:
        """What each part gives to the candidates, before the weights; kept for the next weights."""
        key = (
            config.label_temperature,
            config.memory_temperature,
            config.memory_keys,
            config.word_keys,
        )
        if key not in self._columns:
            self._columns.clear()
            self._columns[key] = [candidates.parts(config) for candidates in self.candidates]
        return self._columns[key]

    def _p_value(self, better: _Measured, other: _Measured) -> float:
        """Of the paired test that both are equally good; 1 if the other is not worse."""
        if other.objective >= better.objective:
            return 1.0
        difference_Q1 = (better.share_Q - other.share_Q)[:, None] * len(self.truth)
        return float(sign_flip(difference_Q1, PERMUTATIONS, seed=0)[0])

    def _named(self, measured: _Measured) -> dict[str, float]:
        return {name: measured.metrics[name] for name in self.metrics}


def _top(labels: Ragged, score_P: Float32Array) -> TopLabels:
    """The 10 best candidates of each query, equal scores by lower id."""
    width = int(labels.lengths.max(initial=0))
    score_BC = np.full((len(labels), max(width, DEPTH)), -np.inf, np.float32)
    score_BC[labels.row_ids, labels.places] = score_P
    # Candidates ascend in their ids, and a stable sort keeps equal scores in that order.
    place_BK = np.argsort(-score_BC, axis=1, kind="stable")[:, :DEPTH]
    id_BC = np.full(score_BC.shape, -1, np.int64)
    id_BC[labels.row_ids, labels.places] = labels.values
    ids = np.take_along_axis(id_BC, place_BK, axis=1)
    return TopLabels(ids, np.take_along_axis(score_BC, place_BK, axis=1))
