"""From raw files to a measured bundle: quickstart, prepare, train, evaluate, export."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmcray import config
from xmcray.cli.output import show, show_json, show_metrics, show_next
from xmcray.cli.paths import bundle_at, kind_of
from xmcray.errors import ConfigError

if TYPE_CHECKING:
    from xmcray.data.corpus import Corpus
    from xmcray.evaluation.evaluate import Evaluation

METHODS = (
    "astra",
    "dexml",
    "prime",
    "rae",
    "renee",
    "unidec",
)  # a test holds this to methods.base, which is slow to import
VECTOR_SYSTEMS = ("parquet", "qdrant", "milvus", "vespa")


def quickstart_options(verb: argparse.ArgumentParser) -> None:
    """What it can be told."""
    verb.add_argument(
        "--out", default="runs/quickstart", metavar="DIR", help="where to (default: %(default)s)"
    )


def quickstart(options: argparse.Namespace) -> None:
    """The whole line on the embedded sample."""
    from xmcray.quickstart import quickstart

    quickstart(options.out)


def prepare_options(verb: argparse.ArgumentParser) -> None:
    """What it can be told."""
    verb.add_argument("source", metavar="SRC", help="folder of raw files")
    verb.add_argument("--out", required=True, metavar="CORPUS", help="folder or URL to write")
    verb.add_argument("--format", metavar="F", help="layout of the raw files (default: found out)")
    verb.add_argument("--name", help="name in the card (default: that of SRC)")
    verb.add_argument("--licence", default="unknown", help="licence in the card")
    verb.add_argument(
        "--max-len", type=int, metavar="N", help="tokens kept of a query (default: 128)"
    )
    verb.add_argument(
        "--label-max-len", type=int, metavar="N", help="tokens kept of a label text (default: 32)"
    )
    verb.add_argument(
        "--tokenizer", metavar="T", help="wordpiece (default), or a model's hub id or folder"
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
    verb.add_argument("--json", action="store_true", help="print the card as JSON")


def prepare(options: argparse.Namespace) -> None:
    """Raw files to a corpus."""
    import dataclasses

    from xmcray.data.formats import detect
    from xmcray.storage import refuse_existing

    source = detect(options.source, options.format)
    refuse_existing(options.out)
    from xmcray.data.pipeline import prepare, statistics_table

    names = ("max_len", "label_max_len", "tokenizer", "vocab_size", "propensity", "on_error")
    settings = {
        name: getattr(options, name) for name in names if getattr(options, name) is not None
    }
    if options.propensity:
        settings["propensity"] = tuple(options.propensity)
    name = options.name or source.path.absolute().name
    corpus = prepare(source, options.out, name=name, licence=options.licence, **settings)
    if options.json:
        show_json({**dataclasses.asdict(corpus.card), "sha256": corpus.sha256})
        return
    show(statistics_table(corpus.card))
    show_next(["xmcray", "train", METHODS[0], "--data", options.out, "--out", "RUN"])


def train_options(verb: argparse.ArgumentParser) -> None:
    """What it can be told."""
    verb.add_argument("method", metavar="METHOD", help=", ".join(METHODS))
    verb.add_argument(
        "--data", required=True, metavar="CORPUS", help="folder or URL that `xmcray prepare` wrote"
    )
    verb.add_argument("--out", required=True, metavar="RUN", help="folder of the run")
    verb.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML, or preset:METHOD/DATASET",
    )
    verb.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="one setting, over --config"
    )
    verb.add_argument(
        "--workers", type=int, metavar="N", help="training processes; 0 trains here, without Ray"
    )
    verb.add_argument(
        "--resume", choices=("auto", "never"), default="auto", help="never: RUN must be empty"
    )
    verb.add_argument(
        "--refit",
        action="store_true",
        help="then train on all of train for the best number of epochs",
    )
    verb.add_argument("--no-evaluate", action="store_true", help="leave the test split alone")
    verb.add_argument("--json", action="store_true", help="print the metrics as JSON")


def train(options: argparse.Namespace) -> None:
    """Trains, and exports and measures what came of it."""
    if options.method not in METHODS:
        raise ConfigError(config.unknown("method", options.method, METHODS))
    values: dict[str, Any] = {}
    for source in options.config:
        values = config.overlay(values, config.load_yaml(source))
    workers = [] if options.workers is None else [f"cluster.workers={options.workers}"]
    from xmcray.training.run import RunConfig

    settings = RunConfig.resolve(options.method, values, [*options.set, *workers])
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
        watch=watch_training,
    )
    corpus = Corpus.open(options.data, verify=False)  # `train` has compared every byte
    with counting("test queries", corpus.card.num_test) as progress:
        found = finish(run, corpus, not options.no_evaluate, progress)
    if options.json:
        show_json(None if found is None else found.to_json())
        return
    if found is not None:
        show_metrics({Path(options.out).name: found.to_json()})
    show(f"bundle {options.out}/bundle, report {options.out}/report.html")
    show_next(["xmcray", "search", f"{options.out}/bundle", "TEXT"])


def evaluate_options(verb: argparse.ArgumentParser) -> None:
    """What it can be told."""
    verb.add_argument("path", metavar="RUN_OR_BUNDLE")
    verb.add_argument("--data", required=True, metavar="CORPUS")
    verb.add_argument("--split", default="test", choices=("train", "test"))
    verb.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write metrics.json there, or print it"
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
    """Measures runs, bundles and stored answers."""
    paths = [options.path, *([options.compare] if options.compare else [])]
    kinds = [kind_of(path) for path in paths]
    if options.predictions and kinds[0] == "predictions":
        raise ConfigError(
            f"--predictions: {options.path} already holds the answers; name a run or a bundle"
        )
    from xmcray import storage

    for path in (options.predictions, None if options.json == "-" else options.json):
        if path:
            storage.check_file(path)
    from xmcray.data.corpus import Corpus
    from xmcray.evaluation.evaluate import compare

    corpus = Corpus.open(options.data)
    found = [_measure(path, corpus, options) for path in paths]
    if options.json and options.json != "-":
        storage.write_json(Path(options.json), found[0].to_json())
    if options.json == "-":
        show_json(found[0].to_json())
        return
    show_metrics({Path(options.path).name: found[0].to_json()}, deciles=True)
    if options.compare:
        from xmcray.evaluation.table import comparison_table

        show(comparison_table(compare(*found), *(Path(path).name for path in paths)))


def _measure(path: str, corpus: Corpus, options: argparse.Namespace) -> Evaluation:
    """Evaluates one of the paths; what the first of them answers goes to --predictions."""
    from xmcray.progress import counting
    from xmcray.training import outcome

    kind, split = kind_of(path), options.split
    with counting(f"{split} queries", len(corpus.split(split))) as progress:
        if kind == "predictions":
            return outcome.measure(
                outcome.stored_answers(path, corpus, split), corpus, split, progress=progress
            )
        from xmcray.retrieval.retriever import Retriever
        from xmcray.training.run import Run

        run = Run.open(path) if kind == "run" else None
        retriever = Retriever.load(outcome.bundle_of(run, corpus) if run else path)
        predictions = options.predictions if path == options.path else None
        found = outcome.measure_bundle(
            retriever,
            corpus,
            split,
            exact=options.exact,
            predictions=predictions,
            progress=progress,
        )
    if run and split == "test" and not options.exact:
        outcome.record(run, corpus, found)
    return found


def export_options(verb: argparse.ArgumentParser) -> None:
    """What it can be told."""
    verb.add_argument(
        "path", metavar="RUN", help="folder of a finished run; with --to also a bundle"
    )
    verb.add_argument("--out", required=True, metavar="BUNDLE", help="folder or URL to write")
    verb.add_argument(
        "--data", metavar="CORPUS", help="where the corpus is now (default: where the run found it)"
    )
    verb.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        help="index.* settings, as best.yaml of a sweep",
    )
    verb.add_argument("--set", action="append", metavar="A.B=C", help="one of them, over --config")
    verb.add_argument(
        "--to",
        choices=VECTOR_SYSTEMS,
        help="label vectors for a vector database, in place of a bundle",
    )


def export(options: argparse.Namespace) -> None:
    """A run to a bundle, or its label vectors to a vector database."""
    settings: dict[str, Any] = {}
    for source in options.config or ():
        settings = config.overlay(settings, config.load_yaml(source))
    settings = config.merge(settings, options.set or ())
    if options.to:
        if settings:
            raise ConfigError(
                f"--to {options.to} writes vectors without an index; leave out --config and --set"
            )
        from xmcray.retrieval.vector_export import export_vectors

        count = export_vectors(bundle_at(options.path, options.data), options.out, options.to)
        show(f"{count:,} label vectors; {options.out}/README.md says how {options.to} takes them")
        return
    from xmcray.training.run import Run

    run = Run.open(options.path)
    from xmcray.data.corpus import Corpus
    from xmcray.training.export import export_run

    export_run(run, options.out, Corpus.open(options.data) if options.data else None, settings)
    show_next(["xmcray", "search", options.out, "TEXT"])
