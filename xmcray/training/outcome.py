"""What a finished run leaves: bundle with its card, metrics.json and report.html."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from xmcray import __version__
from xmcray.data.corpus import Corpus
from xmcray.data.relevance import Relevance
from xmcray.errors import DataError, NoPositivesError
from xmcray.evaluation.evaluate import SEARCH_K, Evaluation, Search, evaluate
from xmcray.evaluation.predictions import (
    predictions_to_top_labels,
    read_predictions,
    without_labels,
    writing_predictions,
)
from xmcray.evaluation.report import write_report
from xmcray.retrieval.baselines import NearestQueries
from xmcray.retrieval.bundle import KIND, card_of
from xmcray.retrieval.retriever import Retriever
from xmcray.storage.manifest import CARD, MANIFEST, read_manifest
from xmcray.storage.whole_files import write_json, write_text
from xmcray.training import tracking
from xmcray.training.export import check_corpus, export_run
from xmcray.training.records import read_records
from xmcray.training.run import SELECTION, Run
from xmcray.types import Float64Array, Int64Array, Ragged, TopLabels

logger = logging.getLogger(__name__)

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
    if not (bundle / MANIFEST).exists():
        export_run(run, bundle, corpus)
    return str(bundle)


def measure(search: Search, corpus: Corpus, split: str, **options: Any) -> Evaluation:
    """Evaluates a search on a split of a corpus; `options` are those of `evaluate`.

    Raises:
        DataError: no such split, or the answers do not fit the corpus.
    """
    rows = corpus.split(split)
    relevance = Relevance.read(rows)
    if relevance is not None and relevance.is_graded:
        options["grades"] = lambda ids: _grades(relevance, corpus, rows.positives(ids), ids)
    return evaluate(
        search,
        lambda ids: corpus.answerable(rows.positives(ids)),
        num_queries=len(rows),
        train_counts=corpus.train_counts,
        num_train=corpus.card.num_train,
        a=corpus.card.propensity_a,
        b=corpus.card.propensity_b,
        removed=corpus.removed_labels,
        **options,
    )


def _grades(
    relevance: Relevance, corpus: Corpus, positives: Ragged, rows: Int64Array
) -> Float64Array:
    """float64, the relevance of the positives of some queries, without those that were removed."""
    is_kept = ~np.isin(positives.values, corpus.removed_labels)
    return relevance.grades(rows)[is_kept]


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
        retriever: the bundle.
        corpus: the one it was made from.
        split: the rows to answer.
        exact: search exhaustively, whatever the index.
        predictions: file for the answers, as a CSR matrix [queries, L].
        progress: called with the number of queries answered so far.
    Raises:
        DataError: bundle and corpus do not belong together, or there is no such split.
    """
    check_fits(retriever, corpus)
    search = searcher(retriever, corpus, split, exact)
    exact_search = None
    if not exact and not retriever.is_exact:
        exact_search = searcher(retriever, corpus, split, exact=True)
    if predictions is None:
        return measure(search, corpus, split, progress=progress, exact=exact_search)
    num_queries = len(corpus.split(split))
    num_answered = 0
    with writing_predictions(predictions, corpus.card.num_labels) as write:

        def search_and_write(rows: Int64Array) -> TopLabels:
            nonlocal num_answered
            top = search(rows)
            # The comparison with exact search repeats queries after all were answered once.
            if num_answered < num_queries:
                write(top)
                num_answered += len(rows)
            return top

        return measure(search_and_write, corpus, split, progress=progress, exact=exact_search)


def searcher(retriever: Retriever, corpus: Corpus, split: str, exact: bool = False) -> Search:
    """Makes a search of the rows of a split, with filter pairs masked."""
    queries = corpus.split(split)
    width = min(SEARCH_K, corpus.card.num_labels)
    # Fewer if labels of a small corpus were removed.
    num_answers = min(width, retriever.num_labels)

    def search(rows: Int64Array) -> TopLabels:
        texts_or_tokens = queries.texts(rows) if retriever.needs_texts else queries.tokens(rows)
        top = retriever.top_labels(
            texts_or_tokens,
            num_answers,
            exclude=queries.filters(rows),
            exact=exact,
            # Token ids have theirs with them.
            vectors=queries.side_vectors(rows) if retriever.needs_texts else None,
        )
        return top.widened(width)

    return search


def nearest_queries(corpus: Corpus, split: str) -> Search:
    """A simple baseline as a search of the rows of a split: labels of similar training queries."""
    train = corpus.split("train")
    queries = corpus.split(split)
    train_rows = np.arange(len(train), dtype=np.int64)
    num_labels = corpus.card.num_labels
    positives = corpus.answerable(train.positives(train_rows))
    baseline = NearestQueries(train.texts(train_rows), positives, num_labels)
    width = min(SEARCH_K, num_labels)

    def search(rows: Int64Array) -> TopLabels:
        return baseline.top_labels(queries.texts(rows), width, queries.filters(rows))

    return search


