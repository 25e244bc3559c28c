"""The page of `xmcray auto`: what won and by how much, what was tried, what more time would try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmcray import __version__
from xmcray.data.corpus import Corpus
from xmcray.evaluation.pages import render
from xmcray.evaluation.table import percent
from xmcray.storage import write_text
from xmcray.tuning.study import METRICS

BASELINE_NOTE = (
    "The TF-IDF memory is the simple baseline: the labels of the ten training queries whose words and"
    " pairs of words are most similar. It trains nothing. A linear classifier (one-vs-rest) is not"
    " trained here."
)


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the page.

    Attributes:
        title: its heading.
        columns: names.
        rows: texts.
        note: a paragraph under it.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def write_page(path: Path, corpus: Corpus, result: Mapping[str, Any]) -> None:
    """Writes the page, whole or not at all.

    Args:
        path: the HTML file.
        corpus: of the study.
        result: content of results.json.
    """
    tables = [_parts(result), _trials(result), _more_time(result)]
    if result["test"] is not None:
        tables = [_test(result["test"]), _comparisons(result["test"]), *tables]
    page = render(
        "auto_report.html.j2",
        title=f"Automatic choice on {corpus.card.name}",
        subtitle=_subtitle(corpus, result),
        tables=[table for table in tables if table.rows],
    )
    write_text(path, page)


def _subtitle(corpus: Corpus, result: Mapping[str, Any]) -> str:
    card = corpus.card
    finished = sum(trial["state"] == "finished" for trial in result["trials"])
    machine = f"{result['cores']} cores, load {result['load']:.1f}"
    return (
        f"{card.num_train:,} training queries, {card.num_labels:,} labels. Best:"
        f" {' + '.join(result['bundle']['members']) or 'words alone'}, fused."
        f" {finished} of {len(result['trials'])} trials trained to the end."
        f" {result['spent_s'] / 60:.1f} of {result['budget_s'] / 60:.1f} minutes spent"
        f" ({machine} at the end; whatever else ran took a part of the time). xmcray {__version__}."
    )


def _test(test: Mapping[str, Any]) -> _Table:
    rows = []
    for result in test["results"]:
        cells = [result["name"]]
        for metric in METRICS:
            low, high = result[f"{metric} interval"]
            cells.append(f"{percent(result[metric])} [{percent(low)}, {percent(high)}]")
        cells.append(percent(result.get("ECE@5")))
        rows.append(cells)
    note = f"{test['queries']:,} queries, 95 % bootstrap intervals. {BASELINE_NOTE}"
    return _Table("On the test split, in percent", ["", *METRICS, "ECE@5"], rows, note)


def _comparisons(test: Mapping[str, Any]) -> _Table:
    rows = []
    for row in test["comparisons"]:
        interval = f"[{_points(row['low'])}, {_points(row['high'])}]"
        cells = [row["than"], row["metric"], _points(row["difference"]), interval]
        rows.append([*cells, f"{row['p_value']:.4f}"])
    columns = ["bundle less", "metric", "points", "95 % interval", "p"]
    note = "Paired tests over queries. The test split has decided nothing."
    return _Table("By how much", columns, rows, note)


def _parts(result: Mapping[str, Any]) -> _Table:
    choice = result["choice"]
    rows = []
    for test in choice["tests"]:
        without = [percent(test["without"][metric]) for metric in METRICS]
        rows.append([test["part"], f"{test['weight']:g}", *without, f"{test['p_value']:.4f}"])
    reached = " / ".join(percent(choice["metrics"][metric]) for metric in METRICS)
    refitted = ", ".join(result["bundle"]["refitted"]) or "none"
    note = (
        f"With all parts that have a weight: {reached} on {choice['queries']:,} held-out queries. p:"
        f" of the answers without the part. Trained once more on all queries: {refitted}."
    )
    columns = ["part", "weight", *(f"{metric} without" for metric in METRICS), "p"]
    return _Table("Parts of the bundle", columns, rows, note)


def _trials(result: Mapping[str, Any]) -> _Table:
    rows = []
    ranked = sorted(result["trials"], key=lambda trial: -(trial["score"] or 0.0))
    for trial in ranked:
        state = trial["state"]
        if state == "unfinished":
            state = "out of time"
        if trial["message"]:
            state += f": {trial['message']}"
        done = trial["curve"][-1][0] if trial["curve"] else 0
        cells = [trial["name"], trial["preset"], trial["encoder"], f"{done} of {trial['epochs']}"]
        rows.append([*cells, percent(trial["score"]), f"{trial['seconds']:.0f}", state])
    columns = ["trial", "preset", "encoder", "epochs", "validation", "seconds", "state"]
    note = (
        f"Validation: mean of {', '.join(METRICS)} of the best epoch, by label vectors alone. Later"
        " trials of a method are stopped after a third of their epochs if they are behind."
    )
    return _Table("What was tried", columns, rows, note)


def _more_time(result: Mapping[str, Any]) -> _Table:
    rows = []
    for trial in result["trials"]:
        is_slow = trial["state"] == "stopped" and trial["message"].startswith("it needs")
        if is_slow or trial["state"] == "unfinished":
            reason = trial["message"] or "was not done in time"
            cells = [trial["method"], trial["preset"], trial["encoder"], reason]
            rows.append(cells)
    for row in result["left_out"]:
        cells = [row[name] for name in ("method", "preset", "encoder", "reason")]
        rows.append(cells)
    columns = ["method", "preset", "encoder", "why not"]
    note = "The same command with a larger --budget goes on with these."
    return _Table("With more time", columns, rows, note)


def _points(difference: float) -> str:
    return f"{100 * difference:+.2f}"
