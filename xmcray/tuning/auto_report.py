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

Json = Mapping[str, Any]  # results.json, or an object in it
_BASELINE_NOTE = (
    "The TF-IDF memory is the simple baseline: the labels of the ten training queries whose words"
    " and pairs of words are most similar. It trains nothing. A linear classifier (one-vs-rest) is"
    " not trained here."
)


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the page, with a note as a paragraph below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


def write_page(path: Path, corpus: Corpus, result: Json) -> None:
    """Writes the page, whole or not at all.

    Args:
        path: the HTML file.
        corpus: corpus of the study.
        result: content of results.json.
    """
    tables = []
    if result["test"] is not None:
        tables.append(_test_split_table(result["test"]))
        tables.append(_comparison_table(result["test"]))
    tables.append(_parts_table(result))
    tables.append(_trials_table(result))
    tables.append(_more_time_table(result))
    page = render(
        "auto_report.html.j2",
        title=f"Automatic choice on {corpus.card.name}",
        subtitle=_subtitle(corpus, result),
        # A table may be empty, such as that of what more time would try.
        tables=[table for table in tables if table.rows],
    )
    write_text(path, page)


def _subtitle(corpus: Corpus, result: Json) -> str:
    card = corpus.card
    members = result["bundle"]["members"]
    best = " + ".join(members) + ", fused" if members else "words alone"
    states = [trial["state"] for trial in result["trials"]]
    num_finished = states.count("finished")
    spent_min = result["spent_s"] / 60
    budget_min = result["budget_s"] / 60
    load = result["load"]
    sentences = [
        f"{card.num_train:,} training queries, {card.num_labels:,} labels.",
        f"Best: {best}.",
        f"{num_finished} of {len(states)} trials trained to the end.",
        f"{spent_min:.1f} of {budget_min:.1f} minutes spent on {result['cores']} cores.",
        f"The load was {load:.1f} at the end; other processes, if any, took a part of the time.",
        f"xmcray {__version__}.",
    ]
    return " ".join(sentences)


def _test_split_table(test: Json) -> _Table:
    rows = []
    for system in test["results"]:
        metrics = [_metric_cell(system, metric) for metric in METRICS]
        calibration_error = percent(system.get("ECE@5"))
        rows.append([system["name"], *metrics, calibration_error])
    columns = ["", *METRICS, "ECE@5"]
    note = f"{test['queries']:,} queries, 95 % bootstrap intervals. {_BASELINE_NOTE}"
    return _Table("On the test split, in percent", columns, rows, note)


def _metric_cell(system: Json, metric: str) -> str:
    """A metric with its interval."""
    low, high = system[f"{metric} interval"]
    return f"{percent(system[metric])} [{percent(low)}, {percent(high)}]"


def _comparison_table(test: Json) -> _Table:
    rows = []
    for comparison in test["comparisons"]:
        low = _points(comparison["low"])
        high = _points(comparison["high"])
        cells = [
            comparison["than"],
            comparison["metric"],
            _points(comparison["difference"]),
            f"[{low}, {high}]",
            _p_value(comparison["p_value"]),
        ]
        rows.append(cells)
    columns = ["bundle minus", "metric", "points", "95 % interval", "p"]
    note = "Paired tests over queries. Nothing was chosen by the test split."
    return _Table("By how much", columns, rows, note)


def _parts_table(result: Json) -> _Table:
    choice = result["choice"]
    rows = []
    for test in choice["tests"]:
        cells = [
            test["part"],
            f"{test['weight']:g}",
            *_percents(test["without"]),
            _p_value(test["p_value"]),
        ]
        rows.append(cells)
    headings = [f"{metric} without" for metric in METRICS]
    columns = ["part", "weight", *headings, "p"]
    metrics_of_all = " / ".join(_percents(choice["metrics"]))
    refitted = ", ".join(result["bundle"]["refitted"]) or "none"
    num_queries = choice["queries"]
    sentences = [
        f"With all parts that have a weight: {metrics_of_all} on {num_queries:,} held-out queries.",
        "p: paired test of the answers with and without the part.",
        f"Trained once more on all queries: {refitted}.",
    ]
    return _Table("Parts of the bundle", columns, rows, " ".join(sentences))


def _percents(metrics: Mapping[str, float]) -> list[str]:
    """The values of METRICS, in percent."""
    return [percent(metrics[metric]) for metric in METRICS]


def _trials_table(result: Json) -> _Table:
    rows = []
    for trial in sorted(result["trials"], key=_score, reverse=True):
        cells = [
            trial["name"],
            trial["preset"],
            trial["encoder"],
            f"{_epochs_done(trial)} of {trial['epochs']}",
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


def _epochs_done(trial: Json) -> int:
    """Epochs before the last validation; 0 if there was none."""
    if not trial["curve"]:
        return 0
    # A validation is a pair of epochs and score.
    epochs, _ = trial["curve"][-1]
    return int(epochs)


def _score(trial: Json) -> float:
    """The score to sort by. Trials without a validation come last."""
    return trial["score"] or 0.0


def _state(trial: Json) -> str:
    """How a trial ended, and why, in words."""
    if trial["state"] == "unfinished":
        return "out of time"
    if trial["message"]:
        return f"{trial['state']}: {trial['message']}"
    return str(trial["state"])


def _more_time_table(result: Json) -> _Table:
    unfinished = [trial for trial in result["trials"] if trial["state"] == "unfinished"]
    left_out = result["left_out"]
    rows = [_candidate_cells(trial, "was not done in time") for trial in unfinished]
    rows += [_candidate_cells(candidate, candidate["reason"]) for candidate in left_out]
    columns = ["method", "preset", "encoder", "why not"]
    note = "The same command with a larger --budget continues with these."
    return _Table("With more time", columns, rows, note)


def _candidate_cells(candidate: Json, reason: str) -> list[str]:
    return [candidate["method"], candidate["preset"], candidate["encoder"], reason]


def _p_value(value: float) -> str:
    return f"{value:.4f}"


def _points(difference: float) -> str:
    """A difference of two metrics in percentage points, with its sign."""
    return f"{100 * difference:+.2f}"
