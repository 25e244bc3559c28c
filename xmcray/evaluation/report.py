"""A run on one page: a self-contained HTML file with curves, metrics, settings and where the numbers come from.

No script, no font, no image from elsewhere; it follows the reader's light or dark theme and prints well.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from xmcray.evaluation.charts import Series, bar_chart, line_chart
from xmcray.evaluation.metrics import MAIN_METRICS
from xmcray.evaluation.table import percent, propensity_note
from xmcray.storage import disk_errors

Record = Mapping[str, Any]

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1c2330; --soft: #5d6778; --line: #dfe3ea;
  --c0: #2563c9; --c1: #c2590c; --c2: #178055; --c3: #8b3fb0; }
@media (prefers-color-scheme: dark) { :root { --page: #12161d; --card: #1b212b; --ink: #e6eaf1; --soft: #9aa5b7;
  --line: #313a48; --c0: #72a7ff; --c1: #ffa45c; --c2: #58cf9c; --c3: #d39bf2; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { margin: 0 0 4px; font-size: 26px; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 36px 0 12px; font-size: 18px; }
p, small { color: var(--soft); margin: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 20px; }
.tiles div, figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tiles div { padding: 12px 16px; }
.tiles strong { display: block; font-size: 26px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; padding: 14px 16px 8px; break-inside: avoid; }
figcaption { display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 16px; margin-bottom: 6px; }
figcaption span { color: var(--soft); font-size: 13px; white-space: nowrap; }
figcaption i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11.5px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .name { fill: var(--ink); }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .band { opacity: .18; } .grid { stroke: var(--line); } .axis { stroke: var(--soft); }
.s0 { stroke: var(--c0); } .s1 { stroke: var(--c1); } .s2 { stroke: var(--c2); } .s3 { stroke: var(--c3); }
.f0 { fill: var(--c0); } .f1 { fill: var(--c1); } .f2 { fill: var(--c2); } .f3 { fill: var(--c3); }
.b0 { background: var(--c0); } .b1 { background: var(--c1); } .b2 { background: var(--c2); }
.b3 { background: var(--c3); }
.card { padding: 4px 16px 10px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 6px 20px 6px 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.v { font-family: ui-monospace, monospace; font-size: 13px; overflow-wrap: anywhere; }
@media print { body { background: none; } .charts { grid-template-columns: 1fr 1fr; } }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


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
        steps: records of metrics.jsonl; of each step the newest value counts (a resumed run repeats steps).
        metrics: content of metrics.json, or None before the run was evaluated.
        config: the resolved configuration, nested.
        facts: what else must be known to trust the numbers: corpus hash, versions, hardware, commit.
    Raises:
        StorageError: the disk is full or the folder is read-only.
    """
    sections = [_summary(metrics), _section("Training", _training(steps)), _results(metrics)]
    sections += [_pairs("Facts", "fact", facts), _pairs("Configuration", "setting", _flat(config))]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body><main><h1>{escape(title)}</h1><p>{escape(_subtitle(steps, metrics))}</p>\n"
        + "\n".join(filter(None, sections))
        + "\n</main></body></html>\n"
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        try:
            temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _subtitle(steps: Sequence[Record], metrics: Mapping[str, Any] | None) -> str:
    last = max((int(record["step"]) for record in steps if "step" in record), default=None)
    parts = [] if last is None else [f"training recorded up to step {last:,}"]
    if metrics and "queries" in metrics:
        left_out = metrics.get("left_out")
        parts.append(
            f"{metrics['queries']:,} queries evaluated"
            + (f", {left_out:,} left out" if left_out else "")
        )
        parts.append(propensity_note(metrics))
    return "; ".join(parts) or "nothing recorded yet"


