"""Line and bar charts as inline SVG: no script, no asset; colours come from the page's style (classes s0, s1 ...)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from xmcray.evaluation.metrics import Float64Array

WIDTH, HEIGHT = 520, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 14, 48
MAX_POINTS = 300


@dataclass(frozen=True, slots=True)
class Series:
    """A named line or set of bars: x and y of equal length (x is ignored by bars)."""

    name: str
    x: Float64Array
    y: Float64Array


def short_number(value: float) -> str:
    """1,500,000 -> 1.5M; 0.025 -> 0.025."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            # 1e4 is where thousands get their letter, so that steps 1,000 .. 9,999 stay readable.
            return f"{value / (1e3 if suffix == 'k' else size):.4g}{suffix}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) that lie within [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    y_title: str,
    x_title: str = "step",
    from_zero: bool = True,
    show: Callable[[float], str] = short_number,
) -> str:
    """A chart with one line per series; long ones are drawn as means over equal stretches inside their range."""
    drawn = [
        Series(s.name, s.x[np.isfinite(s.y)], s.y[np.isfinite(s.y)])
        for s in series
        if np.isfinite(s.y).any()
    ]
    if not drawn:
        return ""
    every_x, every_y = np.concatenate([s.x for s in drawn]), np.concatenate([s.y for s in drawn])
    x_low, x_high = float(every_x.min()), float(every_x.max())
    x_high = x_high if x_high > x_low else x_low + 1
    y_low, y_high = _range(
        min(0.0, float(every_y.min())) if from_zero else float(every_y.min()), float(every_y.max())
    )
    frame = _Frame(x_low, x_high, y_low, y_high)
    parts = [_axes(frame, ticks(x_low, x_high), x_title, y_title, show)]
    for number, line in enumerate(drawn):
        parts.append(_line(frame, line, number))
    legend = [f"{line.name} {show(float(line.y[-1]))}" if len(drawn) > 1 else "" for line in drawn]
    missing = sum(len(s.y) for s in series) - len(every_y)
    last = f"last {show(float(drawn[0].y[-1]))}" if len(drawn) == 1 else ""
    notes = [last, f"{missing:,} values not finite, not drawn" if missing else ""]
    return _figure(title, legend, ", ".join(filter(None, notes)), "".join(parts))


def bar_chart(
    title: str,
    names: Sequence[str],
    series: Sequence[Series],
    *,
    y_title: str,
    x_title: str,
    show: Callable[[float], str] = short_number,
) -> str:
    """Groups of bars, one per name (up to two lines) with a bar per series; a value that is not finite has no bar."""
    values = np.stack([s.y for s in series])
    if not np.isfinite(values).any():
        return ""
    _, high = _range(0.0, float(np.nanmax(values)))
    frame = _Frame(0.0, float(len(names)), 0.0, high)
    parts = [_axes(frame, [], x_title, y_title, show)]
    width = 0.76 / len(series)
    for place, name in enumerate(names):
        for row, words in enumerate(name.split("\n")):
            parts.append(
                _text(frame.x(place + 0.5), HEIGHT - BOTTOM + 15 + 13 * row, words, "middle")
            )
        for number in range(len(series)):
            value = float(values[number, place])
            if math.isfinite(value):
                left, top = frame.x(place + 0.12 + number * width), frame.y(value)
                size = (
                    f'width="{frame.x(width) - frame.x(0) - 1:.1f}" height="{frame.y(0) - top:.1f}"'
                )
                hint = escape(
                    f"{name.replace(chr(10), chr(32))}: {series[number].name} {show(value)}"
                )
                parts.append(
                    f'<rect class="f{number}" x="{left:.1f}" y="{top:.1f}" {size}><title>{hint}</title></rect>'
                )
                if len(names) * len(series) <= 12:
                    centre = frame.x(place + 0.12 + (number + 0.5) * width)
                    parts.append(_text(centre, top - 4, show(value), "middle"))
    return _figure(title, [s.name for s in series] if len(series) > 1 else [], "", "".join(parts))


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps data to the drawing's coordinates."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return (
            HEIGHT
            - BOTTOM
            - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)
        )


def _range(low: float, high: float) -> tuple[float, float]:
    """The ends of a value axis: room around the data, but no ground below zero for values that never are negative."""
    room = (high - low) * 0.08 if high > low else max(abs(high) * 0.1, 1e-3)
    return (max(low - room, 0.0) if low >= 0 else low - room), high + room


def _text(x: float, y: float, text: str, anchor: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _axes(
    frame: _Frame,
    x_ticks: Sequence[float],
    x_title: str,
    y_title: str,
    show: Callable[[float], str],
) -> str:
    parts = []
    for tick in ticks(frame.y_low, frame.y_high):
        y = frame.y(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(LEFT - 6, y + 4, show(tick), "end"))
    base = HEIGHT - BOTTOM
    for tick in x_ticks:
        x = frame.x(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>')
        parts.append(_text(x, base + 16, short_number(tick), "middle"))
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    middle = (TOP + base) / 2
    turned = f' class="name" transform="rotate(-90 12 {middle:.1f})"'
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_title, "middle", ' class="name"'))
    parts.append(_text(12, middle, y_title, "middle", turned))
    return "".join(parts)


def _line(frame: _Frame, line: Series, number: int) -> str:
    size = max(1, math.ceil(len(line.y) / MAX_POINTS))
    starts = np.arange(0, len(line.y), size)
    lengths = np.diff(np.append(starts, len(line.y)))
    x, y = np.add.reduceat(line.x, starts) / lengths, np.add.reduceat(line.y, starts) / lengths
    points = [f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in zip(x, y, strict=True)]
    if len(points) == 1:
        left, top = points[0].split(",")
        return f'<circle class="f{number}" cx="{left}" cy="{top}" r="3.5"/>'
    band = ""
    if size > 1:
        edge = [(a, b) for a, b in zip(x, np.maximum.reduceat(line.y, starts), strict=True)]
        edge += [(a, b) for a, b in zip(x, np.minimum.reduceat(line.y, starts), strict=True)][::-1]
        corners = " ".join(f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in edge)
        band = f'<polygon class="f{number} band" points="{corners}"/>'
    places = [point.split(",") for point in points] if len(points) <= 30 else []
    dots = "".join(
        f'<circle class="f{number}" cx="{left}" cy="{top}" r="2.5"/>' for left, top in places
    )
    return f'{band}<polyline class="s{number}" points="{" ".join(points)}"/>{dots}'


def _figure(title: str, legend: Sequence[str], note: str, drawing: str) -> str:
    keys = "".join(
        f'<span><i class="b{i}"></i>{escape(name)}</span>' for i, name in enumerate(legend) if name
    )
    head = f"<b>{escape(title)}</b>{keys}" + (f"<small>{escape(note)}</small>" if note else "")
    label = escape(title, quote=True)
    return (
        f"<figure><figcaption>{head}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{drawing}</svg></figure>'
    )
