"""From raw files to a measured bundle: quickstart, prepare, train, evaluate, export."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from xmcray.cli.arguments import add_config, add_corpus, add_json, given, merged_settings
from xmcray.cli.output import show, show_json, show_metrics, show_next
from xmcray.cli.paths import bundle_at, kind_of
from xmcray.config import overlay
from xmcray.errors import ConfigError
from xmcray.methods.registry import check_method_name, method_names

if TYPE_CHECKING:
    from xmcray.data.corpus import Corpus
    from xmcray.evaluation.evaluate import Evaluation
    from xmcray.training.run import Run

VECTOR_SYSTEMS = ("parquet", "qdrant", "milvus", "vespa")
# Where the encoder alone can go.
ENCODER_SYSTEMS = ("sentence-transformers",)
# Settings of `prepare` that have an option of their own.
PREPARE_OPTIONS = (
    "max_len",
    "label_max_len",
    "tokenizer",
    "query_prompt",
    "label_prompt",
    "vocab_size",
    "propensity",
    "on_error",
)


def quickstart_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument(
        "--out",
        default="runs/quickstart",
        metavar="DIR",
        help="folder to write (default: %(default)s)",
    )


def quickstart(options: argparse.Namespace) -> None:
    """Runs all steps, from raw files to answers, on the embedded sample."""
    from xmcray.quickstart import quickstart

    quickstart(options.out)


def prepare_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument(
        "source",
        metavar="SRC",
        help="folder of raw files, or a corpus of an older release to write with few large files",
    )
    verb.add_argument("--out", required=True, metavar="CORPUS", help="folder or URL to write")
    verb.add_argument(
        "--append",
        metavar="CORPUS",
        help="put the rows of SRC after those of this corpus; labels are matched by uid",
    )
    verb.add_argument("--format", metavar="F", help="layout of the raw files (default: detected)")
    verb.add_argument("--name", help="name in the card (default: that of SRC)")
    verb.add_argument("--licence", default="unknown", help="licence in the card")
    verb.add_argument(
        "--max-len",
        type=int,
        metavar="N",
        help="tokens kept of a query (default: 128)",
    )
    verb.add_argument(
        "--label-max-len",
        type=int,
        metavar="N",
        help="tokens kept of a label text (default: 32)",
    )
    verb.add_argument(
        "--tokenizer", metavar="T", help="wordpiece (default), or a model's hub id or folder"
    )
    verb.add_argument(
        "--query-prompt",
        metavar="TEXT",
        help="put before each query (default: what the model of --tokenizer declares)",
    )
    verb.add_argument(
        "--label-prompt",
        metavar="TEXT",
        help="put before each label text (default: what the model of --tokenizer declares)",
    )
    verb.add_argument("--vocab-size", type=int, metavar="N", help="largest vocabulary to train")
    verb.add_argument(
        "--propensity",
        type=float,
        nargs=2,
        metavar=("A", "B"),
        help="constants (default: 0.55 1.5)",
    )
    verb.add_argument(
        "--on-error",
        choices=("fail", "skip"),
        help="malformed rows: stop (default), or record and skip",
    )
    add_json(verb, "the card")


def prepare(options: argparse.Namespace) -> None:
    """Turns raw files into a corpus."""
    from xmcray.data.formats import detect
    from xmcray.data.regroup import is_corpus
    from xmcray.storage import refuse_existing

    if options.append:
        _append(options)
        return
    if is_corpus(Path(options.source)):
        _regroup(options)
        return
    source = detect(options.source, options.format)
    refuse_existing(options.out)
    # Ray is imported once the arguments are known to be right.
    from xmcray.data.pipeline import prepare

    settings = given(options, PREPARE_OPTIONS)
    if options.propensity:
        # argparse gives a list, and settings are immutable.
        settings["propensity"] = tuple(options.propensity)
    # The absolute path, because "." has no name.
    name = options.name or source.path.absolute().name
    corpus = prepare(source, options.out, name=name, licence=options.licence, **settings)
    _show_corpus(options, corpus)


def _append(options: argparse.Namespace) -> None:
    """Writes a corpus that has the rows of another one and those of new raw files."""
    from xmcray.data.corpus import KIND, Corpus
    from xmcray.data.formats import detect
    from xmcray.storage import open_artifact, refuse_existing

    kept = ("name", *(name for name in PREPARE_OPTIONS if name != "on_error"))
    settings = given(options, kept)
    if settings:
        option = next(iter(settings)).replace("_", "-")
        raise ConfigError(f"--{option} is as in {options.append} with --append; leave it out")
    source = detect(options.source, options.format)
    refuse_existing(options.out)
    folder, manifest = open_artifact(options.append, KIND)
    corpus = Corpus(options.append, folder, manifest.sha256, verify=True)
    from xmcray.data.pipeline import append

    settings = given(options, ("on_error",))
    _show_corpus(options, append(corpus, manifest, source, options.out, **settings))


def _regroup(options: argparse.Namespace) -> None:
    """Writes a corpus of an older release with few large files."""
    from xmcray.data.regroup import regroup

    settings = given(options, ("format", "name", *PREPARE_OPTIONS))
    if settings:
        option = next(iter(settings)).replace("_", "-")
        raise ConfigError(
            f"--{option} is for raw files, but {options.source} is a corpus; leave it out"
        )
    _show_corpus(options, regroup(Path(options.source), options.out))


def _show_corpus(options: argparse.Namespace, corpus: Corpus) -> None:
    import dataclasses

    from xmcray.data.writer import statistics_table

    if options.json:
        show_json({**dataclasses.asdict(corpus.card), "sha256": corpus.sha256})
        return
    show(statistics_table(corpus.card))
    show_next(["xmcray", "train", method_names()[0], "--data", options.out, "--out", "RUN"])


def train_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("method", metavar="METHOD", help=", ".join(method_names()))
    add_corpus(verb)
    verb.add_argument("--out", required=True, metavar="RUN", help="folder of the run")
    add_config(verb)
    verb.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="training processes; 0 trains here, without Ray",
    )
    verb.add_argument(
        "--resume",
        choices=("auto", "never"),
        default="auto",
        help="never: RUN must be empty",
    )
    verb.add_argument(
        "--restart",
        action="store_true",
        help="train from the start if all checkpoints of RUN are damaged",
    )
    verb.add_argument(
        "--refit",
        action="store_true",
        help="then train on all of train for the best number of epochs",
    )
    verb.add_argument(
        "--from",
        dest="source",
        metavar="RUN",
        help="go on from this finished run, with its settings; labels are matched by uid",
    )
    verb.add_argument("--no-evaluate", action="store_true", help="leave the test split alone")
    verb.add_argument(
        "--print-config",
        action="store_true",
        help="print all settings as YAML, as --config takes them, and train nothing",
    )
    add_json(verb, "the metrics")


def train(options: argparse.Namespace) -> None:
    """Trains a method, exports the bundle and measures it."""
    # Settings are checked before torch is imported, so that a mistake is reported at once.
    check_method_name(options.method)
    overrides = [] if options.workers is None else [f"cluster.workers={options.workers}"]
    values = merged_settings(options, overrides)
    from xmcray.training.run import Run, RunConfig

    source = Run.open(options.source) if options.source else None
    if source is not None:
        values = overlay(_settings_from(source, options), values)
    settings = RunConfig.resolve(options.method, values)
    if options.print_config:
        print(yaml.safe_dump(settings.to_dict(), sort_keys=False), end="")
        return
    from xmcray.data.corpus import Corpus
    from xmcray.progress import counting, watch_training
    from xmcray.training.launch import train
    from xmcray.training.outcome import finish

    run = train(
        options.data,
        options.out,
        settings,
        resume=options.resume,
        refit=options.refit,
        restart=options.restart,
        source=source,
        watch=watch_training,
    )
    corpus = Corpus.open(options.data, verify=False)  # `train` has compared every byte
    with counting("test queries", corpus.card.num_test) as progress:
        evaluation = finish(run, corpus, not options.no_evaluate, progress)
    # A run that leaves the test split alone has a bundle and no metrics.
    metrics = None if evaluation is None else evaluation.to_json()
    if options.json:
        show_json(metrics)
        return
    if metrics is not None:
        show_metrics({Path(options.out).name: metrics})
    show(f"bundle {options.out}/bundle, report {options.out}/report.html")
    show_next(["xmcray", "search", f"{options.out}/bundle", "TEXT"])


def _settings_from(source: Run, options: argparse.Namespace) -> dict[str, Any]:
    """The settings of the run that --from names."""
    from xmcray.data.corpus import Corpus
    from xmcray.training.start import settings_from

    return settings_from(source, options.method, Corpus.open(options.data, verify=False))


def evaluate_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument("path", metavar="RUN_OR_BUNDLE")
    verb.add_argument("--data", required=True, metavar="CORPUS")
    verb.add_argument("--split", default="test", choices=("train", "test"))
    verb.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write metrics.json there, or print it",
    )
    verb.add_argument(
        "--compare", metavar="OTHER", help="a run, a bundle or predictions (.npz): paired test"
    )
    verb.add_argument(
        "--predictions", metavar="FILE", help="write the answers as a sparse .npz, queries x labels"
    )
    verb.add_argument(
        "--exact", action="store_true", help="compare all labels instead of using the index"
    )


def evaluate(options: argparse.Namespace) -> None:
    """Measures a run, a bundle or stored answers, and compares it with another."""
    paths = [options.path]
    if options.compare:
        paths.append(options.compare)
    kinds = [kind_of(path) for path in paths]
    if options.predictions and kinds[0] == "predictions":
        raise ConfigError(
            f"--predictions: {options.path} already holds the answers; name a run or a bundle"
        )
    from xmcray import storage

    # Files that cannot be written are refused before anything is measured. "-" is stdout.
    json_file = None if options.json == "-" else options.json
    for path in (options.predictions, json_file):
        if path:
            storage.check_file(path)
    from xmcray.data.corpus import Corpus
    from xmcray.evaluation.evaluate import compare

    corpus = Corpus.open(options.data)
    evaluations = [_measure(path, corpus, options) for path in paths]
    # Only the first path is written; the other one is there for the comparison.
    metrics = evaluations[0].to_json()
    if json_file:
        storage.write_json(Path(json_file), metrics)
    if options.json == "-":
        show_json(metrics)
        return
    show_metrics({Path(options.path).name: metrics}, deciles=True)
    if options.compare:
        from xmcray.evaluation.table import comparison_table

        names = [Path(path).name for path in paths]
        show(comparison_table(compare(*evaluations), *names))


def _measure(path: str, corpus: Corpus, options: argparse.Namespace) -> Evaluation:
    """Evaluates one of the paths; the answers of the first one go to --predictions."""
    from xmcray.progress import counting
    from xmcray.training import outcome

    kind = kind_of(path)
    split = options.split
    with counting(f"{split} queries", len(corpus.split(split))) as progress:
        if kind == "predictions":
            answers = outcome.stored_answers(path, corpus, split)
            return outcome.measure(answers, corpus, split, progress=progress)
        # Stored answers need no torch, so it is imported from here on.
        from xmcray.retrieval.retriever import Retriever
        from xmcray.training.run import Run

        run = Run.open(path) if kind == "run" else None
        bundle = outcome.bundle_of(run, corpus) if run else path
        evaluation = outcome.measure_bundle(
            Retriever.load(bundle),
            corpus,
            split,
            exact=options.exact,
            predictions=options.predictions if path == options.path else None,
            progress=progress,
        )
    # The run keeps what its bundle answers by default, and only about the test split.
    if run and split == "test" and not options.exact:
        outcome.record(run, corpus, evaluation)
    return evaluation


def export_options(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    verb.add_argument(
        "path", metavar="RUN", help="folder of a finished run; with --to also a bundle"
    )
    verb.add_argument("--out", required=True, metavar="BUNDLE", help="folder or URL to write")
    verb.add_argument(
        "--data", metavar="CORPUS", help="where the corpus is now (default: where the run found it)"
    )
    add_config(
        verb,
        config_help="index.* settings, such as best.yaml of a sweep",
        set_help="one index.* setting, over --config",
    )
    verb.add_argument(
        "--to",
        choices=(*VECTOR_SYSTEMS, *ENCODER_SYSTEMS),
        help="label vectors for a vector database, or the encoder, in place of a bundle",
    )

    verb.add_argument(
        "--dim",
        type=int,
        metavar="N",
        help="keep the first N columns of a bundle's vectors; PATH may be a bundle",
    )


def export(options: argparse.Namespace) -> None:
    """Writes the bundle of a run, its label vectors for a vector database, or its encoder."""
    settings = merged_settings(options)
    if options.to and settings:
        raise ConfigError(
            f"--to {options.to} writes no index, expected neither --config nor --set; leave them out"
        )
    if options.dim is not None:
        _cut(options, settings)
        return
    if options.to in ENCODER_SYSTEMS:
        from xmcray.retrieval.encoder_export import export_encoder

        has_code = export_encoder(bundle_at(options.path, options.data), options.out)
        trust = f", trust_remote_code={has_code}" if has_code else ""
        show(f'open it with SentenceTransformer("{options.out}"{trust})')
        return
    if options.to:
        # Vectors can be taken out of any bundle, so the run is not opened.
        from xmcray.retrieval.vector_export import export_vectors

        bundle = bundle_at(options.path, options.data)
        num_vectors = export_vectors(bundle, options.out, options.to)
        show(
            f"{num_vectors:,} label vectors; {options.out}/README.md says how to load them"
            f" into {options.to}"
        )
        return
    from xmcray.training.run import Run

    run = Run.open(options.path)
    from xmcray.data.corpus import Corpus
    from xmcray.training.export import export_run

    # The corpus is verified again, because label texts and uids are copied from it.
    corpus = Corpus.open(options.data) if options.data else None
    export_run(run, options.out, corpus, settings)
    show_next(["xmcray", "search", options.out, "TEXT"])


def _cut(options: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    """Writes a bundle with the first columns of another one's vectors."""
    if options.to or settings:
        raise ConfigError(
            "--dim writes a bundle, expected no --to, --config or --set; leave them out"
        )
    from xmcray.retrieval.prefix import cut_bundle

    cut_bundle(bundle_at(options.path, options.data), options.out, options.dim)
    show_next(["xmcray", "search", options.out, "TEXT"])