def _summary(metrics: Mapping[str, Any] | None) -> str:
    """The handful of numbers a reader looks for first."""
    tiles = []
    for name in ("P@1", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@100"):
        if metrics and name in metrics:
            interval = (metrics.get("intervals") or {}).get(name)
            below = f"{percent(interval[0], 1)} to {percent(interval[1], 1)}" if interval else ""
            tiles.append(
                f"<div><small>{name}</small><strong>{percent(metrics[name], 1)} %</strong><small>{below}</small></div>"
            )
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _series(steps: Sequence[Record], key: str, name: str, scale: float = 1.0) -> list[Series]:
    """One line, or none if no record holds the key."""
    newest = {
        float(record["step"]): float(record[key]) * scale
        for record in steps
        if record.get("step") is not None and isinstance(record.get(key), int | float)
    }
    places = sorted(newest)
    return (
        [Series(name, np.array(places), np.array([newest[place] for place in places]))]
        if places
        else []
    )


def _training(steps: Sequence[Record]) -> str:
    def one(title: str, key: str, y_title: str, from_zero: bool = True) -> str:
        return line_chart(title, _series(steps, key, key), y_title=y_title, from_zero=from_zero)

    validation = [line for key in ("P@1", "P@5") for line in _series(steps, key, key, 100.0)]
    charts = [
        one("Training loss", "loss", "loss per query", from_zero=False),
        line_chart("Validation precision", validation, y_title="precision (%)", from_zero=False),
        one("Throughput", "queries_per_s", "queries / s"),
        one("Age of the negatives", "negatives_age", "age (steps)"),
        one("Waiting for negatives", "blocked_s", "waiting (s)"),
        one("Memory", "memory_mb", "memory (MB)"),
    ]
    return f'<div class="charts">{"".join(charts)}</div>' if any(charts) else ""


def _results(metrics: Mapping[str, Any] | None) -> str:
    if not metrics:
        return ""
    charts = _segment_bars(metrics.get("segments") or ()) + _decile_bars(
        metrics.get("deciles") or ()
    )
    intervals = metrics.get("intervals") or {}
    names = [*MAIN_METRICS, *sorted(name for name in metrics if name.startswith("macroF1"))]
    rows = [
        (
            name,
            percent(metrics[name]),
            " to ".join(percent(end) for end in intervals[name]) if name in intervals else "",
        )
        for name in names
        if name in metrics
    ]
    for name, value in (metrics.get("index_recall") or {}).items():
        if name != "queries":
            rows.append((f"index against exact search, {name}", percent(value), ""))
    body = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{value}</td><td class="n">{interval}</td></tr>'
        for name, value, interval in rows
    )
    head = '<tr><th>metric</th><th class="n">percent</th><th class="n">95 % bootstrap interval</th></tr>'
    table = f'<div class="card"><table>{head}{body}</table><p>{escape(propensity_note(metrics))}</p></div>'
    return (
        _section("Rare and frequent labels", f'<div class="charts">{charts}</div>')
        if charts
        else ""
    ) + _section("Metrics", table)


def _segment_bars(rows: Sequence[Record]) -> str:
    if not rows:
        return ""
    series = [Series(name, np.empty(0), _percents(rows, key)) for name, key in _SEGMENT_BARS]
    names = [f"{row['name']}\n{row['range']}" for row in rows]
    title, x_title = "Tail, torso and head labels", "labels by number of training queries"
    return bar_chart(title, names, series, y_title="percent", x_title=x_title, show=_one_digit)


_SEGMENT_BARS = (("recall@5", "recall@5"), ("macro-F1@5", "macroF1@5"))


def _decile_bars(rows: Sequence[Record]) -> str:
    if not rows:
        return ""
    names = [str(row["decile"]) for row in rows]
    series = [Series("share of P@5", np.empty(0), _percents(rows, "P@5"))]
    title, x_title = (
        "Contribution of each tenth of the labels to P@5",
        "tenths of the labels, rare to frequent",
    )
    return bar_chart(
        title, names, series, y_title="percentage points", x_title=x_title, show=_one_digit
    )


def _percents(rows: Sequence[Record], key: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(
        [math.nan if row.get(key) is None else 100.0 * row[key] for row in rows], np.float64
    )


def _one_digit(value: float) -> str:
    return f"{value:.3g}"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _pairs(title: str, first: str, values: Mapping[str, str]) -> str:
    rows = "".join(
        f'<tr><td>{escape(k)}</td><td class="v">{escape(v)}</td></tr>' for k, v in values.items()
    )
    head = f"<tr><th>{first}</th><th>value</th></tr>"
    return _section(title, f'<div class="card"><table>{head}{rows}</table></div>' if rows else "")


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings under the dotted names `--set` takes."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            text = (
                value
                if isinstance(value, str)
                else json.dumps(value, default=str, ensure_ascii=False)
            )
            found[f"{prefix}{key}"] = text
    return found
