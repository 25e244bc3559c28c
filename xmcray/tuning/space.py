"""What a sweep may change: a YAML file that maps dotted names of settings to distributions.

    optim.lr: {log_uniform: [1.0e-4, 1.0e-2]}
    method.balance: {uniform: [0, 1], step: 0.1}
    negatives.uniform: {log_int: [100, 4000]}
    negatives.hard: {int: [10, 50], step: 10}
    method.importance_weight: {choice: [none, unbiased]}

Bounds are included. A file is checked before anything runs: every name must be a setting, and every end of a range
and every choice must be a value that the setting takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmcray import config as configs
from xmcray.errors import ConfigError

Value = Any  # number, text, boolean, or a list of them: what YAML can hold
Values = dict[str, Value]  # by dotted name
_RANGES = {
    "uniform": (False, False),
    "log_uniform": (True, False),
    "int": (False, True),
    "log_int": (True, True),
}
_KINDS = (*_RANGES, "choice")


@dataclass(frozen=True, kw_only=True)
class NumberRange:
    """Numbers between two bounds, both included.

    Attributes:
        low, high: the bounds. log: uniform in the logarithm. whole: integers only.
        step: values are low, low + step ... up to high; 0 for no grid (of integers: 1).
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False
    step: float = 0.0

    def draw(self, generator: np.random.Generator) -> float | int:
        """A value."""
        if self.step:
            return self.on_grid(int(generator.integers(0, self.num_steps, endpoint=True)))
        if not self.log:
            whole = self.whole and int(
                generator.integers(round(self.low), round(self.high), endpoint=True)
            )
            return whole if self.whole else float(generator.uniform(self.low, self.high))
        margin = (
            0.5 if self.whole else 0.0
        )  # half of an integer's width, so that the ends are drawn as often
        value = math.exp(
            generator.uniform(math.log(self.low - margin), math.log(self.high + margin))
        )
        value = min(max(value, self.low), self.high)
        return round(value) if self.whole else value

    @property
    def num_steps(self) -> int:
        """Of the grid, from the lowest to the highest value."""
        return int((self.high - self.low) / self.step + 1e-9)

    def on_grid(self, number: int) -> float | int:
        """A value of the grid, 0 to `num_steps`."""
        value = self.low + self.step * number
        return round(value) if self.whole else round(value, 12)  # 0.7, not 0.7000000000000001

    def samples(self) -> Sequence[Value]:
        """The values that tell whether a setting takes this range."""
        return [round(end) if self.whole else float(end) for end in (self.low, self.high)]

    def place(self, value: Value) -> float:
        """Where a value lies between the bounds, 0 to 1, on the scale it is drawn on."""
        low, high, at = (
            math.log(x) if self.log else float(x) for x in (self.low, self.high, value)
        )
        return (at - low) / (high - low) if high > low else 0.5

    def to_yaml(self) -> dict[str, Any]:
        """As in the file."""
        kind = next(name for name, flags in _RANGES.items() if flags == (self.log, self.whole))
        return {kind: list(self.samples()), **({"step": self.step} if self.step else {})}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of a list of values, each as likely."""

    values: tuple[Value, ...]

    def draw(self, generator: np.random.Generator) -> Value:
        """A value."""
        return self.values[int(generator.integers(len(self.values)))]

    def samples(self) -> Sequence[Value]:
        """All values."""
        return self.values

    def place(self, value: Value) -> float:
        """Where a value lies in the list, 0 to 1."""
        return self.values.index(value) / (len(self.values) - 1) if len(self.values) > 1 else 0.5

    def to_yaml(self) -> dict[str, Any]:
        """As in the file."""
        return {"choice": list(self.values)}


Distribution = NumberRange | Choice
Space = Mapping[str, Distribution]
Check = Callable[[Values], object]  # raises ConfigError where settings do not take these values


def load_space(path: str) -> Space:
    """The space of a file.

    Raises:
        ConfigError: no such file, or an entry that is not a distribution (named, with what is wrong about it).
    """
    return parse_space(configs.load_yaml(path), path)


def parse_space(values: Mapping[str, Any], where: str) -> Space:
    """Dotted names and distributions from plain values; `where`: the file's name in errors."""
    if not values:
        raise ConfigError(
            f"{where} names no setting, expected lines such as optim.lr: {{log_uniform: [1e-4, 1e-2]}}"
        )
    return {str(name): _parse(body, f"{where}: {name}") for name, body in values.items()}


def check_space(space: Space, check: Check, where: str) -> None:
    """Compares every name and every end of a range with what the settings take.

    Some settings bound each other (gamma_min and gamma_max), so an end is right if it fits the values that others have
    without the sweep, or all of their lower or all of their upper ends.

    Args:
        check: raises ConfigError for values that are no settings.
    Raises:
        ConfigError: the first that does not fit.
    """
    corners: list[Values] = [
        {},
        *({name: d.samples()[i] for name, d in space.items()} for i in (0, -1)),
    ]
    for name, distribution in space.items():
        for value in distribution.samples():
            problems = list(_problems(check, [{**corner, name: value} for corner in corners]))
            if len(problems) == len(corners):
                raise ConfigError(f"{where}: {problems[0]}")


def nested(values: Values) -> dict[str, Any]:
    """{"optim.lr": 0.1} as {"optim": {"lr": 0.1}}."""
    sections: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        section = sections
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return sections


def _problems(check: Check, candidates: Sequence[Values]) -> Iterator[ConfigError]:
    for values in candidates:
        try:
            check(values)
        except ConfigError as error:
            yield error


def _parse(body: Any, where: str) -> Distribution:
    kinds = [key for key in body if key != "step"] if isinstance(body, Mapping) else []
    if len(kinds) != 1:
        raise ConfigError(
            f"{where} is {body!r}, expected one of {', '.join(_KINDS)}, as in {{uniform: [0, 1]}}"
        )
    kind, given, step = kinds[0], body[kinds[0]], body.get("step")
    if kind not in _KINDS:
        raise ConfigError(f"{where}: {configs.unknown('distribution', str(kind), _KINDS)}")
    if kind == "choice":
        if not isinstance(given, list) or not given or step is not None:
            raise ConfigError(
                f"{where}: choice is {given!r}, expected a list of values, and no step"
            )
        return Choice(values=tuple(given))
    log, whole = _RANGES[kind]
    if not isinstance(given, list) or len(given) != 2:
        raise ConfigError(f"{where}: {kind} is {given!r}, expected [lowest, highest]")
    low, high = (_number(value, whole, f"{where}: {kind}") for value in given)
    width = 0.0 if step is None else _number(step, whole, f"{where}: step")
    if not low < high:
        raise ConfigError(f"{where}: {kind} is [{low:g}, {high:g}], expected the lower bound first")
    if log and low <= 0:
        raise ConfigError(
            f"{where}: {kind} starts at {low:g}, expected more than 0: it is uniform in the logarithm"
        )
    if step is not None and (log or not 0 < width <= high - low):
        expected = f"none for {kind}" if log else f"more than 0 and at most {high - low:g}"
        raise ConfigError(f"{where}: step is {width:g}, expected {expected}")
    return NumberRange(low=low, high=high, log=log, whole=whole, step=width)


def _number(value: Any, whole: bool, where: str) -> float:
    """A finite number; YAML reads 1e-4 as a text."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (whole and number != round(number)):
        raise ConfigError(
            f"{where} holds {value!r}, expected {'an integer' if whole else 'a number'}"
        )
    return number
