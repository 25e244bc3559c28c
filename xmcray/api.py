"""The functions of `import xmcray`, which the verbs of the command line call.

Each imports what it needs when it runs, so that mistakes in its arguments are reported before torch
and Ray are loaded. What a user can repair is raised as an `XmcrayError` whose message is one line.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from xmcray import config as configs
from xmcray import hub
from xmcray.errors import ConfigError
from xmcray.methods.registry import check_method_name
from xmcray.paths import bundle_at, kind_of

if TYPE_CHECKING:
    import pandas as pd

    from xmcray.data.corpus import Corpus, Split
    from xmcray.evaluation.evaluate import Evaluation
    from xmcray.planning.data_size import DataSize
    from xmcray.planning.estimate import Plan
    from xmcray.planning.rates import Rates
    from xmcray.retrieval.retriever import Retriever
    from xmcray.training.distil import DistilOutcome
    from xmcray.training.run import Run, RunConfig

# A folder or URL; corpora and runs are paths too.
Location = str | os.PathLike[str]
# Settings: a YAML file, "preset:METHOD/DATASET", values by dotted names or by sections, or several
# of these, the later over the earlier.
Settings = Location | Mapping[str, Any] | Sequence[Location | Mapping[str, Any]]

VECTOR_SYSTEMS = ("parquet", "qdrant", "milvus", "vespa", "lancedb", "weaviate")
# Where the encoder alone can go.
ENCODER_SYSTEMS = ("sentence-transformers",)
_TABLES = ("labels", "train", "test")


class PrepareOptions(TypedDict, total=False):
    """Options of `prepare`; see PrepareConfig."""

    max_len: int
    label_max_len: int
    tokenizer: str
    query_prompt: str
    label_prompt: str
    vocab_size: int
    propensity: tuple[float, float]
    on_error: Literal["fail", "skip"]
    on_leak: Literal["keep", "drop"]


def prepare(
    source: Location | Mapping[str, pd.DataFrame],
    out: Location,
    *,
    append_to: Location | None = None,
    format: str | None = None,  # noqa: A002 - named as the option
    name: str | None = None,
    licence: str = "unknown",
    progress: bool = True,
    **options: Unpack[PrepareOptions],
) -> Corpus:
    """Turns raw files or tables into a corpus.

    Args:
        source: folder of raw files, also hf://datasets/OWNER/NAME; or tables by name: "labels"
            (uid, text), "train" and perhaps "test" (uid, text, labels: lists of label uids), on one
            machine. A corpus of an older release is written anew with few large files.
        out: folder or URL to write.
        append_to: corpus whose rows come first; labels are matched by uid.
        format: layout of the raw files; detected if not given.
        name: name in the card; that of `source` if not given.
        licence: licence in the card.
        progress: show rows on stderr if that is a terminal.
        options: see PrepareConfig.
    Returns:
        The corpus, opened.
    Raises:
        ConfigError: an option is unknown or out of range.
        DataError: no layout fits the files, or a row is malformed.
        StorageError: `out` exists, or the disk is full.
    """
    if isinstance(source, Mapping):
        with _raw_tables(source) as folder:
            return prepare(
                folder,
                out,
                append_to=append_to,
                format="parquet",
                name=name,
                licence=licence,
                progress=progress,
                **options,
            )
    from xmcray.data.formats import detect
    from xmcray.data.regroup import is_corpus, regroup
    from xmcray.storage import refuse_existing

    is_on_hub = str(source).startswith(hub.PREFIX)
    folder = hub.downloaded_folder(str(source)) if is_on_hub else Path(source)
    target = os.fspath(out)
    given = {"format": format, "name": name, **options}
    if append_to is not None:
        return _append(folder, target, os.fspath(append_to), given, progress)
    if is_corpus(folder):
        _refuse_options(given, (), f"is for raw files, but {source} is a corpus")
        return regroup(folder, target)
    raw = detect(folder, format)
    refuse_existing(target)
    # Ray is imported once the arguments are known to be right.
    from xmcray.data import pipeline

    name = name or _name_of(source)
    return pipeline.prepare(raw, target, name=name, licence=licence, progress=progress, **options)


@contextlib.contextmanager
def _raw_tables(tables: Mapping[str, pd.DataFrame]) -> Iterator[Path]:
    """A folder with tables as the raw files of a data set; removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="xmcray.") as temporary:
        # The name is part of the card, so it must not be random.
        folder = Path(temporary) / "tables"
        folder.mkdir()
        for name, table in tables.items():
            configs.check_choice("a table", name, _TABLES)
            table.to_parquet(folder / f"{name}.parquet", index=False)
        yield folder


