"""SVG files of claims: rows of means with intervals, and the charts of a run's page with the style they need."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape

from xmcray.evaluation.charts import short_number, ticks

COLOURS = ("#2563c9", "#c2590c", "#178055", "#8b3fb0", "#a3163d", "#5d6778")
STYLE = (
    "text { font: 12px system-ui, sans-serif; fill: #5d6778; } .name { fill: #1c2330; }"
    " .title { font-weight: 600; fill: #1c2330; } polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }"
    " .band { opacity: .18; } .grid { stroke: #dfe3ea; } .axis { stroke: #5d6778; }"
    + "".join(f" .s{i} {{ stroke: {c}; }} .f{i} {{ fill: {c}; }}" for i, c in enumerate(COLOURS))
)
WIDTH = 720
NAMES = 250
VALUES = 90
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
    names = [
        (int(i), name)
        for i, name in re.findall(r'<span><i class="b(\d+)"></i>(.*?)</span>', figure)
    ]
    top = HEAD + (20 if names else 0)
    moved = f'<g transform="translate(0 {top})">{drawing[3]}</g>'
    return _file(title[1], names, moved, top + int(drawing[2]), int(drawing[1]))


def _block(metric: str, rows: Rows, top: int) -> str:
    ends = [
        mean + sign * half
        for mean, half in rows.values()
        if math.isfinite(half)
        for sign in (-1, 1)
    ]
    ends += [mean for mean, _ in rows.values()]
    low = min(ends)
    high = max(ends)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low = max(low - room, 0.0) if low >= 0 else low - room
    high = high + room
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
        spread = ""
        if math.isfinite(half):
            parts.append(
                f'<polyline class="s0" points="{x(mean - half):.1f},{y} {x(mean + half):.1f},{y}"/>'
            )
            spread = f" ± {short_number(half)}" if half else ""
        parts.append(f'<circle class="f0" cx="{x(mean):.1f}" cy="{y}" r="4"/>')
        parts.append(_text(right + 8, y + 4, f"{mean:,.4g}{spread and f' ± {half:,.2g}'}", "start"))
    return "".join(parts)


def _file(
    title: str, names: Sequence[tuple[int, str]], drawing: str, height: int, width: int = WIDTH
) -> str:
    parts = [f'<text class="title" x="12" y="20">{title}</text>']
    left = 12.0
    for number, name in names:
        parts.append(
            f'<rect class="f{number}" x="{left:.0f}" y="30" width="11" height="11" rx="3"/>'
        )
        parts.append(f'<text x="{left + 16:.0f}" y="40">{name}</text>')
        left += 36 + 6.4 * len(name)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
        f' aria-label="{title}"><style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>'
        f"{''.join(parts)}{drawing}</svg>\n"
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
