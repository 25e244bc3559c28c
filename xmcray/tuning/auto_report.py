"""The report of `xmcray auto`: what won and by how much, what was tried, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmcray import __version__
from xmcray.data.corpus import Corpus
from xmcray.evaluation.pages import render
from xmcray.evaluation.table import percent
from xmcray.storage.whole_files import write_text
from xmcray.training.part_weights import METRICS

Result = Mapping[str, Any]  # the content of results.json
_BASELINE_NOTE = (
    "The TF-IDF memory is the simple baseline: the labels of the ten training queries whose words and"
    " pairs of words are most similar. It trains nothing. A linear classifier (one-vs-rest) is not"
    " trained here."
)


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the page.

    Attributes:
        title: heading.
        columns: names of the columns.
        rows: texts of the cells.
        note: paragraph under the table.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def write_page(path: Path, corpus: Corpus, result: Result) -> None:
    """Writes the page, whole or not at all.

    Args:
        path: the HTML file.
        corpus: corpus of the study.
        result: content of results.json.
    """
    tables = []
    test = result["test"]
    if test is not None:
        tables += [_test_split_table(test), _comparison_table(test)]
    tables += [_parts_table(result), _trials_table(result), _more_time_table(result)]
    page = render(
        "auto_report.html.j2",
        title=f"Automatic choice on {corpus.card.name}",
        subtitle=_subtitle(corpus, result),
        tables=[table for table in tables if table.rows],
    )
    write_text(path, page)


def _subtitle(corpus: Corpus, result: Result) -> str:
    card = corpus.card
    members = " + ".join(result["bundle"]["members"])
    states = [trial["state"] for trial in result["trials"]]
    num_finished = states.count("finished")
    spent_min = result["spent_s"] / 60
    budget_min = result["budget_s"] / 60
    sentences = [
        f"{card.num_train:,} training queries, {card.num_labels:,} labels.",
        f"Best: {members or 'words alone'}, fused.",
        f"{num_finished} of {len(states)} trials trained to the end.",
        f"{spent_min:.1f} of {budget_min:.1f} minutes spent on {result['cores']} cores"
        f" (load {result['load']:.1f} at the end; other processes, if any, took a part of the time).",
        f"xmcray {__version__}.",
    ]
    return " ".join(sentences)


def _test_split_table(test: Mapping[str, Any]) -> _Table:
    rows = []
    for system in test["results"]:
        metrics = [_with_interval(system, metric) for metric in METRICS]
        calibration_error = percent(system.get("ECE@5"))
        rows.append([system["name"], *metrics, calibration_error])
    columns = ["", *METRICS, "ECE@5"]
    note = f"{test['queries']:,} queries, 95 % bootstrap intervals. {_BASELINE_NOTE}"
    return _Table("On the test split, in percent", columns, rows, note)


def _with_interval(system: Mapping[str, Any], metric: str) -> str:
    low, high = system[f"{metric} interval"]
    return f"{percent(system[metric])} [{percent(low)}, {percent(high)}]"


def _comparison_table(test: Mapping[str, Any]) -> _Table:
    rows = []
    for comparison in test["comparisons"]:
        low = _points(comparison["low"])
        high = _points(comparison["high"])
        cells = [
            comparison["than"],
            comparison["metric"],
            _points(comparison["difference"]),
            f"[{low}, {high}]",
            _p_value(comparison),
        ]
        rows.append(cells)
    columns = ["bundle minus", "metric", "points", "95 % interval", "p"]
    note = "Paired tests over queries. Nothing was chosen by the test split."
    return _Table("By how much", columns, rows, note)


def _parts_table(result: Result) -> _Table:
    choice = result["choice"]
    rows = []
    for part in choice["tests"]:
        weight = f"{part['weight']:g}"
        metrics_without = _percents(part["without"])
        rows.append([part["part"], weight, *metrics_without, _p_value(part)])
    without = [f"{metric} without" for metric in METRICS]
    columns = ["part", "weight", *without, "p"]
    metrics = " / ".join(_percents(choice["metrics"]))
    refitted = ", ".join(result["bundle"]["refitted"]) or "none"
    note = (
        f"With all parts that have a weight: {metrics} on {choice['queries']:,} held-out queries. p:"
        f" paired test of the answers with and without the part. Trained once more on all queries: {refitted}."
    )
    return _Table("Parts of the bundle", columns, rows, note)


def _percents(metrics: Mapping[str, float]) -> list[str]:
    return [percent(metrics[metric]) for metric in METRICS]


def _trials_table(result: Result) -> _Table:
    rows = []
    for trial in sorted(result["trials"], key=_score, reverse=True):
        epochs_done = 0
        if trial["curve"]:
            # A curve is a list of pairs: epochs done, and score.
            epochs_done, _ = trial["curve"][-1]
        cells = [
            trial["name"],
            trial["preset"],
            trial["encoder"],
            f"{epochs_done} of {trial['epochs']}",
            percent(trial["score"]),
            f"{trial['seconds']:.0f}",
            _state(trial),
        ]
        rows.append(cells)
    columns = ["trial", "preset", "encoder", "epochs", "validation", "seconds", "state"]
    note = (
        f"Validation: mean of {', '.join(METRICS)} of the best epoch, by label vectors alone. Later"
        " trials of a method are stopped after a third of their epochs if they are behind."
    )
    return _Table("What was tried", columns, rows, note)


def _score(trial: Mapping[str, Any]) -> float:
    return trial["score"] or 0.0


def _state(trial: Mapping[str, Any]) -> str:
    """How a trial ended, and why, in words."""
    state: str = trial["state"]
    message = trial["message"]
    if state == "unfinished":
        return "out of time"
    if not message:
        return state
    return f"{state}: {message}"


def _more_time_table(result: Result) -> _Table:
    unfinished = [trial for trial in result["trials"] if trial["state"] == "unfinished"]
    rows = [_candidate_cells(trial, "was not done in time") for trial in unfinished]
    for candidate in result["left_out"]:
        reason = candidate["reason"]
        rows.append(_candidate_cells(candidate, reason))
    columns = ["method", "preset", "encoder", "why not"]
    note = "The same command with a larger --budget goes on with these."
    return _Table("With more time", columns, rows, note)


def _candidate_cells(candidate: Mapping[str, Any], reason: str) -> list[str]:
    return [candidate["method"], candidate["preset"], candidate["encoder"], reason]


def _p_value(comparison: Mapping[str, Any]) -> str:
    return f"{comparison['p_value']:.4f}"


def _points(difference: float) -> str:
    return f"{100 * difference:+.2f}"
