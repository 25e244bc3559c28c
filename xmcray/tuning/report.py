"""A sweep on one page: parallel coordinates of the trials, what each setting explains, and the table; self-contained.

As the page of a run (evaluation/report.py) it has no script and loads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt

from xmcray.evaluation.charts import short_number
from xmcray.evaluation.report import POLICY, STYLE
from xmcray.tuning.space import Choice, Distribution, Range, Space, Value
from xmcray.tuning.sweep import Trial, write_text

Float64Array = npt.NDArray[np.float64]
_LOW, _MIDDLE, _HIGH = (
    (68, 1, 84),
    (38, 140, 141),
    (244, 160, 24),
)  # dark to bright, told apart by everybody
_WIDTH, _HEIGHT, _SIDE, _TOP, _BOTTOM = 1080, 380, 90, 20, 56
_ROW, _LABEL = 26, 300  # of the bars
_STYLE = """
svg.lines polyline { stroke-width: 1.6; opacity: .75; } svg.lines polyline.best { stroke-width: 4; opacity: 1; }
svg.lines polyline.cut { stroke-dasharray: 4 3; } section > p { margin-top: 8px; } td.state { min-width: 7em; }
"""


def importance(space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """Share of the metric's variance over trials that each setting explains alone, the largest first.

    Trials are compared at the last epoch that all of them reached, so that those which were stopped count too. Of a
    number the share is that of a parabola in its place on its scale, of a choice that of the means of its values; both
    are adjusted for the number of parameters (adjusted R squared), so that what chance explains is 0. Nothing is said
    about settings that matter together.

    Returns:
        Nothing where fewer than five trials tell something.
    """
    measured = [trial for trial in trials if trial.curve and trial.state != "failed"]
    epoch = min((trial.curve[-1][0] for trial in measured), default=0)
    scores = [[score for at, score in trial.curve if at <= epoch] for trial in measured]
    kept = [(trial, found[-1]) for trial, found in zip(measured, scores, strict=True) if found]
    score_N = np.array([score for _, score in kept])
    if len(kept) < 5 or not np.ptp(score_N):
        return {}
    shares = {
        name: _explained(d, [trial.values[name] for trial, _ in kept], score_N)
        for name, d in space.items()
    }
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def write_report(
    path: Path, title: str, metric: str, space: Space, trials: Sequence[Trial], notes: str = ""
) -> None:
    """Writes the page, whole or not at all.

    Args:
        trials: the best first. notes: a sentence under the heading.
    """
    counted = {
        state: sum(trial.state == state for trial in trials)
        for state in ("finished", "stopped", "failed")
    }
    counts = ", ".join(f"{count} {state}" for state, count in counted.items() if count)
    steps = sum(trial.steps for trial in trials)
    trained = f", {steps:,} training steps" if steps else ""
    subtitle = f"{len(trials)} trials ({counts or 'none ended'}){trained}. {notes}"
    sections = [
        _coordinates(metric, space, trials),
        _bars(metric, importance(space, trials)),
        _table(metric, space, trials),
    ]
    write_text(
        path,
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{_STYLE}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1><p>{escape(subtitle)}</p>\n"
        + "\n".join(filter(None, sections))
        + "\n"
        "</main></body></html>\n",
    )


def shown(value: Value) -> str:
    """A value as it is printed: 0.00123456 -> 0.001235."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _explained(distribution: Distribution, values: Sequence[Value], score_N: Float64Array) -> float:
    if isinstance(distribution, Choice):
        given = [distribution.values.index(value) for value in values]
        columns = [np.array([place == own for place in given], float) for own in sorted(set(given))]
    else:
        place_N = np.array([distribution.place(value) for value in values])
        columns = [place_N**power for power in range(min(3, len(set(values))))]
    design_NP = np.stack(columns, axis=1)
    rest_N = score_N - design_NP @ np.linalg.lstsq(design_NP, score_N, rcond=None)[0]
    count, parameters = design_NP.shape
    if count <= parameters:
        return 0.0
    unexplained = float((rest_N**2).sum() / ((score_N - score_N.mean()) ** 2).sum())
    return float(max(0.0, 1.0 - unexplained * (count - 1) / (count - parameters)))


