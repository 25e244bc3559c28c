"""The command line: `xmcray VERB ...`. Each verb imports what it needs when it runs, so that help and errors are quick.

Exit codes: 0 done; 2 the user's mistake, one line on stderr; 130 interrupted; 1 anything else.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from xmcray import __version__, config
from xmcray.errors import ConfigError, RunError, XmcrayError

if TYPE_CHECKING:
    from xmcray.data.corpus import Corpus
    from xmcray.evaluation.evaluate import Evaluation
    from xmcray.retrieval.memory import MemoryConfig

METHODS = (
    "astra",
    "dexml",
    "prime",
    "rae",
    "renee",
    "unidec",
)  # a test holds this to methods.base, which is slow to import
VECTOR_SYSTEMS = ("parquet", "qdrant", "milvus", "vespa")
MEMORY = "a setting of the memory: weight, temperature, keys or joint"
VOTERS = 3  # printed under an answer


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as every other one: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
            raise ConfigError(config.unknown("verb", arguments[0], list(VERBS)))
        options = parser().parse_args(arguments)
        options.run(options)
        sys.stdout.flush()
    except XmcrayError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command starts it again (a training continues where it was)", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parser() -> argparse.ArgumentParser:
    """All verbs and their options."""
    top = _Parser(prog="xmcray", description="Train and serve retrieval over millions of labels.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"xmcray {__version__}")
    verbs = top.add_subparsers(metavar="VERB", required=True, parser_class=_Parser)
    for name, (run, options, text, example) in VERBS.items():
        verb = verbs.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"example:\n  {example}",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        options(verb)
        verb.set_defaults(run=run)
    return top


def _quickstart_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--out", default="runs/quickstart", metavar="DIR", help="where to (default: %(default)s)")


def _quickstart(options: argparse.Namespace) -> None:
    from xmcray.quickstart import quickstart

    quickstart(options.out)


def _prepare_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("source", metavar="SRC", help="folder of raw files")
    verb.add_argument("--out", required=True, metavar="CORPUS", help="folder or URL to write")
    verb.add_argument("--format", metavar="F", help="layout of the raw files (default: found out)")
    verb.add_argument("--name", help="name in the card (default: that of SRC)")
    verb.add_argument("--licence", default="unknown", help="licence in the card")
    verb.add_argument("--max-len", type=int, metavar="N", help="tokens kept of a query (default: 128)")
    verb.add_argument("--label-max-len", type=int, metavar="N", help="tokens kept of a label text (default: 32)")
    verb.add_argument("--tokenizer", metavar="T", help="wordpiece (default), or a model's hub id or folder")
    verb.add_argument("--vocab-size", type=int, metavar="N", help="largest vocabulary to train")
    verb.add_argument("--propensity", type=float, nargs=2, metavar=("A", "B"), help="constants (default: 0.55 1.5)")
    verb.add_argument("--on-error", choices=("fail", "skip"), help="malformed rows: stop (default), or record and skip")
    verb.add_argument("--json", action="store_true", help="print the card as JSON")


def _prepare(options: argparse.Namespace) -> None:
    import dataclasses

    from xmcray.data.formats import detect
    from xmcray.storage import refuse_existing

    source = detect(options.source, options.format)
    refuse_existing(options.out)
    from xmcray.data.pipeline import prepare, statistics_table

    names = ("max_len", "label_max_len", "tokenizer", "vocab_size", "propensity", "on_error")
    settings = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.propensity:
        settings["propensity"] = tuple(options.propensity)
    name = options.name or source.path.absolute().name
    corpus = prepare(source, options.out, name=name, licence=options.licence, **settings)
    if options.json:
        _print_json({**dataclasses.asdict(corpus.card), "sha256": corpus.sha256})
        return
    _print(statistics_table(corpus.card))
    _next(["xmcray", "train", METHODS[0], "--data", options.out, "--out", "RUN"])


def _train_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("method", metavar="METHOD", help=", ".join(METHODS))
    verb.add_argument("--data", required=True, metavar="CORPUS", help="folder or URL that `xmcray prepare` wrote")
    verb.add_argument("--out", required=True, metavar="RUN", help="folder of the run")
    verb.add_argument("--config", action="append", default=[], metavar="FILE", help="YAML, or preset:METHOD/DATASET")
    verb.add_argument("--set", action="append", default=[], metavar="A.B=C", help="one setting, over --config")
    verb.add_argument("--workers", type=int, metavar="N", help="training processes; 0 trains here, without Ray")
    verb.add_argument("--resume", choices=("auto", "never"), default="auto", help="never: RUN must be empty")
    verb.add_argument("--refit", action="store_true", help="then train on all of train for the best number of epochs")
    verb.add_argument("--no-evaluate", action="store_true", help="leave the test split alone")
    verb.add_argument("--json", action="store_true", help="print the metrics as JSON")


def _train(options: argparse.Namespace) -> None:
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

    run = train(options.data, options.out, settings, resume=options.resume, refit=options.refit, watch=watch_training)
    corpus = Corpus.open(options.data, verify=False)  # `train` has compared every byte
    with counting("test queries", corpus.card.num_test) as progress:
        found = finish(run, corpus, not options.no_evaluate, progress)
    if options.json:
        _print_json(None if found is None else found.to_json())
        return
    if found is not None:
        _print_metrics({Path(options.out).name: found.to_json()})
    _print(f"bundle {options.out}/bundle, report {options.out}/report.html")
    _next(["xmcray", "search", f"{options.out}/bundle", "TEXT"])


def _evaluate_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="RUN_OR_BUNDLE")
    verb.add_argument("--data", required=True, metavar="CORPUS")
    verb.add_argument("--split", default="test", choices=("train", "test"))
    verb.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write metrics.json there, or print it")
    verb.add_argument("--compare", metavar="OTHER", help="a run, a bundle or predictions (.npz): paired test")
    verb.add_argument("--predictions", metavar="FILE", help="write the answers as a sparse .npz, queries x labels")
    verb.add_argument("--exact", action="store_true", help="compare all labels instead of using the index")


def _evaluate(options: argparse.Namespace) -> None:
    paths = [options.path, *([options.compare] if options.compare else [])]
    kinds = [_kind(path) for path in paths]
    if options.predictions and kinds[0] == "predictions":
        raise ConfigError(f"--predictions: {options.path} already holds the answers; name a run or a bundle")
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
        _print_json(found[0].to_json())
        return
    _print_metrics({Path(options.path).name: found[0].to_json()}, deciles=True)
    if options.compare:
        from xmcray.evaluation.table import comparison_table

        _print(comparison_table(compare(*found), *(Path(path).name for path in paths)))


def _measure(path: str, corpus: Corpus, options: argparse.Namespace) -> Evaluation:
    """Evaluates one of the paths; what the first of them answers goes to --predictions."""
    from xmcray.progress import counting
    from xmcray.training import outcome

    kind, split = _kind(path), options.split
    with counting(f"{split} queries", len(corpus.split(split))) as progress:
        if kind == "predictions":
            return outcome.measure(outcome.stored_answers(path, corpus, split), corpus, split, progress=progress)
        from xmcray.retrieval.retriever import Retriever
        from xmcray.training.run import Run

        run = Run.open(path) if kind == "run" else None
        retriever = Retriever.load(outcome.bundle_of(run, corpus) if run else path)
        predictions = options.predictions if path == options.path else None
        found = outcome.measure_bundle(
            retriever, corpus, split, exact=options.exact, predictions=predictions, progress=progress
        )
    if run and split == "test" and not options.exact:
        outcome.record(run, corpus, found)
    return found


def _kind(path: str) -> str:
    """Whether a path names a run, a bundle or a file of predictions."""
    if path.endswith(".npz"):
        return "predictions"
    if (Path(path) / "run.json").is_file():
        return "run"
    if "://" in path or (Path(path) / "manifest.json").is_file():
        return "bundle"
    found = "is neither" if Path(path).exists() else "does not exist"
    raise RunError(f"{path} {found}, expected a run (run.json) or a bundle (manifest.json)")


def _export_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="RUN", help="folder of a finished run; with --to also a bundle")
    verb.add_argument("--out", required=True, metavar="BUNDLE", help="folder or URL to write")
    verb.add_argument("--data", metavar="CORPUS", help="where the corpus is now (default: where the run found it)")
    verb.add_argument("--to", choices=VECTOR_SYSTEMS, help="label vectors for a vector database, in place of a bundle")


def _export(options: argparse.Namespace) -> None:
    if options.to:
        from xmcray.retrieval.vector_export import export_vectors

        count = export_vectors(_bundle(options.path, options.data), options.out, options.to)
        _print(f"{count:,} label vectors; {options.out}/README.md says how {options.to} takes them")
        return
    from xmcray.training.run import Run

    run = Run.open(options.path)
    from xmcray.data.corpus import Corpus
    from xmcray.training.export import export_run

    export_run(run, options.out, Corpus.open(options.data) if options.data else None)
    _next(["xmcray", "search", options.out, "TEXT"])


def _memory_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("encoder", metavar="ENCODER", help="a run, a bundle, the folder of an encoder, or a hub id")
    verb.add_argument("--data", required=True, metavar="CORPUS", help="whose training queries are remembered")
    verb.add_argument("--out", required=True, metavar="BUNDLE", help="folder or URL to write")
    verb.add_argument("--memory", action="append", default=[], metavar="A=B", help=MEMORY)


def _memory(options: argparse.Namespace) -> None:
    from xmcray import storage
    from xmcray.data.corpus import Corpus
    from xmcray.progress import counting
    from xmcray.training.memory import memory_bundle

    settings = _memory_config(options)
    storage.refuse_existing(options.out)
    corpus = Corpus.open(options.data)
    with counting("training queries and labels", corpus.card.num_train + corpus.card.num_labels) as progress:
        memory_bundle(options.encoder, corpus, options.out, settings, progress=progress)
    _next(["xmcray", "search", options.out, "TEXT", "--explain"])


def _memory_config(options: argparse.Namespace, base: MemoryConfig | None = None) -> MemoryConfig | None:
    """The settings of --memory over `base` or the defaults; None if there are none."""
    if not options.memory:
        return None
    from xmcray.retrieval.memory import MemoryConfig

    values = config.merge(config.dump(base or MemoryConfig()), options.memory)
    return config.build(MemoryConfig, values, "memory.")


def _labels_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("change", metavar="add|remove|annotate", choices=("add", "remove", "annotate"))
    verb.add_argument("path", metavar="BUNDLE", help="changes at one moment; a search that has it open goes on with it")
    files = "add: files of uid, text, attributes; annotate: of uid and attributes; remove: uids"
    verb.add_argument("what", metavar="LABELS.jsonl|UID", nargs="+", help=files)
    verb.add_argument("--out", metavar="NEW", help="write another bundle, folder or URL, and leave BUNDLE as it is")


def _labels(options: argparse.Namespace) -> None:
    from xmcray.retrieval.labels import add_labels, annotate_labels, read_attribute_sets, read_new_labels, remove_labels

    if options.change == "add":
        left = add_labels(options.path, read_new_labels(options.what), options.out)
    elif options.change == "annotate":
        left = annotate_labels(options.path, read_attribute_sets(options.what), options.out)
    else:
        left = remove_labels(options.path, options.what, options.out)
    _print(f"bundle {options.out or options.path} has {left:,} labels")
    _next(["xmcray", "search", options.out or options.path, "TEXT"])


def _search_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="BUNDLE", help="a bundle, or a finished run")
    verb.add_argument("texts", metavar="TEXT", nargs="+")
    verb.add_argument("-k", type=int, default=10, metavar="N", help="answers per text (default: %(default)s)")
    verb.add_argument("--explain", action="store_true", help="with a memory: name the training queries that voted")
    verb.add_argument("--memory", action="append", default=[], metavar="A=B", help=MEMORY)
    verb.add_argument("--json", action="store_true", help="print the answers as JSON")


def _search(options: argparse.Namespace) -> None:
    if options.k < 1:
        raise ConfigError(f"-k is {options.k}, expected at least 1")
    import dataclasses

    from xmcray.retrieval.retriever import Retriever

    retriever = Retriever.load(_bundle(options.path))
    memory = _memory_config(options, retriever.memory.config if retriever.memory else None)
    found = retriever.search(options.texts, options.k, memory=memory, explain=options.explain)
    if options.json:
        plain = [[dataclasses.asdict(answer) for answer in answers] for answers in found]
        for values in (a for answers in plain for a in answers if a["voters"] is None):
            del values["voters"]  # not asked for
        _print_json([{"query": text, "answers": a} for text, a in zip(options.texts, plain, strict=True)])
        return
    from xmcray.evaluation.table import answer_table

    for text, answers in zip(options.texts, found, strict=True):
        rows = []
        for answer in answers:
            rows.append((answer.score, answer.uid, answer.text))
            rows += [(v.weight, f"  by {v.uid}", v.text) for v in (answer.voters or ())[:VOTERS]]
        _print(answer_table(text, rows))


def _predict_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="BUNDLE", help="a bundle, or a finished run")
    verb.add_argument("queries", metavar="QUERIES", help="file or folder of text, or title and content: Parquet, JSONL")
    verb.add_argument("--out", required=True, metavar="DIR", help="folder or URL for predictions.npz and Parquet files")
    verb.add_argument("-k", type=int, default=10, metavar="N", help="answers per query (default: %(default)s)")
    verb.add_argument("--memory", action="append", default=[], metavar="A=B", help=MEMORY)
    verb.add_argument("--texts", action="store_true", help="also write the queries' texts")
    verb.add_argument("--workers", type=int, metavar="N", help="processes that answer (default: free CPUs, at most 8)")


def _predict(options: argparse.Namespace) -> None:
    from xmcray.predict import predict

    how: dict[str, Any] = {"memory": options.memory, "texts": options.texts, "workers": options.workers}
    rows = predict(_bundle(options.path), options.queries, options.out, options.k, **how)
    _print(f"{rows:,} queries answered in {options.out}: predictions.npz, predictions-*.parquet")
    _next(["xmcray", "evaluate", f"{options.out}/predictions.npz", "--data", "CORPUS"])


def _bundle(path: str, data: str | None = None) -> str:
    """The bundle at a path, or in the folder of a finished run; `data`: where the run's corpus is now."""
    if not (Path(path) / "run.json").is_file():
        return path
    from xmcray.data.corpus import Corpus
    from xmcray.training.outcome import bundle_of
    from xmcray.training.run import Run

    return bundle_of(Run.open(path), Corpus.open(data) if data else None)


