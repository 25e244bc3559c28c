"""The page of a sweep: parallel coordinates of its trials, what each setting explains, and a table.

The template is sweep_report.html.j2. As the page of a run, it has no script and loads nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmcray.evaluation.charts import Frame, short_number
from xmcray.evaluation.pages import render
from xmcray.storage.whole_files import write_text
from xmcray.tuning.space import Choice, Distribution, NumberRange, Space, Value
from xmcray.tuning.sweep import State, Trial
from xmcray.types import Float64Array

# Colours of the lowest, a middle and the highest score. They go from dark to bright, so that
# readers who confuse colours can tell the lines apart.
SCALE = (0.0, 0.5, 1.0)
COLOURS = ((68, 1, 84), (38, 140, 141), (244, 160, 24))
ENDED: tuple[State, ...] = ("finished", "stopped", "failed")
MIN_TRIALS = 5  # with fewer trials, the importance of a setting means nothing


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis of the parallel coordinates.

    Attributes:
        name: last part of the setting's name, or the metric.
        section: the name's other parts.
        lowest: text at the lower end.
        highest: text at the upper end.
    """

    name: str
    section: str
    lowest: str
    highest: str


@dataclass(frozen=True, slots=True)
class _Line:
    """A trial in the parallel coordinates.

    Attributes:
        places: where its values and its score lie, 0 to 1 on each axis.
        colour: from dark for the lowest score to bright for the highest.
        kind: CSS classes.
        hint: text that is shown when the pointer rests on it.
    """

    places: list[float]
    colour: str
    kind: str
    hint: str


def write_report(
    path: Path,
    title: str,
    metric: str,
    space: Space,
    trials: Sequence[Trial],
    notes: str = "",
) -> None:
    """Writes the page, whole or not at all.

    Args:
        path: the HTML file.
        title: heading of the page.
        metric: the metric by which trials are compared.
        space: the settings that were searched.
        trials: the best first.
        notes: a sentence under the heading.
    """
    scores = [trial.score for trial in trials if trial.score is not None]
    frame = Frame(
        x_low=0,
        x_high=len(space),
        y_low=0,
        y_high=1,
        width=1080,
        height=380,
        left=90,
        right=990,
        top=20,
        base=324,
    )
    page = render(
        "sweep_report.html.j2",
        title=title,
        subtitle=f"{_summary(trials)}. {notes}",
        metric=metric,
        space=space,
        trials=trials,
        shown=shown,
        shares=importance(space, trials),
        frame=frame,
        axes=_axes(metric, space, scores),
        lines=_lines(metric, space, trials, scores),
    )
    write_text(path, page)