def _coordinates(metric: str, space: Space, trials: Sequence[Trial]) -> str:
    """An axis for each setting and one for the metric, a line for each trial; dashed if it was stopped."""
    drawn = [trial for trial in trials if trial.score is not None]
    if not drawn:
        return ""
    scores = [trial.score or 0.0 for trial in drawn]
    low, high = min(scores), max(scores)
    places = {
        name: _SIDE + i * (_WIDTH - 2 * _SIDE) / len(space)
        for i, name in enumerate([*space, metric])
    }

    def y(share: float) -> float:
        return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for number in reversed(range(len(drawn))):  # the best on top
        trial, score = drawn[number], scores[number]
        share = (score - low) / (high - low) if high > low else 0.5
        points = [
            (x, space[name].place(trial.values[name]))
            for name, x in places.items()
            if name in space
        ]
        line = " ".join(f"{x:.1f},{y(at):.1f}" for x, at in [*points, (places[metric], share)])
        kind = " ".join(["best"] * (number == 0) + ["cut"] * (trial.state == "stopped"))
        hint = ", ".join(f"{name} {shown(value)}" for name, value in trial.values.items())
        parts.append(
            f'<polyline class="{kind}" stroke="{_colour(share)}" points="{line}">'
            f"<title>{escape(f'{trial.name}: {metric} {100 * score:.2f}; {hint}')}</title></polyline>"
        )
    for name, x in places.items():
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y(1):.1f}" y2="{y(0):.1f}"/>'
        )
        ends = _ends(space[name]) if name in space else (f"{100 * low:.2f}", f"{100 * high:.2f}")
        parts += [_text(x, y(0) + 16, ends[0]), _text(x, y(1) - 7, ends[1])]
        for row, words in enumerate(_two_lines(name)):
            parts.append(_text(x, y(0) + 34 + 14 * row, words, "name"))
    return _section(
        "Trials", _drawing("Parallel coordinates", "lines", _WIDTH, _HEIGHT, "".join(parts))
    )


def _bars(metric: str, shares: Mapping[str, float]) -> str:
    if not shares:
        return ""
    parts = []
    for row, (name, share) in enumerate(shares.items()):
        top, width = row * _ROW, share * (_WIDTH - _LABEL - 80)
        parts.append(_text(_LABEL - 10, top + 17, name, "name", "end"))
        parts.append(
            f'<rect class="f0" x="{_LABEL}" y="{top + 5}" width="{max(width, 1):.1f}" height="{_ROW - 10}"/>'
        )
        parts.append(
            _text(_LABEL + max(width, 1) + 8, top + 17, f"{100 * share:.0f} %", anchor="start")
        )
    drawing = _drawing(
        "Importance of the settings", "bars", _WIDTH, len(shares) * _ROW + 6, "".join(parts)
    )
    about = f"Variance of {metric} that a setting explains alone, at the last epoch that all trials reached."
    return _section("Importance", f"{drawing}<p>{escape(about)}</p>")


def _table(metric: str, space: Space, trials: Sequence[Trial]) -> str:
    numbers = {"epoch", "steps", metric}
    names = ["trial", "state", metric, "epoch", "steps", *space]
    head = "".join(
        f"<th{' class=n' if name in numbers else ''}>{escape(name)}</th>" for name in names
    )
    rows = []
    for trial in trials:
        score, epoch = (
            ("-", "-") if trial.best is None else (f"{100 * trial.best[0]:.2f}", str(trial.best[1]))
        )
        state = f"{trial.state}: {trial.message}" if trial.message else trial.state
        cells = [
            trial.name,
            state,
            score,
            epoch,
            f"{trial.steps:,}",
            *(shown(trial.values[name]) for name in space),
        ]
        kinds = ["n" if name in numbers else "state" if name == "state" else "v" for name in names]
        rows.append(
            "".join(f'<td class="{k}">{escape(c)}</td>' for k, c in zip(kinds, cells, strict=True))
        )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return _section("All trials", f'<div class="card"><table><tr>{head}</tr>{body}</table></div>')


def _ends(distribution: Distribution) -> tuple[str, str]:
    values = distribution.samples()
    show = short_number if isinstance(distribution, Range) and distribution.high < 1e15 else str
    return show(values[0]), show(values[-1])


def _two_lines(name: str) -> tuple[str, str]:
    section, _, last = name.rpartition(".")
    return (last, section) if section else (name, "")


def _colour(share: float) -> str:
    a, b = (_LOW, _MIDDLE) if share < 0.5 else (_MIDDLE, _HIGH)
    part = math.fmod(2 * share, 1.0) if share < 1 else 1.0
    return "#" + "".join(f"{round(x + (y - x) * part):02x}" for x, y in zip(a, b, strict=True))


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _drawing(title: str, kind: str, width: int, height: int, inside: str) -> str:
    return (
        f'<figure><svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"{inside}</svg></figure>"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"
