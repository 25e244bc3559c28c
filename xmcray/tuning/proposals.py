"""Sources of values for trials: random search, or Optuna's estimate from earlier trials."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Iterable
from typing import Any

from xmcray import draws
from xmcray.errors import ConfigError, ResourceError
from xmcray.tuning.space import Check, Choice, Distribution, Space, Values, problem_with

MAX_ATTEMPTS = 100  # infeasible samples in a row after which a space counts as infeasible
# The score of a trial without one, because Optuna learns nothing from a failed trial. No metric is
# lower.
_WORST_SCORE = 0.0


class Proposals(abc.ABC):
    """A source of values.

    Args:
        space: the search space.
        check: raises ConfigError for values that the settings do not accept.
    """

    def __init__(self, space: Space, check: Check) -> None:
        self.space = space
        self.check = check

    def propose(self, number: int) -> Values:
        """Proposes values of a trial that pass the check of the sweep.

        Raises:
            ConfigError: no combination passes.
        """
        problem = None
        for attempt in range(MAX_ATTEMPTS):
            values = self.sample(number, attempt)
            problem = problem_with(values, self.check)
            if problem is None:
                return values
            # The search avoids an infeasible combination like one whose trial failed.
            self.learn(number, values, None)
        raise ConfigError(
            f"the space holds no feasible trial: none of {MAX_ATTEMPTS} draws is one,"
            f" the last because {problem}"
        )

    @abc.abstractmethod
    def sample(self, number: int, attempt: int) -> Values:
        """Samples values, which may be infeasible.

        Args:
            number: number of the trial.
            attempt: number of infeasible samples for this trial so far.
        """

    @abc.abstractmethod
    def learn(self, number: int, values: Values, score: float | None) -> None:
        """Learns the score of a trial; None if the trial failed."""


class RandomProposals(Proposals):
    """Random search.

    A value is a function of the seed, the trial's number and the setting's name. So a trial does
    not depend on how many other trials there are, or on their order.
    """

    def __init__(self, space: Space, seed: int, check: Check) -> None:
        super().__init__(space, check)
        self.seed = seed

    def sample(self, number: int, attempt: int) -> Values:
        """Samples each setting from a generator of its own."""
        values = {}
        for name, distribution in self.space.items():
            generator = draws.generator(self.seed, f"tune {name}", number, attempt)
            values[name] = distribution.draw(generator)
        return values

    def learn(self, number: int, values: Values, score: float | None) -> None:
        """Does nothing: random search does not learn."""


class OptunaProposals(Proposals):
    """Optuna's tree-structured Parzen estimator.

    An object that learns the trials of an earlier one continues its search, with other samples.

    Args:
        space: the search space.
        seed: seed of the sampled values.
        check: raises ConfigError for values that the settings do not accept.
        past: values and scores of trials that have ended.
    """

    def __init__(
        self,
        space: Space,
        seed: int,
        check: Check,
        past: Iterable[tuple[Values, float | None]],
    ) -> None:
        super().__init__(space, check)
        self._optuna = _import_optuna()
        with warnings.catch_warnings():
            # Optuna warns that constant_liar, which counts running trials as bad ones, is
            # experimental.
            warnings.simplefilter("ignore")
            sampler = self._optuna.samplers.TPESampler(seed=seed % 2**32, constant_liar=True)
        self._study = self._optuna.create_study(direction="maximize", sampler=sampler)
        self._distributions = {}
        for name, distribution in space.items():
            self._distributions[name] = self._translated(distribution)
        self._running: dict[int, Any] = {}
        for values, score in past:
            self._add(values, score)

    def sample(self, number: int, attempt: int) -> Values:
        """Asks Optuna for values."""
        trial = self._study.ask(self._distributions)
        self._running[number] = trial
        return {name: self._decoded(name, value) for name, value in trial.params.items()}

    def learn(self, number: int, values: Values, score: float | None) -> None:
        """Tells Optuna the score of a trial, even if another object proposed the trial."""
        trial = self._running.pop(number, None)
        if trial is None:
            self._add(values, score)
        else:
            self._study.tell(trial, _WORST_SCORE if score is None else score)

    def _add(self, values: Values, score: float | None) -> None:
        trial = self._optuna.trial.create_trial(
            params={name: self._encoded(name, value) for name, value in values.items()},
            distributions=self._distributions,
            value=_WORST_SCORE if score is None else score,
        )
        self._study.add_trial(trial)

    def _translated(self, distribution: Distribution) -> Any:
        """A distribution as Optuna describes it."""
        kinds = self._optuna.distributions
        if isinstance(distribution, Choice):
            # Positions in the list, because Optuna does not accept a list as a choice.
            return kinds.CategoricalDistribution(range(len(distribution.values)))
        low, high = distribution.values_to_check()
        if distribution.step:
            # The last value of the grid; Optuna warns of an end that is not on it.
            high = distribution.on_grid(distribution.num_steps)
        if distribution.whole:
            step = round(distribution.step) or 1
            return kinds.IntDistribution(low, high, log=distribution.log, step=step)
        return kinds.FloatDistribution(
            low,
            high,
            log=distribution.log,
            step=distribution.step or None,
        )

    def _encoded(self, name: str, value: Any) -> Any:
        """A value as Optuna stores it."""
        distribution = self.space[name]
        if isinstance(distribution, Choice):
            return distribution.position(value)
        return value

    def _decoded(self, name: str, value: Any) -> Any:
        """A value from what Optuna proposes."""
        distribution = self.space[name]
        if isinstance(distribution, Choice):
            return distribution.values[value]
        if not distribution.step:
            return value
        # Optuna adds up steps, which leaves rounding errors.
        num_steps = round((value - distribution.low) / distribution.step)
        return distribution.on_grid(num_steps)


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ResourceError(
            "optuna is not installed; run pip install 'xmcray[tune]', or use --search random"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
