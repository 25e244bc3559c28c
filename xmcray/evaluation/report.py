"""The page of a run: one self-contained HTML file with curves, metrics, settings and provenance.

The template is run_report.html.j2. The page follows the reader's light or dark theme, and it prints
well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from xmcray.evaluation.charts import Series, bar_chart, line_chart
from xmcray.evaluation.pages import render
from xmcray.evaluation.reliability import DIAGRAM_CUTOFF
from xmcray.evaluation.table import metric_names, num_queries, percent, propensity_note
from xmcray.storage.whole_files import write_text

Record = Mapping[str, Any]

TILES = ("P@1", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@100")  # the numbers a reader looks for first


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric as it is printed.

    Attributes:
        name: name of the metric.
        value: its value in percent.
        interval: the ends of its bootstrap interval; empty without one.
    """

    name: str
    value: str
    interval: str = ""


def write_report(
    path: Path,
    *,
    title: str,
    steps: Sequence[Record],
    metrics: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    facts: Mapping[str, str],
) -> None:
    """Writes the page; the old one stays until the new one is complete.

    Args:
        path: the HTML file.
        title: heading, such as the method and the data set.
        steps: records of metrics.jsonl. Of each step the newest value counts, because a resumed run
            repeats steps.
        metrics: content of metrics.json, or None before the run was evaluated.
        config: the resolved configuration, nested.
        facts: what a reader needs to trust the numbers: corpus hash, versions, hardware, commit.

    Raises:
        StorageError: the disk is full or the folder is read-only.
    """
    measured = metrics or {}
    label_charts = [
        _segment_chart(measured.get("segments") or ()),
        _decile_chart(measured.get("deciles") or ()),
    ]
    page = render(
        "run_report.html.j2",
        title=title,
        subtitle=_subtitle(steps, measured),
        tiles=[_figure(measured, name, 1) for name in TILES if name in measured],
        # A chart without values is an empty text and is left out.
        training_charts=[chart for chart in _training_charts(steps) if chart],
        label_charts=[chart for chart in label_charts if chart],
        probability_charts=_probability_charts(measured.get("calibration") or {}),
        metric_rows=_metric_rows(measured),
        propensity_note=propensity_note(measured),
        facts=facts,
        settings=_dotted(config),
    )
    write_text(path, page)


def _subtitle(steps: Sequence[Record], metrics: Mapping[str, Any]) -> str:
    parts = []
    recorded_steps = [int(record["step"]) for record in steps if "step" in record]
    if recorded_steps:
        # Not the last record: a resumed run repeats steps.
        parts.append(f"training recorded up to step {max(recorded_steps):,}")
    if "queries" in metrics:
        parts.append(num_queries(metrics, "queries evaluated"))
        parts.append(propensity_note(metrics))
    return "; ".join(parts) or "nothing recorded yet"


def _figure(metrics: Mapping[str, Any], name: str, digits: int) -> Figure:
    value = percent(metrics[name], digits)
    intervals = metrics.get("intervals") or {}
    # Without an interval there are no ends, and the joined text is empty.
    ends = [percent(end, digits) for end in intervals.get(name, ())]
    return Figure(name, value, " to ".join(ends))


def _series(steps: Sequence[Record], key: str, scale: float = 1.0) -> Series:
    """The values of a key by step; empty if no record has it."""
    # A resumed run repeats steps, so the newest value of a step replaces older ones.
    value_by_step: dict[float, float] = {}
    for record in steps:
        step = record.get("step")
        value = record.get(key)
        if step is not None and isinstance(value, int | float):
            value_by_step[float(step)] = float(value) * scale
    x = sorted(value_by_step)
    y = [value_by_step[step] for step in x]
    return Series(key, np.array(x), np.array(y))


