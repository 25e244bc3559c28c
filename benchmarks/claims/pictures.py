"""SVG files of claims: rows of means with intervals, and the charts of a run's page with the style they need."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape

from xmcray.evaluation.charts import short_number, ticks

COLOURS = ("#2563c9", "#c2590c", "#178055", "#8b3fb0", "#a3163d", "#5d6778")
# Classes of the charts: a stroke (s0, s1, ...) and a fill (f0, f1, ...) of each colour.
COLOUR_STYLE = "".join(
    f" .s{number} {{ stroke: {colour}; }} .f{number} {{ fill: {colour}; }}"
    for number, colour in enumerate(COLOURS)
)
STYLE = (
    "text { font: 12px system-ui, sans-serif; fill: #5d6778; } .name { fill: #1c2330; }"
    " .title { font-weight: 600; fill: #1c2330; } polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }"
    " .band { opacity: .18; } .grid { stroke: #dfe3ea; } .axis { stroke: #5d6778; }"
) + COLOUR_STYLE
# In pixels: widths of the picture and of its columns of names and values.
WIDTH = 720
NAMES = 250
VALUES = 90
# Heights of a row, of what a block has besides its rows, and of the title.
ROW = 20
BLOCK = 48
HEAD = 30

Rows = Mapping[str, tuple[float, float]]
"""Mean and half width of the interval by name; the half width may be infinite (one seed)."""


def rows_of_intervals(title: str, blocks: Mapping[str, Rows]) -> str:
    """An SVG file with a block of rows for each measure, each block on its own scale."""
    parts = []
    top = HEAD
    for metric, rows in blocks.items():
        shown = {name: value for name, value in rows.items() if math.isfinite(value[0])}
        if shown:
            parts.append(_block(metric, shown, top))
            top += BLOCK + ROW * len(shown)
    return _file(title, [], "".join(parts), top) if parts else ""


def standalone(figure: str) -> str:
    """The SVG file of a chart of xmcray.evaluation.charts."""
    if not figure or figure.startswith("<svg xmlns"):
        return figure
    title = re.search(r"<b>(.*?)</b>", figure)
    drawing = re.search(r'<svg viewBox="0 0 (\d+) (\d+)"[^>]*>(.*)</svg>', figure, re.DOTALL)
    assert title is not None, "not a chart"
    assert drawing is not None, "not a chart"
    # The legend: number of the colour and name of each line.
    legend = re.findall(r'<span><i class="b(\d+)"></i>(.*?)</span>', figure)
    names = [(int(number), name) for number, name in legend]
    top = HEAD + (20 if names else 0)
    moved = f'<g transform="translate(0 {top})">{drawing[3]}</g>'
    return _file(title[1], names, moved, top + int(drawing[2]), int(drawing[1]))


def _block(metric: str, rows: Rows, top: int) -> str:
    ends = []
    for mean, half in rows.values():
        ends.append(mean)
        if math.isfinite(half):
            ends += [mean - half, mean + half]
    # Some room on both sides; also if all values are equal, or 0. Values that are not negative keep
    # an axis that is not.
    room = (max(ends) - min(ends)) * 0.06 or abs(max(ends)) * 0.1 or 1.0
    low = min(ends) - room
    if min(ends) >= 0:
        low = max(low, 0.0)
    high = max(ends) + room
    right = WIDTH - VALUES
    bottom = top + 22 + ROW * len(rows)

    def x(value: float) -> float:
        return NAMES + (value - low) / (high - low) * (right - NAMES)

    parts = [_text(NAMES, top + 12, metric, "start", "title")]
    for tick in ticks(low, high):
        parts.append(
            f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{top + 20}" y2="{bottom}"/>'
        )
        parts.append(_text(x(tick), bottom + 14, short_number(tick), "middle"))
    for number, (name, (mean, half)) in enumerate(rows.items()):
        y = top + 32 + ROW * number
        parts.append(_text(NAMES - 10, y + 4, name, "end", "name"))
        value = f"{mean:,.4g}"
        if math.isfinite(half):
            left_end = f"{x(mean - half):.1f},{y}"
            right_end = f"{x(mean + half):.1f},{y}"
            parts.append(f'<polyline class="s0" points="{left_end} {right_end}"/>')
            if half:
                value += f" ± {half:,.2g}"
        parts.append(f'<circle class="f0" cx="{x(mean):.1f}" cy="{y}" r="4"/>')
        parts.append(_text(right + 8, y + 4, value, "start"))
    return "".join(parts)


def _file(
    title: str, names: Sequence[tuple[int, str]], drawing: str, height: int, width: int = WIDTH
) -> str:
    parts = [f'<text class="title" x="12" y="20">{title}</text>']
    left = 12.0
    for number, name in names:
        square = f'x="{left:.0f}" y="30" width="11" height="11" rx="3"'
        parts.append(f'<rect class="f{number}" {square}/>')
        parts.append(f'<text x="{left + 16:.0f}" y="40">{name}</text>')
        # A letter is about 6.4 pixels wide.
        left += 36 + 6.4 * len(name)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
        f' aria-label="{title}"><style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>'
        f"{''.join(parts)}{drawing}</svg>\n"
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
