"""Line and bar charts as inline SVG, drawn by the templates line_chart.svg.j2 and bar_chart.svg.j2.

A chart needs no script and no asset. Its colours come from the style of the page: class s0 strokes
and class f0 fills in the colour of the first series, s1 and f1 in that of the second, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from xmcray.evaluation.pages import render
from xmcray.types import Float64Array

MAX_POINTS = 300  # a longer line is drawn as means over equal stretches
MAX_LABELLED_BARS = 12  # with more bars, their values would overlap
GROUP_MARGIN = 0.12  # space on either side of a group of bars, as a share of its width

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """A named line.

    Attributes:
        name: shown in the legend.
        x: float64, horizontal positions.
        y: float64, one value for each position.
    """

    name: str
    x: Float64Array
    y: Float64Array


@dataclass(frozen=True, slots=True)
class Frame:
    """Maps data to pixels, counted from the upper left corner of the drawing.

    Attributes:
        x_low: smallest value of the horizontal axis.
        x_high: its largest value.
        y_low: smallest value of the vertical axis.
        y_high: its largest value.
    """

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: int = 520
    height: int = 260
    left: int = 64
    right: int = 506
    top: int = 14
    base: int = 212  # the horizontal axis; its ticks and title are below

    def x(self, value: float) -> float:
        """Pixels from the left edge."""
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        """Pixels from the upper edge; large values are at the top."""
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return self.base - share * (self.base - self.top)

    def x_ticks(self) -> list[float]:
        """Round values on the horizontal axis."""
        return ticks(self.x_low, self.x_high)

    def y_ticks(self) -> list[float]:
        """Round values on the vertical axis."""
        return ticks(self.y_low, self.y_high)


def short_number(value: float) -> str:
    """A number in few characters: 1,500,000 -> 1.5M; 0.025 -> 0.025."""
    size = abs(value)
    if size >= 1e9:
        return f"{value / 1e9:.4g}G"
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:  # not 1e3: the steps 1,000 to 9,999 stay readable
        return f"{value / 1e3:.4g}k"
    if size >= 1e3:
        return f"{value:,.0f}"
    return f"{value:,.4g}"


def ticks(low: float, high: float) -> list[float]:
    """About six round numbers within [low, high].

    They are 1, 2 or 5 times a power of ten apart.
    """
    smallest_step = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(smallest_step))
    # 0.999 and 1e-9 forgive rounding errors, so that a step or an end that fits exactly is kept.
    steps = [power * factor for factor in (1, 2, 5, 10)]
    step = min(step for step in steps if step >= smallest_step * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    y_title: str,
    x_title: str = "step",
    from_zero: bool = True,
) -> Markup:
    """A chart with one line for each series; values that are not finite are counted in its caption.

    Args:
        title: heading of the chart.
        series: the lines. Those without a finite value are left out.
        y_title: title of the vertical axis.
        x_title: title of the horizontal axis.
        from_zero: whether the vertical axis always shows 0.

    Returns:
        An HTML figure; nothing if no series has a finite value.
    """
    finite_lines = [_finite(line) for line in series]
    drawn = [line for line in finite_lines if len(line.y)]
    if not drawn:
        return Markup()
    legend = []
    notes = []
    for line in drawn:
        last_value = short_number(float(line.y[-1]))
        if len(drawn) > 1:
            legend.append(f"{line.name} {last_value}")
        else:
            notes.append(f"last {last_value}")
    num_values = sum(len(line.y) for line in series)
    num_missing = num_values - sum(len(line.y) for line in drawn)
    if num_missing:
        notes.append(f"{num_missing:,} values not finite, not drawn")
    return render(
        "line_chart.svg.j2",
        title=title,
        legend=legend,
        note=", ".join(notes),
        frame=_frame_around(drawn, from_zero),
        x_title=x_title,
        y_title=y_title,
        show=short_number,
        lines=[_shortened(line) for line in drawn],
    )


def _finite(line: Series) -> Series:
    """A line without its values that are not finite."""
    is_finite = np.isfinite(line.y)
    return Series(line.name, line.x[is_finite], line.y[is_finite])


def _frame_around(lines: Sequence[Series], from_zero: bool) -> Frame:
    """A frame that shows all points of some lines."""
    all_x = np.concatenate([line.x for line in lines])
    all_y = np.concatenate([line.y for line in lines])
    x_low = float(all_x.min())
    x_high = float(all_x.max())
    if x_high == x_low:  # a single point
        x_high = x_low + 1
    y_low = float(all_y.min())
    if from_zero:
        y_low = min(0.0, y_low)
    y_low, y_high = _value_range(y_low, float(all_y.max()))
    return Frame(x_low, x_high, y_low, y_high)


def bar_chart(
    title: str,
    names: Sequence[str],
    values_by_series: Mapping[str, Sequence[float]],
    *,
    y_title: str,
    x_title: str,
    show: Callable[[float], str] = short_number,
) -> Markup:
    """Groups of bars; a value that is not finite has no bar.

    Args:
        title: heading of the chart.
        names: one for each group, of one or two lines.
        values_by_series: one value for each group, by name of the series.
        y_title: title of the vertical axis.
        x_title: title of the horizontal axis.
        show: writes a value.

    Returns:
        An HTML figure; nothing if no value is finite.
    """
    num_series = len(values_by_series)
    # A group is 1 wide.
    bar_width = (1 - 2 * GROUP_MARGIN) / num_series
    bars = []
    for number, (series, values) in enumerate(values_by_series.items()):
        for group, value in enumerate(values):
            if math.isfinite(value):
                left = group + GROUP_MARGIN + number * bar_width
                group_name = names[group].replace("\n", " ")
                hint = f"{group_name}: {series} {show(value)}"
                bars.append(_Bar(number, left, value, hint))
    if not bars:
        return Markup()
    highest = max(bar.value for bar in bars)
    _, y_high = _value_range(0.0, highest)
    return render(
        "bar_chart.svg.j2",
        title=title,
        legend=list(values_by_series) if num_series > 1 else [],
        note="",
        frame=Frame(0, len(names), 0, y_high),
        x_title=x_title,
        y_title=y_title,
        show=show,
        names=names,
        bars=bars,
        bar_width=bar_width,
        bars_have_values=len(names) * num_series <= MAX_LABELLED_BARS,
    )


@dataclass(frozen=True, slots=True)
class _Bar:
    """One bar.

    Attributes:
        number: number of its series, which decides its colour.
        left: its left edge; a group is 1 wide.
        value: its height.
        hint: text that is shown when the pointer rests on it.
    """

    number: int
    left: float
    value: float
    hint: str


@dataclass(frozen=True, slots=True)
class _Line:
    """A line as it is drawn.

    Attributes:
        points: corners of the line, from left to right.
        band: corners of the area between the smallest and largest values; empty for a short line.
    """

    points: list[Point]
    band: list[Point]


def _shortened(line: Series) -> _Line:
    """Means over equal stretches of a long line, inside the range of its values."""
    num_values = len(line.y)
    stretch = max(1, math.ceil(num_values / MAX_POINTS))
    starts = np.arange(0, num_values, stretch)
    # The last stretch may be shorter.
    bounds = np.append(starts, num_values)
    lengths = np.diff(bounds)
    x = np.add.reduceat(line.x, starts) / lengths
    y = np.add.reduceat(line.y, starts) / lengths
    band: list[Point] = []
    if stretch > 1:
        upper = _points(x, np.maximum.reduceat(line.y, starts))
        lower = _points(x, np.minimum.reduceat(line.y, starts))
        # The outline goes to the right along the upper edge and back along the lower one.
        band = [*upper, *reversed(lower)]
    return _Line(_points(x, y), band)


def _points(x: Iterable[float], y: Iterable[float]) -> list[Point]:
    return list(zip(x, y, strict=True))


def _value_range(low: float, high: float) -> tuple[float, float]:
    """Ends of a vertical axis: room around the data, but not below 0 if no value is negative."""
    room = (high - low) * 0.08
    if high == low:
        room = max(abs(high) * 0.1, 1e-3)
    bottom = low - room
    if low >= 0:
        bottom = max(bottom, 0.0)
    return bottom, high + room
