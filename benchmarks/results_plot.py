"""Draws docs/images/results.svg, the plot of the README, from the committed results/methods.json.

    python benchmarks/results_plot.py

Nothing is measured. A method's dot is the row with the better validation, alone, with a memory or fused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from common import new_parser
from floors import BOTH, FLOORS, LINEAR, METRICS

TABLE = Path(__file__).parent / "results" / "methods.json"
PLOT = Path(__file__).parents[1] / "docs" / "images" / "results.svg"
METHODS = {
    # name: (title, colour)
    "astra": ("ASTRA", "#d62728"),
    "renee": ("Renée", "#ff9896"),
    "dexml": ("DEXML", "#1f77b4"),
    "unidec": ("UniDEC", "#aec7e8"),
    "prime": ("PRIME", "#2ca02c"),
    "rae": ("RAE-XMC", "#9467bd"),
}
SETS = ("cdnjs-keywords", "tate-subjects", "wordnet-hypernyms", "msdocs-seealso", "msdocs-links")
SHOWN = ("P@1", "PSP@5")
LABELS = {
    "P@1": "P@1: is the first answer right?",
    "PSP@5": "PSP@5: five answers, rare labels count more",
}
NUM_LABELS = {
    "cdnjs-keywords": "2,320",
    "tate-subjects": "14,471",
    "wordnet-hypernyms": "19,032",
    "msdocs-seealso": "32,085",
    "msdocs-links": "104,969",
}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--out", type=Path, default=PLOT)
    arguments = parser.parse_args()
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["results"]
    draw(measured(rows), arguments.out)


def measured(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """Percent by (data set, method), then by metric; of a method's rows the best on validation."""
    best_validation: dict[tuple[str, str], float] = {}
    results = {}
    for row in rows:
        key = (row["set"], row["method"])
        is_shown = row["set"] in SETS and row["method"] in METHODS
        if not is_shown or row["validation"] is None:
            continue
        validation = sum(row["validation"].values())
        if validation > best_validation.get(key, 0.0):
            best_validation[key] = validation
            results[key] = {metric: 100 * row["test"][metric]["value"] for metric in METRICS}
    return results


def draw(results: dict[tuple[str, str], dict[str, float]], out: Path) -> None:
    """Writes the plot: one panel per metric, one row per data set, one dot per method."""
    mpl.use("Agg")
    from matplotlib import pyplot

    # A fixed salt and no date, so that the same table gives the same file.
    mpl.rcParams.update({"svg.hashsalt": "xmcray", "svg.fonttype": "path", "font.size": 9})
    figure, panels = pyplot.subplots(1, len(SHOWN), figsize=(9, 3.6), sharey=True)
    rows = list(range(len(SETS)))
    for panel, metric in zip(panels, SHOWN, strict=True):
        column = METRICS.index(metric)
        for row, data_set in zip(rows, SETS, strict=True):
            panel.axhline(row, color="#dddddd", linewidth=0.8, zorder=0)
            linear = FLOORS[data_set][LINEAR][column]
            memory = FLOORS[data_set][BOTH][column]
            panel.plot(linear, row, "|", color="black", markersize=16, markeredgewidth=2)
            panel.plot(memory, row, "|", color="#999999", markersize=16, markeredgewidth=2)
        for method, (_, colour) in METHODS.items():
            values = [results[data_set, method][metric] for data_set in SETS]
            panel.plot(values, rows, "o", color=colour, markersize=6, markeredgecolor="white")
        panel.set_title(LABELS[metric], fontsize=9)
        panel.set_xlabel("percent")
        panel.spines[["top", "right", "left"]].set_visible(False)
    row_names = [f"{name}\n{NUM_LABELS[name]} labels" for name in SETS]
    panels[0].set_yticks(rows, row_names)
    # The first row at the top.
    panels[0].invert_yaxis()
    panels[0].tick_params(axis="y", length=0)
    # Lines without points, for the legend alone.
    marks = []
    for title, colour in METHODS.values():
        dot = pyplot.Line2D([], [], marker="o", linestyle="", color=colour, label=title)
        marks.append(dot)
    for title, colour in ((LINEAR, "black"), ("TF-IDF memory", "#999999")):
        bar = pyplot.Line2D(
            [], [], marker="|", linestyle="", color=colour, markersize=12, label=title
        )
        marks.append(bar)
    figure.legend(handles=marks, loc="lower center", ncol=8, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