def _training_charts(steps: Sequence[Record]) -> list[Markup]:
    def chart(title: str, key: str, y_title: str, from_zero: bool = True) -> Markup:
        return line_chart(title, [_series(steps, key)], y_title=y_title, from_zero=from_zero)

    precision = [_series(steps, "P@1", scale=100.0), _series(steps, "P@5", scale=100.0)]
    return [
        chart("Training loss", "loss", "loss per query", from_zero=False),
        line_chart("Validation precision", precision, y_title="precision (%)", from_zero=False),
        chart("Throughput", "queries_per_s", "queries / s"),
        chart("Age of the negatives", "negatives_age", "age (steps)"),
        chart("Waiting for negatives", "blocked_s", "waiting (s)"),
        chart("Memory", "memory_mb", "memory (MB)"),
    ]


def _metric_rows(metrics: Mapping[str, Any]) -> list[Figure] | None:
    """Rows of the table of metrics; None before the run was evaluated."""
    if not metrics:
        return None
    rows = [_figure(metrics, name, 2) for name in metric_names(metrics)]
    for name, value in (metrics.get("index_recall") or {}).items():
        if name != "queries":
            rows.append(Figure(f"index against exact search, {name}", percent(value)))
    return rows


def _segment_chart(segments: Sequence[Record]) -> Markup:
    return bar_chart(
        "Tail, torso and head labels",
        [f"{segment['name']}\n{segment['range']}" for segment in segments],
        {
            "recall@5": _percents(segments, "recall@5"),
            "macro-F1@5": _percents(segments, "macroF1@5"),
        },
        y_title="percent",
        x_title="labels by number of training queries",
        show=_three_digits,
    )


def _decile_chart(deciles: Sequence[Record]) -> Markup:
    return bar_chart(
        "Contribution of each tenth of the labels to P@5",
        [str(decile["decile"]) for decile in deciles],
        {"share of P@5": _percents(deciles, "P@5")},
        y_title="percentage points",
        x_title="tenths of the labels, rare to frequent",
        show=_three_digits,
    )


def _probability_charts(calibration: Record) -> list[Markup]:
    """Charts of the probabilities; none if the answers have no probabilities."""
    if not calibration:
        return []
    error = percent(calibration[f"ECE@{DIAGRAM_CUTOFF}"], 1)
    return [
        _reliability_diagram(calibration["bins"], error),
        _threshold_chart(calibration["thresholds"]),
    ]


def _reliability_diagram(bins: Sequence[Record], error: str) -> Markup:
    """Precision by probability; the closer to the diagonal, the better."""
    probability = np.array([row["probability"] for row in bins])
    precision = np.array([row["precision"] for row in bins])
    return line_chart(
        f"Reliability of the first {DIAGRAM_CUTOFF} answers, ECE {error} %",
        [
            Series("precision", probability, 100 * precision),
            Series("probability", probability, 100 * probability),
        ],
        y_title="percent",
        x_title="probability",
    )


def _threshold_chart(thresholds: Sequence[Record]) -> Markup:
    """Precision and coverage of the answers above each probability."""
    levels = np.array([row["min_probability"] for row in thresholds])
    precision = np.array(_percents(thresholds, "precision"))
    coverage = np.array(_percents(thresholds, "coverage"))
    return line_chart(
        "What min_probability lets through",
        [Series("precision", levels, precision), Series("coverage", levels, coverage)],
        y_title="percent",
        x_title="min_probability",
    )


def _percents(rows: Sequence[Record], key: str) -> list[float]:
    """Percent of a key in each row; NaN if a row has no value."""
    percents = []
    for row in rows:
        share = row.get(key)
        percents.append(math.nan if share is None else 100.0 * share)
    return percents


def _three_digits(value: float) -> str:
    return f"{value:.3g}"


def _dotted(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings as texts, by the dotted names that `--set` accepts."""
    texts: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        # An empty section has no settings of its own; it is printed as {}.
        if isinstance(value, Mapping) and value:
            texts.update(_dotted(value, f"{name}."))
        elif isinstance(value, str):
            texts[name] = value
        else:
            texts[name] = json.dumps(value, default=str, ensure_ascii=False)
    return texts
