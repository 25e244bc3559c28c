"""From a corpus to a measured bundle: train, evaluate, export."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from xmcray import config as configs
from xmcray.api.settings_sources import Location, Settings, merged, text_of
from xmcray.errors import ConfigError
from xmcray.methods.registry import check_method_name
from xmcray.paths import bundle_at, kind_of

if TYPE_CHECKING:
    from xmcray.data.corpus import Split
    from xmcray.evaluation.evaluate import Evaluation
    from xmcray.training.run import Run
    from xmcray.training.run_config import RunConfig

VECTOR_SYSTEMS = ("parquet", "qdrant", "milvus", "vespa", "lancedb", "weaviate")
# Where the encoder alone can go.
ENCODER_SYSTEMS = ("sentence-transformers",)

logger = logging.getLogger(__name__)


def train(
    method: str,
    data: Location,
    out: Location,
    config: Settings = (),
    *,
    workers: int | None = None,
    resume: Literal["auto", "never"] = "auto",
    restart: bool = False,
    refit: bool = False,
    source: Location | None = None,
    evaluate: bool = True,
    progress: bool = True,
) -> Run:
    """Trains a method on a corpus, exports the bundle and measures it.

    The same call continues an interrupted run.

    Args:
        method: name of the method, such as "astra".
        data: corpus.
        out: folder of the run.
        config: settings.
        workers: training processes, in place of `cluster.workers`; 0 trains in this process,
            without Ray.
        resume: "never" demands that `out` is empty.
        restart: train from the start if all checkpoints are damaged.
        refit: then train on all of train for the best number of epochs.
        source: finished run to go on from, with its settings; labels are matched by uid.
        evaluate: measure the bundle on the test split.
        progress: show the training on stderr.
    Returns:
        The run, with a bundle and, if it was measured, with metrics.
    Raises:
        ConfigError: the method or a setting is unknown or out of range.
        RunError: `out` is in use, not empty, or a run of other data or settings.
        XmcrayError: any other mistake that a user can repair.
    """
    # Settings are checked before torch is imported, so that a mistake is reported at once.
    check_method_name(method)
    settings, base = run_settings(method, data, config, workers=workers, source=source, out=out)
    from xmcray.data.corpus import Corpus
    from xmcray.progress import counting, watch_training
    from xmcray.training import launch
    from xmcray.training.outcome import finish

    watch: Any = watch_training if progress else contextlib.nullcontext
    run = launch.train(
        os.fspath(data),
        os.fspath(out),  # as it is: a URL is refused, and a Path would take it for a folder
        settings,
        resume=resume,
        refit=refit,
        restart=restart,
        source=base,
        watch=watch,
    )
    corpus = Corpus.open(os.fspath(data), verify=False)  # the training has compared every byte
    with counting("test queries", corpus.card.num_test, progress) as count:
        finish(run, corpus, evaluate, count)
    return run


def run_settings(
    method: str,
    data: Location,
    config: Settings,
    *,
    workers: int | None = None,
    source: Location | None = None,
    out: Location | None = None,
) -> tuple[RunConfig, Run | None]:
    """All settings of a training, and the run that it goes on from.

    Args:
        method: as for `train`.
        data: as for `train`.
        config: as for `train`.
        workers: as for `train`.
        source: as for `train`.
        out: as for `train`; a run there that has begun no longer needs its source.
    """
    values = merged(config)
    if workers is not None:
        values = configs.overlay(values, {"cluster": {"workers": workers}})
    from xmcray.training.run import Run
    from xmcray.training.run_config import RunConfig

    base = None
    if source is not None:
        from xmcray.data.corpus import Corpus
        from xmcray.training.start import begun_from, settings_from

        begun = None if out is None else begun_from(Path(out), Path(source))
        if begun is None:
            base = Run.open(Path(source))
            corpus = Corpus.open(os.fspath(data), verify=False)
            own_values = settings_from(base, method, corpus)
        else:
            base, own_values = begun
        values = configs.overlay(own_values, values)
    resolved = RunConfig.resolve(method, values)
    wanted = values.get("negatives", {}).get("hard", 0)
    if wanted and not resolved.negatives.hard:
        logger.warning(
            "negatives.hard=%s has no effect, because the loss of %s takes no hard negatives with these"
            " settings (dexml: method.columns=hard)",
            wanted,
            method,
        )
    return resolved, base


def evaluate(
    path: Location,
    data: Location,
    *,
    split: Literal["train", "test"] = "test",
    exact: bool = False,
    predictions: str | None = None,
    slices: Location | None = None,
    rerank: Location | None = None,
    progress: bool = True,
) -> Evaluation:
    """Measures a run, a bundle or stored answers on a corpus.

    Args:
        path: run, bundle, or predictions (.npz).
        data: corpus.
        split: queries to answer.
        exact: compare all labels instead of using the index.
        predictions: file for the answers, as a sparse .npz, queries x labels.
        slices: JSON lines with `uid` and `attributes` of queries, such as their language; metrics
            are also given for the queries with each value.
        rerank: cross-encoder that reads the best answers again: folder or hub id.
        progress: show the number of queries on stderr if that is a terminal.
    Returns:
        The metrics; `xmcray.evaluation.evaluate.compare` tests two of them, `compare_several` more.
    Raises:
        ConfigError: `predictions`, `exact` or `rerank` of predictions.
        DataError: the answers and the corpus do not belong together.
        RunError: there is neither a run nor a bundle, or the run is not finished.
    """
    origin = os.fspath(path)
    kind = kind_of(origin)
    if kind == "predictions":
        _check_stored_answers(origin, predictions=predictions, exact=exact, rerank=rerank)
    if predictions is not None:
        from xmcray.storage.path_errors import check_file

        check_file(predictions)
    from xmcray.data.corpus import Corpus
    from xmcray.progress import counting
    from xmcray.training import outcome

    # An open corpus has been verified.
    corpus = data if isinstance(data, Corpus) else Corpus.open(os.fspath(data))
    attributes = {} if slices is None else _query_attributes(slices, corpus.split(split))
    with counting(f"{split} queries", len(corpus.split(split)), progress) as count:
        if kind == "predictions":
            answers = outcome.stored_answers(origin, corpus, split)
            evaluation = outcome.measure(answers, corpus, split, progress=count)
            return _sliced(evaluation, corpus.split(split), attributes)
        # Stored answers need no torch, so it is imported from here on.
        from xmcray.retrieval.retriever import Retriever
        from xmcray.training.run import Run

        run = Run.open(origin) if kind == "run" else None
        bundle = outcome.bundle_of(run, corpus) if run else origin
        retriever = Retriever.load(bundle).reranked_by(rerank)
        evaluation = outcome.measure_bundle(
            retriever, corpus, split, exact=exact, predictions=predictions, progress=count
        )
    evaluation = _sliced(evaluation, corpus.split(split), attributes)
    # The run keeps what its bundle answers by default, and only about the test split.
    if run and split == "test" and not exact and rerank is None:
        outcome.record(run, corpus, evaluation)
    return evaluation


def _check_stored_answers(origin: str, **options: object) -> None:
    """Raises ConfigError for options that need a bundle and are given with stored answers."""
    for name, value in options.items():
        if value:
            raise ConfigError(f"{name}: {origin} already holds the answers; name a run or a bundle")


def _query_attributes(path: Location, queries: Split) -> Mapping[str, Mapping[str, Any]]:
    """Attributes by uid of the query, from a file as `xmcray labels annotate` takes it.

    Raises:
        DataError: they are those of no query of the split, or one has too many values.
    """
    import numpy as np

    from xmcray.evaluation.slices import check_attributes
    from xmcray.retrieval.labels import read_attribute_sets

    attributes = read_attribute_sets([Path(path)], "query")
    # A mistake is reported now, not when all queries have been answered.
    rows = np.setdiff1d(np.arange(len(queries)), queries.rows_without_positives)
    check_attributes([attributes.get(uid, {}) for uid in queries.uids(rows)])
    return attributes


def _sliced(
    evaluation: Evaluation, queries: Split, attributes: Mapping[str, Mapping[str, Any]]
) -> Evaluation:
    """An evaluation with the metrics of slices, if there are attributes."""
    if not attributes:
        return evaluation
    from xmcray.evaluation.slices import with_slices

    uids = queries.uids(evaluation.query_ids)
    return with_slices(evaluation, [attributes.get(uid, {}) for uid in uids])


@dataclass(frozen=True, slots=True)
class Export:
    """What `export` wrote.

    Attributes:
        num_vectors: label vectors; 0 for a bundle or an encoder.
        needs_code: whether SentenceTransformer opens the encoder with trust_remote_code only.
    """

    num_vectors: int = 0
    needs_code: bool = False


def export(
    path: Location,
    out: Location,
    config: Settings = (),
    *,
    data: Location | None = None,
    to: str | None = None,
    dim: int | None = None,
) -> Export:
    """Writes the bundle of a finished run, its label vectors for a vector database, or its encoder.

    Args:
        path: run; with `to` or `dim` also a bundle.
        out: folder or URL to write.
        config: settings `index.*` of the bundle, such as best.yaml of a sweep.
        data: where the corpus is now; where the run found it if not given.
        to: "parquet", "qdrant", "milvus", "vespa", "lancedb" or "weaviate" for label vectors,
            "sentence-transformers" for the encoder; a bundle if not given.
        dim: keep the first columns of the vectors only.
    Returns:
        What was written.
    Raises:
        ConfigError: arguments that do not go together.
        RunError: the run is not finished, or the corpus is not its own.
        StorageError: `out` exists, or the disk is full.
    """
    settings = merged(config)
    origin = os.fspath(path)
    target = os.fspath(out)
    corpus_path = text_of(data)
    if to is not None:
        configs.check_choice("to", to, (*VECTOR_SYSTEMS, *ENCODER_SYSTEMS))
    if to is not None and settings:
        raise ConfigError(
            "settings are for the index of a new bundle, expected none; leave out config and set"
        )
    if to is not None and dim is not None:
        raise ConfigError("dim writes a bundle, expected no other system; leave out to or dim")
    if dim is not None:
        from xmcray.retrieval.prefix import cut_bundle

        cut_bundle(bundle_at(origin, corpus_path), target, dim, settings)
    elif to in ENCODER_SYSTEMS:
        from xmcray.retrieval.encoder_export import export_encoder

        needs_code = export_encoder(bundle_at(origin, corpus_path), target)
        return Export(needs_code=needs_code)
    elif to is not None:
        from xmcray.retrieval.vector_export import export_vectors

        num_vectors = export_vectors(bundle_at(origin, corpus_path), target, to)
        return Export(num_vectors=num_vectors)
    else:
        from xmcray.training.run import Run

        run = Run.open(origin)
        from xmcray.data.corpus import Corpus
        from xmcray.training.export import export_run

        # The corpus is verified again, because label texts and uids are copied from it.
        corpus = None if corpus_path is None else Corpus.open(corpus_path)
        export_run(run, target, corpus, settings)
    return Export()