def _name_of(source: Location) -> str:
    """The name of a data set: of its repository on the hub, or of its folder."""
    if str(source).startswith(hub.PREFIX):
        # The folder of the download is named by a commit.
        return hub.HubPath.parse(str(source)).repo_id.split("/")[1]
    # The absolute path, because "." has no name.
    return Path(source).absolute().name


def _append(
    source: Path,
    out: str,
    append_to: str,
    given: Mapping[str, Any],
    progress: bool,
) -> Corpus:
    """Writes a corpus that has the rows of another one and those of new raw files."""
    from xmcray.data.corpus import KIND, Corpus
    from xmcray.data.formats import detect
    from xmcray.storage import open_artifact, refuse_existing

    if given.get("on_leak") == "drop":
        raise ConfigError(
            "on_leak is drop, expected keep with rows that are appended, because earlier rows stay;"
            " leave it out"
        )
    own = ("format", "on_error", "on_leak")
    _refuse_options(given, own, f"is as in {append_to}, which the rows are appended to")
    raw = detect(source, given["format"])
    refuse_existing(out)
    folder, manifest = open_artifact(append_to, KIND)
    corpus = Corpus(append_to, folder, manifest.sha256, verify=True)
    from xmcray.data import pipeline

    on_error = given.get("on_error", "fail")
    return pipeline.append(corpus, manifest, raw, out, on_error=on_error, progress=progress)