def importance(space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """Share of the metric's variance over trials that each setting explains alone, largest first.

    Trials are compared at the last epoch that all of them reached, so that stopped trials count
    too. A number explains what a parabola in its place on its scale fits. A choice explains what
    the means of its values fit. Both are adjusted for the number of parameters (adjusted R
    squared), so that a setting without any effect gets about 0. Interactions of settings are not
    measured.

    Returns:
        Share by setting; empty if fewer than five trials were validated.
    """
    validated = [trial for trial in trials if trial.curve and trial.state != "failed"]
    last_epochs = [trial.curve[-1].epochs for trial in validated]
    last_common_epoch = min(last_epochs, default=0)
    compared = []
    scores = []
    for trial in validated:
        score = _score_at(trial, last_common_epoch)
        if score is not None:
            compared.append(trial)
            scores.append(score)
    score_N = np.array(scores)
    if len(compared) < MIN_TRIALS or not np.ptp(score_N):
        return {}
    shares = {}
    for name, distribution in space.items():
        values = [trial.values[name] for trial in compared]
        shares[name] = _explained_variance(distribution, values, score_N)
    # The largest first; of equal shares in the order of the space, because sorting is stable.
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _score_at(trial: Trial, epochs: int) -> float | None:
    """Score of a trial's last validation within its first epochs; None if there is none."""
    score = None
    for validation in trial.curve:
        if validation.epochs <= epochs:
            score = validation.score
    return score


def shown(value: Value) -> str:
    """A value as it is printed: 0.00123456 -> 0.001235."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _explained_variance(
    distribution: Distribution,
    values: Sequence[Value],
    score_N: Float64Array,
) -> float:
    """Adjusted R squared of a least-squares fit of the scores to one setting."""
    if isinstance(distribution, Choice):
        # One column for each value that occurs: the fit is the mean of the scores with that value.
        number_N = np.array([distribution.position(value) for value in values])
        design_NP = (number_N[:, None] == np.unique(number_N)).astype(float)
    else:
        place_N = np.array([distribution.place(value) for value in values])
        num_powers = min(3, len(set(values)))  # a parabola has 3 parameters
        design_NP = np.vander(place_N, num_powers, increasing=True)
    num_trials, num_parameters = design_NP.shape
    if num_trials <= num_parameters:
        return 0.0
    parameter_P = np.linalg.lstsq(design_NP, score_N, rcond=None)[0]
    residual_N = score_N - design_NP @ parameter_P
    deviation_N = score_N - score_N.mean()
    unexplained = float((residual_N**2).sum() / (deviation_N**2).sum())
    # Every parameter explains a part of pure noise; the factor takes that part away again.
    adjusted = unexplained * (num_trials - 1) / (num_trials - num_parameters)
    return float(max(0.0, 1.0 - adjusted))


def _summary(trials: Sequence[Trial]) -> str:
    """How many trials there are, how they ended, and how much they trained."""
    counts = Counter(trial.state for trial in trials)
    num_steps = sum(trial.steps for trial in trials)
    endings = [f"{counts[state]} {state}" for state in ENDED if counts[state]]
    endings_text = ", ".join(endings) or "none ended"
    summary = f"{len(trials)} trials ({endings_text})"
    # The sweep of a bundle trains nothing.
    if num_steps:
        summary += f", {num_steps:,} training steps"
    return summary


def _axes(metric: str, space: Space, scores: Sequence[float]) -> list[_Axis]:
    """One axis for each setting and, last, one for the metric."""
    axes = []
    for dotted_name, distribution in space.items():
        section, _, name = dotted_name.rpartition(".")
        values = distribution.values_to_check()
        # Numbers are shortened, as long as a float holds them exactly.
        is_shortened = isinstance(distribution, NumberRange) and distribution.high < 1e15
        text_of = short_number if is_shortened else str
        axes.append(_Axis(name, section, lowest=text_of(values[0]), highest=text_of(values[-1])))
    if scores:
        lowest = _percent(min(scores))
        highest = _percent(max(scores))
        axes.append(_Axis(metric, "", lowest, highest))
    return axes


def _lines(
    metric: str,
    space: Space,
    trials: Sequence[Trial],
    scores: Sequence[float],
) -> list[_Line]:
    """One line for each trial that has a score."""
    lines: list[_Line] = []
    if not scores:
        return lines
    score_range = NumberRange(low=min(scores), high=max(scores))
    for trial in trials:
        if trial.score is None:
            continue
        score_place = score_range.place(trial.score)
        places = [space[name].place(trial.values[name]) for name in space]
        places.append(score_place)
        kind = "cut" if trial.state == "stopped" else ""
        if not lines:  # the best trial comes first
            kind = f"best {kind}".strip()
        settings = [f"{name} {shown(value)}" for name, value in trial.values.items()]
        hint = f"{trial.name}: {metric} {trial.score_text}; {', '.join(settings)}"
        lines.append(_Line(places, _colour(score_place), kind, hint))
    # The last line is drawn on top, so the best trial comes last.
    return lines[::-1]


def _percent(score: float) -> str:
    return f"{100 * score:.2f}"


def _colour(share: float) -> str:
    """A colour of the scale, 0 to 1, as #rrggbb."""
    # One row for each colour of the scale, with its amounts of red, green and blue.
    colours = np.array(COLOURS)
    rgb = []
    for channel in range(3):
        amount = np.interp(share, SCALE, colours[:, channel])
        rgb.append(round(amount))
    return "#" + bytes(rgb).hex()
