"""The table of what methods.py has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import data_sets
from methods_store import ALONE, FLOOR, METRICS, SETS, WITH_MEMORY, Row

from xmcray.methods.registry import method_names

HEADER = ["set", "method", "validation P@1 / P@5 / PSP@5", *METRICS, "less XR-Linear", "minutes"]
NOTES = (
    "percent; validation: of the run with held-out queries; test: after a refit on all training queries, with 95 %"
    " bootstrap intervals over queries",
    "in bold the row that validation chooses (mean of the three metrics)",
    "with memory: the bundle of `xmcray memory RUN`, settings by `xmcray tune --bundle` on the validation queries;"
    " RAE-XMC alone: its encoder without votes",
    "fused: the bundle of `xmcray fuse RUN`, which chooses the weights of its parts on the same validation queries;"
    " a + b: of `xmcray fuse RUN RUN`",
    "less XR-Linear: differences in the three metrics; * if the paired test over queries has p < 0.05",
    "minutes: wall time of both trainings of a refit, or of XR-Linear with its vectors, whatever else the machine did;"
    " a memory trains nothing",
)


def table(rows: Sequence[Row]) -> list[list[object]]:
    """One line for each measurement."""
    lines: list[list[object]] = []
    for row in rows:
        is_plain = row["variant"] in (ALONE, FLOOR)
        label = row["method"] if is_plain else f"{row['method']}, {row['variant']}"
        if row["chosen"]:
            label = f"**{label}**"
        minutes = f"{row['seconds'] / 60:.1f}" if is_plain else "-"
        test = [cell(row["test"][metric]) for metric in METRICS]
        lines.append([row["set"], label, shown_validation(row), *test, less_linear(row), minutes])
    return lines


def cell(value: Mapping[str, float]) -> str:
    return f"{100 * value['value']:.1f} [{100 * value['low']:.1f}, {100 * value['high']:.1f}]"


def shown_validation(row: Row) -> str:
    if row["validation"] is None:
        return "-"
    return " / ".join(f"{100 * row['validation'][metric]:.1f}" for metric in METRICS)


def less_linear(row: Row) -> str:
    if row["less_linear"] is None:
        return "-"
    cells = []
    for metric in METRICS:
        comparison = row["less_linear"][metric]
        star = "*" if comparison["p_value"] < 0.05 else ""
        cells.append(f"{100 * comparison['difference']:+.1f}{star}")
    return " / ".join(cells)


def notes(rows: Sequence[Row], load: str) -> list[str]:
    """What each set's choice reaches, what is missing, and how to read the table."""
    lines = []
    for name in SETS:
        of_set = [row for row in rows if row["set"] == name]
        lines += notes_on_set(name, of_set)
    dates = sorted({row["date"] for row in rows})
    measured_on = f"measured between {dates[0]} and {dates[-1]}" if dates else "nothing measured"
    return [*lines, *NOTES, f"{measured_on}; commits are in methods.json", load]


def notes_on_set(name: str, rows: Sequence[Row]) -> list[str]:
    lines = []
    missing = []
    stale = []
    is_here = name == "sample" or (data_sets.DATA / name).is_dir()
    corpus = data_sets.corpus(name) if is_here else None
    for method in method_names():
        of_method = [row for row in rows if row["method"] == method]
        if not of_method:
            missing.append(method)
        elif corpus is not None:
            preset = data_sets.preset(name, method=method)
            if of_method[0]["settings"] != data_sets.fingerprint(preset, corpus):
                stale.append(method)
    if missing:
        lines.append(f"{name}: not measured yet: {', '.join(missing)}")
    if stale:
        lines.append(f"{name}: measured with an earlier preset: {', '.join(stale)}")
    chosen = [row for row in rows if row["chosen"]]
    floors = [row for row in rows if row["variant"] == FLOOR]
    if chosen and floors:
        lines.append(f"{name}: {verdict(chosen[0], floors)}")
    for row in rows:
        if row["variant"] == WITH_MEMORY:
            changes = ", ".join(f"{key} {value:.3g}" for key, value in row["changes"].items())
            lines.append(f"{name}, {row['method']} with memory: {changes}")
    return lines


def verdict(row: Row, floors: Sequence[Row]) -> str:
    """How the row that validation chooses compares with the best floor in each metric."""
    cells = []
    for metric in METRICS:
        best = max(floor["test"][metric]["value"] for floor in floors)
        cells.append(f"{metric} {100 * (row['test'][metric]['value'] - best):+.1f}")
    return (
        f"validation chooses {row['method']} {row['variant']};"
        f" less the best floor of each metric: {', '.join(cells)}"
    )
