"""What a finished run came to: its bundle, metrics.json and report.html. Measures a bundle the way it is served."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

from xmcray import __version__, storage
from xmcray.data.corpus import Corpus
from xmcray.errors import DataError
from xmcray.evaluation.evaluate import SEARCH_K, Evaluation, Search, evaluate
from xmcray.evaluation.predictions import (
    predictions_to_top_labels,
    read_predictions,
    write_predictions,
)
from xmcray.evaluation.report import write_report
from xmcray.retrieval.retriever import Retriever
from xmcray.training import tracking
from xmcray.training.export import check_corpus, export_run
from xmcray.training.records import read_records
from xmcray.training.run import SELECTION, Run
from xmcray.types import Int64Array, TopLabels

Progress = Callable[[int], None]
_PACKAGES = ("ray", "torch", "transformers", "tokenizers", "numpy", "pyarrow")


def bundle_of(run: Run, corpus: Corpus | None = None) -> str:
    """The bundle inside the folder of a finished run; written if it is not there yet.

    Raises:
        RunError: the run is not finished, or `corpus` is not the one it was trained on.
    """
    if corpus is not None:
        check_corpus(run, corpus)
    bundle = run.path / "bundle"
    if not (bundle / storage.MANIFEST).exists():
        export_run(run, bundle, corpus)
    return str(bundle)


def measure(search: Search, corpus: Corpus, split: str, **options: Any) -> Evaluation:
    """Evaluates a search on a split of a corpus; `options` are those of `evaluate`.

    Raises:
        DataError: no such split, or the answers do not fit the corpus.
    """
    rows = corpus.split(split)
    return evaluate(
        search,
        rows.positives,
        num_queries=len(rows),
        train_counts=corpus.train_counts,
        num_train=corpus.card.num_train,
        a=corpus.card.propensity_a,
        b=corpus.card.propensity_b,
        **options,
    )


def measure_bundle(
    retriever: Retriever,
    corpus: Corpus,
    split: str,
    *,
    exact: bool = False,
    predictions: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluates a bundle; one with an index is also compared with exhaustive search.

    Args:
        exact: search exhaustively, whatever the index.
        predictions: file for the answers, as a CSR matrix [queries, L].
    Raises:
        DataError: bundle and corpus do not belong together, or there is no such split.
    """
    check_fits(retriever, corpus)
    indexed = not exact and not retriever.is_exact
    answers: list[TopLabels] = []
    first = searcher(retriever, corpus, split, exact)

    def search(rows: Int64Array) -> TopLabels:
        answers.append(first(rows))
        return answers[-1]

    options: dict[str, Any] = {
        "exact": searcher(retriever, corpus, split, True) if indexed else None
    }
    found = measure(search if predictions else first, corpus, split, progress=progress, **options)
    if predictions:
        # the comparison with exact search repeats some queries after all of them were answered once
        chunks = -(-len(corpus.split(split)) // len(answers[0].ids))
        write_predictions(predictions, answers[:chunks], retriever.num_labels)
    return found


def searcher(retriever: Retriever, corpus: Corpus, split: str, exact: bool = False) -> Search:
    """Rows of a split -> their best labels, filter pairs masked."""
    rows_of, width = corpus.split(split), min(SEARCH_K, retriever.num_labels)

    def search(rows: Int64Array) -> TopLabels:
        return retriever.top_labels(
            rows_of.tokens(rows), width, exclude=rows_of.filters(rows), exact=exact
        )

    return search


def stored_answers(path: str, corpus: Corpus, split: str) -> Search:
    """The answers of a prediction file as a search, filter pairs masked."""
    rows_of, width = corpus.split(split), min(SEARCH_K, corpus.card.num_labels)
    matrix = read_predictions(path, len(rows_of), corpus.card.num_labels)
    return lambda rows: predictions_to_top_labels(matrix, rows, width, rows_of.filters(rows))


def check_fits(retriever: Retriever, corpus: Corpus) -> None:
    """Raises DataError unless the corpus has the labels and the token ids that the bundle knows."""
    ours, theirs = retriever.num_labels, corpus.card.num_labels
    if retriever.labels.changed:
        raise DataError(
            "labels joined or were removed since the bundle was exported; evaluate the bundle as it was"
        )
    if ours != theirs:
        raise DataError(
            f"the bundle has {ours:,} labels, corpus {corpus.path} has {theirs:,}; name its own corpus"
        )
    if retriever.tokenizer.to_files() != corpus.tokenizer().to_files():
        raise DataError(
            f"corpus {corpus.path} has another vocabulary than the bundle; name the bundle's own corpus"
        )


def finish(
    run: Run, corpus: Corpus, evaluate_test: bool = True, progress: Progress | None = None
) -> Evaluation | None:
    """Writes RUN/bundle, and RUN/metrics.json of the test split if there is one; then RUN/report.html."""
    bundle = bundle_of(run, corpus)
    found = None
    if evaluate_test and corpus.card.num_test:
        found = measure_bundle(Retriever.load(bundle), corpus, "test", progress=progress)
    record(run, corpus, found)
    return found


def _punctuality(result: Mapping[str, Any]) -> str:
    late = result.get("schedule_broken_at_step")
    return (
        "always in time"
        if late is None
        else f"late since step {late:,}: the run cannot be repeated exactly"
    )


def record(run: Run, corpus: Corpus, evaluation: Evaluation | None) -> None:
    """Writes RUN/metrics.json, if there is an evaluation, and RUN/report.html.

    A refitted run shows the validation curve of the run that chose its number of epochs.
    """
    if evaluation is not None:
        storage.write_json(run.path / "metrics.json", evaluation.to_json())
        tracking.catch_up(run)
    steps = read_records(run.path / "metrics.jsonl")
    steps += [r for r in read_records(run.path / SELECTION / "metrics.jsonl") if "loss" not in r]
    result = run.result() or {}
    facts = {
        "corpus": f"{corpus.card.name} ({corpus.card.num_train:,} training queries, {corpus.card.num_labels:,} labels)",
        "corpus SHA-256": run.corpus_sha256,
        "run": run.id,
        "steps": f"{result.get('steps', 0):,}",
        "seconds of training": f"{result.get('seconds', 0.0):.1f}",
        "peak memory of a trainer": f"{result.get('peak_memory_mb', 0.0):,.0f} MB",
        "hard negatives": _punctuality(result),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}",
        "versions": ", ".join(
            [f"xmcray {__version__}", f"Python {platform.python_version()}"]
            + [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
        ),
    }
    write_report(
        run.path / "report.html",
        title=f"{run.config.method_name} on {corpus.card.name}",
        steps=steps,
        metrics=None if evaluation is None else evaluation.to_json(),
        config=run.config.to_dict(),
        facts=facts,
    )