def _refuse_options(given: Mapping[str, Any], allowed: Sequence[str], why: str) -> None:
    """Raises ConfigError if an option was given that has no effect here."""
    for name, value in given.items():
        if value is not None and name not in allowed:
            raise ConfigError(f"{name} {why}; leave it out")


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
    settings, base = run_settings(method, data, config, workers=workers, source=source)
    from xmcray.data.corpus import Corpus
    from xmcray.progress import counting, watch_training
    from xmcray.training import launch
    from xmcray.training.outcome import finish

    watch: Any = watch_training if progress else contextlib.nullcontext
    run = launch.train(
        os.fspath(data),
        Path(out),
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
) -> tuple[RunConfig, Run | None]:
    """All settings of a training, and the run that it goes on from.

    Args:
        method: as for `train`.
        data: as for `train`.
        config: as for `train`.
        workers: as for `train`.
        source: as for `train`.
    """
    values = merged(config)
    if workers is not None:
        values = configs.overlay(values, {"cluster": {"workers": workers}})
    from xmcray.training.run import Run, RunConfig

    base = None
    if source is not None:
        from xmcray.data.corpus import Corpus
        from xmcray.training.start import settings_from

        base = Run.open(Path(source))
        corpus = Corpus.open(os.fspath(data), verify=False)
        values = configs.overlay(settings_from(base, method, corpus), values)
    return RunConfig.resolve(method, values), base


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
        ConfigError: `predictions` of predictions.
        DataError: the answers and the corpus do not belong together.
        RunError: there is neither a run nor a bundle, or the run is not finished.
    """
    origin = os.fspath(path)
    kind = kind_of(origin)
    if predictions is not None:
        _check_answers_file(predictions, origin, kind)
    from xmcray.data.corpus import Corpus
    from xmcray.progress import counting
    from xmcray.training import outcome

    # An open corpus has been verified.
    corpus = data if isinstance(data, Corpus) else Corpus.open(os.fspath(data))
    attributes = {} if slices is None else _query_attributes(slices)
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


def _check_answers_file(predictions: str, origin: str, kind: str) -> None:
    """Refuses a file for answers that cannot be written, before anything is measured."""
    from xmcray import storage

    if kind == "predictions":
        raise ConfigError(
            f"predictions: {origin} already holds the answers; name a run or a bundle"
        )
    storage.check_file(predictions)


def _query_attributes(path: Location) -> Mapping[str, Mapping[str, Any]]:
    """Attributes by uid of the query, from a file as `xmcray labels annotate` takes it."""
    from xmcray.retrieval.labels import read_attribute_sets

    return read_attribute_sets([Path(path)])


def _sliced(
    evaluation: Evaluation, queries: Split, attributes: Mapping[str, Mapping[str, Any]]
) -> Evaluation:
    """An evaluation with the metrics of slices, if there are attributes."""
    if not attributes:
        return evaluation
    from xmcray.evaluation.slices import with_slices

    uids = queries.uids(evaluation.query_ids)
    return with_slices(evaluation, [attributes.get(uid, {}) for uid in uids])


def export(
    path: Location,
    out: Location,
    config: Settings = (),
    *,
    data: Location | None = None,
    to: str | None = None,
    dim: int | None = None,
) -> None:
    """Writes the bundle of a finished run, its label vectors for a vector database, or its encoder.

    Args:
        path: run; with `to` or `dim` also a bundle.
        out: folder or URL to write.
        config: settings `index.*` of the bundle, such as best.yaml of a sweep.
        data: where the corpus is now; where the run found it if not given.
        to: "parquet", "qdrant", "milvus", "vespa", "lancedb" or "weaviate" for label vectors,
            "sentence-transformers" for the encoder; a bundle if not given.
        dim: keep the first columns of the vectors only.
    Raises:
        ConfigError: arguments that do not go together.
        RunError: the run is not finished, or the corpus is not its own.
        StorageError: `out` exists, or the disk is full.
    """
    settings = merged(config)
    origin = os.fspath(path)
    target = os.fspath(out)
    corpus_path = None if data is None else os.fspath(data)
    if to is not None:
        configs.check_choice("to", to, (*VECTOR_SYSTEMS, *ENCODER_SYSTEMS))
    if (to is not None or dim is not None) and settings:
        raise ConfigError(
            "settings are for the index of a new bundle, expected none; leave out config"
        )
    if to is not None and dim is not None:
        raise ConfigError("dim writes a bundle, expected no other system; leave out to or dim")
    if dim is not None:
        from xmcray.retrieval.prefix import cut_bundle

        cut_bundle(bundle_at(origin, corpus_path), target, dim)
    elif to in ENCODER_SYSTEMS:
        from xmcray.retrieval.encoder_export import export_encoder

        export_encoder(bundle_at(origin, corpus_path), target)
    elif to is not None:
        from xmcray.retrieval.vector_export import export_vectors

        export_vectors(bundle_at(origin, corpus_path), target, to)
    else:
        from xmcray.training.run import Run

        run = Run.open(origin)
        from xmcray.data.corpus import Corpus
        from xmcray.training.export import export_run

        # The corpus is verified again, because label texts and uids are copied from it.
        corpus = None if corpus_path is None else Corpus.open(corpus_path)
        export_run(run, target, corpus, settings)


def distil(
    path: Location,
    data: Location,
    out: Location,
    config: Mapping[str, Any] | None = None,
    *,
    into: Literal["static"] = "static",
    progress: bool = True,
) -> DistilOutcome:
    """Writes a bundle that answers like another one, without its transformer.

    Args:
        path: bundle (folder or URL) or run, with a transformer.
        data: the corpus that it was made from.
        out: folder or URL to write.
        config: settings by name, see `training.distil.Distillation`.
        into: kind of the new encoder.
        progress: show the number of texts on stderr if that is a terminal.
    Returns:
        P@1 and P@5 of both on held-out queries.
    Raises:
        ConfigError: a setting is unknown or out of range, or the bundle has no transformer.
        DataError: bundle and corpus do not belong together.
        StorageError: `out` exists, or the disk is full.
    """
    configs.check_choice("into", into, ("static",))
    from xmcray import storage
    from xmcray.training.distil import Distillation, distil

    settings = configs.build(Distillation, dict(config or {}))
    storage.refuse_existing(os.fspath(out))
    from xmcray.data.corpus import Corpus
    from xmcray.progress import counting

    corpus = Corpus.open(os.fspath(data))
    bundle = bundle_at(os.fspath(path), os.fspath(data))
    with counting("texts", settings.num_texts(corpus), progress) as count:
        return distil(bundle, corpus, os.fspath(out), settings, progress=count)


def load(
    path: Location,
    *,
    data: Location | None = None,
    threads: int | None = None,
    device: str | None = None,
    precision: Literal["float32", "bfloat16", "int8"] = "float32",
    rerank: Location | None = None,
) -> Retriever:
    """Opens a bundle, or that of a finished run, to search it.

    Args:
        path: bundle (folder or URL) or run.
        data: where the run's corpus is now; where the run found it if not given.
        threads: threads of torch and FAISS in this process; torch's own setting if not given.
        device: where the encoder and exhaustive searches run, such as "cuda:0"; the CPU if not
            given.
        precision: numbers that a transformer computes with.
        rerank: cross-encoder that reads the best answers again: folder or hub id.
    Raises:
        BundleError: a file of the bundle is malformed.
        RunError: the run is not finished.
        StorageError: there is no bundle, or a file was altered.
    """
    bundle = bundle_at(os.fspath(path), None if data is None else os.fspath(data))
    from xmcray.retrieval.retriever import Retriever

    retriever = Retriever.load(bundle, threads, device, precision=precision)
    return retriever.reranked_by(rerank)


def plan(
    method: str,
    config: Settings = (),
    *,
    data: Location | None = None,
    labels: int | None = None,
    queries: int | None = None,
    tokens_per_text: int | None = None,
    positives: float = 5.0,
    workers: int | None = None,
    device: str = "cpu",
    memory_gb: float | None = None,
    price_per_hour: float | None = None,
    probe: Location | None = None,
) -> Plan:
    """Computes memory, time and cost of a training before it runs.

    Args:
        method: name of the method.
        config: settings.
        data: corpus to count; or give `labels` and `queries`.
        labels: number of labels.
        queries: number of training queries.
        tokens_per_text: average of queries and label texts; 16 if not given.
        positives: labels of a query.
        workers: training processes, in place of `cluster.workers`.
        device: "cpu", which is measured here, or a device such as "a100-80gb".
        memory_gb: memory of each worker, in units of 10^9 bytes.
        price_per_hour: price of one worker with its share of a machine.
        probe: file of measured rates of this machine; read if it exists, otherwise written.
    Raises:
        ConfigError: an argument or a setting is out of range, or the size is not known.
        ResourceError: a worker needs more memory than it has; the message names what to change.
    """
    check_method_name(method)
    numbers = {"memory_gb": memory_gb, "price_per_hour": price_per_hour, "workers": workers}
    for name, value in numbers.items():
        if value is not None and not value > 0:  # NaN is not above 0 either
            raise ConfigError(f"{name} is {value:g}, expected more than 0")
    values = merged(config)
    from xmcray.training.run import RunConfig

    settings = RunConfig.resolve(method, values)
    size = _data_size(data, labels, queries, tokens_per_text, positives)
    from xmcray.planning import plan as planning

    rates = _rates(device, settings, probe)
    memory_bytes = None if memory_gb is None else int(memory_gb * 1e9)
    return planning.plan(settings, size, rates, workers, memory_bytes, price_per_hour)


def _data_size(
    data: Location | None,
    labels: int | None,
    queries: int | None,
    tokens_per_text: int | None,
    positives: float,
) -> DataSize:
    from xmcray.planning import data_size

    if data is not None:
        from xmcray.data.corpus import Corpus

        return data_size.from_corpus(Corpus.open(os.fspath(data), verify=False))
    if labels is None or queries is None:
        raise ConfigError("the size of the data is not known; give data, or labels and queries")
    return data_size.from_numbers(labels, queries, tokens_per_text, positives)


def _rates(device: str, settings: RunConfig, probe: Location | None) -> Rates:
    """Of the device: published, read from the file of `probe`, or measured."""
    from xmcray.planning.devices import device_rates

    if device != "cpu":
        return device_rates(device, settings.optim.matmul)
    from xmcray import storage
    from xmcray.planning import probe as measurement
    from xmcray.planning.rates import load_rates

    # Measuring takes time, so its result can be kept in a file.
    path = None if probe is None else Path(probe)
    if path is not None and path.is_file():
        return load_rates(path)
    if path is not None:
        storage.check_file(path)
    measured = measurement.probe(settings.cluster.threads_per_process or 1)
    if path is not None:
        measured.save(path)
    return measured


def merged(config: Settings) -> dict[str, Any]:
    """The values of all sources of settings, the later over the earlier, by section.

    Raises:
        ConfigError: a file cannot be read, or a name goes through a value.
    """
    is_single = isinstance(config, str | os.PathLike | Mapping)
    sources: Any = [config] if is_single else config
    values: dict[str, Any] = {}
    for source in sources:
        if not isinstance(source, Mapping):
            values = configs.overlay(values, configs.load_yaml(os.fspath(source)))
            continue
        for name, value in source.items():
            setting: dict[str, Any] = {}
            configs.put(setting, name, value)
            values = configs.overlay(values, setting)
    return values
