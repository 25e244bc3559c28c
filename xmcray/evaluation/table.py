"""Evaluations as tables for the console. Everything comes from metrics.json, so a stored result prints the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from xmcray.evaluation.evaluate import ComparisonRow
from xmcray.evaluation.metrics import MAIN_METRICS

Metrics = Mapping[str, Any]  # the content of metrics.json


def percent(value: float | None, digits: int = 2) -> str:
    """0.1234 -> "12.34"; a missing value is a dash."""
    return "-" if value is None else f"{100 * value:.{digits}f}"


def metrics_table(runs: Mapping[str, Metrics], title: str = "Metrics, in percent") -> Table:
    """One row per metric, one column per run (the first is the one measured, others stand beside it as baselines).

    Args:
        runs: metrics.json by the run's name; intervals are printed where a run has them.
    """
    table = _table(title, "metric", *runs)
    for metric in _metric_names(runs):
        table.add_row(Text(metric), *(_with_interval(run, metric) for run in runs.values()))
    # Runs of other people may use other constants; then their PSP is another number.
    table.add_row(
        "A, B of PSP",
        *(f"{run['A']:g}, {run['B']:g}" if "A" in run else "-" for run in runs.values()),
    )
    measured = next((run for run in runs.values() if "queries" in run), None)
    if measured is not None:
        table.caption = Text(_caption(measured))
    return table


def propensity_note(run: Metrics) -> str:
    """The constants every PSP must be read with."""
    return (
        f"PSP with A = {run['A']:g}, B = {run['B']:g}"
        if "A" in run and "B" in run
        else "PSP constants not recorded"
    )


def segment_table(run: Metrics) -> Table:
    """Head, torso and tail: what labels of each training frequency hold and contribute."""
    columns = ("training queries", "labels", "positives", "P@5 share", "recall@5", "macro-F1@5")
    table = _table("Labels by training frequency, in percent", "segment", *columns)
    for row in run.get("segments") or ():
        name, reach = Text(row["name"]), Text(row["range"])
        table.add_row(
            name,
            reach,
            f"{row['labels']:,}",
            f"{row['positives']:,}",
            *_shares(row),
            percent(row["macroF1@5"]),
        )
    return table


def decile_table(run: Metrics) -> Table:
    """Ten equal groups of labels from rare to frequent; the P@5 column adds up to P@5."""
    columns = ("training queries", "labels", "positives", "P@5 share", "recall@5")
    table = _table("Deciles of labels, rare to frequent, in percent", "decile", *columns)
    for row in run.get("deciles") or ():
        low, high = row["min_count"], row["max_count"]
        reach = f"{low}" if low == high else f"{low}-{high}"
        table.add_row(
            str(row["decile"]), reach, f"{row['labels']:,}", f"{row['positives']:,}", *_shares(row)
        )
    return table


def index_table(run: Metrics) -> Table:
    """How much of the exact answer the index returns: what is lost here is the index's error, not the model's."""
    found = dict(run.get("index_recall") or {})
    table = _table(
        f"Index against exact search on {int(found.pop('queries', 0)):,} queries",
        "measure",
        "percent",
    )
    for name, value in found.items():
        table.add_row(name, percent(value))
    return table


def comparison_table(rows: Sequence[ComparisonRow], a: str, b: str) -> Table:
    """Run `a` against run `b` on the same queries; a difference is marked when its interval leaves zero out."""
    table = _table(
        "Paired comparison, in percent",
        "metric",
        a,
        b,
        "difference",
        "95 % interval",
        "p (sign flip)",
    )
    for row in rows:
        style = "" if row.low <= 0 <= row.high else ("green" if row.low > 0 else "red")
        difference = Text(f"{100 * row.difference:+.2f}", style=style)
        interval = f"{100 * row.low:+.2f} .. {100 * row.high:+.2f}"
        table.add_row(
            row.metric, percent(row.a), percent(row.b), difference, interval, f"{row.p_value:.4f}"
        )
    return table


def answer_table(query: str, answers: Sequence[tuple[float, str, str]]) -> Table:
    """The answers to one query: score, uid and text of each."""
    table = Table(
        title=Text(query), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    table.add_column(justify="right")
    for score, uid, text in answers:
        # Many corpora name a label by its text; once is enough.
        table.add_row(
            f"{score:.2f}",
            Text(uid),
            Text("" if text == uid else text, overflow="ellipsis", no_wrap=True),
        )
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column(Text(first))
    for name in others:
        # Text, not str: a run called "[bold]" is a name, not markup.
        table.add_column(Text(name), justify="right")
    return table


def _metric_names(runs: Mapping[str, Metrics]) -> list[str]:
    found = {key for run in runs.values() for key in run}
    return [
        *(name for name in MAIN_METRICS if name in found),
        *sorted(key for key in found if key.startswith("macroF1")),
    ]


def _with_interval(run: Metrics, metric: str) -> str:
    value = percent(run.get(metric))
    interval = (run.get("intervals") or {}).get(metric)
    return f"{value}  [{percent(interval[0])}, {percent(interval[1])}]" if interval else value


def _shares(row: Mapping[str, Any]) -> tuple[str, str]:
    return percent(row["P@5"]), percent(row["recall@5"])


def _caption(run: Metrics) -> str:
    left_out = f", {run['left_out']:,} left out" if run.get("left_out") else ""
    # Short lines: a caption wraps at the width of its table, which one run alone leaves narrow.
    return f"{run['queries']:,} queries{left_out}\n[95 % bootstrap interval]"
