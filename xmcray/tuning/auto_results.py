"""The last step of `xmcray auto`: measures the bundle on the test split and writes results.json."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xmcray.data.corpus import Corpus
from xmcray.errors import RunError, readable
from xmcray.evaluation.evaluate import Evaluation, Search, compare, evaluate
from xmcray.retrieval.retriever import Retriever
from xmcray.storage.whole_files import read_json, write_json
from xmcray.training.outcome import bundle_of, nearest_queries, searcher
from xmcray.training.part_weights import METRICS
from xmcray.training.run import Run
from xmcray.tuning.auto_report import write_page
from xmcray.tuning.auto_search import Skipped
from xmcray.tuning.portfolio import Candidate
from xmcray.tuning.study import Attempt, Budget, Study
from xmcray.types import Int64Array

BUNDLE = "bundle"
BASELINE = "TF-IDF memory"
MOST_TEST_QUERIES = 5000


def write_results(study: Study, budget: Budget, skipped: Sequence[Skipped]) -> dict[str, Any]:
    """Measures the bundle, writes results.json and the page; returns the content of results.json.

    Args:
        study: the folder.
        budget: how the time is divided.
        skipped: candidates that were not started.
    """
    fused = study.fused()
    assert fused is not None, "a bundle was written"
    bundle = {
        "trials": fused["trials"],
        "members": fused["members"],
        "refitted": fused["refitted"],
    }
    test = _earlier_test(study, bundle)
    if test is None and study.corpus.card.num_test:
        test = _test(study, fused)
    left_out = []
    for skip in skipped:
        row = _plain_candidate(skip.candidate)
        row["reason"] = skip.reason
        left_out.append(row)
    study.clock.tick()
    result = {
        "budget_s": budget.seconds,
        "spent_s": study.clock.spent_s,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "bundle": bundle,
        "choice": fused["choice"],
        "trials": [_plain_attempt(attempt) for attempt in study.attempts()],
        "left_out": left_out,
        "test": test,
    }
    write_json(study.path / "results.json", result)
    write_page(study.path / "report.html", study.corpus, result)
    return result


def finished_with_less(study: Path, budget_s: float) -> float:
    """Seconds on the clock at which the last call with a smaller budget had finished; 0 without one.

    Args:
        study: the folder.
        budget_s: the present budget.
    """
    with _earlier_results(study) as result:
        if result is None or result["budget_s"] >= budget_s:
            return 0.0
        return float(result["spent_s"])


def _earlier_test(study: Study, bundle: Mapping[str, Any]) -> dict[str, Any] | None:
    """The test results that an earlier call wrote for the same bundle; None if there are none."""
    with _earlier_results(study.path) as result:
        if result is None or result["bundle"] != bundle:
            return None
        test: dict[str, Any] | None = result["test"]
        return test


@contextlib.contextmanager
def _earlier_results(study: Path) -> Iterator[dict[str, Any] | None]:
    """The results.json of an earlier call; None if there is none.

    Raises:
        RunError: it is damaged, which also shows while it is used.
    """
    file = study / "results.json"
    with readable(f"{file} is damaged", "remove it", RunError):
        yield read_json(file) if file.is_file() else None


def _plain_candidate(candidate: Candidate) -> dict[str, Any]:
    """A candidate for results.json."""
    return {
        "method": candidate.method,
        "preset": candidate.preset,
        "encoder": candidate.encoder,
    }


def _plain_attempt(attempt: Attempt) -> dict[str, Any]:
    """A trial for results.json."""
    return {
        "name": attempt.name,
        **_plain_candidate(attempt.candidate),
        "epochs": attempt.config.optim.num_epochs,
        "seconds": round(attempt.seconds, 1),
        **attempt.trial.plain(),
    }


def _test(study: Study, fused: Mapping[str, Any]) -> dict[str, Any]:
    """Measures the bundle and its rivals on the test split, and compares it with each of them."""
    rows = _test_rows(study.corpus)
    evaluations = {}
    for name, search in _searches(study, fused).items():
        evaluations[name] = evaluate_rows(search, study.corpus, rows)
    results = []
    comparisons = []
    for name, evaluation in evaluations.items():
        results.append(_plain_evaluation(name, evaluation))
        if name != BUNDLE:
            comparisons += _comparison_rows(evaluations[BUNDLE], name, evaluation)
    return {"queries": len(rows), "results": results, "comparisons": comparisons}


def _searches(study: Study, fused: Mapping[str, Any]) -> dict[str, Search]:
    """The bundle, its best trial alone, and the baseline."""
    corpus = study.corpus
    attempts = [attempt for attempt in study.attempts() if attempt.name in fused["trials"]]
    best = max(attempts, key=lambda attempt: attempt.score)
    best_bundle = bundle_of(Run.open(study.newest_path(best)), corpus)
    return {
        BUNDLE: searcher(Retriever.load(study.path / "bundle"), corpus, "test"),
        f"{best.name} alone": searcher(Retriever.load(best_bundle), corpus, "test"),
        BASELINE: nearest_queries(corpus, "test"),
    }


def _comparison_rows(bundle: Evaluation, name: str, other: Evaluation) -> list[dict[str, Any]]:
    """The comparisons of the bundle with another search for results.json, one per metric."""
    return [
        {"than": name, **dataclasses.asdict(comparison)}
        for comparison in compare(bundle, other)
        if comparison.metric in METRICS
    ]


def _test_rows(corpus: Corpus) -> Int64Array:
    """Rows of the test split that are measured: all of them, or an evenly spaced sample."""
    num_test = corpus.card.num_test
    count = min(num_test, MOST_TEST_QUERIES)
    # Not drawn at random, so that every call measures the same rows.
    places = np.linspace(0, num_test - 1, count)
    return np.unique(places.astype(np.int64))


def evaluate_rows(search: Search, corpus: Corpus, rows: Int64Array) -> Evaluation:
    """Evaluates a search on some rows of the test split."""
    card = corpus.card
    split = corpus.split("test")
    # `evaluate` numbers queries from 0, so its numbers are places in `rows`.
    return evaluate(
        lambda places: search(rows[places]),
        lambda places: corpus.answerable(split.positives(rows[places])),
        num_queries=len(rows),
        train_counts=corpus.train_counts,
        num_train=card.num_train,
        a=card.propensity_a,
        b=card.propensity_b,
        removed=corpus.removed_labels,
    )


def _plain_evaluation(name: str, evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation for results.json."""
    row: dict[str, Any] = {"name": name}
    for metric in METRICS:
        row[metric] = evaluation.metrics[metric]
        row[f"{metric} interval"] = evaluation.intervals[metric]
    if evaluation.calibration is not None:
        row["ECE@5"] = evaluation.calibration["ECE@5"]
    return row