def _serve_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("bundles", metavar="[NAME=]BUNDLE", nargs="+", help="folders or URLs; the first is the default")
    verb.add_argument("--host", default="127.0.0.1", help="beyond loopback only with tokens of your own")
    verb.add_argument("--port", type=int, default=8000, metavar="N", help="(default: %(default)s)")
    verb.add_argument("--grpc-port", type=int, default=0, metavar="N", help="gRPC too; needs --accept-open-ports")
    verb.add_argument("--mode", help="single, composed or auto (default: by the number of labels)")
    verb.add_argument("--replicas", type=int, metavar="N", help="processes that answer (default: 1)")
    verb.add_argument("--threads", type=int, metavar="N", help="of each process (default: 1)")
    verb.add_argument("--state-dir", metavar="DIR", help="label log, swaps and tokens (default: serve-state)")
    verb.add_argument("--token-file", metavar="FILE", help="mode 0600 (default: made in the state folder)")
    verb.add_argument("--admin-token-file", metavar="FILE", help="mode 0600 (default: made in the state folder)")
    verb.add_argument("--upload", metavar="URL", help="keep a copy of the label log there")
    verb.add_argument("--set", action="append", default=[], metavar="A=B", help="any other setting of the server")
    verb.add_argument("--accept-open-ports", action="store_true", help="allow a proxy that opens ports to everyone")


