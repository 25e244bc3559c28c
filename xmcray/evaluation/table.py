"""Tables of evaluations for the terminal.

The tables read only the content of metrics.json, so stored results look the same as new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from xmcray.evaluation.evaluate import ComparisonRow
from xmcray.evaluation.metrics import CUTOFFS, MAIN_METRICS
from xmcray.terminal import printable

StoredMetrics = Mapping[str, Any]  # the content of metrics.json


def percent(value: float | None, digits: int = 2) -> str:
    """0.1234 -> "12.34"; a missing value is a dash."""
    if value is None:
        return "-"
    return f"{100 * value:.{digits}f}"


def metrics_table(runs: Mapping[str, StoredMetrics]) -> Table:
    """One row per metric, one column per run.

    Args:
        runs: content of metrics.json by name of the run. The first run is the measured one, the others
            are baselines. Intervals are printed for runs that have them.
    """
    table = _table("Metrics, in percent", "metric", *runs)
    for metric in metric_names(*runs.values()):
        cells = [_with_interval(run, metric) for run in runs.values()]
        table.add_row(Text(metric), *cells)
    # Published results may use other constants, and their PSP is then not comparable.
    constants = [_psp_constants(run) for run in runs.values()]
    table.add_row("A, B of PSP", *constants)
    # The first run that has a number of queries is the measured one.
    counting_runs = [run for run in runs.values() if "queries" in run]
    if counting_runs:
        # Lines are short, because a caption wraps at the width of its table, which may be narrow.
        counted = num_queries(counting_runs[0], "queries")
        table.caption = Text(f"{counted}\n[95 % bootstrap interval]")
    return table


def _psp_constants(run: StoredMetrics) -> str:
    if "A" not in run:
        return "-"
    return f"{run['A']:g}, {run['B']:g}"


def num_queries(run: StoredMetrics, what: str) -> str:
    """The number of queries that count and that are left out, such as "90 queries, 2 left out"."""
    counted = f"{run['queries']:,} {what}"
    if run.get("left_out"):
        counted += f", {run['left_out']:,} left out"
    return counted


def propensity_note(run: StoredMetrics) -> str:
    """The propensity constants. A PSP can only be interpreted together with them."""
    if "A" not in run or "B" not in run:
        return "PSP constants not recorded"
    return f"PSP with A = {run['A']:g}, B = {run['B']:g}"


_GROUP_COLUMNS = ("training queries", "labels", "positives", "P@5 share", "recall@5")


def segment_table(run: StoredMetrics) -> Table:
    """Size and contribution of head, torso and tail labels."""
    title = "Labels by training frequency, in percent"
    table = _table(title, "segment", *_GROUP_COLUMNS, "macro-F1@5")
    for row in run.get("segments") or ():
        table.add_row(
            Text(row["name"]),
            Text(row["range"]),
            *_group_cells(row),
            percent(row["macroF1@5"]),
        )
    return table


def decile_table(run: StoredMetrics) -> Table:
    """Ten equal groups of labels from rare to frequent; the P@5 column adds up to P@5."""
    table = _table("Deciles of labels, rare to frequent, in percent", "decile", *_GROUP_COLUMNS)
    for row in run.get("deciles") or ():
        low = row["min_count"]
        high = row["max_count"]
        counts = str(low)
        if low != high:
            counts = f"{low}-{high}"
        table.add_row(str(row["decile"]), counts, *_group_cells(row))
    return table


def index_table(run: StoredMetrics) -> Table:
    """How much of the exact answer the index returns: the index's error, not the model's."""
    # A copy, because `pop` must not change the stored metrics.
    recall = dict(run.get("index_recall") or {})
    sample = int(recall.pop("queries", 0))
    title = f"Index against exact search on {sample:,} queries"
    table = _table(title, "measure", "percent")
    for name, value in recall.items():
        table.add_row(name, percent(value))
    return table


def calibration_table(run: StoredMetrics) -> Table:
    """Calibration errors, and precision and coverage above each probability."""
    calibration = run["calibration"]
    errors = []
    for name, value in calibration.items():
        if name.startswith("ECE@"):
            errors.append(f"{name} {percent(value)}")
    title = f"Probabilities, in percent: {', '.join(errors)}"
    table = _table(title, "at least", "precision", "queries with such an answer")
    for row in calibration["thresholds"]:
        level = percent(row["min_probability"], 0)
        table.add_row(level, percent(row["precision"]), percent(row["coverage"]))
    return table


def slice_table(run: StoredMetrics) -> Table:
    """Main metrics of the queries with each value of an attribute."""
    metrics = ("P@1", "P@5", "PSP@5", "R@100")
    table = _table("Slices of the queries, in percent", "attribute", "value", "queries", *metrics)
    for row in run["slices"]:
        value = "-" if row["value"] is None else str(row["value"])
        cells = [_with_interval(row, metric) for metric in metrics]
        table.add_row(
            Text(row["attribute"]),
            Text(value),
            f"{row['queries']:,}",
            *cells,
        )
    return table


def comparison_table(
    rows: Sequence[ComparisonRow], a: str, b: str, num_comparisons: int = 1
) -> Table:
    """Run `a` against run `b` on the same queries.

    A difference is coloured if its interval does not contain zero.

    Args:
        rows: one per metric.
        a: name of the first run.
        b: name of the second run.
        num_comparisons: number of comparisons that the p-values are corrected for.
    """
    test = "p (sign flip)"
    if num_comparisons > 1:
        test = f"p (sign flip, Holm for {num_comparisons})"
    columns = (a, b, "difference", "95 % interval", test)
    table = _table("Paired comparison, in percent", "metric", *columns)
    for row in rows:
        style = ""
        if row.low > 0:
            style = "green"
        elif row.high < 0:
            style = "red"
        table.add_row(
            row.metric,
            percent(row.a),
            percent(row.b),
            Text(f"{100 * row.difference:+.2f}", style=style),
            f"{100 * row.low:+.2f} .. {100 * row.high:+.2f}",
            f"{row.p_value:.4f}",
        )
    return table


def parts_table(
    tests: Sequence[tuple[str, float, Mapping[str, float], float]],
    fused: Mapping[str, float],
    alone: Mapping[str, Mapping[str, float]],
    num_queries: int,
) -> Table:
    """The parts of a fused bundle, and what the answers lose without each of them.

    Args:
        tests: of each part, its name, weight, metrics without it, and p-value. A part with weight 0 was
            left out.
        fused: metrics of the fused answers.
        alone: metrics of each part alone, by its name.
        num_queries: number of held-out queries on which all metrics were measured.
    """
    title = f"{num_queries:,} held-out queries"
    metric_columns = [f"{name} %" for name in fused]
    table = _table(title, "answers", "weight", *metric_columns, "p")
    table.add_row("fused", "", *_percents(fused), "")
    for part, values in alone.items():
        table.add_row(f"{part} alone", "", *_percents(values), "")
    for part, weight, without, p_value in tests:
        kept = f"{weight:g}" if weight else "left out"
        table.add_row(f"without {part}", kept, *_percents(without), f"{p_value:.4f}")
    return table


def _percents(values: Mapping[str, float]) -> list[str]:
    return [percent(value) for value in values.values()]


def answer_table(query: str, answers: Sequence[tuple[float, str, str]]) -> Table:
    """The answers to one query.

    Args:
        query: its text.
        answers: score, uid and text of each.
    """
    table = Table(
        title=Text(printable(query)),
        title_justify="left",
        show_header=False,
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column(justify="right")
    for score, uid, text in answers:
        # In many corpora the uid of a label is its text. It is then printed only once.
        shown = "" if text == uid else printable(text)
        text_cell = Text(shown, overflow="ellipsis", no_wrap=True)
        table.add_row(f"{score:.2f}", Text(printable(uid)), text_cell)
    return table


def _table(title: str, first: str, *others: str) -> Table:
    """An empty table with a first column of names and others of numbers."""
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column(Text(first))
    for name in others:
        # Text, not str: a run called "[bold]" is a name, not markup.
        table.add_column(Text(name), justify="right")
    return table


def metric_names(*runs: StoredMetrics) -> list[str]:
    """The metrics that at least one run has: main, graded, coverage, and macro-F1 of each segment."""
    stored_names = set().union(*runs)
    graded = [f"graded nDCG@{k}" for k in CUTOFFS]
    query_metrics = [name for name in (*MAIN_METRICS, *graded) if name in stored_names]
    label_metrics = [name for name in stored_names if name.startswith(("coverage", "macroF1"))]
    return query_metrics + sorted(label_metrics)


def _with_interval(run: StoredMetrics, metric: str) -> str:
    """A metric in percent, with its interval if the run has one."""
    value = percent(run.get(metric))
    intervals = run.get("intervals") or {}
    interval = intervals.get(metric)
    if not interval:
        return value
    low, high = interval
    return f"{value}  [{percent(low)}, {percent(high)}]"


def _group_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Cells with the size and the contribution of a group of labels."""
    return (
        f"{row['labels']:,}",
        f"{row['positives']:,}",
        percent(row["P@5"]),
        percent(row["recall@5"]),
    )