def stored_answers(path: str, corpus: Corpus, split: str) -> Search:
    """The answers of a prediction file as a search, with filter pairs and removed labels masked.

    Raises:
        DataError: the file is malformed or of another corpus.
    """
    queries = corpus.split(split)
    num_labels = corpus.card.num_labels
    width = min(SEARCH_K, num_labels)
    stored = read_predictions(path, len(queries), num_labels)
    most_stored = int(np.diff(stored.indptr).max(initial=0))
    if most_stored < min(width, num_labels - len(corpus.removed_labels)):
        logger.warning(
            "%s has at most %d answers per query, so metrics of more, such as R@100, count these alone"
            " (`xmcray predict -k 100` writes enough)",
            path,
            most_stored,
        )
    # Another program, or a bundle before the removal, may have answered with them.
    matrix = without_labels(stored, corpus.removed_labels)
    return lambda rows: predictions_to_top_labels(matrix, rows, width, queries.filters(rows))


def check_fits(retriever: Retriever, corpus: Corpus) -> None:
    """Checks that the corpus has the labels and the token ids that the bundle knows.

    Raises:
        DataError: it has not.
    """
    ours = retriever.settings.num_labels
    theirs = corpus.card.num_labels
    has_joined = retriever.settings.first_added is not None
    removed_here = np.setdiff1d(retriever.labels.removed, corpus.removed_labels)
    if has_joined or len(removed_here):
        raise DataError(
            "labels joined or were removed since the bundle was exported, and its corpus does not know"
            " them; name the bundle as it was (`xmcray export RUN --out NEW` makes it again)"
        )
    if ours != theirs:
        raise DataError(
            f"the bundle has {ours:,} labels, corpus {corpus.path} has {theirs:,}; name its own corpus"
        )
    removed_there = np.setdiff1d(corpus.removed_labels, retriever.labels.removed)
    if len(removed_there):
        raise DataError(
            f"corpus {corpus.path} has removed labels that the bundle answers with,"
            f" {len(removed_there):,} of them; name its own corpus"
        )
    own_files = corpus.tokenizer().to_files()
    # Several members get texts, so it is enough that the corpus is one of those they come from.
    if all(member.tokenizer.to_files() != own_files for member in retriever.members):
        raise DataError(
            f"corpus {corpus.path} has another vocabulary than the bundle; name the bundle's own corpus"
        )


def finish(
    run: Run,
    corpus: Corpus,
    evaluate_test: bool = True,
    progress: Progress | None = None,
) -> Evaluation | None:
    """Writes RUN/bundle, RUN/metrics.json if there is a test split, and RUN/report.html."""
    bundle = bundle_of(run, corpus)
    evaluation = None
    if evaluate_test and corpus.card.num_test:
        try:
            evaluation = measure_bundle(Retriever.load(bundle), corpus, "test", progress=progress)
        except NoPositivesError as error:
            logger.warning("the test split is not measured: %s", error)
    record(run, corpus, evaluation)
    return evaluation


def record(run: Run, corpus: Corpus, evaluation: Evaluation | None = None) -> None:
    """Writes RUN/metrics.json and the bundle's card, if there is an evaluation, and RUN/report.html.

    A refitted run shows the validation curve of the run that chose its number of epochs.
    """
    metrics = None
    if evaluation is not None:
        bundle = run.path / "bundle"
        # The bundle may change later: the card of another one does not show these metrics.
        sha256 = read_manifest(bundle, KIND).sha256
        metrics = {**evaluation.to_json(), "bundle_sha256": sha256}
        write_json(run.path / "metrics.json", metrics)
        write_text(bundle / CARD, card_of(bundle, metrics=metrics))
        tracking.catch_up(run)
    steps = read_records(run.path / "metrics.jsonl")
    for selected in read_records(run.path / SELECTION / "metrics.jsonl"):
        if "loss" not in selected:
            steps.append(selected)
    write_report(
        run.path / "report.html",
        title=f"{run.config.method_name} on {corpus.card.name}",
        steps=steps,
        metrics=metrics,
        config=run.config.to_dict(),
        facts=_facts(run, corpus),
    )


def _facts(run: Run, corpus: Corpus) -> dict[str, str]:
    """What the report says about the run's circumstances."""
    result = run.result() or {}
    late_step = result.get("schedule_broken_at_step")
    punctuality = "always in time"
    if late_step is not None:
        punctuality = f"late since step {late_step:,}: the run cannot be repeated exactly"
    packages = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    versions = [f"xmcray {__version__}", f"Python {platform.python_version()}", *packages]
    card = corpus.card
    return {
        "corpus": f"{card.name} ({card.num_train:,} training queries, {card.num_labels:,} labels)",
        "corpus SHA-256": run.corpus_sha256,
        "run": run.id,
        "steps": f"{result.get('steps', 0):,}",
        "seconds of training": f"{result.get('seconds', 0.0):.1f}",
        "peak memory of a trainer": f"{result.get('peak_memory_mb', 0.0):,.0f} MB",
        "hard negatives": punctuality,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}",
        "versions": ", ".join(versions),
    }