def _serve(options: argparse.Namespace) -> None:
    from xmcray.serving.run import serve_forever
    from xmcray.serving.settings import ServeConfig

    named = [(name, path) if equals else ("default", name) for name, equals, path in map(_parted, options.bundles)]
    bundles = dict(named)
    if len(bundles) < len(named):
        raise ConfigError("several bundles go by one name; write each as NAME=BUNDLE")
    names = ("mode", "replicas", "threads", "state_dir", "token_file", "admin_token_file", "upload")
    values = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    settings = config.build(ServeConfig, config.merge({**values, "bundles": bundles}, options.set))

    def ready(url: str) -> None:
        print(f"serving {', '.join(bundles)} on {url}", flush=True)
        print(f"token: {settings.token_file or Path(settings.state_dir) / 'token'}", flush=True)

    ports = {"grpc_port": options.grpc_port, "accept_open_ports": options.accept_open_ports}
    serve_forever(settings, options.host, options.port, **ports, ready=ready)


def _parted(bundle: str) -> tuple[str, str, str]:
    """NAME=BUNDLE; a path or URL may hold an equals sign of its own."""
    name, equals, path = bundle.partition("=")
    return (name, equals, path) if equals and not set("/.:") & set(name) else (bundle, "", "")


def _print(what: Any) -> None:
    """A table or a line on stdout; a pipe gets lines long enough not to be wrapped."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(what, markup=False) if isinstance(what, str) else console.print(what)


def _print_metrics(runs: dict[str, dict[str, Any]], deciles: bool = False) -> None:
    from xmcray.evaluation import table

    _print(table.metrics_table(runs))
    measured = next(iter(runs.values()))
    _print(table.segment_table(measured))
    if deciles:
        _print(table.decile_table(measured))
    if measured.get("index_recall"):
        _print(table.index_table(measured))


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def _next(command: Sequence[str]) -> None:
    """What to type now."""
    print(f"next: {shlex.join(command)}")


VERBS: dict[str, tuple[Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None], str, str]] = {
    "quickstart": (
        _quickstart,
        _quickstart_options,
        "train on the documentation of installed packages and answer five queries",
        "xmcray quickstart --out runs/quickstart",
    ),
    "prepare": (
        _prepare,
        _prepare_options,
        "turn raw files into a corpus",
        "xmcray prepare raw/msdocs --out corpora/msdocs --max-len 64",
    ),
    "train": (
        _train,
        _train_options,
        "train a method on a corpus; the same command continues an interrupted run",
        "xmcray train astra --data corpora/msdocs --out runs/a --workers 2 --set optim.epochs=20",
    ),
    "evaluate": (
        _evaluate,
        _evaluate_options,
        "measure a run or a bundle, and compare it with another",
        "xmcray evaluate runs/a --data corpora/msdocs --compare runs/b",
    ),
    "export": (
        _export,
        _export_options,
        "write the bundle of a finished run, or with --to label vectors for a vector database",
        "xmcray export runs/a --out bundles/a",
    ),
    "memory": (
        _memory,
        _memory_options,
        "let the training queries of a corpus vote, with any encoder and without training",
        "xmcray memory runs/a --data corpora/msdocs --out bundles/a-memory --memory weight=0.5",
    ),
    "labels": (
        _labels,
        _labels_options,
        "add labels to a bundle, remove some, or say what they can be filtered by, without training",
        "xmcray labels add bundles/a new_labels.jsonl",
    ),
    "search": (
        _search,
        _search_options,
        "answer texts from a bundle",
        'xmcray search bundles/a "solve a sparse linear system" -k 5',
    ),
    "predict": (
        _predict,
        _predict_options,
        "answer a file of queries; the same command continues an interrupted one",
        "xmcray predict bundles/a queries.parquet --out predictions/a -k 100",
    ),
    "serve": (
        _serve,
        _serve_options,
        "answer over HTTP, on Ray Serve",
        "xmcray serve bundles/a --port 8000",
    ),
}
