"""Where the values of a trial come from: drawn at random, or proposed by Optuna from what earlier trials reached."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Protocol

from xmcray import draws
from xmcray.errors import ConfigError, ResourceError
from xmcray.tuning.space import Check, Choice, Distribution, Space, Values

ATTEMPTS = 100  # draws after which a space counts as infeasible


class Proposals(Protocol):
    """A source of values."""

    def propose(self, number: int) -> Values:
        """The values of a trial; every combination passes the sweep's check.

        Raises:
            ConfigError: none was found that does.
        """

    def learn(self, number: int, values: Values, score: float | None) -> None:
        """What a trial reached; None if it failed."""


class RandomProposals:
    """Draws that are a function of the seed, the trial's number and the setting's name.

    So the trials of a sweep are the same whatever ran before them, how many of them there are, or in which order.
    """

    def __init__(self, space: Space, seed: int, check: Check) -> None:
        self.space, self.seed, self.check = space, seed, check

    def propose(self, number: int) -> Values:
        """The values of a trial."""
        for attempt in range(ATTEMPTS):
            values = {
                name: distribution.draw(draws.generator(self.seed, f"tune {name}", number, attempt))
                for name, distribution in self.space.items()
            }
            if (problem := _refused(self.check, values)) is None:
                return values
        raise _infeasible(problem)

    def learn(self, number: int, values: Values, score: float | None) -> None:
        """Nothing is learnt."""


class OptunaProposals:
    """Optuna's tree-structured Parzen estimator.

    A new object that is told of the same past goes on where another one was, though not with the same draws.

    Args:
        past: values and scores of trials that ended.
    """

    def __init__(
        self, space: Space, seed: int, check: Check, past: Iterable[tuple[Values, float | None]]
    ) -> None:
        self.space, self.check = space, check
        self._optuna = _import_optuna()
        known = list(past)
        sampler_seed = draws.torch_seed(seed, "tune", len(known)) % 2**32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "experimental": that running trials count as bad ones
            sampler = self._optuna.samplers.TPESampler(seed=sampler_seed, constant_liar=True)
        self._study = self._optuna.create_study(direction="maximize", sampler=sampler)
        self._distributions = {name: self._translated(d) for name, d in space.items()}
        self._open: dict[int, Any] = {}
        for values, score in known:
            self._add(values, score)

    def propose(self, number: int) -> Values:
        """The values of a trial."""
        for _ in range(ATTEMPTS):
            trial = self._study.ask(self._distributions)
            values = {name: self._decoded(name, value) for name, value in trial.params.items()}
            if (problem := _refused(self.check, values)) is None:
                self._open[number] = trial
                return values
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        raise _infeasible(problem)

    def learn(self, number: int, values: Values, score: float | None) -> None:
        """What a trial reached, whoever proposed it."""
        trial = self._open.pop(number, None)
        if trial is None:
            self._add(values, score)
        else:
            self._study.tell(trial, score, state=self._state(score))

    def _add(self, values: Values, score: float | None) -> None:
        params = {name: self._coded(name, value) for name, value in values.items()}
        known: dict[str, Any] = {
            "params": params,
            "distributions": self._distributions,
            "value": score,
        }
        self._study.add_trial(self._optuna.trial.create_trial(**known, state=self._state(score)))

    def _state(self, score: float | None) -> Any:
        states = self._optuna.trial.TrialState
        return states.FAIL if score is None else states.COMPLETE

    def _translated(self, distribution: Distribution) -> Any:
        kinds = self._optuna.distributions
        if isinstance(distribution, Choice):
            return kinds.CategoricalDistribution(
                range(len(distribution.values))
            )  # a choice may be a list
        low, high = distribution.samples()
        if distribution.step:
            high = distribution.on_grid(distribution.num_steps)
        if distribution.whole:
            return kinds.IntDistribution(
                low, high, log=distribution.log, step=round(distribution.step) or 1
            )
        return kinds.FloatDistribution(
            low, high, log=distribution.log, step=distribution.step or None
        )

    def _coded(self, name: str, value: Any) -> Any:
        distribution = self.space[name]
        return distribution.values.index(value) if isinstance(distribution, Choice) else value

    def _decoded(self, name: str, value: Any) -> Any:
        distribution = self.space[name]
        if isinstance(distribution, Choice):
            return distribution.values[value]
        if not distribution.step:
            return value
        return distribution.on_grid(round((value - distribution.low) / distribution.step))


def _refused(check: Check, values: Values) -> ConfigError | None:
    try:
        check(values)
    except ConfigError as error:
        return error
    return None


def _infeasible(problem: ConfigError | None) -> ConfigError:
    return ConfigError(
        f"the space holds no feasible trial: none of {ATTEMPTS} draws is one, the last because {problem}"
    )


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ResourceError(
            "optuna is not installed; run pip install 'xmcray[tune]', or use --search random"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
