"""The search space of a sweep: a YAML file that maps dotted names of settings to distributions.

    optim.lr: {log_uniform: [1.0e-4, 1.0e-2]}
    method.balance: {uniform: [0, 1], step: 0.1}
    negatives.uniform: {log_int: [100, 4000]}
    negatives.hard: {int: [10, 50], step: 10}
    method.importance_weight: {choice: [none, unbiased]}

Bounds are included. A file is checked before anything runs: every name must be a setting, and every
end of a range and every choice must be a value that the setting accepts.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmcray import config as configs
from xmcray.errors import ConfigError

Value = Any  # number, text, boolean, or a list of them: what YAML can hold
Values = dict[str, Value]  # by dotted name
# Up to this number a double holds every step exactly.
_MOST_STEPS = 2**53


@dataclass(frozen=True, kw_only=True)
class NumberRange:
    """Numbers between two bounds, both included.

    Attributes:
        low: lower bound.
        high: upper bound.
        log: whether values are sampled uniformly in the logarithm.
        whole: whether values are integers.
        step: distance of the values low, low + step ... up to high; 0 for no grid.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False
    step: float = 0.0

    def draw(self, generator: np.random.Generator) -> float | int:
        """Samples a value."""
        if self.step:
            number = generator.integers(0, self.num_steps, endpoint=True)
            return self.on_grid(int(number))
        if self.log:
            return self._draw_log(generator)
        if self.whole:
            low, high = self.values_to_check()
            return int(generator.integers(low, high, endpoint=True))
        return float(generator.uniform(self.low, self.high))

    def _draw_log(self, generator: np.random.Generator) -> float | int:
        """Samples a value uniformly in the logarithm."""
        # An integer is rounded from half an integer on either side of it. With that much margin,
        # the bounds are as likely as their neighbours.
        margin = 0.5 if self.whole else 0.0
        log_low = math.log(self.low - margin)
        log_high = math.log(self.high + margin)
        value = math.exp(generator.uniform(log_low, log_high))
        # The margin, or the rounding of exp, may lead just outside the bounds.
        value = min(max(value, self.low), self.high)
        return round(value) if self.whole else value

    @property
    def num_steps(self) -> int:
        """Steps of the grid from the lowest to the highest value."""
        # 0.3 / 0.1 is a little less than 3 and would be cut to 2.
        return int((self.high - self.low) / self.step + 1e-9)

    def on_grid(self, number: int) -> float | int:
        """A value of the grid, 0 to `num_steps`."""
        value = self.low + self.step * number
        if self.whole:
            return round(value)
        return float(f"{value:.12g}")  # 0.7, not 0.7000000000000001

    def nearest(self, value: Value) -> Value:
        """The value of the range that is nearest to a number.

        Raises:
            ConfigError: it is no number.
        """
        number = _as_number(value)
        if not _is_number(number):
            raise ConfigError(f"{value!r}, expected a number from {self.low:g} to {self.high:g}")
        bounded = min(max(float(number), self.low), self.high)
        if self.step:
            step = round((bounded - self.low) / self.step)
            return self.on_grid(min(step, self.num_steps))
        return round(bounded) if self.whole else bounded

    def values_to_check(self) -> Sequence[Value]:
        """Values that decide whether a setting accepts this range: its ends."""
        if self.whole:
            return [round(self.low), round(self.high)]
        return [float(self.low), float(self.high)]

    def place(self, value: Value) -> float:
        """Where a value lies between the bounds, 0 to 1, on the scale that it is sampled on."""
        scale = math.log if self.log else float
        low = scale(self.low)
        high = scale(self.high)
        if high <= low:
            return 0.5  # the middle of an axis that has one value
        return (scale(value) - low) / (high - low)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of a list of values, all equally likely."""

    values: tuple[Value, ...]

    def draw(self, generator: np.random.Generator) -> Value:
        """Samples a value."""
        number = generator.integers(len(self.values))
        return self.values[int(number)]

    def nearest(self, value: Value) -> Value:
        """The choice that equals a value or, if all are numbers, is nearest to it.

        Raises:
            ConfigError: there is none.
        """
        if value in self.values:
            # 0 and false are equal; the list's own spelling counts.
            return self.values[self.values.index(value)]
        are_numbers = all(_is_number(choice) for choice in self.values)
        if not are_numbers or not _is_number(value):
            expected = ", ".join(map(repr, self.values))
            raise ConfigError(f"{value!r}, expected one of {expected}")
        return min(self.values, key=lambda choice: abs(choice - value))

    def values_to_check(self) -> Sequence[Value]:
        """Values that decide whether a setting accepts this choice: all of them."""
        return self.values

    def place(self, value: Value) -> float:
        """Where a value lies in the list, 0 to 1."""
        if len(self.values) == 1:
            return 0.5
        return self.position(value) / (len(self.values) - 1)

    def position(self, value: Value) -> int:
        """The position of a value in the list."""
        # Ledgers of older releases hold numbers such as 1e-3 as texts.
        return self.values.index(_as_number(value))


Distribution = NumberRange | Choice
Space = Mapping[str, Distribution]  # by dotted name
Check = Callable[[Values], object]  # raises ConfigError if settings do not accept these values

# Kinds of ranges in a file: whether they are logarithmic, and whether they hold integers.
RANGES = {
    "uniform": (False, False),
    "log_uniform": (True, False),
    "int": (False, True),
    "log_int": (True, True),
}
KINDS = (*RANGES, "choice")


def parse_space(values: Mapping[str, Any], where: str) -> Space:
    """Reads a space from plain values.

    Args:
        values: distributions by dotted name, as YAML reads them.
        where: name of the file, for error messages.

    Raises:
        ConfigError: an entry is not a distribution.
    """
    if not values:
        raise ConfigError(
            f"{where} names no setting,"
            " expected lines such as optim.lr: {log_uniform: [1e-4, 1e-2]}"
        )
    space = {}
    for name, body in values.items():
        space[str(name)] = _parse(body, f"{where}: {name}")
    return space


def check_space(space: Space, check: Check, where: str) -> None:
    """Checks that the settings accept every name and every end of a range.

    Some settings bound each other (gamma_min and gamma_max). So an end is right if it fits one of
    three: the values that the other settings have without the sweep, all lower ends of the other
    ranges, or all upper ends.

    Args:
        space: the space.
        check: raises ConfigError for values that the settings do not accept.
        where: name of the file, for error messages.

    Raises:
        ConfigError: the first value that does not fit.
    """
    lower_ends: Values = {}
    upper_ends: Values = {}
    for name, distribution in space.items():
        samples = distribution.values_to_check()
        lower_ends[name] = samples[0]
        upper_ends[name] = samples[-1]
    for name, distribution in space.items():
        for value in distribution.values_to_check():
            problem = problem_with({name: value}, check)
            if problem is None:
                continue
            fits_lower_ends = problem_with({**lower_ends, name: value}, check) is None
            fits_upper_ends = problem_with({**upper_ends, name: value}, check) is None
            if not fits_lower_ends and not fits_upper_ends:
                raise ConfigError(f"{where}: {problem}")


def problem_with(values: Values, check: Check) -> ConfigError | None:
    """Why settings do not accept values; None if they do."""
    try:
        check(values)
    except ConfigError as error:
        return error
    return None


def nearest_values(
    space: Space,
    settings: Mapping[str, Any],
    where: str,
    left_out: Mapping[str, Sequence[Value]] | None = None,
) -> Values:
    """The values of a space that are nearest to a configuration.

    Args:
        space: the searched settings.
        settings: a complete configuration as plain values, in sections.
        where: name of the configuration, for error messages.
        left_out: choices of the space that cannot be had on this machine, by dotted name.

    Raises:
        ConfigError: a value that is not among the choices of the space.
    """
    values: Values = {}
    for name, distribution in space.items():
        # Down the sections to the value.
        value: Any = settings
        for part in name.split("."):
            value = value[part]
        try:
            values[name] = distribution.nearest(value)
        except ConfigError as error:
            remedy = "add it to the space, or name another configuration"
            if left_out and value in left_out.get(name, ()):
                remedy = "it cannot be had here: fetch it first, or name another configuration"
            raise ConfigError(f"{where}: {name} is {error}; {remedy}") from None
    return values


def nested(values: Values) -> dict[str, Any]:
    """Turns {"optim.lr": 0.1} into {"optim": {"lr": 0.1}}."""
    sections: dict[str, Any] = {}
    for name, value in values.items():
        configs.put(sections, name, value)
    return sections


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_number(value: Value) -> Value:
    """The number that a text such as "1e-3" is; other values as they are.

    YAML 1.1 reads numbers without a point, such as 1e-3, as texts.
    """
    if not isinstance(value, str) or not re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return value
    return float(value)


def _parse(body: Any, where: str) -> Distribution:
    """Reads a distribution from its entry in a file."""
    kinds: list[Any] = []
    if isinstance(body, Mapping):
        kinds = [key for key in body if key != "step"]
    if len(kinds) != 1:
        raise ConfigError(
            f"{where} is {body!r}, expected one of {', '.join(KINDS)}, as in {{uniform: [0, 1]}}"
        )
    kind = kinds[0]
    if kind not in KINDS:
        raise ConfigError(f"{where}: {configs.unknown('distribution', str(kind), KINDS)}")
    if kind != "choice":
        return _parse_range(kind, body[kind], body.get("step"), where)
    values = body[kind]
    if not isinstance(values, list) or not values or "step" in body:
        raise ConfigError(f"{where}: choice is {values!r}, expected a list of values, and no step")
    for value in values:
        # Settings in a section would escape the check for those that cannot be searched.
        if isinstance(value, Mapping):
            raise ConfigError(f"{where}: choice has {dict(value)!r}, expected values, no sections")
    return Choice(values=tuple(map(_as_number, values)))


def _parse_range(kind: str, bounds: Any, step: Any, where: str) -> NumberRange:
    """Reads a range from its bounds and the step of its grid."""
    log, whole = RANGES[kind]
    if not isinstance(bounds, list) or len(bounds) != 2:
        raise ConfigError(f"{where}: {kind} is {bounds!r}, expected [lowest, highest]")
    low = _number(bounds[0], whole, f"{where}: {kind}")
    high = _number(bounds[1], whole, f"{where}: {kind}")
    if not low < high:
        raise ConfigError(f"{where}: {kind} is [{low:g}, {high:g}], expected the lower bound first")
    if log and low <= 0:
        raise ConfigError(
            f"{where}: {kind} starts at {low:g},"
            " expected more than 0: it is uniform in the logarithm"
        )
    width = 0.0
    if step is not None:
        width = _number(step, whole, f"{where}: step")
        if log:
            raise ConfigError(f"{where}: step is {width:g}, expected none for {kind}")
        if not 0 < width <= high - low:
            raise ConfigError(
                f"{where}: step is {width:g}, expected more than 0 and at most {high - low:g}"
            )
        if (high - low) / width > _MOST_STEPS:
            raise ConfigError(f"{where}: step is {width:g}, expected a larger one, or none")
    return NumberRange(low=low, high=high, log=log, whole=whole, step=width)


def _number(value: Any, whole: bool, where: str) -> float:
    """Reads a finite number, also from a text: YAML reads 1e-4 as one."""
    number = math.nan
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    is_accepted = math.isfinite(number)
    if is_accepted and whole:
        is_accepted = number == round(number)
    if not is_accepted:
        expected = "an integer" if whole else "a number"
        raise ConfigError(f"{where} holds {value!r}, expected {expected}")
    return number
